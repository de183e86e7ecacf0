"""Compares training steps with the same steps without expert parallelism."""

import dataclasses
from typing import Any

import click
import jax
import numpy as np
from rich.progress import track

import data
from program import Program, State
from train import N_WINDOWS, History

# Allowed in the median step, and in any. Steps are in float32 and differ in the order of their
# sums. Seldom, a router finds two experts equally good and picks the other one for a token; this
# changes gradients by up to 3e-2.
LOSS_TOLERANCES = 1e-4, 1e-2  # absolute, nats per byte
GRAD_TOLERANCES = 1e-3, 1e-1  # relative


@dataclasses.dataclass
class Comparison:
    """The results of the same steps without expert parallelism."""

    losses: list[float] = dataclasses.field(default_factory=list)  # nats per byte
    grad_errors: list[float] = dataclasses.field(default_factory=list)  # relative

    def verdict(self, history: History) -> str:
        """Returns a text that says how close the steps are.

        Raises:
            click.ClickException: they differ by more than the tolerances, or rows were dropped.
        """
        loss_errors = np.abs(np.subtract(history.losses, self.losses))
        findings = [
            check("losses", loss_errors, LOSS_TOLERANCES),
            check("gradients", self.grad_errors, GRAD_TOLERANCES),
            (history.n_dropped == 0, f"{history.n_dropped} rows were dropped (allowed: 0)"),
        ]
        lines = [f"{len(self.losses)} steps with and without expert parallelism"]
        verdict = "\n".join(lines + [line for _, line in findings])
        if not all(is_met for is_met, _ in findings):
            raise click.ClickException(verdict)
        return verdict


def check(name: str, errors: Any, tolerances: tuple[float, float]) -> tuple[bool, str]:
    """Returns whether `errors` are within `tolerances` (median, largest), and a text."""
    found = np.median(errors), np.max(errors)
    is_met = found[0] <= tolerances[0] and found[1] <= tolerances[1]  # NaN is not
    return bool(is_met), (
        f"{name} differ by {found[0]:.0e} in the median step (allowed: {tolerances[0]:.0e}), "
        f"by {found[1]:.0e} at most (allowed: {tolerances[1]:.0e})"
    )


def train_and_compare(
    program: Program, reference: Program, state: State, text: data.Text, steps: range
) -> tuple[State, History, Comparison]:
    """Runs `steps`. `reference` repeats each on one device, from the same parameters."""
    history, comparison = History(), Comparison()
    for step in track(steps, f"{'compared steps':28}"):
        windows = data.training_batch(text.training, step, N_WINDOWS, program.config.context)
        params = jax.device_put(state.params, jax.devices()[0])
        expected_grads, expected = reference.gradient(params, reference.put(windows))
        comparison.losses.append(float(expected.loss))
        grads, _ = program.gradient(state.params, program.put(windows))
        comparison.grad_errors.append(relative_error(grads, expected_grads))
        state, metrics = program.train_step(state, program.put(windows))
        history.add(metrics)
    return state, history, comparison


def relative_error(grads: Any, expected: Any) -> float:
    """Returns the largest error of an array in `grads`, relative to the array's norm."""

    def error(got: jax.Array, wanted: jax.Array) -> float:
        got, wanted = np.asarray(got), np.asarray(wanted)
        return float(np.linalg.norm(got - wanted) / np.linalg.norm(wanted))

    return max(jax.tree.leaves(jax.tree.map(error, grads, expected)))
