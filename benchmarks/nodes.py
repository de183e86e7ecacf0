"""Two nodes on the GPUs of one host, one process per GPU, against one node of the same GPUs.

    python benchmarks/nodes.py [--out FILE] [--tokens 8,128,1024,4096]

Round trips (dispatch, then combine) of the implementations below take turns. Times are periods in a
chain: (a long chain - a short one) / the difference of their lengths. Processes are started and
waited for by the first one, which writes the results.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import machine

HIDDEN, EXPERTS, TOP_K, AXIS = 7168, 256, 8, "ep"
LONG, SHORT, SAMPLES = 24, 4, 15
TIME_LIMIT_S = 300

# The transport, and whether each GPU is a node of its own.
IMPLEMENTATIONS = {
    "p2p, one node": ("p2p", False),
    "nvshmem": ("nvshmem", True),
    "p2p inside nodes, XLA between": ("p2p", True),
}


def main() -> None:
    """Starts the processes, or is one of them."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", default="8,128,1024,4096", help="per rank, comma-separated")
    parser.add_argument("--out", type=pathlib.Path, help="JSON file to write")
    parser.add_argument("--commit", help="to record, where there is no git")
    parser.add_argument("--port", type=int, default=12399)
    parser.add_argument("--process", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--n-processes", type=int, default=2, help="GPUs, and nodes")
    parser.add_argument(
        "--without-xla",
        action="store_true",
        help="leave out XLA between nodes: NCCL does not serve processes that share a GPU by MPS",
    )
    options = parser.parse_args()
    if options.process is None:
        sys.exit(start(options))
    run(options)


def start(options: argparse.Namespace) -> int:
    """Runs a process per GPU; returns the exit status of the first."""
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(options.n_processes))))
    processes = []
    for i, gpu in enumerate(gpus.split(",")[: options.n_processes]):
        command = [sys.executable, *sys.argv, f"--process={i}"]
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": gpu}
        processes.append(subprocess.Popen(command, env=environment))
    try:
        return processes[0].wait(TIME_LIMIT_S)
    finally:
        for process in processes:
            process.kill()


def run(options: argparse.Namespace) -> None:
    """Measures; the first process prints and writes the results."""
    import jax

    jax.distributed.initialize(
        f"localhost:{options.port}", options.n_processes, options.process, local_device_ids=[0]
    )
    results = []
    for n_tokens in map(int, options.tokens.split(",")):
        names = [x for x in IMPLEMENTATIONS if not (options.without_xla and "XLA" in x)]
        for name, times in measure(names, n_tokens, options.n_processes).items():
            quartiles = statistics.quantiles(times, n=4)
            results.append({"implementation": name, "n_tokens": n_tokens, "period_us": quartiles})
            if options.process == 0:
                print(f"T = {n_tokens}, {name}: {quartiles[1]:.1f} us", flush=True)
    if options.process == 0 and options.out:
        facts = machine.describe() | {
            "device": jax.devices()[0].device_kind,
            "n_devices": len(jax.devices()),
        }
        if options.commit:
            facts["commit"] = options.commit
        case = {"hidden_size": HIDDEN, "n_experts": EXPERTS, "top_k": TOP_K, "dtype": "bfloat16"}
        report = {"command": " ".join(["python", *sys.argv[:-1]]), "machine": facts, "case": case}
        options.out.write_text(json.dumps(report | {"results": results}, indent=1) + "\n")
    os._exit(0)  # an orderly end would wait for processes that have ended


def measure(names: list[str], n_tokens: int, n_ranks: int) -> dict[str, list[float]]:
    """The periods of each implementation, in us."""
    chains = {name: make_chains(name, n_tokens, n_ranks) for name in names}
    times: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(SAMPLES):
        for name, (long, short) in chains.items():
            times[name].append((long() - short()) / (LONG - SHORT) * 1e6)
    return times


def make_chains(name: str, n_tokens: int, n_ranks: int) -> list[Callable[[], float]]:
    """Functions that run a long and a short chain, and return seconds."""
    import jax

    import jax_ep

    mesh = jax.make_mesh((n_ranks,), (AXIS,))
    group = open_group(name, mesh, n_tokens)

    def chain(length: int) -> Callable[..., Any]:
        def body(tokens: Any, ids: Any, weights: Any) -> Any:
            x = tokens[0]
            for _ in range(length):
                rows = jax_ep.dispatch(group, x, ids[0], weights[0])
                x = jax_ep.combine(group, jax.lax.optimization_barrier(rows.tokens), rows)
            return x[None]

        return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=jax.P(AXIS), out_specs=jax.P(AXIS)))

    operands = make_operands(mesh, n_tokens)
    repeats = max(1, min(32, 2048 // n_tokens))  # short calls are enqueued together

    def timed(run: Callable[..., Any]) -> Callable[[], float]:
        jax.block_until_ready(run(*operands))
        group.check()

        def call() -> float:
            begin = time.perf_counter()
            jax.block_until_ready([run(*operands) for _ in range(repeats)])
            return (time.perf_counter() - begin) / repeats

        return call

    return [timed(chain(LONG)), timed(chain(SHORT))]


def open_group(name: str, mesh: Any, n_tokens: int) -> Any:
    """A group with 1.5 times as many rows as uniform routing needs."""
    import jax_ep
    from jax_ep.transports.p2p import P2pConnection

    transport, by_nodes = IMPLEMENTATIONS[name]
    config = jax_ep.EPConfig(
        n_experts=EXPERTS,
        top_k=TOP_K,
        hidden_size=HIDDEN,
        max_tokens_per_rank=n_tokens,
        recv_capacity=n_tokens * TOP_K * 3 // 2 + 64,
        n_nodes=mesh.size if by_nodes else None,
    )
    serves_all = P2pConnection.unsupported_reason
    if by_nodes:  # p2p reaches all GPUs of the host; have it serve each by itself

        def unsupported_reason(geometry: Any, exchange: Any) -> str | None:
            if geometry.routed.n_nodes > 1:
                return "each node is to be served by itself."
            return serves_all(geometry, exchange)

        P2pConnection.unsupported_reason = staticmethod(unsupported_reason)
    try:
        return jax_ep.ep_init(mesh, AXIS, config, transport)
    finally:
        P2pConnection.unsupported_reason = serves_all


def make_operands(mesh: Any, n_tokens: int) -> list[Any]:
    """Tokens, ids of uniform routing, and weights that add up to 1."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    rng = np.random.default_rng(jax.process_index())
    tokens = rng.standard_normal((n_tokens, HIDDEN)).astype(jnp.bfloat16)
    ids = rng.permuted(np.tile(np.arange(EXPERTS, dtype=np.int32), (n_tokens, 1)), axis=1)
    weights = rng.dirichlet(np.ones(TOP_K), n_tokens).astype(np.float32)
    sharding = jax.NamedSharding(mesh, jax.P(AXIS))
    arrays = (tokens, ids[:, :TOP_K], weights)
    return [jax.make_array_from_process_local_data(sharding, x[None]) for x in arrays]


if __name__ == "__main__":
    main()
