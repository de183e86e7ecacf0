"""MoEReport: what a layer reports besides its output, and what a logger takes of it."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.tree_util import SequenceKey, register_pytree_with_keys


class MoEReport(NamedTuple):
    """What a layer reports besides its output.

    Attributes:
        balance_loss: `float32[]`, see `jax_ep.router.balance_loss`.
        z_loss: `float32[]`, see `jax_ep.router.z_loss`.
        expert_load: `int32[E]`, how often each expert was chosen, over all tokens of the mesh.
        n_limited: `int32[]`, choices beyond `capacity_factor`, over all tokens of the mesh.
        n_dropped: `int32[]`, rows that did not fit into `recv_capacity`, over all ranks.
        topk_ids: `int32[..., K]`, the choices of each token; -1 where the mask is False.
        n_unserved: `int32[]`, choices whose expert has copies on masked ranks only
            (`ExpertPlacement.mask_ranks`), over all tokens of the mesh.

    Losses, load and `topk_ids` are the router's: they include choices that are dropped afterwards.
    """

    balance_loss: jax.Array
    z_loss: jax.Array
    expert_load: jax.Array
    n_limited: jax.Array
    n_dropped: jax.Array
    topk_ids: jax.Array
    n_unserved: jax.Array

    def scalars(self) -> dict[str, jax.Array]:
        """What to log of a step, for any logger: names to arrays of shape `[]`.

        `balance_loss`, `z_loss`, `n_limited`, `n_dropped`, `n_unserved`, and as `float32[]`

        * `load_max_over_mean`: the load of the busiest expert over the mean, 1 to E;
        * `load_entropy`: of the experts' shares of the load, over log(E): 1 if all have the same
          load, 0 if one has all.

        Without tokens, both are 0. Reports of stacked layers give one entry per layer, such as
        `layer_0/z_loss`. Inside `jax.jit` or not; inside, it adds no transfer to the step.
        """
        load = self.expert_load.astype(jnp.float32)
        n_experts = load.shape[-1]
        shares = load / jnp.maximum(load.sum(axis=-1, keepdims=True), 1)
        entropy = jax.scipy.special.entr(shares).sum(axis=-1) / math.log(max(n_experts, 2))
        values = {
            "load_max_over_mean": n_experts * shares.max(axis=-1),
            "load_entropy": entropy if n_experts > 1 else shares.sum(axis=-1),
        }
        for name in ("balance_loss", "z_loss", "n_limited", "n_dropped", "n_unserved"):
            values[name] = getattr(self, name)
        return {
            _layer(index) + name: value[index]
            for index in np.ndindex(load.shape[:-1])
            for name, value in values.items()
        }

    def __repr__(self) -> str:
        """Numbers where they are known, other arrays by dtype and shape."""
        fields = [f"{name}={_brief(x)}" for name, x in zip(self._fields, self, strict=True)]
        return f"MoEReport({', '.join(fields)})"


def sow_losses(layer: nnx.Module, report: MoEReport) -> None:
    """Hands the losses to `nnx.capture`; outside of it, Flax would keep them in the layer."""
    if hasattr(layer, "__captures__"):
        for name in ("balance_loss", "z_loss"):
            layer.sow(nnx.Intermediate, name, getattr(report, name))


def _layer(index: tuple[int, ...]) -> str:
    return f"layer_{'_'.join(map(str, index))}/" if index else ""


def _brief(x: Any) -> str:
    if not (hasattr(x, "shape") and hasattr(x, "dtype")):
        return repr(x)
    is_known = isinstance(x, jax.Array | np.ndarray) and not isinstance(x, jax.core.Tracer)
    if is_known and x.shape == ():
        return f"{x.item():.4g}"
    return f"{x.dtype}[{','.join(map(str, x.shape))}]"


class _Field(SequenceKey):
    """The key of a field in paths: the position, as `nnx.tabulate` needs, printed as the name."""

    def __str__(self) -> str:
        return f".{MoEReport._fields[self.idx]}"


register_pytree_with_keys(
    MoEReport,
    lambda report: ([(_Field(i), x) for i, x in enumerate(report)], None),
    lambda _, children: MoEReport(*children),
    lambda report: (tuple(report), None),
)
