"""Malformed calls of dispatch, combine and redispatch."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_ep
from malformed_base import (
    NAN,
    SIZES,
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
    run,
    wrong_arrays,
)


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
