"""Checks that run in a job on GPUs with transport `nvshmem`; each node has half the processes.

Each `check_*` is a target of `processes.run_processes`; `test_nvshmem.py` starts them.
"""

import contextlib
import dataclasses
import re
import unittest.mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import captured_graphs
import cases
import closed_forms
import jax_ep
import suite
from harness import AXIS, config_of, make_mesh, on_mesh, put
from jax_ep.ffi import extension
from jax_ep.nodes import overlapped
from jax_ep.nodes.connection import NodesConnection
from jax_ep.nodes.nvshmem.rails import NvshmemRails
from jax_ep.transports.p2p import P2pConnection
from nvshmem_groups import (
    NAME,
    free_heaps,
    map_no_peers,
    open_again,
    open_captured,
    open_group,
    small,
)
from process_checks import (
    SHORT_TIMEOUT_S,
    assert_rows,
    dispatch_where,
    error_of_a_missing_rank,
    expected_rows,
    meet,
)
from processes import leave


def check_groups() -> None:
    """Groups come and go, share what they have if they are equal, and use heaps again."""
    n_ranks = len(jax.devices())
    case = small()
    operands = put(
        make_mesh(n_ranks), *suite.make_inputs(case).arrays()[:2], np.ones(n_ranks, bool)
    )
    wanted = expected_rows(case.replace(weights="none"))
    for _ in range(3):
        group, equal, other = open_group(), open_group(), open_group(31.0)
        assert group.transport == NAME
        assert isinstance(group._connection, NodesConnection)
        assert not free_heaps(group)
        assert group.memory > P2pConnection.memory(group._connection) > 0
        equal.close()
        for each in (group, other):
            run = dispatch_where(each)
            assert_rows(run(*operands), wanted)
            each.check()
        group.close()
        other.close()
    assert len(free_heaps(group)) == 2
    check_replicas()
    check_shared_memory()
    check_captured_calls()
    check_a_captured_call_that_fails()
    check_many_tokens(make_mesh(n_ranks))


def check_puts() -> None:
    """All puts go through NVSHMEM, as to peers that only a network reaches."""
    map_no_peers()
    check_captured_calls()
    check_a_captured_call_that_fails()
    check_routings_and_gradients()


def check_overlap() -> None:
    """Few tokens also overlap with their exchange; by stores to peers, and by NVSHMEM's puts."""
    overlapped.min_tokens = 1
    check_shared_memory()
    check_captured_calls()
    check_routings_and_gradients()
    map_no_peers()
    # Open groups have mapped their peers: the size of these is another one.
    check_few_tokens(small().replace(max_tokens=small().max_tokens + 1))


def check_routings_and_gradients() -> None:
    mesh = make_mesh(len(jax.devices()))
    check_few_tokens(small())
    check_codes(mesh, 16)
    check_many_tokens(mesh)


def check_few_tokens(case: cases.Case) -> None:
    mesh = make_mesh(case.n_ranks)
    for each in cases.every_routing(case):
        suite.check(each, NAME, mesh)
    for weights in ("none", "row"):
        suite.check(case.replace(weights=weights, routing="duplicates"), NAME, mesh)
    closed_forms.check_closed_forms(case.replace(weights="row"), NAME)


def check_codes(mesh, n_tokens: int) -> None:
    """Tokens cross as codes and scales, which the intra-node call sends on."""
    for name, weights in zip(cases.QUANTIZED_NAMES, ("row", "none") * 2, strict=True):
        case = small().replace(max_tokens=n_tokens, hidden_size=1024, token_format=name)
        suite.check(case.replace(weights=weights), NAME, mesh)


def check_many_tokens(mesh) -> None:
    """Every ring is used several times."""
    case = small().replace(n_tokens=3000, max_tokens=3000, hidden_size=1024, routing="zipf")
    suite.check(case, NAME, mesh)
    suite.check(case.replace(weights="row"), NAME, mesh)
    check_codes(mesh, 1200)


def check_sharing() -> None:
    """Kernels of processes that share a GPU are resident together, with any number of tokens."""
    mesh = make_mesh(len(jax.devices()))
    device = jax.local_devices()[0].local_hardware_id
    assert extension.load_cuda().nvshmem.room(device)[2], "no MPS"
    for n_tokens in (8, 128, 512, 2048):
        case = small().replace(max_tokens=n_tokens, hidden_size=1024)
        for weights in ("none", "row"):
            suite.check(case.replace(weights=weights), NAME, mesh)
    for n_tokens in (16, 512):
        check_codes(mesh, n_tokens)
    closed_forms.check_closed_forms(small().replace(max_tokens=512, weights="row"), NAME)


def check_refusal() -> None:
    """More processes on a GPU than have room there raise alike, and `p2p` serves them."""
    text = "needs 64 multiprocessors for each rank; processes 0, 1, 2 and 3 share a GPU of"
    for _ in range(2):
        with pytest.raises(ValueError, match=text):
            open_group()
        meet()
    case = cases.SMALL[4].replace(n_tokens=128, max_tokens=128)
    suite.check(case, "p2p", make_mesh(4))


def check_replicas() -> None:
    """Two replicas of two nodes, of a rank each."""
    if len(jax.devices()) == 4:
        case = cases.SMALL[2].replace(n_nodes=2, routing="zipf")
        suite.check(case, NAME, make_mesh(2, dp=2))


def check_shared_memory() -> None:
    """A group in the memory of a larger one also uses its rail, which outlives the larger one."""
    case = small()
    mesh = make_mesh(case.n_ranks)
    large = open_group(33.0, case.replace(max_tokens=2 * case.max_tokens, hidden_size=512))
    group = jax_ep.ep_init(mesh, AXIS, config_of(case, timeout_s=33.0), memory_of=large)
    assert group.transport == NAME
    assert group.memory == large.memory
    inputs = suite.make_inputs(case)
    operands = put(mesh, *inputs.arrays()[:2], np.ones(case.n_ranks, bool))
    wanted = expected_rows(case.replace(weights="none"))
    runs = [dispatch_where(each) for each in (group, large, group)]
    for run in runs:
        assert_rows(run(*operands), wanted)
    large.close()
    assert_rows(runs[0](*operands), wanted)
    group.check()
    group.close()
    assert free_heaps(large)


def check_captured_calls() -> None:
    """A program that XLA replays as a graph gives the same bits, also in the next equal group.

    There, a process replays it beside others that have compiled the program anew.
    """
    group, run, wanted = open_captured(timeout_s=32.0)
    for _ in range(2):
        meet()
        assert run() == wanted
    for process in range(2):
        group = open_again(group)
        meet()
        assert run() == wanted
        if jax.process_index() == process:
            run = captured_graphs.Chain(group)
        for _ in range(2):
            meet()
            assert run() == wanted
        group.check()
    group.close()


def check_a_captured_call_that_fails() -> None:
    """The last rank does not replay the graph, which works again in the next equal group."""
    group, run, wanted = open_captured(SHORT_TIMEOUT_S + 1)
    missing = group.n_ranks - 1
    meet()
    if group.ranks != (missing,):
        error_of_a_missing_rank(group, lambda _: run(), missing)
    meet()
    group = open_again(group)
    for _ in range(2):
        meet()
        assert run() == wanted
    group.check()
    group.close()


def check_a_skipped_call(make_function=dispatch_where, results: list | None = None) -> None:
    """The last rank makes one call fewer. The others end in time and say who did not come.

    make_function(group) is a function of (tokens, topk_ids, calls), see `dispatch_where`; `results`
    gets what it returns.
    """
    group, call = open_group_to_fail(make_function, results)
    n_ranks = group.n_ranks
    missing = n_ranks - 1
    if group.ranks == (missing,):
        call(missing)
    else:
        assert_reports(group, call, missing)
    meet()
    group.close()
    suite.check(small(), NAME, make_mesh(n_ranks))


def check_a_skipped_dispatch() -> None:
    """The last rank has sent its ids, but not its tokens, which a dispatch waits for."""
    check_a_skipped_overlapped_call("all_gather_and_dispatch", lambda group, rows: rows.tokens)


def check_a_skipped_combine() -> None:
    """The last rank returns no rows and no sums; those of its rail are NaN."""
    result = check_a_skipped_overlapped_call(
        "combine_and_reduce_scatter", lambda group, rows: jax_ep.combine(group, rows.tokens, rows)
    )
    n_ranks = len(jax.devices())
    if jax.process_index() == n_ranks // 2 - 1:
        (shard,) = result.addressable_shards
        assert np.isnan(np.asarray(shard.data, np.float32)).all()


def check_a_skipped_backward() -> None:
    """The last rank sends no cotangents, which the backward of a combine waits for."""

    def finish(group, rows):
        def loss(tokens):
            return jnp.sum(jax_ep.combine(group, tokens, rows).astype(jnp.float32))

        return jax.grad(loss)(rows.tokens)

    result = check_a_skipped_overlapped_call("combine_grads", finish, NvshmemRails)
    if jax.process_index() == len(jax.devices()) // 2 - 1:
        (shard,) = result.addressable_shards
        assert np.isnan(np.asarray(shard.data, np.float32)).any()


def check_a_skipped_overlapped_call(
    name: str, finish, owner=overlapped, is_async: bool = False
) -> jax.Array:
    """Like `check_a_skipped_call`, with `<owner>.<name>`; returns the result of the failed call.

    All ranks make the calls before it and, by finish(group, rows), those after.
    """
    overlapped.min_tokens = 1
    results = []

    def layer_where(group):
        def body(tokens, topk_ids, calls):
            with skipping(owner, name, calls):
                rows = suite.dispatch(group, tokens, topk_ids, is_async=is_async)
                return finish(group, rows)

        return on_mesh(group.mesh, body)

    check_a_skipped_call(layer_where, results)
    return results[-1]


@contextlib.contextmanager
def skipping(owner, name: str, calls: jax.Array):
    """Replaces `<owner>.<name>`: the ranks without `calls` get zeros."""
    original = getattr(owner, name)

    def where(*args):
        def call():
            return original(*args)

        def zeros():
            zero = 0 * calls.astype(np.int32)  # varies over the mesh like the results
            return jax.tree.map(
                lambda x: jnp.zeros(x.shape, x.dtype) + zero.astype(x.dtype), jax.eval_shape(call)
            )

        return jax.lax.cond(calls, call, zeros)

    with unittest.mock.patch.object(owner, name, where):
        yield


def check_a_changed_handle() -> None:
    """Ranks whose handle was changed say so; the next group works."""
    suite.check(small(), NAME, make_mesh(len(jax.devices())))  # loads the kernels
    meet()
    for overlapped.min_tokens in (1, 1000):
        group = open_group(SHORT_TIMEOUT_S)
        operands = put(group.mesh, *suite.make_inputs(small()).arrays()[:2])

        def layer(tokens, topk_ids, group=group):
            rows = jax_ep.dispatch(group, tokens, topk_ids)
            changed = dataclasses.replace(rows.handle, handle=rows.handle.handle + 2**30)
            return jax_ep.combine(group, rows.tokens, dataclasses.replace(rows, handle=changed))

        compiled = on_mesh(group.mesh, layer).compile(*operands)
        meet()
        (rank,) = group.ranks
        text = rf"dispatched must be the unchanged result .* that of rank {rank} was changed"
        with pytest.raises(jax.errors.JaxRuntimeError, match=text):
            jax.block_until_ready(compiled(*operands))
            group.check()
        meet()
        group.close()
        suite.check(small(), NAME, group.mesh)


def check_a_process_that_exits() -> None:
    """The last process exits; the others report it, and end."""
    group, call = open_group_to_fail()
    meet()
    if jax.process_index() == jax.process_count() - 1:
        leave()
    assert_reports(group, call, group.n_ranks - 1)
    meet(tuple(range(jax.process_count() - 1)))
    leave()


def open_group_to_fail(make_function=dispatch_where, results: list | None = None):
    """A group with a short timeout, after one good call, and a function that calls it."""
    case = small()
    mesh = make_mesh(case.n_ranks)
    suite.check(case, NAME, mesh)
    meet()
    group = open_group(SHORT_TIMEOUT_S)
    operands = put(mesh, *suite.make_inputs(case).arrays()[:2])
    (all_ranks,) = put(mesh, np.ones(case.n_ranks, bool))
    compiled = make_function(group).lower(*operands, all_ranks).compile()
    meet()
    jax.block_until_ready(compiled(*operands, all_ranks))

    def call(missing: int) -> None:
        (calls,) = put(mesh, np.arange(case.n_ranks) != missing)
        result = jax.block_until_ready(compiled(*operands, calls))
        if results is not None:
            results.append(result)

    return group, call


def assert_reports(group, call, missing: int) -> None:
    """Each rank names the one that it waited for, in its rail or node."""
    text = error_of_a_missing_rank(group, call, missing)
    (rank,) = group.ranks
    n_ranks = group.n_ranks // 2
    if rank == missing - n_ranks:
        assert re.search(rf"rank {rank} waited 3 s for rank {missing} \(between nodes", text), text
    assert re.search(rf"rank {rank} waited 3 s for rank \d", text), text
