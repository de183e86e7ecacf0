"""split computes now what the first result needs, and the rest later."""

import jax
import jax.numpy as jnp
import numpy as np

from jax_ep.exchange.split import split


def primitives_of(function, *args) -> list[str]:
    return [eqn.primitive.name for eqn in jax.make_jaxpr(function)(*args).eqns]


def test_each_operation_runs_once_as_early_as_it_is_needed() -> None:
    def function(x, y):
        shared = jnp.sin(x)
        return {"first": jnp.cos(shared)}, (jnp.tanh(shared) * y, [jnp.exp(y)])

    x, y = jnp.float32(0.5), jnp.float32(2.0)
    first, rest = split(function, x, y)
    wanted = function(x, y)
    np.testing.assert_array_equal(first["first"], wanted[0]["first"])
    second = rest.run(*rest.operands)
    assert jax.tree.structure(second) == jax.tree.structure(wanted[1])
    jax.tree.map(np.testing.assert_array_equal, second, wanted[1])

    def both(x, y):
        first, rest = split(function, x, y)
        first = jnp.expm1(first["first"])  # in between
        return first, rest.run(*rest.operands)

    assert primitives_of(both, x, y) == ["sin", "cos", "expm1", "tanh", "mul", "exp"]


def test_operands_are_all_that_the_rest_reads() -> None:
    """Arguments, what the first result needed, and results that are there already."""
    x, y = jnp.arange(3.0), jnp.ones(3)

    def function(x, y):
        shared = x + 1
        return shared * 2, (shared, y, x * y, 3.0, None)

    first, rest = split(function, x, y)
    assert [operand.tolist() for operand in rest.operands] == [
        x.tolist(),
        y.tolist(),
        (x + 1).tolist(),
    ]
    shared, same, product, constant, nothing = rest.run(*(10 * each for each in rest.operands))
    np.testing.assert_array_equal(first, (x + 1) * 2)
    np.testing.assert_array_equal(shared, (x + 1) * 10)
    np.testing.assert_array_equal(same, y * 10)
    np.testing.assert_array_equal(product, 100 * x * y)
    assert constant == 3.0 and nothing is None


def test_the_rest_may_close_over_arrays_and_be_empty() -> None:
    table = np.arange(4.0, dtype=np.float32)
    first, rest = split(lambda x: (x * 2, x + table), jnp.float32(1))
    np.testing.assert_array_equal(rest.run(*rest.operands), 1 + table)
    first, rest = split(lambda x: (x * 2, ()), jnp.float32(1))
    assert first == 2 and rest.run(*rest.operands) == () and rest.operands == []
