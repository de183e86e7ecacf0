"""The training loop, and the history that it keeps."""

import dataclasses
import itertools
import time
from typing import Any

import numpy as np
import optax
from numpy.typing import NDArray
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

import data
from program import Metrics, Program, State

N_WINDOWS = 16  # of a batch, over all ranks
LEARNING_RATE = 4e-3
HELD_OUT_EVERY = 50  # steps between evaluations on part of the held-out text


@dataclasses.dataclass
class History:
    """The reports of the steps."""

    losses: list[float] = dataclasses.field(default_factory=list)  # nats per byte
    seconds: list[float] = dataclasses.field(default_factory=list)
    n_dropped: int = 0  # rows, over all steps
    held_out: dict[int, float] = dataclasses.field(default_factory=dict)  # by step

    def add(self, metrics: Metrics) -> None:
        """Adds a step, except how long it took."""
        self.losses.append(float(metrics.loss))
        self.n_dropped += int(metrics.n_dropped)

    def tokens_per_second(self, tokens_per_step: int) -> float:
        """Returns the speed of the median step, which excludes compilation."""
        return tokens_per_step / float(np.median(self.seconds))


def make_optimizer(n_steps: int) -> optax.GradientTransformation:
    """Returns AdamW with a short warm-up, then cosine decay over `n_steps`."""
    schedule = optax.warmup_cosine_decay_schedule(
        init_value=0, peak_value=LEARNING_RATE, warmup_steps=10, decay_steps=n_steps
    )
    return optax.chain(optax.clip_by_global_norm(1), optax.adamw(schedule, b2=0.98))


def train(
    program: Program, state: State, text: data.Text, steps: range, history: History, title: str
) -> State:
    """Runs `steps`, adds them to `history` and returns the state after the last one."""
    context = program.config.context
    bar = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    with Progress(*bar, TextColumn("{task.fields[status]}")) as progress:
        task = progress.add_task(f"{title:28}", total=len(steps), status="compiling")
        for step in steps:
            started = time.perf_counter()
            windows = data.training_batch(text.training, step, N_WINDOWS, context)
            state, metrics = program.train_step(state, program.put(windows))
            history.add(metrics)
            history.seconds.append(time.perf_counter() - started)
            if (step + 1) % HELD_OUT_EVERY == 0:
                loss = held_out_loss(program, state.params, text.held_out, every=4)
                history.held_out[step + 1] = loss
            speed = history.tokens_per_second(N_WINDOWS * context)
            status = f"loss {history.losses[-1]:.2f}  {speed:,.0f} tokens/s"
            progress.update(task, advance=1, status=status)
    return state


def held_out_loss(program: Program, params: Any, text: NDArray[np.uint8], every: int = 1) -> float:
    """Returns the mean loss in nats per byte over each `every`-th batch of `text`."""
    batches = data.held_out_batches(text, N_WINDOWS, program.config.context)
    losses = [
        float(program.evaluate(params, program.put(batch))[0])  # does not run ahead
        for batch in itertools.islice(batches, 0, None, every)
    ]
    return float(np.mean(losses))
