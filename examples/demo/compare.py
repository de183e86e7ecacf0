"""Holds a training run against the same steps without expert parallelism."""

import click
import numpy as np

from train import History

# Both runs are in float32 and differ in the order of their sums: about 1e-6 after one
# step, which every further step enlarges.
LOSS_TOLERANCE = 1e-4  # absolute, nats per byte
GRAD_NORM_TOLERANCE = 1e-3  # relative


def compare(history: History, reference: History) -> str:
    """Returns how close the runs are.

    Raises:
        click.ClickException: not within the tolerances, or rows were dropped.
    """
    loss = np.abs(np.subtract(history.losses, reference.losses)).max()
    norms = np.divide(history.grad_norms, reference.grad_norms)
    grad_norm = np.abs(norms - 1).max()
    verdict = (
        f"{len(history.losses)} steps with and without expert parallelism\n"
        f"losses differ by {loss:.0e} at most (allowed: {LOSS_TOLERANCE:.0e})\n"
        f"gradient norms by {grad_norm:.0e} of their value "
        f"(allowed: {GRAD_NORM_TOLERANCE:.0e})\n"
        f"{history.n_dropped} rows were dropped (allowed: 0)"
    )
    # Written so that NaN fails.
    if loss <= LOSS_TOLERANCE and grad_norm <= GRAD_NORM_TOLERANCE:
        if history.n_dropped == 0:
            return verdict
    raise click.ClickException(verdict)
