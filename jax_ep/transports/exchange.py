"""All-gather of bytes between processes, to open and close groups.

All processes take part in every step, in the same order. Every wait has a time limit.
"""

import collections
import dataclasses
import time
import zlib
from collections.abc import Callable
from typing import Any, Self

import jax
import numpy as np

from jax_ep._jax_compat import distributed_client

# (key, this process's payload) -> the payloads of all processes that take part, in order of process
# index.
ExchangeFn = Callable[[str, bytes], list[bytes]]

_OK, _FAILED = b"+", b"-"
# How long a process that has reached a time limit still waits for the others.
_AFTER_TIMEOUT_S = 2.0

# Exchanges created so far, by name. All processes create the same ones, so counts agree.
_n_made: collections.Counter[str] = collections.Counter()


@dataclasses.dataclass(frozen=True)
class Exchange:
    """All-gathers bytes between processes, step by step, to open or close a group."""

    name: str  # the same in all processes, and used once
    processes: tuple[int, ...]  # indices of those that take part, ascending
    process: int  # index of this one
    timeout_s: float  # to wait for the others in a step
    custom: ExchangeFn | None = None  # the user's; None uses JAX's distributed runtime
    client: Any = None  # of that runtime; None uses JAX's collectives

    @classmethod
    def over(
        cls, mesh: jax.sharding.Mesh, name: str, timeout_s: float, custom: ExchangeFn | None = None
    ) -> Self:
        """Between the processes that hold devices of the mesh.

        Each of them must create the same number of exchanges of a name.
        """
        devices = list(mesh.devices.flat)
        _n_made[name] += 1
        return cls(
            name=f"{name}/{_n_made[name]}",
            processes=tuple(sorted({device.process_index for device in devices})),
            process=jax.process_index(devices[0].client),
            timeout_s=timeout_s,
            custom=custom,
            client=distributed_client(),
        )

    @property
    def is_alone(self) -> bool:
        """Whether no other process takes part."""
        return self.processes == (self.process,)

    def __call__(self, step: str, payload: bytes, timeout_s: float | None = None) -> list[bytes]:
        """The payloads of all processes, by index; raises TimeoutError if one is missing."""
        if self.is_alone:
            return [payload]
        key = f"{self.name}/{step}"
        if self.custom is not None:
            return self._through_custom(self.custom, key, payload)
        if self.client is not None:
            return self._through_client(key, payload, timeout_s or self.timeout_s)
        return self._through_collectives(payload)

    def gather(
        self, step: str, make: Callable[[], bytes], timeout_s: float | None = None
    ) -> list[bytes]:
        """Exchanges the result of `make`; if it fails in a process, all raise RuntimeError.

        A process whose `make` raises TimeoutError waits for the others only briefly, and raises
        that error if one of them does not answer.
        """
        cause: Exception | None = None
        try:
            message = _OK + make()
        except Exception as error:
            cause = error
            message = _FAILED + (str(error) or type(error).__name__).encode()
        has_waited = isinstance(cause, TimeoutError)
        try:
            answers = self(step, message, _AFTER_TIMEOUT_S if has_waited else timeout_s)
        except Exception as error:
            if cause is None:
                raise
            if has_waited:
                raise cause from None
            raise error from cause
        for process, answer in zip(self.processes, answers, strict=True):
            if not answer.startswith(_OK):
                reason = answer[1:].decode(errors="replace")
                where = "" if self.is_alone else f"process {process}: "
                raise RuntimeError(where + reason) from cause
        return [answer[1:] for answer in answers]

    def agree(self, step: str, reason: str | None) -> str | None:
        """The first process's reason, the same in all of them; None if none has any.

        Args:
            step: as for a call.
            reason: why this process cannot take part, or None.
        """
        if self.is_alone:
            return reason
        answers = self(step, _OK if reason is None else _FAILED + reason.encode())
        for process, answer in zip(self.processes, answers, strict=True):
            if answer.startswith(_FAILED):
                return f"process {process}: {answer[1:].decode(errors='replace')}"
        return None

    def _through_client(self, key: str, payload: bytes, limit_s: float) -> list[bytes]:
        end = time.monotonic() + limit_s
        self.client.key_value_set_bytes(f"jax_ep/{key}/{self.process}", payload)
        answers, missing = [], []
        for process in self.processes:
            left_ms = max(1, round(1000 * (end - time.monotonic())))
            try:
                answers.append(
                    self.client.blocking_key_value_get_bytes(f"jax_ep/{key}/{process}", left_ms)
                )
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise
                missing.append(process)
        if missing:
            raise TimeoutError(
                f"process {self.process} waited {limit_s:g} s for process "
                f"{', '.join(map(str, missing))} ({key}). Every process that holds devices of the "
                "mesh must make the same calls of ep_init, and of close, in the same order."
            )
        return answers

    def _through_custom(self, exchange: ExchangeFn, key: str, payload: bytes) -> list[bytes]:
        answers = list(exchange(key, payload))
        got = f"{len(answers)} payloads"
        if len(answers) == len(self.processes):
            if answers[self.processes.index(self.process)] == payload:
                return answers
            got += ", with this process's payload out of place"
        raise ValueError(
            f"exchange must return the payloads of processes {self.processes}, in this order; got "
            f"{got}."
        )

    def _through_collectives(self, payload: bytes) -> list[bytes]:
        """Through collectives on the devices, without JAX's distributed runtime.

        The time limit is that of XLA's collectives.
        """
        from jax.experimental import multihost_utils

        if self.processes != tuple(range(jax.process_count())):
            raise RuntimeError(
                "A group of some of the processes needs jax.distributed.initialize, or "
                "ep_init(..., exchange=...)."
            )
        head = np.array([len(payload), zlib.crc32(payload)], np.uint32)
        heads = np.asarray(multihost_utils.process_allgather(head))
        padded = np.zeros(max(1, int(heads[:, 0].max())), np.uint8)
        padded[: len(payload)] = np.frombuffer(payload, np.uint8)
        rows = np.asarray(multihost_utils.process_allgather(padded))
        answers = [
            row[: int(n_bytes)].tobytes() for row, (n_bytes, _) in zip(rows, heads, strict=True)
        ]
        if [zlib.crc32(answer) for answer in answers] != heads[:, 1].tolist():
            raise RuntimeError("process_allgather returned bytes that differ from those sent.")
        return answers
