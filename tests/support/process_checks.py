"""Checks that run in a job on GPUs: ranks that succeed, and ranks that fail.

Each `check_*` is a target of `processes.run_processes`; `test_p2p_processes.py` starts them.
"""

import dataclasses
import re
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import async_calls
import captured_graphs
import cases
import closed_forms
import independent_calls
import jax_ep
import oracle
import placed_choices
import suite
from harness import AXIS, config_of, make_mesh, on_mesh, put
from jax_ep._jax_compat import distributed_client
from jax_ep.integrations.groups import group_of, groups
from jax_ep.processes.exchange import Exchange
from processes import leave

SHORT_TIMEOUT_S = 3.0


def check_the_suite() -> None:
    """All checks without failing ranks, in one job: starting a job takes as long as most checks."""
    for check in (
        check_all_modes,
        check_gradients,
        check_independent_calls,
        check_asynchronous_calls,
        check_placed_choices,
        check_a_group_that_opens_while_jax_traces,
        check_groups_come_and_go,
        check_groups_take_turns_in_one_memory,
        check_a_group_that_is_too_large,
    ):
        begin = time.monotonic()
        check()
        print(f"{check.__name__}: {time.monotonic() - begin:.1f} s", flush=True)


def check_all_modes() -> None:
    """Every routing, every mode and the edge cases; `auto` selects `p2p`."""
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
        *(small.replace(weights=w, routing="duplicates") for w in ("none", "row")),
        *(case for case in cases.EDGE + cases.CAPACITY if case.n_ranks == n_ranks),
    )
    for case in several:
        suite.check(case, "p2p", mesh)
    suite.check_two_runs_agree(small, "p2p", mesh)


def check_gradients() -> None:
    """Gradients match their closed forms: in all modes with 4 ranks, otherwise in one mode."""
    if len(jax.devices()) == 4:
        for weights in closed_forms.MODES:
            closed_forms.check_gradients_match_their_closed_forms(weights, None, True, "p2p")
    else:
        closed_forms.check_closed_forms(cases.SMALL[len(jax.devices())], "p2p")


def check_independent_calls() -> None:
    """Calls in any order and number, on realistic sizes."""
    n_ranks = len(jax.devices())
    independent_calls.check_independent_calls_do_not_mix_their_data(n_ranks, 4, False, "p2p")


def check_asynchronous_calls() -> None:
    """Asynchronous calls with others in between; only with 4 ranks, as the tests need."""
    if len(jax.devices()) == 4:
        order = async_calls.ORDERS[2]
        async_calls.check_asynchronous_calls_in_any_order_match_synchronous_ones(order, "p2p")
        async_calls.check_asynchronous_calls_may_be_in_a_loop("p2p")


def check_placed_choices() -> None:
    """Choices go to the same copies as on CPUs."""
    placed_choices.check_choices_of_every_process()


def check_a_group_that_opens_while_jax_traces() -> None:
    """As those of `jax_ep.integrations` do: all processes open it, each while it traces."""
    mesh = make_mesh(len(jax.devices()))
    case = cases.SMALL[mesh.size].replace(weights="none")
    config = config_of(case, timeout_s=44.0)

    def body(tokens, topk_ids):
        return jax_ep.dispatch(group_of(mesh, AXIS, config, "p2p"), tokens, topk_ids).tokens

    operands = put(mesh, *suite.make_inputs(case).arrays()[:2])
    assert_rows(on_mesh(mesh, body)(*operands), expected_rows(case))
    (group,) = groups()
    group.check()
    group.close()


def check_two_axes() -> None:
    """Replicas inside one process each, and replicas that span processes."""
    inside = make_mesh(2, dp=2)
    across = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 2).T, inside.axis_names)
    for mesh in (inside, across):
        suite.check(cases.SMALL[2].replace(routing="zipf"), "p2p", mesh)


def check_groups_come_and_go() -> None:
    """Groups may be opened again after `close`; equal ones share buffers, others do not."""
    n_ranks = len(jax.devices())
    mesh = make_mesh(n_ranks)
    case = cases.SMALL[n_ranks]
    config = config_of(case, timeout_s=45.0)
    operands = put(mesh, *suite.make_inputs(case).arrays()[:2])
    wanted = expected_rows(case)
    for _ in range(3):
        group = jax_ep.ep_init(mesh, AXIS, config, transport="p2p")
        equal = jax_ep.ep_init(mesh, AXIS, config, transport="p2p")
        assert (equal.dev_ptrs == group.dev_ptrs).all()
        other = jax_ep.ep_init(mesh, AXIS, config_of(case, timeout_s=46.0), transport="p2p")
        assert not (other.dev_ptrs[:, :, 1:] == group.dev_ptrs[:, :, 1:]).any()
        equal.close()
        for each in (group, other):
            call = on_mesh(mesh, lambda x, i, g=each: jax_ep.dispatch(g, x, i).tokens)
            assert_rows(call(*operands), wanted)
            each.close()


def check_groups_take_turns_in_one_memory() -> None:
    """Groups of several sizes, in the memory of the largest."""
    n_ranks = len(jax.devices())
    mesh = make_mesh(n_ranks)
    small = cases.SMALL[n_ranks]
    large = small.replace(max_tokens=100, hidden_size=512)
    with jax_ep.ep_init(mesh, AXIS, config_of(large), transport="p2p") as memory_of:
        for _ in range(2):
            for case in (large, small, small.replace(max_tokens=3, weights="row")):
                suite.check(case, "p2p", mesh, memory_of=memory_of)


def check_a_group_that_is_too_large() -> None:
    """All processes say which one failed and why; afterwards, groups can be opened."""
    mesh = make_mesh(len(jax.devices()))
    sizes = {"max_tokens_per_rank": 2**22, "hidden_size": 8192, "recv_capacity": 16}
    config = config_of(cases.SMALL[mesh.size], **sizes)
    message = r"^process 0: rank 0: allocating a workspace of \d+ bytes"
    with pytest.raises(RuntimeError, match=message):
        jax_ep.ep_init(mesh, AXIS, config, transport="p2p")
    check_a_new_group(mesh)


def assert_rows(out: jax.Array, wanted: list[np.ndarray]) -> None:
    for shard in out.addressable_shards:
        rank = shard.index[0].start or 0
        rows = np.asarray(shard.data)[0, : len(wanted[rank])]
        assert (rows == wanted[rank]).all(), f"rank {rank}"


def expected_rows(case: cases.Case) -> list[np.ndarray]:
    inputs = suite.make_inputs(case)
    return [oracle.rows_of(inputs.routed, inputs.tokens, rank) for rank in range(case.n_ranks)]


def dispatch_where(group: jax_ep.EPGroup):
    """A function of (tokens, topk_ids, calls): the ranks with `calls` dispatch."""

    def body(tokens, topk_ids, calls):
        shape = (group.max_recv_tokens, tokens.shape[1])
        return jax.lax.cond(
            calls,
            lambda: jax_ep.dispatch(group, tokens, topk_ids).tokens,
            lambda: jnp.zeros(shape, tokens.dtype) + tokens[0],
        )

    return on_mesh(group.mesh, body)


def open_group_to_fail():
    """A group with a short timeout, after one good call, and a function that calls it."""
    n_ranks = len(jax.devices())
    mesh = make_mesh(n_ranks)
    case = cases.SMALL[n_ranks]
    suite.check(case, "p2p", mesh)  # also compiles what must work afterwards
    config = config_of(case, timeout_s=SHORT_TIMEOUT_S)
    # Processes that arrive one after the other must not time out when they open the group.
    meet()
    group = jax_ep.ep_init(mesh, AXIS, config, transport="p2p")
    operands = put(mesh, *suite.make_inputs(case).arrays()[:2])
    (all_ranks,) = put(mesh, np.ones(n_ranks, bool))
    compiled = dispatch_where(group).lower(*operands, all_ranks).compile()
    meet()
    jax.block_until_ready(compiled(*operands, all_ranks))

    def call(missing: int | None) -> None:
        (calls,) = put(mesh, np.arange(n_ranks) != missing)
        jax.block_until_ready(compiled(*operands, calls))

    return group, call


_n_meetings = 0


def meet(processes: tuple[int, ...] | None = None) -> None:
    """Waits until all processes have arrived here."""
    global _n_meetings
    _n_meetings += 1
    Exchange(
        name=f"test/meeting {_n_meetings}",
        processes=processes or tuple(range(jax.process_count())),
        process=jax.process_index(),
        timeout_s=120.0,
        client=distributed_client(),
    )("come", b"")


def error_of_a_missing_rank(group, call, missing: int) -> str:
    """The call ends in time; it, or `check`, raises, and so does the next call."""
    begin = time.monotonic()
    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        call(missing)
        group.check()
    assert time.monotonic() - begin < 20 * SHORT_TIMEOUT_S
    with pytest.raises(jax.errors.JaxRuntimeError, match="waited"):
        call(missing)
    return str(caught.value)


def assert_waiting_ranks_name_the_missing_one(group, call, missing: int) -> None:
    """The error names ranks, call and epoch."""
    text = error_of_a_missing_rank(group, call, missing)
    owners = [d.process_index for d in jax.devices()]
    mine = [r for r, p in enumerate(owners) if p == jax.process_index() and r != missing]
    waiting = "|".join(map(str, mine))
    for pattern in (
        rf"rank ({waiting}) waited",
        rf"for rank {missing}\b",
        "dispatch",
        r"epoch 2\b",
    ):
        assert re.search(pattern, text), text


def check_a_skipped_call() -> None:
    """The last rank makes one call fewer; a process that has only that rank sees no error."""
    group, call = open_group_to_fail()
    smaller = dataclasses.replace(group.config, max_tokens_per_rank=1)
    meet()
    shared = jax_ep.ep_init(group.mesh, AXIS, smaller, memory_of=group)
    missing = group.n_ranks - 1
    if set(group.ranks) == {missing}:
        call(missing)
        shared.check()
    else:
        assert_waiting_ranks_name_the_missing_one(group, call, missing)
        with pytest.raises(jax.errors.JaxRuntimeError, match=f"{shared.key}: rank .* waited"):
            shared.check()
    meet()
    suite.check(cases.SMALL[group.n_ranks], "p2p", group.mesh)
    for memory_of in (None, shared):
        meet()
        config = group.config if memory_of is None else dataclasses.replace(smaller, n_sms=2)
        with pytest.raises(RuntimeError, match=r"has failed: rank .*Close it first"):
            jax_ep.ep_init(group.mesh, AXIS, config, transport="p2p", memory_of=memory_of)
    group.close()
    shared.close()
    for config in (group.config, dataclasses.replace(group.config, timeout_s=30.0)):
        check_a_new_group(group.mesh, config)


def check_a_skipped_graph() -> None:
    """Like `check_a_skipped_call`, in a graph, which XLA replays without calling the handlers."""
    n_ranks = len(jax.devices())
    mesh = make_mesh(n_ranks)
    suite.check(cases.SMALL[n_ranks], "p2p", mesh)  # loads the kernels
    # The program makes eight calls, and processes may take turns on a GPU.
    config = config_of(cases.SMALL[n_ranks], timeout_s=3 * SHORT_TIMEOUT_S)
    meet()
    group = jax_ep.ep_init(mesh, AXIS, config, transport="p2p")
    run = captured_graphs.Chain(group)
    for _ in range(2):
        meet()
        wanted = run()
    assert captured_graphs.is_captured(group)
    meet()
    is_missing = jax.process_index() == jax.process_count() - 1
    if not is_missing:
        run()  # raises nothing itself
        with pytest.raises(jax.errors.JaxRuntimeError, match="waited"):
            run()
    meet()
    group.close()
    with captured_graphs.group_of_equal_size(mesh, config):  # would take the memory if it were free
        meet()
        group = jax_ep.ep_init(mesh, AXIS, config, transport="p2p")
        meet()
        assert run() == wanted
        group.check()
        group.close()


def check_a_new_group(mesh, config=None) -> None:
    """Opens a group, dispatches, and compares the rows."""
    n_ranks = mesh.size
    case = cases.SMALL[n_ranks].replace(weights="none")
    config = config or config_of(case, timeout_s=30.0)
    with jax_ep.ep_init(mesh, AXIS, config, transport="p2p") as group:
        operands = put(mesh, *suite.make_inputs(case).arrays()[:2], np.ones(n_ranks, bool))
        compiled = dispatch_where(group).lower(*operands).compile()
        meet()
        assert_rows(compiled(*operands), expected_rows(case))
        group.check()


def check_a_process_that_exits() -> None:
    """The last process exits; the others report it, and groups without it go on."""
    group, call = open_group_to_fail()
    n_processes = jax.process_count()
    missing = group.n_ranks - jax.local_device_count()
    devices = jax.devices()
    remaining = tuple(range(n_processes - 1))
    n_half = max(1, len(devices) // 2)
    half = make_mesh_of(devices[:n_half])
    in_half = devices[jax.process_index() * jax.local_device_count()] in half.devices
    if in_half:
        suite.check(cases.SMALL[n_half], "p2p", half)
    meet()
    if jax.process_index() == n_processes - 1:
        leave()
    if jax.local_device_count() == 1:
        assert_waiting_ranks_name_the_missing_one(group, call, missing)
    else:
        with pytest.raises(jax.errors.JaxRuntimeError, match=r"rank \d+ waited"):
            call(None)
            group.check()
    if in_half:
        suite.check(cases.SMALL[n_half], "p2p", half)
    alone = make_mesh_of(jax.local_devices()[:1])
    suite.check(cases.SMALL[1], "p2p", alone)
    meet(remaining)
    leave()


def make_mesh_of(devices) -> jax.sharding.Mesh:
    return jax.sharding.Mesh(np.array(devices), (AXIS,))
