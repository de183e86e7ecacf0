"""The activation of hidden rows whose values another call has given, which costs nothing.

Its derivative is that of the activation. Where `jax.checkpoint` keeps the hidden rows but not the
values, it is the activation: the call that gave both need not run again.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax.ad_checkpoint import Saveable
from jax.interpreters import mlir
from jax.interpreters import partial_eval as pe

from jax_ep.ffi.lowering import make_primitive
from jax_ep.layer.activation import Activation, fused_silu_p
from jax_ep.layer.silu_gradient import differentiate_as_activation


def known_values(
    activation: Activation, hidden: jax.Array, values: jax.Array, row_offsets: jax.Array
) -> jax.Array:
    """`values`, `[C, F]`, which must be the activation of `hidden`, `[C, 2 F]`."""
    return known_values_p.bind(hidden, values, row_offsets, activation=activation)[0]


known_values_p = make_primitive("jax_ep_known_values")
mlir.register_lowering(known_values_p, lambda _, hidden, values, *rest, activation: [values])


@known_values_p.def_abstract_eval
def _result_types(hidden: Any, values: Any, row_offsets: Any, *, activation: Activation) -> Any:
    return [values]


differentiate_as_activation(known_values_p)


def _partial_eval(
    saveable: Any, unknown: Sequence[bool], recomputed: Sequence[bool], eqn: Any
) -> Any:
    """What `jax.checkpoint` keeps and computes again: as of any primitive, but for one case.

    Returns the equations of the forward and of the backward; whether the result is unknown in the
    former, and recomputed in the latter; and the variables that are kept.
    """
    hidden, _, row_offsets = eqn.invars
    is_unknown, again = any(unknown), eqn
    if not is_unknown:
        if _is_kept(saveable(eqn.primitive, *(x.aval for x in eqn.invars), **eqn.params)):
            return eqn, None, [False], [False], []
        if recomputed[1] and not recomputed[0]:
            again = eqn.replace(primitive=fused_silu_p, invars=[hidden, row_offsets])
    of_operands = dict(zip(eqn.invars, recomputed, strict=True))
    kept = [x for x in again.invars if not of_operands[x]]
    return None if is_unknown else eqn, again, [is_unknown], [True], kept


def _is_kept(answer: Any) -> bool:
    """Whether a policy's answer is to keep a result, rather than to recompute it."""
    return answer is True or isinstance(answer, type(Saveable))


pe.partial_eval_jaxpr_custom_rules[known_values_p] = _partial_eval
