"""All-gather of bytes between processes, to open and close groups.

All processes take part in every step, in the same order. Through JAX's key-value store, a group
opens in all processes or in none (meeting.py). With a user's `exchange` or JAX's collectives, a
process that fails between two steps leaves the others waiting, for the time limits of these; one
that is interrupted may leave an open group; calls that fail in some processes stay out of step.
"""

import collections
import dataclasses
import functools
import zlib
from collections.abc import Callable, Mapping
from typing import Any, Self

import jax
import numpy as np

from jax_ep._jax_compat import distributed_client
from jax_ep.geometry import Geometry
from jax_ep.processes import interrupts
from jax_ep.processes.meeting import Meeting, Member, OtherGroupError, check_same_group
from jax_ep.processes.messages import (
    MAX_BYTES,
    KeyValueStore,
    Message,
    encodable,
    reason_of,
    shorten,
)

# (key, this process's payload) -> the payloads of all processes that take part, in order of process
# index.
ExchangeFn = Callable[[str, bytes], list[bytes]]

_OK, _FAILED = b"+", b"-"
# How long a process that has reached a time limit, or failed, still waits for the others.
_AFTER_TIMEOUT_S = 2.0

# Exchanges created so far, by name: for the keys of a user's `exchange`.
_n_made: collections.Counter[str] = collections.Counter()
# This process, as a member of JAX's distributed runtime; the last one, if it has joined several.
_members: list[Member] = []


@dataclasses.dataclass(frozen=True)
class Exchange:
    """All-gathers bytes between processes, step by step, to open and then close one group."""

    name: str  # the group's key
    processes: tuple[int, ...]  # indices of the processes that take part, ascending
    process: int  # index of this one
    timeout_s: float  # to wait for the others in a step
    custom: ExchangeFn | None = None  # the user's; None uses JAX's distributed runtime
    client: Any = None  # of that runtime; None uses JAX's collectives
    facts: Mapping[str, str] = dataclasses.field(default_factory=dict)  # what the group is
    label: str = ""  # of the keys for `custom`; "" = the name
    # Steps that were begun without a meeting.
    _steps: list[str] = dataclasses.field(default_factory=list, init=False, compare=False)

    @classmethod
    def over(
        cls,
        mesh: jax.sharding.Mesh,
        name: str,
        timeout_s: float,
        custom: ExchangeFn | None = None,
        facts: Mapping[str, str] | None = None,
    ) -> Self:
        """Between the processes that hold devices of the mesh; others are alone.

        `facts` are the arguments by which the group may differ from that of another process, in
        words.
        """
        devices = list(mesh.devices.flat)
        process = jax.process_index(devices[0].client)
        processes = tuple(sorted({device.process_index for device in devices}))
        _n_made[name] += 1
        return cls(
            name=name,
            processes=processes if process in processes else (process,),
            process=process,
            timeout_s=timeout_s,
            custom=custom,
            client=distributed_client(),
            facts=facts or {},
            label=f"{name}/{_n_made[name]}",
        )

    @property
    def is_alone(self) -> bool:
        """Whether no other process takes part."""
        return self.processes == (self.process,)

    @functools.cached_property
    def _meeting(self) -> Meeting | None:
        """The meeting that the steps are part of; None without the key-value store."""
        if self.is_alone or self.custom is not None or self.client is None:
            return None
        member = _member(self.client, self.process)
        return Meeting(member, self.processes, self.name, self.facts)

    def __call__(self, step: str, payload: bytes, timeout_s: float | None = None) -> list[bytes]:
        """The payloads of all processes, by index.

        Raises:
            TimeoutError: a process does not answer in time.
            ValueError: a process opens another group.
            RuntimeError: a process has given up, or has sent something else than a message.
        """
        if self.is_alone:
            return [payload]
        try:
            return self._exchange(step, payload, timeout_s or self.timeout_s)
        except OtherGroupError as error:
            raise ValueError(str(error)) from None

    def _exchange(self, step: str, payload: bytes, limit_s: float) -> list[bytes]:
        if self._meeting is not None:
            return self._meeting.step(step, payload, limit_s)
        facts = {} if self._steps else self.facts
        self._steps.append(step)
        message = Message(self.name, step, payload, facts).encode()
        with interrupts.allowed():
            if self.custom is not None:
                answers = self._through_custom(self.custom, step, message)
            else:
                answers = _through_collectives(self.processes, message)
        pairs = zip(self.processes, answers, strict=True)
        return [self._payload(*pair, step) for pair in pairs]

    def open(self) -> None:
        """After all steps but those of closing: raises, in all processes, unless all are here.

        Does nothing if no step was made.
        """
        if self._meeting is not None:
            self._meeting.open(self.timeout_s)
        elif self._steps:
            self("open", b"")

    def give_up(self, error: BaseException) -> None:
        """Tells the other processes why this one does not open the group, if it can."""
        if self._meeting is not None:
            self._meeting.give_up(error)

    def close(self, step: str, limit_s: float) -> None:
        """Waits until all processes close the group, or have failed to open it.

        Raises TimeoutError after `limit_s`; if this process has given up, after 2 s at most.
        """
        limit_s = min(self.timeout_s, limit_s)
        if self._meeting is None:
            self(step, b"", limit_s)
            return
        if not self._meeting.is_open or self._meeting.is_abandoned:
            limit_s = min(limit_s, _AFTER_TIMEOUT_S)
        self._meeting.part(step, limit_s)

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
            message = _FAILED + reason_of(error).encode()
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
        """The first process's reason why it cannot take part, the same in all; None if none has."""
        if self.is_alone:
            return reason
        answers = self(step, _OK if reason is None else _FAILED + encodable(reason).encode())
        for process, answer in zip(self.processes, answers, strict=True):
            if answer.startswith(_FAILED):
                return f"process {process}: {answer[1:].decode(errors='replace')}"
        return None

    def _through_custom(self, exchange: ExchangeFn, step: str, message: bytes) -> list[bytes]:
        answers: Any = exchange(f"{self.label or self.name}/{step}", message)
        wrong = None if isinstance(answers, list | tuple) else type(answers).__name__
        for process, answer in zip(self.processes, () if wrong else answers, strict=False):
            if not wrong and not isinstance(answer, bytes | bytearray | memoryview):
                wrong = f"{type(answer).__name__} for process {process}"
        if wrong:
            raise TypeError(
                f"exchange must return a list or tuple with the bytes of each process; got {wrong}."
            )
        got = f"{len(answers)} payloads"
        if len(answers) == len(self.processes):
            if answers[self.processes.index(self.process)] == message:
                return [bytes(answer) for answer in answers]
            got += ", with this process's payload out of place"
        raise ValueError(
            f"exchange must return the payloads of processes {self.processes}, in this order; got "
            f"{got}."
        )

    def _payload(self, process: int, data: bytes, step: str) -> bytes:
        """The message that a process has sent without a meeting."""
        try:
            message = Message.decode(data)
        except ValueError as error:
            raise ValueError(
                f"exchange must return what process {process} has passed to it in step {step!r} of "
                f"group {self.name}; of what it returned, {error}."
            ) from None
        check_same_group(self.process, (self.name, self.facts), process, message)
        if message.step != step:
            raise ValueError(
                f"exchange must return the payloads of step {step!r} of group {self.name}; that of "
                f"process {process} is of step {message.step!r}."
            )
        return message.payload


def facts_of(geometry: Geometry) -> dict[str, str]:
    """The arguments of ep_init by which processes may differ, in words."""
    config, memory_of = geometry.config, geometry.memory_of
    arguments = {
        "mesh": dict(geometry.mesh.shape),
        "device_ids": geometry.device_ids,
        "axis_name": geometry.axis_name,
        "transport": geometry.transport,
        "memory_of": memory_of and memory_of.key,
    }
    arguments |= {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    return {name: shorten(repr(value)) for name, value in arguments.items()}


def _member(client: Any, process: int) -> Member:
    """This process; with another client, it has joined another job."""
    if not _members or (_members[0].store.client, _members[0].process) != (client, process):
        _members[:] = [Member(KeyValueStore(client), process)]
    return _members[0]


def _through_collectives(processes: tuple[int, ...], message: bytes) -> list[bytes]:
    """Through collectives on the devices, without JAX's distributed runtime; with XLA's limit."""
    from jax.experimental import multihost_utils

    if processes != tuple(range(jax.process_count())):
        raise RuntimeError(
            "A group of some of the processes needs jax.distributed.initialize, or "
            "ep_init(..., exchange=...)."
        )
    head = np.array([len(message), zlib.crc32(message)], np.uint32)
    heads = np.asarray(multihost_utils.process_allgather(head))
    size = int(heads[:, 0].max())
    if size > MAX_BYTES:
        raise RuntimeError(f"process_allgather must return at most {MAX_BYTES} bytes; got {size}.")
    padded = np.zeros(max(1, size), np.uint8)
    padded[: len(message)] = np.frombuffer(message, np.uint8)
    rows = np.asarray(multihost_utils.process_allgather(padded))
    answers = [row[: int(n_bytes)].tobytes() for row, (n_bytes, _) in zip(rows, heads, strict=True)]
    if [zlib.crc32(answer) for answer in answers] != heads[:, 1].tolist():
        raise RuntimeError("process_allgather returned bytes that differ from those sent.")
    return answers
