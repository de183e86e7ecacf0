"""What processes tell each other to set up a group; one fails, one stays away.

The steps of `p2p` run here with an extension that only notes what it is asked for.
"""

from __future__ import annotations

import dataclasses
import pathlib
import time
import types

import jax
import numpy as np
import pytest

import cases
import jax_ep
from harness import AXIS, config_of, make_mesh
from jax_ep._jax_compat import distributed_client
from jax_ep.exchange import Exchange
from jax_ep.topology import local_places, places
from jax_ep.transports import p2p, p2p_setup
from jax_ep.transports.p2p import P2pTransport
from ranks import run_ranks

N_PROCESSES = 3
SHORT_S = 2.0


@pytest.mark.multiprocess
def test_processes_of_a_job_exchange_what_they_know():
    run_ranks(N_PROCESSES, "test_exchange:check_job", n_local_devices=2, timeout_s=120)


@pytest.mark.usefixtures("one_process")
def test_one_process_needs_no_exchange():
    def never(key, payload):
        raise AssertionError("alone, and asked")

    exchange = Exchange.over(make_mesh(4), "alone", 1.0, never)
    assert exchange.is_alone
    assert exchange("step", b"mine") == [b"mine"]
    with pytest.raises(RuntimeError, match="^no memory$"):
        exchange.gather("another", fail("no memory"))


def test_a_custom_exchange_gets_keys_and_must_give_all_payloads():
    keys = []

    def custom(key, payload):
        keys.append(key)
        return answers(payload)

    exchange = Exchange("group/1", (0, 4), 4, 1.0, custom)
    answers = lambda payload: [b"theirs", payload]  # noqa: E731
    assert exchange("step", b"mine") == [b"theirs", b"mine"]
    assert keys == ["group/1/step"]
    for wrong in (lambda p: [p], lambda p: [p, b"theirs"], lambda p: [b"", p, b""]):
        answers = wrong
        with pytest.raises(ValueError, match=r"processes \(0, 4\), in this order"):
            exchange("step", b"mine")


def test_every_exchange_has_a_name_of_its_own():
    mesh = make_mesh(2)
    names = [Exchange.over(mesh, name, 1.0).name for name in ("one", "one", "two")]
    assert len(set(names)) == 3


class Extension:
    """Notes which groups are open; fails at the step called `fails_at`."""

    def __init__(self, fails_at: str = "", host: str = "here", reason: str = ""):
        self.fails_at, self.host, self.reason = fails_at, host, reason
        self.users: dict[str, int] = {}
        self.allocated: set[str] = set()
        self.peers: list = []

    def host_identity(self):
        return self.host

    def why_no_peer_access(self, ordinals):
        return self.reason

    def allocate_group(self, key, devices, n_ranks):
        if self.fails_at == "allocate":
            raise RuntimeError("no memory")
        self.users[key] = 1
        self.allocated.add(key)
        return [f"{row}.{rank}".encode() for _, row, rank in devices]

    def connect_group(self, key, peers):
        if self.fails_at == "connect":
            raise RuntimeError("no way")
        self.peers = peers

    def disconnect_group(self, key):
        if key not in self.users:
            return False
        self.users[key] -= 1
        if self.users[key] == 0:
            del self.users[key]
            return True
        return False

    def free_group(self, key):
        self.allocated.remove(key)

    def failure(self, key, ordinal):
        return self.reason


def use(extension) -> None:
    """Puts an extension in the place of the CUDA one, in this process for good."""
    load = lambda: extension  # noqa: E731
    p2p_setup._cuda_ffi = types.SimpleNamespace(load=load)


def fail(reason: str):
    def make():
        raise MemoryError(reason)

    return make


def exchange_of_all(name: str, timeout_s: float = 60.0) -> Exchange:
    mesh = make_mesh(len(jax.devices()))
    return Exchange.over(mesh, name, timeout_s)


def check_job() -> None:
    """All checks, one after the other, in each process of one job."""
    check_payloads()
    check_failure()
    check_missing_process()
    check_some_of_the_processes()
    check_collectives()
    check_custom_exchange_of_a_group()
    check_choice()
    check_buffers()
    check_a_failed_group_is_not_shared()
    check_close_without_the_others()


def check_payloads() -> None:
    """Everybody gets everybody's, in order, under one name again and again."""
    me = jax.process_index()
    for size in (0, 1, 100_000):
        payloads = exchange_of_all("all")("step", bytes([me]) * size)
        assert payloads == [bytes([p]) * size for p in range(N_PROCESSES)]


def check_failure() -> None:
    """What one process fails with, all raise; the next exchange works."""
    exchange = exchange_of_all("failing")
    make = fail("no memory") if jax.process_index() == 1 else lambda: b"fine"
    with pytest.raises(RuntimeError, match="^process 1: no memory$") as caught:
        exchange.gather("step", make)
    is_own = isinstance(caught.value.__cause__, MemoryError)
    assert is_own == (jax.process_index() == 1)
    assert exchange.gather("next", lambda: b"fine") == [b"fine"] * N_PROCESSES


def check_missing_process() -> None:
    """The others wait for the limit, no longer, and say who is missing."""
    exchange = exchange_of_all("missing", SHORT_S)
    if jax.process_index() != 2:
        begin = time.monotonic()
        with pytest.raises(TimeoutError, match=r"waited 2 s for process 2 .*ep_init"):
            exchange.gather("step", lambda: b"here")
        assert SHORT_S <= time.monotonic() - begin < SHORT_S + 5
    exchange_of_all("after the missing")("step", b"")


def check_some_of_the_processes() -> None:
    """A mesh without process 1: only the others take part."""
    some = [d for d in jax.devices() if d.process_index != 1]
    if jax.process_index() != 1:
        exchange = Exchange.over(jax.sharding.Mesh(np.array(some), (AXIS,)), "some", 60)
        assert exchange.processes == (0, 2)
        assert exchange("step", bytes([jax.process_index()])) == [b"\0", b"\2"]


def check_collectives() -> None:
    """Without the runtime's client, payloads of any size go through the devices."""
    exchange = dataclasses.replace(exchange_of_all("collectives"), client=None)
    payloads = exchange("step", b"x" * (10 * jax.process_index()))
    assert payloads == [b"x" * (10 * p) for p in range(N_PROCESSES)]
    with pytest.raises(RuntimeError, match="some of the processes needs"):
        some = dataclasses.replace(exchange, processes=(0, 1, 2, 7))
        some("another", b"")


def check_custom_exchange_of_a_group() -> None:
    """`ep_init` takes it; what needs no exchange does not call it."""

    def never(key, payload):
        raise AssertionError("xla needs no exchange")

    n_ranks = len(jax.devices())
    config = config_of(cases.SMALL[2].but(n_experts=n_ranks))
    mesh = make_mesh(n_ranks)
    group = jax_ep.ep_init(mesh, AXIS, config, exchange=never)
    assert group.transport == "xla"


def check_choice() -> None:
    """Every process gives the same reason, whoever has it."""
    me, mesh = jax.process_index(), make_mesh(len(jax.devices()))
    here = local_places(mesh, AXIS)
    for other, reason in (
        (Extension(), None),
        (Extension(host="there"), "process 1 is on another host than process 0; use"),
        (Extension(reason="device 0 does not reach"), "process 1: device 0 does not"),
    ):
        use(other if me == 1 else Extension())
        answer = p2p_setup.why_not(here, exchange_of_all("choice"))
        assert (answer or "").startswith(reason or ""), answer
        assert (answer is None) == (reason is None)
    assert "no device" in p2p_setup.why_not((), exchange_of_all("nobody"))


def group_like(key: str, mesh) -> types.SimpleNamespace:
    """What the set-up needs to know of a group."""
    config = types.SimpleNamespace(skip_a2a=False)
    return types.SimpleNamespace(key=key, mesh=mesh, axis_name=AXIS, config=config)


def check_buffers() -> None:
    """Addresses of all places reach everybody; a failed step leaves nothing behind."""
    me, mesh = jax.process_index(), make_mesh(3, dp=2, reverse=True)
    group = group_like("group", mesh)
    everywhere = {(p.row, p.rank) for p in places(mesh, AXIS)}
    for fails_at, error in (("allocate", "no memory"), ("connect", "no way"), ("", "")):
        extension = Extension(fails_at if me == 1 else "")
        use(extension)
        exchange = exchange_of_all("buffers")
        if error:
            with pytest.raises(RuntimeError, match=f"^process 1: {error}$"):
                p2p_setup.open_buffers(group, exchange, n_ranks=3)
        else:
            p2p_setup.open_buffers(group, exchange, n_ranks=3)
            assert {peer[:2] for peer in extension.peers} == everywhere
            assert all(a == f"{r}.{k}".encode() for r, k, a in extension.peers)
            extension.users["group"] += 1
            assert not p2p_setup.disconnect("group")
            assert extension.allocated
            assert p2p_setup.disconnect("group")
            p2p_setup.free_buffers("group", exchange)
        assert not extension.users
        assert not extension.allocated


def check_a_failed_group_is_not_shared() -> None:
    """Nor does it hide that an equal one cannot be opened beside it."""
    mesh = make_mesh(len(jax.devices()))
    group, reason = group_like("failed", mesh), "rank 1 waited 2 s for rank 0."
    transport = P2pTransport()
    transport._exchanges["failed"] = exchange_of_all("failed")
    extension = Extension(reason=reason if jax.process_index() == 1 else "")
    p2p._cuda_ffi = types.SimpleNamespace(load=lambda: extension, register=lambda: None)
    with pytest.raises(RuntimeError, match=f"^process 1: .*{reason} Close it first"):
        transport.open(group, exchange_of_all("failed"))
    assert not extension.allocated


def check_close_without_the_others() -> None:
    """A group is freed after a while, with a warning, if a peer never closes it."""
    mesh = make_mesh(len(jax.devices()))
    group = group_like("left", mesh)
    extension = Extension()
    use(extension)
    exchange = exchange_of_all("left", timeout_s=60.0)
    p2p_setup.open_buffers(group, exchange, n_ranks=6)
    if jax.process_index() == 0:
        begin = time.monotonic()
        exchange = dataclasses.replace(exchange, timeout_s=SHORT_S)
        with pytest.warns(RuntimeWarning, match="waited 2 s for process 1, 2"):
            assert p2p_setup.disconnect("left")
            p2p_setup.free_buffers("left", exchange)
        assert time.monotonic() - begin < SHORT_S + 5
        assert not extension.allocated
    exchange_of_all("the end")("step", b"")


@pytest.mark.multiprocess
def test_a_custom_exchange_serves_instead_of_the_runtime(tmp_path):
    pathlib.Path(tmp_path, "board").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_EP_TEST_BOARD", str(tmp_path / "board"))
        run_ranks(2, "test_exchange:check_files", n_local_devices=1, timeout_s=90)


def check_files() -> None:
    """An exchange through files, for the steps of `p2p`."""
    import os

    board, me = pathlib.Path(os.environ["JAX_EP_TEST_BOARD"]), jax.process_index()

    def through_files(key, payload):
        name = key.replace("/", "_")
        (board / f"{name}.{me}.new").write_bytes(payload)
        (board / f"{name}.{me}.new").rename(board / f"{name}.{me}")
        files = [board / f"{name}.{process}" for process in range(2)]
        end = time.monotonic() + 30
        while not all(file.exists() for file in files):
            assert time.monotonic() < end, "nobody came"
            time.sleep(0.01)
        return [file.read_bytes() for file in files]

    assert distributed_client() is not None
    mesh = make_mesh(2)
    extension = Extension()
    use(extension)
    exchange = Exchange.over(mesh, "files", 30.0, through_files)
    assert p2p_setup.why_not(local_places(mesh, AXIS), exchange) is None
    group = group_like("files", mesh)
    p2p_setup.open_buffers(group, exchange, n_ranks=2)
    assert [peer[1] for peer in extension.peers] == [0, 1]
    assert p2p_setup.disconnect("files")
    p2p_setup.free_buffers("files", exchange)
    assert len(list(board.iterdir())) == 2 * 4  # choice, workspaces, connected, closed
