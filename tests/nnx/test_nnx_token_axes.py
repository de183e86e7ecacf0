"""jax_ep.nnx.MoE with tokens that are sharded over several dimensions; test_nnx.py has variants."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import P

from jax_ep.nnx import MoE
from nnx_layers import (
    LENGTH,
    V3,
    B,
    E,
    F,
    H,
    K,
    S,
    assert_close,
    dense,
    losses_of,
    make_layer,
    make_mesh,
    make_tokens,
    open_group,
    weights_of,
)

pytestmark = pytest.mark.usefixtures("one_process", "float32_matmuls")
AXES = {"dp": 4, "ep": 2}
OPTIONS = {"router": V3, "router_bias": True, "shared_size": S, "balance_per_sequence": True}
BOTH = P("dp", "ep")


@nnx.jit
def call(layer, *arguments):
    return layer(*arguments)


def masked(layer, tokens, mask):
    """Output, losses and load of the plain layer, sequence by sequence, without the padding."""
    weights = weights_of(layer)
    output, _, _ = dense(weights, tokens, layer)
    sequences = [dense(weights, tokens[i, : mask[i].sum()][None], layer) for i in range(B)]
    balance = sum(losses[0] for _, losses, _ in sequences) / B
    tokens = np.asarray(tokens)[mask][None]
    _, (_, z_loss), load = dense(weights, tokens, layer)
    return np.where(mask[..., None], output, 0), (balance, z_loss), load


@pytest.mark.thorough
@pytest.mark.parametrize("token_axes", [("dp", "ep"), BOTH])
def test_padding_counts_for_nothing_where_sequences_are_sharded(token_axes, transport):
    """Some shards of a sequence are padding, entirely or in part."""
    layer = make_layer(transport, axes=AXES, token_axes=token_axes, **OPTIONS)
    tokens, mask = make_tokens(), np.arange(LENGTH) < 1 + np.arange(B)[:, None] % LENGTH
    output, report = call(layer, tokens, mask)
    wanted, losses, load = masked(layer, tokens, mask)
    assert_close(output, wanted)
    jax.tree.map(assert_close, losses_of(report), losses)
    np.testing.assert_array_equal(report.expert_load, load)
    assert np.all((report.topk_ids >= 0) == mask[..., None])
    before = np.asarray(layer.router_bias[...])
    layer.update_bias(report.expert_load, 0.5)
    moved = before + 0.5 * np.sign(np.mean(load) - np.asarray(load, np.float32))
    np.testing.assert_allclose(layer.router_bias[...], moved, rtol=1e-6)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "token_axes", [BOTH, P("dp", "ep", None), P("ep", "dp"), P(None, ("dp", "ep"))]
)
def test_layouts_of_the_tokens_agree(token_axes, transport):
    """A token's result depends on its own experts, wherever the token is."""
    tokens, options = make_tokens((B, 8, H)), {"axes": AXES, "shared_size": S}
    wanted, by_batch = call(make_layer(transport, **options), tokens)
    output, report = call(make_layer(transport, token_axes=token_axes, **options), tokens)
    assert_close(output, wanted, 1e-6)
    np.testing.assert_array_equal(report.topk_ids, by_batch.topk_ids)
    np.testing.assert_array_equal(report.expert_load, by_batch.expert_load)
    jax.tree.map(lambda x, y: assert_close(x, y, 1e-6), losses_of(report), losses_of(by_batch))


def explicit_layer(axes, **options):
    devices = make_mesh(axes).devices.flat
    kinds = (jax.sharding.AxisType.Explicit,) * len(axes)
    mesh = jax.make_mesh(tuple(axes.values()), tuple(axes), kinds, devices=[*devices])
    group = open_group("auto", None, mesh=mesh)
    return MoE(group, F, rngs=nnx.Rngs(0), **options), lambda x, spec: jax.device_put(
        x, jax.NamedSharding(mesh, spec)
    )


@pytest.mark.thorough
@pytest.mark.parametrize("token_axes", [None, BOTH])
def test_a_layer_on_explicit_axes_takes_tokens_as_they_are_sharded(token_axes):
    layer, put = explicit_layer(AXES, token_axes=token_axes)
    tokens, mask = make_tokens(), np.arange(LENGTH) < 1 + np.arange(B)[:, None] % LENGTH
    output, report = call(layer, put(tokens, BOTH), put(mask, BOTH))
    assert jax.typeof(output).sharding.spec == P("dp", "ep", None)
    assert jax.typeof(report.topk_ids).sharding.spec == P("dp", "ep", None)
    wanted = np.where(mask[..., None], dense(weights_of(layer), tokens, layer)[0], 0)
    assert_close(output, wanted)

    def loss(layer, tokens):
        return jnp.sum(jnp.sin(layer(tokens)[0]))

    grads = nnx.jit(nnx.grad(loss))(layer, put(tokens, BOTH))
    weights = weights_of(layer)
    of_dense = jax.grad(lambda w: jnp.sum(jnp.sin(dense(w, tokens, layer)[0])))(weights)
    for name, grad in nnx.to_pure_dict(grads).items():
        assert_close(grad, of_dense[name])


@pytest.mark.thorough
@pytest.mark.parametrize("spec", [P("ep"), P(("ep", "dp")), P(None, "ep")])
def test_the_default_follows_explicit_axes(spec):
    """Along axes that the tokens are not sharded over, devices repeat the work."""
    layer, put = explicit_layer(AXES)
    output, report = call(layer, put(make_tokens(), spec))
    assert_close(output, dense(weights_of(layer), make_tokens(), layer)[0])
    assert report.expert_load.sum() == K * B * LENGTH


@pytest.mark.parametrize(
    "options, spec, message",
    [
        (
            {},
            P("dp"),
            r"over the group's axis 'ep'; .* say P\('dp',?\). Reshard them: "
            r"jax.reshard\(tokens, jax.NamedSharding\(mesh, jax.P\(\('dp', 'ep'\),?\)\)\)\.$",
        ),
        (
            {"token_axes": BOTH},
            P("dp"),
            r"as token_axes says, P\('dp', 'ep'\); .* Reshard them with jax.reshard\.$",
        ),
        ({}, P("dp", None, "ep"), r"H, must not be sharded; .* P\('dp', None, 'ep'\)"),
        (
            {"token_axes": ("dp", "ep")},
            BOTH,
            r"as token_axes says, P\(\('dp', 'ep'\),?\); .* say P\('dp', 'ep'\). Reshard them with "
            r"jax.reshard, or make the layer with token_axes=P\('dp', 'ep'\)\.$",
        ),
        ({"fsdp_axis": "dp"}, P("ep"), r"fsdp_axis must be .* tokens are sharded over \('ep',\)"),
    ],
)
def test_explicit_axes_that_do_not_fit_are_named(options, spec, message):
    layer, put = explicit_layer(AXES, **options)
    with pytest.raises(ValueError, match=message):
        layer(put(make_tokens(), spec))


def test_a_mask_is_sharded_as_the_tokens_are():
    layer, put = explicit_layer(AXES)
    with pytest.raises(ValueError, match=r"mask must be sharded as tokens are, P\('dp', 'ep'\); "):
        layer(put(make_tokens(), BOTH), put(np.ones((B, LENGTH), bool), P("dp")))


@pytest.mark.parametrize(
    "token_axes, shape, message",
    [
        (
            None,
            (4, 6, H),
            r"dimension 0 of tokens must be a multiple of 8, the shards along \('dp', 'ep'\); got "
            r".* Pad .* make the layer with the axes of each: token_axes=P\('dp', 'ep'\) would fit",
        ),
        (None, (4, 5, H), r"got \(4, 5, 128\). Pad the tokens, .* padding\.$"),
        (None, (4, H), r"got \(4, 128\). Pad the tokens, .* padding\.$"),
        (BOTH, (4, 5, H), r"dimension 1 of tokens must be a multiple of 2, the shards along "),
        (BOTH, (8, H), r"dimensions that token_axes=P\('dp', 'ep'\) shards, 2 before H; got \(8, "),
    ],
)
def test_shards_must_divide_their_dimensions(token_axes, shape, message):
    layer = make_layer("xla", axes=AXES, token_axes=token_axes, config={"name": "train"})
    with pytest.raises(ValueError, match=f"^nnx.MoE of group train: .*{message}"):
        layer(jnp.ones(shape))


@pytest.mark.parametrize(
    "token_axes, message",
    [
        (P("dp"), r"all of the group's; got \('dp',\).* as in jax.P\('data', 'expert'\)"),
        (P("dp", "dp"), r"different axes of the mesh, .* got \('dp', 'dp'\)"),
        (P("dp", ("ep", "x")), r"different axes of the mesh, .* got \('dp', 'ep', 'x'\)"),
        (P(P.UNCONSTRAINED, "ep"), r"different axes of the mesh, .* got \(UNCONSTRAINED, 'ep'\)"),
        (P(), r"got \(\)"),
    ],
)
def test_axes_by_dimension_are_checked(token_axes, message):
    with pytest.raises(ValueError, match=message):
        make_layer("xla", axes=AXES, token_axes=token_axes)


def test_each_expert_has_load_where_sequences_are_sharded():
    """Guards the tests above: their tokens go to experts of all ranks."""
    layer = make_layer("xla", axes=AXES, token_axes=BOTH)
    assert (np.asarray(call(layer, make_tokens())[1].expert_load).reshape(2, E // 2).sum(1)).all()
