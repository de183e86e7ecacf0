"""The MoE layer that others are compared with: sort, ragged matmuls, unsort; no expert parallelism.

Every device gathers all experts and processes its own tokens. The parameters, their initial values
and their sharding are those of `jax_ep.nnx.MoE`, as is the router.
"""

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jax_ep.nnx import MoEReport
from jax_ep.router import RouterConfig, balance_loss, expert_load, route, z_loss
from layout import ALL, DATA, EXPERT, gather
from sizes import Sizes

RaggedDot = Callable[..., jax.Array]  # ([M, K], [E, K, N], int32[E]) -> [M, N]


def ragged_dot_of(name: str) -> RaggedDot:
    """Returns the matmul of library `name`: lax or tokamax.

    Raises:
        ValueError: tokamax is not installed.
    """
    if name == "lax":
        return jax.lax.ragged_dot
    if importlib.util.find_spec("tokamax") is None:
        raise ValueError("--experts tokamax needs tokamax: pip install tokamax (Python 3.12).")
    import tokamax

    return tokamax.ragged_dot


class RaggedMoE(nnx.Module):
    """Router, then the chosen experts, then the weighted sum of their results."""

    def __init__(
        self,
        sizes: Sizes,
        mesh: Mesh,
        dtype: Any,
        ragged_dot: RaggedDot,
        kernel_init: nnx.Initializer,
        rngs: nnx.Rngs,
    ):
        self.top_k, self.mesh, self.dtype, self.ragged_dot = sizes.top_k, mesh, dtype, ragged_dot
        n_experts, size, width = sizes.n_experts, sizes.hidden_size, sizes.expert_size

        def by_expert(key, shape):
            keys = jax.random.split(key, n_experts)
            return jax.vmap(lambda key: kernel_init(key, shape[1:]))(keys)

        def param(init, shape, *spec):
            create = nnx.with_partitioning(init, spec, mesh=mesh)
            return nnx.Param(create(rngs.params(), shape))

        self.router = param(kernel_init, (size, n_experts), None, None)
        self.gate_up = param(by_expert, (n_experts, size, 2 * width), EXPERT, DATA, None)
        self.down = param(by_expert, (n_experts, width, size), EXPERT, None, DATA)

    def __call__(self, tokens: jax.Array) -> tuple[jax.Array, MoEReport]:  # [B, S, H]
        report = MoEReport(*[P()] * len(MoEReport._fields))._replace(topk_ids=P(ALL))
        layer = jax.shard_map(
            functools.partial(apply_experts, self.top_k, self.ragged_dot),
            mesh=self.mesh,
            in_specs=(P(), P(), P(), P(ALL)),
            out_specs=(P(ALL), report),
            check_vma=False,  # for tokamax, whose gradients have no varying axes
        )
        experts = [gather(self.mesh, x[...].astype(self.dtype)) for x in (self.gate_up, self.down)]
        return layer(self.router[...], *experts, tokens)


def apply_experts(
    top_k: int,
    ragged_dot: RaggedDot,
    router: jax.Array,
    gate_up: jax.Array,
    down: jax.Array,
    tokens: jax.Array,
) -> tuple[jax.Array, MoEReport]:
    """The layer on one device, inside `jax.shard_map`."""
    n_experts = router.shape[1]
    logits = jnp.matmul(tokens.astype(jnp.float32), router, precision="highest")
    routes = route(RouterConfig(), logits, top_k)
    order = jnp.argsort(routes.topk_ids.reshape(-1))  # of choices, by expert
    rows = tokens.reshape(-1, tokens.shape[-1])[order // top_k]
    group_sizes = jnp.bincount(routes.topk_ids.reshape(-1), length=n_experts).astype(jnp.int32)

    hidden = ragged_dot(rows, gate_up, group_sizes)
    gate, up = jnp.split(hidden, 2, axis=-1)
    results = ragged_dot(jax.nn.silu(gate) * up, down, group_sizes)

    by_choice = results[jnp.argsort(order)].reshape(*routes.topk_ids.shape, -1)
    operands = by_choice.astype(jnp.float32), routes.topk_weights
    output = jnp.einsum("bskh,bsk->bsh", *operands, precision="highest")
    nothing = jnp.int32(0)
    report = MoEReport(
        balance_loss=balance_loss(routes.scores, routes.topk_ids, axis_name=ALL),
        z_loss=z_loss(logits, axis_name=ALL),
        expert_load=expert_load(routes.topk_ids, n_experts, ALL),
        n_limited=nothing,
        n_dropped=nothing,
        topk_ids=routes.topk_ids,
        n_unserved=nothing,
    )
    return output.astype(tokens.dtype), report
