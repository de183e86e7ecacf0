"""Steps that processes take together through a key-value store. All complete a step, or none does.

A *meeting* opens one group in a set of processes. Each process numbers its meetings of a set, so
the n-th call of ep_init is the same in all, whatever group it opens. Keys of a set, all below
`jax_ep/SET/`, where N is the number of a meeting and S that of a step, from 0:

    open/N/S/P      the message of process P
    open/N/S/end    how the step ended: *complete* or *given up*, by whom and why; never changed
    last            the last meeting that nobody is in any more, for all that is known
    close/N/NAME/P  messages after the group was opened, when it is closed; done/P: P has read all

1. Step. A process writes its message and waits for all others'. Then it creates `end` as complete.
   One that has waited too long, has failed or was interrupted creates it as given up. The first
   to create `end` decides for all: who finds it given up raises that reason; who gives up and finds
   it complete has got all messages, and goes on (an interrupt or error is raised in the next step).
   A failure between steps gives up the next step. So what a process frees after it has given up a
   step, no other process has learned of in that step.
2. Open. The last step, `open`, has no content. A group is open if this step is complete, so it
   opens in all processes or in none. (One that dies or is interrupted after it leaves the others
   with an open group, whose calls time out.)
3. Numbers. Every meeting that a process leaves is decided, so all processes come to number N + 1. A
   process comes late if step 0 of its number N was given up without it. If that was for another
   group than its own, it goes on to N + 1. If it was for its own, it joins a later meeting in which
   others wait to open that group, if there is one; otherwise it raises the reason, and its next
   call comes to N + 1. A process that was started anew begins after `last`.
4. Other groups. A message of another group ends the step for all at once. Whoever comes second sees
   it, for each lists the messages that are there after it has written its own.
5. Keys go. Once step 0 of N is complete, everyone has left the meetings before: the first process
   deletes these and writes N - 1 to `last`. Who gives up N does so with all up to N - 8. Who reads
   the messages of `close/N/NAME` last deletes them. So the store does not grow with the number of
   groups, or of attempts that fail.
6. Waiting goes by slices. Each counts at most twice its length, so a process that was stopped has
   not waited meanwhile; after each, the process looks for `end` and for an interrupt.
"""

import contextlib
import dataclasses
import hashlib
import time
from collections.abc import Mapping, Sequence
from typing import Self

from jax_ep.processes import interrupts
from jax_ep.processes.messages import KeyValueStore, Message, difference, reason_of

# Slices of a wait, in seconds: the first, and the longest.
_MIN_SLICE_S, _MAX_SLICE_S = 0.02, 0.5
# Given-up meetings kept for late processes; meetings looked through, more than the protocol leaves.
_N_KEPT, _N_SCANNED = 8, 64
# Step of the message that says how a step ended, and the kinds of ends.
_END = "end"
_COMPLETE, _TIMEOUT, _OTHER_GROUP, _FAILURE = "complete", "timeout", "other group", "failure"
_HINT = (
    "Every process that holds devices of the mesh must make the same calls of ep_init, and of "
    "close, in the same order."
)


class OtherGroupError(ValueError):
    """Processes that should open a group together open others; `group`: the other process's."""

    def __init__(self, text: str, group: str = "") -> None:
        super().__init__(text)
        self.group = group


@dataclasses.dataclass
class Member:
    """A process, with its store, and the number of its next meeting in each set of processes."""

    store: KeyValueStore
    process: int
    next_numbers: dict[str, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class _Ending:
    """How a step ended."""

    group: str
    kind: str
    process: int
    reason: str
    other_group: str = ""  # where processes open different ones

    def encode(self) -> bytes:
        facts = {"kind": self.kind, "process": str(self.process), "other": self.other_group}
        return Message(self.group, _END, self.reason.encode(), facts).encode()

    @classmethod
    def decode(cls, key: str, data: bytes) -> Self:
        try:
            message = Message.decode(data)
            if message.step != _END:
                raise ValueError(f"it is of step {message.step!r}")
            kind, process = message.facts["kind"], int(message.facts["process"])
            other = message.facts["other"]
        except (KeyError, ValueError) as error:
            raise RuntimeError(f"{key} does not say how a step has ended: {error}.") from None
        return cls(message.group, kind, process, message.payload.decode(errors="replace"), other)

    def error(self, process: int | None = None) -> Exception:
        """The error that others raise; `process`: for one that comes late."""
        text = f"process {self.process} gave up on group {self.group}: {self.reason}"
        if self.kind in (_TIMEOUT, _OTHER_GROUP):
            text = self.reason  # names them
        if process is not None:
            text = f"process {process} comes too late to open group {self.group}: {text}"
        errors = {_TIMEOUT: TimeoutError, _OTHER_GROUP: OtherGroupError}
        return errors.get(self.kind, RuntimeError)(text)


class _Patience:
    """The rest of a time limit."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = self.left_s = limit_s
        self._slice_s = _MIN_SLICE_S

    def wait(self, store: KeyValueStore, key: str) -> bytes | None:
        """The value of a key, or None after a slice of time."""
        slice_s = max(1e-3, min(self._slice_s, self.left_s))
        begin = time.monotonic()
        value = store.wait(key, slice_s)
        self.left_s -= min(time.monotonic() - begin, 2 * slice_s)
        self._slice_s = min(2 * self._slice_s, _MAX_SLICE_S)
        return value


class Meeting:
    """One attempt of some processes to open a group together; see the head of this file."""

    def __init__(
        self, member: Member, processes: Sequence[int], group: str, facts: Mapping[str, str]
    ) -> None:
        self.member, self.processes, self.group, self.facts = member, processes, group, facts
        self._set = _name_of(processes)
        self._root = f"jax_ep/{self._set}"
        self._number: int | None = None  # None until the first step
        self._n_complete = 0
        self._owed: BaseException | None = None  # to raise in the next step
        self._is_over = False  # given up
        self.is_open = False
        self.is_abandoned = False  # open for others, which have not been told

    def step(self, name: str, payload: bytes, limit_s: float) -> list[bytes]:
        """The payloads of all processes; raises the same kind of error in all, or in none."""
        if self._number is None:
            self._join()
        folder = self._folder
        try:
            self._raise_owed()
            interrupts.check()
            self._send(folder, name, payload)
            answers = self._receive(folder, name, _Patience(limit_s))
            ending = self._end(folder, _COMPLETE)
            if ending.kind != _COMPLETE:
                raise ending.error()
        except BaseException as error:
            if self.give_up(error):
                raise
            self._n_complete += 1
            answers = self._read_complete(folder, name, limit_s)
            self._owed = None if isinstance(error, TimeoutError) else error
        else:
            self._n_complete += 1
        if self._n_complete == 1 and self.member.process == self.processes[0]:
            assert self._number is not None
            self._forget(self._number - 1)  # everyone has left the meetings before this one
        return answers

    def open(self, limit_s: float) -> None:
        """The last step; the group is open if it raises nothing."""
        if self._number is not None:
            self.step("open", b"", limit_s)
            self.is_open = True
            self._raise_owed()

    def give_up(self, error: BaseException) -> bool:
        """Ends the current step for all; False if all others have completed it."""
        self.is_abandoned = self.is_open
        if self._number is None and not self._is_over:
            with contextlib.suppress(Exception):
                self._join()
        if self._number is None or self._is_over or self.is_open:
            return True
        kind = _FAILURE
        if isinstance(error, TimeoutError | OtherGroupError):
            kind = _TIMEOUT if isinstance(error, TimeoutError) else _OTHER_GROUP
        reason = reason_of(error)
        if not isinstance(error, Exception):
            reason = f"it was interrupted ({type(error).__name__})"
        self._is_over = True
        with contextlib.suppress(Exception):  # such as that the store is gone
            other = error.group if isinstance(error, OtherGroupError) else ""
            self._is_over = self._end(self._folder, kind, reason, other).kind != _COMPLETE
            if self._is_over:
                self._forget(self._number - _N_KEPT)
        return self._is_over

    def part(self, name: str, limit_s: float) -> None:
        """Waits until all processes close the group, or raises TimeoutError."""
        kind = "close" if self.is_open else "open"
        folder = f"{self._root}/{kind}/{self._number}/{name}"
        self._send(folder, name, b"")
        try:
            self._receive(folder, name, _Patience(limit_s))
        finally:
            with contextlib.suppress(Exception):
                self._leave(folder)

    @property
    def _folder(self) -> str:
        """The key of the current step."""
        return f"{self._root}/open/{self._number}/{self._n_complete}"

    def _join(self) -> None:
        """Finds the number of this meeting."""
        self._is_over = True  # unless it is found
        self._number = self._find_number()
        self._is_over = False

    def _find_number(self) -> int:
        numbers = self.member.next_numbers
        first = max(numbers.get(self._set, 0), self._last() + 1)
        for number in range(first, first + _N_SCANNED):
            numbers[self._set] = number + 1  # whatever happens
            ending = self._ending_of(number)
            if ending is None:
                return number
            if ending.kind != _COMPLETE and self.group in (ending.group, ending.other_group):
                ahead = self._joinable_after(number)
                if ahead is None:
                    raise ending.error(self.member.process)
                numbers[self._set] = ahead + 1
                return ahead
        raise RuntimeError(
            f"{self._root}/open holds more than {_N_SCANNED} meetings that are over."
        )

    def _ending_of(self, number: int) -> _Ending | None:
        """How the first step of a meeting ended, if it has."""
        key = f"{self._root}/open/{number}/0/{_END}"
        data = self.member.store.get(key)
        return None if data is None else _Ending.decode(key, data)

    def _joinable_after(self, number: int) -> int | None:
        """A later meeting in which others wait to open the same group."""
        for later in range(number + 1, number + _N_SCANNED):
            if self._ending_of(later) is None:
                found = self.member.store.list(f"{self._root}/open/{later}/0")
                return later if any(map(self._is_mine, found.values())) else None
        return None

    def _is_mine(self, data: bytes) -> bool:
        try:
            return Message.decode(data).group == self.group
        except ValueError:
            return False

    def _last(self) -> int:
        """The last meeting that is over, or -1."""
        data = self.member.store.get(f"{self._root}/last")
        try:
            return int(Message.decode(data).payload) if data is not None else -1
        except ValueError:
            return -1

    def _send(self, folder: str, name: str, payload: bytes) -> None:
        facts = {} if self._n_complete else self.facts
        data = Message(self.group, name, payload, facts).encode()
        self.member.store.put(f"{folder}/{self.member.process}", data)

    def _receive(self, folder: str, name: str, patience: _Patience) -> list[bytes]:
        """The payloads of all processes in a step that has not been given up."""
        store = self.member.store
        found: dict[int, bytes] = {}
        self._read(found, folder, name)
        for process in self.processes:
            while process not in found:
                interrupts.check()
                data = patience.wait(store, f"{folder}/{process}")
                if data is not None:
                    found[process] = self._payload(folder, process, data, name)
                    continue
                self._raise_if_given_up(folder, store.get(f"{folder}/{_END}"))
                if patience.left_s <= 0:
                    self._read(found, folder, name)
                    self._raise_timeout(found, name, patience.limit_s)
        return [found[process] for process in self.processes]

    def _read(self, found: dict[int, bytes], folder: str, name: str) -> None:
        """Adds what is there."""
        there = self.member.store.list(folder)
        for process in self.processes:
            if str(process) in there and process not in found:
                found[process] = self._payload(folder, process, there[str(process)], name)
        if len(found) < len(self.processes):
            self._raise_if_given_up(folder, there.get(_END))

    def _read_complete(self, folder: str, name: str, limit_s: float) -> list[bytes]:
        """The payloads of a step that others have completed."""
        try:
            return self._receive(folder, name, _Patience(limit_s))
        except BaseException as error:
            self.give_up(error)
            raise

    def _payload(self, folder: str, process: int, data: bytes, name: str) -> bytes:
        try:
            message = Message.decode(data)
        except ValueError as error:
            raise RuntimeError(
                f"what process {process} has sent to open group {self.group} ({folder}/{process}) "
                f"must be a message of this version of jax_ep: {error}."
            ) from None
        check_same_group(self.member.process, (self.group, self.facts), process, message)
        if message.step != name:
            raise RuntimeError(
                f"process {process} is at step {message.step!r} of opening group {self.group}, "
                f"process {self.member.process} at {name!r}. {_HINT}"
            )
        return message.payload

    def _raise_timeout(self, found: Mapping[int, bytes], name: str, limit_s: float) -> None:
        missing = [each for each in self.processes if each not in found]
        if missing:
            raise TimeoutError(
                f"process {self.member.process} waited {limit_s:g} s for process "
                f"{', '.join(map(str, missing))} (group {self.group}, step {name!r}). {_HINT}"
            )

    def _raise_if_given_up(self, folder: str, data: bytes | None) -> None:
        if data is not None:
            ending = _Ending.decode(f"{folder}/{_END}", data)
            if ending.kind != _COMPLETE:
                raise ending.error()

    def _end(self, folder: str, kind: str, reason: str = "", other: str = "") -> _Ending:
        """Ends a step, unless it has ended; returns how it did."""
        mine = _Ending(self.group, kind, self.member.process, reason, other)
        data = self.member.store.create(f"{folder}/{_END}", mine.encode())
        return _Ending.decode(f"{folder}/{_END}", data)

    def _raise_owed(self) -> None:
        owed, self._owed = self._owed, None
        if owed is not None:
            raise owed

    def _forget(self, number: int) -> None:
        """Removes the keys of a meeting and of those before it."""
        last = self._last()
        if number <= last:
            return
        data = Message(self.group, "last", str(number).encode()).encode()
        self.member.store.put(f"{self._root}/last", data)
        for each in range(max(last + 1, number - _N_SCANNED), number + 1):
            self.member.store.delete(f"{self._root}/open/{each}")

    def _leave(self, folder: str) -> None:
        """Removes the messages of a group that is closed, if all have read them."""
        if self.is_open:
            store = self.member.store
            store.put(f"{folder}/done/{self.member.process}", b"")
            if len(store.list(f"{folder}/done")) >= len(self.processes):
                store.delete(folder)


def check_same_group(
    process: int, mine: tuple[str, Mapping[str, str]], other: int, message: Message
) -> None:
    """Raises OtherGroupError if another process's message is about another group."""
    group, facts = mine
    if message.group != group:
        groups, both = (group, message.group), (facts, message.facts)
        raise OtherGroupError(difference((process, other), groups, both), message.group)


def _name_of(processes: Sequence[int]) -> str:
    """Names a set of processes in keys."""
    first, last = processes[0], processes[-1]
    if list(processes) == list(range(first, last + 1)):
        return f"{first}-{last}"
    digest = hashlib.sha256(repr(list(processes)).encode()).hexdigest()[:12]
    return f"{len(processes)}-of-{first}-{last}-{digest}"
