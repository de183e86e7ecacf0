"""Expert placements: the copies that choices go to, and the weights and gradients of copies."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_ep
import oracle_placement as oracle
from harness import assert_same_bits, make_mesh
from placed_choices import (
    BY_RANK,
    E,
    K,
    R,
    assert_shards,
    check_choices_of_every_process,
    make_ids,
    open_group,
    place,
    random_placement,
)

# Copies: 3 of expert 0, 2 of 6 and 7; experts 1, 2 and 5 are not at home, on ranks 0, 1 and 2.
PLACEMENT = np.array([0, 2, 5, 1, 3, 0, 4, 7, 6, 6, 7, 0])


@pytest.mark.parametrize("n_nodes", [1, 2])
@pytest.mark.parametrize("local_first", [False, True])
@pytest.mark.parametrize("mask", [None, [1, 1, 1, 0], [0, 1, 0, 1], [0, 0, 0, 0]], ids=str)
def test_choices_go_where_the_oracle_says(mask, local_first, n_nodes):
    group = open_group("xla", n_nodes=n_nodes)
    placement = jax_ep.ExpertPlacement(PLACEMENT, R, local_first=local_first)
    if mask is not None:
        placement = placement.mask_ranks(np.array(mask, bool))
    ids = make_ids()
    placed, unserved = place(group, ids, placement)
    wanted = oracle.place(ids, PLACEMENT, mask=mask, local_first=local_first, n_nodes=n_nodes)
    assert placed.dtype == unserved.dtype == jnp.int32
    np.testing.assert_array_equal(placed, wanted[0])
    np.testing.assert_array_equal(unserved, wanted[1])
    assert (np.sum(unserved) > 0) == (mask is not None and mask[0] == 0)


def test_the_oracle_places_an_example_by_hand():
    """Expert 0 has the copies 0, 5 and 11; 0.6180 of a turn from rank to rank, then in turn."""
    ids = np.zeros((R, 2, 1), np.int32)
    ids[1, 0] = 3  # none of expert 0
    placed, unserved = oracle.place(ids, PLACEMENT)
    turns = (np.arange(R) * 0.6180339887 % 1 * 3).astype(int)
    assert turns.tolist() == [0, 1, 0, 2]
    assert placed[..., 0].tolist() == [[0, 5], [4, 5], [0, 5], [11, 0]]
    assert not unserved.any()


def test_the_oracle_sums_copies_by_hand():
    """bfloat16 has 8 bits: 256 + 1 + 1 is 258 in float32, but 256 if each sum is rounded."""
    gradients = np.array([256, 7, 1, 1], jnp.bfloat16)
    assert oracle.sum_copies(gradients, np.array([0, 1, 0, 0])).tolist() == [258, 7]
    assert oracle.replicate(np.array([3, 4]), np.array([0, 1, 0, 0])).tolist() == [3, 4, 3, 3]


def test_a_huge_id_needs_no_memory():
    logical = np.array([*range(E - 1), 2**32 - 1], np.uint32)
    with pytest.raises(ValueError, match=r"each of the experts 0 to 4294967295; expert 7 is miss"):
        jax_ep.ExpertPlacement(logical, R)


def test_a_mask_replaces_an_earlier_one_also_in_jit():
    placement = jax_ep.ExpertPlacement(PLACEMENT, R)
    again = jax.jit(lambda p, mask: p.mask_ranks(mask))(
        placement.mask_ranks(np.zeros(R, bool)), [1] * R
    )
    for one, other in zip(jax.tree.leaves(placement), jax.tree.leaves(again), strict=True):
        assert_same_bits(one, other, "tables")
    assert jax.tree.structure(placement) == jax.tree.structure(again)


def test_all_ranks_choose_alike_with_skip_a2a():
    group = open_group("xla", skip_a2a=True)
    ids = np.stack([make_ids()[0]] * R)
    placed, _ = place(group, ids, jax_ep.ExpertPlacement(PLACEMENT, R))
    np.testing.assert_array_equal(placed, oracle.place(ids[:1], PLACEMENT)[0].repeat(R, 0))


def test_a_placement_in_order_changes_no_id():
    group = open_group("xla", n_physical=E)
    ids = make_ids()
    placed, _ = place(group, ids, jax_ep.ExpertPlacement(np.arange(E), R))
    np.testing.assert_array_equal(placed, np.where((ids < -1) | (ids > E), E, ids))


@pytest.mark.parametrize("leading", [(), (0,), (3, 5)])
def test_tokens_may_have_any_leading_dimensions(leading):
    group = open_group("xla")
    ids = np.full((R, *leading, K), 5, np.int16)
    placed, _ = place(group, ids, jax_ep.ExpertPlacement(PLACEMENT, R))
    flat = ids.reshape(R, -1, K).astype(np.int32)
    np.testing.assert_array_equal(placed, oracle.place(flat, PLACEMENT)[0].reshape(ids.shape))


@pytest.mark.thorough
def test_copies_get_equally_many_choices_whichever_tokens_choose_the_expert():
    """Every k-th token for all k, from any first one, and tokens drawn at random; 2 to 8 copies."""
    n_ranks, n_tokens, n_copies = 8, 4096, np.arange(2, 9)
    experts = np.repeat(np.arange(8), [*n_copies, 5])  # the last one fills up
    logical = experts.reshape(5, n_ranks).T.reshape(-1)
    group = open_group("xla", None, n_ranks, 40, top_k=7, max_tokens_per_rank=n_tokens)
    mapped = jax.shard_map(
        lambda ids, placement: jax_ep.place_choices(group, ids, placement).topk_ids,
        mesh=group.mesh,
        in_specs=(BY_RANK, jax.P()),
        out_specs=BY_RANK,
    )
    run, placement = jax.jit(mapped), jax_ep.ExpertPlacement(logical, n_ranks)
    rng, tokens = np.random.default_rng(0), np.arange(n_tokens)
    chosen = [tokens % k == rng.integers(k) for k in range(1, n_tokens + 1)]
    chosen += [rng.random(n_tokens) < rng.random() for _ in range(8 * n_ranks)]
    for chooses in np.stack(chosen).reshape(-1, n_ranks * n_tokens, 1):
        placed = run(np.where(chooses, np.arange(7), -1).astype(np.int32), placement)
        for of_rank in np.asarray(placed).reshape(n_ranks, -1):
            counts = np.bincount(of_rank[of_rank >= 0], minlength=40)
            for expert in range(7):
                assert np.ptp(counts[logical == expert]) <= 1, (expert, counts)


@pytest.mark.parametrize("n_copies", range(2, 9))
def test_ranks_with_equally_many_choices_spread_them(n_copies):
    """Of up to 256 ranks together, no copy is off the mean by 3 choices."""
    ranks = np.arange(256)
    for expert in range(64):
        first = np.array([oracle.first_turn(rank, expert, n_copies) for rank in ranks])
        taken = np.zeros((256, n_copies))
        for n_choices in range(1, n_copies):
            taken[ranks, (first + n_choices - 1) % n_copies] += 1
            mean = n_choices / n_copies * (ranks[:, None] + 1)
            assert np.abs(taken.cumsum(0) - mean).max() < 3


def mover(group):
    """A function to the copies or, if those of the copies are given, the gradients of the homes."""

    def body(weights, placement, gradients):
        copies, pull = jax.vjp(lambda w: jax_ep.replicate_experts(group, w, placement), weights)
        return copies if gradients is None else pull(gradients)[0]

    specs = BY_RANK, jax.P(), BY_RANK
    return jax.jit(jax.shard_map(body, mesh=group.mesh, in_specs=specs, out_specs=BY_RANK))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(
    "n_ranks,n_home,n_redundant", [(4, 2, 1), (8, 4, 1), (8, 3, 5), (2, 3, 2), (2, 3, 0), (1, 4, 0)]
)
def test_copies_and_gradients_are_those_of_the_oracle(n_ranks, n_home, n_redundant, dtype):
    check_copies("xla", n_ranks, n_home, n_redundant, dtype)


def check_copies(transport, n_ranks, n_home, n_redundant, dtype):
    rng = np.random.default_rng(n_ranks)
    n_physical = n_ranks * (n_home + n_redundant)
    with open_group(transport, n_ranks=n_ranks, n_physical=n_physical) as group:
        move = mover(group)
        for _ in range(3):
            logical = random_placement(rng, n_ranks, n_home, n_redundant)
            placement = jax_ep.ExpertPlacement(logical, n_ranks)
            weights = rng.standard_normal((n_ranks * n_home, 3, 5)).astype(dtype)
            copies = move(weights, placement, None)
            assert_shards(copies, oracle.replicate(weights, logical), "copies")
            gradients = rng.standard_normal((n_physical, 3, 5)) * 10 ** rng.uniform(-2, 2)
            gradients = gradients.astype(dtype)
            sums = move(weights, placement, gradients)
            assert_shards(sums, oracle.sum_copies(gradients, logical), "gradients")


def check_every_process() -> None:
    """A target of `processes.run_processes`: choices, copies and gradients; with a GPU each."""
    check_choices_of_every_process()
    for dtype in ("float32", "bfloat16"):
        check_copies("auto", len(jax.devices()), 3, 1, dtype)


def test_the_order_of_the_sum_is_that_of_physical_experts():
    """Ascending: 1e8 + 1 - 1e8 is 0 in float32, in other orders 1."""
    group = open_group("xla")
    gradients = np.zeros((len(PLACEMENT), 1), np.float32)
    gradients[[0, 5, 11], 0] = 1e8, 1, -1e8
    placement, move = jax_ep.ExpertPlacement(PLACEMENT, R), mover(group)
    assert move(np.zeros((E, 1), np.float32), placement, gradients)[0, 0] == 0
    gradients[[0, 5, 11], 0] = 1e8, -1e8, 1
    assert move(np.zeros((E, 1), np.float32), placement, gradients)[0, 0] == 1


def test_codes_biases_and_integers_travel_in_one_pytree(transport):
    group = open_group(transport)
    rng = np.random.default_rng(0)
    weights = {
        "codes": jnp.asarray(rng.standard_normal((E, 4, 4)), jnp.float8_e4m3fn),
        "bias": rng.standard_normal(E).astype(jnp.bfloat16),
        "bytes": rng.integers(0, 256, (E, 2)).astype(np.uint8),
        "numbers": rng.integers(-9, 9, (E, 2, 1, 3)).astype(np.int32),
        "halves of bytes": rng.integers(-8, 8, (E, 3)).astype(jnp.int4),
        "codes of 4 bits": rng.integers(-4, 5, (E, 4)).astype(jnp.float4_e2m1fn),
        "nothing": np.zeros((E, 0), np.float32),
    }
    mapped = jax.shard_map(
        lambda w, p: jax_ep.replicate_experts(group, w, p),
        mesh=group.mesh,
        in_specs=(BY_RANK, jax.P()),
        out_specs=BY_RANK,
    )
    copies = jax.jit(mapped)(weights, jax_ep.ExpertPlacement(PLACEMENT, R))
    for name, each in weights.items():
        assert_same_bits(copies[name], np.asarray(each)[PLACEMENT], name)


def test_another_placement_or_mask_needs_no_compilation():
    group = open_group("xla")
    mapped = jax.shard_map(
        lambda w, ids, p: (
            jax_ep.replicate_experts(group, w, p),
            jax_ep.place_choices(group, ids[0], p).topk_ids[None],
        ),
        mesh=group.mesh,
        in_specs=(BY_RANK, BY_RANK, jax.P()),
        out_specs=BY_RANK,
    )
    jitted = jax.jit(mapped)
    weights, ids = np.arange(E * 2.0, dtype=np.float32).reshape(E, 2), make_ids()
    other = np.roll(PLACEMENT, 3)
    masked = jax_ep.ExpertPlacement(PLACEMENT, R).mask_ranks(np.array([1, 1, 0, 1]))
    for logical, placement, mask in (
        (PLACEMENT, jax_ep.ExpertPlacement(PLACEMENT, R), None),
        (other, jax_ep.ExpertPlacement(other.tolist(), R), None),
        (PLACEMENT, masked, [1, 1, 0, 1]),
    ):
        copies, placed = jitted(weights, ids, placement)
        np.testing.assert_array_equal(copies, weights[logical])
        np.testing.assert_array_equal(placed, oracle.place(ids, logical, mask=mask)[0])
    assert jitted._cache_size() == 1


@pytest.mark.parametrize("axes", [("dp", "ep"), ("ep", "dp")])
def test_gradients_of_all_replicas_of_a_mesh_add_up(axes):
    mesh = make_mesh(R, names=axes)
    group = open_group("xla", mesh)
    placement = jax_ep.ExpertPlacement(PLACEMENT, R)
    weights = np.random.default_rng(0).standard_normal((E, 4)).astype(np.float32)

    def body(weights, placement):
        def loss(weights):
            copies = jax_ep.replicate_experts(group, weights, placement)
            factor = jax.lax.axis_index("dp").astype(jnp.float32) + 1  # 1 and 2
            return jnp.sum(copies**2 * factor)

        return jax.grad(loss)(weights)

    mapped = jax.shard_map(body, mesh=mesh, in_specs=(BY_RANK, jax.P()), out_specs=BY_RANK)
    gradient = jax.jit(mapped)(weights, placement)
    counts = np.bincount(PLACEMENT)[:, None]
    np.testing.assert_allclose(gradient, 2 * weights * counts * 3, rtol=1e-6)


def test_second_derivatives_are_defined():
    group = open_group("xla")
    placement = jax_ep.ExpertPlacement(PLACEMENT, R)
    weights = np.random.default_rng(0).standard_normal(E).astype(np.float32)

    def loss(weights):
        mapped = jax.shard_map(
            lambda w, p: jax_ep.replicate_experts(group, w, p) ** 3,
            mesh=group.mesh,
            in_specs=(BY_RANK, jax.P()),
            out_specs=BY_RANK,
        )
        return mapped(weights, placement).sum()

    twice = jax.jit(jax.grad(lambda w: jnp.sum(jax.grad(loss)(w) ** 2)))(weights)
    counts = np.bincount(PLACEMENT)
    wanted = 2 * (3 * weights**2 * counts) * 6 * weights * counts
    np.testing.assert_allclose(twice, wanted, rtol=1e-5)
