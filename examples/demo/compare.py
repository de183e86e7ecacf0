"""Compares a training run with the same steps without expert parallelism."""

import click
import numpy as np

from train import History

# Both runs are in float32 and differ in the order of their sums: by about 1e-6 after one step, and
# by more after every further step.
LOSS_TOLERANCE = 1e-4  # absolute, nats per byte
GRAD_NORM_TOLERANCE = 1e-3  # relative


def compare(history: History, reference: History) -> str:
    """Returns a text that says how close the runs are.

    Raises:
        click.ClickException: the runs differ by more than the tolerances, or rows were dropped.
    """
    loss = np.abs(np.subtract(history.losses, reference.losses)).max()
    norms = np.divide(history.grad_norms, reference.grad_norms)
    grad_norm = np.abs(norms - 1).max()
    verdict = (
        f"{len(history.losses)} steps with and without expert parallelism\n"
        f"losses differ by {loss:.0e} at most (allowed: {LOSS_TOLERANCE:.0e})\n"
        f"gradient norms differ by {grad_norm:.0e} at most, relatively "
        f"(allowed: {GRAD_NORM_TOLERANCE:.0e})\n"
        f"{history.n_dropped} rows were dropped (allowed: 0)"
    )
    # NaN fails these comparisons.
    if loss <= LOSS_TOLERANCE and grad_norm <= GRAD_NORM_TOLERANCE:
        if history.n_dropped == 0:
            return verdict
    raise click.ClickException(verdict)
