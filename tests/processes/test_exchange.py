"""The messages by which processes open a group, also if one of them fails or never answers.

The steps of `p2p` run here with a fake CUDA extension that records which groups are open.
"""

import dataclasses
import time

import jax
import numpy as np
import pytest

import cases
import jax_ep
from fake_extension import FakeExtension, geometry_of, use
from harness import AXIS, config_of, make_mesh
from jax_ep.geometry import Geometry
from jax_ep.processes.exchange import Exchange
from jax_ep.transports import p2p, workspaces
from jax_ep.transports.p2p import P2pConnection
from processes import run_processes

N_PROCESSES = 3
SHORT_TIMEOUT_S = 2.0


@pytest.mark.thorough
@pytest.mark.multiprocess
def test_processes_of_a_job_exchange_payloads():
    run_processes(N_PROCESSES, "test_exchange:check_job", n_local_devices=2, timeout_s=120)


@pytest.mark.usefixtures("one_process")
def test_one_process_needs_no_exchange():
    def must_not_be_called(key, payload):
        raise AssertionError("called, though there is one process")

    exchange = Exchange.over(make_mesh(4), "alone", 1.0, must_not_be_called)
    assert exchange.is_alone
    assert exchange("step", b"mine") == [b"mine"]
    with pytest.raises(RuntimeError, match="^no memory$"):
        exchange.gather("another", fail("no memory"))


def test_every_exchange_has_keys_of_its_own():
    mesh = make_mesh(2)
    labels = [Exchange.over(mesh, name, 1.0).label for name in ("one", "one", "two")]
    assert len(set(labels)) == 3


def fail(reason: str):
    def make():
        raise MemoryError(reason)

    return make


def exchange_of_all(name: str, timeout_s: float = 60.0) -> Exchange:
    mesh = make_mesh(len(jax.devices()))
    return Exchange.over(mesh, name, timeout_s)


def check_job() -> None:
    """Runs all checks in each process of one job."""
    check_payloads()
    check_failure()
    check_agreement()
    check_missing_process()
    check_some_of_the_processes()
    check_collectives()
    check_custom_exchange_of_a_group()
    check_choice_of_transport()
    check_buffers()
    check_shared_memory()
    check_failed_group_is_not_shared()
    check_close_without_the_others()


def check_payloads() -> None:
    """Every process gets all payloads, in order, also if a name is used again."""
    me = jax.process_index()
    for size in (0, 1, 100_000):
        payloads = exchange_of_all("all")("step", bytes([me]) * size)
        assert payloads == [bytes([p]) * size for p in range(N_PROCESSES)]


def check_failure() -> None:
    """If one process fails, all raise its error; the next exchange works."""
    exchange = exchange_of_all("failing")
    make = fail("no memory") if jax.process_index() == 1 else lambda: b"fine"
    with pytest.raises(RuntimeError, match="^process 1: no memory$") as caught:
        exchange.gather("step", make)
    is_own = isinstance(caught.value.__cause__, MemoryError)
    assert is_own == (jax.process_index() == 1)
    assert exchange.gather("next", lambda: b"fine") == [b"fine"] * N_PROCESSES


def check_agreement() -> None:
    """All processes get the reason of the first that has one."""
    exchange = exchange_of_all("agreement")
    reason = f"reason {jax.process_index()}" if jax.process_index() > 0 else None
    assert exchange.agree("one", reason) == "process 1: reason 1"
    assert exchange.agree("two", None) is None


def check_missing_process() -> None:
    """The others wait no longer than the timeout and name the missing process."""
    exchange = exchange_of_all("missing", SHORT_TIMEOUT_S)
    begin = time.monotonic()
    if jax.process_index() != 2:
        with pytest.raises(TimeoutError, match=r"waited 2 s for process 2 .*ep_init"):
            exchange.gather("step", lambda: b"here")
        assert time.monotonic() - begin < SHORT_TIMEOUT_S + 5
    else:
        time.sleep(SHORT_TIMEOUT_S + 3)
        with pytest.raises(TimeoutError, match=r"2 comes too late .*process [01] waited 2 s for"):
            exchange.gather("step", lambda: b"here")
    exchange_of_all("after the missing")("step", b"")


def check_some_of_the_processes() -> None:
    """On a mesh without process 1, only the others take part."""
    some = [d for d in jax.devices() if d.process_index != 1]
    if jax.process_index() != 1:
        exchange = Exchange.over(jax.sharding.Mesh(np.array(some), (AXIS,)), "some", 60)
        assert exchange.processes == (0, 2)
        assert exchange("step", bytes([jax.process_index()])) == [b"\0", b"\2"]


def check_collectives() -> None:
    """Without the distributed runtime, payloads of any size travel by collectives."""
    exchange = dataclasses.replace(exchange_of_all("collectives"), client=None)
    payloads = exchange("step", b"x" * (10 * jax.process_index()))
    assert payloads == [b"x" * (10 * p) for p in range(N_PROCESSES)]
    with pytest.raises(RuntimeError, match="some of the processes needs"):
        some = dataclasses.replace(exchange, processes=(0, 1, 2, 7))
        some("another", b"")


def check_custom_exchange_of_a_group() -> None:
    """`ep_init` accepts an exchange, and does not call it for a transport that needs none."""

    def must_not_be_called(key, payload):
        raise AssertionError("xla needs no exchange")

    n_ranks = len(jax.devices())
    config = config_of(cases.SMALL[2].replace(n_experts=n_ranks))
    mesh = make_mesh(n_ranks)
    group = jax_ep.ep_init(mesh, AXIS, config, exchange=must_not_be_called)
    assert group.transport == "xla"


def check_choice_of_transport() -> None:
    """All processes get the same reason against p2p, whichever of them has it."""
    me, mesh = jax.process_index(), make_mesh(len(jax.devices()))
    geometry = geometry_of(mesh)
    for other, reason in (
        (FakeExtension(), None),
        (FakeExtension(host="there"), "process 1 is on another host than process 0, and"),
        (FakeExtension(reason="device 0 does not reach"), "process 1: device 0 does not"),
    ):
        use(other if me == 1 else FakeExtension())
        answer = workspaces.unsupported_reason(geometry, exchange_of_all("choice"))
        assert (answer or "").startswith(reason or ""), answer
        assert (answer is None) == (reason is None)
    use(FakeExtension(host=f"host {me}"))
    for n_ranks, fits in ((2, True), (6, False)):
        mesh = make_mesh(n_ranks, dp=6 // n_ranks)
        answer = workspaces.unsupported_reason(geometry_of(mesh), exchange_of_all("replicas"))
        assert (answer is None) == fits, answer
    vars(geometry)["local_coordinates"] = ()  # the cache of the property
    exchange = exchange_of_all("nobody")
    assert "no device" in workspaces.unsupported_reason(geometry, exchange)


def check_buffers() -> None:
    """Every process gets the addresses of all ranks; a failed step leaves nothing allocated."""
    me, mesh = jax.process_index(), make_mesh(3, dp=2, reverse=True)
    geometry = geometry_of(mesh)
    for fails_at, error in (("allocate", "no memory"), ("connect", "no peer access"), ("", "")):
        fake = FakeExtension(fails_at if me == 1 else "")
        use(fake)
        exchange = exchange_of_all("buffers")
        if error:
            with pytest.raises(RuntimeError, match=f"^process 1: {error}$"):
                workspaces.open_workspaces(geometry, exchange)
        else:
            workspaces.open_workspaces(geometry, exchange)
            check_open_buffers(geometry, exchange, fake)
        assert not fake.n_users
        assert not fake.allocated


def check_open_buffers(geometry: Geometry, exchange: Exchange, fake: FakeExtension) -> None:
    """The addresses of all ranks are known; the last of two users frees the buffers."""
    everywhere = {(each.replica, each.rank) for each in geometry.coordinates}
    assert {peer[:2] for peer in fake.peers} == everywhere
    assert all(a == f"{r}.{k}".encode() for r, k, a in fake.peers)
    key = geometry.key
    fake.n_users[key] += 1
    assert not workspaces.disconnect(key)
    assert fake.allocated
    assert workspaces.disconnect(key)
    workspaces.free_workspaces(key, exchange)


def check_shared_memory() -> None:
    """The last group to close frees the memory; until then, groups may come back to it."""
    mesh = make_mesh(len(jax.devices()))
    fake = FakeExtension()
    use(fake)
    large = P2pConnection(geometry_of(mesh, n_experts=24))
    config = dataclasses.replace(large.geometry.config, max_tokens_per_rank=1)
    small = P2pConnection(dataclasses.replace(large.geometry, config=config))
    shared = dataclasses.replace(small.geometry, memory_of=large.geometry)
    small = P2pConnection(shared)
    exchange = exchange_of_all("shared memory")
    with pytest.raises(RuntimeError, match=f"memory_of, {large.geometry.key}, is not open in this"):
        small.open(exchange)
    for first, second in ((large, small), (small, large)):
        large.open(exchange_of_all("large"))
        small.open(exchange_of_all("small"))
        assert fake.allocated == {large.geometry.key}
        first.close()
        assert fake.allocated == {large.geometry.key}
        first.open(exchange_of_all("again"))
        assert fake.n_users == {large.geometry.key: 1, small.geometry.key: 1}
        second.close()
        first.close()
        assert not fake.allocated
        assert not p2p._exchanges


def check_failed_group_is_not_shared() -> None:
    """All processes say why an equal group cannot be opened next to a failed one."""
    mesh = make_mesh(len(jax.devices()))
    connection = P2pConnection(geometry_of(mesh, n_experts=12))
    reason = "rank 1 waited 2 s for rank 0."
    p2p._exchanges[connection.geometry.key] = exchange_of_all("failed")
    fake = FakeExtension(reason=reason if jax.process_index() == 1 else "")
    use(fake)
    memory_of = connection.geometry
    config = dataclasses.replace(memory_of.config, max_tokens_per_rank=1)
    shared = P2pConnection(dataclasses.replace(memory_of, config=config, memory_of=memory_of))
    for each in (connection, shared):
        with pytest.raises(RuntimeError, match=f"^process 1: .*{reason} Close it first"):
            each.open(exchange_of_all("failed"))
    assert not fake.allocated


def check_close_without_the_others() -> None:
    """A group is freed after a timeout, with a warning, if a peer never closes it."""
    mesh = make_mesh(len(jax.devices()))
    geometry = geometry_of(mesh, n_experts=18)
    fake = FakeExtension()
    use(fake)
    exchange = exchange_of_all("left", timeout_s=60.0)
    workspaces.open_workspaces(geometry, exchange)
    exchange.open()
    if jax.process_index() == 0:
        begin = time.monotonic()
        workspaces._MAX_CLOSE_S = SHORT_TIMEOUT_S
        with pytest.warns(RuntimeWarning, match="waited 2 s for process 1, 2"):
            assert workspaces.disconnect(geometry.key)
            workspaces.free_workspaces(geometry.key, exchange)
        assert time.monotonic() - begin < SHORT_TIMEOUT_S + 5
        assert not fake.allocated
    exchange_of_all("the end")("step", b"")
