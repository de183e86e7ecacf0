"""Malformed calls of the public API: each raises an error that names the call and the argument.

python tests/faults/malformed.py [--quick]
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import edges  # noqa: F401
import misuse

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

import jax_ep  # noqa: E402
from jax_ep import router  # noqa: E402

try:
    from flax import nnx

    from jax_ep.nnx import MoE
except ImportError:
    nnx = None

R, E, K, H, T, F = 4, 8, 2, 128, 4, 128
L = E // R
ERRORS = ValueError, TypeError, NotImplementedError, jax.errors.JaxRuntimeError
NAN, INF = float("nan"), float("inf")
bf16, f32, i32, fp8 = jnp.bfloat16, jnp.float32, jnp.int32, jnp.float8_e4m3fn
Fault = tuple[tuple[str, ...], Callable[[], Any]]  # (words of the error, the call)
FAULTS: dict[str, Fault] = {}
# Whose errors name the argument alone: it is the call that the user has just written.
CONSTRUCTIONS = ("EPConfig", "ep_init", "RouterConfig", "MoE", "top_k")


def mesh_of(devices: Any = None, shape: Any = (R,), names: Any = ("ep",)) -> jax.sharding.Mesh:
    devices = jax.devices()[:R] if devices is None else devices
    return jax.sharding.Mesh(np.array(devices).reshape(shape), names)


SIZES = dict(n_experts=E, top_k=K, hidden_size=H, max_tokens_per_rank=T, timeout_s=20)


@functools.cache
def group_of(token_format: Any = None, **changes: Any) -> jax_ep.EPGroup:
    token_format = jax_ep.BF16() if token_format is None else token_format
    config = jax_ep.EPConfig(**(SIZES | changes), token_format=token_format)
    return jax_ep.ep_init(mesh_of(), "ep", config, "host")


@functools.cache
def closed_group() -> jax_ep.EPGroup:
    group = jax_ep.ep_init(mesh_of(), "ep", jax_ep.EPConfig(**SIZES, name="closed"), "host")
    group.close()
    return group


def ones(*shape: int, dtype: Any = bf16) -> jax.Array:
    return jnp.ones(shape, dtype)


def ids(*shape: int, dtype: Any = i32) -> jax.Array:
    return jnp.zeros(shape, dtype)


def run(body: Callable[[], Any], mesh: Any = None, **options: Any) -> Any:
    """Runs a function on every rank, and waits for its results."""
    mesh = mesh_of() if mesh is None else mesh
    spec = jax.P(mesh.axis_names[-1])

    def on_rank(rank: jax.Array) -> Any:
        total = sum(jnp.sum(x.astype(f32)) for x in jax.tree.leaves(body()))
        return rank + jnp.asarray(total, f32)

    mapped = jax.shard_map(on_rank, mesh=mesh, in_specs=spec, out_specs=spec, **options)
    return jax.block_until_ready(jax.jit(mapped)(jnp.zeros(R, f32)))


def add(call: str, words: str, what: str, fault: Callable[[], Any]) -> None:
    """`words` of the error, besides the call; several are separated by blanks."""
    name = f"{call}: {what}"
    assert name not in FAULTS, name
    called = [] if call in CONSTRUCTIONS else [call]
    FAULTS[name] = ((*called, *words.split()), fault)


def add_all(call: str, argument: str, values: dict[str, Any], use: Callable[..., Any]) -> None:
    """One fault for each wrong value of an argument of `use`."""
    for what, value in values.items():
        add(call, argument, f"{argument}={what}", functools.partial(use, **{argument: value}))


# What is no array of numbers in the right shape, for any argument that must be one.
def wrong_arrays(*shape: int, dtype: Any) -> dict[str, Any]:
    return {
        "None": None,
        "scalar": jnp.zeros((), dtype),
        "vector": jnp.zeros(shape[-1], dtype),
        "too long": jnp.zeros((*shape[:-1], shape[-1] + 1), dtype),
        "bool": jnp.zeros(shape, bool),
        "complex": jnp.zeros(shape, jnp.complex64),
        "str": "tokens",
        "object": object(),
    }


def other_dtypes(*shape: int, dtypes: Any) -> dict[str, Any]:
    return {np.dtype(each).name: jnp.zeros(shape, each) for each in dtypes}


def dispatch(group: Any = None, wait: bool = False, **changes: Any) -> Any:
    group = group_of() if group is None else group
    given = dict(tokens=ones(T, H), topk_ids=ids(T, K)) | changes

    def body() -> Any:
        if wait:
            return jax_ep.dispatch_wait(group, jax_ep.dispatch_async(group, **given)).tokens
        return jax_ep.dispatch(group, **given).tokens

    return run(body)


def add_dispatch(call: str, wait: bool) -> None:
    use = functools.partial(dispatch, wait=wait)
    codes = other_dtypes(T, H, dtypes=(fp8, np.uint8, i32, f32, jnp.float16))
    add_all(call, "tokens", wrong_arrays(T, H, dtype=bf16) | codes, use)
    floats = other_dtypes(T, K, dtypes=(f32, bf16, fp8))
    add_all(call, "topk_ids", wrong_arrays(T, K, dtype=i32) | floats, use)
    weights = wrong_arrays(T, K, dtype=f32) | other_dtypes(T, K, dtypes=(i32,))
    del weights["None"]
    add_all(call, "topk_weights", weights, use)
    add_all(call, "recv_capacity", {"0": 0, "-1": -1, "float": 8.5, "str": "8", "nan": NAN}, use)
    add_all(call, "input_scale", {"1": 1.0, "array": ones(1, dtype=f32)}, use)
    swapped = dict(topk_ids=ones(T, K, dtype=f32), topk_weights=ids(T, K))
    add(call, "topk_ids topk_weights swapped", "swapped", lambda: use(**swapped))
    add(
        call,
        "max_tokens_per_rank",
        "many tokens",
        lambda: use(tokens=ones(T + 1, H), topk_ids=ids(T + 1, K)),
    )
    add(call, "tokens", "a tuple", lambda: use(tokens=(ones(T, H), ones(T, 1))))
    add(call, "tokens", "Quantized", lambda: use(tokens=jax_ep.Quantized(ones(T, H), ones(T, 1))))
    for what, group in {"None": 0, "str": "ep", "config": jax_ep.EPConfig(**SIZES)}.items():
        add(call, "group", f"group={what}", functools.partial(use, group=group))
    add(call, "closed", "closed", lambda: use(group=closed_group()))


def dispatch_outside(name: str) -> Any:
    return getattr(jax_ep, name)(group_of(), ones(T, H), ids(T, K))


def on_other_mesh(shape: Any, **options: Any) -> Any:
    mesh = mesh_of(shape=shape, names=("dp", "ep"))
    return run(lambda: jax_ep.dispatch(group_of(), ones(T, H), ids(T, K)).tokens, mesh, **options)


def on_devices(devices: Any) -> Any:
    body = lambda: jax_ep.dispatch(group_of(), ones(T, H), ids(T, K)).tokens  # noqa: E731
    return run(body, mesh_of(devices))


def quantized_dispatch(**changes: Any) -> Any:
    tokens = jax_ep.Quantized(ones(T, H, dtype=fp8), ones(T, H // 128, dtype=f32))
    return dispatch(group_of(jax_ep.BlockwiseFP8()), tokens=tokens._replace(**changes))


def scaled_dispatch(input_scale: Any) -> Any:
    return dispatch(group_of(jax_ep.NVFP4()), input_scale=input_scale)


def combine(group: Any = None, wait: bool = False, change: Any = None, **changes: Any) -> Any:
    group = group_of() if group is None else group

    def body() -> Any:
        weights = ones(T, K, dtype=f32) if changes.pop("at_dispatch", False) else None
        rows = jax_ep.dispatch(group_of(), ones(T, H), ids(T, K), weights)
        given = dict(expert_out=rows.tokens, dispatched=rows) | changes
        if wait:
            return jax_ep.combine_wait(group, jax_ep.combine_async(group, **given))
        return jax_ep.combine(group, **given)

    return run(body)


def add_combine(call: str, wait: bool) -> None:
    use, n_rows = functools.partial(combine, wait=wait), group_of().max_recv_tokens
    out = wrong_arrays(n_rows, H, dtype=bf16) | other_dtypes(n_rows, H, dtypes=(f32, fp8, i32))
    add_all(call, "expert_out", out, use)
    residual = wrong_arrays(T, H, dtype=bf16) | other_dtypes(T, H, dtypes=(f32, fp8))
    weights = wrong_arrays(T, K, dtype=f32) | other_dtypes(T, K, dtypes=(i32,))
    del residual["None"], weights["None"]
    add_all(call, "residual", residual, use)
    add_all(call, "topk_weights", weights, use)
    add_all(call, "dispatched", {"None": None, "array": ones(T, H), "tuple": ()}, use)
    add_all(call, "reduce", {"1": 1, "None": None, "str": "sum"}, use)
    twice = dict(at_dispatch=True, topk_weights=ones(T, K, dtype=f32))
    add(call, "topk_weights", "weights twice", lambda: use(**twice))
    add(call, "residual", "unreduced", lambda: use(reduce=False, residual=ones(T, H)))
    other = group_of(max_tokens_per_rank=T + 1)
    add(call, "dispatched group", "another group", lambda: use(group=other))
    add(call, "group", "group=str", lambda: use(group="ep"))
    add(call, "closed", "closed", lambda: use(group=closed_group()))


def wait_for(name: str, in_flight: Any) -> Any:
    return run(lambda: getattr(jax_ep, name)(group_of(), in_flight()))


def start_dispatch(group: Any = None) -> Any:
    return jax_ep.dispatch_async(group or group_of(), ones(T, H), ids(T, K))


def redispatch(values: Any) -> Any:
    group = group_of()
    rows = lambda: jax_ep.dispatch(group, ones(T, H), ids(T, K))  # noqa: E731
    return run(lambda: jax_ep.redispatch(group, values, rows()))


def matmul(**changes: Any) -> Any:
    given = dict(rows=ones(4, 16), weights=ones(2, 16, 8), row_offsets=np.uint32([0, 2, 4]))
    return jax.block_until_ready(jax_ep.grouped_matmul(**(given | changes)))


def silu(**changes: Any) -> Any:
    given = dict(x=ones(4, 256), row_offsets=np.uint32([0, 2, 4]))
    return jax.block_until_ready(jax_ep.fused_silu(**(given | changes)))


def mlp(token_format: Any = None, **changes: Any) -> Any:
    group = group_of(token_format)

    def body() -> Any:
        rows = jax_ep.dispatch(group, ones(T, H), ids(T, K))
        given = dict(dispatched=rows, gate_up=ones(L, H, 2 * F), down=ones(L, F, H))
        return jax_ep.expert_mlp(**(given | changes))

    return run(body)


def quantize(**changes: Any) -> Any:
    return jax_ep.quantize_weights(**(dict(weights=ones(L, 128, 128)) | changes))


def dequantize(**changes: Any) -> Any:
    def body() -> Any:
        rows = jax_ep.dispatch(group_of(jax_ep.MXFP8()), ones(T, H), ids(T, K))
        return jax_ep.dequantize(**(dict(dispatched=rows) | changes))

    return run(body)


def route(**changes: Any) -> Any:
    given = dict(config=router.RouterConfig(), logits=ones(T, E, dtype=f32), top_k=K)
    return router.route(**(given | changes))


def init(**changes: Any) -> Any:
    given = dict(mesh=mesh_of(), axis_name="ep", config=jax_ep.EPConfig(**SIZES), transport="host")
    return jax_ep.ep_init(**(given | changes))


def config(**changes: Any) -> Any:
    return jax_ep.EPConfig(**(SIZES | changes))


def layer(**changes: Any) -> Any:
    given = dict(group=group_of(), expert_size=F, rngs=nnx.Rngs(0))
    return MoE(**(given | changes))


@functools.cache
def one_layer() -> Any:
    return layer()


def call_layer(**changes: Any) -> Any:
    return jax.block_until_ready(one_layer()(**(dict(tokens=ones(R * T, H)) | changes)))


def add_calls() -> None:
    add_dispatch("dispatch", wait=False)
    add_dispatch("dispatch_async", wait=True)
    add_combine("combine", wait=False)
    add_combine("combine_async", wait=True)
    for name in ("dispatch", "dispatch_async"):
        add(name, "shard_map", "outside", functools.partial(dispatch_outside, name))
    add("dispatch", "mesh", "another shape", lambda: on_other_mesh((1, R)))
    add(
        "dispatch",
        "manual",
        "an axis that is not manual",
        lambda: on_other_mesh((2, 2), axis_names={"ep"}),
    )
    add("dispatch", "mesh", "other devices", lambda: on_devices(jax.devices()[R:]))
    add("dispatch", "mesh", "another order", lambda: on_devices(jax.devices()[:R][::-1]))
    codes = wrong_arrays(T, H, dtype=fp8) | other_dtypes(T, H, dtypes=(bf16, np.uint8))
    scales = wrong_arrays(T, H // 128, dtype=f32) | other_dtypes(T, H // 128, dtypes=(bf16,))
    del codes["too long"], codes["scalar"]
    add_all("dispatch", "codes", codes, quantized_dispatch)
    add_all("dispatch", "scales", scales, quantized_dispatch)
    wrong = {"2": ones(2, dtype=f32), "bf16": ones(1), "str": "1", "int": 1}
    add_all("dispatch", "input_scale", {f"NVFP4 {k}": v for k, v in wrong.items()}, scaled_dispatch)
    for name in ("dispatch_wait", "combine_wait"):
        for what, value in {"None": None, "array": ones(T, H), "tuple": ()}.items():
            fault = functools.partial(wait_for, name, lambda value=value: value)
            add(name, "in_flight", f"in_flight={what}", fault)
    add("combine_wait", "in_flight", "a dispatch", lambda: wait_for("combine_wait", start_dispatch))
    other = functools.partial(start_dispatch, group_of(max_tokens_per_rank=T + 1))
    add("dispatch_wait", "in_flight", "another group", lambda: wait_for("dispatch_wait", other))
    values = wrong_arrays(T, H, dtype=bf16) | other_dtypes(T, H, dtypes=(f32, fp8, jnp.int8))
    add_all("redispatch", "values", values, redispatch)


def add_experts() -> None:
    offsets = {
        "None": None,
        "int32": np.int32([0, 2, 4]),
        "float": np.float32([0, 2, 4]),
        "empty": np.uint32([]),
        "matrix": np.uint32([[0, 4]]),
        "str": "0 4",
    }
    name = "grouped_matmul"
    codes = other_dtypes(4, 16, dtypes=(fp8, np.uint8, i32))
    rows = wrong_arrays(4, 16, dtype=bf16) | codes
    del rows["too long"]
    add_all(name, "rows", rows, matmul)
    add(name, "weights", "rows too long", lambda: matmul(rows=ones(4, 17)))
    weights = wrong_arrays(2, 16, 8, dtype=bf16) | other_dtypes(2, 16, 8, dtypes=(f32, fp8))
    del weights["too long"]
    add_all(name, "weights", weights | {"3 experts": ones(3, 16, 8)}, matmul)
    add_all(name, "row_offsets", offsets, matmul)
    add_all(name, "dtype", {"int32": i32, "float16": jnp.float16, "str": "number"}, matmul)
    add_all(name, "transposed", {"1": 1, "None": None, "str": "no"}, matmul)
    quantized = jax_ep.quantize_weights(ones(2, 128, 128))
    add(name, "rows weights", "codes of weights alone", lambda: matmul(weights=quantized))
    name = "fused_silu"
    x = wrong_arrays(4, 256, dtype=bf16) | other_dtypes(4, 256, dtypes=(fp8, np.uint8, i32))
    add_all(name, "x", x, silu)
    add_all(name, "row_offsets", offsets, silu)
    add(name, "row_offsets", "beyond the rows", lambda: silu(row_offsets=np.uint32([0, 9])))
    add(name, "row_offsets", "decreasing", lambda: silu(row_offsets=np.uint32([0, 3, 1])))
    add_all(name, "token_format", {"str": "mxfp8", "dtype": fp8, "class": jax_ep.MXFP8}, silu)
    clamps = {
        "nan": (NAN, 1.0),
        "inf": (1.0, INF),
        "negative": (1.0, -1.0),
        "one": 1.0,
        "str": "ab",
    }
    add_all(name, "clamp", clamps, silu)
    add_all(name, "interleaved", {"1": 1, "None": None}, silu)
    add_all(name, "input_scales", {"array": ones(2, dtype=f32), "1": 1.0}, silu)
    name = "expert_mlp"
    for argument, shape in {"gate_up": (L, H, 2 * F), "down": (L, F, H)}.items():
        wrong = wrong_arrays(*shape, dtype=bf16) | other_dtypes(*shape, dtypes=(f32, fp8, i32))
        del wrong["too long"]
        more = {"of all experts": ones(E, *shape[1:]), "half": ones(L, shape[1], shape[2] // 2)}
        add_all(name, argument, wrong | {"one expert": ones(1, *shape[1:])}, mlp)
        add_all(name, argument, more if argument == "gate_up" else {}, mlp)
    add_all(name, "gate_up_bias", {"vector": ones(2 * F), "f32": ones(L, 2 * F, dtype=f32)}, mlp)
    add_all(name, "down_bias", {"vector": ones(H), "fp8": ones(L, H, dtype=fp8)}, mlp)
    add_all(name, "dispatched", {"None": None, "array": ones(T, H)}, mlp)
    add_all(name, "transposed", {"1": 1, "None": None}, mlp)
    add_all(name, "interleaved", {"1": 1, "None": None}, mlp)
    add_all(name, "clamp", clamps, mlp)
    add(name, "gate_up down", "one quantized", lambda: mlp(gate_up=quantize()))
    name = "quantize_weights"
    weights = wrong_arrays(L, 128, 128, dtype=bf16) | other_dtypes(L, 128, 128, dtypes=(fp8, i32))
    del weights["too long"]
    add_all(name, "weights", weights, quantize)
    add(name, "H", "H of 100", lambda: quantize(weights=ones(L, 100, 128)))
    add_all(name, "transposed", {"None": None, "str": "no"}, quantize)
    add_all(name, "differentiable", {"None": None, "str": "no"}, quantize)
    add_all(
        "dequantize", "dispatched", {"None": None, "array": ones(T, H), "tuple": ()}, dequantize
    )
    add_all("dequantize", "dtype", {"int32": i32, "str": "number", "bool": bool}, dequantize)


def add_router() -> None:
    logits = wrong_arrays(T, E, dtype=f32) | other_dtypes(T, E, dtypes=(i32,))
    for each in ("too long", "vector"):
        del logits[each]
    add_all("route", "logits", logits, route)
    add_all("route", "config", {"None": None, "str": "softmax"}, route)
    add_all("top_k", "top_k", {"0": 0, "9": 9, "float": 2.0, "None": None}, route)
    bias = {"matrix": ones(T, E, dtype=f32), "int": ids(E), "short": ones(E - 1, dtype=f32)}
    add_all("route", "bias", bias, route)
    settings = {
        "scores": {"relu": "relu", "None": None},
        "normalize": {"1": 1, "None": None},
        "scaling": {"nan": NAN, "inf": INF, "str": "1", "None": None},
        "n_expert_groups": {"0": 0, "float": 1.5},
        "topk_expert_groups": {"2": 2, "None": None},
        "group_scores": {"sum": "sum"},
    }
    for argument, values in settings.items():
        add_all("RouterConfig", argument, values, router.RouterConfig)


def add_construction() -> None:
    counts = {"0": 0, "-1": -1, "float": 2.5, "str": "2", "nan": NAN, "True": True}
    for argument in ("n_experts", "top_k", "hidden_size", "max_tokens_per_rank"):
        add_all("EPConfig", argument, counts | {"None": None, "2**31": 2**31}, config)
    for argument in ("recv_capacity", "n_gpus_per_node", "n_nodes", "n_sms"):
        add_all("EPConfig", argument, {k: counts[k] for k in ("0", "float", "nan")}, config)
    for argument in ("fused_shared_expert", "skip_a2a", "zero_unused_rows"):
        add_all("EPConfig", argument, {"1": 1, "None": None}, config)
    add_all(
        "EPConfig", "timeout_s", {"0": 0, "nan": NAN, "inf": INF, "str": "1", "None": None}, config
    )
    add_all("EPConfig", "token_format", {"str": "mxfp8", "dtype": bf16, "None": None}, config)
    add_all(
        "EPConfig", "combine_dtype", {"int": i32, "fp8": fp8, "None": None, "str": "number"}, config
    )
    add_all("EPConfig", "row_alignment", {"3": 3, "None": None}, config)
    add_all("EPConfig", "name", {"dash": "a-b", "int": 1, "empty": ""}, config)
    add_all("ep_init", "mesh", {"None": None, "devices": jax.devices(), "shape": (4,)}, init)
    axes = {"None": None, "dp": "dp", "empty": (), "twice": ("ep", "ep"), "int": 0, "dict": ({},)}
    add_all("ep_init", "axis_name", axes, init)
    add_all("ep_init", "config", {"None": None, "dict": dict(SIZES)}, init)
    add_all(
        "ep_init", "transport", {"pigeon": "pigeon", "None": None, "int": 1, "list": ["host"]}, init
    )
    add("ep_init", "p2p", "p2p on CPUs", lambda: init(transport="p2p"))
    add("ep_init", "n_experts", "5 experts on 4 ranks", lambda: init(config=config(n_experts=5)))
    add("ep_init", "n_gpus_per_node", "3 per node", lambda: init(config=config(n_gpus_per_node=3)))
    add_all("ep_init", "memory_of", {"str": "group", "closed": closed_group()}, init)
    add_all("ep_init", "exchange", {"str": "exchange"}, init)


def add_layer() -> None:
    if nnx is None:
        return
    add_all("MoE", "group", {"None": None, "str": "ep"}, layer)
    add_all("MoE", "expert_size", {"0": 0, "float": 1.5, "None": None}, layer)
    add_all("MoE", "router", {"str": "softmax"}, layer)
    add_all("MoE", "rngs", {"int": 0, "None": None}, layer)
    add_all("MoE", "param_dtype", {"int": i32, "str": "number"}, layer)
    add_all("MoE", "capacity_factor", {"0": 0, "nan": NAN, "str": "2"}, layer)
    add_all("MoE", "token_axes", {"dp": "dp", "empty": ()}, layer)
    add_all("MoE", "router_bias", {"1": 1}, layer)
    tokens = wrong_arrays(R * T, H, dtype=bf16) | other_dtypes(
        R * T, H, dtypes=(i32, fp8, np.uint8)
    )
    add_all("nnx.MoE", "tokens", tokens, call_layer)
    masks = {"short": jnp.ones(3, bool), "int": ids(R * T), "str": "mask"}
    add_all("nnx.MoE", "mask", masks, call_layer)


def check(name: str, error: BaseException | None, result: Any) -> str | None:
    words, _ = FAULTS[name]
    if not isinstance(error, ERRORS):
        return f"must raise; got {error!r}, {type(result).__name__}"
    missing = [word for word in words if word not in str(error)]
    return f"the error must name {', '.join(missing)}; got {error!r:.300}" if missing else None


def works() -> None:
    """Right calls of all kinds."""
    for right in (dispatch, combine, matmul, silu, mlp, quantize, dequantize, route):
        right()
    if nnx is not None:
        call_layer()
    dataclasses.replace(config())


if __name__ == "__main__":
    for add_some in (add_calls, add_experts, add_router, add_construction, add_layer):
        add_some()
    misuse.run("malformed", {name: fault for name, (_, fault) in FAULTS.items()}, check, works)
