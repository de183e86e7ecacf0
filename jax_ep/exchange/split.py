"""A computation in two parts: what some of its results need, and the rest, for later."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
from jax.extend.core import ClosedJaxpr, Var, jaxpr_as_fun


class Rest(NamedTuple):
    """What is left to compute: `run(*operands)`, a pytree."""

    run: Callable[..., Any]
    operands: list[jax.Array]


def split(function: Callable[..., tuple[Any, Any]], *args: Any) -> tuple[Any, Rest]:
    """The first of two results of `function(*args)`, and the rest, which makes the second.

    Computes here what the first result needs, each operation as a whole, and nothing twice.
    """
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
    first, second = map(jax.tree.structure, shapes)
    jaxpr, n = closed.jaxpr, len(jax.tree.leaves(shapes[0]))
    outputs, later_outputs = jaxpr.outvars[:n], jaxpr.outvars[n:]
    now, later = _partition(jaxpr.eqns, outputs)
    made_later = {x for eqn in later for x in eqn.outvars}
    read_later = _variables([x for eqn in later for x in eqn.invars] + later_outputs)
    passed = [x for x in dict.fromkeys(read_later) if x not in made_later]

    info = jaxpr.debug_info._replace(arg_names=None, result_paths=None)
    head = jaxpr.replace(eqns=now, outvars=[*outputs, *passed], debug_info=info)
    tail = jaxpr.replace(
        constvars=[], invars=passed, eqns=later, outvars=later_outputs, debug_info=info
    )
    results = jaxpr_as_fun(ClosedJaxpr(head, closed.consts))(*jax.tree.leaves(args))

    def run(*operands: jax.Array) -> Any:
        return jax.tree.unflatten(second, jaxpr_as_fun(ClosedJaxpr(tail, []))(*operands))

    return jax.tree.unflatten(first, results[:n]), Rest(run, results[n:])


def _partition(eqns: Any, outputs: Any) -> tuple[list[Any], list[Any]]:
    """The operations that `outputs` need, and the others."""
    now: list[Any] = []
    later: list[Any] = []
    needed = set(_variables(outputs))
    for eqn in reversed(eqns):
        is_needed = not needed.isdisjoint(eqn.outvars)
        (now if is_needed else later).append(eqn)
        if is_needed:
            needed.update(_variables(eqn.invars))
    return now[::-1], later[::-1]


def _variables(atoms: Iterable[Any]) -> list[Var]:
    """Those that are no literals."""
    return [x for x in atoms if isinstance(x, Var)]
