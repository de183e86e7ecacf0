"""Layers whose work overlaps with asynchronous calls, for tests that compile or lower them.

Each takes a group, and the tokens and ids of a rank.
"""

import jax
import jax.numpy as jnp

import jax_ep
from harness import AXIS, on_mesh
from jax_ep.geometry import Geometry
from jax_ep.group import EPGroup
from jax_ep.transports.p2p import P2pConnection

H, T, K = 64, 8, 2
CONFIG = jax_ep.EPConfig(n_experts=8, top_k=K, hidden_size=H, max_tokens_per_rank=T, n_sms=16)


def closed_group(mesh) -> EPGroup:
    """A p2p group that is not open: enough to lower its calls."""
    return EPGroup(P2pConnection(Geometry(mesh, AXIS, CONFIG, "p2p")))


def lower(mesh, function):
    """A function of a rank's tokens and ids, lowered for four GPUs."""
    tokens = jax.ShapeDtypeStruct((4, T, H), jnp.bfloat16)
    ids = jax.ShapeDtypeStruct((4, T, K), jnp.int32)
    return on_mesh(mesh, function).trace(tokens, ids).lower(lowering_platforms=("cuda",))


def overlapped_layer(group, tokens, topk_ids):
    """Elementwise work during both calls."""
    in_flight = jax_ep.dispatch_async(group, tokens, topk_ids)
    overlapped = jnp.tanh(in_flight.then(tokens))
    rows = jax_ep.dispatch_wait(group, in_flight, after=overlapped)
    in_flight = jax_ep.combine_async(group, rows.tokens, rows)
    more = jnp.sin(in_flight.then(overlapped))
    return jax_ep.combine_wait(group, in_flight, after=more) + more


def independent_work(group, tokens, topk_ids):
    """Matmuls during combine; returns their results next to the call's."""
    y, overlapped = tokens, []
    for _ in range(2):
        rows = jax_ep.dispatch(group, tokens, topk_ids)
        in_flight = jax_ep.combine_async(group, rows.tokens, rows)
        y = in_flight.then(y)
        for _ in range(2):
            y = jnp.tanh(y @ y.T @ y)
        tokens = jax_ep.combine_wait(group, in_flight, after=y)
        overlapped.append(y)
    return tokens, overlapped


def two_layers(group, tokens, topk_ids):
    matrix = jnp.ones((tokens.shape[1],) * 2, tokens.dtype)
    for _ in range(2):
        tokens = matmul_layer(group, tokens, topk_ids, matrix)
    return tokens


def matmul_layer(group, tokens, topk_ids, matrix):
    """Matmuls during both calls, and a grouped one in between."""
    in_flight = jax_ep.dispatch_async(group, tokens, topk_ids)
    overlapped = jnp.tanh(in_flight.then(tokens) @ matrix)
    rows = jax_ep.dispatch_wait(group, in_flight, after=overlapped)
    matrices = jnp.broadcast_to(matrix, (len(rows.group_sizes), *matrix.shape))
    out = jax.lax.ragged_dot(rows.tokens, matrices, rows.group_sizes)
    in_flight = jax_ep.combine_async(group, out, rows, residual=overlapped)
    more = jnp.tanh(in_flight.then(overlapped) @ matrix)
    return jax_ep.combine_wait(group, in_flight, after=more) + more


def layer_with_work(group, tokens, topk_ids, matrix):
    """The asynchronous layer by `overlap`: also in the backward."""

    def work(x):
        return jnp.tanh(x @ matrix)

    in_flight = jax_ep.dispatch_async(group, tokens, topk_ids)
    overlapped = in_flight.overlap(work, tokens)
    rows = jax_ep.dispatch_wait(group, in_flight)
    matrices = jnp.broadcast_to(matrix, (len(rows.group_sizes), *matrix.shape))
    out = jax.lax.ragged_dot(rows.tokens, matrices, rows.group_sizes)
    in_flight = jax_ep.combine_async(group, out, rows, residual=overlapped)
    more = in_flight.overlap(work, overlapped)
    return jax_ep.combine_wait(group, in_flight) + more


def gradient_of_loop(group, tokens, topk_ids, layer=matmul_layer):
    def loss(tokens, matrices):
        def step(x, matrix):
            return layer(group, x, topk_ids, matrix), None

        return jnp.sum(jax.lax.scan(step, tokens, matrices)[0].astype(jnp.float32))

    shape = 3, tokens.shape[1], tokens.shape[1]
    matrices = jnp.ones(shape, tokens.dtype) * tokens[0]
    return jax.grad(loss, argnums=(0, 1))(tokens, matrices)


def gradient_of_loop_with_work(group, tokens, topk_ids):
    return gradient_of_loop(group, tokens, topk_ids, layer_with_work)


def gradient_of_layers_with_work(group, tokens, topk_ids):
    def loss(tokens, matrix):
        for _ in range(2):
            tokens = layer_with_work(group, tokens, topk_ids, matrix)
        return jnp.sum(tokens.astype(jnp.float32) ** 2)

    matrix = jnp.ones((tokens.shape[1],) * 2, tokens.dtype) * tokens[0]
    return jax.grad(loss, argnums=(0, 1))(tokens, matrix)


def combine_in_a_loop(group, tokens, topk_ids):
    rows = jax_ep.dispatch(group, tokens, topk_ids)

    def step(y, _):
        in_flight = jax_ep.combine_async(group, rows.tokens * y[0], rows)
        more = jnp.tanh(in_flight.then(y) @ y.T @ y)
        return jax_ep.combine_wait(group, in_flight, after=more) + more, None

    return jax.lax.scan(step, tokens, length=3)[0]


# The asynchronous calls in each program's code, those of the backward among them.
N_CALLS = {
    independent_work: 2,
    two_layers: 4,
    gradient_of_loop: 2,
    gradient_of_loop_with_work: 4,
    gradient_of_layers_with_work: 8,
    combine_in_a_loop: 1,
}
PROGRAMS = [*N_CALLS]
GRADIENTS_OF_LOOPS = [gradient_of_loop, gradient_of_loop_with_work]
