"""What is compared: the package on a transport, and the baselines, in one interface.

All programs are built from `dispatch` and `combine`, in the same way for all, inside
`jax.shard_map`.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh

import jax_ep
from baselines import BASELINES
from baselines.grouping import Shapes
from case import Case

AXIS = "ep"

# The package with `topk_weights` given to dispatch, and given to combine.
AT_DISPATCH, AT_COMBINE = "jax_ep, weights at dispatch", "jax_ep, weights at combine"
OURS = (AT_DISPATCH, AT_COMBINE)
# The package's transport in plain `jax.lax`, simple before fast.
XLA = "jax_ep on xla"


@dataclasses.dataclass(frozen=True)
class Implementation:
    """Two functions of one rank's arrays.

    Attributes:
        name: one of `OURS`, `XLA`, or in `BASELINES`.
        dispatch: of `(tokens, topk_ids, topk_weights)`; its result has the contract's
            fields.
        combine: of `(rows, dispatched, topk_weights)`.
        group: the package's; None for baselines.
    """

    name: str
    dispatch: Callable[..., Any]
    combine: Callable[..., jax.Array]
    group: jax_ep.EPGroup | None = None


def on_gpu(mesh: Mesh) -> bool:
    """Whether the mesh is of GPUs, real or only described to a compiler."""
    return mesh.devices.flat[0].platform != "cpu"


def make(name: str, mesh: Mesh, case: Case, transport: str) -> Implementation:
    """By name; `transport` serves `OURS`."""
    if name not in BASELINES:
        transport = "xla" if name == XLA else transport
        group = jax_ep.ep_init(mesh, AXIS, case.config(), transport=transport)
        return of_group(name, group)
    sizes = case.n_ranks, case.n_tokens, case.n_experts, case.top_k, case.n_rows
    shapes = Shapes(AXIS, *sizes, on_gpu=on_gpu(mesh))
    dispatch, combine = BASELINES[name]
    return Implementation(
        name,
        lambda tokens, ids, weights: dispatch(shapes, tokens, ids),
        functools.partial(combine, shapes),
    )


def of_group(name: str, group: jax_ep.EPGroup) -> Implementation:
    """The package's calls; weights go to dispatch if the name says so."""
    early = name == AT_DISPATCH
    return Implementation(
        name,
        lambda tokens, ids, weights: jax_ep.dispatch(
            group, tokens, ids, weights if early else None
        ),
        lambda rows, dispatched, weights: jax_ep.combine(
            group, rows, dispatched, None if early else weights
        ),
        group,
    )
