"""A small layer for fault scripts, on CPU devices: dispatch, fused_silu and combine."""

import faulthandler
import functools

import jax
import jax.numpy as jnp
import numpy as np

import jax_ep

AXIS = "ep"
R, E, K, H, T = 4, 8, 2, 128, 16


def use_devices(n: int = R) -> None:
    """Gives this process CPU devices. Comes before anything else of JAX."""
    faulthandler.enable()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", n)


class Layer:
    """The layer of one configuration, whose group can be opened again and again."""

    def __init__(self, **changes) -> None:
        self.mesh, self.n_ranks = jax.make_mesh((R,), (AXIS,)), R
        fields = {"n_experts": E, "top_k": K, "hidden_size": H, "max_tokens_per_rank": T}
        self.config = jax_ep.EPConfig(**(fields | changes))
        random = np.random.default_rng(0)
        self._sharding = jax.NamedSharding(self.mesh, jax.P(AXIS))
        n = R * self.config.max_tokens_per_rank
        self.tokens = self._put(random.normal(size=(n, H)).astype(jnp.bfloat16))
        self.ids = self._put(random.integers(0, E, (n, K)).astype(np.int32))
        self.weights = self._put(random.random((n, K)).astype(np.float32))
        self._forward, self._backward = None, None

    def open(self) -> jax_ep.EPGroup:
        """Opens the group; compiles the layer for the first one, which equal ones share."""
        group = jax_ep.ep_init(self.mesh, AXIS, self.config, transport="host")
        if self._forward is None:
            self._forward = self.program(lambda x, i, w: self.body(group, x, i, w))
            gradients = jax.grad(
                lambda x, w, i: jnp.sum(self.body(group, x, i, w).astype(jnp.float32)), (0, 1)
            )
            self._backward = self.program(lambda x, i, w: gradients(x, w, i))
            jax.block_until_ready((self.forward(), self.backward()))
        return group

    def program(self, body):
        """Compiles a per-rank function of tokens, ids and weights."""
        spec = jax.P(AXIS)
        return jax.jit(
            jax.shard_map(body, mesh=self.mesh, in_specs=spec, out_specs=spec, check_vma=False)
        )

    def body(self, group, tokens, ids, weights, before_combine=lambda rows: rows):
        """The layer on one rank, whose experts have no matmuls."""
        rows = jax_ep.dispatch(group, tokens, ids, weights)
        activated = jax_ep.fused_silu(
            jax_ep.dequantize(rows, jnp.bfloat16), rows.row_offsets, jax_ep.BF16()
        )
        expert_out = before_combine(jnp.concatenate([activated] * 2, axis=1))
        return jax_ep.combine(group, expert_out, rows)

    def call(self, program):
        """The call of a compiled program, yet to be made."""
        return functools.partial(program, self.tokens, self.ids, self.weights)

    def forward(self):
        """Runs the layer."""
        return self.call(self._forward)()

    def backward(self):
        """Runs it, and its gradients by tokens and weights."""
        return self.call(self._backward)()

    def _put(self, x) -> jax.Array:
        return jax.device_put(x, self._sharding)


def outcome(call) -> tuple[list[np.ndarray], list[str]]:
    """Waits for every rank of a call's results; returns these by rank, and the errors."""
    try:
        arrays = jax.tree.leaves(call())
    except jax.errors.JaxRuntimeError as error:
        return [], [str(error)]
    values, errors = [], []
    for array in arrays:
        for shard in array.addressable_shards:
            try:
                values.append(np.asarray(shard.data))
            except jax.errors.JaxRuntimeError as error:
                errors.append(str(error))
    return values, errors


def assert_equal(values, expected) -> None:
    """Compares the results of a call with the right ones."""
    for value, right in zip(values, expected, strict=True):
        np.testing.assert_array_equal(value, right)


def assert_right(call, expected) -> None:
    """Checks a call that must succeed."""
    values, errors = outcome(call)
    assert not errors, errors
    assert_equal(values, expected)
