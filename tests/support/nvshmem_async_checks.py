"""Checks of asynchronous calls and unreduced combines in a job on GPUs with transport `nvshmem`.

See nvshmem_checks.py. Every check is made with calls that overlap with their exchange, and with
calls of too few tokens for that.
"""

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

import cases
import jax_ep
import overlapping_layers
import suite
from harness import assert_trees_equal, make_mesh, on_mesh, put
from jax_ep.nodes import overlapped
from jax_ep.nodes.calls import NodesCalls
from jax_ep.nodes.nvshmem.rails import NvshmemRails
from nvshmem_checks import check_a_skipped_call, check_a_skipped_overlapped_call
from nvshmem_groups import NAME, map_no_peers, open_group, small

MANY = 10**6
# Of groups; each has its own.
_timeouts_s = iter(range(60, 200))


def thresholds(*least: int) -> Iterator[float]:
    """Sets each; yields a time limit for groups, and so programs, of their own."""
    for overlapped.min_tokens in least:
        yield float(next(_timeouts_s))


def check_async() -> None:
    """Results match the oracle, and gradients have the bits of synchronous calls."""
    many = small().replace(n_tokens=3000, max_tokens=3000, hidden_size=1024, routing="zipf")
    check_results(many, 1, MANY)
    forms = overlapping_layers.FORMS
    check_gradients(small().replace(weights="source"), forms, in_layer, in_weighted_rows)
    check_gradients(many, ("sync", "overlap"), in_layer)
    map_no_peers()
    check_results(many, 1)


def check_results(many: cases.Case, *least: int) -> None:
    mesh = make_mesh(len(jax.devices()))
    for timeout_s in thresholds(*least):
        for case in (
            *(small().replace(weights=each, routing="duplicates") for each in ("none", "row")),
            small().replace(weights="source", routing="with_minus_one"),
            small().replace(hidden_size=1024, token_format=cases.QUANTIZED_NAMES[0], weights="row"),
            many.replace(weights="none"),  # rows, too
        ):
            options = dict(is_async=True, of_group={"timeout_s": timeout_s})
            suite.check(case, NAME, mesh, **options)


in_layer = functools.partial(overlapping_layers.gradient, function=overlapping_layers.layer)
in_weighted_rows = overlapping_layers.gradient_of_weighted_rows


def check_gradients(case: cases.Case, forms: tuple[str, ...], *functions) -> None:
    """Gradients of layers with work beside their calls."""
    mesh = make_mesh(case.n_ranks)
    inputs, size = suite.make_inputs(case), case.hidden_size
    matrix = np.random.default_rng(5).standard_normal((size, size)).astype(np.float32) / 8
    arrays = inputs.tokens, inputs.topk_ids, inputs.topk_weights, [matrix] * case.n_ranks
    operands = put(mesh, *map(np.nan_to_num, map(np.stack, arrays)))
    results = []
    for timeout_s in thresholds(MANY, 1):
        with open_group(timeout_s, case) as group:
            for form in forms:
                runs = [on_mesh(mesh, functools.partial(each, group, form)) for each in functions]
                results.append([run(*operands) for run in runs])
                what = f"{form}, overlapped from {overlapped.min_tokens} tokens on: "
                assert_trees_equal(mesh, results[-1], results[0], what)
            group.check()
    assert all(np.abs(np.asarray(x, np.float32)).sum() > 0 for x in local_leaves(results[0]))


def local_leaves(tree) -> list[np.ndarray]:
    return [np.asarray(x.addressable_shards[0].data) for x in jax.tree.leaves(tree)]


def check_a_skipped_asynchronous_call() -> None:
    """The last rank starts no call, of too few tokens to overlap; the others say so in time."""
    overlapped.min_tokens = MANY

    def dispatch_where(group):
        def body(tokens, topk_ids, calls):
            shape = (group.max_recv_tokens, tokens.shape[1])
            return jax.lax.cond(
                calls,
                lambda: suite.dispatch(group, tokens, topk_ids, is_async=True).tokens,
                lambda: jnp.zeros(shape, tokens.dtype) + tokens[0],
            )

        return on_mesh(group.mesh, body)

    check_a_skipped_call(dispatch_where)


def check_a_skipped_asynchronous_dispatch() -> None:
    """The last rank has sent its ids, but not its tokens, which the call in flight waits for."""
    check_a_skipped_overlapped_call(
        "start_dispatch", lambda group, rows: rows.tokens, NvshmemRails, is_async=True
    )


def check_a_skipped_asynchronous_combine() -> None:
    """The last rank returns no rows and no sums; those of its rail are NaN."""

    def finish(group, rows):
        return suite.combine(group, rows.tokens, rows, is_async=True)

    result = check_a_skipped_overlapped_call("start_combine", finish, NvshmemRails)
    if jax.process_index() == len(jax.devices()) // 2 - 1:
        (shard,) = result.addressable_shards
        assert np.isnan(np.asarray(shard.data, np.float32)).all()


def check_a_skipped_unreduced_combine() -> None:
    """The last rank returns no rows, neither inside its node nor to the others."""

    def finish(group, rows):
        return jax_ep.combine(group, rows.tokens, rows, reduce=False)

    check_a_skipped_overlapped_call("combine", finish, NodesCalls)
