"""`redispatch`: another array in the rows of an earlier dispatch."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cases
import jax_ep
import oracle
import suite
from closed_forms import assert_gradient
from harness import (
    assert_same_bits,
    each_node_by_itself,
    group_of,
    make_mesh,
    on_mesh,
    put,
    shards,
    skip_if_xla_crashes,
)

CALL = "@jax_ep_combine_grad("
SMALL = cases.SMALL[4].replace(routing="out_of_range")
CASES = {
    "plain": SMALL,
    "duplicates": SMALL.replace(routing="duplicates"),
    "nothing": SMALL.replace(routing="nothing"),
    "dropped": SMALL.replace(recv_capacity=30),
    "float32": SMALL.replace(token_dtype="float16", combine_dtype="float32"),
    "no tokens": SMALL.replace(n_tokens=0),
    **{name: SMALL.replace(**flags) for name, flags in cases.FLAGS.items()},
    "padded": SMALL.replace(row_alignment=16),
    "quantized": cases.QUANTIZED_SMALL["blockwise_fp8"],
    "nodes": SMALL.replace(n_nodes=2),
}


def values_of(case, width: int) -> list[np.ndarray]:
    """Values of all ranks, `[T, width]` in the dtype of combine."""
    like = case.replace(hidden_size=width, token_dtype=case.combine_dtype, token_format="plain")
    like = dataclasses.replace(like, n_tokens=case.n_tokens, seed=case.seed + 1)
    return suite.make_inputs(like).tokens


def rows_and_gradient(group, tokens, topk_ids, values, cotangent):
    """The rows, and the gradient of the values for the cotangent of the rows in use."""
    dispatched = jax_ep.dispatch(group, tokens, topk_ids)
    rows, pull = jax.vjp(lambda values: jax_ep.redispatch(group, values, dispatched), values)
    return rows, *pull(cotangent)


@pytest.mark.parametrize("width", [None, 16])
@pytest.mark.parametrize("name", CASES)
def test_values_land_in_the_rows_of_their_tokens(name, width, transport):
    case = CASES[name]
    skip_if_xla_crashes(case)
    width = width or case.hidden_size
    inputs, values = suite.make_inputs(case), values_of(case, width)
    group = group_of(case, transport)
    cotangent = [x[:, :width] for x in inputs.expert_out]
    operands = put(group.mesh, inputs.tokens, inputs.topk_ids, values, cotangent)
    run = on_mesh(group.mesh, lambda *x: rows_and_gradient(group, *x), keep_unused=True)
    wanted = oracle.combine(inputs.routed, cotangent, n_nodes=case.n_nodes)
    for (_, rank), (rows, gradient) in shards(group.mesh, run(*operands)):
        what = f"{name}, rank {rank}"
        want = oracle.rows_of(inputs.routed, values, rank)
        assert_same_bits(rows[: len(want)], want, what)
        assert rows.shape == (inputs.routed.n_rows, width)
        assert_gradient(transport, gradient, wanted[rank], what)


def integers_of(case, width: int, dtype: str) -> list[np.ndarray]:
    """`[T, width]` of any bits, those of NaNs, infinities, -0 and subnormal numbers among them."""
    rng = np.random.default_rng(case.seed)
    special = [-1, 0, 1, -(2**31), 2**31 - 1, 0x7F800001, 0x7FC00000, 0x7F800000, -(2**23)]
    values = rng.integers(-(2**31), 2**31, (case.n_ranks, case.n_tokens, width))
    first = values.reshape(case.n_ranks, -1)[:, : len(special)]
    first[:] = special[: first.shape[1]]
    return [*values.astype(np.int32).view(dtype)]


@pytest.mark.thorough
@pytest.mark.parametrize(("width", "dtype"), [(1, "int32"), (3, "uint32"), (32, "int32")])
@pytest.mark.parametrize("name", CASES)
def test_integers_arrive_bit_by_bit(name, width, dtype, transport):
    case = CASES[name]
    skip_if_xla_crashes(case)
    inputs, values = suite.make_inputs(case), integers_of(case, width, dtype)
    group = group_of(case, transport)

    def body(tokens, topk_ids, values):
        return jax_ep.redispatch(group, values, jax_ep.dispatch(group, tokens, topk_ids))

    operands = put(group.mesh, inputs.tokens, inputs.topk_ids, values)
    rows_by_rank = on_mesh(group.mesh, body, keep_unused=True)(*operands)
    for (_, rank), rows in shards(group.mesh, rows_by_rank):
        want = oracle.rows_of(inputs.routed, values, rank)
        assert_same_bits(rows[: len(want)], want, f"{name}, rank {rank}")
        assert rows.dtype == dtype and rows.shape == (inputs.routed.n_rows, width)


@pytest.mark.usefixtures("one_process")
def test_integers_pass_through_a_gradient(transport):
    """Positions decide about rows; the rows have a gradient, the positions none."""
    group, inputs = group_of(SMALL, transport, zero_unused_rows=True), suite.make_inputs(SMALL)

    def body(tokens, topk_ids, positions):
        def loss(tokens):
            rows = jax_ep.dispatch(group, tokens, topk_ids)
            is_even = jax_ep.redispatch(group, positions, rows) % 2 == 0
            results = jnp.where(is_even, rows.tokens, jnp.zeros((), jnp.bfloat16))
            return jnp.sum(jax_ep.combine(group, results, rows).astype(jnp.float32))

        return jax.grad(loss)(tokens)

    positions = [np.arange(SMALL.n_tokens, dtype=np.int32)[:, None]] * SMALL.n_ranks
    operands = put(group.mesh, inputs.tokens, inputs.topk_ids, positions)
    gradients = on_mesh(group.mesh, body)(*operands)
    for (_, rank), gradient in shards(group.mesh, gradients):
        ids = np.asarray(inputs.topk_ids[rank])
        n_rows = ((ids >= 0) & (ids < SMALL.n_experts)).sum(axis=1, keepdims=True)
        is_even = np.arange(SMALL.n_tokens)[:, None] % 2 == 0
        wanted = np.broadcast_to(np.where(is_even, n_rows, 0), gradient.shape)
        np.testing.assert_array_equal(gradient.astype(np.float32), wanted)


@pytest.mark.usefixtures("one_process")
def test_nodes_that_are_served_by_themselves(transport):
    if transport == "xla":
        pytest.skip("xla serves all nodes at once")
    with each_node_by_itself():
        test_values_land_in_the_rows_of_their_tokens("nodes", 16, transport)
        test_integers_arrive_bit_by_bit("nodes", 3, "int32", transport)


@pytest.mark.usefixtures("one_process")
def test_the_leading_dimensions_are_those_of_the_tokens(transport):
    group = group_of(SMALL, transport)
    inputs = suite.make_inputs(SMALL)

    def body(tokens, topk_ids):
        def both(*leading):
            x, ids = tokens.reshape(*leading, -1), topk_ids.reshape(*leading, -1)
            return jax_ep.redispatch(group, x, jax_ep.dispatch(group, x, ids))

        return both(24), both(2, 3, 4)

    out = on_mesh(group.mesh, body)(*put(group.mesh, inputs.tokens, inputs.topk_ids))
    for (_, rank), (one, other) in shards(group.mesh, out):
        n_used = len(inputs.routed.rows[rank])
        assert_same_bits(one[:n_used], other[:n_used], f"rank {rank}")


def test_unused_rows_are_zero_on_request(transport):
    case = SMALL.replace(routing="zipf")
    group = group_of(case, transport, zero_unused_rows=True)
    inputs = suite.make_inputs(case)

    def body(tokens, topk_ids):
        dispatched = jax_ep.dispatch(group, tokens, topk_ids)
        ones = jnp.ones((*tokens.shape[:-1], 1), jnp.int32)
        return [jax_ep.redispatch(group, values, dispatched) for values in (tokens, ones)]

    out = on_mesh(group.mesh, body)(*put(group.mesh, inputs.tokens, inputs.topk_ids))
    for (_, rank), both in shards(group.mesh, out):
        n_used = len(inputs.routed.rows[rank])
        for rows in both:
            assert rows[:n_used].any()
            assert not rows[n_used:].any()


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("weighted", [True, False])
def test_rows_are_an_operand_of_the_call_only_where_it_reads_them(weighted):
    """Otherwise XLA would fill as many with zeros, or keep those given to combine."""
    group = group_of(SMALL, "host" if jax.default_backend() == "cpu" else "p2p")

    def body(tokens, topk_ids, topk_weights):
        rows = jax_ep.dispatch(group, tokens, topk_ids)
        out, pull = jax.vjp(
            lambda x: jax_ep.combine(group, x, rows, topk_weights if weighted else None),
            rows.tokens,
        )
        return pull(out)[0], jax_ep.redispatch(group, tokens, rows)

    inputs = suite.make_inputs(SMALL)
    arrays = put(group.mesh, inputs.tokens, inputs.topk_ids, inputs.topk_weights)
    lines = on_mesh(group.mesh, body).lower(*arrays).as_text().splitlines()
    rows = f"tensor<{group.max_recv_tokens}x{SMALL.hidden_size}xbf16>"
    calls = [line.rsplit(" : ", 1)[1].split("->") for line in lines if CALL in line]
    assert [(operands.count(rows), results.count(rows)) for operands, results in calls] == [
        (int(weighted), 1),
        (0, 1),
    ]


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("saves", [True, False])
def test_a_checkpoint_policy_can_save_the_rows(saves):
    group = group_of(SMALL, "host" if jax.default_backend() == "cpu" else "p2p")
    names = [jax_ep.DISPATCH_NAME, jax_ep.COMBINE_NAME] if saves else []
    policy = jax.checkpoint_policies.save_only_these_names(*names)

    @functools.partial(jax.checkpoint, policy=policy)
    def loss(tokens, topk_ids):
        dispatched = jax_ep.dispatch(group, tokens, topk_ids)
        rows = jax_ep.redispatch(group, tokens, dispatched)
        return jnp.sum(jax_ep.combine(group, rows * rows, dispatched).astype(jnp.float32))

    inputs = suite.make_inputs(SMALL)
    run = on_mesh(group.mesh, lambda *x: jax.value_and_grad(loss)(*x))
    text = run.lower(*put(group.mesh, inputs.tokens, inputs.topk_ids)).as_text()
    # One redispatch, the gradient of combine, and a second redispatch unless its rows are kept.
    assert text.count(CALL) == (2 if saves else 3)


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize(
    ("shape", "dtype", "message"),
    [
        ((23, 128), jnp.bfloat16, r"redispatch: values must have the shape \[24, H=128\]"),
        ((24, 128), jnp.float32, "redispatch: values must be bfloat16 or int32 or uint32; got fl"),
        ((24, 128), jnp.int8, "redispatch: values must be bfloat16 or int32 or uint32; got int8"),
        ((23, 1), jnp.int32, r"redispatch: values must have the shape \[24, W\]; got \(23, 1\)"),
        ((24,), jnp.int32, r"redispatch: values must have the shape \[24, W\]; got \(24,\)"),
        ((24, 33), jnp.int32, "redispatch: values must have from 1 to 32 integers .* got 33"),
        ((24, 0), jnp.uint32, "redispatch: values must have from 1 to 32 integers .* got 0"),
        ((24, 12), jnp.bfloat16, r"redispatch: values with fewer elements than hidden_size"),
    ],
)
def test_other_values_are_refused(shape, dtype, message, transport):
    group = group_of(SMALL, transport)

    def body(tokens, topk_ids):
        dispatched = jax_ep.dispatch(group, tokens, topk_ids)
        return jax_ep.redispatch(group, jnp.zeros(shape, dtype), dispatched)

    inputs = suite.make_inputs(SMALL)
    with pytest.raises(ValueError, match=message):
        on_mesh(group.mesh, body)(*put(group.mesh, inputs.tokens, inputs.topk_ids))


@pytest.mark.usefixtures("one_process")
def test_another_groups_rows_are_refused(transport):
    group, other = (group_of(SMALL, transport, timeout_s=each) for each in (60.0, 61.0))

    def body(tokens, topk_ids):
        return jax_ep.redispatch(group, tokens, jax_ep.dispatch(other, tokens, topk_ids))

    inputs, mesh = suite.make_inputs(SMALL), make_mesh(4)
    with pytest.raises(ValueError, match="redispatch: dispatched must come from this group"):
        on_mesh(mesh, body)(*put(mesh, inputs.tokens, inputs.topk_ids))
