"""Named test cases: shapes, a routing, a format, and where weights are applied.

Cases that differ only in `routing` share one compiled program.
"""

import dataclasses
import os

import jax_ep.formats
import routing

# Nodes of cases that do not say, where they divide the ranks; see conftest.py.
N_NODES = int(os.environ.get("JAX_EP_TEST_N_NODES", "1"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A test case: tests build their inputs and their `EPConfig` from it."""

    n_ranks: int
    n_experts: int
    top_k: int
    hidden_size: int = 64
    max_tokens: int = 16  # M
    n_tokens: int | None = None  # T; None = M
    token_dtype: str = "bfloat16"  # bfloat16 means BF16(), other dtypes Plain(dtype)
    token_format: str = "plain"  # or the name of a quantized format
    scales_layout: str | None = None  # None = the format's default
    input_scale: float | None = None
    combine_dtype: str = "bfloat16"
    routing: str = "uniform"
    recv_capacity: int | None = None
    row_alignment: int = 1
    weights: str = "source"  # "none", "source" (given to combine), "row" (given to dispatch)
    n_nodes: int | None = None  # None = N_NODES, or 1
    fused_shared_expert: bool = False
    skip_a2a: bool = False
    expert_copies: int = 0
    slow: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if self.n_tokens is None:
            object.__setattr__(self, "n_tokens", self.max_tokens)
        if self.n_nodes is None:
            n_nodes = 1 if self.n_ranks % N_NODES or self.skip_a2a else N_NODES
            object.__setattr__(self, "n_nodes", n_nodes)

    @property
    def name(self) -> str:
        """Name of the case in test ids."""
        capacity = f"c{self.recv_capacity}" if self.recv_capacity else ""
        parts = (
            f"r{self.n_ranks}e{self.n_experts}k{self.top_k}h{self.hidden_size}",
            f"t{self.n_tokens}of{self.max_tokens}{capacity}",
            *([] if self.token_format == "plain" else [self.format_name]),
            f"{self.token_dtype}_{self.combine_dtype}",
            self.weights,
            *([f"a{self.row_alignment}"] if self.row_alignment > 1 else []),
            *(["shared"] if self.fused_shared_expert else []),
            *(["skip_a2a"] if self.skip_a2a else []),
            *([f"copies{self.expert_copies}"] if self.expert_copies else []),
            *([f"n{self.n_nodes}"] if self.n_nodes > 1 else []),
            self.routing,
        )
        return "-".join(parts)

    @property
    def flags(self) -> dict:
        """The features of `EPConfig` that the oracle takes, too."""
        names = ["fused_shared_expert", "skip_a2a"]
        names += ["expert_copies", "n_nodes"] if self.expert_copies else []
        return {name: getattr(self, name) for name in names}

    @property
    def format_name(self) -> str:
        """Name of the token format with its options."""
        options = (self.token_format, self.scales_layout, self.input_scale)
        return "_".join(str(each) for each in options if each is not None)

    def replace(self, **changes) -> "Case":
        """The case with some fields changed; T becomes a new M, and nodes those of new ranks."""
        if "max_tokens" in changes:
            changes = {"n_tokens": None} | changes
        if "n_ranks" in changes:
            changes = {"n_nodes": None} | changes
        return dataclasses.replace(self, **changes)


def every_routing(case: Case) -> list[Case]:
    """The case with every routing; one program serves all of them."""
    return [case.replace(routing=name, seed=case.seed + 1) for name in routing.ROUTINGS]


# One small shape for each number of ranks. K > 1 and L > 1 where the ranks allow it; 32 ranks have
# L = 1.
SMALL = {
    1: Case(n_ranks=1, n_experts=4, top_k=2, hidden_size=64, max_tokens=16),
    2: Case(n_ranks=2, n_experts=8, top_k=3, hidden_size=64, max_tokens=16),
    4: Case(n_ranks=4, n_experts=16, top_k=4, hidden_size=128, max_tokens=24),
    8: Case(n_ranks=8, n_experts=16, top_k=4, hidden_size=128, max_tokens=16),
    32: Case(n_ranks=32, n_experts=32, top_k=4, hidden_size=64, max_tokens=8),
}

# Dtypes of the tokens and of the result of combine.
DTYPES = [
    SMALL[4].replace(token_dtype=token, combine_dtype=out, weights=weights)
    for token, out, weights in (
        ("bfloat16", "float32", "source"),
        ("bfloat16", "float32", "row"),
        ("float32", "float32", "source"),
        ("float32", "bfloat16", "row"),
        ("float16", "bfloat16", "source"),
        ("float16", "float32", "none"),
        ("bfloat16", "float16", "source"),
        ("float16", "float16", "row"),
        ("float32", "float16", "none"),
    )
]

# The limits of each parameter.
EDGE = [
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

# Less capacity than rows that arrive: the last rows are dropped. More than can arrive.
CAPACITY = [
    SMALL[4].replace(recv_capacity=rows, weights=weights)
    for rows, weights in ((1, "source"), (60, "source"), (60, "row"), (60, "none"), (10**6, "row"))
]

# A shared expert, equal tokens on all ranks, and both.
FLAGS = {
    "shared": {"fused_shared_expert": True},
    "skip_a2a": {"skip_a2a": True},
    "both": {"fused_shared_expert": True, "skip_a2a": True},
}
FLAGS_SMALL = [
    SMALL[4].replace(weights=weights, **FLAGS[name])
    for name, weights in (
        ("shared", "source"),
        ("skip_a2a", "row"),
        ("both", "none"),
        ("both", "source"),
        ("both", "row"),
    )
]
_FLAGS_EDGE_SHAPE = Case(n_ranks=4, n_experts=8, top_k=2)
FLAGS_EDGE = [
    case.replace(**FLAGS[name])
    for name, case in (
        # Shared experts with 4, 4, 4 and 3 tokens; with one token or none; with no tokens at all.
        ("both", _FLAGS_EDGE_SHAPE.replace(n_tokens=15, combine_dtype="float32")),
        ("both", _FLAGS_EDGE_SHAPE.replace(n_tokens=1, weights="row")),
        ("both", _FLAGS_EDGE_SHAPE.replace(n_tokens=0)),
        ("shared", _FLAGS_EDGE_SHAPE.replace(n_tokens=0, weights="row")),
        ("shared", Case(n_ranks=8, n_experts=8, top_k=1, token_dtype="float32")),
        ("both", Case(n_ranks=1, n_experts=1, top_k=1, max_tokens=8, weights="none")),
        # Capacity for a part of the shared expert's rows; for some of the others, too.
        ("shared", SMALL[4].replace(recv_capacity=4, weights="row")),
        ("shared", SMALL[4].replace(recv_capacity=29)),
        ("both", SMALL[4].replace(recv_capacity=4)),
    )
]
# Groups padded to multiples of 4 rows; scales in atoms; scales row by row.
FLAGS_QUANTIZED = [
    SMALL[2].replace(token_format=token_format, hidden_size=128, **changes, **FLAGS[name])
    for name, token_format, changes in (
        ("shared", "blockwise_fp8", {"n_tokens": 14, "weights": "row"}),
        ("both", "blockwise_fp8", {"n_tokens": 13, "recv_capacity": 24}),
        ("shared", "mxfp8", {"n_tokens": 9, "weights": "none"}),
        ("both", "mxfp4", {"token_dtype": "float32", "scales_layout": "row_major"}),
        ("shared", "nvfp4", {"input_scale": 0.3, "recv_capacity": 12}),
    )
]

# The shapes of the seed documents' tests, with at most 256 experts. `recv_capacity` is twice the
# mean number of rows, so that all ranks fit in the memory of one machine.
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

# Quantized formats.
QUANTIZED_NAMES = tuple(jax_ep.formats.QUANTIZED)
QUANTIZED_SMALL = {
    name: SMALL[4].replace(token_format=name, hidden_size=256, max_tokens=12)
    for name in QUANTIZED_NAMES
}
QUANTIZED_EDGE = [
    *(
        QUANTIZED_SMALL[name].replace(scales_layout="row_major", weights=weights)
        for name, weights in zip(QUANTIZED_NAMES, ("row", "none") * 2, strict=True)
    ),
    # 7 scales per row, or 14 below: the last atom is not full. 3 for blockwise_fp8.
    *(
        QUANTIZED_SMALL[name].replace(token_dtype="float32", hidden_size=size, weights="row")
        for name, size in zip(QUANTIZED_NAMES, (384, 224, 224, 112), strict=True)
    ),
    QUANTIZED_SMALL["nvfp4"].replace(token_dtype="float32", hidden_size=224),
    QUANTIZED_SMALL["nvfp4"].replace(input_scale=0.3),
    # Groups of more than 128 rows, and empty ones.
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
        for name in QUANTIZED_NAMES
    ),
    *(
        QUANTIZED_SMALL[name].replace(n_tokens=t, max_tokens=12)
        for name, t in (("nvfp4", 0), ("blockwise_fp8", 1))
    ),
    *(
        QUANTIZED_SMALL[name].replace(recv_capacity=rows, weights="row")
        for name in ("blockwise_fp8", "nvfp4")
        for rows in (4, 32)
    ),
]
# Groups padded to multiples of rows that the user chose: more than the format needs, or fewer.
ALIGNED = [
    SMALL[4].replace(row_alignment=16),
    SMALL[4].replace(row_alignment=128, weights="row", routing="zipf"),
    SMALL[2].replace(row_alignment=256, weights="none"),
    SMALL[4].replace(row_alignment=32, weights="row", routing="nothing"),
    SMALL[4].replace(row_alignment=16, recv_capacity=64),
    *(SMALL[4].replace(row_alignment=64, **flags) for flags in FLAGS.values()),
    QUANTIZED_SMALL["blockwise_fp8"].replace(row_alignment=1),
    QUANTIZED_SMALL["blockwise_fp8"].replace(row_alignment=16, weights="row"),
    QUANTIZED_SMALL["mxfp8"].replace(row_alignment=32, weights="row"),
    QUANTIZED_SMALL["mxfp4"].replace(row_alignment=4, scales_layout="row_major"),
    QUANTIZED_SMALL["nvfp4"].replace(row_alignment=128, **FLAGS["shared"]),
]
QUANTIZED_SEED = [
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
    for name in QUANTIZED_NAMES
]
