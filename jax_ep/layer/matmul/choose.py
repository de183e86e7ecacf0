"""Which implementation runs: the first row of a table that applies (docs/experts.md).

This is chosen as a program is lowered, from static sizes and the kernels that the GPUs run;
`is_gated` says while tracing which primitive is bound. The GPU itself chooses tiles, since only it
knows how many rows the groups have.
"""

import dataclasses
import enum
import functools
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_ep.ffi import extension
from jax_ep.layer.quantize_weights import SCALE_BLOCK

_MAX_GROUPS = 512  # that a kernel which does more than multiply takes: kMaxTiledGroups in C++

_HALVES = (jnp.bfloat16, jnp.float16)


class Operation(enum.Enum):
    """What is computed."""

    MULTIPLY = "a grouped matmul"
    ACTIVATE = "the first matmul of experts, with a bias, and the activation"
    DIFFERENTIATE = "the gradient of the second matmul's rows, and of the activation"
    QUANTIZE = "rows as codes along rows, along columns, or both"
    MULTIPLY_COLUMNS = "the gradient of weights, by codes along columns"


class Implementation(enum.Enum):
    """How it is computed."""

    KERNEL = "one custom call"
    TILES = "loops over tiles of rows, in JAX"
    RAGGED_DOT = "jax.lax.ragged_dot"
    SEPARATE = "a grouped matmul, then other calls"
    BLOCKS = "operations on blocks of rows, in JAX"


class Kernels(enum.IntEnum):
    """The newest kernels of the extension that the GPUs run."""

    NONE = 0
    AMPERE = 8  # for compute capability 8.0 and newer
    HOPPER = 9  # for 9.0 alone


@dataclasses.dataclass(frozen=True)
class Work:
    """An operation, and what choices depend on. Sizes of its matmul are named as in C++."""

    operation: Operation
    n_rows: Any  # an int, unless `jax.export` leaves it open
    n_groups: int
    k: int
    n: int
    dtype: np.dtype  # of the operands
    out_dtype: np.dtype  # of the matmul's result
    is_scaled: bool = False  # whether operands are codes with scales
    has_bias: bool = False
    keeps_hidden: bool = False  # whether what is activated is a result, too

    @property
    def n_weights(self) -> int:
        """The numbers in the matrices of all groups."""
        return self.n_groups * self.k * self.n

    def has_rows(self, per_group: int) -> bool:
        """Whether there is capacity for so many rows per group; an open number is not enough."""
        return isinstance(self.n_rows, int) and self.n_rows >= per_group * self.n_groups


def _multiplies(work: Work) -> bool:
    """Of bfloat16 or float16, in units of 16 bytes."""
    is_half = work.dtype in _HALVES and work.out_dtype in (work.dtype, np.dtype(np.float32))
    return is_half and not work.is_scaled and work.k % 8 == work.n % 8 == 0


def _multiplies_scaled(work: Work) -> bool:
    is_bfloat16 = work.out_dtype == jnp.bfloat16
    return work.is_scaled and is_bfloat16 and work.k % SCALE_BLOCK == work.n % 8 == 0


def _activates(work: Work) -> bool:
    """With a bias, always: XLA would need a pass over the rows. What is smaller was not measured.

    If hidden rows are kept, with large k and few rows, two kernels are faster: what `fused_silu`
    reads is little.
    """
    if not _multiplies(work) or work.n % 16 or work.n_groups > _MAX_GROUPS:
        return False
    is_large = work.k >= 1024 and work.n_weights >= 50_000_000
    return work.has_bias or (
        is_large and (not work.keeps_hidden or work.k < 4096 or work.has_rows(128))
    )


def _activates_scaled(work: Work) -> bool:
    is_large = work.k >= 4096 or work.has_rows(64)
    return _multiplies_scaled(work) and work.n_groups <= _MAX_GROUPS and is_large


def _differentiates(work: Work) -> bool:
    """The warps that differentiate take as long as some thousand terms, which then hide them.

    With few rows, tiles of other sizes, in two kernels, are faster.
    """
    is_large = work.k >= 4096 and work.n_weights >= 100_000_000 and work.has_rows(1024)
    return _multiplies(work) and work.n_groups <= _MAX_GROUPS and is_large


def _quantizes(work: Work) -> bool:
    """A block of the kernel has 128 columns."""
    return work.n % SCALE_BLOCK == 0


def _multiplies_columns(work: Work) -> bool:
    """In units of 16 bytes of the result."""
    return work.k % 8 == work.n % 8 == 0 and work.out_dtype in (jnp.bfloat16, jnp.float32)


class _Row(NamedTuple):
    operation: Operation
    implementation: Implementation
    platform: str | None = None  # None: any
    kernels: Kernels = Kernels.NONE  # that the GPUs must run at least
    applies: Callable[[Work], bool] = lambda work: True


_TABLE = (
    _Row(Operation.MULTIPLY, Implementation.KERNEL, "cuda", Kernels.AMPERE, _multiplies),
    _Row(Operation.MULTIPLY, Implementation.KERNEL, "cuda", Kernels.HOPPER, _multiplies_scaled),
    _Row(Operation.MULTIPLY, Implementation.TILES, "cpu"),
    _Row(Operation.MULTIPLY, Implementation.RAGGED_DOT),
    _Row(Operation.ACTIVATE, Implementation.KERNEL, "cuda", Kernels.HOPPER, _activates),
    _Row(Operation.ACTIVATE, Implementation.KERNEL, "cuda", Kernels.HOPPER, _activates_scaled),
    _Row(Operation.ACTIVATE, Implementation.SEPARATE),
    _Row(Operation.DIFFERENTIATE, Implementation.KERNEL, "cuda", Kernels.HOPPER, _differentiates),
    _Row(Operation.DIFFERENTIATE, Implementation.SEPARATE),
    _Row(Operation.QUANTIZE, Implementation.KERNEL, "cuda", Kernels.HOPPER, _quantizes),
    _Row(Operation.QUANTIZE, Implementation.BLOCKS),
    _Row(
        *(Operation.MULTIPLY_COLUMNS, Implementation.KERNEL, "cuda"),
        *(Kernels.HOPPER, _multiplies_columns),
    ),
    _Row(Operation.MULTIPLY_COLUMNS, Implementation.BLOCKS),
)


def is_gated(rows: jax.Array, gate_up: jax.Array, transposed: bool) -> bool:
    """Whether `Operation.ACTIVATE` takes these arrays, `[C, H]` and `[L, H, 2 F]`, as traced."""
    is_empty = 0 in (*rows.shape, *gate_up.shape)
    return rows.dtype == jnp.bfloat16 and not transposed and not is_empty


def choose(work: Work, platform: str) -> Implementation:
    """The first implementation that applies."""
    return next(
        row.implementation
        for row in _TABLE
        if row.operation == work.operation
        and row.platform in (platform, None)
        and row.applies(work)
        and (row.kernels == Kernels.NONE or kernels() >= row.kernels)
    )


@functools.cache
def kernels() -> Kernels:
    """Those of this process. If they are missing where a GPU would run them, warns once."""
    try:
        extension.register_cuda()
        targets = extension.load_cuda().targets()
        if "jax_ep_grouped_matmul" in targets:
            capability = _compute_capability()
            if capability == Kernels.HOPPER and "jax_ep_gated_matmul" in targets:
                return Kernels.HOPPER
            return Kernels.AMPERE if capability >= Kernels.AMPERE else Kernels.NONE
        why = (
            "the CUDA extension was built without CUTLASS. Install nvidia-cutlass where jax_ep is "
            "built, and build it again"
        )
    except ImportError as error:
        why = extension.why_missing("_ffi_cuda", error)
    warnings.warn(
        f"grouped_matmul: {why.rstrip('.')}. Meanwhile it uses jax.lax.ragged_dot, which is many "
        "times slower on GPUs.",
        stacklevel=2,
    )
    return Kernels.NONE


def _compute_capability() -> int:
    """The major one of the GPUs; Hopper's where there are none, when lowering for others."""
    try:
        device = jax.local_devices(backend="cuda")[0]
    except RuntimeError:
        return Kernels.HOPPER
    return int(device.compute_capability.split(".")[0])
