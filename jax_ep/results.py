"""What dispatch gives, and a call that has begun."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
    from jax_ep.group import EPGroup


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Dispatched:
    """Rows for this rank's experts, and what combine needs to bring results back.

    A pytree; `group` is static. Rows are ordered by local expert, then source rank,
    then token index, then k: a function of `topk_ids` alone. Rows from
    `row_offsets[-1]` on are unspecified. se is 1 with a fused shared expert, else 0:
    then its rows, this rank's own tokens in order, are the first group.

    A format may pad groups of rows (`BlockwiseFP8` does, to multiples of 4): padding
    rows stand at the end of their group, count as in use, and hold zeros.

    Attributes:
        tokens: `[C, H]`, received rows in the token format's `row_dtype`; `[C, H / 2]`
            where the format packs elements.
        row_offsets: `uint32[L + se + 1]`, first row of each group; the last entry is
            the number of rows in use, padding included.
        expert_ids: `int32[L + se]`, numbers of the groups: 0 ... L + se - 1. Group i is
            local expert i - se.
        src_info: `int32[C, 2]`, (token index on its source rank, k) of each row;
            (token index, -1) for the shared expert's, (-1, -1) for padding rows.
        n_dropped: `int32[]`, rows of tokens beyond `max_recv_tokens`.
        n_invalid: `int32[]`, ids of this rank's `topk_ids` outside `[-1, E)`; they sent
            nothing.
        topk_ids: `int32[T, K]`, as given to dispatch.
        layout: the transport's own, for combine.
        row_weights: `float32[C]`, the `topk_weights` that travelled with the tokens, or
            None; 1 for the shared expert's rows, whatever combine does.
        scales: dequantisation scales, in the token format's layout (docs/formats.md);
            None for unquantised formats.
        scales_offsets: `uint32[L + se]`, where scales stand in 128 x 4 atoms: the
            scales of group i begin at block `row_offsets[i] // 128 +
            scales_offsets[i]`. Else None.
        source_tokens: `[T, H]`, the tokens given to dispatch, to which the gradient of
            `dequantize` flows; None for unquantised formats.
        input_scale: `float32[]`, as given to dispatch, or None.
        group: the group that dispatched.
    """

    tokens: jax.Array
    row_offsets: jax.Array
    expert_ids: jax.Array
    src_info: jax.Array
    n_dropped: jax.Array
    n_invalid: jax.Array
    topk_ids: jax.Array
    layout: Any
    row_weights: jax.Array | None
    scales: jax.Array | None
    scales_offsets: jax.Array | None
    source_tokens: jax.Array | None
    input_scale: jax.Array | None
    group: EPGroup = dataclasses.field(metadata={"static": True})

    @property
    def group_sizes(self) -> jax.Array:
        """`int32[L + se]` rows of each group, as `jax.lax.ragged_dot` takes them.

        Padding included.
        """
        return jnp.diff(self.row_offsets.astype(jnp.int32))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class InFlight:
    """A dispatch or combine that has begun; give it to the matching wait, once.

    Attributes:
        arrays: the transport's own.
        operation: `"dispatch"` or `"combine"`; static.
        n_tokens: T of the call; static.
        group: the group of the call; static.
    """

    arrays: Any
    operation: str = dataclasses.field(metadata={"static": True})
    n_tokens: int = dataclasses.field(metadata={"static": True})
    group: EPGroup = dataclasses.field(metadata={"static": True})

    def then(self, x: Any) -> Any:
        """`x`, a pytree of arrays, for work that shall run beside the call.

        What is computed from these begins once the call has its multiprocessors. The
        values, and their gradients, are those of `x`.
        """
        begun = self.arrays[0] if self.operation == "dispatch" else self.arrays
        return self.group._transport.then(begun, x)
