"""What a transport does. All give the same results, bit for bit."""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_ep.config import EPConfig
from jax_ep.exchange import Exchange
from jax_ep.results import Dispatched
from jax_ep.stats import RankStats
from jax_ep.topology import local_places

if TYPE_CHECKING:
    from jax_ep.group import EPGroup

# Names of the results for `jax.checkpoint` policies.
DISPATCH_NAME = "jax_ep_dispatch"
COMBINE_NAME = "jax_ep_combine"


def assemble(
    group: EPGroup, topk_ids: jax.Array, results: dict[str, Any]
) -> Dispatched:
    """`Dispatched` from the results of a transport, whose fields they name."""
    token_format = group.config.token_format
    if group.config.fused_shared_expert:  # no position in its token's top-k
        src_info = results["src_info"]
        is_shared = src_info[:, 1:] == group.config.top_k
        src_info = jnp.where(is_shared & jnp.array([False, True]), -1, src_info)
        results = results | dict(src_info=src_info)
    return Dispatched(
        **results,
        expert_ids=jnp.arange(group._routed.n_groups, dtype=jnp.int32),
        topk_ids=topk_ids,
        scales_offsets=token_format.layout.offsets(results["row_offsets"]),
        source_tokens=None,
        input_scale=None,
        group=group,
    )


class Transport(abc.ABC):
    """Carries tokens between ranks.

    `dispatch` and `combine` get arrays whose shapes and dtypes fit the group, inside a
    `jax.shard_map` over its mesh; both are differentiable. Ids and weights are those of
    `jax_ep/choices.py`, and so is the K here: with a fused shared expert it is the last
    choice.
    """

    name: str

    @abc.abstractmethod
    def why_not(
        self,
        mesh: jax.sharding.Mesh,
        axis_name: str,
        config: EPConfig,
        exchange: Exchange,
    ) -> str | None:
        """What keeps the transport from serving this mesh; None if nothing does.

        The same answer in all processes that hold devices of the mesh.
        """

    @abc.abstractmethod
    def open(self, group: EPGroup, exchange: Exchange) -> None:
        """Sets up what calls of the group need."""

    @abc.abstractmethod
    def close(self, group: EPGroup) -> None:
        """Frees what `open` set up."""

    def check(self, group: EPGroup) -> None:  # noqa: B027
        """See `EPGroup.check`; here calls raise by themselves."""

    def stats(self, group: EPGroup) -> list[RankStats]:
        """See `EPGroup.stats`."""
        raise NotImplementedError(f"Transport {self.name!r} keeps no totals.")

    def dev_ptrs(self, group: EPGroup) -> np.ndarray:
        """See `EPGroup.dev_ptrs`."""
        n_local_devices = len(local_places(group.mesh, group.axis_name))
        return np.zeros((n_local_devices, 2, 3), np.uint64)

    @abc.abstractmethod
    def dispatch(
        self,
        group: EPGroup,
        tokens: jax.Array,
        topk_ids: jax.Array,
        topk_weights: jax.Array | None,
        input_scale: jax.Array | None,
    ) -> Dispatched:
        """See `jax_ep.dispatch`."""

    def dispatch_async(
        self,
        group: EPGroup,
        tokens: jax.Array,
        topk_ids: jax.Array,
        topk_weights: jax.Array | None,
        input_scale: jax.Array | None,
    ) -> Any:
        """What `dispatch_wait` takes; here the whole call."""
        return self.dispatch(group, tokens, topk_ids, topk_weights, input_scale)

    def then(self, begun: Any, x: Any) -> Any:
        """See `InFlight.then`; here the call is complete."""
        return x

    def dispatch_wait(self, group: EPGroup, begun: Any, after: Any) -> Dispatched:
        """What `dispatch` would have given; where it matters, once there is `after`."""
        return begun

    @abc.abstractmethod
    def combine(
        self,
        group: EPGroup,
        expert_out: jax.Array,
        dispatched: Dispatched,
        topk_weights: jax.Array | None,
        residual: jax.Array | None,
        *,
        reduce: bool,
        adds_shared: bool,
    ) -> jax.Array:
        """See `jax_ep.combine`.

        `adds_shared`: the last choice is the shared expert's, whose row is added after
        the cast; else it is one like the others.
        """

    def n_pieces(self, group: EPGroup, rows: jax.Array) -> int:
        """How many combines rows take that may be longer than the experts' rows.

        Those are cotangents of `dequantize`, in the tokens' dtype.
        """
        return 1

    def combine_async(
        self,
        group: EPGroup,
        expert_out: jax.Array,
        dispatched: Dispatched,
        topk_weights: jax.Array | None,
        residual: jax.Array | None,
        *,
        reduce: bool,
        adds_shared: bool,
    ) -> Any:
        """What `combine_wait` takes; here the whole call."""
        return self.combine(
            group,
            expert_out,
            dispatched,
            topk_weights,
            residual,
            reduce=reduce,
            adds_shared=adds_shared,
        )

    def combine_wait(self, group: EPGroup, begun: Any, after: Any) -> jax.Array:
        """What `combine` would have given; where it matters, once there is `after`."""
        return begun
