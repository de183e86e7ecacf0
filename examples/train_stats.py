"""Trains three MoE layers and shows what the run did: balance, drops, waits and traffic.

    python examples/train_stats.py --steps 120 --out train_stats.png

The layers return the load of their experts; `EPGroup.stats` has the traffic of all calls and how
long ranks waited for each other. Needs the extra `demo`.
"""

import argparse
import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import P
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

import jax_ep

N_LAYERS, N_TOKENS, FFN_SIZE = 3, 64, 128  # N_TOKENS: per rank and step
BALANCE_WEIGHT = 0.05
N_TOPICS = 12  # of the data: tokens of a topic are alike and have the same target

jax.config.update("jax_num_cpu_devices", 16)  # if there is no GPU; 8 would do from jaxlib 0.12 on
mesh = jax.sharding.Mesh(jax.devices()[:8], ("ep",))
config = jax_ep.EPConfig(
    n_experts=4 * mesh.size,
    top_k=2,
    hidden_size=64,
    max_tokens_per_rank=N_TOKENS,
    token_format=jax_ep.Plain(jnp.float32),
    combine_dtype=jnp.float32,
    recv_capacity=2 * 2 * N_TOKENS,  # twice the mean
)
E, H = config.n_experts, config.hidden_size
SPECS = {"router": P(), "gate_up": P(None, "ep"), "down": P(None, "ep")}  # [N_LAYERS, ...]


def new_params() -> dict[str, jax.Array]:
    shapes = {"router": (H, E), "gate_up": (E, H, 2 * FFN_SIZE), "down": (E, FFN_SIZE, H)}
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return {
        name: jax.random.normal(key, (N_LAYERS, *shape)) / np.sqrt(shape[-2])
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def batch(step: int) -> tuple[jax.Array, jax.Array]:
    """Tokens of random topics, and their targets: `[8 N_TOKENS, H]`."""
    rng = np.random.default_rng(0)
    centers, targets = rng.standard_normal((2, N_TOPICS, H)) + 0.5
    rng = np.random.default_rng([1, step])
    topics = rng.integers(0, N_TOPICS, mesh.size * N_TOKENS)
    tokens = centers[topics] + 0.5 * rng.standard_normal((len(topics), H))
    return jnp.float32(tokens), jnp.float32(targets[topics])


def moe_layer(group, tokens, params):
    """One rank's tokens after one layer; its load, summed over the ranks."""
    scores = jax.nn.softmax(jnp.matmul(tokens, params["router"], precision="highest"))
    weights, ids = jax.lax.top_k(scores, config.top_k)
    rows = jax_ep.dispatch(group, tokens, ids, weights)
    results = jax_ep.expert_mlp(rows, params["gate_up"], params["down"])
    out = jax_ep.combine(group, results, rows, residual=tokens)
    chosen = jax.lax.psum(jax.nn.one_hot(ids, E).sum((0, 1)), "ep")
    # The load-balancing loss of Switch Transformers, equation 4, for several choices per token.
    balance = E * jnp.sum(chosen / chosen.sum() * jax.lax.pmean(scores.mean(0), "ep"))
    dropped = jax.lax.psum(rows.n_dropped, "ep")
    return out, {"chosen": chosen, "dropped": dropped, "balance": balance}


def make_step(group, optimizer):
    def forward(params, tokens, targets):
        out, load = jax.lax.scan(lambda x, layer: moe_layer(group, x, layer), tokens, params)
        return jax.lax.pmean(jnp.mean((out - targets) ** 2), "ep"), load

    specs = SPECS, P("ep"), P("ep")
    mapped = jax.shard_map(forward, mesh=mesh, in_specs=specs, out_specs=P())

    def loss(params, *data):
        error, load = mapped(params, *data)
        return error + BALANCE_WEIGHT * load["balance"].mean(), (error, load)

    @jax.jit
    def step(params, state, *data):
        grads, (error, load) = jax.grad(loss, has_aux=True)(params, *data)
        updates, state = optimizer.update(grads, state)
        return optax.apply_updates(params, updates), state, error, load

    return step


@dataclasses.dataclass
class History:
    """The error, balance, drops and waits of each step."""

    errors: list[float] = dataclasses.field(default_factory=list)
    imbalance: list[np.ndarray] = dataclasses.field(default_factory=list)  # [N_LAYERS]
    dropped: list[np.ndarray] = dataclasses.field(default_factory=list)  # [N_LAYERS], percent
    waited_ms: list[np.ndarray] = dataclasses.field(default_factory=list)  # [2], totals

    def add(self, error, load, stats: list[jax_ep.RankStats]) -> None:
        by_rank = np.asarray(load["chosen"]).reshape(N_LAYERS, mesh.size, -1).sum(2)
        self.errors.append(float(error))
        self.imbalance.append(by_rank.max(1) / by_rank.mean(1))
        self.dropped.append(100 * np.asarray(load["dropped"]) / by_rank.sum(1))
        # A rank waits for all others at once: the longest wait counts. The mean over the ranks.
        waits = np.stack([one.wait_s.max(axis=1) for one in stats])
        self.waited_ms.append(1e3 * waits.mean(axis=0))

    def waited_per_step(self) -> np.ndarray:
        """`[n_steps - 1, 2]`, without the first step, in which ranks wait for the compiler."""
        return np.diff(self.waited_ms, axis=0)


def train(group, n_steps: int) -> History:
    history, params, optimizer = History(), new_params(), optax.adam(3e-3)
    state, step = optimizer.init(params), make_step(group, optimizer)
    for i in range(n_steps):
        params, state, error, load = jax.block_until_ready(step(params, state, *batch(i)))
        history.add(error, load, group.stats())
    return history


def table(history: History) -> Table:
    n = max(1, len(history.errors) // 10)
    title = f"Means of the first {n} and of the last {n} of {len(history.errors)} steps"
    result = Table("layer", title=title)
    for name in ("rows of the busiest rank / mean", "choices dropped"):
        result.add_column(name, justify="right")
    imbalance, dropped = (
        [np.mean(values[:n], axis=0), np.mean(values[-n:], axis=0)]
        for values in (history.imbalance, history.dropped)
    )
    for i in range(N_LAYERS):
        balance = f"{imbalance[0][i]:.2f} -> {imbalance[1][i]:.2f}"
        result.add_row(str(i), balance, f"{dropped[0][i]:.1f} % -> {dropped[1][i]:.1f} %")
    return result


def draw(history: History, stats: list[jax_ep.RankStats]) -> Figure:
    figure = Figure(figsize=(10, 9), layout="constrained")
    above, below = figure.subfigures(2, height_ratios=(2, 5))
    balance, drops, waits = above.subplots(1, 3)
    names = [f"layer {i}" for i in range(N_LAYERS)]
    balance.plot(history.imbalance, label=names)
    balance.set(title="rows of the busiest rank / mean", ylim=(1, None))
    drops.plot(history.dropped, label=names)
    drops.set(title="choices dropped, percent", ylim=(0, None))
    steps = np.arange(1, len(history.errors))
    waits.plot(steps, history.waited_per_step(), label=["dispatch", "combine"], lw=1)
    waits.set(title="ms waited for others", ylim=(0, None))
    for axes in (balance, drops, waits):
        axes.set_xlabel("step")
        axes.legend(frameon=False)
    jax_ep.plot_traffic(stats, below)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--out", type=Path, default=Path("train_stats.png"))
    options = parser.parse_args()
    with jax_ep.ep_init(mesh, "ep", config) as group:
        history = train(group, options.steps)
        stats = group.stats()
    console = Console()
    console.print(table(history))
    dispatch, combine = history.waited_per_step().mean(axis=0)
    console.print(f"waited per step: {dispatch:.1f} ms in dispatch, {combine:.1f} ms in combine")
    console.print(f"squared error: {history.errors[0]:.2f} -> {history.errors[-1]:.2f}")
    draw(history, stats).savefig(options.out, dpi=80)
    console.print(f"wrote {options.out}")


if __name__ == "__main__":
    main()
