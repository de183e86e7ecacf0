"""moe gives the bits of dispatch, expert_mlp and combine, in gradients too."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.interpreters import partial_eval

import harness
import jax_ep
from harness import AXIS, assert_trees_equal, make_mesh, on_mesh, on_mesh_eager

R, E, K, T, H, F = 4, 8, 2, 16, 64, 32
CLAMP = (1.702, 7.0)


def parts(group, tokens, ids, weights, gate_up, down, **options):
    rows = jax_ep.dispatch(group, tokens, ids, weights)
    return jax_ep.combine(group, jax_ep.expert_mlp(rows, gate_up, down, **options), rows)


def open_group(transport, mesh=None, dtype="bfloat16", **options):
    options.setdefault("token_format", jax_ep.Plain(dtype))
    config = jax_ep.EPConfig(
        n_experts=E,
        top_k=K,
        hidden_size=options.pop("hidden_size", H),
        max_tokens_per_rank=T,
        combine_dtype=dtype,
        **options,
    )
    return jax_ep.ep_init(make_mesh(R) if mesh is None else mesh, AXIS, config, transport)


def make_arrays(group, n_tokens=T, transposed=False, size=F):
    """Ids, and what has gradients: tokens, choices' weights, matrices and biases, by device."""
    rng, n, hidden = np.random.default_rng(3), group.mesh.size, group.config.hidden_size
    n_groups = E // R + group.config.fused_shared_expert
    ids = np.argsort(rng.random((n, n_tokens, E)), axis=-1)[..., :K].astype(np.int32)
    ids[0, : n_tokens // 4, 0] = -1
    shapes = {
        "tokens": (n_tokens, hidden),
        "gate_up": (n_groups, hidden, 2 * size),
        "down": (n_groups, size, hidden),
        "gate_up_bias": (n_groups, 2 * size),
        "down_bias": (n_groups, hidden),
    }
    dtype = np.dtype(group.config.combine_dtype)
    arrays = {k: (rng.standard_normal((n, *s)) / 4).astype(dtype) for k, s in shapes.items()}
    if transposed:
        for name in ("gate_up", "down"):
            arrays[name] = np.ascontiguousarray(arrays[name].swapaxes(-1, -2))
    return ids, arrays | {"topk_weights": rng.random((n, n_tokens, K), np.float32)}


WITHOUT_BIASES = ("tokens", "topk_weights", "gate_up", "down")
ALL = (*WITHOUT_BIASES, "gate_up_bias", "down_bias")


def vjp(layer, group, names=WITHOUT_BIASES, **options):
    """A rank's function of ids and arrays: the result, and its gradients in those named."""

    def of_arrays(ids, arrays):
        def run(chosen):
            given = arrays | chosen
            tokens, weights = given.pop("tokens"), given.pop("topk_weights")
            return layer(group, tokens, ids, weights, **given, **options)

        out, pull = jax.vjp(run, {name: arrays[name] for name in names})
        return out, pull(jnp.cos(out.astype(jnp.float32)).astype(out.dtype))

    return of_arrays


def compare(group, arrays, names=WITHOUT_BIASES, wrap=lambda layer: layer, **options):
    """Requires that `jax_ep.moe` gives the bits of its parts, and gradients to all `names`."""
    wanted, got = (
        on_mesh(group.mesh, vjp(wrap(layer), group, names, **options))(*arrays)
        for layer in (parts, jax_ep.moe)
    )
    assert_trees_equal(group.mesh, got, wanted, "moe")
    for where, gradients in harness.shards(group.mesh, got[1][0]):
        for name, gradient in gradients.items():
            assert gradient.astype(np.float32).any(), f"{name} has no gradient on {where}"


def without_biases(arrays):
    ids, given = arrays
    return ids, {name: given[name] for name in WITHOUT_BIASES}


# Fields of the config, options of the layer.
CASES = {
    "transposed": ({}, {"transposed": True}),
    "as GPT-OSS": ({"row_alignment": 16}, {"interleaved": True, "clamp": CLAMP}),
    "shared expert on two nodes": ({"n_nodes": 2, "fused_shared_expert": True}, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_the_layer_has_the_bits_of_its_parts(case, transport):
    config, options = CASES[case]
    with open_group(transport, **config) as group:
        arrays = make_arrays(group, transposed=options.get("transposed", False))
        compare(group, arrays, ALL, **options)


@pytest.mark.thorough
def test_fp8_matmuls(transport):
    def quantized(layer):
        def run(group, tokens, ids, weights, gate_up, down, **options):
            matrices = map(jax_ep.quantize_weights, (gate_up, down))
            return layer(group, tokens, ids, weights, *matrices, **options)

        return run

    with open_group(transport, token_format=jax_ep.BlockwiseFP8(), hidden_size=128) as group:
        arrays = without_biases(make_arrays(group, size=128))
        compare(group, arrays, wrap=quantized)


@pytest.mark.thorough
def test_weights_of_choices_may_be_left_out(transport):
    def without_weights(layer):
        def run(group, tokens, ids, weights, gate_up, down):
            return layer(group, tokens, ids, None, gate_up, down)

        return run

    with open_group(transport) as group:
        names = ("tokens", "gate_up", "down")
        compare(group, without_biases(make_arrays(group)), names, wrap=without_weights)


def saving(*names):
    policy = jax.checkpoint_policies.save_only_these_names(*names)

    def wrap(layer):
        def run(group, *args, **options):
            return jax.checkpoint(functools.partial(layer, group, **options), policy=policy)(*args)

        return run

    return wrap


POLICIES = {
    "nothing": (),
    "dispatch, hidden": (jax_ep.DISPATCH_NAME, jax_ep.EXPERT_HIDDEN_NAME),
    "all": (jax_ep.DISPATCH_NAME, jax_ep.EXPERT_HIDDEN_NAME, jax_ep.COMBINE_NAME),
}


@pytest.mark.parametrize("saved", POLICIES)
def test_policies_of_checkpoint_recompute_what_they_do_not_save(saved, transport):
    """And nothing is computed twice without one."""
    with open_group(transport) as group:
        arrays, wrap = without_biases(make_arrays(group)), saving(*POLICIES[saved])

        def wrapped(layer):
            """With the gradients in positions that `jax.checkpoint` takes."""

            def run(group, tokens, ids, weights, gate_up, down):
                return wrap(layer)(group, tokens, ids, weights, gate_up, down)

            return run

        of_moe = operations(group, wrapped(jax_ep.moe), arrays)
        assert of_moe["jax_ep_grouped_matmul"] >= 5
        plain = operations(group, jax_ep.moe, arrays)
        assert plain["jax_ep_grouped_matmul"] == 4 and plain["jax_ep_gated_matmul_grad"] == 1
        n_again = 1 if saved == "nothing" else 0  # otherwise, the hidden rows are activated again
        assert plain["jax_ep_gated_matmul"] == 1 and of_moe["jax_ep_gated_matmul"] == 1 + n_again
        assert plain["jax_ep_fused_silu"] == 0 and of_moe["jax_ep_fused_silu"] == 1 - n_again
        if transport != "xla":
            n_dispatches = 1 if POLICIES[saved] else 2
            assert of_moe["jax_ep_dispatch"] == n_dispatches and plain["jax_ep_dispatch"] == 1


def operations(group, layer, arrays) -> dict[str, int]:
    """How often primitives of the package are in the layer with its gradients, if used."""
    traced = jax.make_jaxpr(on_mesh_eager(group.mesh, vjp(layer, group)))(*arrays).jaxpr
    text = str(partial_eval.dce_jaxpr(traced, [True] * len(traced.outvars))[0])
    layer = "dispatch", "combine", "combine_grad"
    names = "grouped_matmul", "gated_matmul", "gated_matmul_grad", "fused_silu", *layer
    return {f"jax_ep_{name}": text.count(f"= jax_ep_{name}[") for name in names}


@pytest.mark.thorough
@pytest.mark.usefixtures("program_cache")
def test_without_jit(transport):
    with open_group(transport) as group:
        arrays = without_biases(make_arrays(group, n_tokens=4))
        wanted = on_mesh(group.mesh, vjp(jax_ep.moe, group))(*arrays)
        got = on_mesh_eager(group.mesh, vjp(jax_ep.moe, group))(*arrays)
        assert_trees_equal(group.mesh, got, wanted, "without jit")


@pytest.mark.thorough
@pytest.mark.usefixtures("program_cache")
def test_without_jit_and_gradients(transport):
    with open_group(transport) as group:
        ids, arrays = without_biases(make_arrays(group, n_tokens=4))

        def run(ids, arrays):
            return jax_ep.moe(group, arrays["tokens"], ids, **arrays_but_tokens(arrays))

        wanted = on_mesh(group.mesh, run)(ids, arrays)
        got = on_mesh_eager(group.mesh, run)(ids, arrays)
        assert_trees_equal(group.mesh, got, wanted, "without jit")
        with jax.disable_jit():
            got = on_mesh_eager(group.mesh, run)(ids, arrays)
        assert_trees_equal(group.mesh, got, wanted, "with jit disabled")


def arrays_but_tokens(arrays):
    return {name: x for name, x in arrays.items() if name != "tokens"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": np.ones((R, T, H), np.float32)}, "dispatch: tokens must be bfloat16"),
        ({"gate_up": np.ones((R, E, H, 2 * F), jnp.bfloat16)}, "expert_mlp: gate_up must have th"),
        ({"down": np.ones((R, 2, F, H), np.float64)}, "expert_mlp: down must be bfloat16"),
    ],
)
def test_errors_name_the_part_and_the_argument(changes, message):
    with open_group("xla") as group:
        ids, arrays = without_biases(make_arrays(group))
        with pytest.raises(ValueError, match=message):
            on_mesh(group.mesh, vjp(jax_ep.moe, group, ("topk_weights",)))(ids, arrays | changes)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"gate_up": None}, ValueError, "expert_mlp: gate_up must be an array; got None"),
        ({"down": "x"}, TypeError, "expert_mlp: down must be an array of numbers; got str"),
        ({"transposed": 1}, ValueError, "expert_mlp: transposed must be True or False; got 1"),
        ({"clamp": (1.0, -1.0)}, ValueError, r"expert_mlp: clamp must be \(alpha, limit\)"),
    ],
)
def test_errors_of_arguments_that_are_no_arrays(changes, error, message):
    with open_group("xla") as group:
        ids, arrays = without_biases(make_arrays(group))

        def run(ids, arrays):
            given = arrays | changes
            tokens, weights = given.pop("tokens"), given.pop("topk_weights")
            return jax_ep.moe(group, tokens, ids, weights, **given)

        with pytest.raises(error, match=message):
            on_mesh(group.mesh, run)(ids, arrays)
    with pytest.raises(TypeError, match="group must be"):
        jax_ep.moe(None, None, None, None, None, None)
