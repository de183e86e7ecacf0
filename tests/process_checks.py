"""What every process of a job runs: ranks that work together, and ranks that fail.

Each `check_*` is a target of `ranks.run_ranks`; `test_p2p_processes.py` starts them.
"""

from __future__ import annotations

import dataclasses
import re
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cases
import jax_ep
import oracle
import suite
import test_async
import test_grad
import test_graphs
import test_independence
from harness import AXIS, config_of, make_mesh, on_mesh, place
from jax_ep._jax_compat import distributed_client
from jax_ep.exchange import Exchange
from ranks import leave

SHORT_WAIT_S = 3.0


def check_the_suite() -> None:
    """All that works, in one job: to start one takes as long as most checks."""
    for check in (
        check_all_modes,
        check_gradients,
        check_independent_calls,
        check_halves,
        check_groups_come_and_go,
        check_too_large_a_group,
    ):
        begin = time.monotonic()
        check()
        print(f"{check.__name__}: {time.monotonic() - begin:.1f} s", flush=True)


def check_all_modes() -> None:
    """Runs every routing, every mode and the odd shapes; `auto` is `p2p`."""
    n_ranks = len(jax.devices())
    mesh = make_mesh(n_ranks)
    small = cases.SMALL[n_ranks]
    with jax_ep.ep_init(mesh, AXIS, config_of(small, timeout_s=40.0)) as group:
        assert group.transport == "p2p"
        assert group.dev_ptrs.shape == (jax.local_device_count(), 2, 3)
        assert group.dev_ptrs[:, :, 1:].all()
        assert group.ranks == tuple(
            rank
            for rank, device in enumerate(mesh.devices)
            if device.process_index == jax.process_index()
        )
    for case in cases.every_routing(small):
        suite.check(case, "p2p", mesh)
    several = (
        *(small.but(weights=w, routing="duplicates") for w in ("none", "row")),
        *(case for case in cases.ODD + cases.CAPACITY if case.n_ranks == n_ranks),
    )
    for case in several:
        suite.check(case, "p2p", mesh)
    suite.run_twice_same_bits(small, "p2p", mesh)


def check_gradients() -> None:
    """The closed forms; they need 4 ranks, and one is enough for the others."""
    if len(jax.devices()) == 4:
        for weights in test_grad.MODES:
            test_grad.test_gradients_have_their_closed_forms(weights, None, True, "p2p")
    else:
        case = cases.SMALL[len(jax.devices())]
        check = test_grad.check_closed_forms
        inputs, d_rows, d_row_weights, out = test_grad.gradients(case, "p2p")
        check(case, "p2p", inputs, d_rows, d_row_weights, out)


def check_independent_calls() -> None:
    """Calls in any order and number, on real sizes."""
    test_independence.test_independent_calls_do_not_mix_their_data(
        len(jax.devices()), 4, False, "p2p"
    )


def check_halves() -> None:
    """Calls in halves, with others between; they need 4 ranks."""
    if len(jax.devices()) == 4:
        order = test_async.ORDERS[2]
        test_async.test_halves_in_any_order_give_the_bits_of_whole_calls(order, "p2p")
        test_async.test_halves_stand_in_a_loop("p2p")


def check_two_axes() -> None:
    """Runs groups inside one process each, and groups of devices of several."""
    case = cases.SMALL[2].but(routing="zipf")
    inside = make_mesh(2, dp=2)
    suite.check(case, "p2p", inside)
    across = jax.sharding.Mesh(
        np.array(jax.devices()).reshape(2, 2).T, inside.axis_names
    )
    suite.check(case, "p2p", across)


def check_groups_come_and_go() -> None:
    """Opens, closes and opens again; equal groups share, others live side by side."""
    n_ranks = len(jax.devices())
    mesh = make_mesh(n_ranks)
    case = cases.SMALL[n_ranks]
    config = config_of(case, timeout_s=45.0)
    topk_ids = [place(mesh, [suite.make_inputs(case).arrays()[i]]) for i in (0, 1)]
    wanted = expected_rows(case)
    for _ in range(3):
        group = jax_ep.ep_init(mesh, AXIS, config, transport="p2p")
        same = jax_ep.ep_init(mesh, AXIS, config, transport="p2p")
        assert (same.dev_ptrs == group.dev_ptrs).all()
        other = jax_ep.ep_init(
            mesh, AXIS, config_of(case, timeout_s=46.0), transport="p2p"
        )
        assert not (other.dev_ptrs[:, :, 1:] == group.dev_ptrs[:, :, 1:]).any()
        same.close()
        for each in (group, other):
            call = on_mesh(mesh, lambda x, i, g=each: jax_ep.dispatch(g, x, i).tokens)
            assert_rows(call(*topk_ids), wanted)
            each.close()


def check_too_large_a_group() -> None:
    """All processes say which one failed, and why; afterwards groups open as before."""
    mesh = make_mesh(len(jax.devices()))
    case = cases.SMALL[mesh.size]
    config = config_of(
        case, max_tokens_per_rank=2**22, hidden_size=8192, recv_capacity=16
    )
    with pytest.raises(
        RuntimeError, match=r"^process 0: rank 0: workspace of \d+ bytes"
    ):
        jax_ep.ep_init(mesh, AXIS, config, transport="p2p")
    open_a_new_group(mesh)


def assert_rows(out: jax.Array, wanted: list[np.ndarray]) -> None:
    for shard in out.addressable_shards:
        rank = shard.index[0].start or 0
        rows = np.asarray(shard.data)[0, : len(wanted[rank])]
        assert (rows == wanted[rank]).all(), f"rank {rank}"


def expected_rows(case: cases.Case) -> list[np.ndarray]:
    inputs = suite.make_inputs(case)
    arguments = (inputs.routed.n_rows, inputs.tokens, inputs.topk_ids)
    rows = oracle.dispatch(case.n_ranks, case.n_experts, *arguments)
    return [each.tokens for each in rows]


def dispatch_where(group: jax_ep.EPGroup):
    """Gives a function of (tokens, topk_ids, calls): those ranks dispatch that may."""

    def body(tokens, topk_ids, calls):
        return jax.lax.cond(
            calls,
            lambda: jax_ep.dispatch(group, tokens, topk_ids).tokens,
            lambda: (
                jnp.zeros((group.max_recv_tokens, tokens.shape[1]), tokens.dtype)
                + tokens[0]
            ),
        )

    return on_mesh(group.mesh, body)


def begin_to_fail():
    """Gives a group that waits briefly, after one good call, and what calls it."""
    n_ranks = len(jax.devices())
    mesh = make_mesh(n_ranks)
    case = cases.SMALL[n_ranks]
    suite.check(case, "p2p", mesh)  # compiles what must work afterwards, too
    config = config_of(case, timeout_s=SHORT_WAIT_S)
    # Processes that come one after the other must not fail while they open the group.
    meet()
    group = jax_ep.ep_init(mesh, AXIS, config, transport="p2p")
    dispatch = dispatch_where(group)
    operands = [place(mesh, [x]) for x in suite.make_inputs(case).arrays()[:2]]
    everybody = place(mesh, [np.ones(n_ranks, bool)])
    compiled = dispatch.lower(*operands, everybody).compile()
    meet()
    jax.block_until_ready(compiled(*operands, everybody))

    def call(missing: int | None) -> None:
        calls = place(mesh, [np.arange(n_ranks) != missing])
        jax.block_until_ready(compiled(*operands, calls))

    return group, call


_n_meetings = 0


def meet(processes: tuple[int, ...] | None = None) -> None:
    """Waits until all processes have come here."""
    global _n_meetings
    _n_meetings += 1
    Exchange(
        name=f"test/meeting {_n_meetings}",
        processes=processes or tuple(range(jax.process_count())),
        process=jax.process_index(),
        timeout_s=120.0,
        client=distributed_client(),
    )("come", b"")


def assert_waiters_say_who_is_missing(group, call, missing: int) -> None:
    """The call ends in time; `check`, and a later call, raise all that is known."""
    begin = time.monotonic()
    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        call(missing)
        group.check()
    assert time.monotonic() - begin < 20 * SHORT_WAIT_S
    text = str(caught.value)
    ranks = [d.process_index for d in jax.devices()]
    mine = [r for r, p in enumerate(ranks) if p == jax.process_index() and r != missing]
    waiter = "|".join(map(str, mine))
    for pattern in (
        rf"rank ({waiter}) waited",
        rf"for rank {missing}\b",
        "dispatch",
        r"epoch 2\b",
    ):
        assert re.search(pattern, text), text
    with pytest.raises(jax.errors.JaxRuntimeError, match="waited"):
        call(missing)


def check_a_skipped_call() -> None:
    """The last rank makes one call fewer; a process that has only it sees no error."""
    group, call = begin_to_fail()
    missing = group.n_ranks - 1
    if set(group.ranks) == {missing}:
        call(missing)
    else:
        assert_waiters_say_who_is_missing(group, call, missing)
    meet()
    suite.check(cases.SMALL[group.n_ranks], "p2p", group.mesh)
    meet()
    with pytest.raises(RuntimeError, match=r"has failed: rank .*Close it first"):
        jax_ep.ep_init(group.mesh, AXIS, group.config, transport="p2p")
    group.close()
    for config in (group.config, dataclasses.replace(group.config, timeout_s=30.0)):
        open_a_new_group(group.mesh, config)


def check_a_skipped_graph() -> None:
    """As a call; but XLA runs its graph again without asking the handlers of calls."""
    n_ranks = len(jax.devices())
    mesh = make_mesh(n_ranks)
    suite.check(cases.SMALL[n_ranks], "p2p", mesh)  # loads the kernels
    # Eight calls, of processes that take turns on a GPU.
    config = config_of(cases.SMALL[n_ranks], timeout_s=3 * SHORT_WAIT_S)
    meet()
    group = jax_ep.ep_init(mesh, AXIS, config, transport="p2p")
    run = test_graphs.Chain(group)
    for _ in range(2):
        meet()
        wanted = run()
    assert test_graphs.is_captured(group)
    meet()
    is_missing = jax.process_index() == jax.process_count() - 1
    if not is_missing:
        run()  # its own words say nothing
        with pytest.raises(jax.errors.JaxRuntimeError, match="waited"):
            run()
    meet()
    group.close()
    with test_graphs.same_size(mesh, config):  # what is freed would be its
        meet()
        group = jax_ep.ep_init(mesh, AXIS, config, transport="p2p")
        meet()
        assert run() == wanted
        group.check()
        group.close()


def open_a_new_group(mesh, config=None) -> None:
    n_ranks = mesh.size
    case = cases.SMALL[n_ranks].but(weights="none")
    config = config or config_of(case, timeout_s=30.0)
    with jax_ep.ep_init(mesh, AXIS, config, transport="p2p") as group:
        operands = [place(mesh, [x]) for x in suite.make_inputs(case).arrays()[:2]]
        operands.append(place(mesh, [np.ones(n_ranks, bool)]))
        compiled = dispatch_where(group).lower(*operands).compile()
        meet()
        assert_rows(compiled(*operands), expected_rows(case))
        group.check()


def check_a_process_that_exits() -> None:
    """The last process is gone; the others say so, and groups without it go on."""
    group, call = begin_to_fail()
    n_processes = jax.process_count()
    missing = group.n_ranks - jax.local_device_count()
    devices = jax.devices()
    rest = tuple(range(n_processes - 1))
    n_half = max(1, len(devices) // 2)
    half = make_mesh_of(devices[:n_half])
    in_half = devices[jax.process_index() * jax.local_device_count()] in half.devices
    if in_half:
        suite.check(cases.SMALL[n_half], "p2p", half)
    meet()
    if jax.process_index() == n_processes - 1:
        leave()
    if jax.local_device_count() == 1:
        assert_waiters_say_who_is_missing(group, call, missing)
    else:
        with pytest.raises(jax.errors.JaxRuntimeError, match=r"rank \d+ waited"):
            call(None)
            group.check()
    if in_half:
        suite.check(cases.SMALL[n_half], "p2p", half)
    alone = make_mesh_of(jax.local_devices()[:1])
    suite.check(cases.SMALL[1], "p2p", alone)
    meet(rest)
    leave()


def make_mesh_of(devices) -> jax.sharding.Mesh:
    return jax.sharding.Mesh(np.array(devices), (AXIS,))
