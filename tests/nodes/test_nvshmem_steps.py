"""The steps in which processes open a rail of `nvshmem`, without NVSHMEM or GPUs."""

import itertools
import json
import queue
import threading
import time
import warnings
from types import SimpleNamespace

import pytest

import jax_ep
from fake_store import FakeClient, in_threads
from harness import AXIS, make_mesh
from jax_ep.ffi import extension
from jax_ep.geometry import Geometry
from jax_ep.nodes.nvshmem import bootstrap as nvshmem_bootstrap
from jax_ep.nodes.nvshmem import connection as nvshmem
from jax_ep.nodes.nvshmem.connection import Room, room_problem, why_no_room
from jax_ep.processes import exchange as exchange_module
from jax_ep.processes.messages import Message
from jax_ep.transports.p2p import P2pConnection


class Answers:
    """An exchange in which the other processes answer what `others` says, by step."""

    process, processes, is_alone, timeout_s = 0, (0, 1), False, 60.0

    def __init__(self, **others):
        self.others = others
        self.steps = []

    def gather(self, step, make, timeout_s=None):
        self.steps.append(step)
        own = make()
        other = self.others[step.replace(" ", "_")]
        if isinstance(other, Exception):
            raise other
        return [own, other]


def library(**functions):
    return SimpleNamespace(
        **{name: lambda *_, value=v, **__: value for name, v in functions.items()}
    )


def rooms(*processes) -> dict[int, Room]:
    """By process, from the name of its GPU, its multiprocessors, and whether there is MPS."""
    return {process: Room(*room) for process, room in enumerate(processes)}


@pytest.mark.parametrize(
    "processes",
    [
        [("a", 132, True)],
        [("a", 64, False), ("b", 64, True)],
        [("a", 132, True)] * 2,  # of one node or of two
        [("a", 132, True), ("b", 132, True)] * 2,
        [("a", 132, False)] * 8,  # they take turns
        [("a", 192, True)] * 3,
    ],
)
def test_exchanges_that_fit_beside_each_other_are_served(processes):
    assert why_no_room(rooms(*processes), n_blocks=64) is None


@pytest.mark.parametrize(
    ("processes", "wanted"),
    [
        ([("a", 132, True)] * 3, "processes 0, 1 and 2 share a GPU of 132 by MPS. Let at most 2 "),
        ([("b", 132, True), *[("a", 132, True)] * 3], "processes 1, 2 and 3 share a GPU of 132 "),
        ([("a", 66, True)] * 2, "processes 0 and 1 share a GPU of 66 by MPS. Let at most 1 "),
        ([("a", 132, True), ("a", 127, False)], "processes 0 and 1 share a GPU of 127 by MPS."),
        ([("a", 132, True), ("b", 63, False)], "the GPU of process 1 has 63. Use transport='p2p'."),
        ([("a", 40, True)] * 2, "the GPU of process 0 has 40. Use transport='p2p'."),
    ],
)
def test_exchanges_that_would_keep_each_other_out_are_refused(processes, wanted):
    reason = why_no_room(rooms(*processes), n_blocks=64)
    assert reason.startswith("an inter-node exchange needs 64 multiprocessors for each rank; ")
    assert wanted in reason


def ask_for_room(own, others, process) -> str | None:
    answers = [json.dumps(each).encode() for each in others]
    answers.insert(process, json.dumps(own).encode())

    class Others(Answers):
        processes = tuple(range(len(answers)))

        def __call__(self, step, payload):
            assert (step, payload) == ("rail room", answers[process])
            return answers

    fake = SimpleNamespace(n_blocks=64, room=lambda device: own if device == 5 else None)
    return room_problem(fake, Others(), device=5)


def test_all_processes_refuse_alike():
    """Also the one whose own GPU has room."""
    every = [["a", 132, True], ["b", 100, True], ["b", 100, True]]
    reasons = {ask_for_room(own, every[:i] + every[i + 1 :], i) for i, own in enumerate(every)}
    (reason,) = reasons
    assert "processes 1 and 2 share a GPU of 100 by MPS" in reason
    assert ask_for_room(every[0], every[1:2], 0) is None


@pytest.mark.parametrize(
    "other", [["a", 132], ["a", True, True], ["a", 0, True], [1, 132, True], {}]
)
def test_room_of_another_form_is_refused(other):
    with pytest.raises(RuntimeError, match="process 1: what its GPU has room for"):
        ask_for_room(["a", 132, True], [other], 0)


def test_processes_that_have_joined_make_one_step():
    exchange = Answers(nvshmem_id=b"joined")
    nvshmem_bootstrap.join(library(has_joined=True), exchange, device=0)
    assert exchange.steps == ["nvshmem id"]


@pytest.mark.parametrize(("has_joined", "other"), [(True, b""), (False, b"joined")])
def test_all_processes_raise_if_some_have_joined(has_joined, other):
    exchange = Answers(nvshmem_id=other)
    with pytest.raises(RuntimeError, match="initialized in 1 of 2 processes"):
        nvshmem_bootstrap.join(library(has_joined=has_joined, make_id=b"id"), exchange, 0)


def run_step(step, exchange, run):
    """A step of NVSHMEM's, of which `run` is all that it does."""
    fake = library(has_joined=False, make_id=b"id", pinned=-1, free=[])
    fake.join = fake.allocate = lambda *_: run()
    if step == "initialization":
        return nvshmem_bootstrap.join(fake, exchange, device=0)
    return nvshmem_bootstrap.find_heap(fake, exchange, "key", n_bytes=1)


def failing():
    raise RuntimeError("as NVSHMEM says")


@pytest.mark.parametrize("step", ["initialization", "allocation of memory"])
def test_steps_of_nvshmem_have_a_time_limit(step, monkeypatch):
    monkeypatch.setattr(nvshmem_bootstrap, "min_step_s", 0.1)
    monkeypatch.setattr(nvshmem_bootstrap, "_unfinished", None)
    exchange = Answers(nvshmem_id=b"", nvshmem_joined=b"", heaps=b"[[], []]", heap=b"9")
    assert run_step(step, exchange, lambda: 9) == (9 if step.startswith("alloc") else None)
    with pytest.raises(RuntimeError, match="as NVSHMEM says"):
        run_step(step, exchange, failing)
    assert nvshmem_bootstrap._unfinished is None

    released = threading.Event()
    exchange.timeout_s = 0.2
    wanted = f"NVSHMEM's {step} has not ended within 0.2 s"
    with pytest.raises(TimeoutError, match=wanted):
        run_step(step, exchange, released.wait)
    assert nvshmem_bootstrap.why_missing().startswith(wanted)
    released.set()


def test_an_interrupted_step_is_not_made_again(monkeypatch):
    monkeypatch.setattr(nvshmem_bootstrap, "_unfinished", None)
    monkeypatch.setattr(queue.Queue, "get", raising_interrupt)
    with pytest.raises(KeyboardInterrupt):
        run_step("initialization", Answers(nvshmem_id=b"", nvshmem_joined=b""), lambda: None)
    assert "was interrupted" in nvshmem_bootstrap.why_missing()


def raising_interrupt(*_, **__):
    raise KeyboardInterrupt


def test_the_limit_of_a_step_is_told_where_a_peer_has_died(monkeypatch):
    monkeypatch.setattr(nvshmem_bootstrap, "min_step_s", 0.1)
    monkeypatch.setattr(nvshmem_bootstrap, "_unfinished", None)
    exchange = exchange_module.Exchange(
        "group", processes=(0, 1), process=0, timeout_s=0.3, client=FakeClient()
    )
    # Process 1 answers the first step, and nothing else.
    answer = Message("group", "nvshmem id", b"+").encode()
    exchange.client.values["jax_ep/0-1/open/0/0/1"] = answer
    monkeypatch.setattr(exchange_module, "_AFTER_TIMEOUT_S", 0.1)
    released = threading.Event()
    begin = time.monotonic()
    with pytest.raises(TimeoutError, match="has not ended within 0.3 s.*Restart the job"):
        run_step("initialization", exchange, released.wait)
    released.set()
    assert time.monotonic() - begin < 0.55  # not twice the limit


@pytest.mark.parametrize(
    ("pinned", "free", "other", "wanted"),
    [
        (-1, [1, 4], [[], [4, 5]], 4),
        (-1, [1, 4], [[4], [1]], 4),  # that of the other's graphs
        (7, [], [[], [2, 7]], 7),
        (7, [], [[], [2]], 9),  # allocated
        (-1, [], [[], []], 9),
    ],
)
def test_processes_agree_on_a_heap_that_all_have(pinned, free, other, wanted):
    exchange = Answers(heaps=json.dumps(other).encode(), heap=b"9")
    found = nvshmem_bootstrap.find_heap(
        library(pinned=pinned, free=free, allocate=9), exchange, "key", n_bytes=1
    )
    assert found == wanted


def test_heaps_of_different_numbers_are_refused():
    exchange = Answers(heaps=b"[[], []]", heap=b"8")
    with pytest.raises(RuntimeError, match="different numbers in different processes: 9, 8"):
        nvshmem_bootstrap.find_heap(
            library(pinned=-1, free=[], allocate=9), exchange, "key", n_bytes=1
        )


def test_a_rail_that_some_processes_did_not_open_is_closed(monkeypatch):
    closed = []
    fake = library(share=False, has_joined=True, pinned=-1, free=[3], heap_bytes=1, open=None)
    fake.close = closed.append
    monkeypatch.setattr(nvshmem_bootstrap, "load", lambda: fake)
    config = jax_ep.EPConfig(n_experts=2, top_k=1, hidden_size=64, max_tokens_per_rank=8)
    connection = nvshmem.NvshmemByNodes(Geometry(make_mesh(1), AXIS, config, "nvshmem"))
    exchange = Answers(nvshmem_id=b"joined", heaps=b"[[], [3]]", rail=TimeoutError("process 1"))
    with pytest.raises(TimeoutError):
        connection._open_rail(exchange)
    assert closed == [connection.geometry.memory_key]


def open_connection(monkeypatch, exchange, steps, is_captured=False, drain=lambda _: True):
    """A connection whose inner one closes at once; `steps` gets what the extension is asked."""
    fake = SimpleNamespace(
        close=lambda key: steps.append("close") or True,
        drain=lambda key, limit_s: steps.append("drain") or drain(limit_s),
        release=lambda key, is_captured: steps.append("release"),
        heap_bytes=lambda n_nodes, message_bytes: 32 << 20,
    )
    cuda = SimpleNamespace(nvshmem=fake, is_captured=lambda key, device: is_captured)
    monkeypatch.setattr(nvshmem_bootstrap, "_unfinished", None)
    monkeypatch.setattr(extension, "load_cuda", lambda: cuda)
    config = jax_ep.EPConfig(n_experts=2, top_k=1, hidden_size=64, max_tokens_per_rank=8)
    connection = nvshmem.NvshmemByNodes(Geometry(make_mesh(1), AXIS, config, "nvshmem"))
    monkeypatch.setattr(P2pConnection, "close", lambda self: None)
    connection._exchange = exchange
    return connection


ALL_STEPS = ["close", "rail closed", "drain", "rail drained"]
NOT_CONFIRMED = "NVSHMEM has not confirmed within 2 s that what this process sent"


@pytest.mark.parametrize("is_captured", [False, True])
@pytest.mark.parametrize(
    ("failing", "wanted", "reason"),
    [
        ([], [*ALL_STEPS, "release"], None),
        (["rail closed"], ALL_STEPS[:2], "another process may still write to them: process 1"),
        (["drain"], ALL_STEPS, NOT_CONFIRMED),
        (["rail drained"], ALL_STEPS, "another process may still write to them: process 1"),
        (["drain", "rail drained"], ALL_STEPS, NOT_CONFIRMED),
    ],
)
def test_a_heap_is_released_once_all_processes_have_drained_theirs(
    failing, wanted, reason, is_captured, monkeypatch
):
    steps = []

    def close(step, limit_s):
        steps.append(step)
        if step in failing:
            raise TimeoutError("process 1")

    exchange = SimpleNamespace(close=close)
    drain = lambda _: "drain" not in failing  # noqa: E731
    connection = open_connection(monkeypatch, exchange, steps, is_captured, drain)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        connection.close()
    assert steps == wanted
    assert [each.category for each in caught] == [RuntimeWarning] * (reason is not None)
    for each in caught:
        text = str(each.message)
        assert f"the 32 MiB that other nodes write to stay unused: {reason}" in text
        assert ("compile their programs again" in text) == is_captured


def test_nvshmem_is_refused_once_the_network_is_late(monkeypatch):
    exchange = SimpleNamespace(close=lambda step, limit_s: None)
    connection = open_connection(monkeypatch, exchange, [], drain=lambda _: False)
    with pytest.warns(RuntimeWarning, match=NOT_CONFIRMED):
        connection.close()
    assert nvshmem_bootstrap.why_missing().startswith(NOT_CONFIRMED)


def test_a_process_whose_network_is_late_keeps_no_other_waiting(monkeypatch):
    """Two processes, of which one waits for its network as long as it may, in vain."""
    monkeypatch.setattr(nvshmem, "_MAX_CLOSE_S", 0.3)
    client, n_drained = FakeClient(), itertools.count()

    def drain(limit_s):
        if next(n_drained) == 0:
            return True
        time.sleep(limit_s)
        return False

    connections = []
    for process in range(2):
        exchange = exchange_module.Exchange("group", (0, 1), process, 60.0, client=client)
        connections.append(open_connection(monkeypatch, exchange, [], drain=drain))

    def close(process):
        connections[process]._exchange("one", b"")
        connections[process]._exchange.open()
        return connections[process]._why_in_use("key")

    in_time, late = sorted(in_threads(2, close), key=lambda reason: reason is not None)
    assert in_time is None
    assert late.startswith("NVSHMEM has not confirmed within 0.3 s")


def test_a_rail_is_closed_when_close_is_interrupted(monkeypatch):
    """And not released: other processes may still write to it."""
    steps = []
    connection = open_connection(monkeypatch, None, steps)
    monkeypatch.setattr(P2pConnection, "close", raising_interrupt)
    with pytest.raises(KeyboardInterrupt):
        connection.close()
    assert steps == ["close"]


@pytest.mark.parametrize(
    "other", [b"", b"[[]]", b'[["1"], []]', b"{}", b"[[], [true]]", b"[" * 9999]
)
def test_a_list_of_heaps_that_is_none_is_refused(other):
    exchange = Answers(heaps=other)
    with pytest.raises(RuntimeError, match="process 1: its list of heaps"):
        nvshmem_bootstrap.find_heap(library(pinned=-1, free=[1]), exchange, "key", n_bytes=1)


@pytest.mark.parametrize(
    ("version", "ibgda", "works"),
    [("3.4.5", "1", True), ("3.8.0", "0", True), ("3.8.0", "true", False), ("3.5.19", "1", False)],
)
def test_ibgda_of_newer_versions_is_refused(version, ibgda, works, monkeypatch):
    for name in nvshmem_bootstrap._ENVIRONMENT:
        monkeypatch.setenv(name, "")  # so that what the call sets is undone
    monkeypatch.setenv("NVSHMEM_IB_ENABLE_IBGDA", ibgda)
    extension = SimpleNamespace(nvshmem=library(load=version))
    monkeypatch.setattr(nvshmem_bootstrap.extension, "load_cuda", lambda: extension)
    reason = nvshmem_bootstrap.why_missing()
    assert (reason is None) == works
    assert works or f"got {version}" in reason
