"""Grouped matmuls on one GPU, beside one dense matmul of as many operations.

32 groups of rows and normal numbers. Periods in a chain, all of a case in turns.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jax_ep
import timing

_N_GROUPS = 32
_SIZES = ((7168, 4096), (2048, 7168))  # K, N
_LENGTHS = (2, 6)


def _groups() -> dict[str, np.ndarray]:
    """Rows per group, by name."""
    zipf = 1 / np.arange(1, _N_GROUPS + 1)
    even = {f"{n} rows": np.full(_N_GROUPS, n) for n in (1024, 256, 128, 16)}
    return even | {"zipf": (32 * 1024 * zipf / zipf.sum()).astype(int)}


@dataclasses.dataclass(frozen=True)
class _Operands:
    """What all matmuls of a case take."""

    rows: jax.Array
    weights: jax.Array
    offsets: jax.Array
    n_used: int

    @classmethod
    def make(cls, k: int, n: int, sizes: np.ndarray, capacity: int = 1) -> "_Operands":
        offsets = np.cumsum([0, *sizes]).astype(np.uint32)
        n_used = int(offsets[-1])
        keys = jax.random.split(jax.random.key(1))
        rows = jax.random.normal(keys[0], (capacity * n_used, k), jnp.bfloat16)
        weights = lax.map(
            lambda key: jax.random.normal(key, (k, n), jnp.bfloat16) * k**-0.5,
            jax.random.split(keys[1], len(sizes)),
        )
        return cls(rows, weights.astype(jnp.bfloat16), jnp.asarray(offsets), n_used)


# A function of arrays, and the arrays.
_Program = tuple[Callable[..., jax.Array], tuple[Any, ...]]


def _programs(x: _Operands, name: str) -> dict[str, _Program]:
    """The matmuls that are compared, by name."""
    cotangent = jax.random.normal(jax.random.key(2), (len(x.rows), x.weights.shape[2]))
    cotangent = cotangent.astype(jnp.bfloat16)
    found: dict[str, _Program] = {
        "dense": (jnp.matmul, (x.rows[: x.n_used], jnp.array(x.weights[0]))),
        "bfloat16": (jax_ep.grouped_matmul, (x.rows, x.weights, x.offsets)),
        "transposed weights": (
            functools.partial(jax_ep.grouped_matmul, transposed=True),
            (x.rows, jnp.swapaxes(x.weights, 1, 2), x.offsets),
        ),
        "FP8": (jax_ep.grouped_matmul, _codes(x)),
        "gradient of rows": (_grad_rows, (x.weights, x.offsets, cotangent)),
        "gradient of weights": (_grad_weights, (x.rows, x.offsets, cotangent)),
    }
    if name == "16 rows":
        found["reading the weights"] = _largest, (x.weights,)
    return found


def _codes(x: _Operands) -> tuple[Any, ...]:
    codes, scales = jax_ep.BlockwiseFP8().quantize(x.rows)
    quantize = functools.partial(jax_ep.quantize_weights, differentiable=False)
    one = jax.jit(lambda weights: lax.map(lambda w: quantize(w[None]), weights))(x.weights)
    weights = jax.tree.map(lambda array: array[:, 0], one)
    return jax_ep.QuantizedRows(codes, jnp.array(scales.T), None), weights, x.offsets


def _grad_rows(weights: jax.Array, offsets: jax.Array, cotangent: jax.Array) -> jax.Array:
    rows = jnp.zeros((len(cotangent), weights.shape[1]), weights.dtype)
    _, pull = jax.vjp(lambda rows: jax_ep.grouped_matmul(rows, weights, offsets), rows)
    return pull(cotangent)[0]


def _grad_weights(rows: jax.Array, offsets: jax.Array, cotangent: jax.Array) -> jax.Array:
    shape = len(offsets) - 1, rows.shape[1], cotangent.shape[1]
    weights = jnp.zeros(shape, rows.dtype)
    _, pull = jax.vjp(lambda weights: jax_ep.grouped_matmul(rows, weights, offsets), weights)
    return pull(cotangent)[0]


def _largest(weights: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(weights, jnp.uint16).max(axis=(1, 2))


def _chain(function: Callable[..., jax.Array], n: int) -> Callable[..., list[jax.Array]]:
    """`n` calls, each after the one before, and a part of every result."""

    def run(*args: Any) -> list[jax.Array]:
        results = [jnp.zeros(1)]
        for _ in range(n):
            args, results[-1] = lax.optimization_barrier((args, results[-1]))
            results.append(lax.optimization_barrier(function(*args)).reshape(-1)[:1])
        return results

    return run


def _period(programs: dict[str, _Program], repeats: timing.Repeats) -> dict[str, Any]:
    """Periods in a chain, by name."""
    pairs = {}
    for name, (function, args) in programs.items():
        pair = (jax.jit(_chain(function, n)).lower(*args).compile() for n in _LENGTHS)
        pairs[name] = tuple((call, args) for call in pair)
    samples = timing.period(pairs, _LENGTHS, repeats)
    return {name: timing.summary(seconds) for name, seconds in samples.items()}


def measure(repeats: timing.Repeats) -> Iterator[dict[str, Any]]:
    """Yields periods by size, groups and matmul."""
    for k, n in _SIZES:
        for name, sizes in _groups().items():
            operands = _Operands.make(k, n, sizes)
            found = _period(_programs(operands, name), repeats)
            flops = 2 * operands.n_used * k * n
            yield {"matmuls": {f"K{k} N{n}, {name}": found | {"flops": flops}}}
    spare = _Operands.make(*_SIZES[0], _groups()["1024 rows"], capacity=4)
    exact = dataclasses.replace(spare, rows=spare.rows[: spare.n_used])
    both = {
        name: (jax_ep.grouped_matmul, (x.rows, x.weights, x.offsets))
        for name, x in {"C = rows used": exact, "C = 4 times the rows used": spare}.items()
    }
    yield {"matmuls": {"capacity": _period(both, repeats)}}
