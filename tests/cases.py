"""Named cases, shared by the tests and the benchmarks: a shape, a routing, a mode.

Cases that differ in `routing` alone share one compiled program.
"""

from __future__ import annotations

import dataclasses

import routing


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """Everything that a test needs to build inputs and an `EPConfig`."""

    n_ranks: int
    n_experts: int
    top_k: int
    hidden_size: int = 64
    max_tokens: int = 16  # M
    n_tokens: int | None = None  # T; None = M
    token_dtype: str = "bfloat16"  # of BF16(), else of Plain(dtype)
    token_format: str = "plain"  # or the name of one that quantises
    scales_layout: str | None = None  # None: the format's own
    input_scale: float | None = None
    combine_dtype: str = "bfloat16"
    routing: str = "uniform"
    recv_capacity: int | None = None
    weights: str = "source"  # "none", "source" (to combine), "row" (to dispatch)
    fused_shared_expert: bool = False
    skip_a2a: bool = False
    slow: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if self.n_tokens is None:
            object.__setattr__(self, "n_tokens", self.max_tokens)

    @property
    def name(self) -> str:
        """Names the case in test ids and benchmark tables."""
        capacity = f"c{self.recv_capacity}" if self.recv_capacity else ""
        parts = (
            f"r{self.n_ranks}e{self.n_experts}k{self.top_k}h{self.hidden_size}",
            f"t{self.n_tokens}of{self.max_tokens}{capacity}",
            *([] if self.token_format == "plain" else [self.format_name]),
            f"{self.token_dtype}_{self.combine_dtype}",
            self.weights,
            *(["shared"] if self.fused_shared_expert else []),
            *(["skip_a2a"] if self.skip_a2a else []),
            self.routing,
        )
        return "-".join(parts)

    @property
    def flags(self) -> dict[str, bool]:
        """Gives the switches that the oracle takes, too."""
        names = ("fused_shared_expert", "skip_a2a")
        return {name: getattr(self, name) for name in names}

    @property
    def format_name(self) -> str:
        """Names the token format with everything that was chosen of it."""
        chosen = (self.token_format, self.scales_layout, self.input_scale)
        return "_".join(str(each) for each in chosen if each is not None)

    def but(self, **changes) -> Case:
        """Gives the case with some fields changed; a new M brings T = M with it."""
        if "max_tokens" in changes:
            changes = {"n_tokens": None} | changes
        return dataclasses.replace(self, **changes)


def every_routing(case: Case) -> list[Case]:
    """Gives the case under every routing; one program serves all of them."""
    return [case.but(routing=name, seed=case.seed + 1) for name in routing.ROUTINGS]


# One small shape for each number of ranks, in every weights mode. K > 1 and L > 1
# wherever the ranks allow it; 32 ranks have L = 1.
SMALL = {
    1: Case(n_ranks=1, n_experts=4, top_k=2, hidden_size=64, max_tokens=16),
    2: Case(n_ranks=2, n_experts=8, top_k=3, hidden_size=64, max_tokens=16),
    4: Case(n_ranks=4, n_experts=16, top_k=4, hidden_size=128, max_tokens=24),
    8: Case(n_ranks=8, n_experts=16, top_k=4, hidden_size=128, max_tokens=16),
    32: Case(n_ranks=32, n_experts=32, top_k=4, hidden_size=64, max_tokens=8),
}

# Number formats: what travels, and what comes back.
FORMATS = [
    SMALL[4].but(token_dtype=token, combine_dtype=out, weights=weights)
    for token, out, weights in (
        ("bfloat16", "float32", "source"),
        ("bfloat16", "float32", "row"),
        ("float32", "float32", "source"),
        ("float32", "bfloat16", "row"),
        ("float16", "bfloat16", "source"),
        ("float16", "float32", "none"),
    )
]

# The corners of each parameter.
ODD = [
    Case(n_ranks=4, n_experts=16, top_k=1, hidden_size=64, weights="row"),  # K = 1
    Case(n_ranks=4, n_experts=32, top_k=16, hidden_size=64, max_tokens=8),  # K = 16
    Case(n_ranks=4, n_experts=32, top_k=16, max_tokens=8, weights="row"),
    Case(n_ranks=8, n_experts=8, top_k=4, max_tokens=8),  # E = R: L = 1
    Case(n_ranks=8, n_experts=8, top_k=4, max_tokens=8, weights="row"),
    Case(n_ranks=2, n_experts=2, top_k=2, max_tokens=8),  # K = E
    Case(n_ranks=1, n_experts=1, top_k=1, max_tokens=8),  # one of everything
    Case(n_ranks=2, n_experts=6, top_k=3, hidden_size=8192, max_tokens=4),
    Case(n_ranks=2, n_experts=6, top_k=5, hidden_size=576, max_tokens=3),
    *(
        Case(n_ranks=4, n_experts=8, top_k=2, n_tokens=t, max_tokens=16, weights=mode)
        for t, mode in ((0, "source"), (0, "row"), (1, "source"), (15, "source"))
    ),
]

# Fewer rows than arrive: the end of the order is dropped.
CAPACITY = [
    SMALL[4].but(recv_capacity=rows, weights=weights)
    for rows, weights in ((1, "source"), (60, "source"), (60, "row"), (60, "none"))
]

# A shared expert, the same tokens on all ranks, and both.
FLAGS = {
    "shared": {"fused_shared_expert": True},
    "skip_a2a": {"skip_a2a": True},
    "both": {"fused_shared_expert": True, "skip_a2a": True},
}
FLAGS_SMALL = [
    SMALL[4].but(weights=weights, **FLAGS[name])
    for name, weights in (
        ("shared", "source"),
        ("skip_a2a", "row"),
        ("both", "none"),
        ("both", "source"),
        ("both", "row"),
    )
]
FLAGS_ODD = [
    case.but(**FLAGS[name])
    for name, case in (
        # A share of 4, 4, 4 and 3 tokens; of one token or none; no tokens at all.
        (
            "both",
            Case(n_ranks=4, n_experts=8, top_k=2, n_tokens=15, combine_dtype="float32"),
        ),
        ("both", Case(n_ranks=4, n_experts=8, top_k=2, n_tokens=1, weights="row")),
        ("both", Case(n_ranks=4, n_experts=8, top_k=2, n_tokens=0)),
        ("shared", Case(n_ranks=4, n_experts=8, top_k=2, n_tokens=0, weights="row")),
        ("shared", Case(n_ranks=8, n_experts=8, top_k=1, token_dtype="float32")),
        ("both", Case(n_ranks=1, n_experts=1, top_k=1, max_tokens=8, weights="none")),
        # Fewer rows than the shared expert's; some of the others.
        ("shared", SMALL[4].but(recv_capacity=4, weights="row")),
        ("shared", SMALL[4].but(recv_capacity=29)),
        ("both", SMALL[4].but(recv_capacity=4)),
    )
]
# Groups padded to multiples of 4 rows; atoms; a row for each scale.
FLAGS_QUANTISED = [
    SMALL[2].but(token_format=token_format, hidden_size=128, **changes, **FLAGS[name])
    for name, token_format, changes in (
        ("shared", "blockwise_fp8", {"n_tokens": 14, "weights": "row"}),
        ("both", "blockwise_fp8", {"n_tokens": 13, "recv_capacity": 24}),
        ("shared", "mxfp8", {"n_tokens": 9, "weights": "none"}),
        ("both", "mxfp4", {"token_dtype": "float32", "scales_layout": "row_major"}),
        ("shared", "nvfp4", {"input_scale": 0.3, "recv_capacity": 12}),
    )
]

# The shapes that the seed's tests use; E is at most 256. `recv_capacity` keeps twice
# the mean number of rows, so that a CPU holds all ranks in its memory.
SEED = [
    Case(
        n_ranks=n_ranks,
        n_experts=n_ranks * n_local,
        top_k=8,
        hidden_size=hidden_size,
        max_tokens=n_tokens,
        recv_capacity=16 * n_tokens,
        weights=weights,
        slow=(n_ranks, n_local, n_tokens, hidden_size) != (4, 32, 64, 3584),
    )
    for n_ranks, n_local in ((2, 32), (2, 64), (4, 32), (4, 64), (8, 32))
    for n_tokens, hidden_size in ((64, 3584), (128, 7168))
    for weights in ("source", "row")
]

# Formats that quantise. A hidden size with a scale left over in the last atom: 7, or
# 14, scales; one block of FP8 in the small shape.
_QUANTISED = ("blockwise_fp8", "mxfp8", "mxfp4", "nvfp4")
QUANTISED_SMALL = {
    name: SMALL[4].but(token_format=name, hidden_size=256, max_tokens=12)
    for name in _QUANTISED
}
QUANTISED_ODD = [
    *(
        QUANTISED_SMALL[name].but(scales_layout="row_major", weights=weights)
        for name, weights in zip(_QUANTISED, ("row", "none") * 2, strict=True)
    ),
    *(
        QUANTISED_SMALL[name].but(
            token_dtype="float32", hidden_size=size, weights="row"
        )
        for name, size in zip(_QUANTISED, (384, 224, 224, 112), strict=True)
    ),
    QUANTISED_SMALL["nvfp4"].but(token_dtype="float32", hidden_size=224),
    QUANTISED_SMALL["nvfp4"].but(input_scale=0.3),
    # Groups of more than 128 rows, and of none.
    *(
        Case(
            n_ranks=2,
            n_experts=4,
            top_k=2,
            max_tokens=100,
            hidden_size=128,
            token_format=name,
            weights="none",
        )
        for name in _QUANTISED
    ),
    *(
        QUANTISED_SMALL[name].but(n_tokens=t, max_tokens=12)
        for name, t in (("nvfp4", 0), ("blockwise_fp8", 1))
    ),
    *(
        QUANTISED_SMALL[name].but(recv_capacity=rows, weights="row")
        for name in ("blockwise_fp8", "nvfp4")
        for rows in (4, 32)
    ),
]
QUANTISED_SEED = [
    Case(
        n_ranks=n_ranks,
        n_experts=n_ranks * n_local,
        top_k=8,
        hidden_size=7168,
        max_tokens=n_tokens,
        recv_capacity=16 * n_tokens,
        token_format=name,
        weights="none",
        slow=(n_ranks, n_local) != (2, 32),
    )
    for n_ranks, n_local, n_tokens in ((2, 32, 16), (4, 64, 64), (8, 32, 128))
    for name in _QUANTISED
]
