"""dispatch, combine and redispatch: the public calls, inside `jax.shard_map` over the group's mesh.

Arrays are this rank's shard. R ranks, E experts, L = E / R local experts, K = top_k, T <= M tokens
in this call, H = hidden_size, C = max_recv_tokens, or the call's own `recv_capacity`. `[..., H]` is
`[T, H]`, or has more leading dimensions, such as `[B, S, H]` with B * S = T, the same for all
arguments of a dispatch and its combine.
"""

from typing import Any

import jax

from jax_ep.exchange.checks import as_arrays
from jax_ep.exchange.numbers import from_limbs, from_sum_dtype, is_integer
from jax_ep.exchange.operands import DispatchOperands, check_values
from jax_ep.exchange.rows import in_use, keep
from jax_ep.formats import Quantized
from jax_ep.group import EPGroup, calls_of, check_group
from jax_ep.results import Dispatched, InFlight, check_dispatched, check_in_flight


def dispatch(
    group: EPGroup,
    tokens: jax.Array | Quantized,
    topk_ids: jax.Array,
    topk_weights: jax.Array | None = None,
    *,
    input_scale: jax.Array | None = None,
    recv_capacity: int | None = None,
) -> Dispatched:
    """Sends every token to the ranks that hold its experts.

    Rows arrive ordered by local expert, then source rank, then token, then k; with a fused shared
    expert, this rank's own tokens come first, and with `config.expert_copies`, the rows of other
    ranks' experts last: the plan of who takes which follows from the ids of all ranks. An id of -1
    names no expert; ids outside `[-1, E)` send nothing and are counted. A token may name an expert
    twice; then it has two rows there.
    Differentiable in `tokens` and `topk_weights`; the backward is a combine.

    Args:
        group: from `ep_init`.
        tokens: `[..., H]`, at most M tokens (T): bfloat16 or float32 for formats that quantize,
            otherwise the format's dtype. Tokens may have fewer elements than `hidden_size` if a
            token, and the row that it becomes, take a multiple of 16 bytes each; H then stands for
            their number. Or, in a format that quantizes, `Quantized` tokens: codes `[..., H]`, in
            packed formats `[..., H / 2]`, and scales `[..., S]` row by row, as
            `token_format.quantize` returns them. These travel as they are, and have no gradient.
        topk_ids: `[..., K]`, global experts: integers of any dtype. Unsigned integers cannot be -1;
            their largest value is an invalid id.
        topk_weights: `[..., K]` of any floating-point dtype, or None. If given, they travel with
            the tokens as float32 and come out as `row_weights`, and combine applies them.
        input_scale: `float32[]` or `float32[1]`, the same on all ranks, for formats with a global
            scale (`NVFP4`; None is 1 there); None for the others. No gradient flows into it.
        recv_capacity: rows of the output (C) of this call, the same on all ranks; its meaning is
            that of `config.recv_capacity`. None, and any larger number, is the group's
            `max_recv_tokens`.

    Returns:
        The rows for this rank's experts.

    Raises:
        TypeError: `group` is not a group. While tracing.
        ValueError: a shape or dtype does not fit the group, or the call is not inside a
            `jax.shard_map` over the whole mesh of the group. While tracing.
        NotImplementedError: a gradient reaches codes or scales of the result, in a format that
            quantizes. While tracing.
        jax.errors.JaxRuntimeError: a rank failed or did not call within `config.timeout_s`. When
            the result is used.
    """
    call, calls = check_group("dispatch", group), calls_of(group)
    given = tokens, topk_ids, topk_weights, input_scale, recv_capacity
    operands, choices = DispatchOperands.make(call, group.geometry, *given, calls.balance_choices)
    return Dispatched.make(group, choices, operands, calls.dispatch(operands))


def dispatch_async(
    group: EPGroup,
    tokens: jax.Array | Quantized,
    topk_ids: jax.Array,
    topk_weights: jax.Array | None = None,
    *,
    input_scale: jax.Array | None = None,
    recv_capacity: int | None = None,
) -> InFlight:
    """Starts `dispatch`; later work may overlap with it (docs/overlap.md).

    Arguments and errors are those of `dispatch`. On `p2p` the call runs on XLA's stream for
    collectives, on `config.n_sms` multiprocessors. On `xla` and `host` this is the whole call;
    XLA:CPU runs it concurrently with independent work.

    Returns:
        The argument of `dispatch_wait`.
    """
    call, calls = check_group("dispatch_async", group), calls_of(group)
    given = tokens, topk_ids, topk_weights, input_scale, recv_capacity
    operands, choices = DispatchOperands.make(call, group.geometry, *given, calls.balance_choices)
    return InFlight(calls.start(operands), operands, choices, group)


def dispatch_wait(group: EPGroup, in_flight: InFlight, *, after: Any = None) -> Dispatched:
    """Waits for a dispatch that `dispatch_async` started.

    Args:
        group: the group of `dispatch_async`.
        in_flight: the result of `dispatch_async`, in the same function.
        after: a pytree of arrays for XLA to compute before it waits: the work that overlaps with
            the call. No gradient flows into it.

    Returns:
        What `dispatch` would have returned.

    Raises:
        TypeError: `in_flight` is not from `dispatch_async`. While tracing.
        ValueError: it is from another group; or, on `p2p`, from another function and not an
            argument of this one. While tracing.
    """
    check_group("dispatch_wait", group)
    check_in_flight("dispatch", in_flight, group)
    operands = in_flight.operands
    results = calls_of(group).finish(in_flight.call, operands, after)
    return Dispatched.make(group, in_flight.choices, operands, results)


def combine(
    group: EPGroup,
    expert_out: jax.Array,
    dispatched: Dispatched,
    topk_weights: jax.Array | None = None,
    *,
    residual: jax.Array | None = None,
    reduce: bool = True,
) -> jax.Array:
    """Returns the experts' rows to their tokens and sums them.

    The sum has the same bits whether `topk_weights` were given to dispatch or are given here. Each
    rank adds its own rows of a token in k order and rounds to `config.sum_dtype`; with several
    nodes (`config.n_nodes`), each node adds its ranks' sums in rank order and rounds as well; the
    token's rank adds the sums of ranks, or of nodes, in their order, then `residual`, and casts to
    `combine_dtype`. All in float32, from +0; products and sums are rounded separately. A choice
    without a row adds nothing. A fused shared expert's row is added to the result unweighted, in
    float32, and cast once more. To add all choices in k order without roundings in between, take
    `reduce=False` and add its result in float32.

    Differentiable in `expert_out`, `topk_weights`, `row_weights` and `residual`; the backward
    sends each token's cotangent to its rows. The gradient of `expert_out` is unspecified in rows
    from `row_offsets[-1]` on, unless `config.zero_unused_rows`, and zero in padding rows.

    Args:
        group: the group of the dispatch.
        expert_out: `[C, H]` in `config.combine_dtype`; row i belongs to row i of
            `dispatched.tokens`. Unused rows are ignored. Rows may have fewer elements than
            `hidden_size`, independently of the dispatch, if they take a multiple of 16 bytes in
            `config.sum_dtype`; H then stands for their number.
        dispatched: the result of dispatch.
        topk_weights: `[..., K]` of any floating-point dtype, converted to float32; None if the
            dispatch got the weights, or for a sum without weights.
        residual: `[..., H]` in `config.combine_dtype` or None; added in float32 before the (first)
            cast.
        reduce: False returns each choice's row, unweighted, and zeros for choices without a row. A
            shared expert's rows belong to no choice and are left out.

    Returns:
        `[..., H]`, or `[..., K, H]` if not `reduce`, in `config.combine_dtype`.

    Raises:
        TypeError: `group` is not a group, or `dispatched` not the result of dispatch. While
            tracing.
        ValueError: as for `dispatch`; or weights given to both dispatch and combine; or weights or
            a residual with `reduce=False`. While tracing.
        jax.errors.JaxRuntimeError: as for `dispatch`.
    """
    call = check_group("combine", group)
    check_dispatched(call, dispatched, group)
    operands = dispatched.combine_operands(call, expert_out, topk_weights, residual, reduce)
    return operands.user_result(group.config, calls_of(group).combine(operands))


def combine_async(
    group: EPGroup,
    expert_out: jax.Array,
    dispatched: Dispatched,
    topk_weights: jax.Array | None = None,
    *,
    residual: jax.Array | None = None,
    reduce: bool = True,
) -> InFlight:
    """Starts `combine`; later work may overlap with it, as with `dispatch_async`.

    Arguments and errors are those of `combine`.

    Returns:
        The argument of `combine_wait`.
    """
    call = check_group("combine_async", group)
    check_dispatched(call, dispatched, group)
    operands = dispatched.combine_operands(call, expert_out, topk_weights, residual, reduce)
    started = calls_of(group).start(operands)
    return InFlight(started, operands, None, group)


def combine_wait(group: EPGroup, in_flight: InFlight, *, after: Any = None) -> jax.Array:
    """Waits for a combine that `combine_async` started, as `dispatch_wait` does for a dispatch.

    Returns:
        What `combine` would have returned.

    Raises:
        TypeError: `in_flight` is not from `combine_async`. While tracing.
        ValueError: it is from another group. While tracing.
    """
    check_group("combine_wait", group)
    check_in_flight("combine", in_flight, group)
    operands = in_flight.operands
    out = calls_of(group).finish(in_flight.call, operands, after)
    return operands.user_result(group.config, out)


def redispatch(group: EPGroup, values: jax.Array, dispatched: Dispatched) -> jax.Array:
    """Sends another array along the routing of an earlier dispatch.

    Row i of the result belongs to row i of `dispatched.tokens`. Neither ids nor weights travel, and
    no rows are assigned. It is the transpose of a `combine` without weights, which is its backward
    in turn. For policies of `jax.checkpoint`, the result has the name `DISPATCH_NAME`.

    32-bit integers, such as ids or positions, arrive bit by bit on every transport. They travel as
    float32 numbers of 16 bits each, because values pass through arithmetic on the way, which does
    not keep the bits of NaNs.

    Args:
        group: the group of the dispatch.
        values: `[..., H]` in `config.combine_dtype`, with the leading dimensions of the dispatch's
            tokens; or with fewer elements, which take a multiple of 16 bytes in `sum_dtype`. They
            are not quantized. Or `[..., W]`, int32 or uint32, with W at most
            `hidden_size * itemsize / 8`, where `itemsize` is that of `sum_dtype`.
        dispatched: the result of dispatch.

    Returns:
        `[C, H]` in `config.combine_dtype`, or `[C, W]` integers: zeros in padding rows; rows that
        are not in use are unspecified, unless `config.zero_unused_rows`.

    Raises:
        TypeError: as for `combine`.
        ValueError: as for `dispatch`.
        jax.errors.JaxRuntimeError: as for `dispatch`.
    """
    call = check_group("redispatch", group)
    check_dispatched(call, dispatched, group)
    (values,) = as_arrays(call, values=values)
    sent, routing = check_values(call, group.geometry, values, dispatched.routing)
    rows = calls_of(group).redispatch(sent, routing)
    if group.config.zero_unused_rows:
        rows = keep(rows, in_use(routing.row_offsets, rows.shape[0]))
    if is_integer(values):
        return from_limbs(rows, values.shape[-1], values.dtype)
    return from_sum_dtype(rows, values.dtype)
