"""Trains a small MoE language model with expert parallelism, and checks the result.

    python examples/demo

The experts of each layer are spread over 8 virtual CPU devices, or over the GPUs if JAX finds any.

The files, in the order in which a token passes through them:

    data.py      the text, as windows of bytes
    model.py     bytes to logits
    experts.py   tokens to their experts and back: the part that uses jax_ep
    program.py   the jitted steps: training, evaluation, sampling

Around these: compare.py (the first steps, with and without expert parallelism), train.py (the
others), traffic.py and plots.py (the figures).
"""

import dataclasses
import math
import time
from pathlib import Path
from typing import Any

import click
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

import data
import jax_ep
import plots
from compare import train_and_compare
from experts import AXIS, dense, expert_parallel
from model import ModelConfig
from program import Program
from traffic import count_traffic
from train import N_WINDOWS, held_out_loss, make_optimizer, train

N_COMPARED = 20  # steps that are run twice, with and without expert parallelism
N_SAMPLED = 240  # bytes
PROMPT = "If the argument is not a string, an exception is raised. Otherwise, the class "


@click.command(help=__doc__.splitlines()[0])
@click.option("--steps", default=600, show_default=True, type=click.IntRange(min=50))
@click.option(
    "--devices",
    type=click.Choice(["1", "2", "4", "8", "16"]),
    help="Number of ranks.  [default: all GPUs, or 8 virtual CPU devices]",
)
@click.option("--transport", default="auto", show_default=True, help="Transport of jax_ep.")
@click.option(
    "--out", default="demo_out", show_default=True, type=Path, help="Folder for the figures."
)
def main(steps: int, devices: str | None, transport: str, out: Path) -> None:
    started = time.perf_counter()
    mesh = make_mesh(int(devices or 0))
    text = data.load_text()
    entropy = data.unigram_entropy(text.held_out)
    config, optimizer = ModelConfig(), make_optimizer(steps)
    group = make_group(mesh, transport, config, N_WINDOWS)
    program = Program(config, expert_parallel(mesh, group), optimizer, mesh)
    state = program.new_state()
    describe(text, state.params, group)

    reference = Program(config, dense, optimizer)
    first, rest = range(N_COMPARED), range(N_COMPARED, steps)
    state, history, comparison = train_and_compare(program, reference, state, text, first)
    say("check", comparison.verdict(history))
    state = train(program, state, text, rest, history, "remaining steps")

    loss = history.held_out[steps] = held_out_loss(program, state.params, text.held_out)
    say("loss", f"{loss:.2f} nats per byte of held-out text; unigram entropy {entropy:.2f}")
    speed = history.tokens_per_second(N_WINDOWS * config.context)
    say("speed", f"{speed:,.0f} tokens/s in training, excluding compilation")
    show_sample(program, state.params, transport)

    out.mkdir(parents=True, exist_ok=True)
    plots.plot_loss(out / "loss.png", history, comparison.losses, entropy)
    windows = next(data.held_out_batches(text.held_out, N_WINDOWS, config.context))
    counts = count_traffic(group, program, state.params, windows)
    plots.plot_traffic(out / "traffic.png", counts)
    say("figures", f"{out / 'loss.png'}, {out / 'traffic.png'}")
    say("time", f"{time.perf_counter() - started:.0f} s")
    if not loss < entropy:
        raise click.ClickException(
            "The model must do better than the frequencies of single bytes; it did not."
        )


def make_mesh(n_devices: int) -> Mesh:
    """Returns a mesh of `n_devices`; 0 means all GPUs, or 8 virtual CPU devices."""
    n_cpu_devices = n_devices or 8
    # Twice as many, so that programs may run ahead (docs/sharp_bits.md). No effect on GPUs.
    jax.config.update("jax_num_cpu_devices", 2 * n_cpu_devices)
    jax.config.update("jax_default_matmul_precision", "float32")
    devices = jax.devices()
    if devices[0].platform == "cpu":
        devices = devices[:n_cpu_devices]
    n_devices = n_devices or math.gcd(len(devices), ModelConfig.n_experts)
    if n_devices > len(devices):
        raise click.BadParameter(f"--devices {n_devices}: JAX has {len(devices)}.")
    return Mesh(np.array(devices[:n_devices]), (AXIS,))


def make_group(mesh: Mesh, transport: str, config: ModelConfig, n_windows: int) -> jax_ep.EPGroup:
    """Returns a group for batches of `n_windows`.

    It has room for the worst case, so no row is dropped, whatever the routers choose. The demo
    still adds up `Dispatched.n_dropped`, and `compare.py` requires the sum to be 0.
    """
    ep_config = jax_ep.EPConfig(
        n_experts=config.n_experts,
        top_k=config.top_k,
        hidden_size=config.hidden_size,
        max_tokens_per_rank=n_windows // mesh.size * config.context,
        token_format=jax_ep.Plain(jnp.float32),
        combine_dtype=jnp.float32,
    )
    try:
        return jax_ep.ep_init(mesh, AXIS, ep_config, transport)
    except ValueError as error:
        raise click.ClickException(str(error)) from error


def describe(text: data.Text, params: Any, group: jax_ep.EPGroup) -> None:
    """Prints the sizes of the text, the model and the group."""
    train_kb, held_out_kb = (len(part) // 1000 for part in text)
    say("text", f"{train_kb} kB of Python's help topics, and {held_out_kb} kB held out")
    n_params = sum(leaf.size for leaf in jax.tree.leaves(params))
    experts = f"{group.config.n_experts} experts per layer, top-{group.config.top_k}"
    say("model", f"{n_params:,} parameters in float32, {experts}")
    device = jax.devices()[0].device_kind
    ranks = f"{group.n_ranks} x {device}, {group.n_local_experts} experts per layer on each"
    say("ranks", f"{ranks}, transport {group.transport}")


def show_sample(program: Program, params: Any, transport: str) -> None:
    """Prints a continuation of `PROMPT`: every rank samples one, and rank 0's is shown.

    The batch, one window per rank, is smaller than in training, so a second, smaller group serves
    it, with the same parameters.
    """
    mesh, config = program.mesh, program.config
    prompt = np.frombuffer(PROMPT.encode(), np.uint8)[-config.context :]
    prompts = program.put(np.tile(prompt.astype(np.int32), (mesh.size, 1)))
    with make_group(mesh, transport, config, n_windows=mesh.size) as group:
        sampler = dataclasses.replace(program, run_experts=expert_parallel(mesh, group))
        sampled = sampler.sample(params, prompts, N_SAMPLED, jax.random.key(0))
        text = np.asarray(sampled[0], np.uint8)
    say("prompt", PROMPT)
    say("sample", text.tobytes().decode(errors="replace"))


def say(topic: str, message: str) -> None:
    """Prints a message with a topic in front; further lines are aligned with the first."""
    for line in message.splitlines():
        click.echo(f"{topic:8}{line}")
        topic = ""


if __name__ == "__main__":
    main()
