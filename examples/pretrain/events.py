"""Event files for TensorBoard, by tensorboardX: numbers of each step, and pictures of the loads."""

from pathlib import Path
from typing import Any

import numpy as np

N_BETWEEN = 10  # steps from one picture to the next
DARKEST = 4.0  # load over the mean from which on colors are the same
PIXELS = 8  # per expert and layer, in each direction


class Events:
    """A folder of event files: `tensorboard --logdir FOLDER` shows them while the run goes on.

    Raises:
        ValueError: tensorboardX is not installed.
    """

    def __init__(self, folder: Path):
        try:
            from tensorboardX import SummaryWriter
        except ImportError as error:
            raise ValueError(
                "--tensorboard needs tensorboardX: pip install tensorboardX."
            ) from error
        self._writer = SummaryWriter(str(folder))

    def write(self, step: int, numbers: dict[str, Any], expert_load: np.ndarray) -> None:
        """Writes a step's numbers, and at times its loads, [L, E], as layers x experts."""
        relative = expert_load / expert_load.mean(axis=1, keepdims=True)
        busiest = relative.max(axis=1)
        by_layer = {f"busiest_expert/layer_{i + 1}": load for i, load in enumerate(busiest)}
        for name, number in (numbers | by_layer).items():
            self._writer.add_scalar(name, float(number), step)
        if step % N_BETWEEN == 1:
            self._writer.add_image("layers_x_experts", picture(relative), step, dataformats="HWC")

    def close(self) -> None:
        self._writer.close()


def picture(relative: np.ndarray) -> np.ndarray:
    """Returns uint8[L * PIXELS, E * PIXELS, 3] of loads over their mean, [L, E]: 0 is white."""
    share = np.minimum(relative / DARKEST, 1)[..., None]
    colors = 255 - share * (255 - np.array([8, 48, 107]))
    return np.kron(colors, np.ones((PIXELS, PIXELS, 1))).astype(np.uint8)
