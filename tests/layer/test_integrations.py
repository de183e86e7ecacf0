"""jax_ep.integrations without the frameworks, in whose place stand classes of the same shape.

`make frameworks` trains with the frameworks themselves.
"""

import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P
from jax.sharding import AxisType

from jax_ep.integrations import levanter, maxtext
from jax_ep.integrations.groups import groups
from processes import child_environment

pytestmark = pytest.mark.usefixtures("one_process", "float32_matmuls")
R, E, K, H, F, T = 2, 8, 2, 16, 24, 32  # T: tokens of all ranks; R: also on two GPUs
FRAMEWORKS = "maxtext", "levanter", "haliax", "equinox", "flax"
FITTING = {
    "use_ring_of_experts": False,
    "sparse_matmul": True,
    "te_moe_block": False,
    "shard_exp_on_fsdp": False,
    "use_2d_fsdp_sharding": False,
    "using_pipeline_parallelism": False,
    "attention": "dot_product",
}


def maxtext_config(**changes):
    return types.SimpleNamespace(**(FITTING | changes))


class Decoder:
    """Stands for MaxText's enumeration of decoder blocks."""

    def __init__(self, value):
        self.value = value


class RoutedMoE:
    """Has the shape of MaxText's: see what `Exchange` overrides and calls."""

    num_experts, num_experts_per_tok, dtype = E, K, jnp.dtype("float32")
    _expert_parallelism_name = "expert"

    def __init__(self, config, mesh, factor):
        self.config, self.mesh, self.factor, self.sown = config, mesh, factor, {}

    def get_ragged_buffer_factor(self):
        return self.factor

    def get_topk(self, logits, pre_bias_logits, rngs, input_ids, forced_routed_experts):
        weights, ids = jax.lax.top_k(logits, self.num_experts_per_tok)
        return jax.nn.softmax(weights), ids

    def permute(self, inputs, logits, pre_bias_logits, *, precomputed_topk, compute_lb_loss):
        _, ids = precomputed_topk
        assert compute_lb_loss
        return (*[None] * 5, jnp.mean(ids.astype("float32")), "bias updates", *[None] * 4)

    def sow(self, kind, name, value):
        self.sown[name] = value

    def sparse_matmul(self, inputs, logits, gate_up, down):
        """The layer of the mesh, MaxText's way; the experts have no activation."""

        def on_each_rank(x, logits, gate_up, down):
            assert self.get_expert_parallelism_size() == 1
            permuted = self.permute(x, logits, None, True, None, compute_lb_loss=True)
            rows, handle, weights, sizes, row_experts, lb_loss, updates, *others = permuted
            assert updates == "bias updates" and others == [None, False, None, None]
            assert rows.shape[0] == row_experts.shape[0] and sizes.shape == (E // R,)
            results = jax.lax.ragged_dot(rows, gate_up @ down, sizes)
            return self.unpermute(results, handle, weights, *x.shape[:2]), lb_loss

        tokens, experts = P("expert"), P("expert")
        return jax.shard_map(
            on_each_rank,
            mesh=self.mesh,
            in_specs=(tokens, tokens, experts, experts),
            out_specs=(tokens, P()),
        )(inputs, logits, gate_up, down)


@pytest.fixture
def moe(monkeypatch):
    """MaxText's module of that name, as far as `install` uses it."""
    modules = {name: types.ModuleType(name) for name in ("maxtext.layers.moe", "maxtext.models.x")}
    for name, module in modules.items():
        module.RoutedMoE = RoutedMoE
        monkeypatch.setitem(sys.modules, name, module)
    return modules["maxtext.layers.moe"]


def numbers(*shapes):
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return [jax.random.normal(k, s) / 2 for k, s in zip(keys, shapes, strict=True)]


def mesh_of(types=AxisType.Auto):
    devices = jax.devices()
    if len(devices) < R:
        pytest.skip(f"needs {R} devices, found {len(devices)}")
    return jax.make_mesh((R,), ("expert",), (types,), devices=devices[:R])


def dense(x, ids, weights, matrices):
    """Each expert multiplies each token by its matrix."""
    results = jnp.einsum("...h,ehg->...eg", x, matrices)
    chosen = jnp.take_along_axis(results, ids[..., None], axis=-2)
    return jnp.sum(chosen * weights[..., None], axis=-2)


def test_integrations_import_no_framework():
    code = (
        "import sys, jax_ep, jax_ep.integrations.levanter, jax_ep.integrations.maxtext\n"
        f"print([name for name in {FRAMEWORKS} if name in sys.modules])"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=child_environment(), capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr


def test_maxtext_classes_of_all_modules_are_replaced_once(moe):
    for n_sms in (8, 16):
        maxtext.install(transport="xla", n_sms=n_sms)
    made = moe.RoutedMoE
    assert sys.modules["maxtext.models.x"].RoutedMoE is made
    assert made.__bases__ == (maxtext.Exchange, RoutedMoE) and made.__name__ == "RoutedMoE"
    assert (made.transport, made.options) == ("xla", {"n_sms": 16})


@pytest.mark.parametrize("option", maxtext._REQUIRED)
def test_maxtext_options_that_do_not_fit_are_named(moe, option):
    maxtext.install()
    wrong = not FITTING[option]
    with pytest.raises(ValueError, match=f"MaxText's {option} must be .*; got {wrong}"):
        moe.RoutedMoE(maxtext_config(**{option: wrong}), None, -1.0)


@pytest.mark.parametrize("block", ["mixtral", "llama4"])
@pytest.mark.parametrize(("factor", "drops"), [(-1.0, False), (float(R), False), (0.5, True)])
def test_a_maxtext_layer_equals_a_dense_one(moe, block, factor, drops):
    """Llama 4 weights tokens by a sigmoid before its one expert, which here is linear."""
    maxtext.install()
    config = maxtext_config(decoder_block=Decoder(block))
    layer = moe.RoutedMoE(config, mesh_of(), factor)
    layer.num_experts_per_tok = 1 if block == "llama4" else K
    x, logits, gate_up, down = numbers((R, T // R, H), (R, T // R, E), (E, H, F), (E, F, H))
    output, lb_loss = jax.jit(layer.sparse_matmul)(x, logits, gate_up, down)
    weights, ids = layer.get_topk(logits, None, None, None, None)
    weights = jax.nn.sigmoid(weights) if block == "llama4" else weights
    wanted = dense(x, ids, weights, gate_up @ down)
    is_right = np.isclose(output, wanted, rtol=1e-4, atol=1e-4).all(axis=-1)
    assert is_right.any() and is_right.all() != drops
    np.testing.assert_allclose(lb_loss, jnp.mean(ids.astype("float32")), rtol=1e-6)


@pytest.mark.thorough
def test_a_maxtext_layer_reports_overflow_by_rank(moe):
    maxtext.install()
    layer = moe.RoutedMoE(maxtext_config(decoder_block=Decoder("mixtral")), mesh_of(), 1.0)
    x, gate_up, down = numbers((R, T // R, H), (E, H, F), (E, F, H))
    logits = jnp.zeros((R, T // R, E)).at[..., :K].set(1.0)  # all tokens to rank 0
    layer.sparse_matmul(x, logits, gate_up, down)
    flags = np.asarray(layer.sown["moe_has_overflow"])
    assert flags.shape == (R, 1, 1) and flags.ravel().tolist() == [True, False]


@pytest.mark.thorough
def test_grug_experts_equal_dense_ones():
    """On a mesh with explicit axes, with padding; also gradients."""
    mesh = mesh_of(AxisType.Explicit)
    x, logits, w_gate, w_up, w_down = numbers((T, H), (T, E), (E, H, F), (E, H, F), (E, F, H))
    weights, ids = jax.lax.top_k(logits, K)
    is_token = jnp.arange(T) % 8 < 7

    def layer(x, weights, *matrices):
        experts = types.SimpleNamespace(
            **dict(zip(("w_gate", "w_up", "w_down"), matrices, strict=True)),
            activation=jax.nn.relu,
            capacity_factor=float(R),
            settings=levanter.Settings(mesh, "auto", ()),
        )
        output, dropped = levanter._exchange(experts, x, ids, weights, is_token)
        return jnp.sum(output**2), (output, dropped)

    def dense_layer(x, weights, w_gate, w_up, w_down):
        hidden = jax.nn.relu(jnp.einsum("th,ehf->tef", x, w_gate))
        hidden *= jnp.einsum("th,ehf->tef", x, w_up)
        results = jnp.einsum("tef,efh->teh", hidden, w_down)
        chosen = jnp.take_along_axis(results, ids[..., None], axis=1)
        output = jnp.sum(chosen * jnp.where(is_token[:, None], weights, 0)[..., None], axis=1)
        return jnp.sum(output**2), (output, 0)

    arrays = x, weights, w_gate, w_up, w_down
    wanted = jax.grad(dense_layer, range(5), has_aux=True)(*arrays)
    with jax.set_mesh(mesh):
        sharded = [jax.sharding.reshard(array, P("expert")) for array in arrays]
        got = jax.jit(jax.grad(layer, range(5), has_aux=True))(*sharded)
    for one, other in zip(*map(jax.tree.leaves, (got, wanted)), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5 * np.abs(other).max())


def test_grug_mesh_needs_devices(monkeypatch):
    grug_moe = types.ModuleType("levanter.grug.grug_moe")
    monkeypatch.setitem(sys.modules, "levanter.grug.grug_moe", grug_moe)
    with pytest.raises(TypeError, match="mesh must be a jax.sharding.Mesh, which has devices"):
        levanter.expert_mlp(None, mesh_of().abstract_mesh)


@pytest.mark.thorough
def test_layers_of_equal_sizes_share_a_group_until_it_is_closed(moe):
    """It has the further parameters of `install`."""
    maxtext.install(row_alignment=16)
    config, mesh = maxtext_config(decoder_block=Decoder("mixtral")), mesh_of()
    arrays = numbers((R, T // R, H), (R, T // R, E), (E, H, F), (E, F, H))
    for group in groups():
        group.close()
    for _ in range(2):
        for _ in range(2):
            moe.RoutedMoE(config, mesh, -1.0).sparse_matmul(*arrays)
        (group,) = groups()
        assert group.config.row_alignment == 16 and group.config.max_tokens_per_rank == T // R
        group.close()
