"""What a rank of transport `nvshmem` sends to other nodes, by the plan of docs/dev/scale.md.

Bytes are those of rows, ids and weights as they lie in slots. What a network adds to them, such as
headers, and the words and credits of tiles are not counted.
"""

import dataclasses
import math

import numpy as np

# As in ffi/nvshmem/plan/rail_exchange.h.
_CHANNELS, _DEPTH, _WARPS = 32, 2, 16
_SLOTS_BYTES, _MAX_SLOT_BYTES, _ALIGNMENT = 64 << 20, 256 << 10, 128
_MAX_TILE_ROWS, _MAX_TILE_CHOICES = 32, 1024
_CHOICE_BYTES = 8  # of an id and a weight


@dataclasses.dataclass(frozen=True)
class Sent:
    """What a rank sends to all other nodes in a call."""

    n_bytes: float
    n_tiles: int

    def __add__(self, other: "Sent") -> "Sent":
        return Sent(self.n_bytes + other.n_bytes, self.n_tiles + other.n_tiles)


@dataclasses.dataclass(frozen=True)
class Tiles:
    """How the rows of a call are cut: `RailTiles` in C++."""

    tile_rows: int
    n_tiles: int  # to each node
    extra_bytes: int  # of a tile, before its rows


def slot_bytes(n_nodes: int, message_bytes: int) -> int:
    """`RailExchange::Plan`: bytes of a slot, if the longest row and its choices have so many."""
    share = min(_SLOTS_BYTES // ((n_nodes - 1) * _CHANNELS * _DEPTH), _MAX_SLOT_BYTES)
    return _align(max(share, message_bytes + _ALIGNMENT))


def cut(slot: int, n_rows: int, row_bytes: int, n_choices: int, choice_bytes: int) -> Tiles:
    """`RailExchange::Cut`, with `choice_bytes` for all choices of a row that travel with it."""
    most = _MAX_TILE_ROWS if row_bytes else _MAX_TILE_CHOICES // n_choices
    fit = (slot - _ALIGNMENT) // (row_bytes + choice_bytes)
    rows = min(most, fit, -(-n_rows // _CHANNELS))
    if rows > _WARPS:
        rows -= rows % _WARPS
    rows = max(rows, 1)
    return Tiles(rows, -(-n_rows // rows), _align(rows * choice_bytes))


@dataclasses.dataclass(frozen=True)
class Rails:
    """A job: N nodes of P ranks, and the sizes of what travels."""

    n_nodes: int
    n_ranks_per_node: int
    n_experts: int
    top_k: int
    hidden_size: int
    token_bytes: int  # that travel of a token: docs/dev/scale.md#bytes-of-a-token
    min_overlapped: int = 1024  # tokens from which on the choices of a dispatch travel ahead

    @property
    def slot(self) -> int:
        """Bytes of a slot; the longest rows are sums in bfloat16."""
        longest = max(2 * self.hidden_size, self.token_bytes)
        return slot_bytes(self.n_nodes, longest + _CHOICE_BYTES * self.top_k)

    def needs(self, ids: np.ndarray) -> np.ndarray:
        """`bool[R, N, T]`: the nodes that have an expert of a token, from `int[R, T, K]` ids."""
        node = np.where(ids < 0, -1, ids // (self.n_experts // self.n_nodes))
        return (node[:, None] == np.arange(self.n_nodes)[:, None, None]).any(axis=3)

    def dispatch(self, ids: np.ndarray, rank: int) -> Sent:
        """What `rank` sends in a dispatch with weights: its tokens, and all their choices."""
        needs = np.delete(self.needs(ids)[rank], rank // self.n_ranks_per_node, axis=0)
        return self._dispatch(ids.shape[1], int(needs.sum()))

    def combine(self, ids: np.ndarray, rank: int) -> Sent:
        """What `rank` sends in its combine: its node's sums for tokens of the rest of its rail."""
        node, index = divmod(rank, self.n_ranks_per_node)
        rail = [n * self.n_ranks_per_node + index for n in range(self.n_nodes) if n != node]
        return self._combine(ids.shape[1], int(self.needs(ids)[rail, node].sum()))

    def expected(self, n_tokens: int) -> tuple[Sent, Sent]:
        """Means of dispatch and combine, if every set of K experts is equally likely."""
        n_rows = n_tokens * self.other_nodes()
        return self._dispatch(n_tokens, n_rows), self._combine(n_tokens, n_rows)

    def other_nodes(self) -> float:
        """The mean number of nodes that a token is sent to."""
        return (self.n_nodes - 1) * _hit(self.n_experts, self.n_nodes, self.top_k)

    def ranks(self) -> float:
        """The mean number of ranks that have an expert of a token."""
        n_ranks = self.n_nodes * self.n_ranks_per_node
        return n_ranks * _hit(self.n_experts, n_ranks, self.top_k)

    def _dispatch(self, n_tokens: int, n_rows: float) -> Sent:
        choices = self.top_k, _CHOICE_BYTES * self.top_k
        if n_tokens < self.min_overlapped:
            return self._sent(cut(self.slot, n_tokens, self.token_bytes, *choices), n_rows)
        ahead = self._sent(cut(self.slot, n_tokens, 0, *choices), 0)
        tiles = cut(self.slot, n_tokens, self.token_bytes, self.top_k, 0)
        return ahead + self._sent(tiles, n_rows)

    def _combine(self, n_tokens: int, n_rows: float) -> Sent:
        sum_bytes = 2 * self.hidden_size
        tiles = cut(self.slot, n_tokens, sum_bytes, self.top_k, 0)
        return Sent(n_rows * sum_bytes, (self.n_nodes - 1) * tiles.n_tiles)

    def _sent(self, tiles: Tiles, n_rows: float) -> Sent:
        n_tiles = (self.n_nodes - 1) * tiles.n_tiles
        return Sent(n_tiles * tiles.extra_bytes + n_rows * self.token_bytes, n_tiles)


def _hit(n_experts: int, n_parts: int, top_k: int) -> float:
    """The probability that one of K experts is in a given part of them."""
    outside = n_experts - n_experts // n_parts
    return 1 - math.comb(outside, top_k) / math.comb(n_experts, top_k)


def _align(n_bytes: int) -> int:
    return -(-n_bytes // _ALIGNMENT) * _ALIGNMENT


# --- the model of docs/dev/scale.md ---------------------------------------------------------------

# Bytes per second that leave a GPU: the line rate of its network adapter; and what calls reach
# inside a node (docs/speed.md), in dispatch and in combine.
NETWORK_RATE, DISPATCH_RATE, COMBINE_RATE = 50e9, 334e9, 328e9
N_TOKENS, N_RANKS_PER_NODE, N_EXPERTS, TOP_K, HIDDEN_SIZE = 4096, 8, 256, 8, 7168
FP8_BYTES = 7392  # that travel of a token in BlockwiseFP8


def seconds(sent: Sent, rails: Rails, row_bytes: int, rate_in_node: float) -> tuple[float, float]:
    """The times that a call needs the network and the links inside the node."""
    n = rails.n_ranks_per_node
    in_node = N_TOKENS * rails.ranks() * (n - 1) / n * row_bytes
    return sent.n_bytes / NETWORK_RATE, in_node / rate_in_node


def model() -> str:
    """The table: bytes and times of a dispatch, of one in FP8, and of a combine, by nodes."""
    lines = []
    for n_nodes in (2, 4, 8, 16, 32):
        sizes = N_RANKS_PER_NODE, N_EXPERTS, TOP_K, HIDDEN_SIZE
        plain = Rails(n_nodes, *sizes, 2 * HIDDEN_SIZE)
        fp8 = dataclasses.replace(plain, token_bytes=FP8_BYTES)
        dispatched, combined = plain.expected(N_TOKENS)
        calls = [
            (dispatched, plain, 2 * HIDDEN_SIZE, DISPATCH_RATE),
            (fp8.expected(N_TOKENS)[0], fp8, FP8_BYTES, DISPATCH_RATE),
            (combined, plain, 2 * HIDDEN_SIZE, COMBINE_RATE),
        ]
        cells = [f"{n_nodes}", f"{plain.other_nodes():.2f}"]
        for sent, *of_node in calls:
            network, in_node = seconds(sent, *of_node)
            cells.append(f"{sent.n_bytes / 1e6:.0f}")
            cells.append(f"**{1e3 * network:.2f}** / {1e3 * in_node:.2f}")
        cells.append(f"{dispatched.n_tiles / seconds(*calls[0])[0] / 1e6:.1f}")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)
