"""Times of calls between two nodes whose network has a limited rate, beside what they send.

`measure` is a target of `processes.run_processes` on hosts that count what they send.
"""

import dataclasses
import itertools
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

SETTLING_S = 0.05  # after the last call: acknowledgements and credits still leave
_MARK = "measured: "
# What a tile may add to its rows: messages with its word and the credit for another one, and
# headers. It was 250 to 280 with UCX.
_TILE_BYTES = 400
_BURST_BYTES = 256 << 10  # that a process may send at once: rigs/rate_shim.cc


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is measured, by transport."""

    transport: str
    hidden_size: int
    n_calls: dict[int, int]  # how often each call is timed, by the tokens of a rank
    rates: tuple[float, ...]  # bytes per second that leave each process; 0: no limit
    n_experts: int = 256
    top_k: int = 8


_NVSHMEM = Plan("nvshmem", 7168, {128: 11, 1024: 7, 4096: 5}, (0.0, 1e9, 0.5e9, 0.25e9))
_COLLECTIVES = Plan("host", 512, {1024: 2}, (0.0, 4e6))


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
    """Prints a `Row` for each number of tokens, call and rate of transport `nvshmem`."""
    _measure_all(_NVSHMEM)


def measure_collectives() -> None:
    """The same where XLA's collectives connect the nodes, on CPUs."""
    _measure_all(_COLLECTIVES)


def _measure_all(plan: Plan) -> None:
    mesh = make_mesh(len(jax.devices()))
    most = max(plan.n_calls)
    config = jax_ep.EPConfig(
        n_experts=plan.n_experts,
        top_k=plan.top_k,
        hidden_size=plan.hidden_size,
        max_tokens_per_rank=most,
        recv_capacity=most * plan.top_k * 3 // 2,
        n_nodes=2,
        timeout_s=60.0,
    )
    with jax_ep.ep_init(mesh, AXIS, config, plan.transport) as group:
        for n_tokens, n_calls in plan.n_calls.items():
            ids = _ids(plan, mesh.size, n_tokens)
            calls, planned = _calls(group, mesh, ids), _planned(plan, ids)
            for rate in plan.rates:
                network.limit_rate(rate)
                for name, call in calls.items():
                    measured = _measure(call, n_calls)
                    sent = dataclasses.astuple(planned[name])
                    row = Row(n_tokens, rate, name, jax.process_index(), *measured, *sent)
                    print(_MARK + json.dumps(dataclasses.asdict(row)), flush=True)
            network.limit_rate(0)
        group.check()


def _planned(plan: Plan, ids: np.ndarray) -> dict[str, rail_traffic.Sent]:
    """What this process sends in each call. XLA's collectives send all rows."""
    n_ranks, n_tokens, _ = ids.shape
    row_bytes = 2 * plan.hidden_size
    sizes = n_ranks // 2, plan.n_experts, plan.top_k, plan.hidden_size, row_bytes
    if plan.transport == "nvshmem":
        rails, rank = rail_traffic.Rails(2, *sizes), jax.process_index()
        dispatched, combined = rails.dispatch(ids, rank), rails.combine(ids, rank)
    else:
        rows = jax.local_device_count() * n_tokens
        dispatched = rail_traffic.Sent(rows * (row_bytes + 8 * plan.top_k), 0)
        combined = rail_traffic.Sent(rows * row_bytes, 0)
    return {"dispatch": dispatched, "combine": combined, "round trip": dispatched + combined}


def _ids(plan: Plan, n_ranks: int, n_tokens: int) -> np.ndarray:
    """`int32[R, T, K]`: every set of experts is equally likely."""
    shape = n_ranks, n_tokens, plan.n_experts
    scores = np.random.default_rng(n_tokens).random(shape, np.float32)
    return np.argpartition(scores, plan.top_k)[..., : plan.top_k].astype(np.int32)


def _calls(group: jax_ep.EPGroup, mesh: jax.sharding.Mesh, ids: np.ndarray) -> dict:
    """The compiled calls, without operands, by name; a round trip gives what it must."""

    def make_tokens(rank):
        shape = ids.shape[1], group.config.hidden_size
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
    is_right = on_mesh(mesh, lambda out, tokens: (out == ids.shape[2] * tokens).all())
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
    besides = min(_run(call, 0)[0] for _ in range(2))  # the process may also send something else
    n_bytes, seconds = _run(call, n_calls)
    return seconds, (n_bytes - besides) / n_calls


def _run(call, n_calls: int) -> tuple[int, list[float]]:
    """What this process sends in meetings and calls, and the seconds of each call.

    One call more comes first: after a pause, a process may send more at once.
    """
    time.sleep(SETTLING_S)
    meet()
    before, ends = network.sent_bytes(), []
    for _ in range(n_calls + 1):
        jax.block_until_ready(call())
        ends.append(time.monotonic())
    time.sleep(SETTLING_S)
    meet()
    return network.sent_bytes() - before, [b - a for a, b in itertools.pairwise(ends)]


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
        most = 1.005 * row.planned_bytes + _TILE_BYTES * row.n_tiles
        assert row.planned_bytes <= row.sent_bytes <= most, row
        if row.rate:
            n_bytes = len(row.seconds) * row.planned_bytes - _BURST_BYTES
            assert sum(row.seconds) >= 0.95 * n_bytes / row.rate, row
