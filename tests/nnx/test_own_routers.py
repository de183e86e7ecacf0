"""Routers and experts of the user's in `nnx.MoE`: what models do, in a few lines each.

Each is compared with all experts processing all tokens, on one device.
"""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

import jax_ep
import quick
from doc_pages import DOCS, python_blocks
from jax_ep.nnx import MoE
from jax_ep.router import RouterConfig, Routes, z_loss
from nnx_layers import assert_close, weights_of
from routed_layers import LENGTH, B, E, F, H, K, call, dense, make, make_tokens, mlp

pytestmark = pytest.mark.usefixtures("one_process", "float32_matmuls")


# What models do.


def top_k_of_logits(layer, tokens, mask):
    """Chooses by logits; weighs by their sigmoids."""
    logits = layer.router_logits(tokens)
    best, ids = lax.top_k(logits, layer.top_k)
    return Routes(ids, jax.nn.sigmoid(best), jax.nn.sigmoid(logits), logits)


# Switch Transformer, section 2.2: noise on what the router sees, in training.
def with_jitter(layer, tokens, mask, rngs=None):
    if not layer.deterministic:
        noise = jax.random.uniform(rngs.jitter(), tokens.shape, tokens.dtype, 0.9, 1.1)
        tokens = tokens * noise
    return layer.route(layer.router_logits(tokens))


# Hash layers, https://arxiv.org/abs/2106.04426: the word alone says which experts.
def by_hash(layer, tokens, mask, words):
    ids = (words[..., None] * jnp.array([7, 11]) + jnp.array([0, 3])) % layer.n_experts
    return Routes(ids, None)


N_CHOSEN = 6  # tokens that each expert takes, of all


def expert_choice(layer, tokens, mask):
    """Each expert takes the tokens that score best: https://arxiv.org/abs/2202.09368."""
    logits = layer.router_logits(tokens)
    scores = jax.nn.softmax(logits)
    by_expert = scores if mask is None else jnp.where(mask[..., None], scores, -1)
    _, best = lax.top_k(by_expert.reshape(-1, E).T, N_CHOSEN)  # [E, N_CHOSEN], tokens
    is_chosen = jax.nn.one_hot(best, tokens[..., 0].size, dtype=bool, axis=0).any(axis=-1)
    ids = jnp.where(is_chosen, jnp.arange(E), -1).reshape(scores.shape)  # K = E
    return Routes(ids, scores, logits=logits)


class NoisyTopK(nnx.Module):
    """Noise of a trained scale on the logits: https://arxiv.org/abs/1701.06538, section 2.1."""

    def __init__(self, rngs):
        self.scale = nnx.Linear(H, E, use_bias=False, rngs=rngs)
        self.rngs = rngs.fork()

    def __call__(self, layer, tokens, mask):
        logits = layer.router_logits(tokens)
        if not layer.deterministic:
            noise = jax.random.normal(self.rngs.noise(), logits.shape)
            logits += noise * jax.nn.softplus(self.scale(tokens))
        return layer.route(logits)


class GatedSharedExpert(nnx.Module):
    """Qwen2-MoE: a gate per token on the shared expert, which needs no hook."""

    def __init__(self, group, rngs):
        self.moe = MoE(group, F, router=RouterConfig(normalize=False), rngs=rngs)
        self.gate_up = nnx.Linear(H, 2 * F, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(F, H, use_bias=False, rngs=rngs)
        self.gate = nnx.Linear(H, 1, use_bias=False, rngs=rngs)

    def __call__(self, x):
        output, report = self.moe(x)
        gate, up = jnp.split(self.gate_up(x), 2, axis=-1)
        shared = self.down(jax.nn.silu(gate) * up)
        return output + jax.nn.sigmoid(self.gate(x)) * shared, report


# Experts with a low-rank term on their first matmul.
class LoRA(nnx.Module):
    def __init__(self, rngs, rank=4):
        self.a = nnx.LoRAParam(0.1 * jax.random.normal(rngs.params(), (E, H, rank)))
        self.b = nnx.LoRAParam(jnp.zeros((E, rank, 2 * F)))

    def __call__(self, rows, gate_up, down, **options):
        tokens, offsets = rows.tokens, rows.row_offsets
        low = jax_ep.grouped_matmul(tokens, self.a[...], offsets)
        hidden = jax_ep.grouped_matmul(tokens, gate_up, offsets)
        hidden += jax_ep.grouped_matmul(low, self.b[...], offsets)
        values = jax_ep.fused_silu(hidden, offsets, jax_ep.Plain(hidden.dtype))
        return jax_ep.grouped_matmul(values, down, offsets)


# That they do it.


def test_the_top_k_of_logits_is_taken_before_the_sigmoid():
    """As `RouterConfig` does without a bias: the same outputs, reports and gradients."""
    own = make(router_fn=top_k_of_logits)
    usual = make(router=RouterConfig(scores="sigmoid", normalize=False))

    @nnx.jit
    def step(layer, tokens):
        def loss(layer, tokens):
            output, report = layer(tokens)
            losses = report.balance_loss + report.z_loss
            return jnp.sum(jnp.sin(output)) + losses, (output, report)

        return nnx.grad(loss, argnums=(0, 1), has_aux=True)(layer, tokens)

    got, wanted = [step(layer, make_tokens()) for layer in (own, usual)]
    jax.tree.map(assert_close, got, wanted)
    assert np.abs(got[0][0]["router"][...]).max() > 0.01


def test_a_gate_on_the_input_is_not_one_on_the_result():
    """Llama 4: one expert, whose input its sigmoid scales, and a shared expert, unscaled."""
    router = RouterConfig(scores="sigmoid")
    layer = make({"top_k": 1}, router=router, weights_on_input=True, shared_size=F)

    def reference(weights, tokens):
        best, ids = lax.top_k(tokens @ weights["router"], 1)
        routed = dense(weights, jax.nn.sigmoid(best) * tokens, Routes(ids, None))
        shared = mlp(tokens, *(weights[f"shared_{name}"][None] for name in ("gate_up", "down")))
        return routed + shared[..., 0, :]

    @nnx.jit
    def step(layer, tokens):
        return nnx.grad(lambda layer: jnp.sum(jnp.sin(layer(tokens)[0])))(layer)

    assert_close(call(layer, make_tokens())[0], reference(weights_of(layer), make_tokens()))
    wanted = jax.grad(lambda weights: jnp.sum(jnp.sin(reference(weights, make_tokens()))))
    wanted = wanted(weights_of(layer))
    for name, grad in nnx.to_pure_dict(step(layer, make_tokens())).items():
        assert_close(grad, wanted[name], 1e-3)


def test_a_gate_on_the_input_travels_in_any_format():
    """The product is quantized, so the gate costs no byte of the exchange."""
    config = {"top_k": 1, "hidden_size": 128, "combine_dtype": jnp.bfloat16}
    config["token_format"] = jax_ep.BlockwiseFP8()
    layer = make(config, router=RouterConfig(scores="sigmoid"), weights_on_input=True)
    tokens, weights = jax.random.normal(jax.random.key(1), (B, LENGTH, 128)), weights_of(layer)
    best, ids = lax.top_k(tokens @ weights["router"], 1)
    wanted = dense(weights, jax.nn.sigmoid(best) * tokens, Routes(ids, None))
    assert_close(call(layer, tokens)[0], wanted, 0.1)


@pytest.mark.thorough
def test_jitter_is_drawn_in_each_call_and_not_in_evaluation():
    layer, tokens, rngs = make(router_fn=with_jitter), make_tokens(), nnx.Rngs(jitter=3)
    key = nnx.Rngs(jitter=3).jitter()
    noise = jax.random.uniform(key, tokens.shape, tokens.dtype, 0.9, 1.1)
    first, second = [call(layer, tokens, rngs=rngs)[1] for _ in range(2)]
    logits = (tokens * noise) @ weights_of(layer)["router"]
    assert_close(first.z_loss, z_loss(logits))
    assert first.z_loss != second.z_loss
    layer.eval()
    wanted = call(make(), tokens)
    jax.tree.map(np.testing.assert_array_equal, call(layer, tokens), wanted)


def test_words_choose_experts_by_a_hash():
    layer, tokens = make(router_fn=by_hash), make_tokens()
    words = np.arange(B * LENGTH, dtype=np.int32).reshape(B, LENGTH) ** 2
    mask = words % 3 > 0
    output, report = call(layer, tokens, mask, words=words)
    routes = by_hash(layer, tokens, None, words)
    assert_close(output, np.where(mask[..., None], dense(weights_of(layer), tokens, routes), 0))
    np.testing.assert_array_equal(report.topk_ids, np.where(mask[..., None], routes.topk_ids, -1))
    assert report.expert_load.sum() == K * mask.sum()
    assert report.balance_loss == report.z_loss == 0


@pytest.mark.parametrize("masked", [False, True])
def test_experts_choose_tokens(masked):
    layer, tokens = make({"top_k": E}, router_fn=expert_choice), make_tokens()
    mask = jnp.arange(B * LENGTH).reshape(B, LENGTH) % 4 > 0 if masked else None
    output, report = call(layer, tokens, mask)
    np.testing.assert_array_equal(report.expert_load, N_CHOSEN)
    scores = np.asarray(jax.nn.softmax(tokens @ weights_of(layer)["router"])).reshape(-1, E)
    if masked:
        scores = np.where(np.asarray(mask).reshape(-1, 1), scores, -1)
    gates = np.zeros_like(scores)
    for expert in range(E):
        best = np.argsort(-scores[:, expert], kind="stable")[:N_CHOSEN]
        gates[best, expert] = scores[best, expert]
    results = mlp(tokens, weights_of(layer)["gate_up"], weights_of(layer)["down"])
    assert_close(output, jnp.einsum("...e,...eh->...h", gates.reshape(B, LENGTH, E), results))


@pytest.mark.thorough
def test_a_router_has_parameters_and_random_numbers_of_its_own():
    layer, tokens = make(router_fn=NoisyTopK(nnx.Rngs(params=1, noise=2))), make_tokens()
    assert layer.router_fn.scale.kernel.shape == (H, E)

    @nnx.jit
    def step(layer):
        grads = nnx.grad(lambda layer: jnp.sum(jnp.sin(layer(tokens)[0])))(layer)
        return grads["router_fn"]["scale"]["kernel"][...], layer(tokens)[1].z_loss

    (grad, first), (_, second) = step(layer), step(layer)
    assert np.abs(grad).max() > 1e-4
    assert first != second  # drawn anew
    layer.eval()
    np.testing.assert_array_equal(call(layer, tokens)[0], call(make(), tokens)[0])


@pytest.mark.thorough
def test_stacked_layers_have_routers_of_their_own():
    group, no_name = make().group, {nnx.PARTITION_NAME: None}

    @nnx.split_rngs(splits=2)
    @nnx.vmap(in_axes=0, out_axes=0, transform_metadata=no_name)
    def create(rngs):
        return MoE(group, F, router_fn=NoisyTopK(rngs), expert_fn=LoRA(rngs), rngs=rngs)

    @nnx.scan(in_axes=(0, nnx.Carry), out_axes=(nnx.Carry, 0), transform_metadata=no_name)
    def apply(layer, x):
        output, report = layer(x)
        return x + output, report

    layers = create(nnx.Rngs(0))
    x = make_tokens()
    _, reports = nnx.jit(apply)(layers, x)
    assert reports.z_loss.shape == (2,) and reports.z_loss[0] != reports.z_loss[1]
    assert layers.router_fn.scale.kernel.shape == (2, H, E)
    assert layers.expert_fn.a.shape == (2, E, H, 4)


def test_a_shared_expert_has_a_gate():
    model = GatedSharedExpert(make().group, nnx.Rngs(0))
    tokens, weights = make_tokens(), weights_of(model)
    scores = jax.nn.softmax(tokens @ weights["moe"]["router"])
    routes = Routes(*reversed(lax.top_k(scores, K)))
    shared = mlp(tokens, *(weights[name]["kernel"][None] for name in ("gate_up", "down")))
    gate = jax.nn.sigmoid(tokens @ weights["gate"]["kernel"])
    wanted = dense(weights["moe"], tokens, routes) + gate * shared[..., 0, :]
    assert_close(call(model, tokens)[0], wanted)


def lora_gradients(layer, tokens):
    diff = nnx.DiffState(0, nnx.LoRAParam)
    loss = lambda layer: jnp.sum(jnp.sin(layer(tokens)[0]))  # noqa: E731
    return nnx.to_pure_dict(nnx.jit(nnx.grad(loss, argnums=diff))(layer))["expert_fn"]


class LoRAOfCopies(LoRA):
    def __call__(self, rows, gate_up, down, **options):
        own = gate_up, down, self.a[...], self.b[...]
        gate_up, down, a, b = jax_ep.fetch_experts(rows, own)
        self.a, self.b = nnx.LoRAParam(a), nnx.LoRAParam(b)  # each call has a module of its own
        return super().__call__(rows, gate_up, down, **options)


PLACEMENT = np.array([0, 1, 5, 2, 3, 5, 4, 5, 0, 6, 7, 2])
COPIES = {
    "none": (LoRA, {}),
    "placed": (LoRA, {"n_experts": len(PLACEMENT)}),
    "of a call": (LoRAOfCopies, {"expert_copies": 6}),
}


@pytest.mark.parametrize("name", quick.params(COPIES, {"none"}))
def test_experts_have_low_rank_terms_of_their_own(name):
    """Where experts have copies, the terms travel with their matrices."""
    kind, config = COPIES[name]
    options = {"placement": jax_ep.ExpertPlacement(PLACEMENT, 4)} if name == "placed" else {}
    layer, tokens = make(config, expert_fn=kind(nnx.Rngs(5)), **options), make_tokens()
    layer.expert_fn.b[...] = 0.1 * jax.random.normal(jax.random.key(2), layer.expert_fn.b.shape)
    weights, terms = weights_of(layer), weights_of(layer.expert_fn)

    def reference(terms):
        gate_up = weights["gate_up"] + terms["a"] @ terms["b"]
        best, ids = lax.top_k(tokens @ weights["router"], K)
        merged = weights | {"gate_up": gate_up}
        return dense(merged, tokens, Routes(ids, jax.nn.softmax(best)))

    assert_close(call(layer, tokens)[0], reference(terms))
    wanted = jax.grad(lambda terms: jnp.sum(jnp.sin(reference(terms))))(terms)
    got = lora_gradients(layer, tokens)
    assert got.keys() == {"a", "b"}
    jax.tree.map(lambda *each: assert_close(*each, 1e-3), got, wanted)


def test_the_page_quotes_this_file():
    blocks = [
        each for each in python_blocks(DOCS / "layers.md") if "LoRA" in each or "hash" in each
    ]
    assert len(blocks) == 2
    text = pathlib.Path(__file__).read_text()
    assert all(part.strip() in text for block in blocks for part in block.split("\n\n\n"))
