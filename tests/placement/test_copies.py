"""Dispatch and combine with copies of experts: what is the same as without, in which bits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_ep
import oracle_placement as oracle
from harness import AXIS, assert_same_bits, float32_group, make_mesh

R, E, K, H, F, T = 8, 32, 4, 32, 16, 24
BY_RANK, EVERYWHERE = jax.P(AXIS), jax.P()


def open_group(transport, n_experts, **options):
    sizes = dict(n_experts=n_experts, top_k=K, hidden_size=H, max_tokens_per_rank=T)
    return float32_group(make_mesh(R), transport, **sizes | options)


def make_placement(**options):
    ids = oracle.zipf_choices(0, R * T, E, K, 1.2)
    load = np.bincount(ids.reshape(-1), minlength=E)
    return jax_ep.ExpertPlacement(jax_ep.rebalance(load, R, E // R * 4), R, **options)


def make_operands(seed=0, integers=False):
    """Tokens, ids, weights, gate_up and down; of integers, all products and sums are exact."""
    rng = np.random.default_rng(seed)
    shapes = (R * T, H), (R * T, K), (E, H, 2 * F), (E, F, H)
    arrays = [rng.standard_normal(shape).astype(np.float32) for shape in shapes]
    if integers:
        arrays = [np.round(2 * x) for x in arrays]
    tokens, weights, gate_up, down = arrays
    return tokens, oracle.zipf_choices(seed, R * T, E, K, 1.2), weights, gate_up, down


def linear_experts(rows, gate_up, down):
    """Two matmuls with nothing in between, for exact results of integers."""
    hidden = jax_ep.grouped_matmul(rows.tokens, gate_up[..., :F], rows.row_offsets)
    return jax_ep.grouped_matmul(hidden, down, rows.row_offsets)


def elementwise_experts(rows, gate_up, down):
    """Each expert has factors of its own; no row depends on others."""
    factors = gate_up[:, :, 0].at[rows.row_expert_ids].get(mode="clip")
    return rows.tokens * factors


def on_all_ranks(group, experts, placement, policy=None, **options):
    """The layer of all ranks; placement may be None, and so may a `jax.checkpoint` policy."""

    def layer(tokens, ids, weights, gate_up, down, placement):
        if placement is not None:
            ids = jax_ep.place_choices(group, ids, placement).topk_ids
            gate_up, down = jax_ep.replicate_experts(group, (gate_up, down), placement)
        rows = jax_ep.dispatch(group, tokens, ids, weights if options.get("reduce", True) else None)
        return jax_ep.combine(group, experts(rows, gate_up, down), rows, **options)

    mapped = jax.shard_map(
        layer if policy is None else jax.checkpoint(layer, policy=policy),
        mesh=group.mesh,
        in_specs=(*[BY_RANK] * 5, EVERYWHERE),
        out_specs=BY_RANK,
    )
    return lambda *operands: mapped(*operands, placement)


def with_and_without(transport, experts, **options):
    placement = make_placement()
    assert placement.n_physical == E + 16
    plain = on_all_ranks(open_group(transport, E), experts, None, **options)
    return plain, on_all_ranks(
        open_group(transport, placement.n_physical), experts, placement, **options
    )


def test_rows_of_choices_have_the_same_bits(transport):
    """`reduce=False`: whichever copy computes a row, and whatever rank it is on."""
    plain, copied = with_and_without(transport, elementwise_experts, reduce=False)
    operands = make_operands()
    assert_same_bits(jax.jit(copied)(*operands), jax.jit(plain)(*operands), "rows")


def test_sums_of_integers_have_the_same_bits_and_so_have_all_gradients(transport):
    plain, copied = with_and_without(transport, linear_experts)
    tokens, ids, *others = make_operands(integers=True)

    def gradients(layer):
        def loss(tokens, *others):
            output = layer(tokens, ids, *others)
            return jnp.sum(output * tokens[:, ::-1]), output

        grad = jax.grad(loss, argnums=(0, 1, 2, 3), has_aux=True)
        return jax.jit(grad)(tokens, *others)

    pairs = zip(*(jax.tree.leaves(gradients(layer)) for layer in (copied, plain)), strict=True)
    for i, (got, wanted) in enumerate(pairs):
        assert np.abs(wanted).max() < 2**24  # exact in float32, as are all partial sums
        assert np.any(wanted)
        np.testing.assert_array_equal(got, wanted, f"result {i}")


def test_other_sums_agree_within_rounding(transport):
    plain, copied = with_and_without(transport, jax_ep.expert_mlp)
    operands = make_operands()
    wanted = jax.jit(plain)(*operands)
    np.testing.assert_allclose(jax.jit(copied)(*operands), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.thorough
def test_a_placement_in_order_changes_no_bit(transport):
    group = open_group(transport, E)
    placement = jax_ep.ExpertPlacement(np.arange(E), R)
    operands = make_operands()
    layers = (on_all_ranks(group, jax_ep.expert_mlp, each) for each in (None, placement))
    wanted, got = (jax.jit(layer)(*operands) for layer in layers)
    assert_same_bits(got, wanted, "output")


@pytest.mark.thorough
def test_a_checkpoint_policy_keeps_the_copies_or_brings_them_again():
    group = open_group("xla", E + 16)
    placement, (tokens, ids, *others) = make_placement(), make_operands()
    found = []
    for names in ([jax_ep.EXPERT_COPIES_NAME], []):
        policy = jax.checkpoint_policies.save_only_these_names(jax_ep.DISPATCH_NAME, *names)
        layer = on_all_ranks(group, jax_ep.expert_mlp, placement, policy=policy)
        grad = jax.grad(lambda *x, layer=layer: jnp.sum(layer(tokens, ids, *x)), argnums=(0, 1, 2))
        n_sent = str(jax.make_jaxpr(grad)(*others)).count(" all_to_all[")
        found.append((n_sent, jax.jit(grad)(*others)))
    (n_kept, wanted), (n_again, got) = found
    assert n_again == n_kept + 2  # gate_up and down travel once more
    jax.tree.map(np.testing.assert_array_equal, got, wanted)


@pytest.mark.thorough
def test_two_runs_have_the_same_bits(transport):
    _, copied = with_and_without(transport, jax_ep.expert_mlp)
    operands = make_operands()
    run = jax.jit(jax.grad(lambda *x: jnp.sum(jnp.sin(copied(*x))), argnums=(0, 2, 3, 4)))
    for one, other in zip(run(*operands), run(*operands), strict=True):
        assert_same_bits(one, other, "gradient")


@pytest.mark.usefixtures("one_process")
def test_the_rows_that_a_group_counts_balance_its_next_steps():
    """Statistics of physical experts, logical load, placement: rows per rank, as they arrive."""
    n_experts, n_tokens = 128, 256
    group = open_group(
        "host", n_experts + n_experts // R, max_tokens_per_rank=n_tokens, name="counted"
    )
    home = np.arange(n_experts).reshape(R, -1)
    first = np.concatenate([home, np.roll(home, -1, axis=0)[:, : n_experts // R // R]], axis=1)
    placement = jax_ep.ExpertPlacement(first.reshape(-1), R)

    def send(tokens, ids, placement):
        ids = jax_ep.place_choices(group, ids, placement).topk_ids
        return jax_ep.dispatch(group, tokens, ids).row_offsets[-1:]

    specs = BY_RANK, BY_RANK, EVERYWHERE
    jitted = jax.jit(jax.shard_map(send, mesh=group.mesh, in_specs=specs, out_specs=BY_RANK))
    tokens = np.ones((R * n_tokens, H), np.float32)
    ids = [oracle.zipf_choices(seed, R * n_tokens, n_experts, K, 1.1) for seed in range(2)]
    before = np.asarray(jitted(tokens, ids[0], placement))
    counted = sum(one.rows_to_expert for one in group.stats())
    load = placement.logical_load(counted)
    np.testing.assert_array_equal(load, np.bincount(ids[0].reshape(-1), minlength=n_experts))
    balanced = jax_ep.ExpertPlacement(jax_ep.rebalance(load, R, n_experts // R), R)
    after = np.asarray(jitted(tokens, ids[1], balanced))
    assert jitted._cache_size() == 1
    assert oracle.imbalance(before) > 0.3
    assert oracle.imbalance(after) < 0.15
    group.close()
