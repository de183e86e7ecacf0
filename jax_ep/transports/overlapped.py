"""Calls inside a node that run while the exchange between nodes does.

Exchange and call are one operation. Its gradients are made of the other ones: the exchanges of
between_nodes.py and the calls inside the node.
"""

import abc
import dataclasses

import jax
from jax import lax

from jax_ep import autodiff
from jax_ep.formats import QuantizedFormat
from jax_ep.operands import CombineOperands, DispatchOperands, DispatchResults
from jax_ep.transports import between_nodes
from jax_ep.transports.nodes import NodesConnection

# Tokens of a rank from which on calls overlap. Ids and weights then travel ahead, which takes
# 10 us. The same in all processes. Tests lower it.
min_tokens = 1024


class OverlappingConnection(NodesConnection):
    """The calls with many tokens overlap with their exchanges; not those that `start` starts."""

    @abc.abstractmethod
    def bind_dispatch(self, operands: DispatchOperands, group_ids: jax.Array) -> DispatchResults:
        """Sends this rank's tokens to the nodes that need them, and dispatches all in this node.

        Has no derivative.

        Args:
            operands: of the dispatch inside the node, but with the tokens of this rank, `[T, H]`.
            group_ids: `int32[T, N_c]`, this rank's choices, which say what nodes need a token.
        """

    @abc.abstractmethod
    def bind_combine(self, operands: CombineOperands) -> list[jax.Array]:
        """Combines inside this node, and adds the sums of all nodes: `[T, H]`.

        The second result, if there are `row_scalars`, is `float32[N * T, N_c]`: those that the
        choices of all nodes' tokens have in this node. Has no derivative.

        Args:
            operands: of the combine inside the node, but with the residual of this rank, `[T, H]`.
        """

    def dispatch(self, operands: DispatchOperands) -> DispatchResults:
        """Dispatches tokens inside the node as they come."""
        if operands.group_ids.shape[0] < min_tokens:
            return super().dispatch(operands)
        choices = operands.group_ids, operands.topk_weights
        node_ids, weights = between_nodes.gather_choices(self.rails, *choices)
        within = dataclasses.replace(
            operands,
            tokens=self._tokens(operands),
            group_ids=lax.stop_gradient(node_ids),
            topk_weights=weights,
        )
        return self._results(within, spread_and_dispatch(self, within, operands.group_ids))

    def combine(self, operands: CombineOperands) -> jax.Array:
        """Sends the node's sums to other nodes as they are made."""
        group_ids = operands.routing.group_ids
        if group_ids.shape[0] < min_tokens or not operands.reduce:
            return super().combine(operands)
        within, shared_rows = self._operands_within(operands)
        within = dataclasses.replace(within, residual=operands.residual)
        return self._finish_sums(combine_and_collect(self, within, group_ids), shared_rows)


def _spread_and_dispatch(
    connection: OverlappingConnection, operands: DispatchOperands, group_ids: jax.Array
) -> DispatchResults:
    """See `bind_dispatch`; `group_ids` are `int32[T, N_c]`, of this rank's choices."""
    return connection.bind_dispatch(operands, group_ids).named()


spread_and_dispatch = jax.custom_vjp(_spread_and_dispatch, nondiff_argnums=(0,))


def _spread_and_dispatch_fwd(
    connection: OverlappingConnection, operands: DispatchOperands, group_ids: jax.Array
) -> tuple[DispatchResults, tuple[autodiff.SavedDispatch, jax.Array]]:
    results = _spread_and_dispatch(connection, operands, group_ids)
    return results, (autodiff.save_dispatch(operands, results), group_ids)


def _spread_and_dispatch_bwd(
    connection: OverlappingConnection,
    residuals: tuple[autodiff.SavedDispatch, jax.Array],
    cotangents: DispatchResults,
) -> tuple[DispatchOperands, None]:
    saved, group_ids = residuals
    if isinstance(connection.geometry.config.token_format, QuantizedFormat):
        gradients, *_ = autodiff.dispatch_gradients(connection.inner, saved, cotangents)
        zeros = gradients.tokens[: group_ids.shape[0]]
        return dataclasses.replace(gradients, tokens=zeros), None
    plain_sum = CombineOperands(
        cotangents.tokens, saved.routing, row_scalars=cotangents.row_weights
    )
    tokens, *weights = connection.bind_combine(plain_sum)
    topk_weights = weights[0] if weights else None
    return dataclasses.replace(saved.like, tokens=tokens, topk_weights=topk_weights), None


spread_and_dispatch.defvjp(_spread_and_dispatch_fwd, _spread_and_dispatch_bwd)


def _combine_and_collect(
    connection: OverlappingConnection, operands: CombineOperands, group_ids: jax.Array
) -> jax.Array:
    """See `bind_combine`; `group_ids` are `int32[T, N_c]`, of this rank's choices."""
    return connection.bind_combine(operands)[0]


combine_and_collect = jax.custom_vjp(_combine_and_collect, nondiff_argnums=(0,))


def _combine_and_collect_fwd(
    connection: OverlappingConnection, operands: CombineOperands, group_ids: jax.Array
) -> tuple[jax.Array, tuple[autodiff.SavedCombine, jax.Array]]:
    result = _combine_and_collect(connection, operands, group_ids)
    return result, (autodiff.save_combine(operands), group_ids)


def _combine_and_collect_bwd(
    connection: OverlappingConnection,
    residuals: tuple[autodiff.SavedCombine, jax.Array],
    cotangent: jax.Array,
) -> tuple[CombineOperands, None]:
    saved, group_ids = residuals
    ids = group_ids, saved.operands.routing.group_ids
    spread = between_nodes.spread_tokens(connection.rails, cotangent, *ids)
    gradients, *_ = autodiff.combine_gradients(connection.inner, saved, spread)
    residual = cotangent if saved.has_residual else None
    return dataclasses.replace(gradients, residual=residual), None


combine_and_collect.defvjp(_combine_and_collect_fwd, _combine_and_collect_bwd)
