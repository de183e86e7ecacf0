"""An MoE layer whose experts are spread over the devices of several hosts.

`slurm.sh` and `openmpi.sh` beside it start one process per GPU, which is what JAX expects of them;
`plain.sh` starts one per host, with all its GPUs. With `--cpus 4`, the processes use virtual CPU
devices and may share a machine.
"""

import argparse
import functools

import jax
import jax.numpy as jnp
from jax import P

import jax_ep


def route(tokens, router, top_k):
    """The weights and ids of each token's experts, computed in float32, also on GPUs."""
    logits = jnp.matmul(tokens, router, precision="highest")
    return jax.lax.top_k(jax.nn.softmax(logits), top_k)


def moe_layer(group, tokens, router, up, down):
    """The layer on one rank: its tokens [T, H], its experts [L, ...]."""
    weights, ids = route(tokens, router, group.config.top_k)
    rows = jax_ep.dispatch(group, tokens, ids, weights)
    hidden = jax.nn.silu(jax_ep.grouped_matmul(rows.tokens, up, rows.row_offsets))
    return jax_ep.combine(group, jax_ep.grouped_matmul(hidden, down, rows.row_offsets), rows)


def dense_layer(top_k, tokens, router, up, down):
    """The reference: every expert on every token; jax.jit partitions it."""
    weights, ids = route(tokens, router, top_k)
    gates = jnp.einsum("tk,tke->te", weights, jax.nn.one_hot(ids, len(up)))
    hidden = jax.nn.silu(jnp.einsum("th,ehf->tef", tokens, up))
    return jnp.einsum("te,tef,efh->th", gates, hidden, down)


def difference(group: jax_ep.EPGroup) -> float:
    """The largest difference between the two layers' outputs, relative to the largest output."""
    n_experts, size = group.config.n_experts, group.config.hidden_size
    specs = P("ep"), P(), P("ep"), P("ep")
    shapes = (32 * group.n_ranks, size), (size, n_experts), (n_experts, size, 64)
    shapes += ((n_experts, 64, size),)
    shardings = tuple(jax.NamedSharding(group.mesh, spec) for spec in specs)

    @functools.partial(jax.jit, out_shardings=shardings)
    def init():  # every process runs this and creates its own shards
        keys = jax.random.split(jax.random.key(0), len(shapes))
        return tuple(jax.random.normal(*each) / 4 for each in zip(keys, shapes, strict=True))

    @jax.jit
    def compare(*arrays):
        layer = functools.partial(moe_layer, group)
        mapped = jax.shard_map(layer, mesh=group.mesh, in_specs=specs, out_specs=P("ep"))
        dense = dense_layer(group.config.top_k, *arrays)
        return jnp.abs(mapped(*arrays) - dense).max() / jnp.abs(dense).max()

    return float(compare(*init()))


def main() -> None:
    """Joins the job, runs the layer on all of its devices, and compares it with the reference."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--launcher", choices=["slurm", "ompi"], help="which started the processes")
    parser.add_argument("--coordinator", help="without a launcher: host:port of process 0")
    parser.add_argument("--n-processes", type=int)
    parser.add_argument("--process-id", type=int)
    parser.add_argument("--cpus", type=int, help="use so many virtual CPU devices per process")
    options = parser.parse_args()
    if options.cpus:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", options.cpus)
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    job = options.coordinator, options.n_processes, options.process_id
    jax.distributed.initialize(*job, cluster_detection_method=options.launcher)

    mesh = jax.sharding.Mesh(jax.devices(), ("ep",))  # the devices of all processes
    config = jax_ep.EPConfig(
        n_experts=2 * mesh.size,
        top_k=2,
        hidden_size=64,
        max_tokens_per_rank=32,
        token_format=jax_ep.Plain(jnp.float32),
        combine_dtype=jnp.float32,
        # p2p takes each host for a node; transport host must be told that each process is one.
        n_nodes=jax.process_count() if options.cpus else None,
    )
    with jax_ep.ep_init(mesh, "ep", config) as group:
        result = difference(group)
    where = f"process {jax.process_index()} of {jax.process_count()}"
    if not result < 1e-3:
        raise SystemExit(f"{where}: differs from a dense layer by {result}")
    print(f"{where}: ranks {group.ranks} of {group.n_ranks}, transport {group.transport}")
    print(f"{where}: equal to a dense layer")
    jax.distributed.shutdown()


if __name__ == "__main__":
    main()
