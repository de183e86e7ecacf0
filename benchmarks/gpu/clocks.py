"""What a GPU does to its clock while something runs: nvidia-smi, beside it."""

from __future__ import annotations

import shutil
import statistics
import subprocess
import types
from typing import Any

_FIELDS = ("clocks.sm", "power.draw.instant", "clocks_event_reasons.sw_power_cap")
_INTERVAL_MS = 50


class Clocks:
    """Samples all GPUs while the `with` runs; `summary` is there afterwards.

    Attributes:
        summary: medians over samples and GPUs, and the share of samples in which the
            power limit held the clock down; None if there is no nvidia-smi.
    """

    summary: dict[str, float] | None = None

    def __enter__(self) -> Clocks:
        command = [
            "nvidia-smi",
            f"--query-gpu={','.join(_FIELDS)}",
            "--format=csv,noheader,nounits",
            f"--loop-ms={_INTERVAL_MS}",
        ]
        self._process: Any = None
        if shutil.which(command[0]):
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: types.TracebackType | None,
    ) -> None:
        if self._process is None:
            return
        self._process.terminate()
        self.summary = summarise(self._process.communicate()[0])


def summarise(text: str) -> dict[str, float] | None:
    """Of nvidia-smi's lines; the last one may be cut off."""
    lines = [line.split(", ") for line in text.splitlines()]
    samples = [line for line in lines if len(line) == len(_FIELDS)]
    if not samples:
        return None
    return {
        "sm_mhz": statistics.median(float(sample[0]) for sample in samples),
        "watts": statistics.median(float(sample[1]) for sample in samples),
        "power_capped": statistics.mean(sample[2] == "Active" for sample in samples),
    }
