"""Connection: what a transport opens for a group. Results are bitwise equal on all transports."""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from jax_ep.exchange.operands import (
    CombineOperands,
    DispatchOperands,
    DispatchResults,
    Routing,
    empty_rows,
)
from jax_ep.exchange.overlap import CotangentSlots
from jax_ep.exchange.rounding import from_sum_dtype, to_sum_dtype
from jax_ep.geometry import Geometry
from jax_ep.processes.exchange import Exchange
from jax_ep.stats import RankStats


class Connection(abc.ABC):
    """Carries tokens between the ranks of a group, once `open` has been called.

    `dispatch` and `combine` are traced inside a `jax.shard_map` over the group's mesh. Their
    operands have been checked and routed; both are differentiable.
    """

    name: ClassVar[str]

    def __init__(self, geometry: Geometry) -> None:
        self.geometry = geometry

    @classmethod
    @abc.abstractmethod
    def unsupported_reason(cls, geometry: Geometry, exchange: Exchange) -> str | None:
        """Why the transport cannot serve the group, the same in all processes; None if it can."""

    def open(self, exchange: Exchange) -> None:  # noqa: B027
        """Sets up what calls need; by default nothing.

        With `geometry.memory_of`, in the memory of that group, which is open.
        """

    def close(self) -> None:  # noqa: B027
        """Frees what `open` set up."""

    def abandon(self) -> None:
        """Undoes `open` in an `ep_init` that fails; by default closes."""
        self.close()

    def check(self) -> None:  # noqa: B027
        """See `EPGroup.check`; by default calls raise by themselves."""

    def stats(self) -> list[RankStats]:
        """See `EPGroup.stats`."""
        raise NotImplementedError(f"Transport {self.name!r} keeps no totals.")

    def memory(self) -> int:
        """See `EPGroup.memory`."""
        return 0

    def dev_ptrs(self) -> np.ndarray:
        """See `EPGroup.dev_ptrs`."""
        return np.zeros((len(self.geometry.local_coordinates), 2, 3), np.uint64)

    @abc.abstractmethod
    def dispatch(self, operands: DispatchOperands) -> DispatchResults:
        """See `jax_ep.dispatch`."""

    @abc.abstractmethod
    def combine(self, operands: CombineOperands) -> jax.Array:
        """See `jax_ep.combine`."""

    def make_slots(self, operands: DispatchOperands) -> CotangentSlots | None:
        """Those of a dispatch whose backward is to overlap with work; None if it cannot."""
        return None

    def dispatch_with(
        self, operands: DispatchOperands, slots: CotangentSlots | None
    ) -> DispatchResults:
        """A dispatch; with slots, of `make_slots`, its backward is asynchronous."""
        assert slots is None
        return self.dispatch(operands)

    def start(self, operands: DispatchOperands | CombineOperands) -> Any:
        """Starts a dispatch or combine; by default it completes here."""
        if isinstance(operands, DispatchOperands):
            return Completed(self.dispatch(operands))
        return Completed(self.combine(operands))

    def finish(self, call: Any, operands: Any, after: Any) -> Any:
        """The result of a started call, for use once `after` is computed."""
        return call.result

    def all_gather(self, x: jax.Array) -> jax.Array:
        """`[R, ...]`, the `x` of all ranks, for what the library shares besides tokens.

        A transport whose calls are asynchronous on CPUs has an exchange of its own: XLA:CPU may
        start its collectives in different orders on different ranks (docs/sharp_bits.md).
        """
        return jax.lax.all_gather(x, self.geometry.axis_name)

    def all_to_all(self, x: jax.Array) -> jax.Array:
        """`[R, ...]` by destination to `[R, ...]` by source; otherwise like `all_gather`."""
        return jax.lax.all_to_all(x, self.geometry.axis_name, 0, 0)

    def send_along(self, values: jax.Array, routing: Routing) -> jax.Array:
        """See `jax_ep.redispatch`; the derivative is in gradients.py.

        By default, JAX transposes a combine.
        """
        operands = CombineOperands.unweighted(self.geometry, empty_rows(values, routing), routing)

        def combine(rows: jax.Array) -> jax.Array:
            return self.combine(dataclasses.replace(operands, expert_out=rows))

        _, pull = jax.vjp(combine, operands.expert_out)
        return pull(values)[0]

    def pull_back(self, rows: jax.Array, routing: Routing) -> jax.Array:
        """`[T, H]`: the plain sum of each token's rows, in the rows' dtype."""
        terms = to_sum_dtype(rows)
        slices = jnp.split(terms, self.n_slices(terms), axis=1)
        sums = [self.combine(CombineOperands(x, routing)) for x in slices]
        return from_sum_dtype(jnp.concatenate(sums, axis=1), rows.dtype)[: routing.n_tokens]

    def n_slices(self, rows: jax.Array) -> int:
        """Number of combines for rows longer than the experts', as cotangents may be."""
        return 1


def platform_problem(geometry: Geometry, wanted: str, shown: str) -> str | None:
    """Why a transport for one platform cannot serve the mesh; None if it can."""
    found = sorted({device.platform for device in geometry.mesh.devices.flat})
    fits = found == [wanted]
    return None if fits else f"it serves {shown} devices; the mesh has {', '.join(found)}."


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Completed:
    """A call that was complete when it was started."""

    result: Any

    def then(self, x: Any) -> Any:
        """See `InFlight.then`."""
        return x

    def run(self, work: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """See `InFlight.overlap`."""
        return work(*args)
