"""Times of calls between two nodes whose network has a limited rate, beside what they send.

`measure` is a target of `processes.run_processes` on hosts that count what they send.
"""

import dataclasses
import json
import statistics
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

import jax_ep
import network
import rail_traffic
from harness import AXIS, make_mesh, on_mesh, put
from process_checks import meet

N_EXPERTS, TOP_K, HIDDEN_SIZE = 256, 8, 7168
# Tokens of a rank, and how often each call is timed.
N_CALLS = {128: 11, 1024: 7, 4096: 5}
RATES = (0.0, 1e9, 0.5e9, 0.25e9)  # bytes per second that leave each process; 0: no limit
SETTLING_S = 0.05  # after the last call: acknowledgements and credits still leave
_MARK = "measured: "
# What a tile may add to its rows: messages with its word and the credit for another one.
_TILE_BYTES = 1000
_BURST_BYTES = 64 << 10  # that a process may send at once: rigs/rate_shim.cc


@dataclasses.dataclass(frozen=True)
class Row:
    """A call on one rank, at one rate. What it sends, by the shim and by the plan."""

    n_tokens: int
    rate: float
    call: str
    rank: int
    seconds: list[float]
    sent_bytes: float
    planned_bytes: float
    n_tiles: int


def measure() -> None:
    """Prints a `Row` for each number of tokens, call and rate."""
    mesh = make_mesh(len(jax.devices()))
    most = max(N_CALLS)
    config = jax_ep.EPConfig(
        n_experts=N_EXPERTS,
        top_k=TOP_K,
        hidden_size=HIDDEN_SIZE,
        max_tokens_per_rank=most,
        recv_capacity=most * TOP_K * 3 // 2,
        n_nodes=2,
        timeout_s=60.0,
    )
    rails = rail_traffic.Rails(2, mesh.size // 2, N_EXPERTS, TOP_K, HIDDEN_SIZE, 2 * HIDDEN_SIZE)
    with jax_ep.ep_init(mesh, AXIS, config, "nvshmem") as group:
        for n_tokens, n_calls in N_CALLS.items():
            ids = _ids(mesh.size, n_tokens)
            calls = _calls(group, mesh, ids)
            rank = jax.process_index()
            dispatched, combined = rails.dispatch(ids, rank), rails.combine(ids, rank)
            planned = [dispatched, combined, dispatched + combined]
            for rate in RATES:
                network.limit_rate(rate)
                for (name, call), sent in zip(calls.items(), planned, strict=True):
                    seconds, n_bytes = _measure(call, n_calls)
                    row = Row(
                        n_tokens, rate, name, rank, seconds, n_bytes, sent.n_bytes, sent.n_tiles
                    )
                    print(_MARK + json.dumps(dataclasses.asdict(row)), flush=True)
            network.limit_rate(0)
        group.check()


def _ids(n_ranks: int, n_tokens: int) -> np.ndarray:
    """`int32[R, T, K]`: every set of experts is equally likely."""
    scores = np.random.default_rng(n_tokens).random((n_ranks, n_tokens, N_EXPERTS), np.float32)
    return np.argpartition(scores, TOP_K)[..., :TOP_K].astype(np.int32)


def _calls(group: jax_ep.EPGroup, mesh: jax.sharding.Mesh, ids: np.ndarray) -> dict:
    """The compiled calls, without operands, by name; a round trip gives what it must."""

    def make_tokens(rank):
        shape = ids.shape[1], HIDDEN_SIZE
        row, column = (jax.lax.broadcasted_iota(jnp.int32, shape, i) for i in range(2))
        return ((rank + 3 * row + 5 * column) % 17 - 8).astype(jnp.bfloat16)

    def dispatch(tokens, ids, weights):
        return jax_ep.dispatch(group, tokens, ids, weights)

    def combine(dispatched):
        return jax_ep.combine(group, dispatched.tokens, dispatched)

    ranks, *choices = put(mesh, np.arange(len(ids), dtype=np.int32), ids, _ones(ids))
    operands = on_mesh(mesh, make_tokens)(ranks), *choices
    calls = [on_mesh(mesh, dispatch), on_mesh(mesh, combine)]
    dispatched = calls[0](*operands)
    round_trip = on_mesh(mesh, lambda *operands: combine(dispatch(*operands)))
    # Sums of small integers, which bfloat16 has.
    is_right = on_mesh(mesh, lambda out, tokens: (out == TOP_K * tokens).all())
    for out in (calls[1](dispatched), round_trip(*operands)):
        assert all(shard.data.all() for shard in is_right(out, operands[0]).addressable_shards)
    return {
        "dispatch": lambda: calls[0](*operands),
        "combine": lambda: calls[1](dispatched),
        "round trip": lambda: round_trip(*operands),
    }


def _ones(ids: np.ndarray) -> np.ndarray:
    return np.ones(ids.shape, np.float32)


def _measure(call, n_calls: int) -> tuple[list[float], float]:
    """The seconds of each call, and the bytes that one sends, on average."""
    jax.block_until_ready(call())
    n_bytes, seconds = zip(*(_run(call, n) for n in (0, n_calls)), strict=True)
    return seconds[1], (n_bytes[1] - n_bytes[0]) / n_calls


def _run(call, n_calls: int) -> tuple[int, list[float]]:
    """What this process sends in a number of calls, its meetings included; and their seconds."""
    time.sleep(SETTLING_S)
    meet()
    before, seconds = network.sent_bytes(), []
    for _ in range(n_calls):
        begin = time.monotonic()
        jax.block_until_ready(call())
        seconds.append(time.monotonic() - begin)
    time.sleep(SETTLING_S)
    meet()
    return network.sent_bytes() - before, seconds


def rows_of(logs: Sequence[str]) -> list[Row]:
    """What `measure` has printed, in all processes."""
    lines = [line for log in logs for line in log.splitlines() if line.startswith(_MARK)]
    return [Row(**json.loads(line.removeprefix(_MARK))) for line in lines]


def table(rows: Sequence[Row]) -> str:
    """A line for each call and rate: the median over ranks and calls; bytes, the mean over ranks.

    `network` is the time of the planned bytes at the rate.
    """
    lines = ["tokens  MB/s   call        ms      network  MB sent   planned   ratio   tiles"]
    for key in dict.fromkeys((row.n_tokens, row.rate, row.call) for row in rows):
        same = [row for row in rows if (row.n_tokens, row.rate, row.call) == key]
        sent = statistics.mean(row.sent_bytes for row in same)
        planned = statistics.mean(row.planned_bytes for row in same)
        ms = 1e3 * statistics.median(s for row in same for s in row.seconds)
        limit = f"{1e3 * planned / key[1]:7.2f}" if key[1] else "   none"
        words = [f"{key[0]:6d} {key[1] / 1e6:5.0f}   {key[2]:10s} {ms:8.2f} {limit}"]
        words.append(f"{sent / 1e6:9.3f} {planned / 1e6:9.3f}  {sent / planned:.4f}")
        lines.append("  ".join([*words, f"{same[0].n_tiles:5d}"]))
    return "\n".join(lines)


def check(rows: Sequence[Row]) -> None:
    """All planned bytes are sent, and little else; no faster than the limit allows."""
    assert rows
    for row in rows:
        most = 1.02 * row.planned_bytes + _TILE_BYTES * row.n_tiles
        assert row.planned_bytes <= row.sent_bytes <= most, row
        if row.rate:
            least = 0.95 * (row.planned_bytes - _BURST_BYTES) / row.rate
            assert statistics.median(row.seconds) >= least, row
