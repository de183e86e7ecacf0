"""Random faults while processes open a group together (jax_ep/processes/meeting.py).

Processes are threads with a store in memory, and have memory that others map, as on `p2p`.
"""

import random
import time

import pytest

from fake_store import FakeClient, in_threads
from jax_ep.processes import meeting as meeting_module
from jax_ep.processes.meeting import Meeting, Member
from jax_ep.processes.messages import KeyValueStore


class Interrupt(Exception):
    """An interrupt; caught as other errors are, where `Died` is not."""


class Died(BaseException):
    """The process is no more; it does nothing on its way out."""


class MortalStore(KeyValueStore):
    """Dies, or is slow, at a random operation."""

    def __init__(self, client, seed: int):
        super().__init__(client)
        self.random = random.Random(seed)
        self.dies_in = -1  # operations

    def __getattribute__(self, name):
        value = super().__getattribute__(name)
        if name not in ("put", "create", "get", "wait", "list", "delete"):
            return value
        if self.dies_in == 0:
            raise Died
        self.dies_in -= 1
        if self.random.random() < (0.8 if name == "create" else 0.1):
            time.sleep(self.random.random() * 0.02)
        return value


class World:
    """Processes with memory that others map, as on `p2p`.

    Attributes:
        memory: the meetings in which a process has memory, by process.
    """

    def __init__(self, n: int, seed: int):
        self.n, self.client, self.random = n, FakeClient(), random.Random(seed)
        self.members = [Member(MortalStore(self.client, seed + p), p) for p in range(n)]
        self.memory = [set() for _ in range(n)]
        self.dead = set()
        self.errors = []

    def open(self, process: int, group: str, limit_s: float, fault: str | None) -> str:
        """The outcome: `open`, `failed` or `died`."""
        meeting = Meeting(self.members[process], range(self.n), group, {})
        chance = random.Random(repr((process, group, fault)))
        try:
            late_for = chance.randrange(4) if fault == "late" else -1
            self.come(late_for == 0, chance, limit_s)
            meeting.step("choice", b"", limit_s)
            self.fail_sometimes(fault, chance)
            self.come(late_for == 1, chance, limit_s)
            address = (group, meeting._number)
            self.memory[process].add(address)
            try:
                meeting.step("workspaces", b"", limit_s)
            except BaseException as error:
                if not isinstance(error, Died):
                    self.memory[process].discard(address)  # nobody maps it
                raise
            try:
                for other in range(self.n):  # maps it
                    if address not in self.memory[other]:
                        self.errors.append(f"{process} maps memory of {other}, which is free")
                self.fail_sometimes(fault, chance)
                self.come(late_for == 2, chance, limit_s)
                meeting.step("connected", b"", limit_s)
                self.come(late_for == 3, chance, limit_s)
                meeting.open(limit_s)
            except Exception as error:
                meeting.give_up(error)
                try:
                    meeting.part("closed", 2.0)
                finally:
                    self.memory[process].discard(address)
                raise
            return "open"
        except Died:
            self.dead.add(process)
            return "died"
        except BaseException as error:
            meeting.give_up(error)
            return "failed"

    def come(self, late: bool, chance, limit_s: float) -> None:
        """Comes to a step; if late, at about the time when the others give up."""
        if late:
            time.sleep(chance.uniform(0.9, 1.15) * limit_s)

    def fail_sometimes(self, fault, chance) -> None:
        if fault == "fails" and chance.random() < 0.4:
            raise MemoryError
        if fault == "interrupted" and chance.random() < 0.4:
            raise Interrupt


@pytest.mark.thorough
@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("seed", range(6))
def test_simulated_processes_open_all_or_none_and_meet_again(n, seed):
    """Rounds with random faults. A process that dies is started anew for the next round."""
    world = World(n, seed)
    limit_s = 0.1
    for round_ in range(12):
        group = f"group {round_}"
        kinds = [None, None, "late", "late", "late", "fails", "interrupted", "dies"]
        faults = [world.random.choice(kinds) for _ in range(n)]
        for process, fault in enumerate(faults):
            if fault == "dies":
                world.members[process].store.dies_in = world.random.randrange(30)
        begin = time.monotonic()
        outcomes = in_threads(n, lambda p: world.open(p, group, limit_s, faults[p]))  # noqa: B023
        assert time.monotonic() - begin < 60
        assert not world.errors, (faults, world.errors)
        alive = {each for each in outcomes if each != "died"}
        assert len(alive) <= 1, (faults, outcomes)
        for process in range(n):
            world.memory[process].clear()
            store = world.members[process].store
            if outcomes[process] == "died":
                world.members[process] = Member(MortalStore(world.client, seed), process)
            store.dies_in = -1
        world.dead.clear()
    assert retry_in_all(world) == ["open"] * n
    assert retry_in_all(world) == ["open"] * n
    assert len(world.client.values) < 8 * (n + 1) * meeting_module._N_KEPT


def retry_in_all(world) -> list[str]:
    """All call until the group is open, with a limit that even a busy machine keeps."""

    def retry(process):
        for _ in range(10):
            if world.open(process, "final", 20.0, None) == "open":
                return "open"
        return "failed"

    return in_threads(world.n, retry)
