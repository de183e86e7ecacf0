"""Malformed calls of the public API: each raises an error that names the call and the argument.

python tests/faults/malformed.py [--quick]; malformed_*.py hold the calls, by subject.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import edges  # noqa: F401
import jax_ep
import misuse
from jax_ep import router
from malformed_base import (
    FAULTS,
    INF,
    NAN,
    SIZES,
    E,
    F,
    H,
    K,
    R,
    T,
    add,
    add_all,
    bf16,
    closed_group,
    f32,
    fp8,
    group_of,
    i32,
    ids,
    mesh_of,
    ones,
    other_dtypes,
    wrong_arrays,
)
from malformed_calls import add_calls, combine, dispatch
from malformed_experts import add_experts, dequantize, matmul, matmul_gradient, mlp, quantize, silu

try:
    from flax import nnx

    from jax_ep.nnx import MoE
except ImportError:
    nnx = None

ERRORS = ValueError, TypeError, NotImplementedError, jax.errors.JaxRuntimeError


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
        "normalize": {"1": 1},
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
    add_all("EPConfig", "on_drop", {"True": True, "None": None, "str": "ignore"}, config)
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
    axes = {"dp": "dp", "dict": ({},), "int": 0}
    specs = {"empty": (), "P": jax.P(), "P of dp": jax.P("dp", "ep"), "P twice": jax.P("ep", "ep")}
    add_all("MoE", "token_axes", axes | specs, layer)
    add_all("MoE", "fsdp_axis", axes, layer)
    add_all("MoE", "capacity_axis", axes, layer)
    add_all("MoE", "on_limit", {"None": None, "str": "drop", "alone": "raise"}, layer)
    add_all("MoE", "expert_fn", {"str": "mlp"}, layer)
    add_all("MoE", "router_bias", {"1": 1}, layer)
    add_all("MoE", "transposed", {"1": 1}, layer)
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
    others = mlp, quantize, dequantize, route
    for right in (dispatch, combine, matmul, matmul_gradient, silu, *others):
        right()
    if nnx is not None:
        call_layer()
    dataclasses.replace(config())


if __name__ == "__main__":
    for add_some in (add_calls, add_experts, add_router, add_construction, add_layer):
        add_some()
    misuse.run("malformed", {name: fault for name, (_, fault) in FAULTS.items()}, check, works)
