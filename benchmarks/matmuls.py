"""The two matmuls of an expert, alone on one device, with rows per group as routing gives them.

Each is measured beside its limits, in the same run and in turns with them: a dense matmul of as
many operations, and passes that read and write as many bytes. README.md defines them.
"""

import concurrent.futures
import functools
import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh

import jax_ep
import layers
import programs
import timing
from implementations import AXIS, on_gpu
from plan import OURS_ALONE, RAGGED_DOT, TOKAMAX, Item
from workload import require

DENSE, MEMORY = "dense", "memory"
ROUTINGS = ("equal", "multinomial", "zipf")
_PASS_WORDS = 4096  # of 4 bytes, which one result of a pass that only reads depends on
_N_CHECKED = 4  # rows of a matrix in the gradient of weights
_MAX_ERROR = {"FP8": 0.08}  # norm of the difference, relative; of other operations:
_MAX_ROUNDING = 0.01

# A function of row offsets and arrays, and the arrays.
Program = tuple[Callable[..., Any], tuple[Any, ...]]


def group_sizes(routing: str, n_groups: int, mean: int) -> np.ndarray:
    """Rows per group, `mean` on average, by a seed.

    `equal`; `multinomial`, by uniform routing; `zipf`, where the i-th of the shuffled groups has
    weight 1 / i, and each has at least one row.
    """
    rng, n_rows = np.random.default_rng([n_groups, mean]), n_groups * mean
    if routing == "equal":
        return np.full(n_groups, mean)
    if routing == "multinomial":
        return rng.multinomial(n_rows, np.full(n_groups, 1 / n_groups))
    weights = 1 / (1 + rng.permutation(n_groups))
    return 1 + rng.multinomial(n_rows - n_groups, weights / weights.sum())


class Operands(NamedTuple):
    """Normal numbers: with others, a GPU's power limit lowers its clock less."""

    rows: jax.Array  # [M, K]
    weights: jax.Array  # [G, K, N]
    cotangent: jax.Array  # [M, N]


def make_operands(n_rows: int, n_groups: int, k: int, n: int) -> Operands:
    """Makes them on the default device."""
    shapes = (n_rows, k), (n_groups, k, n), (n_rows, n)
    keys = jax.random.split(jax.random.key(1), len(shapes))
    normal = functools.partial(jax.random.normal, dtype=jnp.bfloat16)
    rows, weights, cotangent = map(normal, keys, shapes)
    return Operands(rows, weights * jnp.bfloat16(k**-0.5), cotangent)


def _forward(offsets: jax.Array, rows: Any, weights: Any) -> jax.Array:
    return jax_ep.grouped_matmul(rows, weights, offsets)


def _grad_weights(offsets: jax.Array, rows: jax.Array, cotangent: jax.Array) -> jax.Array:
    weights = jnp.zeros((len(offsets) - 1, rows.shape[1], cotangent.shape[1]), rows.dtype)
    return jax.vjp(lambda weights: _forward(offsets, rows, weights), weights)[1](cotangent)[0]


def _quantized(x: Operands) -> tuple[Any, ...]:
    codes, scales = jax_ep.BlockwiseFP8().quantize(x.rows)
    rows = jax_ep.QuantizedRows(codes, jnp.array(scales.T), None)
    return rows, jax.jit(layers.quantize_by_expert)(x.weights)


def ours(operation: str, x: Operands) -> Program:
    """The package's function for an operation in `plan.MATMULS`."""
    if operation == "gradient of weights":
        return _grad_weights, (x.rows, x.cotangent)
    return _forward, _quantized(x) if operation == "FP8" else (x.rows, x.weights)


def _of_others(name: str, x: Operands) -> Program:
    multiply = lax.ragged_dot
    if name == TOKAMAX:
        from tokamax import ragged_dot as multiply

    def run(offsets, rows, weights):
        return multiply(rows, weights, jnp.diff(offsets.astype(jnp.int32)))

    return run, (x.rows, x.weights)


def dense(operation: str, program: Program, x: Operands) -> Program:
    """As many rows through one matrix: in bfloat16, or on codes without scales."""
    if operation != "FP8":
        return lambda _, rows, matrix: rows @ matrix, (x.rows, jnp.array(x.weights[0]))
    contracted, (rows, weights) = (((1,), (1,)), ((), ())), program[1]
    multiply = functools.partial(lax.dot_general, preferred_element_type=jnp.bfloat16)
    arrays = rows.tokens, jnp.array(weights.codes[0])
    return lambda _, rows, matrix: multiply(rows, matrix, contracted), arrays


def n_bytes(program: Program, offsets: np.ndarray) -> tuple[int, int]:
    """The bytes that a program reads and writes, if it touches each byte once."""
    function, arrays = program
    result = jax.eval_shape(function, offsets, *arrays)
    return sum(x.nbytes for x in jax.tree.leaves(arrays)), result.size * result.dtype.itemsize


def memory(n_read: int, n_written: int) -> Program:
    """One pass that reads and writes the smaller number of bytes, and one for the rest.

    The rest is read by a reduction with few results, or written by a fill.
    """
    both = jnp.arange(min(n_read, n_written) // 4, dtype=jnp.uint32)
    n_rest = abs(n_read - n_written) // 4
    if n_read > n_written:
        rest = jnp.arange(n_rest // _PASS_WORDS * _PASS_WORDS, dtype=jnp.uint32)
        arrays = (both, rest.reshape(-1, _PASS_WORDS)) if rest.size else (both,)
        return lambda _, both, *rest: (both ^ 1, [x.max(axis=1) for x in rest]), arrays
    n_rest = max(n_rest, 1) + -max(n_rest, 1) % 4  # XLA stores vectors only if they fit
    return lambda _, both: (both ^ 1, jnp.full(n_rest, both[0])), (both,)


def _check(operation: str, program: Program, x: Operands, sizes: np.ndarray) -> None:
    """Compares the last row of the largest group, or a part of its gradient, with NumPy's."""
    offsets, group = np.cumsum([0, *sizes]), int(np.argmax(sizes))
    last, members = offsets[group + 1] - 1, slice(*offsets[group : group + 2])
    result = jax.jit(program[0])(jnp.asarray(offsets, jnp.uint32), *program[1])
    if operation == "gradient of weights":
        rows, cotangent = (np.asarray(y[members], np.float32) for y in (x.rows, x.cotangent))
        got, wanted = result[group, :_N_CHECKED], rows[:, :_N_CHECKED].T @ cotangent
    else:
        row, matrix = (np.asarray(y, np.float32) for y in (x.rows[last], x.weights[group]))
        got, wanted = result[last], row @ matrix
    error = np.linalg.norm(np.asarray(got, np.float32) - wanted) / np.linalg.norm(wanted)
    limit = _MAX_ERROR.get(operation, _MAX_ROUNDING)
    require(error <= limit, f"{operation} must be within {limit:g} of NumPy's; is off by {error:g}")


def make_programs(item: Item, x: Operands, sizes: np.ndarray) -> dict[tuple[str, str], Program]:
    """The timed programs, by operation and implementation."""
    found: dict[tuple[str, str], Program] = {}
    for operation in item.chains:
        program = ours(operation, x)
        _check(operation, program, x, sizes)
        found[operation, OURS_ALONE] = program
        if operation != "gradient of weights":  # which has the dense limit of bfloat16
            found[operation, DENSE] = dense(operation, program, x)
        found[operation, MEMORY] = memory(*n_bytes(program, np.zeros(len(sizes) + 1, np.uint32)))
    others = (name for name in item.implementations if name in (RAGGED_DOT, TOKAMAX))
    return found | {("bfloat16", name): _of_others(name, x) for name in others}


def _step(function: Callable[..., Any]) -> programs.Step:
    """The state is what the chain returns, row offsets and arrays."""

    def next(state, parameters, hide):
        results = hide(function(*state[1:]))
        return state, jax.tree.map(lambda x: x.reshape(-1)[:1], results)

    return programs.Step(next)


def make_chains(
    lengths: tuple[int, int],
    device: jax.Device,
    found: dict[tuple[str, str], Program],
    by_routing: dict[str, np.ndarray],
) -> dict[tuple[str, str, str], tuple[timing.Call, ...]]:
    """A short and a long chain of each program with each routing; limits have none."""
    mesh = Mesh([device], (AXIS,), axis_types=(AxisType.Auto,))
    offsets = {r: jnp.asarray(np.cumsum([0, *s]), jnp.uint32) for r, s in by_routing.items()}

    def arguments(arrays: tuple, routing: str) -> tuple:
        start = jnp.zeros(1), offsets[routing or ROUTINGS[0]], *arrays
        return start, [()], (), jnp.zeros(1, jnp.int32)

    def compiled(program: Program, n: int) -> timing.Call:
        chain = programs.chain(_step(program[0]), n, on_gpu(mesh))
        return programs.compiled(mesh, chain, arguments(program[1], ""))

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        futures = {k: [pool.submit(compiled, p, n) for n in lengths] for k, p in found.items()}
    return {
        (*key, routing): tuple((f.result()[0], arguments(found[key][1], routing)) for f in both)
        for key, both in futures.items()
        for routing in ([""] if key[1] in (DENSE, MEMORY) else by_routing)
    }


def measure(item: Item, device: jax.Device) -> Iterator[dict[str, Any]]:
    """Yields periods by size, rows per group, routing, operation and implementation."""
    hidden_size, expert_size, n_groups = item.sizes
    lengths = next(iter(item.chains.values()))
    shapes = {"first": (hidden_size, 2 * expert_size), "second": (expert_size, hidden_size)}
    for (which, (k, n)), mean in ((s, m) for s in shapes.items() for m in item.means):
        by_routing = {routing: group_sizes(routing, n_groups, mean) for routing in ROUTINGS}
        x = make_operands(n_groups * mean, n_groups, k, n)
        found = make_programs(item, x, by_routing["zipf"])
        case = f"{item.name.removeprefix('matmuls-')} {which}, {mean} rows"
        facts = {"limits": case, "n_groups": n_groups, "n_rows": n_groups * mean, "k": k, "n": n}
        for routing, sizes in by_routing.items():
            facts |= {"name": f"{case}, {routing}", "largest": int(sizes.max())}
            yield {"matmuls": dict(facts)}
        chains = make_chains(lengths, device, found, by_routing)
        for (operation, name, routing), s in timing.period(chains, lengths, item.repeats).items():
            where = {"case": ", ".join(filter(None, [case, routing])), "operation": operation}
            yield {"times": where | {"clock": "chain", "implementation": name, **timing.summary(s)}}
