"""Trains a model of Qwen3-30B-A3B's shape with expert parallelism, and measures the speed.

    python examples/pretrain --tiny --steps 60                 on CPUs, half a minute
    python examples/pretrain --layers 4 --batch 4 --steps 12   on a GPU with 80 GB

The files, from the bottom up:

    sizes.py       the model's sizes, and the operations that they imply
    layout.py      the mesh, data x expert, and what is where
    data.py        batches: a Markov chain, or the bytes of text files
    loss.py        cross-entropy of a large vocabulary
    ragged.py      the MoE layer to compare with, by jax.lax.ragged_dot or tokamax
    experts.py     which MoE layer: the part that uses jax_ep
    model.py       windows of tokens to their loss
    program.py     the state and the jitted step
    events.py      event files for TensorBoard
    checkpoint.py  saving and restoring the state
    train.py       the loop
    results.py     speed, memory, versions, as JSON
    plots.py       the figures
"""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import click
import jax
import jax.numpy as jnp

import experts
import results
from checkpoint import Checkpoints
from data import Data, MarkovChain, Text
from events import Events
from layout import make_mesh
from model import Transformer
from program import Program, make_optimizer
from sizes import QWEN3_30B_A3B, TINY, Sizes
from train import History, Loop

positive = click.IntRange(min=1)
FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
option = functools.partial(click.option, show_default=True)


@click.command(help=__doc__.splitlines()[0])
@option("--tiny", is_flag=True, help="A model for CPUs and tests.")
@option("--layers", type=positive, help="Layers of the model.  [default: the model's own]")
@option("--experts", "kind", type=click.Choice(experts.KINDS), default="jax_ep")
@option("--transport", default="auto", help="Transport of jax_ep.")
@option("--capacity", type=float, help="Rows of a device over their mean.  [default: no limit]")
@option("--expert-copies", type=click.IntRange(min=0), default=0, help="To balance each step.")
@option("--data-parallel", type=positive, default=1, help="Size of the data axis.")
@option("--expert-parallel", type=positive, help="Of the expert axis.  [default: all devices]")
@option("--batch", type=positive, help="Sequences per step.  [default: 2 per device]")
@option("--sequence", type=positive, help="Tokens of each.  [default: 4096; 64 if --tiny]")
@option("--steps", type=positive, default=20, help="Length of the learning rate's schedule.")
@option("--stop-at", type=positive, help="Step to stop at.  [default: --steps]")
@option("--learning-rate", type=float, help="Peak.  [default: 3e-4; 1e-2 if --tiny]")
@option("--warm-up", type=positive, help="Steps to that peak.  [default: a tenth of --steps]")
@option("--balance", type=float, help="Weight of the balance loss.  [default: 1e-3; 0.1 if --tiny]")
@option("--z-loss", type=float, default=0.0, help="Weight of the router's z-loss.")
@option(
    "--dtype", type=click.Choice(["bfloat16", "float32"]), help="  [default: float32 if --tiny]"
)
@option("--remat", is_flag=True, help="Recompute each layer in the backward pass.")
@option("--loss-chunks", type=positive, default=4, help="Parts that a sequence's logits come in.")
@option("--text", type=FILE, multiple=True, help="File whose bytes are the data, or several.")
@option("--seed", type=int, default=0, help="Of data and initial parameters.")
@option("--checkpoints", type=Path, help="Folder to resume from and save to.  [default: none]")
@option("--save-every", type=positive, help="Steps between checkpoints.  [default: the last only]")
@option("--out", type=Path, default=Path("pretrain_out"), help="Folder for results and figures.")
@option("--plots/--no-plots", default=True, help="Whether to draw the figures.")
@option("--tensorboard", type=Path, help="Folder for TensorBoard's event files.  [default: none]")
@option("--profile", type=Path, help="Folder for a trace of the last two steps.  [default: none]")
def main(**options: Any) -> None:
    try:
        run(Options(**options))
    except ValueError as error:
        raise click.ClickException(str(error)) from error


@dataclasses.dataclass(kw_only=True)
class Options:
    """The options of the command line; defaults that depend on others are filled in."""

    tiny: bool
    layers: int | None
    kind: str
    transport: str
    capacity: float | None
    expert_copies: int
    data_parallel: int
    expert_parallel: int | None
    batch: int | None
    sequence: int | None
    steps: int
    stop_at: int | None
    learning_rate: float | None
    warm_up: int | None
    balance: float | None
    z_loss: float
    dtype: str | None
    remat: bool
    loss_chunks: int
    text: tuple[Path, ...]
    seed: int
    checkpoints: Path | None
    save_every: int | None
    out: Path
    plots: bool
    tensorboard: Path | None
    profile: Path | None

    def __post_init__(self):
        self.sequence = self.sequence or (64 if self.tiny else 4096)
        self.learning_rate = self.learning_rate or (1e-2 if self.tiny else 3e-4)
        self.warm_up = self.warm_up or max(1, self.steps // 10)
        self.balance = (0.1 if self.tiny else 1e-3) if self.balance is None else self.balance
        self.dtype = self.dtype or ("float32" if self.tiny else "bfloat16")
        self.stop_at = min(self.stop_at or self.steps, self.steps)
        if self.sequence % self.loss_chunks:
            raise ValueError(
                f"--loss-chunks must divide --sequence {self.sequence}; got {self.loss_chunks}."
            )

    @property
    def sizes(self) -> Sizes:
        """The sizes of the model."""
        sizes = TINY if self.tiny else QWEN3_30B_A3B
        return dataclasses.replace(sizes, n_layers=self.layers or sizes.n_layers)


def run(options: Options) -> None:
    """Trains, prints and writes what came of it."""
    sizes, sequence = options.sizes, options.sequence
    mesh = make_mesh(options.data_parallel, options.expert_parallel)
    n_sequences = options.batch or 2 * mesh.size
    if n_sequences % mesh.size:
        raise ValueError(f"--batch must be a multiple of {mesh.size} devices; got {n_sequences}.")
    program, group = make_program(options, mesh, n_sequences // mesh.size * sequence)
    source: Data = (
        Text(options.text, options.seed)
        if options.text
        else MarkovChain(sizes.vocabulary, options.seed)
    )
    described = describe(options, program, mesh, n_sequences, group and group.transport)
    checkpoints = Checkpoints(options.checkpoints) if options.checkpoints else None
    restored = checkpoints and checkpoints.restore(program.abstract_state)
    first, state = restored or (0, program.new_state())
    if first >= options.stop_at:
        raise ValueError(
            f"The newest checkpoint must be before step {options.stop_at}; got {first}."
        )
    if restored:
        say("resumed", f"after step {first}")
    events = Events(options.tensorboard) if options.tensorboard else None
    loop = Loop(
        program=program,
        mesh=mesh,
        data=source,
        n_sequences=n_sequences,
        sequence=sequence,
        checkpoints=checkpoints,
        save_every=options.save_every,
        events=events,
        profile=options.profile,
    )
    try:
        _, history = loop.run(state, first, options.stop_at)
    finally:
        for opened in filter(None, (checkpoints, events)):
            opened.close()
    report(options, described, history, source, n_sequences // mesh.size * sequence)
    report_ranks(options, history, group)
    say("written", str(options.out))


def make_program(options: Options, mesh: Any, n_tokens: int) -> tuple[Program, Any]:
    """Returns the program and its group, if it has one."""
    sizes, dtype, group = options.sizes, jnp.dtype(options.dtype), None
    if options.kind == "jax_ep":
        limits = options.capacity, options.expert_copies
        group = experts.make_group(mesh, sizes, n_tokens, dtype, *limits, options.transport)
    create_model = functools.partial(
        Transformer,
        sizes,
        mesh,
        experts.moe_of(options.kind, mesh, sizes, dtype, group),
        dtype=dtype,
        remat=options.remat,
        loss_chunks=options.loss_chunks,
    )
    program = Program(
        create_model,
        make_optimizer(options.learning_rate, options.warm_up, options.steps),
        mesh,
        balance_weight=options.balance,
        z_weight=options.z_loss,
        seed=options.seed,
    )
    return program, group


def describe(
    options: Options, program: Program, mesh: Any, n_sequences: int, transport: str | None
) -> dict[str, Any]:
    """Prints and returns what is trained where."""
    sizes = options.sizes
    layout = f"{mesh.shape['data']} x {mesh.shape['expert']} (data x expert)"
    say("model", f"{program.n_params:,} parameters, {sizes.n_layers} layers, {options.dtype}")
    say("devices", f"{layout} {jax.devices()[0].device_kind}")
    say("experts", f"{options.kind}{transport and f', transport {transport}' or ''}")
    return {
        "sizes": dataclasses.asdict(sizes),
        "n_params": program.n_params,
        "n_multiplied": sizes.n_multiplied,
        "flops_per_token": sizes.flops_per_token(options.sequence),
        "mesh": dict(mesh.shape),
        "experts": options.kind,
        "expert_copies": options.expert_copies,
        "transport": transport,
        "dtype": options.dtype,
        "remat": options.remat,
        "n_sequences": n_sequences,
        "sequence": options.sequence,
    }


def report(
    options: Options, described: dict[str, Any], history: History, source: Data, n_tokens: int
) -> None:
    """Prints and writes the results."""
    speed = results.speed_of(history, options.sizes, n_tokens, options.sequence)
    speed["peak_memory_gb"] = results.peak_memory_gb()
    losses, entropy = history.column("loss"), source.entropy
    facts = results.environment() | described | speed | {"entropy": entropy}
    limit = "" if entropy is None else f"; entropy of the data {entropy:.3f}"
    say("loss", f"{losses[0]:.3f} -> {losses[-1]:.3f} nats per token{limit}")
    say("dropped", f"{history.column('n_dropped').sum()} rows")
    mfu = "" if speed["mfu"] is None else f", {speed['mfu']:.1%} of the peak (MFU)"
    tflops = f"{speed['model_tflop_per_s_per_device']:,.3g} model TFLOP/s"
    say("speed", f"{speed['tokens_per_s_per_device']:,.0f} tokens/s per device, {tflops}{mfu}")
    if speed["peak_memory_gb"] is not None:
        say("memory", f"{speed['peak_memory_gb']} GB at most")
    options.out.mkdir(parents=True, exist_ok=True)
    results.write(options.out / "results.json", facts, history)
    if options.plots:
        import plots

        plots.plot_loss(options.out / "loss.png", history, entropy)
        plots.plot_balance(options.out / "balance.png", history)
        plots.plot_loads(options.out / "loads.png", history)


def report_ranks(options: Options, history: History, group: Any) -> None:
    """Prints and draws the rows that each rank's experts got, and those that it took."""
    taken = results.rows_of_ranks(group)
    if taken is None or taken.size == 1:
        return
    chosen = history.column("expert_load").sum(axis=(0, 1)).reshape(taken.size, -1).sum(axis=1)
    of_experts, of_rank = (f"{rows.max() / rows.mean():.2f}" for rows in (chosen, taken))
    say("ranks", f"the busiest took {of_rank} x the mean of rows, its experts {of_experts} x")
    if options.plots:
        import plots

        plots.plot_ranks(options.out / "ranks.png", chosen, taken)


def say(topic: str, message: str) -> None:
    """Prints a message with a topic in front."""
    click.echo(f"{topic:9}{message}")


if __name__ == "__main__":
    main()
