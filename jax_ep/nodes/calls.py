"""Several nodes: a transport inside each of them, rails between them.

The transport inside serves the ranks of a node. Each of its ranks brings the tokens of the ranks of
its index on all nodes, which it has gathered, and the choices that name experts of the node:

* The rows of an expert are a group of rows per node that tokens come from, in node order. So the
  transport, which orders them by group, rank on the node, token and k, gives them in the order of
  local expert, source rank, token and k, as on one node.
* intra-node combine gives the node's sum for every such token, rounded to `sum_dtype`. The
  sums return to their tokens' ranks, which add them in node order.

So results have the bits of the other transports with the same `n_nodes`.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jax_ep.exchange.base import Calls
from jax_ep.exchange.numbers import in_float32
from jax_ep.exchange.operands import (
    COMBINE_NAME,
    CombineOperands,
    DispatchOperands,
    DispatchResults,
    Routing,
)
from jax_ep.exchange.rules import CustomCalls
from jax_ep.geometry import Geometry
from jax_ep.nodes import codes, overlapped, rules
from jax_ep.nodes.rails import Rails


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NodeCall:
    """A call in flight: inside a node, or with its exchange."""

    call: Any  # of the transport inside, or of the rails
    operands: Any  # of that call
    shared_rows: jax.Array | None  # of combine, see _split_shared

    def then(self, x: Any) -> Any:
        """`InFlight.then`."""
        return self.call.then(x)

    def run(self, work: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """`InFlight.overlap`."""
        return self.call.run(work, args)


class NodesCalls(Calls):
    """The calls of all ranks: those inside nodes, with exchanges over the rails before or after."""

    def __init__(self, geometry: Geometry, inner: CustomCalls, rails: Rails) -> None:
        """`inner`: the calls inside this node; `rails`: what connects it with the others."""
        super().__init__(geometry)
        self.inner, self.rails = inner, rails

    def n_slices(self, rows: jax.Array) -> int:
        """As many combines as the calls inside need."""
        return self.inner.n_slices(rows)

    def dispatch(self, operands: DispatchOperands) -> DispatchResults:
        """Gathers the tokens of all nodes; dispatches them inside the node, maybe as they come."""
        rails = overlapped.rails_beside_dispatch(self.rails, operands.group_ids.shape[0])
        within = self._gather(operands, with_tokens=rails is None)
        if rails is None:
            return self._results(within, self.inner.dispatch(within))
        results = overlapped.all_gather_and_dispatch(rails, within, operands.group_ids)
        return self._results(within, results)

    def combine(self, operands: CombineOperands) -> jax.Array:
        """Combines inside the node; returns sums, maybe as they are made, or rows."""
        rails = overlapped.rails_beside_combine(self.rails, operands)
        within, shared_rows = self._operands_within(operands, with_residual=rails is not None)
        if rails is None:
            return self._return(operands, shared_rows, self.inner.combine(within))
        group_ids = operands.routing.group_ids
        sums = overlapped.combine_and_reduce_scatter(rails, within, group_ids)
        return self._finish_sums(sums, shared_rows)

    def send_along(self, values: jax.Array, routing: Routing) -> jax.Array:
        """The values of all nodes, sent along the intra-node routing."""
        within: Routing = routing.handle
        gathered = rules.all_gather_tokens(self.rails, values, routing.group_ids, within.group_ids)
        return self.inner.send_along(gathered, within)

    def start(self, operands: DispatchOperands | CombineOperands) -> NodeCall:
        """Starts the call with its exchange, or gathers what it needs and starts it in the node."""
        if isinstance(operands, DispatchOperands):
            group_ids = operands.group_ids
            rails = overlapped.rails_beside_dispatch(self.rails, group_ids.shape[0])
            gathered = self._gather(operands, with_tokens=rails is None)
            if rails is None:
                return NodeCall(self.inner.start(gathered), gathered, None)
            return NodeCall(rails.start_dispatch(gathered, group_ids), gathered, None)
        rails = overlapped.rails_beside_combine(self.rails, operands)
        within, shared_rows = self._operands_within(operands, with_residual=rails is not None)
        started = self.inner.start(within) if rails is None else rails.start_combine(within)
        return NodeCall(started, within, shared_rows)

    def finish(self, call: NodeCall, operands: Any, after: Any) -> Any:
        """Waits for the call; returns sums to their tokens' ranks if it has not."""
        if isinstance(operands, DispatchOperands):
            return self._results(call.operands, self._finish_dispatch(call, operands, after))
        rails = overlapped.rails_beside_combine(self.rails, operands)
        if rails is None:
            result = self.inner.finish(call.call, call.operands, after)
            return self._return(operands, call.shared_rows, result)
        group_ids = operands.routing.group_ids
        sums = overlapped.finish_combine(rails, call.call, call.operands, group_ids, after)
        return self._finish_sums(sums, call.shared_rows)

    def _finish_dispatch(
        self, call: NodeCall, operands: DispatchOperands, after: Any
    ) -> DispatchResults:
        group_ids = operands.group_ids
        rails = overlapped.rails_beside_dispatch(self.rails, group_ids.shape[0])
        if rails is None:
            return self.inner.finish(call.call, call.operands, after)
        return overlapped.finish_dispatch(rails, call.call, call.operands, group_ids, after)

    def _gather(self, operands: DispatchOperands, with_tokens: bool = True) -> DispatchOperands:
        """The operands of the intra-node dispatch; without tokens, with those of this rank."""
        operands = codes.encode(operands)
        tokens, ids, weights = operands.tokens, operands.group_ids, operands.topk_weights
        if not self.geometry.config.token_format.returns_gradient:
            tokens = lax.stop_gradient(tokens)
        if with_tokens:
            tokens, ids, weights = rules.gather(self.rails, tokens, ids, weights)
        else:
            ids, weights = rules.gather_choices(self.rails, ids, weights)
        ids = lax.stop_gradient(ids)
        return dataclasses.replace(operands, tokens=tokens, group_ids=ids, topk_weights=weights)

    def _results(self, within: Any, results: DispatchResults) -> DispatchResults:
        """The results of dispatch, from those of the intra-node dispatch."""
        n_nodes = self.geometry.routed.n_nodes
        n_tokens = within.group_ids.shape[0] // n_nodes
        # What combine needs: the routing of all nodes' tokens inside this node.
        ids, row_offsets, src_info = within.group_ids, results.row_offsets, results.src_info
        within_node = Routing(ids, results.handle, row_offsets, src_info, ids.shape[:1])
        token, k = src_info[:, 0], src_info[:, 1]
        token = jnp.where(token >= 0, token % n_tokens, token)
        return results._replace(
            row_offsets=row_offsets[::n_nodes],
            src_info=jnp.stack([token, k], axis=1),
            handle=within_node,
        ).named()

    def _operands_within(
        self, operands: CombineOperands, with_residual: bool
    ) -> tuple[CombineOperands, jax.Array | None]:
        """The operands of the intra-node combine, and this rank's shared expert's rows.

        `with_residual`: that of this rank.
        """
        routing: Routing = operands.routing.handle
        weights = operands.topk_weights
        if weights is not None:
            ids = operands.routing.group_ids, routing.group_ids
            weights = rules.all_gather_weights(self.rails, weights, *ids)
        expert_out, shared_rows = operands.expert_out, None
        n_shared = min(operands.routing.n_tokens, expert_out.shape[0])
        if operands.adds_shared_expert and n_shared > 0:
            expert_out, shared_rows = _split_shared(n_shared, expert_out)
        residual = operands.residual if with_residual else None
        within = dataclasses.replace(
            operands,
            expert_out=expert_out,
            routing=routing,
            topk_weights=weights,
            residual=residual,
        )
        return within, shared_rows

    def _return(
        self, operands: CombineOperands, shared_rows: jax.Array | None, out: jax.Array
    ) -> jax.Array:
        """The result of combine, from that of the intra-node combine."""
        within: Routing = operands.routing.handle
        ids = operands.routing.group_ids, within.group_ids
        if not operands.reduce:
            rows = rules.all_to_all_rows(self.rails, out, *ids)
            return checkpoint_name(rows, COMBINE_NAME)
        sums = rules.reduce_scatter_sums(self.rails, out, operands.residual, *ids)
        return self._finish_sums(sums, shared_rows)

    def _finish_sums(self, sums: jax.Array, shared_rows: jax.Array | None) -> jax.Array:
        if shared_rows is not None:  # of the first tokens
            n = shared_rows.shape[0]
            total = in_float32(sums[:n]) + in_float32(shared_rows)
            sums = jnp.concatenate([total.astype(sums.dtype), sums[n:]])
        return checkpoint_name(sums, COMBINE_NAME)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _split_shared(n: int, expert_out: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Splits off the first n rows, those of the shared expert, and leaves zeros in their place.

    They are this rank's own tokens, in order. The intra-node combine adds them, zeros by now,
    to its sums; the rows themselves must be added to the sum over all nodes.
    """
    shared = expert_out[:n]
    return _with_first(expert_out, jnp.zeros_like(shared)), shared


_split_shared.defvjp(
    lambda n, expert_out: (_split_shared(n, expert_out), None),
    lambda n, _, cotangents: (_with_first(*cotangents),),
)


def _with_first(x: jax.Array, first: jax.Array) -> jax.Array:
    """`x` with other first rows.

    Not by `x.at[...].set`: the compiler of XLA:GPU 0.11 crashes where that sets all rows.
    """
    n = first.shape[0]
    return first if n == x.shape[0] else jnp.concatenate([first, x[n:]])
