"""EPConfig: every static parameter of an expert-parallel group, checked once."""

import dataclasses
import math
import operator
import re
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jax_ep.formats import BF16, TokenFormat
from jax_ep.formats.base import CheckedDataclass, check_is_format
from jax_ep.formats.plain import FLOATS, as_dtype, sum_dtype

_ROW_ALIGNMENTS = (1, 4, 16, 32, 64, 128, 256)
_INT32_MAX = 2**31 - 1
_MAX_TIMEOUT_S = 1e6
# With `expert_copies`, a rank may take 1/32 more rows than the mean, as what uniform routing varies
# by is not worth an expert's weights; and there is room for 1/8 more, should copies not suffice.
SLACK, _ROOM = 32, 8
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,31}")


class RoutedSizes(NamedTuple):
    """The sizes that transports route by; jax_ep/exchange/routing.py makes ids to match.

    Within nodes, ranks exchange tokens with those of their node, and each brings the tokens of the
    ranks of its index on all nodes. The rows of each expert are then a group per node that tokens
    come from, in node order; such groups are padded as one.
    """

    n_ranks: int  # that exchange tokens: R; those of a node; or 1 with skip_a2a
    n_ranks_per_node: int  # rank r is on node r // n_ranks_per_node
    n_source_nodes: int  # nodes that the tokens that a rank brings are from; else 1
    # Groups of rows on a rank: L, plus one for a shared expert, plus B; times n_source_nodes.
    n_local_groups: int
    n_choices: int  # of a token (N): K, plus one for a shared expert

    @property
    def n_groups(self) -> int:
        """Groups of rows over all ranks that exchange tokens (G)."""
        return self.n_ranks * self.n_local_groups

    @property
    def n_padded_groups(self) -> int:
        """Groups of rows on a rank that are padded, and have scales, of their own."""
        return self.n_local_groups // self.n_source_nodes

    @property
    def n_nodes(self) -> int:
        """Nodes that these ranks are on: 1 with `skip_a2a`."""
        return self.n_ranks // self.n_ranks_per_node


@dataclasses.dataclass(frozen=True, kw_only=True)
class EPConfig(CheckedDataclass):
    """Static parameters of dispatch and combine; frozen and hashable.

    Attributes:
        n_experts: experts over all ranks (E). Global expert `g` lives on rank `g // L` as local
            expert `g % L`, L = E / R.
        top_k: experts per token (K), at most E; a shared expert comes on top.
        hidden_size: elements per token (H).
        max_tokens_per_rank: upper bound on the tokens that a rank dispatches in one call (M).
        token_format: what travels per token.
        combine_dtype: dtype of `expert_out` and of the result of `combine`: bfloat16, float16 or
            float32. The ranks' sums of a token, and those of nodes, travel in `sum_dtype`. A total
            beyond float16's range, 65504, is infinite.
        fused_shared_expert: every rank also has a shared expert that processes all of the rank's
            own tokens. They form the first group in the output of dispatch, in order and in the
            token format. combine casts the weighted sum to `combine_dtype`, adds the shared
            expert's row unweighted, and casts again.
        skip_a2a: all ranks hold the same tokens, as after tensor-parallel attention, so nothing
            travels. dispatch selects the rows for this rank's experts; combine returns their
            contribution to each token, in `combine_dtype`, and the caller sums over ranks with
            `jax.lax.psum`. The shared expert's tokens are split over the ranks.
        row_alignment: each group of rows starts at a multiple of this many rows: 1, 4, 16, 32, 64,
            128 or 256, for grouped matmuls that want such groups. A format may need more
            (`group_alignment`, of which `recv_capacity` must be a multiple). Groups are padded as
            `Dispatched` says.
        zero_unused_rows: rows that are not in use hold zeros in all arrays of `Dispatched` that
            have rows (-1 in `src_info`), and in the gradient of `expert_out`. Otherwise they are
            unspecified. Needed by experts that reduce over all rows, or that have gradients and
            mask nothing. Costs a pass over all C rows in dispatch, and one in the backward of
            combine.
        recv_capacity: rows of the output of dispatch (C). Rows beyond it are dropped and counted.
            None, and any larger number, stands for the worst case: `M * R * min(K, L)` (with
            `skip_a2a`: `M * min(K, L)`), plus M for a shared expert (with `skip_a2a`:
            `ceil(M / R)`), plus the padding of groups. If K <= L, no routing needs more. If K > L,
            no routing does in which each token names an expert at most once; a token that repeats
            experts may have up to K rows on a rank, so with such tokens, rows may be dropped. With
            `expert_copies`, None stands for balanced ranks: `M * K`, or with n nodes
            `n * M * min(K, E / n)`, and 1/8 more, in place of `M * R * min(K, L)`.
        on_drop: `"count"`: rows beyond `recv_capacity` are dropped and counted. `"raise"`: a
            dispatch that drops a row on any device of the mesh fails on all of them, with an error
            that says how many and where; nothing after it runs. For tests, and to find a
            sufficient `recv_capacity`: costs an all-gather of one number per device in each
            dispatch, and is a callback of Python, which `jax.export` does not take.
        expert_copies: the most experts of other ranks that a rank takes rows of in one call (B). If
            not 0, each dispatch balances the ranks of a node: those that would get over 1/32 more
            rows than the mean lend their largest experts, for this call, to those that would get
            fewer (docs/balance.md). What exceeds these copies stays at home, and is dropped and
            counted beyond `recv_capacity`; L + R copies always suffice. Not with `skip_a2a`.
        n_gpus_per_node: ranks that reach each other by loads and stores: rank r is on node
            `r // n_gpus_per_node`. None: all ranks divided by `n_nodes`.
        n_nodes: number of nodes. None: all ranks divided by `n_gpus_per_node`, or one; for `p2p` on
            several hosts, `ep_init` takes the hosts that each replica is on. If there are several,
            combine rounds the sum of each, on every transport and also where all ranks are on one
            host. Where a replica is on several hosts (`p2p`) or in several processes (`host`), the
            transport serves each node by itself, and XLA's collectives connect them
            (docs/concepts.md#several-nodes).
        n_sms: streaming multiprocessors that a call may use on a GPU. None: all of them, or 24 for
            asynchronous calls (docs/overlap.md). The inter-node exchange of `nvshmem` takes up
            to 64, whatever this says.
        timeout_s: how long a rank waits for another in one call, in seconds; at most 1e6.
        name: of the group, such as `"decode"`, for its errors: at most 32 letters, digits and
            underscores, no digit first. Groups of different names are different groups: they share
            no buffers, unless by `memory_of`.

    Raises:
        ValueError: a value has the wrong type or is out of range. At construction, and when a
            pickle is loaded.
    """

    n_experts: int
    top_k: int
    hidden_size: int
    max_tokens_per_rank: int
    token_format: TokenFormat = dataclasses.field(default_factory=BF16)
    combine_dtype: Any = jnp.bfloat16
    fused_shared_expert: bool = False
    skip_a2a: bool = False
    row_alignment: int = 1
    zero_unused_rows: bool = False
    recv_capacity: int | None = None
    on_drop: str = "count"
    expert_copies: int = 0
    n_gpus_per_node: int | None = None
    n_nodes: int | None = None
    n_sms: int | None = None
    timeout_s: float = 60.0
    name: str | None = None

    def __post_init__(self) -> None:
        for name in ("n_experts", "top_k", "hidden_size", "max_tokens_per_rank"):
            self._set(name, check_count(name, getattr(self, name)))
        if self.top_k > self.n_experts:
            raise ValueError(
                f"top_k must be at most n_experts; got top_k={self.top_k}, "
                f"n_experts={self.n_experts}."
            )
        self._set("expert_copies", check_count("expert_copies", self.expert_copies, least=0))
        for name in ("recv_capacity", "n_gpus_per_node", "n_nodes", "n_sms"):
            if getattr(self, name) is not None:
                self._set(name, check_count(name, getattr(self, name)))
        check_is_format(self.token_format)
        self.token_format.check_hidden_size(self.hidden_size)
        self._check_alignment()
        dtype = as_dtype(self.combine_dtype)
        if dtype not in FLOATS:
            got = self.combine_dtype if dtype is None else dtype.name
            raise ValueError(f"combine_dtype must be bfloat16, float16 or float32; got {got}.")
        self._set("combine_dtype", dtype)
        self._set("timeout_s", _seconds("timeout_s", self.timeout_s))
        for name in ("fused_shared_expert", "skip_a2a", "zero_unused_rows"):
            if not isinstance(getattr(self, name), bool | np.bool_):
                raise ValueError(f"{name} must be True or False; got {getattr(self, name)!r}.")
            self._set(name, bool(getattr(self, name)))
        if self.skip_a2a and self.expert_copies:
            raise ValueError(
                "expert_copies must be 0 with skip_a2a, where no rows travel to be balanced; got "
                f"{self.expert_copies}."
            )
        self._set("on_drop", check_on_drop("on_drop", self.on_drop))
        self._set("name", _check_name(self.name))

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _check_alignment(self) -> None:
        self._set("row_alignment", check_count("row_alignment", self.row_alignment))
        if self.row_alignment not in _ROW_ALIGNMENTS:
            known = ", ".join(map(str, _ROW_ALIGNMENTS))
            raise ValueError(f"row_alignment must be one of {known}; got {self.row_alignment}.")
        alignment, needed = self.group_alignment, self.token_format.layout.row_alignment
        if self.recv_capacity is None or self.recv_capacity % alignment == 0:
            return
        cause = self.token_format.name if alignment == needed else f"row_alignment={alignment}"
        raise ValueError(
            f"recv_capacity must be a multiple of {alignment}, as {cause} pads each group of rows "
            f"to one; got {self.recv_capacity}."
        )

    @property
    def group_alignment(self) -> int:
        """Rows that groups begin at multiples of: `row_alignment`, or more if the format needs it.

        Both are powers of 2.
        """
        return max(self.row_alignment, self.token_format.layout.row_alignment)

    @property
    def sum_dtype(self) -> np.dtype:
        """The dtype that the ranks' sums of a token are rounded to, and travel in.

        `combine_dtype`; float32 if that is float16.
        """
        return sum_dtype(self.combine_dtype)

    def n_local_experts(self, n_ranks: int) -> int:
        """Experts per rank (L); raises ValueError if `n_experts` is not a multiple of `n_ranks`."""
        if self.n_experts % n_ranks:
            raise ValueError(
                f"n_experts must be a multiple of n_ranks; got n_experts={self.n_experts}, "
                f"n_ranks={n_ranks}."
            )
        return self.n_experts // n_ranks

    def nodes(self, n_ranks: int) -> tuple[int, int]:
        """`(n_gpus_per_node, n_nodes)`; raises ValueError if they do not partition the ranks."""
        given = {"n_gpus_per_node": self.n_gpus_per_node, "n_nodes": self.n_nodes}
        for name, value in given.items():
            if value is not None and n_ranks % value:
                raise ValueError(
                    f"{name} must divide the number of ranks; got {name}={value}, "
                    f"n_ranks={n_ranks}."
                )
        per_node = self.n_gpus_per_node or n_ranks // (self.n_nodes or 1)
        if per_node * (self.n_nodes or n_ranks // per_node) != n_ranks:
            raise ValueError(
                "n_gpus_per_node * n_nodes must be the number of ranks; got "
                f"n_gpus_per_node={self.n_gpus_per_node}, n_nodes={self.n_nodes}, "
                f"n_ranks={n_ranks}."
            )
        return per_node, n_ranks // per_node

    def routed(self, n_ranks: int, intra_node: bool = False) -> RoutedSizes:
        """The sizes that transports route by; ValueError if they do not fit in int32."""
        n_shared = int(self.fused_shared_expert)
        per_node, n_nodes = (1, 1) if self.skip_a2a else self.nodes(n_ranks)
        n_source_nodes = n_nodes if intra_node else 1
        sizes = RoutedSizes(
            n_ranks=1 if self.skip_a2a else per_node if intra_node else n_ranks,
            n_ranks_per_node=per_node,
            n_source_nodes=n_source_nodes,
            n_local_groups=(self.n_local_experts(n_ranks) + n_shared + self.expert_copies)
            * n_source_nodes,
            n_choices=self.top_k + n_shared,
        )
        if sizes.n_groups > _INT32_MAX:
            raise ValueError(
                "n_experts, plus a shared expert per rank, must fit in int32; got "
                f"n_experts={self.n_experts}, n_ranks={n_ranks}."
            )
        return sizes

    def max_recv_tokens(self, n_ranks: int) -> int:
        """Rows of the output of dispatch (C): `recv_capacity`, at most the worst case.

        Raises:
            ValueError: a size does not fit in 32 bits.
        """
        rows = self.worst_case_rows(n_ranks)
        if self.recv_capacity is not None:
            rows = min(rows, self.recv_capacity)
        elif self.expert_copies:
            rows = self._balanced_rows(n_ranks)
        n_choices = self.max_tokens_per_rank * self.routed(n_ranks).n_choices
        if max(rows, n_choices) > _INT32_MAX:
            raise ValueError(
                f"Row numbers must fit in int32; got max_recv_tokens={rows}, max_tokens_per_rank * "
                f"top_k={n_choices}. Set recv_capacity, or dispatch fewer tokens per call."
            )
        if self.expert_copies and self.max_choices(n_ranks) > _INT32_MAX:
            raise ValueError(
                "With expert_copies, the choices of all ranks must fit in int32; got "
                f"{self.max_choices(n_ranks)}. Dispatch fewer tokens per call."
            )
        return rows

    def max_choices(self, n_ranks: int) -> int:
        """The most choices of all ranks' tokens, `R * M * K`."""
        return n_ranks * self.max_tokens_per_rank * self.top_k

    def worst_case_rows(self, n_ranks: int) -> int:
        """The most rows of a rank if each token names an expert at most once."""
        n_tokens = self.max_tokens_per_rank * self.routed(n_ranks).n_ranks
        return self._all_rows(n_ranks, n_tokens * min(self.top_k, self.n_local_experts(n_ranks)))

    def _balanced_rows(self, n_ranks: int) -> int:
        """Room for a rank's share of its node's rows."""
        n_nodes = self.routed(n_ranks).n_nodes
        mean = self.max_tokens_per_rank * n_nodes * min(self.top_k, self.n_experts // n_nodes)
        return self._all_rows(n_ranks, mean + mean // _ROOM)

    def _all_rows(self, n_ranks: int, rows: int) -> int:
        """Rows of experts, with those of a shared expert and with padding."""
        n_groups = min(self.n_local_experts(n_ranks) + self.expert_copies, rows)
        if self.fused_shared_expert:
            rows += -(-self.max_tokens_per_rank // (n_ranks if self.skip_a2a else 1))
            n_groups += 1
        alignment = self.group_alignment
        rows += (alignment - 1) * n_groups
        return -(-rows // alignment) * alignment


def check_count(name: str, value: Any, *, least: int = 1) -> int:
    """The value as an int; raises ValueError unless it is from 1, or 0, to the largest int32."""
    try:
        if isinstance(value, bool):
            raise TypeError
        value = operator.index(value)
    except (TypeError, OverflowError):
        kind = "a positive integer" if least else "an integer, 0 or more"
        raise ValueError(f"{name} must be {kind}; got {value!r}.") from None
    if value < least:
        raise ValueError(f"{name} must be {'positive' if least else '0 or more'}; got {value}.")
    if value > _INT32_MAX:
        raise ValueError(f"{name} must fit in int32; got {value}.")
    return value


def check_on_drop(name: str, value: Any) -> str:
    """Requires what `EPConfig.on_drop` may be, and returns it as a plain str."""
    if isinstance(value, str) and value in ("count", "raise"):
        return str.__str__(value)
    raise ValueError(f'{name} must be "count" or "raise"; got {value!r}.')


def _seconds(name: str, value: Any) -> float:
    try:
        seconds = math.nan if isinstance(value, bool | str) else float(value)
    except (TypeError, ValueError, OverflowError):
        seconds = math.nan
    if math.isnan(seconds):
        raise ValueError(f"{name} must be a number of seconds; got {value!r}.")
    if not 0 < seconds <= _MAX_TIMEOUT_S:
        raise ValueError(
            f"{name} must be positive and at most {_MAX_TIMEOUT_S:.0f}; got {seconds}."
        )
    return seconds


def _check_name(name: Any) -> str | None:
    """The name as a plain str, so that equal names give equal keys."""
    if name is None:
        return None
    if isinstance(name, str) and _NAME.fullmatch(name):
        return str.__str__(name)
    raise ValueError(
        "name must be None or at most 32 letters, digits and underscores, no digit first; got "
        f"{name!r}."
    )
