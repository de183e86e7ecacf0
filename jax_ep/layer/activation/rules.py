"""The differentiation rules of `fused_silu`."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
from jax.ad_checkpoint import Saveable
from jax.extend.core import Primitive
from jax.interpreters import ad, mlir
from jax.interpreters import partial_eval as pe

from jax_ep.ffi.lowering import make_primitive
from jax_ep.layer.activation.calls import (
    Activation,
    fused_silu_grad_p,
    fused_silu_p,
    gradient_by_jnp,
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def activate_rows(activation: Activation, x: jax.Array, row_offsets: jax.Array) -> jax.Array:
    """The activation in a format that does not quantize."""
    return fused_silu_p.bind(x, row_offsets, activation=activation)[0]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def pull_back(
    activation: Activation, x: jax.Array, row_offsets: jax.Array, cotangent: jax.Array
) -> jax.Array:
    """The gradient of `x`, `[C, 2 F]`; zero in rows that are not in use, which may hold NaN."""
    return fused_silu_grad_p.bind(x, row_offsets, cotangent, activation=activation)[0]


def _pull_back_fwd(
    activation: Activation, x: jax.Array, row_offsets: jax.Array, cotangent: jax.Array
) -> tuple[jax.Array, Any]:
    def by_jnp(x: jax.Array, cotangent: jax.Array) -> jax.Array:
        return gradient_by_jnp(x, row_offsets, cotangent, activation=activation)[0]

    gradient = pull_back(activation, x, row_offsets, cotangent)
    return gradient, jax.vjp(by_jnp, x, cotangent)[1]


def _pull_back_bwd(activation: Activation, pull: Any, of_gradient: jax.Array) -> Any:
    of_x, of_cotangent = pull(of_gradient)
    return of_x, None, of_cotangent


pull_back.defvjp(_pull_back_fwd, _pull_back_bwd)
activate_rows.defvjp(
    lambda activation, *args: (activate_rows(activation, *args), args),
    lambda activation, saved, cotangent: (pull_back(activation, *saved, cotangent), None),
)


def differentiate_as_activation(primitive: Primitive) -> None:
    """For a primitive whose operands are hidden rows first and `row_offsets` last, with one result.

    The activation of the former, which passes the gradient to them alone.
    """

    def jvp(primals: Any, tangents: Any, *, activation: Activation) -> Any:
        hidden, *_, row_offsets = primals
        of_hidden = tangents[0]
        results = primitive.bind(*primals, activation=activation)
        if type(of_hidden) is ad.Zero:
            return results, [ad.Zero(jax.typeof(x).to_tangent_aval()) for x in results]

        def activate(hidden: jax.Array) -> jax.Array:
            return activate_rows(activation, hidden, row_offsets)

        return results, [jax.jvp(activate, (hidden,), (of_hidden,))[1]]

    ad.primitive_jvps[primitive] = jvp


differentiate_as_activation(fused_silu_p)  # bare where a checkpoint recomputes known values


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def quantize_activated(activation: Activation, *operands: jax.Array) -> list[jax.Array]:
    """The activation in a format that quantizes; it has no derivative."""
    return fused_silu_p.bind(*operands, activation=activation)


@quantize_activated.defjvp
def _no_derivative(activation: Activation, *_: Any) -> Any:
    raise NotImplementedError(
        f"fused_silu: {activation.token_format.name} quantizes, so it has no derivative. Use "
        "BF16(), or pass jax.lax.stop_gradient(x)."
    )


def known_values(
    activation: Activation, hidden: jax.Array, values: jax.Array, row_offsets: jax.Array
) -> jax.Array:
    """`values`, `[C, F]`, which another call has given: the activation of `hidden`, `[C, 2 F]`.

    This costs nothing. Its derivative is that of the activation. Where `jax.checkpoint` keeps the
    hidden rows but not the values, it is the activation, so that the call need not run again.
    """
    return known_values_p.bind(hidden, values, row_offsets, activation=activation)[0]


known_values_p = make_primitive("jax_ep_known_values")
mlir.register_lowering(known_values_p, lambda _, hidden, values, *rest, activation: [values])


@known_values_p.def_abstract_eval
def _known_types(hidden: Any, values: Any, row_offsets: Any, *, activation: Activation) -> Any:
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
