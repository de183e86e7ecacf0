"""An MoE layer over two processes that `jax.distributed` connects.

    python examples/two_processes.py

starts both processes on this machine, with 4 virtual CPU devices each. `moe_layer` and every call
of `jax_ep` are the same as in a single process; only the mesh spans both.
"""

import argparse
import contextlib
import functools
import socket
import subprocess
import sys
import tempfile
import time
import typing

import jax
import jax.numpy as jnp
from jax import P

import jax_ep

N_PROCESSES = 2
N_LOCAL_DEVICES = 4
TIME_LIMIT_S = 180


def route(tokens, router, top_k):
    """The weights and ids of each token's experts, computed in float32, also on GPUs."""
    logits = jnp.matmul(tokens, router, precision="highest")
    return jax.lax.top_k(jax.nn.softmax(logits), top_k)


def moe_layer(group, tokens, router, up, down):
    """The layer on one rank: its tokens [T, H], its experts [L, ...]."""
    weights, ids = route(tokens, router, group.config.top_k)
    rows = jax_ep.dispatch(group, tokens, ids)
    hidden = jax.nn.silu(jax_ep.grouped_matmul(rows.tokens, up, rows.row_offsets))
    results = jax_ep.grouped_matmul(hidden, down, rows.row_offsets)
    return jax_ep.combine(group, results, rows, weights)


def dense_layer(top_k, tokens, router, up, down):
    """The reference: every expert on every token; jax.jit partitions it."""
    weights, ids = route(tokens, router, top_k)
    gates = jnp.einsum("tk,tke->te", weights, jax.nn.one_hot(ids, len(up)))
    hidden = jax.nn.silu(jnp.einsum("th,ehf->tef", tokens, up))
    return jnp.einsum("te,tef,efh->th", gates, hidden, down)


def work(process: int, coordinator: str) -> None:
    """Joins the job as one of its processes, runs the layer, and compares it with the reference."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", N_LOCAL_DEVICES)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(coordinator, N_PROCESSES, process)

    mesh = jax.sharding.Mesh(jax.devices(), ("ep",))  # the devices of all processes
    config = jax_ep.EPConfig(
        n_experts=16,
        top_k=2,
        hidden_size=64,
        max_tokens_per_rank=32,
        token_format=jax_ep.Plain(jnp.float32),
        combine_dtype=jnp.float32,
    )
    with jax_ep.ep_init(mesh, "ep", config) as group:
        difference = compare(mesh, group)
    ranks = ", ".join(map(str, group.ranks))
    print(f"process {process}: ranks {ranks} of {group.n_ranks}, transport {group.transport}")
    if not difference < 1e-4:
        sys.exit(f"process {process}: differs from a dense layer by {difference}")
    print(f"process {process}: equal to a dense layer")
    jax.distributed.shutdown()


def compare(mesh: jax.sharding.Mesh, group: jax_ep.EPGroup) -> float:
    """Returns the largest absolute difference between the two layers, over all ranks."""
    specs = P("ep"), P(), P("ep"), P("ep")
    shapes = (32 * group.n_ranks, 64), (64, 16), (16, 64, 128), (16, 128, 64)
    shardings = tuple(jax.NamedSharding(mesh, spec) for spec in specs)

    @functools.partial(jax.jit, out_shardings=shardings)
    def init():  # every process runs this and creates its own shards
        keys = jax.random.split(jax.random.key(0), len(shapes))
        pairs = zip(keys, shapes, strict=True)
        return tuple(jax.random.normal(*pair) / 4 for pair in pairs)

    @jax.jit
    def difference(*arrays):
        sparse = jax.shard_map(
            functools.partial(moe_layer, group), mesh=mesh, in_specs=specs, out_specs=P("ep")
        )(*arrays)
        return jnp.abs(sparse - dense_layer(group.config.top_k, *arrays)).max()

    return float(difference(*init()))


def launch() -> None:
    """Starts the processes and waits for them; kills those that remain."""
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        coordinator = f"localhost:{listener.getsockname()[1]}"
    command = [sys.executable, __file__, "--coordinator", coordinator, "--process"]
    with contextlib.ExitStack() as stack:
        processes, logs = [], []
        for i in range(N_PROCESSES):
            logs.append(stack.enter_context(tempfile.TemporaryFile("w+")))
            process = subprocess.Popen([*command, str(i)], stdout=logs[i], stderr=logs[i])
            stack.callback(process.wait)
            stack.callback(process.kill)
            processes.append(process)
        verdict = wait(processes)
        for i, log in enumerate(logs):
            log.seek(0)
            print("".join(said(i, log) if verdict is None else log), end="")
    sys.exit(verdict)


def said(process: int, log: typing.TextIO) -> list[str]:
    """Returns the lines that `work` printed, without those of Gloo's threads."""
    return [line for line in log if line.startswith(f"process {process}: ")]


def wait(processes: list[subprocess.Popen]) -> str | None:
    """Returns None once all processes have succeeded, otherwise what went wrong."""
    end = time.monotonic() + TIME_LIMIT_S
    while any(process.poll() is None for process in processes):
        if any(process.poll() for process in processes):
            break
        if time.monotonic() > end:
            return f"not done after {TIME_LIMIT_S} s"
        time.sleep(0.1)
    failed = [i for i, process in enumerate(processes) if process.poll()]
    return f"failed: processes {failed}" if failed else None


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--process", type=int, help="index of this process; default: start all")
    parser.add_argument("--coordinator", help="host:port of process 0")
    options = parser.parse_args()
    if options.process is None:
        launch()
    else:
        work(options.process, options.coordinator)
