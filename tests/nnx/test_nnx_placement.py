"""`nnx.MoE(placement=...)`: results, gradients and reports are those without copies."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jax_ep
import quick
from jax_ep.nnx import MoE, Placement, PlacementTable
from nnx_layers import LENGTH, B, E, F, K, assert_close, make_tokens, open_group

R, N_REDUNDANT = 4, 8
FP8 = {"token_format": jax_ep.BlockwiseFP8(), "combine_dtype": jnp.bfloat16}
CASES = {
    "plain": {},
    "biases, shared expert": {"options": {"expert_bias": True, "shared_size": 32}},
    "fused shared expert": {"config": {"fused_shared_expert": True}},
    "same tokens": {"config": {"skip_a2a": True}},
    "fsdp": {"axes": {"dp": 2, "ep": 4}, "options": {"fsdp_axis": "dp"}},
    "replicas": {"axes": {"dp": 2, "ep": 4}},
    "several axes": {"axes": {"a": 2, "b": 2}, "group_axes": ("a", "b")},
    "limited": {"options": {"capacity_factor": 1.0}},
    "fp8": {"config": FP8, "options": {"fp8_matmuls": True}, "error": 0.02},
    "nodes": {"config": {"n_nodes": 2}},
}


def placement_of(seed=0, local_first=False, **options):
    load = np.random.default_rng(seed).random(E) ** 3
    logical = jax_ep.rebalance(load, R, N_REDUNDANT, **options)
    return jax_ep.ExpertPlacement(logical, R, local_first=local_first)


def make_layers(transport, *, axes=None, group_axes="ep", config=None, options=None, error=1e-5):
    """Without copies, and with them; the parameters are equal."""
    del error
    layers = []
    for placement in (None, placement_of()):
        n_experts = E if placement is None else placement.n_physical
        settings = (config or {}) | {"n_experts": n_experts}
        group = open_group(transport, axes or {"ep": R}, group_axes, **settings)
        layer = MoE(group, F, rngs=nnx.Rngs(0), placement=placement, **options or {})
        for name in ("gate_up_bias", "down_bias"):
            if getattr(layer, name) is not None:
                bias = getattr(layer, name)
                bias[...] = jax.random.normal(jax.random.key(3), bias.shape)
        layers.append(layer)
    return layers


def apply(layer, tokens):
    return layer(tokens)


@nnx.jit
def step(layer, tokens):
    """Output, report, gradients of parameters and tokens."""

    def loss(layer, tokens):
        output, report = layer(tokens)
        return jnp.sum(jnp.sin(output)) + report.balance_loss, (output, report)

    grads, results = nnx.grad(loss, argnums=(0, 1), has_aux=True)(layer, tokens)
    return *results, *grads


@pytest.mark.thorough
@pytest.mark.parametrize("name", quick.params(CASES, {"biases, shared expert", "fsdp", "fp8"}))
def test_results_and_gradients_are_those_without_copies(name):
    check_against_no_copies("auto", name)


@pytest.mark.thorough
def test_results_are_those_without_copies_on_each_transport(transport):
    check_against_no_copies(transport, "plain")


def check_against_no_copies(transport, name):
    plain, copied = make_layers(transport, **CASES[name])
    error = CASES[name].get("error", 1e-5)
    tokens = make_tokens()
    output, report, grads, of_tokens = step(plain, tokens)
    got, got_report, got_grads, got_of_tokens = step(copied, tokens)
    assert_close(got, output, error)
    assert_close(got_of_tokens, of_tokens, error)
    wanted = nnx.to_pure_dict(grads)
    for param, grad in nnx.to_pure_dict(got_grads).items():
        assert_close(grad, wanted[param], error)
    for field, one, other in zip(report._fields, report, got_report, strict=True):
        np.testing.assert_array_equal(one, other, field)


@pytest.mark.thorough
def test_another_placement_compiles_nothing(transport):
    plain, layer = make_layers(transport)
    tokens = make_tokens()
    wanted, *_ = step(plain, tokens)
    jitted = jax.jit(lambda state, tokens: nnx.merge(graph, state)(tokens))
    for seed in range(3):
        layer.placement.set(placement_of(seed, home_slack=0))
        graph, state = nnx.split(layer)
        output, _ = jitted(state, tokens)
        assert_close(output, wanted, 1e-5)
    layer.placement.set(placement_of(0).mask_ranks(np.arange(R) != 1))
    jitted(nnx.state(layer), tokens)
    assert jitted._cache_size() == 1


def test_a_trained_layer_takes_another_placement_without_compilation():
    group = open_group("auto", {"ep": R}, n_experts=E + N_REDUNDANT)
    layer = nnx.jit(lambda: MoE(group, F, placement=placement_of(), rngs=nnx.Rngs(0)))()
    tokens = make_tokens()

    @nnx.jit
    def train_step(layer, tokens):
        grads = nnx.grad(lambda layer: layer(tokens)[0].sum())(layer)
        params = nnx.state(layer, nnx.Param)
        nnx.update(layer, jax.tree.map(lambda x, g: x - 0.01 * g, params, grads))

    for seed in range(3):
        train_step(layer, tokens)
        layer.placement.set(placement_of(seed))
    assert train_step.jitted_fn._cache_size() == 1


def test_a_step_may_mask_ranks_of_its_own_layer():
    _, layer = make_layers("auto")
    tokens, everywhere = make_tokens(), placement_of()

    @nnx.jit
    def step(layer, tokens, mask):
        layer.placement.set(layer.placement.get().mask_ranks(mask))
        return layer(tokens)

    n_unserved = [step(layer, tokens, np.arange(R) != rank)[1].n_unserved for rank in (1, R)]
    assert n_unserved[0] > n_unserved[1] == 0
    jax.tree.map(np.testing.assert_array_equal, layer.placement.get(), everywhere)


def rows_by_rank(group):
    """Since equal groups were opened."""
    return np.array([one.rows_per_expert.sum() for one in group.stats()])


def test_masked_ranks_get_no_rows():
    """Choices whose expert is nowhere else add nothing, and are counted."""
    _, layer = make_layers("host")
    tokens = make_tokens()
    mask = np.arange(R) != 2
    placement = placement_of()
    logical = np.asarray(placement.physical_to_logical).reshape(R, -1)
    elsewhere = np.isin(np.arange(E), logical[mask])
    assert 0 < elsewhere.sum() < E
    layer.placement.set(placement.mask_ranks(mask))
    before = rows_by_rank(layer.group)
    output, report = jax.block_until_ready(nnx.jit(apply)(layer, tokens))
    rows = rows_by_rank(layer.group) - before
    assert rows[2] == 0 and min(np.delete(rows, 2)) > 0
    ids = np.asarray(report.topk_ids)
    assert report.n_unserved == (~elsewhere[ids]).sum() == K * B * LENGTH - rows.sum()

    # As if those experts returned zero.
    layer.placement.set(placement)
    layer.down[...] = np.where(elsewhere[:, None, None], layer.down[...], 0)
    wanted, report = nnx.jit(apply)(layer, tokens)
    assert_close(output, wanted, 1e-5)
    assert report.n_unserved == 0


def test_the_placement_is_state_that_no_gradient_reaches():
    _, layer = make_layers("auto")
    state = nnx.state(layer, PlacementTable)
    assert [x.dtype for x in jax.tree.leaves(state)] == [jnp.int32] * 3
    *_, grads, _ = step(layer, make_tokens())
    assert "placement" not in grads
    assert isinstance(layer.placement, Placement)
    specs = jax.tree.leaves(nnx.get_partition_spec(state), is_leaf=lambda x: isinstance(x, jax.P))
    assert all(set(spec) <= {None} for spec in specs)


@pytest.mark.thorough
def test_stacked_layers_have_placements_of_their_own():
    group = open_group("auto", {"ep": R}, n_experts=E + N_REDUNDANT)
    unsharded = {nnx.PARTITION_NAME: None}

    @nnx.split_rngs(splits=2)
    @nnx.vmap(in_axes=0, out_axes=0, transform_metadata=unsharded)
    def create(rngs):
        return MoE(group, F, placement=placement_of(), rngs=rngs)

    @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry, transform_metadata=unsharded)
    def run(layer, x):
        return x + layer(x)[0]

    layers, tokens = create(nnx.Rngs(0)), make_tokens()
    wanted = nnx.jit(run)(layers, tokens)
    both = jax.tree.map(lambda *x: jnp.stack(x), placement_of(1), placement_of(2))
    layers.placement.set(both)
    np.testing.assert_array_equal(layers.placement.get().first[1], placement_of(2).first)
    assert_close(nnx.jit(run)(layers, tokens), wanted, 1e-5)


@pytest.mark.thorough
def test_experts_as_codes_travel_too():
    config, options = CASES["fp8"]["config"], CASES["fp8"]["options"]
    _, layer = make_layers("auto", config=config, options=options)
    wanted, _ = nnx.jit(apply)(layer, make_tokens())
    layer.quantize_experts()
    output, _ = nnx.jit(apply)(layer, make_tokens())
    np.testing.assert_array_equal(output, wanted)


def test_another_group_must_fit_the_placement():
    _, layer = make_layers("auto")
    layer.group = open_group("auto", {"ep": R}, n_experts=E + N_REDUNDANT, max_tokens_per_rank=99)
    nnx.jit(apply)(layer, make_tokens())
    layer.group = open_group("auto", {"ep": R}, n_experts=E)
    with pytest.raises(ValueError, match="the placement must be of the group's experts and ranks"):
        layer(make_tokens())
