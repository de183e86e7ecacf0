"""Loads of experts beyond what float32 holds exactly."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_ep.router import update_bias


@pytest.mark.parametrize("dtype", [np.int32, np.uint32, np.int64, np.uint64])
def test_integer_loads_are_compared_exactly(dtype):
    rng, largest = np.random.default_rng(0), int(np.iinfo(np.int32).max)
    if np.dtype(dtype).itemsize == 8:
        largest <<= 20
    load = np.stack(
        [
            np.full(12, 7654321),
            np.full(12, largest),
            largest - np.arange(12) // 6,
            largest - np.arange(12) // 11,
            *rng.integers(largest - 2, largest + 1, (8, 12)),
            *rng.integers(0, largest, (8, 12)),
            np.eye(12, dtype=np.int64)[3] * largest,
            np.zeros(12, np.int64),
        ]
    ).astype(dtype)
    wanted = [[np.sign(sum(row) - 12 * x) for x in row] for row in load.astype(object)]
    got = update_bias(np.zeros(load.shape, np.float32), load, 1.0)
    np.testing.assert_array_equal(got, np.float32(wanted))


def test_loads_of_many_experts_are_compared_exactly():
    load = np.full(2**16, 2**31 - 1, np.int32)
    load[0] -= 1
    got = np.asarray(jax.jit(update_bias)(jnp.zeros(load.shape), load, 1.0))
    assert got[0] == 1 and (got[1:] == -1).all()


def test_loads_of_other_dtypes():
    for dtype in (np.int8, np.uint16, np.float32, jnp.bfloat16):
        got = update_bias(np.zeros(3, np.float32), np.array([1, 2, 6], dtype), 1.0)
        np.testing.assert_array_equal(got, [1, 1, -1])
