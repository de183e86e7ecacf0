"""What is compared: one interface to the package, on each transport, and to the baselines.

Programs are built from `dispatch` and `combine` in the same way for all implementations, inside
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

# The package, with `topk_weights` given to dispatch or to combine.
AT_DISPATCH, AT_COMBINE = "jax_ep, weights at dispatch", "jax_ep, weights at combine"
OURS = (AT_DISPATCH, AT_COMBINE)
# The package on transport `xla`, which is the reference and written to be simple, not fast.
XLA = "jax_ep on xla"
# The package's exchange around tokamax's grouped matmuls.
TOKAMAX = "jax_ep, tokamax"


@dataclasses.dataclass(frozen=True)
class Implementation:
    """Dispatch and combine, as functions of one rank's arrays.

    Attributes:
        name: in `OURS` or `BASELINES`, or `XLA`.
        dispatch: takes `(tokens, topk_ids, topk_weights)`; its result has the fields of the
            contract.
        combine: takes `(rows, dispatched, topk_weights)`.
        group: the package's group; None for baselines.
    """

    name: str
    dispatch: Callable[..., Any]
    combine: Callable[..., jax.Array]
    group: jax_ep.EPGroup | None = None


def on_gpu(mesh: Mesh) -> bool:
    """Whether the mesh has GPUs, real ones or those of a compile-only topology."""
    return mesh.devices.flat[0].platform != "cpu"


def make(name: str, mesh: Mesh, case: Case, transport: str) -> Implementation:
    """Returns the implementation with that name; those in `OURS` use `transport`."""
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
    """Returns the package's calls on `group`; `name` says which of them gets the weights."""
    at_dispatch = name in (AT_DISPATCH, TOKAMAX)
    return Implementation(
        name,
        lambda tokens, ids, weights: jax_ep.dispatch(
            group, tokens, ids, weights if at_dispatch else None
        ),
        lambda rows, dispatched, weights: jax_ep.combine(
            group, rows, dispatched, None if at_dispatch else weights
        ),
        group,
    )
