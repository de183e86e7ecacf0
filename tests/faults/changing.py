"""Arrays whose memory the program writes while a call that takes them runs, on CPUs.

JAX does not copy a NumPy array with the alignment that XLA wants, so a loader that refills its
buffer too early changes what the call reads. The call must end, in an error that names it or in
other numbers. It must neither crash nor hang, and the next call must give the right results.

    python tests/faults/changing.py [--quick]
"""

import dataclasses
import functools
import os
import re
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

import child
import edges  # noqa: F401
import jax_ep
from layer import AXIS, use_devices

# Shards of all arrays, row_offsets included, are multiples of the alignment.
R, L, T, K, H = 2, 15, 8192, 8, 16
ALIGNMENT = 64
CHANGED = "dispatched must be the unchanged result of a dispatch|row_offsets must rise"
INDICES = ("topk_ids", "handle", "row_offsets", "src_info")


def shared(array) -> tuple[np.ndarray, jax.Array]:
    """A copy of `array`, and a JAX array in the same memory, sharded over the ranks."""
    memory = np.zeros(array.nbytes + ALIGNMENT, np.uint8)
    begin = -memory.ctypes.data % ALIGNMENT
    own = memory[begin : begin + array.nbytes].view(array.dtype).reshape(array.shape)
    own[:] = array
    of_jax = jax.device_put(own, jax.NamedSharding(mesh(), jax.P(AXIS)))
    for shard in of_jax.addressable_shards:
        assert np.shares_memory(np.asarray(shard.data), own), "JAX has copied the array"
    return own, of_jax


@functools.cache
def mesh() -> jax.sharding.Mesh:
    return jax.make_mesh((R,), (AXIS,))


def per_rank(body):
    """Compiles a function of arrays that are sharded over the ranks."""
    spec = jax.P(AXIS)
    return jax.jit(jax.shard_map(body, mesh=mesh(), in_specs=spec, out_specs=spec, check_vma=False))


def in_use(rows: jax.Array, row_offsets: jax.Array) -> jax.Array:
    return jnp.where((jnp.arange(len(rows)) < row_offsets[-1])[:, None], rows, 0)


def calls(group) -> dict:
    """The calls, as functions of tokens, rows, weights and INDICES, by name."""

    def dispatched(tokens, indices):
        changed = dict(zip(INDICES, indices, strict=True))
        return dataclasses.replace(jax_ep.dispatch(group, tokens, indices[0]), **changed)

    def dispatch(tokens, rows, weights, *indices):
        result = jax_ep.dispatch(group, tokens, indices[0])
        return in_use(result.tokens, result.row_offsets)

    def combine(tokens, rows, weights, *indices):
        return jax_ep.combine(group, rows, dispatched(tokens, indices), weights)

    def backward(tokens, rows, weights, *indices):
        loss = lambda *x: jnp.sum(combine(tokens, *x, *indices).astype(jnp.float32))  # noqa: E731
        of_rows, of_weights = jax.grad(loss, (0, 1))(rows, weights)
        return in_use(of_rows, indices[2]), of_weights

    def redispatch(tokens, rows, weights, *indices):
        return in_use(jax_ep.redispatch(group, tokens, dispatched(tokens, indices)), indices[2])

    def fused_silu(tokens, rows, weights, *indices):
        x = jnp.concatenate([rows] * 4, axis=1)
        out = jax_ep.fused_silu(x, indices[2], jax_ep.MXFP8())
        return in_use(out.tokens.astype(jnp.bfloat16), indices[2])

    def grouped_matmul(tokens, rows, weights, *indices):
        ones = jnp.ones((L, H, H), rows.dtype)
        return in_use(jax_ep.grouped_matmul(rows, ones, indices[2]), indices[2])

    bodies = dispatch, combine, backward, redispatch, fused_silu, grouped_matmul
    return {body.__name__: body for body in bodies}


def make_operands(group) -> tuple[list[jax.Array], list[np.ndarray]]:
    """The operands of `calls`, and the memory of the last ones, INDICES."""
    random = np.random.default_rng(0)
    put = functools.partial(jax.device_put, device=jax.NamedSharding(mesh(), jax.P(AXIS)))
    tokens = put(random.normal(size=(R * T, H)).astype(jnp.bfloat16))
    ids = put(random.integers(0, R * L, (R * T, K)).astype(np.int32))
    weights = put(random.random((R * T, K)).astype(np.float32))

    def fields(tokens, ids):
        rows = jax_ep.dispatch(group, tokens, ids)
        return rows.tokens, [getattr(rows, name) for name in INDICES]

    rows, indices = per_rank(fields)(tokens, ids)
    pairs = [shared(np.asarray(each)) for each in indices]
    return [tokens, rows, weights, *(b for _, b in pairs)], [a for a, _ in pairs]


def wrong_values(random, right: np.ndarray) -> np.ndarray:
    """Numbers that no index may be, others that exist, or -1.

    With the others, threads may write the same row, which TSan would report.
    """
    kind = 0 if "tsan" in os.environ.get("LD_PRELOAD", "") else random.integers(3)
    if kind == 2:
        return random.permutation(right)
    wrong = random.integers(0, 2**32, right.shape, np.uint32) if kind == 1 else np.uint32(2**32 - 1)
    return np.broadcast_to(wrong, right.shape).view(right.dtype)


def check_call(program, operands, memory, seconds: float, random) -> int:
    """Changes the indices at any time of a call, as often as there is time; how often."""
    expected = jax.block_until_ready(program(*operands))
    right = [own.copy() for own in memory]
    begin = time.monotonic()
    jax.block_until_ready(program(*operands))
    call_s = time.monotonic() - begin
    n_faults, end = 0, time.monotonic() + seconds
    while time.monotonic() < end:
        wrong = [wrong_values(random, each) for each in right]
        out = program(*operands)
        time.sleep(random.random() * 1.2 * call_s)
        for own, values in zip(memory, wrong, strict=True):
            own[:] = values
        try:
            jax.block_until_ready(out)
        except jax.errors.JaxRuntimeError as error:
            assert re.search(CHANGED, str(error)), error
        for own, values in zip(memory, right, strict=True):
            own[:] = values
        n_faults += 1
    for a, b in zip(jax.tree.leaves(program(*operands)), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    return n_faults


def main_of_child(seconds: float) -> None:
    random, total = np.random.default_rng(1), 0
    config = jax_ep.EPConfig(n_experts=R * L, top_k=K, hidden_size=H, max_tokens_per_rank=T)
    with jax_ep.ep_init(mesh(), AXIS, config, transport="host") as group:
        operands, memory = make_operands(group)
        for name, body in calls(group).items():
            print(f"{name}: ", end="", flush=True)
            n_faults = check_call(per_rank(body), operands, memory, seconds, random)
            print(f"changed {n_faults} times", flush=True)
            total += n_faults
    print(total, "faults")


if __name__ == "__main__":
    arguments = child.arguments()
    if arguments.child is None:
        seconds = 1.0 if arguments.quick else 20.0
        n_faults = child.run(__file__, str(seconds), timeout_s=60 + 6 * seconds)
        print(f"changing: {n_faults} faults, no crash, no hang")
        sys.exit()
    use_devices(R)
    main_of_child(float(arguments.child[0]))
