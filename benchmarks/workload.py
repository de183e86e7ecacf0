"""The inputs of a case, on the devices, and the checks that every implementation must pass.

Tokens are a function of position and seed, in integer arithmetic. Devices compute them where they
are needed, and again to compare rows with them. NumPy computes the routing, from which all expected
rows follow.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jax_ep
import layers
import overlap
from case import Case, make_routing, remote_messages
from implementations import AXIS, Implementation
from programs import on_host, on_mesh
from truth import Truth

_N_ROUTINGS = 4
_FLUSH_BYTES = 1 << 27  # per device; larger than any cache
# Smallest cosine between the sums of quantized rows and of tokens. (The tests compare bits.)
_MIN_COSINE = 0.97


class Workload:
    """Inputs and expected results.

    Attributes:
        remote_messages: mean number of messages that a rank sends to others, by the first routing.
        sets: tokens `[R * T, H]`, ids and weights `[R * T, K]` of each set of inputs.
        rotation_args: arguments of `programs.rotation`: `sets`, and `passes`, which are zero.
        chain_args: arguments of any chain: tokens, routings, parameters of steps, and `passes`.
    """

    def __init__(self, mesh: Mesh, case: Case, n_sets: int) -> None:
        self._case, self._mesh = case, mesh
        self._sharding = NamedSharding(mesh, PartitionSpec(AXIS))
        devices = enumerate(mesh.devices.flat)
        self._ranks = [i for i, device in devices if device.process_index == jax.process_index()]
        routings = [make_routing(case, seed) for seed in range(_N_ROUTINGS)]
        self._truths = [Truth(case, *routing) for routing in routings]
        self.remote_messages = remote_messages(case, routings[0][0])
        routings = [(self._put(ids), self._put(weights)) for ids, weights in routings]
        tokens = self._make_tokens(n_sets)
        self.sets = [(x, *routings[i % _N_ROUTINGS]) for i, x in enumerate(tokens)]
        make = overlap.make_matrices if case.width else layers.make_weights
        parameters = make(mesh, case) if case.width or case.expert_size else ()
        passes = self._put(np.zeros(case.n_ranks, np.int32))
        self.rotation_args = self.sets, passes
        self.chain_args = tokens[0], routings, parameters, passes
        self._distance = on_mesh(mesh, _distance)
        self._examine = on_mesh(mesh, functools.partial(_examine, case))
        self._flush = on_mesh(mesh, lambda x: x + 1)
        self._flushed: jax.Array | None = None

    def check_dispatch(self, name: str, dispatched: Any) -> jax.Array:
        """Checks all that the contract defines; compares rows bitwise.

        Returns:
            `[R, C, H]`, the experts' results; NaN in rows that are not in use.
        """
        truth = self._truths[0]
        for what, value in truth.counts.items():
            got = on_host(getattr(dispatched, what))
            require(np.array_equal(got, value[self._ranks]), f"{name}: {what} must be right.")
        expected = map(self._put, (truth.choice_of_row, truth.factor_of_row))
        got = dispatched.tokens, dispatched.src_info
        rows, n_wrong = self._examine(*got, *expected)
        n_rows, n_infos = on_host(n_wrong).sum(axis=0)
        require(not n_rows, f"{name}: rows must equal their tokens; {n_rows} do not.")
        require(not n_infos, f"{name}: src_info must be right; {n_infos} are not.")
        return rows

    def check_combine(self, name: str, out: jax.Array) -> None:
        """Checks the combined results of what `check_dispatch` returned."""
        scale = self._truths[0].expert_weight
        self._check_near(f"{name}: combine", out, scale, 1)

    def check_chain(self, name: str, n: int, tokens: jax.Array, results: list) -> None:
        """Checks the result of `n` round trips, and the first gradient of the weights.

        A round trip multiplies a token by the sum of its weights; its gradient does the same to the
        cotangent, which is the result of the round trip.
        """
        truths = [self._truths[i % _N_ROUTINGS] for i in range(n)]
        scale = np.prod([truth.weight for truth in truths], axis=0)
        if "d_weights" in results[0]:
            scale, n = scale**2, 2 * n
            dots = truths[0].has_row * truths[0].weight[:, None]
            got = results[0]["d_weights"].reshape(dots.shape)
            self._check_near(f"{name}: gradient of weights", got, dots, 1)
        self._check_near(f"{name}: tokens after a chain", tokens, scale, n)

    def check_sums(self, ours: Implementation) -> None:
        """Checks that no row is dropped and that the rows' sum is near that of the tokens."""

        def run(tokens, ids, weights):
            rows = ours.dispatch(tokens, ids, weights)
            numbers = jax_ep.dequantize(rows, jnp.float32)
            row = jnp.arange(numbers.shape[0])[:, None]
            in_use = (row < rows.row_offsets[-1].astype(jnp.int32)) & (rows.src_info[:, :1] >= 0)
            got = jnp.where(in_use, numbers, 0).sum(0)
            sent = ids.shape[1] * tokens.astype(jnp.float32).sum(0)
            return lax.psum(jnp.stack([got, sent]), AXIS)[None], rows.n_dropped[None]

        sums, dropped = on_mesh(self._mesh, run)(*self.sets[0])
        got, sent = np.asarray(sums)[0]
        cosine = float(got @ sent / np.linalg.norm(got) / np.linalg.norm(sent))
        require(cosine >= _MIN_COSINE, f"rows must be near the tokens; cosine {cosine:.4f}")
        require(not np.asarray(dropped).any(), "no row may be dropped")

    def _check_near(self, what: str, got: jax.Array, scale: np.ndarray, n_sums: int) -> None:
        """Allows four roundings to bfloat16 per sum; 1e-4 for float32."""
        scale = self._put(scale.astype(np.float32))
        found = self._distance(got, self.sets[0][0], scale)
        error, largest = on_host(found).max(axis=0)
        case = self._case
        unit = 1e-4 if case.dtype == "float32" else 4 * 2.0**-8
        limit = n_sums * unit * max(1.0, largest)
        words = f"{what} must be within {limit:.3g} of the reference; is off by"
        require(error <= limit, f"{words} {error:.3g}.")

    def flush(self) -> None:
        """Evicts everything from the caches before it returns."""
        if self._flushed is None:
            shape = (self._case.n_ranks, _FLUSH_BYTES // 4)
            self._flushed = jnp.zeros(shape, jnp.int32, device=self._sharding)
        self._flushed = jax.block_until_ready(self._flush(self._flushed))

    def _put(self, x: np.ndarray) -> jax.Array:
        # Unlike `device_put`, without a collective of XLA if there are several processes.
        return jax.make_array_from_callback(x.shape, self._sharding, lambda index: x[index])

    def _make_tokens(self, n: int) -> list[jax.Array]:
        """Makes `n` arrays on the devices."""

        def make(seed):
            first = lax.axis_index(AXIS) * self._case.n_tokens
            token = first + jnp.arange(self._case.n_tokens, dtype=jnp.int32)
            return _as_tokens(self._case, token, seed)

        seeds = (np.full(self._case.n_ranks, seed, np.uint32) for seed in range(n))
        return [on_mesh(self._mesh, make)(self._put(each)) for each in seeds]


def require(holds: Any, message: str) -> None:
    """Raises `AssertionError`; unlike `assert`, also under `python -O`."""
    if not holds:
        raise AssertionError(message)


def _as_tokens(case: Case, token: jax.Array, seed: jax.Array) -> jax.Array:
    """`[n, H]`: bfloat16 numbers of both signs, with magnitudes in [1/8, 2).

    Their bits are a hash of position and seed.
    """
    x = token.astype(jnp.uint32)[:, None] * jnp.uint32(case.hidden_size)
    x += jnp.arange(case.hidden_size, dtype=jnp.uint32)
    x = x * jnp.uint32(0x9E3779B1) + (seed + jnp.uint32(1)) * jnp.uint32(0x85EBCA77)
    x = (x ^ (x >> 15)) * jnp.uint32(0x2C1B3C6D)
    x = (x ^ (x >> 12)) * jnp.uint32(0x297A2D39)
    bits = (((x ^ (x >> 15)) & jnp.uint32(0x81FF)) | jnp.uint32(0x3E00)).astype(jnp.uint16)
    return lax.bitcast_convert_type(bits, jnp.bfloat16).astype(case.dtype)


def _examine(case: Case, *arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the experts' results, and how many rows and entries of `src_info` are wrong."""
    rows, src_info, choice, factor = (x[0] for x in arrays)
    in_use, token, k = choice >= 0, choice // case.top_k, choice % case.top_k
    expected = _as_tokens(case, token, jnp.uint32(0))
    source = jnp.stack([token % case.n_tokens, k], axis=1)
    is_wrong = (rows != expected).any(axis=1), (src_info != source).any(axis=1)
    n_wrong = jnp.stack([jnp.sum(x & in_use, dtype=jnp.int32) for x in is_wrong])
    return (rows * factor.astype(rows.dtype)[:, None])[None], n_wrong[None]


def _distance(got: jax.Array, tokens: jax.Array, scale: jax.Array) -> jax.Array:
    """`[1, 2]`: the largest distance from the expected values, and the largest of these.

    Expected are the tokens times `scale[T]`, or their squared norms times `scale[T, K]`.
    """
    tokens = tokens.astype(jnp.float32)
    if scale.ndim == 1:
        expected = tokens * scale[:, None]
    else:
        expected = jnp.sum(tokens * tokens, axis=1, keepdims=True) * scale
    distance = jnp.abs(got.astype(jnp.float32) - expected)
    return jnp.stack([distance.max(), jnp.abs(expected).max()])[None]
