"""Layers whose work overlaps with asynchronous calls in several ways, all with the same bits."""

import jax
import jax.numpy as jnp

import jax_ep


def dense(x, matrix):
    """Computes with integers, so that XLA's fusions cannot change the rounding.

    The derivative is one by powers of two.
    """
    product = jnp.round(8 * x.astype(jnp.float32)) @ jnp.round(8 * matrix)
    return jnp.clip(product, -8, 8).astype(x.dtype) + jnp.where(x > 0, x / 4, x / 8)


# How a layer's work overlaps with its calls. "sync": it does not, and the calls are synchronous.
FORMS = ("sync", "then", "overlap")


def layer(group, form, tokens, ids, weights, matrix):
    if form == "sync":
        rows = jax_ep.dispatch(group, tokens, ids)
        overlapped = dense(tokens, matrix)
        out = jax_ep.combine(group, 2 * rows.tokens, rows, weights)
        return out + overlapped + dense(overlapped, matrix)
    in_flight = jax_ep.dispatch_async(group, tokens, ids)
    overlapped, after = overlapping_work(form, in_flight, tokens, matrix)
    rows = jax_ep.dispatch_wait(group, in_flight, after=after)
    in_flight = jax_ep.combine_async(group, 2 * rows.tokens, rows, weights)
    more, after = overlapping_work(form, in_flight, overlapped, matrix)
    return jax_ep.combine_wait(group, in_flight, after=after) + overlapped + more


def overlapping_work(form, in_flight, *args, work=dense):
    """Its result, and what to pass as `after`."""
    if form == "overlap":
        return in_flight.overlap(work, *args), None
    y = work(*in_flight.then(args))
    return y, y


def weighted_rows(group, form, tokens, ids, weights, matrix):
    """Weights at dispatch, whose gradients return with those of the tokens; two pieces of work."""

    def of_weights(weights):
        # No sum of more than two cotangents, whose rounding would be up to XLA.
        return jnp.pad(weights / 4, ((0, 0), (0, tokens.shape[1] - weights.shape[1])))

    if form == "sync":
        rows = jax_ep.dispatch(group, tokens, ids, weights)
        pieces = dense(tokens, matrix), of_weights(weights)
    else:
        in_flight = jax_ep.dispatch_async(group, tokens, ids, weights)
        one, after = overlapping_work(form, in_flight, tokens, matrix)
        two, _ = overlapping_work(form, in_flight, weights, work=of_weights)
        rows = jax_ep.dispatch_wait(group, in_flight, after=after)
        pieces = one, two
    return jax_ep.combine(group, 2 * rows.tokens, rows) + pieces[0] + pieces[1].astype(tokens.dtype)


def scanned(group, form, tokens, ids, weights, matrix):
    def step(x, _):
        return jnp.tanh(layer(group, form, x, ids, weights, matrix)), None

    return jax.lax.scan(step, tokens, length=3)[0]


def gradient(group, form, tokens, ids, weights, matrix, function=scanned):
    def loss(tokens, weights):
        out = function(group, form, tokens, ids, weights, matrix)
        return jnp.sum(out.astype(jnp.float32) ** 2)

    return jax.grad(loss, argnums=(0, 1))(tokens, weights)


def gradient_of_weighted_rows(*args):
    return gradient(*args, weighted_rows)
