"""The training loop, and the history that it keeps."""

import dataclasses
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from numpy.typing import NDArray
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from checkpoint import Checkpoints
from data import Data
from events import Events
from layout import put_batch
from program import Metrics, Program


@dataclasses.dataclass
class History:
    """The reports of the steps of this run."""

    first_step: int = 0
    seconds: list[float] = dataclasses.field(default_factory=list)
    metrics: list[Metrics] = dataclasses.field(default_factory=list)  # as NumPy arrays

    def column(self, name: str) -> NDArray[Any]:
        """Returns one of `Metrics` by step."""
        return np.array([getattr(metrics, name) for metrics in self.metrics])

    def newest(self) -> tuple[dict[str, Any], NDArray[np.int32]]:
        """Returns the numbers of the last step, and its loads [L, E]."""
        numbers = self.metrics[-1]._asdict() | {"seconds": self.seconds[-1]}
        load = numbers.pop("expert_load")
        return numbers, load

    @property
    def busiest(self) -> NDArray[np.float64]:
        """Returns [n_steps, L]: the load of the busiest expert in terms of the mean."""
        load = self.column("expert_load")
        return load.max(axis=-1) / load.mean(axis=-1)


@dataclasses.dataclass(frozen=True)
class Loop:
    """What a run trains on, and for how long."""

    program: Program
    mesh: Mesh
    data: Data
    n_sequences: int  # of a batch, over all devices
    sequence: int  # tokens
    checkpoints: Checkpoints | None = None
    save_every: int | None = None  # steps
    events: Events | None = None
    profile: Path | None = None  # folder for a trace of the last two steps

    def run(self, state: Any, first: int, last: int) -> tuple[Any, History]:
        """Runs the steps from `first` to before `last`; saves the last state."""
        history = History(first)
        columns = BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[status]}")
        with Progress(TextColumn("{task.description}"), *columns) as progress:
            task = progress.add_task("training", total=last, completed=first, status="compiling")
            batch = self._batch(first)
            for step in range(first, last):
                if self.profile and step == max(first, last - 2):
                    jax.profiler.start_trace(self.profile)
                started = time.perf_counter()
                state, metrics = self.program.step(state, batch)
                batch = self._batch(step + 1)  # while the devices work
                history.metrics.append(jax.device_get(metrics))  # waits
                history.seconds.append(time.perf_counter() - started)
                if self.events:
                    self.events.write(step + 1, *history.newest())
                self._save(step + 1, last, state)
                progress.update(task, completed=step + 1, status=self._status(history))
        if self.profile:
            jax.profiler.stop_trace()
        return state, history

    def _batch(self, step: int) -> jax.Array:
        return put_batch(self.mesh, self.data.batch(step, self.n_sequences, self.sequence))

    def _save(self, n_steps: int, last: int, state: Any) -> None:
        is_due = n_steps == last or (self.save_every and n_steps % self.save_every == 0)
        if self.checkpoints and is_due:
            self.checkpoints.save(n_steps, state)

    def _status(self, history: History) -> str:
        speed = self.n_sequences * self.sequence / float(np.median(history.seconds))
        loss, busiest = history.metrics[-1].loss, history.busiest[-1].max()
        return f"loss {loss:.3f}  busiest expert {busiest:.1f}x  {speed:,.0f} tokens/s"
