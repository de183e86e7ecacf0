"""dispatch and combine: the public calls, inside `jax.shard_map` over the group's axis.

Arrays are this rank's shard. R ranks, E experts, L = E / R local experts, K = top_k,
T <= M tokens in this call, H = hidden_size, C = max_recv_tokens.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_ep import _checks, choices
from jax_ep.formats import QuantizedFormat
from jax_ep.group import EPGroup
from jax_ep.results import Dispatched, InFlight


def dispatch(
    group: EPGroup,
    tokens: jax.Array,
    topk_ids: jax.Array,
    topk_weights: jax.Array | None = None,
    *,
    input_scale: jax.Array | None = None,
) -> Dispatched:
    """Sends every token to the ranks that hold its experts.

    Rows arrive ordered by local expert, then source rank, then token, then k; with a
    fused shared expert, this rank's own tokens come first. An id of -1 names no expert;
    one outside `[-1, E)` sends nothing and is counted. A token may name an expert
    twice, and has two rows there then. Differentiable in `tokens` and `topk_weights`;
    the backward is a combine.

    Args:
        group: from `ep_init`.
        tokens: `[T, H]`, T at most M: bfloat16 or float32 for formats that quantise,
            else the format's dtype.
        topk_ids: `int32[T, K]`, global experts.
        topk_weights: `float32[T, K]` or None. Given, they travel with the tokens, come
            out as `row_weights`, and combine applies them where the experts are.
        input_scale: `float32[]` or `float32[1]`, the same on all ranks, for formats
            that quantise with a global scale (`NVFP4`; None is 1 there); None for the
            others. No gradient flows into it.

    Returns:
        The rows for this rank's experts.

    Raises:
        TypeError: `group` is no group. While tracing.
        ValueError: a shape or dtype does not fit the group, or the call stands outside
            a `jax.shard_map` over the whole mesh of the group. While tracing.
        jax.errors.JaxRuntimeError: a rank failed or did not come within
            `config.timeout_s`. When the result is used.
    """
    given, operands = _dispatch_operands(
        "dispatch", group, tokens, topk_ids, topk_weights, input_scale
    )
    dispatched = group._transport.dispatch(group, *operands)
    return _complete(group, dispatched, given, operands[0], operands[3])


def dispatch_async(
    group: EPGroup,
    tokens: jax.Array,
    topk_ids: jax.Array,
    topk_weights: jax.Array | None = None,
    *,
    input_scale: jax.Array | None = None,
) -> InFlight:
    """Begins `dispatch`: what follows may overlap with it (docs/overlap.md).

    Takes and raises what `dispatch` does. On `p2p` the call runs on XLA's stream for
    collectives, on `config.n_sms` multiprocessors. On the transports `xla` and `host`
    the call is complete here: XLA:CPU runs it beside whatever does not need it.

    Returns:
        What `dispatch_wait` takes.
    """
    given, operands = _dispatch_operands(
        "dispatch_async", group, tokens, topk_ids, topk_weights, input_scale
    )
    begun = group._transport.dispatch_async(group, *operands)
    arrays = begun, given, operands[0], operands[3]
    return InFlight(arrays, "dispatch", jnp.shape(tokens)[0], group)


def dispatch_wait(
    group: EPGroup, in_flight: InFlight, *, after: Any = None
) -> Dispatched:
    """Ends what `dispatch_async` has begun.

    Args:
        group: the group of `dispatch_async`.
        in_flight: what `dispatch_async` gave, in the same function.
        after: a pytree of arrays that XLA shall compute before it waits: what is to
            overlap with the call. No gradient flows into it.

    Returns:
        What `dispatch` would have given.

    Raises:
        TypeError: `in_flight` is not from `dispatch_async`. While tracing.
        ValueError: it is from another group; or, on `p2p`, from another function, and
            no argument of this one. While tracing.
    """
    _checks.check_place("dispatch_wait", group)
    _checks.check_in_flight("dispatch", group, in_flight)
    begun, topk_ids, tokens, input_scale = in_flight.arrays
    dispatched = group._transport.dispatch_wait(group, begun, after)
    return _complete(group, dispatched, topk_ids, tokens, input_scale)


def combine(
    group: EPGroup,
    expert_out: jax.Array,
    dispatched: Dispatched,
    topk_weights: jax.Array | None = None,
    *,
    residual: jax.Array | None = None,
    reduce: bool = True,
) -> jax.Array:
    """Brings the experts' rows back to their tokens, and adds them up.

    Sums are in float32, from +0, each product and each sum rounded, with one cast at
    the end. Weighted at the source (`topk_weights` here) or not at all: over k in
    order. With `row_weights` (`topk_weights` given to dispatch): each rank adds its
    rows of a token in k order and sends the sum in `combine_dtype`; the source adds
    those in rank order. A choice without a row adds nothing. A fused shared expert's
    row is added, unweighted, to what that gives, in float32, with a cast of its own.
    Differentiable in `expert_out`, `topk_weights`, `row_weights` and `residual`; the
    backward is a dispatch, and gives zero for rows that are not in use.

    Args:
        group: the group of the dispatch.
        expert_out: `[C, H]` in `config.combine_dtype`; row i belongs to row i of
            `dispatched.tokens`. Rows that are not in use do not matter.
        dispatched: what dispatch gave.
        topk_weights: `float32[T, K]` or None.
        residual: `[T, H]` in `config.combine_dtype` or None; added in float32 before
            the (first) cast.
        reduce: False gives each choice's row, without weights: zero where it has none.
            A shared expert's rows are no choice's, and are not in it.

    Returns:
        `[T, H]`, or `[T, K, H]` if not `reduce`, in `config.combine_dtype`.

    Raises:
        TypeError: `group` is no group, or `dispatched` not what dispatch gave. While
            tracing.
        ValueError: as for `dispatch`; or weights at both ends; or weights or a residual
            without `reduce`. While tracing.
        jax.errors.JaxRuntimeError: as for `dispatch`.
    """
    operands = _combine_operands(
        "combine", group, expert_out, dispatched, topk_weights, residual, reduce
    )
    out = group._transport.combine(
        group, *operands, reduce=reduce, adds_shared=_adds_shared(group, reduce)
    )
    return _without_padding(group, out, dispatched.topk_ids.shape[0])


def combine_async(
    group: EPGroup,
    expert_out: jax.Array,
    dispatched: Dispatched,
    topk_weights: jax.Array | None = None,
    *,
    residual: jax.Array | None = None,
    reduce: bool = True,
) -> InFlight:
    """Begins `combine`: what follows may overlap with it, as with `dispatch_async`.

    Takes and raises what `combine` does.

    Returns:
        What `combine_wait` takes.
    """
    operands = _combine_operands(
        "combine_async", group, expert_out, dispatched, topk_weights, residual, reduce
    )
    begun = group._transport.combine_async(
        group, *operands, reduce=reduce, adds_shared=_adds_shared(group, reduce)
    )
    return InFlight(begun, "combine", dispatched.topk_ids.shape[0], group)


def combine_wait(
    group: EPGroup, in_flight: InFlight, *, after: Any = None
) -> jax.Array:
    """Ends what `combine_async` has begun.

    Args:
        group: the group of `combine_async`.
        in_flight: what `combine_async` gave.
        after: as for `dispatch_wait`.

    Returns:
        What `combine` would have given.

    Raises:
        TypeError: `in_flight` is not from `combine_async`. While tracing.
        ValueError: it is from another group. While tracing.
    """
    _checks.check_place("combine_wait", group)
    _checks.check_in_flight("combine", group, in_flight)
    out = group._transport.combine_wait(group, in_flight.arrays, after)
    return _without_padding(group, out, in_flight.n_tokens)


def _dispatch_operands(
    operation: str,
    group: EPGroup,
    tokens: Any,
    topk_ids: Any,
    topk_weights: Any,
    input_scale: Any,
) -> tuple[jax.Array, list[Any]]:
    """Checked: `topk_ids` as given; what the transport takes."""
    _checks.check_place(operation, group)
    config = group.config
    tokens, topk_ids, topk_weights = _as_arrays(tokens, topk_ids, topk_weights)
    _checks.check_array(
        operation,
        "tokens",
        tokens,
        (None, config.hidden_size),
        "T H",
        *config.token_format.token_dtypes,
    )
    n_tokens = tokens.shape[0]
    if n_tokens > config.max_tokens_per_rank:
        raise ValueError(
            f"{operation}: tokens must have at most max_tokens_per_rank="
            f"{config.max_tokens_per_rank} rows; got {n_tokens}."
        )
    shape = (n_tokens, config.top_k)
    _checks.check_array(operation, "topk_ids", topk_ids, shape, "T K", jnp.int32)
    if topk_weights is not None:
        _checks.check_array(
            operation, "topk_weights", topk_weights, shape, "T K", jnp.float32
        )
    input_scale = _checks.check_input_scale(operation, config.token_format, input_scale)
    topk_ids, *operands = _checks.vary_alike(
        group.axis_name,
        topk_ids,
        _never_empty(tokens, 0),
        _never_empty(choices.route_ids(group, topk_ids), choices.NO_EXPERT),
        _never_empty(choices.route_weights(group, topk_weights), 0),
        input_scale,
    )
    return topk_ids, operands


def _complete(
    group: EPGroup,
    dispatched: Dispatched,
    topk_ids: jax.Array,
    tokens: jax.Array,
    input_scale: jax.Array | None,
) -> Dispatched:
    """With the ids as given; where rows are quantised, with what they were made of."""
    dispatched = dataclasses.replace(dispatched, topk_ids=topk_ids)
    if not isinstance(group.config.token_format, QuantizedFormat):
        return dispatched
    tokens = tokens[: topk_ids.shape[0]]
    return dataclasses.replace(
        dispatched, source_tokens=tokens, input_scale=input_scale
    )


def _combine_operands(
    operation: str,
    group: EPGroup,
    expert_out: Any,
    dispatched: Any,
    topk_weights: Any,
    residual: Any,
    reduce: bool,
) -> tuple[Any, ...]:
    """Checked: `expert_out`, `dispatched`, `topk_weights`, `residual`."""
    _checks.check_place(operation, group)
    _checks.check_dispatched(operation, group, dispatched)
    _check_weights(operation, dispatched, topk_weights, residual, reduce)
    config, n_tokens = group.config, dispatched.topk_ids.shape[0]
    expert_out, topk_weights, residual = _as_arrays(expert_out, topk_weights, residual)
    rows = (group.max_recv_tokens, config.hidden_size)
    _checks.check_array(
        operation, "expert_out", expert_out, rows, "C H", config.combine_dtype
    )
    if topk_weights is not None:
        shape = (n_tokens, config.top_k)
        _checks.check_array(
            operation, "topk_weights", topk_weights, shape, "T K", jnp.float32
        )
    if residual is not None:
        tokens = (n_tokens, config.hidden_size)
        _checks.check_array(
            operation, "residual", residual, tokens, "T H", config.combine_dtype
        )
    topk_weights = choices.route_weights(group, topk_weights)
    leaves, treedef = jax.tree.flatten(_routed(group, dispatched))
    expert_out, topk_weights, residual, *leaves = _checks.vary_alike(
        group.axis_name,
        expert_out,
        _never_empty(topk_weights, 0),
        _never_empty(residual, 0),
        *leaves,
    )
    dispatched = jax.tree.unflatten(treedef, leaves)
    return expert_out, dispatched, topk_weights, residual


def pull_back(group: EPGroup, rows: jax.Array, dispatched: Dispatched) -> jax.Array:
    """`[T, H]`: the plain sum of each token's rows, in the rows' dtype.

    In k order, a fused shared expert's row last.
    """
    n_tokens = dispatched.topk_ids.shape[0]
    dispatched = dataclasses.replace(_routed(group, dispatched), row_weights=None)
    out = [
        group._transport.combine(
            group, piece, dispatched, None, None, reduce=True, adds_shared=False
        )
        for piece in jnp.split(rows, group._transport.n_pieces(group, rows), axis=1)
    ]
    return jnp.concatenate(out, axis=1)[:n_tokens]


def _routed(group: EPGroup, dispatched: Dispatched) -> Dispatched:
    """With the ids that the transport knows."""
    topk_ids = choices.route_ids(group, dispatched.topk_ids)
    topk_ids = _never_empty(topk_ids, choices.NO_EXPERT)
    (topk_ids,) = _checks.vary_alike(group.axis_name, topk_ids)
    return dataclasses.replace(dispatched, topk_ids=topk_ids)


def _adds_shared(group: EPGroup, reduce: bool) -> bool:
    return group.config.fused_shared_expert and reduce


def _without_padding(group: EPGroup, out: jax.Array, n_tokens: int) -> jax.Array:
    """The T tokens; of each, if they are not summed up, the K choices."""
    return out[:n_tokens, : group.config.top_k] if out.ndim == 3 else out[:n_tokens]


def _check_weights(
    operation: str,
    dispatched: Dispatched,
    topk_weights: Any,
    residual: Any,
    reduce: bool,
) -> None:
    if topk_weights is not None and dispatched.row_weights is not None:
        raise ValueError(
            f"{operation}: topk_weights must be given to dispatch or to combine, not "
            "to both."
        )
    if not isinstance(reduce, bool):
        raise ValueError(f"{operation}: reduce must be True or False; got {reduce!r}.")
    if reduce:
        return
    given = dict(
        topk_weights=topk_weights is not None,
        residual=residual is not None,
        row_weights=dispatched.row_weights is not None,
    )
    for name, is_given in given.items():
        if is_given:
            raise ValueError(
                f"{operation}: reduce=False gives rows as they are, so {name} must not "
                "be given."
            )


def _never_empty(x: Any, fill: int) -> Any:
    """`x`, or one token where it has none, to go nowhere.

    XLA refuses gathers from nothing, and crashes on custom calls with empty operands.
    """
    if x is None or x.shape[0] > 0:
        return x
    return jnp.full((1, *x.shape[1:]), fill, x.dtype)


def _as_arrays(*arrays: Any) -> list[Any]:
    """As JAX arrays; 64-bit NumPy arrays as they are, for the checks to refuse."""
    return [x if x is None or _is_64_bit(x) else jnp.asarray(x) for x in arrays]


def _is_64_bit(x: Any) -> bool:
    return isinstance(x, np.ndarray | np.generic) and x.dtype.itemsize == 8
