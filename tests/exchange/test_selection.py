"""Which transport `ep_init` selects on hosts with GPUs, and what it logs: with fake GPUs.

A fake host answers what the CUDA extension of a process there would.
"""

import dataclasses
import json
import logging
import types

import jax
import numpy as np
import pytest

import cases
import jax_ep
from harness import AXIS, config_of
from jax_ep.ffi import extension
from jax_ep.geometry import Geometry
from jax_ep.group import select
from jax_ep.processes.exchange import Exchange
from jax_ep.processes.messages import Message

N_RANKS = 4


@dataclasses.dataclass(frozen=True)
class FakeGpu:
    """The facts of a device that the selection looks at."""

    id: int
    process_index: int
    local_hardware_id: int
    platform: str = "gpu"


def gpu_mesh(processes, names=("data", AXIS)) -> jax.sharding.Mesh:
    """A mesh of fake GPUs; `processes` has the shape of the mesh."""
    processes = np.asarray(processes)
    gpus = np.empty(processes.shape, object)
    seen = dict.fromkeys(processes.flat, 0)
    for i, (at, process) in enumerate(np.ndenumerate(processes)):
        gpus[at] = FakeGpu(i, int(process), seen[process])
        seen[process] += 1
    return types.SimpleNamespace(
        devices=gpus, axis_names=names, shape=dict(zip(names, gpus.shape, strict=True))
    )


def cpu_mesh() -> jax.sharding.Mesh:
    """A mesh of fake CPU devices of process 0."""
    mesh = gpu_mesh([[0] * N_RANKS])
    for i, gpu in np.ndenumerate(mesh.devices):
        mesh.devices[i] = dataclasses.replace(gpu, platform="cpu")
    return mesh


class Selection:
    """Selects for one process of a job, process 0, whose other processes answer as told."""

    def __init__(self, monkeypatch):
        self.patch, self.asked = monkeypatch, []
        monkeypatch.setattr(extension, "load_cuda", lambda: self)
        self.reason = ""  # what keeps process 0 from p2p
        self.hosts = {}  # by process; by default, each process is a host

    def host_identity(self) -> str:
        return self.hosts.get(0, "host of 0")

    def peer_access_problem(self, ordinals) -> str:
        self.asked.append(sorted(ordinals))
        return self.reason

    def exchange(self, key: str, payload: bytes) -> list[bytes]:
        def answer(process: int) -> bytes:
            host = self.hosts.get(process, f"host of {process}")
            step = key.rpartition("/")[2]
            payload = host if step == "hosts" else json.dumps([host, None])
            return Message("selection", step, payload.encode()).encode()

        return [payload if p == 0 else answer(p) for p in self.processes]

    def __call__(self, mesh, transport="auto", **changes) -> str:
        """The name of the transport that is selected."""
        self.processes = tuple(sorted({gpu.process_index for gpu in mesh.devices.flat}))
        self.patch.setattr(
            Geometry,
            "local_coordinates",
            property(lambda g: tuple(c for c in g.coordinates if c.device.process_index == 0)),
        )
        config = config_of(cases.SMALL[N_RANKS], **({"n_nodes": None} | changes))
        exchange = Exchange("selection", self.processes, 0, 1.0, self.exchange)
        connection = select._select(Geometry(mesh, AXIS, config, transport), exchange)
        self.n_nodes = connection.calls.geometry.routed.n_nodes
        return connection.name


@pytest.fixture
def selection(monkeypatch):
    return Selection(monkeypatch)


@pytest.fixture
def log(caplog):
    select._log_once.cache_clear()
    caplog.set_level(logging.INFO, "jax_ep")
    return caplog


def test_data_parallel_hosts_each_take_p2p(selection, log):
    assert selection(gpu_mesh([[0] * 4, [1] * 4])) == "p2p"
    assert [record.levelname for record in log.records] == ["INFO"]
    assert log.messages == [
        "Transport 'p2p' serves the axis 'ep' of the mesh (data=2, ep=4) on gpu."
    ]


def test_data_parallel_hosts_with_a_process_per_gpu_take_p2p(selection):
    selection.hosts = dict.fromkeys(range(4), "a") | dict.fromkeys(range(4, 8), "b")
    assert selection(gpu_mesh([range(4), range(4, 8)])) == "p2p"


def test_the_axes_may_be_in_any_order(selection):
    processes = np.array([[0] * 4, [1] * 4]).T
    assert selection(gpu_mesh(processes, (AXIS, "data"))) == "p2p"


def test_a_replica_on_two_hosts_is_left_to_xla_with_a_warning(selection, log):
    mesh = gpu_mesh([[0, 0, 0, 0], [0, 0, 1, 1]])
    assert selection(mesh) == "xla"
    assert [record.levelname for record in log.records] == ["WARNING"]
    assert "Transport 'xla' serves" in log.text
    assert "'p2p' cannot: process 1 is on another host than process 0" in log.text
    assert "all devices along the axis 'ep' must be on one host" in log.text
    assert "give the number of hosts as EPConfig(n_nodes=...)" in log.text
    assert "'host' cannot: it serves CPU devices; the mesh has gpu." in log.text
    with pytest.raises(ValueError, match="'p2p' cannot serve: process 1 is on another host"):
        selection(mesh, "p2p")


def test_cpus_without_the_extension_are_left_to_xla_with_a_warning(selection, log, monkeypatch):
    mesh = cpu_mesh()
    assert selection(mesh) == "host"
    assert selection(mesh, n_nodes=2) == "host"

    error = ModuleNotFoundError("No module named 'jax_ep._ffi'")

    def find_nothing():
        raise error

    monkeypatch.setattr(extension, "load_host", find_nothing)
    assert selection(mesh) == "xla"
    assert [record.levelname for record in log.records] == ["INFO", "INFO", "WARNING"]
    assert "'host' cannot: the extension jax_ep._ffi cannot be loaded" in log.text
    assert extension.why_missing("_ffi", error) in log.text  # with what to do among the sources


def test_a_process_without_devices_asks_nobody(selection, monkeypatch):
    monkeypatch.setattr(selection, "exchange", lambda key, payload: pytest.fail(key))
    with pytest.raises(ValueError, match="this process holds no device of the mesh"):
        selection(gpu_mesh([[1, 1, 2, 2]]), "p2p")


def test_processes_of_one_host_share_replicas(selection):
    selection.hosts = {0: "here", 1: "here"}
    assert selection(gpu_mesh([[0, 0, 1, 1]])) == "p2p"


def test_nodes_on_hosts_of_their_own_are_served_by_p2p(selection, log):
    assert selection(gpu_mesh([[0, 0, 1, 1]]), n_nodes=2) == "p2p"
    assert log.messages == [
        "Transport 'p2p' serves the axis 'ep' of the mesh (data=1, ep=4) on gpu inside 2 nodes, "
        "with XLA between them."
    ]
    assert selection(gpu_mesh([[0, 0, 1, 1]]), "p2p", n_nodes=2) == "p2p"


@pytest.mark.parametrize(
    ("processes", "n_nodes"),
    [
        ([[0, 0, 1, 1]], 2),
        ([[0, 0, 1, 1], [2, 2, 3, 3]], 2),
        ([[0, 1, 2, 3]], 4),
        ([[0] * 4, [1] * 4], 1),
    ],
)
def test_nodes_are_read_from_the_hosts(processes, n_nodes, selection):
    assert selection(gpu_mesh(processes)) == "p2p"
    assert selection.n_nodes == n_nodes


@pytest.mark.parametrize("row", [[0, 0, 0, 1], [0, 1, 0, 1], [0, 1, 1, 0]])
def test_hosts_that_do_not_split_the_ranks_evenly_are_no_nodes(row, selection, log):
    assert selection(gpu_mesh([row])) == "xla"
    assert selection.n_nodes == 1
    assert "give the number of hosts as EPConfig(n_nodes=...)" in log.text


def test_a_config_that_says_one_node_is_taken_at_its_word(selection):
    assert selection(gpu_mesh([[0, 0, 1, 1]]), n_nodes=1) == "xla"


def test_nodes_of_one_host_are_served_at_once(selection, log):
    selection.hosts = {0: "here", 1: "here"}
    assert selection(gpu_mesh([[0, 0, 1, 1]]), n_nodes=2) == "p2p"
    assert "nodes" not in log.text


def test_nodes_that_do_not_fit_the_hosts_are_left_to_xla(selection, log):
    mesh = gpu_mesh([[0, 1, 0, 1]])
    assert selection(mesh, n_nodes=2) == "xla"
    assert "all devices of a node, 2 consecutive ranks along the axis 'ep'," in log.text
    assert [record.levelname for record in log.records] == ["WARNING"]


def test_gpus_of_different_nodes_need_not_reach_each_other(selection):
    selection.reason = "no peer access"
    selection(gpu_mesh([[0] * 4]), n_nodes=2)
    assert selection.asked[-1] == [0, 1]
    assert [0, 1, 2, 3] in selection.asked


@pytest.mark.parametrize("layout", ["row_major", "atoms"])
def test_p2p_has_every_layout_of_scales_intra_node(layout, selection):
    options = {"token_format": jax_ep.MXFP8(layout), "hidden_size": 128, "n_nodes": 2}
    assert selection(gpu_mesh([[0, 0, 1, 1]]), row_alignment=32, **options) == "p2p"


def test_both_reasons_are_given_where_p2p_cannot_serve_nodes_either(selection, log):
    options = {"n_experts": 64, "top_k": 33, "n_nodes": 2}
    assert selection(gpu_mesh([[0, 0, 1, 1]]), **options) == "xla"
    assert "Nor can it serve each node: top_k must be at most 32; got 33." in log.text


def test_ranks_that_exchange_nothing_may_be_anywhere(selection):
    assert selection(gpu_mesh([[0, 0, 1, 1]]), skip_a2a=True) == "p2p"


def test_gpus_of_different_replicas_need_not_reach_each_other(selection):
    selection(gpu_mesh([[0] * 4, [0] * 4]))
    assert selection.asked == [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize(
    "options, message",
    [
        ({}, "the ranks form one; see EPConfig.n_nodes"),
        ({"n_nodes": 2, "skip_a2a": True}, "with skip_a2a nothing travels between ranks"),
    ],
)
def test_nvshmem_needs_several_nodes(options, message, selection):
    with pytest.raises(ValueError, match=f"'nvshmem' cannot serve: .*{message}"):
        selection(gpu_mesh([[0, 0, 0, 0]]), transport="nvshmem", **options)


def test_a_requested_transport_is_not_logged(selection, log):
    selection(gpu_mesh([[0] * 4, [1] * 4]), "p2p")
    assert not log.records


def test_each_choice_is_logged_once(selection, log):
    for reason, n_records in (("", 1), ("no driver", 2), ("no driver", 2), ("", 2)):
        selection.reason = reason
        selection(gpu_mesh([[0] * 4]))
        assert len(log.records) == n_records
