"""Layers for Flax NNX; needs the extra `nnx`: pip install 'jax_ep[nnx]'."""

try:
    import flax.nnx as _flax_nnx
except ImportError as error:
    raise ImportError("jax_ep.nnx needs flax: pip install 'jax_ep[nnx]'.") from error
else:
    del _flax_nnx

from jax_ep.nnx.moe import MoE
from jax_ep.nnx.report import MoEReport
from jax_ep.nnx.state import ExpertCodes, Placement, PlacementTable, RouterBias

__all__ = ["ExpertCodes", "MoE", "MoEReport", "Placement", "PlacementTable", "RouterBias"]
