"""redispatch: another array along the routing of an earlier dispatch."""

import jax

from jax_ep.group import EPGroup, check_group
from jax_ep.operands.calls import check_values
from jax_ep.operands.checks import as_arrays
from jax_ep.operands.limbs import from_limbs, is_integer
from jax_ep.operands.rows import in_use, keep
from jax_ep.results import Dispatched, check_dispatched
from jax_ep.transports import gradients


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
            tokens; or fewer elements that take a multiple of 16 bytes. They are not quantized. Or
            `[..., W]`, int32 or uint32, of any W up to `hidden_size * itemsize / 8`, itemsize being
            that of `combine_dtype`.
        dispatched: the result of dispatch.

    Returns:
        `[C, H]` in `config.combine_dtype`, or `[C, W]` integers: zeros in padding rows; rows that
        are not in use are unspecified, unless `config.zero_unused_rows`.

    Raises:
        TypeError: `group` is not a group, or `dispatched` not the result of dispatch. While
            tracing.
        ValueError: a shape or dtype does not fit the dispatch, or the call is not inside a
            `jax.shard_map` over the whole mesh of the group. While tracing.
        jax.errors.JaxRuntimeError: a rank failed or did not call within `config.timeout_s`. When
            the result is used.
    """
    call = check_group("redispatch", group)
    check_dispatched(call, dispatched, group)
    (values,) = as_arrays(call, values=values)
    sent, routing = check_values(call, group.geometry, values, dispatched.routing)
    rows = gradients.redispatch(group._connection, sent, routing)
    if group.config.zero_unused_rows:
        rows = keep(rows, in_use(routing.row_offsets, rows.shape[0]))
    return from_limbs(rows, values.shape[-1], values.dtype) if is_integer(values) else rows
