"""Groups whose nodes are in this process, and layers of such groups."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cases
import closed_forms
import combine_sums
import harness
import jax_ep
import suite
from harness import AXIS, group_of, on_mesh, put, shards
from jax_ep.nodes.rails import XlaRails

CACHES = (suite.compiled, closed_forms.compiled_vjps, combine_sums.compiled_sums)
TWO = cases.SMALL[4].replace(n_nodes=2)
FOUR = cases.SMALL[8].replace(n_nodes=4)
SHARED = cases.FLAGS["shared"]


def with_nodes(all_cases) -> list:
    """The cases with an even number of ranks that exchange tokens, on two nodes."""
    chosen = [case for case in all_cases if case.n_ranks % 2 == 0 and not case.skip_a2a]
    return [case.replace(n_nodes=2, n_tokens=case.n_tokens) for case in chosen]


def forget_groups() -> None:
    """Makes the tests open their groups anew."""
    for cache in CACHES:
        cache.cache_clear()


@pytest.fixture(scope="module")
def by_nodes(request):
    """The fast transport of the platform, inside nodes; or `nvshmem`, if asked for."""
    option = request.config.option
    fast = "p2p" if option.gpu else "host"
    forget_groups()
    with harness.each_node_by_itself():
        yield "nvshmem" if option.transports == "nvshmem" else fast
    forget_groups()


class ThriftyRails(XlaRails):
    """Loses what the masks say is not needed, as `nvshmem` does not send it."""

    def all_gather(self, rows, is_sent):
        gathered = super().all_gather(rows, is_sent)
        if is_sent is not None:
            of_all = super().all_gather(is_sent[None].astype(jnp.uint8), None) > 0  # by source
            arrives = jnp.take(of_all, self._node(), axis=1).at[self._node()].set(True)
            is_float = jnp.issubdtype(gathered.dtype, jnp.floating)
            lost = jnp.nan if is_float else jnp.iinfo(gathered.dtype).max
            gathered = _where(arrives.reshape(-1, *is_sent.shape[2:]), gathered, lost)
        return gathered

    def all_to_all(self, rows, is_sent):
        if is_sent is not None:
            by_node = is_sent.reshape(self.geometry.routed.n_nodes, -1, *is_sent.shape[1:])
            rows = _where(by_node.at[self._node()].set(True).reshape(is_sent.shape), rows, 0)
        return super().all_to_all(rows, is_sent)

    def _node(self):
        return jax.lax.axis_index(AXIS) // self.geometry.routed.n_ranks_per_node


def _where(mask, rows, other):
    mask = mask.reshape(*mask.shape, *[1] * (rows.ndim - mask.ndim))
    return jnp.where(mask, rows, jnp.array(other, rows.dtype))


def layer_results(case, transport: str, **changes) -> list:
    """For each rank: a layer's result, its gradients, and values that are sent along again."""
    inputs = suite.make_inputs(case)
    with group_of(case, transport, **changes) as group:

        def body(tokens, topk_ids, topk_weights, residual):
            at_row, at_source = suite.weights_for(case.weights, topk_weights)

            def layer(tokens, topk_weights):
                at_row, at_source = suite.weights_for(case.weights, topk_weights)
                rows = jax_ep.dispatch(group, tokens, topk_ids, *at_row)
                out = jnp.tanh(jax_ep.dequantize(rows, jnp.bfloat16))
                return jax_ep.combine(group, out, rows, *at_source)

            out, pull = jax.vjp(layer, tokens, topk_weights)
            rows = jax_ep.dispatch(group, tokens, topk_ids)
            again = jax_ep.redispatch(group, residual, rows)
            return out, *pull(residual), suite.clear_unused(again, rows.row_offsets)

        weights = [np.nan_to_num(each) for each in inputs.topk_weights]
        operands = inputs.tokens, inputs.topk_ids, weights, inputs.residual
        out = on_mesh(group.mesh, body)(*put(group.mesh, *operands))
        return [results for _, results in shards(group.mesh, out)]
