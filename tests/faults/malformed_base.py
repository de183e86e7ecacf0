"""Shared by malformed*.py: groups, arrays, and the table of malformed calls."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import edges  # noqa: F401

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

import jax_ep  # noqa: E402

R, E, K, H, T, F = 4, 8, 2, 128, 4, 128
L = E // R
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


# Values that are no array of numbers in the right shape, for any argument that must be one.
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
