"""The compared implementations: an interface to the package, per transport, and to the baselines.

Programs are built from `dispatch` and `combine` in the same way for all implementations, inside
`jax.shard_map`.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
from jax.sharding import Mesh

import jax_ep
from baselines import BASELINES
from baselines.grouping import Shapes
from case import Case
from jax_ep.group import select
from jax_ep.nodes.connection import NodesConnection

AXIS = "ep"

# The package, with `topk_weights` given to dispatch or to combine.
AT_DISPATCH, AT_COMBINE = "jax_ep, weights at dispatch", "jax_ep, weights at combine"
OURS = (AT_DISPATCH, AT_COMBINE)
# The package with every process as a node: all served at once; NVSHMEM, or XLA's collectives,
# between nodes that are each served by themselves. Weights are given to dispatch.
ONE_NODE, NVSHMEM, XLA_BETWEEN = "one node", "nvshmem", "XLA between nodes"
NODES = (ONE_NODE, NVSHMEM, XLA_BETWEEN)
# The package with ranks that it balances by copies of experts; and on `xla`, the reference for the
# other transports. Weights are given to dispatch.
BALANCED, REFERENCE = "jax_ep, balanced", "jax_ep on xla"


@dataclasses.dataclass(frozen=True)
class Implementation:
    """Dispatch and combine, as functions of one rank's arrays.

    Attributes:
        name: in `OURS`, `NODES` or `BASELINES`, or `BALANCED` or `REFERENCE`.
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
    """Returns the implementation with that name; ours use `transport`, unless they name another."""
    if name in BASELINES:
        sizes = case.n_ranks, case.n_tokens, case.n_experts, case.top_k, case.n_rows
        shapes = Shapes(AXIS, *sizes, on_gpu=on_gpu(mesh))
        dispatch, combine = (functools.partial(f, shapes) for f in BASELINES[name])
        return Implementation(name, lambda tokens, ids, _: dispatch(tokens, ids), combine)
    config = case.config()
    if name == BALANCED:
        config = dataclasses.replace(
            config, expert_copies=10 if case.n_experts > 128 else 6, recv_capacity=None
        )
    if name in (NVSHMEM, XLA_BETWEEN):
        n_nodes = len({device.process_index for device in mesh.devices.flat})
        config = dataclasses.replace(config, n_nodes=n_nodes)
    transports = select._FASTEST_FIRST
    if name == XLA_BETWEEN:  # serves each node by itself, even where all could be served at once
        transports = sorted(transports, key=lambda each: not issubclass(each, NodesConnection))
    transport = {NVSHMEM: "nvshmem", REFERENCE: "xla"}.get(name, transport)
    with mock.patch.object(select, "_FASTEST_FIRST", transports):
        group = jax_ep.ep_init(mesh, AXIS, config, transport)
    at_dispatch = name != AT_COMBINE
    return Implementation(
        name,
        lambda *operands: jax_ep.dispatch(group, *operands[: 3 if at_dispatch else 2]),
        lambda *operands: jax_ep.combine(group, *operands[: 2 if at_dispatch else 3]),
        group,
    )
