"""A process that gives one JSON object per line, each within a time."""

from __future__ import annotations

import json
import pathlib
import queue
import subprocess
import sys
import threading
from types import TracebackType
from typing import Any

_GRACE_S = 5.0


class Child:
    """`python benchmarks --measure-gpu REQUEST`; killed when the `with` ends."""

    def __init__(
        self, benchmarks: pathlib.Path, request: dict, environment: dict[str, str]
    ) -> None:
        command = [
            sys.executable,
            str(benchmarks),
            "--measure-gpu",
            json.dumps(request),
        ]
        self._process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, text=True
        )
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.is_lost = False

    def next(self, seconds: float) -> dict[str, Any]:
        """The next object; `{"failed": [why]}`, and `is_lost`, if none comes."""
        try:
            line = self._lines.get(timeout=seconds)
        except queue.Empty:
            return self._lose(f"not done after {seconds:.0f} s")
        if line is None:
            return self._lose(f"exit code {self._process.wait()}")
        return json.loads(line)

    def __enter__(self) -> Child:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if not self.is_lost and exc_type is None:
            try:
                self._process.wait(_GRACE_S)
            except subprocess.TimeoutExpired:
                pass
        self._process.kill()
        self._process.wait()
        self._reader.join()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _lose(self, why: str) -> dict[str, Any]:
        self.is_lost = True
        return {"failed": [why]}

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                self._lines.put(line)
            else:
                sys.stderr.write(line)
        self._lines.put(None)
