"""The operands of dispatch and combine, checked and routed, and the results of dispatch.

Arrays are one rank's shard. With T = 0, every array that has a token axis holds one token that goes
nowhere: XLA refuses gathers from empty arrays and crashes on custom calls with empty operands.
"""

import dataclasses
import enum
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.lax import bitcast_convert_type

from jax_ep.config import EPConfig
from jax_ep.exchange import checks, numbers
from jax_ep.exchange.numbers import from_sum_dtype, round_to, to_sum_dtype
from jax_ep.exchange.payload import Payload
from jax_ep.exchange.routing import NO_GROUP, Choices, route, route_ids, route_weights, split_shared
from jax_ep.formats import TokenFormat
from jax_ep.geometry import Geometry

# Names of the results for `jax.checkpoint` policies.
DISPATCH_NAME = "jax_ep_dispatch"
COMBINE_NAME = "jax_ep_combine"


class Weighting(enum.IntEnum):
    """Where the weights of a sum are. The same values as in C++."""

    NONE = 0
    SOURCE = 1  # topk_weights, at the token's own rank
    ROW = 2  # row_weights, at the experts' rank


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DispatchOperands:
    """The operands of a dispatch."""

    # [T, H], or fewer elements; [T, W] words of tokens that the caller has quantized; or, between
    # nodes, uint32[T, W] of nodes/codes.py.
    tokens: jax.Array
    group_ids: jax.Array  # int32[T, N], see routing.py
    topk_weights: jax.Array | None  # float32[T, N]
    input_scale: jax.Array | None  # float32[]
    max_recv_tokens: int = dataclasses.field(metadata={"static": True})  # C
    # The format of the payload: the group's format, or that of the words.
    token_format: TokenFormat = dataclasses.field(metadata={"static": True})
    hidden_size: int = dataclasses.field(metadata={"static": True})  # H, of this call

    @classmethod
    def make(
        cls,
        operation: str,
        geometry: Geometry,
        tokens: Any,
        topk_ids: Any,
        topk_weights: Any,
        input_scale: Any,
        recv_capacity: Any,
        balance_choices: Callable[[jax.Array], tuple[jax.Array, jax.Array]],
    ) -> tuple[Self, Choices]:
        """Checks the user's arguments and routes by them; also returns the choices."""
        config = geometry.config
        topk_ids, topk_weights = checks.as_arrays(
            operation, topk_ids=topk_ids, topk_weights=topk_weights
        )
        checks.check_not_swapped(operation, topk_ids, topk_weights)
        payload = Payload.make(operation, config, tokens)
        leading = payload.leading
        checks.check_per_token(
            operation, "topk_ids", topk_ids, leading, config.top_k, "K", jnp.integer
        )
        topk_ids = lax.stop_gradient(checks.as_int32(topk_ids))
        if topk_weights is not None:
            topk_weights = _check_topk_weights(operation, geometry, topk_weights, leading)
        scale = checks.check_input_scale(operation, config.token_format, input_scale)
        n_rows = checks.check_capacity(operation, geometry, recv_capacity)
        (topk_ids,) = checks.vary_alike(geometry.axis_names, topk_ids)
        group_ids, copies = route(geometry, _by_token(topk_ids), balance_choices)
        tokens, group_ids, topk_weights, scale = checks.vary_alike(
            geometry.axis_names,
            _never_empty(_by_token(payload.tokens), 0),
            _never_empty(group_ids, NO_GROUP),
            _never_empty(route_weights(geometry, _by_token(topk_weights)), 0),
            scale,
        )
        static = n_rows, payload.token_format, payload.hidden_size
        operands = cls(tokens, group_ids, topk_weights, scale, *static)
        return operands, Choices(topk_ids, copies)

    def differentiable(self) -> list[jax.Array]:
        """The operands whose gradients the backward's call returns, in its order."""
        return [x for x in (self.tokens, self.topk_weights) if x is not None]

    def replace(self, arrays: Sequence[jax.Array]) -> Self:
        """These operands with other arrays in place of `differentiable()`."""
        tokens, *weights = arrays
        topk_weights = weights[0] if weights else None
        return dataclasses.replace(self, tokens=tokens, topk_weights=topk_weights)

    @property
    def is_packed(self) -> bool:
        """Whether the caller has quantized the tokens, which travel as words."""
        return self.hidden_size != self.tokens.shape[1]

    @property
    def are_encoded(self) -> bool:
        """Whether the tokens are codes and scales, as core/message.h has them, and integers."""
        return self.tokens.dtype == jnp.uint32

    @property
    def row_elements(self) -> int:
        """Elements of the token of a row, or of its words."""
        return self.hidden_size if self.are_encoded else self.tokens.shape[1]


def _check_topk_weights(call: str, geometry: Geometry, weights: Any, leading: Any) -> jax.Array:
    """`float32[..., K]`."""
    top_k = geometry.config.top_k
    checks.check_per_token(call, "topk_weights", weights, leading, top_k, "K", jnp.floating)
    return checks.as_float32(weights)


def _by_token(x: Any) -> Any:
    """`[T, ...]` from `[..., n]`, whose leading dimensions are the tokens'."""
    if x is None or x.ndim == 2:
        return x
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


class DispatchResults(NamedTuple):
    """The results of a transport's dispatch; the fields are those of `Dispatched`."""

    tokens: jax.Array
    row_offsets: jax.Array
    src_info: jax.Array
    n_dropped: jax.Array
    n_invalid: jax.Array
    handle: Any
    row_weights: jax.Array | None
    scales: jax.Array | None

    @classmethod
    def of(cls, arrays: Sequence[jax.Array], has_weights: bool) -> Self:
        """Names the results of a custom call; the last two are optional."""
        fields: Any = [*arrays]
        if not has_weights:
            fields.insert(cls._fields.index("row_weights"), None)
        return cls(*fields, *[None] * (len(cls._fields) - len(fields)))

    def named(self) -> Self:
        """These results, named for `jax.checkpoint` policies.

        Float8 arrays as bytes: JAX applies `reduce_precision` to what a policy saves by name, which
        turns e4m3 numbers from 256 on into NaNs.
        """

        def name(x: jax.Array) -> jax.Array:
            if x.dtype.itemsize > 1:
                return checkpoint_name(x, DISPATCH_NAME)
            data = checkpoint_name(bitcast_convert_type(x, jnp.uint8), DISPATCH_NAME)
            return bitcast_convert_type(data, x.dtype)

        return jax.tree.map(name, self)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Routing:
    """Maps choices to rows: the part of a dispatch that combine needs."""

    group_ids: jax.Array  # int32[T, N], at the choices' source rank
    # The transport's own: int32 arrays; between nodes, the routing inside this rank's node.
    handle: Any
    row_offsets: jax.Array  # uint32[n_local_groups + 1], at the rows' rank
    src_info: jax.Array  # int32[C, 2], at the rows' rank
    # Leading dimensions of the dispatch's tokens: (T,), or (B, S) with B * S = T.
    leading: tuple[int, ...] = dataclasses.field(metadata={"static": True})

    @property
    def n_tokens(self) -> int:
        """Tokens of the dispatch (T)."""
        return math.prod(self.leading)

    @classmethod
    def of(cls, geometry: Geometry, dispatched: Any) -> Self:
        """That of a `Dispatched`."""
        topk_ids, handle, group_ids = dispatched.topk_ids, dispatched.handle, dispatched.group_ids
        if group_ids is None:
            group_ids = _never_empty(route_ids(geometry, _by_token(topk_ids)), NO_GROUP)
        # Even integers have tangents, whose types JAX gets wrong under a vmap with spmd_axis_name.
        fixed = lax.stop_gradient((group_ids, handle, dispatched.row_offsets, dispatched.src_info))
        group_ids, handle, row_offsets, src_info = checks.vary_alike(geometry.axis_names, *fixed)
        return cls(group_ids, handle, row_offsets, src_info, topk_ids.shape[:-1])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CombineOperands:
    """The operands of a combine.

    With `adds_shared_expert`, the last choice is the shared expert's, whose row is added
    unweighted, after the cast. Otherwise it is a choice like any other, as in the backward pass of
    dispatch.

    The result of the call has the dtype of `expert_out`: bfloat16 or float32. `user_result`
    makes that of the user from it.
    """

    # [C, H], or fewer elements. None in the backward of a sum without weights, which has no need.
    expert_out: Any
    routing: Routing
    topk_weights: jax.Array | None = None  # float32[T, N]
    row_weights: jax.Array | None = None  # float32[C]; not both
    row_scalars: jax.Array | None = None  # float32[C], return to their choices beside the rows
    residual: jax.Array | None = None  # [T, H]
    shared_rows: jax.Array | None = None  # [T, H], for `user_result`; see `split_shared`
    reduce: bool = dataclasses.field(default=True, metadata={"static": True})
    adds_shared_expert: bool = dataclasses.field(default=False, metadata={"static": True})

    @property
    def weighting(self) -> Weighting:
        """Where the weights are."""
        if self.topk_weights is not None:
            return Weighting.SOURCE
        return Weighting.NONE if self.row_weights is None else Weighting.ROW

    @property
    def weights(self) -> jax.Array | None:
        """The weights, wherever they are."""
        return self.row_weights if self.topk_weights is None else self.topk_weights

    def differentiable(self) -> list[jax.Array]:
        """The operands whose gradients the backward's call returns, in its order."""
        return [x for x in (self.expert_out, self.weights) if x is not None]

    def replace(self, arrays: Sequence[jax.Array]) -> Self:
        """These operands with other arrays in place of `differentiable()`."""
        expert_out, *rest = arrays
        weights = rest[0] if rest else None
        at_source = self.weighting == Weighting.SOURCE
        return dataclasses.replace(
            self,
            expert_out=expert_out,
            topk_weights=weights if at_source else None,
            row_weights=None if at_source else weights,
        )

    @classmethod
    def unweighted(cls, geometry: Geometry, rows: jax.Array | None, routing: Routing) -> Self:
        """Operands of a sum without weights or a residual; its backward needs no rows."""
        has_shared_expert = geometry.config.fused_shared_expert
        return cls(rows, routing, adds_shared_expert=has_shared_expert)

    @classmethod
    def make(
        cls,
        operation: str,
        geometry: Geometry,
        expert_out: Any,
        routing: Routing,
        topk_weights: Any,
        row_weights: jax.Array | None,
        residual: Any,
        reduce: bool,
    ) -> Self:
        """Checks and routes the user's arguments."""
        (reduce,) = checks.check_flags(operation, reduce=reduce)
        _check_weights(operation, topk_weights, row_weights, residual, reduce)
        config = geometry.config
        expert_out, topk_weights, residual = checks.as_arrays(
            operation, expert_out=expert_out, topk_weights=topk_weights, residual=residual
        )
        leading, dtype = routing.leading, config.combine_dtype
        n_rows = routing.src_info.shape[:1]
        size = _check_rows(operation, config, "expert_out", expert_out, n_rows, "C H")
        if topk_weights is not None:
            topk_weights = _check_topk_weights(operation, geometry, topk_weights, leading)
        if residual is not None:
            checks.check_per_token(operation, "residual", residual, leading, size, "H", dtype)
        if residual is not None:
            residual = to_sum_dtype(_never_empty(_by_token(residual), 0))
        adds_shared_expert = config.fused_shared_expert and reduce
        operands = cls(
            to_sum_dtype(expert_out),
            routing,
            _never_empty(route_weights(geometry, _by_token(topk_weights)), 0),
            row_weights,
            residual=residual,
            reduce=reduce,
            adds_shared_expert=adds_shared_expert,
        )
        operands = checks.vary_alike(geometry.axis_names, operands)[0]
        if not adds_shared_expert or config.sum_dtype == dtype:
            return operands
        rows, shared_rows = split_shared(operands.expert_out, routing.group_ids)
        return dataclasses.replace(operands, expert_out=rows, shared_rows=shared_rows)

    def user_result(self, config: EPConfig, out: jax.Array) -> jax.Array:
        """The user's result from that of the call: `[T, H]`, or `[T, K, H]` of all choices.

        Drops the padding token of T = 0 and, without a sum, the shared expert's choice.
        """
        routing, dtype = self.routing, config.combine_dtype
        if self.shared_rows is not None:
            out = round_to(out, dtype) + self.shared_rows
        out = from_sum_dtype(out, dtype)[: routing.n_tokens]
        out = out if self.reduce else out[:, : config.top_k]
        return out.reshape(*routing.leading, *out.shape[1:]) if len(routing.leading) > 1 else out


def check_values(
    operation: str, geometry: Geometry, values: Any, routing: Routing
) -> tuple[jax.Array, Routing]:
    """The operands of `redispatch`, checked, and its routing.

    `[T, H]`, integers as limbs, in the dtype in which they travel.
    """
    if numbers.is_integer(values):
        _check_integers(operation, geometry.config, values, routing.leading)
        values = numbers.to_limbs(values)
    else:
        dtypes = numbers.INTEGERS
        _check_rows(operation, geometry.config, "values", values, routing.leading, "H", *dtypes)
    values = to_sum_dtype(_never_empty(_by_token(values), 0))
    return checks.vary_alike(geometry.axis_names, values, routing)


def _check_integers(
    operation: str, config: EPConfig, values: jax.Array, leading: tuple[int, ...]
) -> None:
    """Requires `[*leading, W]`, of a W that fits into rows of the group."""
    checks.check_array(operation, "values", values, (*leading, None), "W", *numbers.INTEGERS)
    limit = config.hidden_size * config.sum_dtype.itemsize // numbers.BYTES_PER_INTEGER
    if not 0 < values.shape[-1] <= limit:
        raise ValueError(
            f"{operation}: values must have from 1 to {limit} integers per token, which travel in "
            f"{numbers.BYTES_PER_INTEGER} bytes each, in rows of hidden_size={config.hidden_size} "
            f"elements of {config.sum_dtype.name}; got {values.shape[-1]}."
        )


def empty_rows(values: jax.Array, routing: Routing) -> jax.Array:
    """`[C, H]`, undefined, of the type that rows of `values`, `[T, H]`, have."""
    rows = lax.empty((routing.src_info.shape[0], values.shape[1]), values.dtype)
    return checks.vary_alike((), rows, values)[0]


def _check_rows(
    operation: str,
    config: EPConfig,
    name: str,
    rows: Any,
    leading: tuple[int, ...],
    letters: str,
    *other_dtypes: Any,
) -> int:
    """Requires `[*leading, H]` in `combine_dtype`, or fewer elements; returns their number.

    `other_dtypes` are those that an error names beside it.
    """
    size, dtype = checks.row_size(rows, config.hidden_size), config.combine_dtype
    checks.check_array(operation, name, rows, (*leading, size), letters, dtype, *other_dtypes)
    if size < config.hidden_size:
        checks.check_narrow_rows(operation, name, size, size * config.sum_dtype.itemsize)
    return size


def _check_weights(
    operation: str, topk_weights: Any, row_weights: jax.Array | None, residual: Any, reduce: bool
) -> None:
    if topk_weights is not None and row_weights is not None:
        raise ValueError(
            f"{operation}: topk_weights must be given to dispatch or to combine, not to both."
        )
    if reduce:
        return
    given = dict(topk_weights=topk_weights, residual=residual, row_weights=row_weights)
    for name, value in given.items():
        if value is not None:
            raise ValueError(
                f"{operation}: reduce=False returns the rows as they are, so {name} must not be "
                "given."
            )


def _never_empty(x: Any, fill: int) -> Any:
    """`x`, or one token filled with `fill` if it has none."""
    if x is None or x.shape[0] > 0:
        return x
    return jnp.full((1, *x.shape[1:]), fill, x.dtype)
