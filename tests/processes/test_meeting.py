"""The protocol by which processes open a group together (jax_ep/processes/meeting.py).

Processes are threads with a store in memory: late, mismatched, failing, interrupted, stopped, and
dying ones, and garbage in the store.
"""

import struct
import threading
import time
import zlib

import pytest

from fake_store import FakeClient, in_threads, members_of
from jax_ep.processes import meeting as meeting_module
from jax_ep.processes.meeting import Meeting, Member, OtherGroupError
from jax_ep.processes.messages import MAX_BYTES, KeyValueStore, Message, sent_json

LONG_S, SHORT_S = 60.0, 0.3


def meeting_of(members, process, group="X", facts=None) -> Meeting:
    return Meeting(members[process], range(len(members)), group, facts or {})


def open_in(members, process, group="X", limit_s=LONG_S) -> Meeting:
    """Opens a group in two steps, as a transport does."""
    meeting = meeting_of(members, process, group, {"top_k": group})
    answers = meeting.step("first", bytes([process]), limit_s)
    assert answers == [bytes([p]) for p in range(len(members))]
    meeting.open(limit_s)
    return meeting


def open_in_all(members, group="X") -> list[Meeting]:
    meetings = in_threads(len(members), lambda p: open_in(members, p, group))
    assert all(isinstance(each, Meeting) and each.is_open for each in meetings), meetings
    return meetings


@pytest.mark.parametrize("n", [2, 4])
def test_a_late_process_raises_at_once_and_the_next_group_opens(n):
    members = members_of(FakeClient(), n)
    errors = in_threads(n - 1, lambda p: open_in(members, p, limit_s=SHORT_S))
    for error in errors:
        assert isinstance(error, TimeoutError)
        assert f"waited 0.3 s for process {n - 1} (group X, step 'first')" in str(error)
    begin = time.monotonic()
    with pytest.raises(TimeoutError, match=rf"process {n - 1} comes too late .* X: process \d wai"):
        open_in(members, n - 1)
    assert time.monotonic() - begin < LONG_S / 2
    open_in_all(members, "Y")


def test_a_late_process_joins_a_retry():
    members = members_of(FakeClient(), 2)
    for _ in range(3):
        with pytest.raises(TimeoutError):
            open_in(members, 0, limit_s=0.05)

    def open_late(process):
        if process == 1:
            wait_until(lambda: any("open/3/0/0" in key for key in members[0].store.client.values))
        return open_in(members, process)

    assert all(isinstance(each, Meeting) for each in in_threads(2, open_late))


def test_a_late_process_goes_through_the_groups_that_others_have_given_up():
    """As with a list of configs to try: the late process fails where the others did."""
    members = members_of(FakeClient(), 2)
    for group in ("A", "B"):
        with pytest.raises(TimeoutError):
            open_in(members, 0, group, 0.05)

    def run(process):
        if process == 0:
            return open_in(members, 0, "C")
        for group in ("A", "B"):
            with pytest.raises(TimeoutError, match=f"too late to open group {group}"):
                open_in(members, 1, group)
        return open_in(members, 1, "C")

    assert all(isinstance(each, Meeting) for each in in_threads(2, run))


def test_a_process_that_has_skipped_a_group_opens_the_next():
    members = members_of(FakeClient(), 2)
    with pytest.raises(TimeoutError):
        open_in(members, 0, "X", 0.05)
    open_in_all(members, "Y")


@pytest.mark.parametrize("n", [2, 4])
def test_other_groups_are_refused_at_once_in_all_processes(n):
    """Process 1 opens Y, and the last process comes late, so process 0 waits for another one."""
    members = members_of(FakeClient(), n)

    def run(process):
        if process == 3:
            time.sleep(2 * SHORT_S)
        return open_in(members, process, "Y" if process == 1 else "X")

    begin = time.monotonic()
    errors = in_threads(n, run)
    assert time.monotonic() - begin < LONG_S / 2
    wanted = r"process 0 opens group X, process 1 opens group Y: top_k is X in process 0 and Y in"
    assert all(isinstance(each, OtherGroupError) for each in errors), errors
    assert any(wanted in str(each) for each in errors), errors
    open_in_all(members, "Z")


@pytest.mark.parametrize("where", ["before a step", "in a step", "between steps", "in open"])
@pytest.mark.parametrize("error", [MemoryError("no memory"), KeyboardInterrupt()])
def test_all_learn_at_once_that_one_has_failed(where, error, monkeypatch):
    """Of three processes, the last one fails."""
    client = FakeClient()
    members = members_of(client, 3)
    check = threading.local()
    monkeypatch.setattr(meeting_module.interrupts, "check", lambda: getattr(check, "run", int)())

    def fail():
        raise error

    def fail_once_sent():
        if any(key.endswith("open/0/0/2") for key in client.values):
            fail()

    def run(process):
        meeting = meeting_of(members, process)
        try:
            if process == 2 and where == "before a step":
                fail()  # also if it has not come to a first step
            if process == 2 and where == "in a step":
                check.run = fail_once_sent
            if process != 2 and where == "in a step":
                wait_until(lambda: any(key.endswith("open/0/0/2") for key in client.values))
                time.sleep(0.1)
            meeting.step("first", b"", LONG_S)
            if process == 2 and where == "between steps":
                fail()
            if process == 2 and where == "in open":
                check.run = fail
            if process == 0 and where == "in open":
                time.sleep(0.3)
            meeting.open(LONG_S)
        except BaseException as caught:
            meeting.give_up(caught)
            raise

    begin = time.monotonic()
    errors = in_threads(3, run)
    assert time.monotonic() - begin < LONG_S / 2
    assert errors[2] is error
    reason = "no memory" if isinstance(error, MemoryError) else "it was interrupted"
    for each in errors[:2]:
        assert isinstance(each, RuntimeError), errors
        assert f"process 2 gave up on group X: {reason}" in str(each)
    check.run = int
    open_in_all(members)


def test_an_interrupt_in_a_step_that_the_others_complete_is_raised_in_the_next(monkeypatch):
    """The others go on with what they got, so the process must not free it as if they had not."""
    client = FakeClient()
    members = members_of(client, 2)
    meeting = meeting_of(members, 1)
    other = []

    def check():
        if not other and "jax_ep/0-1/open/0/0/1" in client.values:
            other.append(None)
            assert meeting_of(members, 0).step("first", b"0", LONG_S) == [b"0", b"1"]
            raise KeyboardInterrupt

    monkeypatch.setattr(meeting_module.interrupts, "check", check)
    assert meeting.step("first", b"1", LONG_S) == [b"0", b"1"]
    with pytest.raises(KeyboardInterrupt):
        meeting.step("second", b"", LONG_S)
    ending = meeting_module._Ending.decode("", client.values["jax_ep/0-1/open/0/1/end"])
    assert ending.kind == "failure"


def test_a_time_out_that_comes_after_completion_is_none(monkeypatch):
    members = members_of(FakeClient(), 2)
    store = members[1].store
    create = store.create

    def complete_first(key, value):
        assert meeting_of(members, 0).step("first", b"0", LONG_S) == [b"0", b"1"]
        store.create = create
        return create(key, value)

    store.create = complete_first
    assert meeting_of(members, 1).step("first", b"1", SHORT_S) == [b"0", b"1"]


def test_time_in_which_the_process_was_stopped_does_not_count(monkeypatch):
    """The clock jumps by an hour, as in SIGSTOP, in each of the first ten looks."""
    members = members_of(FakeClient(), 2)
    store, jumps = members[0].store, []
    wait = store.wait
    clock = time.monotonic
    monkeypatch.setattr(
        meeting_module.time, "monotonic", lambda: clock() + 3600 * len(jumps), raising=True
    )

    def stopped(key, seconds):
        if len(jumps) < 10:
            jumps.append(None)
            return None
        return wait(key, seconds)

    store.wait = stopped
    results = in_threads(2, lambda p: open_in(members, p, limit_s=LONG_S if p else 12.0))
    assert all(isinstance(each, Meeting) for each in results), results


def test_a_process_that_was_started_anew_meets_the_others():
    client = FakeClient()
    members = members_of(client, 2)
    for group in "ABC":
        open_in_all(members, group)
    members[1] = Member(KeyValueStore(client), 1)
    open_in_all(members, "C")


def of_header(header: bytes) -> bytes:
    """A message whose sizes and checksum are right."""
    return struct.pack("<8sIII", b"jax_ep 1", len(header), 0, zlib.crc32(header)) + header


GARBAGE = [
    b"",
    b"x" * 11,
    b"x" * (MAX_BYTES + 1),
    Message("X", "first", b"ok").encode()[:-1],
    Message("X", "first", b"ok").encode()[:-1] + b"?",
    b"jax_ep 1" + b"\xff" * 100,
    Message("X", "open", b"").encode(),
    Message("\ud800", "first").encode(),
    Message("X", "\udfff").encode(),
    Message("X", "first", b"", {"a": "\ud800"}).encode(),
    Message("X", "first", b"", {"\ud800": "a"}).encode(),
    Message("X", "end", b"\xff", {"kind": "\ud800", "process": "1", "other": ""}).encode(),
    Message("X", "end", b"", {"kind": "timeout", "process": "9" * 5000, "other": ""}).encode(),
    *map(
        of_header,
        [b"[" * 100_000, b"\xff", b"NaN", b"1e999", b"9" * 5000, b'["X", "\xed\xa0\x80", {}]'],
    ),
    of_header('["\ud800", "first", {}]'.encode("utf-16", "surrogatepass")),
]


@pytest.mark.parametrize("garbage", GARBAGE, ids=range(len(GARBAGE)))
@pytest.mark.parametrize("key", ["open/0/0/1", "open/0/0/end", "open/0/1/end", "last"])
def test_planted_keys_are_named_and_do_no_harm(garbage, key):
    client = FakeClient()
    client.values[f"jax_ep/0-1/{key}"] = garbage
    members = members_of(client, 2)

    def run(process):
        if process == 1:  # only then does process 0 see what was planted in its place
            wait_until(lambda: "jax_ep/0-1/open/0/0/0" in client.values or "0/end" in key)
            time.sleep(0.1)
        return open_in(members, process, limit_s=5.0)

    results = in_threads(2, run)
    if key == "last":
        assert all(isinstance(each, Meeting) for each in results), results
    else:
        assert all(isinstance(each, RuntimeError) for each in results), results
        assert f"jax_ep/0-1/{key}" in str(results[0]) or "at step" in str(results[0])
    open_in_all(members, "Y")


def test_a_header_cannot_exhaust_the_stack():
    with pytest.raises(ValueError, match="not JSON"):
        Message.decode(of_header(b"[" * 100_000))


@pytest.mark.parametrize("data", [b'["\\ud800", null]', b"[NaN, 1]", b"[-Infinity]", b"[[1e999]]"])
def test_what_a_process_sends_is_json_of_text_and_finite_numbers(data):
    with pytest.raises(RuntimeError, match="process 3: its host is not JSON: "):
        sent_json(3, data, lambda value: True, "its host")


@pytest.mark.parametrize("text", ["no file \udcff.so", "\ud800" * 10_000, "é" * 10_000])
def test_any_text_of_an_error_reaches_the_others(text):
    members = members_of(FakeClient(), 2)

    def run(process):
        meeting = meeting_of(members, process)
        if process == 1:
            meeting.give_up(OSError(text))
            return None
        return meeting.step("first", b"", LONG_S)

    error, _ = in_threads(2, run)
    assert isinstance(error, RuntimeError)
    shown = text.encode(errors="backslashreplace").decode()[:5000]
    assert f"process 1 gave up on group X: {shown}" in str(error)


def test_a_message_that_is_too_long_is_not_sent():
    with pytest.raises(ValueError, match="at most 1048576 bytes"):
        Message("X", "first", b"x" * MAX_BYTES).encode()


def close_in_all(meetings) -> None:
    results = in_threads(len(meetings), lambda p: meetings[p].part("closed", LONG_S))
    assert results == [None] * len(meetings), results


@pytest.mark.parametrize("n", [2, 4])
def test_the_store_does_not_grow(n):
    client = FakeClient()
    members = members_of(client, n)
    sizes = []
    for i in range(100):
        meetings = open_in_all(members, f"group {i}")
        close_in_all(meetings)
        if i % 10 == 3:
            with pytest.raises(TimeoutError):
                open_in(members, 0, "alone", 0.01)
        sizes.append(len(client.values))
    assert max(sizes[50:]) <= max(sizes[:20]) <= 1 + 2 * (n + 1) + 2
    assert not [key for key in client.values if "/close/" in key]


def test_the_store_does_not_grow_with_attempts_that_fail():
    client = FakeClient()
    members = members_of(client, 2)
    for _ in range(100):
        with pytest.raises(TimeoutError):
            open_in(members, 0, limit_s=0.005)
    assert len(client.values) < 4 * meeting_module._N_KEPT
    with pytest.raises(TimeoutError, match="too late"):
        open_in(members, 1)

    def retry(process):
        for _ in range(2 * meeting_module._N_KEPT):
            try:
                return open_in(members, process, limit_s=2.0)
            except TimeoutError:
                continue
        return None

    assert all(isinstance(each, Meeting) for each in in_threads(2, retry))


def test_close_does_not_wait_for_long_where_a_process_is_missing():
    members = members_of(FakeClient(), 3)
    meetings = open_in_all(members)
    results = in_threads(2, lambda p: meetings[p].part("closed", SHORT_S))
    assert all("for process 2" in str(each) for each in results), results
    meetings[2].part("closed", LONG_S)  # at once
    assert not [key for key in members[0].store.client.values if "/close/" in key]


def wait_until(is_true) -> None:
    end = time.monotonic() + LONG_S
    while not is_true():
        assert time.monotonic() < end
        time.sleep(0.005)
