"""Programs that use the results of asynchronous calls too early; needs no GPU."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax.extend.mlir import ir

import jax_ep
from async_layers import closed_group, lower
from harness import make_mesh


@pytest.fixture
def mesh():
    return make_mesh(4)


@pytest.fixture
def group(mesh):
    return closed_group(mesh)


def n_calls_in_backward(mesh, function) -> int:
    """Asynchronous calls in the gradient of the sum of a function of a rank's tokens and ids.

    Checks that the results of each call are valid wherever anything but the call takes them.
    """

    def gradient(tokens, ids):
        return jax.grad(lambda x: jnp.sum(function(x, ids).astype(jnp.float32)))(tokens)

    names = []
    for operation in operations_in(lower(mesh, gradient).compiler_ir().operation):
        names.append(name_of(operation))
        if names[-1] == "jax_ep_async_alloc":
            _, *buffers = operation.results
            assert {*map(users_of, buffers)} == {("jax_ep_async", "jax_ep_async_done")}
    return sum("_grad_start" in name for name in names)


def operations_in(operation):
    for region in operation.regions:
        for block in region.blocks:
            for each in block.operations:
                yield each.operation
                yield from operations_in(each.operation)


def users_of(value) -> tuple[str, ...]:
    """The names of what uses a value, except barriers whose result for it has no use."""
    users = [(use.owner.operation, use.operand_number) for use in value.uses]
    return tuple(
        sorted(
            name_of(user)
            for user, i in users
            if user.name != "stablehlo.optimization_barrier" or list(user.results[i].uses)
        )
    )


def name_of(operation) -> str:
    """The target of a custom call, the function of a call; otherwise of the operation."""
    if operation.name == "stablehlo.custom_call":
        return ir.StringAttr(operation.attributes["call_target_name"]).value
    if operation.name == "func.call":
        callee = ir.FlatSymbolRefAttr(operation.attributes["callee"]).value
        return re.sub(r"_\d+$", "", callee)
    return operation.name


def test_a_second_wait_has_a_synchronous_backward(mesh, group) -> None:
    """The gradients of both waits add up, and must be valid by then."""

    def twice(tokens, ids):
        in_flight = jax_ep.dispatch_async(group, tokens, ids)
        overlapped = in_flight.overlap(jnp.tanh, tokens)
        one, two = (jax_ep.dispatch_wait(group, in_flight) for _ in range(2))
        in_flight = jax_ep.combine_async(group, one.tokens + jnp.sin(two.tokens), one)
        more = in_flight.overlap(jnp.cos, overlapped)
        one, two = (jax_ep.combine_wait(group, in_flight) for _ in range(2))
        return one + jnp.sin(two) + more

    assert n_calls_in_backward(mesh, twice) == 2


@pytest.mark.parametrize("transform", ["scan", "jit", "cond"])
def test_a_wait_in_an_inner_function_has_a_synchronous_backward(mesh, group, transform) -> None:
    """Gradients leave that function, or add up in it."""

    def function(tokens, ids):
        rows = jax_ep.dispatch(group, tokens, ids)
        in_flight = jax_ep.combine_async(group, rows.tokens, rows)
        overlapped = in_flight.overlap(jnp.tanh, tokens)

        def inner(x):
            return jnp.sin(x) * jax_ep.combine_wait(group, in_flight)

        if transform == "scan":
            return jax.lax.scan(lambda x, _: (inner(x), None), overlapped, length=2)[0]
        if transform == "cond":
            return jax.lax.cond(ids[0, 0] > 0, inner, jnp.sin, overlapped)
        return jax.jit(inner)(overlapped)

    assert n_calls_in_backward(mesh, function) == 0


@pytest.mark.parametrize("form", ["then", "overlap"])
def test_a_call_that_depends_on_no_iteration_is_done_before_the_loop(mesh, group, form) -> None:
    """The gradient of a loop computes it there, and the work in the loop."""

    def loop(tokens, ids):
        def step(x, _):
            in_flight = jax_ep.dispatch_async(group, tokens, ids)
            if form == "overlap":
                x = in_flight.overlap(jnp.tanh, x)
            else:
                x = jnp.tanh(in_flight.then(x))
            rows = jax_ep.dispatch_wait(group, in_flight, after=x)
            return x + jax_ep.combine(group, rows.tokens, rows), None

        return jax.lax.scan(step, tokens, length=2)[0]

    assert n_calls_in_backward(mesh, loop) == (form == "overlap")


def test_so_is_a_gradient_in_the_loop(mesh, group) -> None:
    def loop(y, ids):
        tokens = jnp.ones_like(y)

        def step(y, _):
            def loss(x):
                in_flight = jax_ep.dispatch_async(group, x, ids)
                overlapped = in_flight.overlap(lambda x: x * y, x)
                rows = jax_ep.dispatch_wait(group, in_flight)
                return jnp.sum(jnp.sin(rows.tokens)) + jnp.sum(overlapped)

            return y * jax.grad(loss)(tokens), None

        return jax.lax.scan(step, y, length=2)[0]

    assert n_calls_in_backward(mesh, loop) == 1
