"""Checkpoints of the training state, by Orbax."""

from pathlib import Path
from typing import Any

import jax


class Checkpoints:
    """The newest two checkpoints in a folder, by the number of steps that led to them.

    Raises:
        ValueError: Orbax is not installed.
    """

    def __init__(self, folder: Path):
        try:
            import orbax.checkpoint as ocp
        except ImportError as error:
            raise ValueError("--checkpoints needs Orbax: pip install orbax-checkpoint.") from error
        self._args = ocp.args
        options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=False)
        self._manager = ocp.CheckpointManager(folder.absolute(), options=options)

    def save(self, n_steps: int, state: Any) -> None:
        """Saves the state after `n_steps`."""
        self._manager.save(n_steps, args=self._args.StandardSave(state))

    def restore(self, abstract_state: Any) -> tuple[int, Any] | None:
        """Returns the newest checkpoint, each array sharded as in `abstract_state`; or None."""
        n_steps = self._manager.latest_step()
        if n_steps is None:
            return None
        state = self._manager.restore(n_steps, args=self._args.StandardRestore(abstract_state))
        return n_steps, jax.block_until_ready(state)

    def close(self) -> None:
        self._manager.close()
