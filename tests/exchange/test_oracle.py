"""The oracle against tiny examples by hand, and against closed forms."""

import ml_dtypes
import numpy as np
import pytest

import oracle
import routing

BF16 = ml_dtypes.bfloat16

# Two ranks, four experts (two each), two choices, two tokens per rank. Token t of rank s is the row
# [10 s + t].
IDS = [np.array([[3, 0], [1, 0]], np.int32), np.array([[0, 3], [2, -1]], np.int32)]
TOKENS = [np.array([[0], [1]], BF16), np.array([[10], [11]], BF16)]
WEIGHTS = [np.array([[0.5, 2], [4, 8]], np.float32)] * 2


def test_rows_are_ordered_by_expert_source_token_and_k():
    first, second = oracle.dispatch(2, 4, 8, TOKENS, IDS, WEIGHTS)
    # Expert 0: rank 0's tokens 0 and 1, rank 1's token 0; expert 1: rank 0's token 1.
    assert first.tokens.astype(int).tolist() == [[0], [1], [10], [1]]
    assert first.src_info.tolist() == [[0, 1], [1, 1], [0, 0], [1, 0]]
    assert first.row_offsets.tolist() == [0, 3, 4]
    assert first.group_sizes.tolist() == [3, 1]
    assert first.row_weights.tolist() == [2, 8, 0.5, 4]
    # Expert 2: rank 1's token 1; expert 3: rank 0's token 0, rank 1's token 0.
    assert second.tokens.astype(int).tolist() == [[11], [0], [10]]
    assert second.src_info.tolist() == [[1, 0], [0, 0], [0, 1]]
    assert second.row_offsets.tolist() == [0, 1, 3]
    assert second.expert_ids.tolist() == [0, 1]


def test_rows_beyond_the_capacity_are_dropped_from_the_end():
    first, second = oracle.dispatch(2, 4, 3, TOKENS, IDS)
    assert (first.n_dropped, second.n_dropped) == (1, 0)
    assert first.row_offsets.tolist() == [0, 3, 3]
    assert first.tokens.astype(int).tolist() == [[0], [1], [10]]


def test_a_dropped_row_contributes_nothing():
    routed = oracle.route(2, 4, 3, IDS)
    out = oracle.combine(routed, [np.ones((3, 1), np.float32)] * 2)
    # Rank 0's token 1 lost its row at expert 1; rank 1's token 1 has one choice.
    assert [x.ravel().tolist() for x in out] == [[2, 1], [2, 1]]


def test_ids_of_no_expert_are_counted_but_minus_one_is_not():
    ids = [np.array([[-1, -2], [4, 2**31 - 1]], np.int32), np.array([[0, 1]], np.int32)]
    routed = oracle.route(2, 4, 8, ids)
    assert routed.n_invalid == [3, 0]
    assert [len(rows) for rows in routed.rows] == [2, 0]


def test_an_expert_chosen_twice_gets_two_rows_in_k_order():
    ids = [np.array([[1, 1, 0]], np.int32)]
    weights = [np.array([[1, 2, 4]], np.float32)]
    (rows,) = oracle.dispatch(1, 2, 8, [np.ones((1, 1), BF16)], ids, weights)
    assert rows.src_info.tolist() == [[0, 2], [0, 0], [0, 1]]
    assert rows.row_weights.tolist() == [4, 1, 2]


def test_sums_round_after_every_product_and_every_sum():
    """A fused multiply-add would keep the error of the product; two roundings give 0."""
    weight = np.float32(1 + 2**-12)
    row = np.array([[weight], [-weight * weight]], np.float32)
    routed = oracle.route(1, 2, 2, [np.array([[0, 1]], np.int32)])
    weights = [np.array([[weight, 1]], np.float32)]
    (out,) = oracle.combine(routed, [row], topk_weights=weights)
    exact = float(weight) ** 2 + float(row[1, 0])
    assert exact != 0
    assert out.item() == 0


def test_each_rank_adds_its_rows_in_k_order_and_rounds_once():
    """Rank 0's sum 1 + 2^-9 rounds to 1 in bfloat16; added at the source, 2^-9 would count."""
    ids = [np.array([[0, 1, 2]], np.int32), np.full((1, 3), -1, np.int32)]
    routed = oracle.route(2, 4, 2, ids)
    expert_out = [np.array([[1], [2**-9]], BF16), np.array([[2**-8], [0]], BF16)]
    for weights in (None, [np.ones((1, 3), np.float32)] * 2):
        out, _ = oracle.combine(routed, expert_out, topk_weights=weights)
        assert out.item() == 1  # 1 + 2^-8 is a tie, rounded to even
    each, _ = oracle.combine(routed, expert_out, reduce=False)
    assert each.astype(np.float32).sum(axis=1).astype(BF16).item() == 1 + 2**-7


def test_each_of_several_nodes_rounds_its_sum():
    """Node 0's sum 1 + 2^-9 rounds to 1; with one node, 2^-9 counts."""
    ids = [np.array([[0, 1, 2]], np.int32)] + [np.full((1, 3), -1, np.int32)] * 3
    routed = oracle.route(4, 4, 1, ids)
    expert_out = [np.array([[x]], BF16) for x in (1, 2**-9, 2**-8, 0)]
    one_node, *_ = oracle.combine(routed, expert_out)
    two_nodes, *_ = oracle.combine(routed, expert_out, n_nodes=2)
    four_nodes, *_ = oracle.combine(routed, expert_out, n_nodes=4)
    assert two_nodes.item() == 1  # 1 + 2^-8 is a tie, rounded to even
    assert one_node.item() == four_nodes.item() == 1 + 2**-7


def test_in_the_gradient_of_dispatch_the_shared_expert_is_the_last_choice():
    """The token's own rank adds its shared row to the others before it rounds."""
    ids = [np.array([[1, 0]], np.int32), np.full((1, 2), -1, np.int32)]
    routed = oracle.route(2, 2, 2, ids, fused_shared_expert=True)
    d_rows = [np.array([[2**-8], [1]], BF16), np.array([[0], [2**-9]], BF16)]
    (d_token, _), _ = oracle.dispatch_grad(routed, d_rows)
    assert d_token.item() == 1  # 1 + 2^-8 is a tie; 1 + 2^-9 + 2^-8 would be 1 + 2^-7


def test_the_residual_is_added_before_the_cast():
    """After it, 1 + 2^-8 would have become 1."""
    routed = oracle.route(2, 2, 1, [np.array([[0, 1]], np.int32), np.full((1, 2), -1, np.int32)])
    rows = [np.array([[x]], BF16) for x in (1, 2**-8)]
    residual = [np.array([[2**-9]], BF16)] * 2
    out, _ = oracle.combine(routed, rows)
    assert out.item() == 1
    out, _ = oracle.combine(routed, rows, residual=residual)
    assert out.item() == 1 + 2**-7


@pytest.mark.parametrize("n_nodes", [1, 2])
@pytest.mark.parametrize("name", routing.ROUTINGS)
def test_identity_experts_multiply_tokens_by_the_sum_of_weights(name, n_nodes):
    """Small integers and weights 1, 2, 4 and 8 keep every sum exact."""
    n_ranks, n_experts, top_k, n_tokens = 4, 16, 4, 6
    rng = np.random.default_rng(0)
    ids = list(routing.make(name, 0, n_ranks, n_tokens, n_experts, top_k))
    tokens = [rng.integers(-8, 8, (n_tokens, 3)).astype(np.float32) for _ in ids]
    weights = [2.0 ** rng.integers(0, 4, x.shape).astype(np.float32) for x in ids]
    n_rows = n_ranks * n_tokens * top_k
    rows = oracle.dispatch(n_ranks, n_experts, n_rows, tokens, ids)
    routed = oracle.route(n_ranks, n_experts, n_rows, ids)
    out = oracle.combine(routed, [r.tokens for r in rows], topk_weights=weights, n_nodes=n_nodes)
    for x, w, i, y in zip(tokens, weights, ids, out, strict=True):
        valid = (i >= 0) & (i < n_experts)
        np.testing.assert_array_equal(y, x * (w * valid).sum(1, keepdims=True))


@pytest.mark.parametrize("name", routing.ROUTINGS)
def test_combine_without_reduce_returns_every_choice(name):
    ids = list(routing.make(name, 1, 4, 6, 16, 4))
    tokens = [np.random.default_rng(i).random((6, 3), np.float32) for i in range(4)]
    rows = oracle.dispatch(4, 16, 96, tokens, ids)
    routed = oracle.route(4, 16, 96, ids)
    out = oracle.combine(routed, [r.tokens for r in rows], reduce=False)
    for x, i, y in zip(tokens, ids, out, strict=True):
        valid = (i >= 0) & (i < 16)
        np.testing.assert_array_equal(y, x[:, None] * valid[..., None])


@pytest.mark.parametrize("n_nodes", [1, 2])
def test_the_gradients_of_combine_are_its_adjoint(n_nodes):
    """combine is bilinear: <g, out> = <d_rows, rows> = <d_weights, weights>."""
    ids = list(routing.make("duplicates", 2, 4, 6, 16, 4))
    rng = np.random.default_rng(3)
    routed = oracle.route(4, 16, 20, ids)
    rows = [rng.standard_normal((20, 3)).astype(np.float32) for _ in ids]
    weights = [rng.random(x.shape, np.float32) for x in ids]
    d_out = [rng.standard_normal((6, 3)).astype(np.float32) for _ in ids]
    out = oracle.combine(routed, rows, topk_weights=weights, n_nodes=n_nodes)
    d_rows, d_weights = oracle.combine_grad(routed, rows, d_out, topk_weights=weights)
    value = np.vdot(np.stack(d_out), np.stack(out))
    assert sum(routed.n_dropped) > 0
    np.testing.assert_allclose(np.vdot(np.stack(d_rows), np.stack(rows)), value, 1e-5)
    np.testing.assert_allclose(np.vdot(np.stack(d_weights), np.stack(weights)), value, 1e-5)


def test_the_gradient_of_dispatch_is_its_adjoint():
    ids = list(routing.make("duplicates", 2, 4, 6, 16, 4))
    rng = np.random.default_rng(3)
    routed = oracle.route(4, 16, 20, ids)
    tokens = [rng.standard_normal((6, 3)).astype(np.float32) for _ in ids]
    weights = [rng.random(x.shape, np.float32) for x in ids]
    rows = oracle.dispatch(4, 16, 20, tokens, ids, weights)
    d_rows = [rng.standard_normal((20, 3)).astype(np.float32) for _ in ids]
    d_row_weights = [rng.random(20, np.float32) for _ in ids]
    d_tokens, d_weights = oracle.dispatch_grad(routed, d_rows, d_row_weights)
    for cotangents, primals, in_rows, of_rows in (
        (d_tokens, tokens, d_rows, [r.tokens for r in rows]),
        (d_weights, weights, d_row_weights, [r.row_weights for r in rows]),
    ):
        one = np.vdot(np.stack(cotangents), np.stack(primals))
        pairs = zip(in_rows, of_rows, strict=True)
        other = sum(np.vdot(d[: len(x)], x) for d, x in pairs)
        np.testing.assert_allclose(one, other, 1e-5)


@pytest.mark.parametrize("name", routing.ROUTINGS)
def test_routings_are_reproducible_and_match_their_description(name):
    ids = routing.make(name, 5, 4, 9, 12, 5)
    assert ids.shape == (4, 9, 5)
    assert ids.dtype == np.int32
    np.testing.assert_array_equal(ids, routing.make(name, 5, 4, 9, 12, 5))
    in_range = (ids >= 0) & (ids < 12)
    tokens = zip(ids.reshape(-1, 5), in_range.reshape(-1, 5), strict=True)
    repeats = [len(set(choices[valid])) < valid.sum() for choices, valid in tokens]
    assert any(repeats) == (name in ("duplicates", "one_expert_k_times"))
    assert (not in_range.any()) == (name == "nothing")
    assert bool((ids >= 12).any()) == (name == "out_of_range")
