"""Faults while several processes open a group: `python tests/faults/opening.py [--quick]`.

Jobs of two and of four processes on CPUs. In each fault, the last process comes late, opens another
group, fails, is interrupted, stopped or killed, or finds garbage in the key-value store. All others
must raise an error in time that names process and group, and the next group must open and work.
"""

import argparse
import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
import traceback

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "support"))

import edges  # noqa: E402, F401
import processes  # noqa: E402

TIMEOUT_S = 2.0
# On top of `TIMEOUT_S + 2`: processes share a machine that may be busy.
SLACK_S = 8.0
BARRIER_MS = 120_000
N_CHOICES, HIDDEN, N_TOKENS = 2, 64, 8


class Job:
    """This process in a job whose last process is at fault."""

    def __init__(self):
        import jax
        import numpy as np

        import jax_ep
        from jax_ep._jax_compat import distributed_client

        self.jax, self.np, self.ep = jax, np, jax_ep
        self.client = distributed_client()
        self.me, self.n = jax.process_index(), jax.process_count()
        self.is_last = self.me == self.n - 1
        self.last = f"process {self.n - 1}"
        self._n_meetings = 0

    def meet(self, n: int | None = None) -> None:
        """Waits for the first n processes, without jax_ep."""
        self._n_meetings += 1
        ids = list(range(n or self.n))
        self.client.wait_at_barrier(f"test/{self._n_meetings}", BARRIER_MS, ids)

    def config(self, n: int | None = None, **changes):
        """Each process is a node."""
        values = dict(
            n_experts=8 * (n or self.n), top_k=N_CHOICES, hidden_size=HIDDEN, n_nodes=n or self.n
        )
        values |= dict(max_tokens_per_rank=N_TOKENS, timeout_s=TIMEOUT_S)
        return self.ep.EPConfig(**(values | changes))

    def open(self, n: int | None = None, **changes):
        """A group over the first n processes, by `host` inside each."""
        devices = [d for d in self.jax.devices() if d.process_index < (n or self.n)]
        mesh = self.jax.sharding.Mesh(self.np.array(devices), ("ep",))
        return self.ep.ep_init(mesh, "ep", self.config(n, **changes), transport="host")

    def give_up(self) -> None:
        """As ep_init does, for an interrupt that has come before it."""
        from jax_ep.group import select

        original = select._select
        select._select = lambda *_: 1 / 0
        with contextlib.suppress(ZeroDivisionError):
            self.open(timeout_s=60.0)
        select._select = original

    def check_next_group(self, n: int | None = None) -> None:
        """The next group opens, and its calls are right."""
        self.meet(n)
        with self.open(n, timeout_s=60.0) as group:
            check_calls(self, group)
        assert not is_open(group.key), "a closed group is open"

    def fails(self, text: str, error: type, within_s: float = TIMEOUT_S + 2, **changes) -> None:
        """Opening raises an error that holds the text, in time, and leaves nothing open."""
        begin = time.monotonic()
        try:
            group = self.open(**changes)
        except error as caught:
            took = time.monotonic() - begin
            assert text in str(caught), f"{text!r} is not in: {caught}"
            assert "group auto" in str(caught) or "group host" in str(caught), caught
            assert took < within_s + SLACK_S, f"took {took:.1f} s: {caught}"
            assert not any(map(is_open, keys_of(str(caught)))), f"open after: {caught}"
        else:
            raise AssertionError(f"{group} opened; wanted an error with {text!r}")


def check_calls(job: Job, group) -> None:
    """Each token comes back, from each of its experts."""
    jax, np, ep = job.jax, job.np, job.ep
    P = jax.P("ep")  # noqa: N806
    sharding = jax.sharding.NamedSharding(group.mesh, P)
    shape = (group.n_ranks * N_TOKENS, HIDDEN)
    values = np.arange(np.prod(shape)).reshape(shape) % 251
    tokens = jax.make_array_from_callback(
        shape, sharding, lambda index: values[index].astype(jax.numpy.bfloat16)
    )

    def body(x):
        ids = jax.numpy.arange(N_TOKENS * N_CHOICES, dtype="int32").reshape(N_TOKENS, N_CHOICES)
        rows = ep.dispatch(group, x, ids % group.config.n_experts)
        return ep.combine(group, rows.tokens, rows)

    out = jax.jit(jax.shard_map(body, mesh=group.mesh, in_specs=P, out_specs=P))(tokens)
    for shard in out.addressable_shards:
        wanted = N_CHOICES * values[shard.index]
        rounded = wanted.astype(jax.numpy.bfloat16).astype(np.float32)
        np.testing.assert_array_equal(np.asarray(shard.data).astype(np.float32), rounded)


def keys_of(text: str) -> list[str]:
    return [word.strip(".,:;()") for word in text.split() if word.startswith("host-ep")]


def is_open(key: str) -> bool:
    """Whether the extension has a group open."""
    from jax_ep.ffi import extension

    for each in (key, f"{key}-intra-node"):
        with contextlib.suppress(Exception):
            extension.load_host().stats(each, 0, 0)
            return True
    return False


def later(seconds: float, act) -> None:
    timer = threading.Timer(seconds, act)
    timer.daemon = True
    timer.start()


def stop_me(after_s: float, for_s: float) -> None:
    """Has another process stop this one for a while."""
    script = f"sleep {after_s}; kill -STOP $0; sleep {for_s}; kill -CONT $0"
    subprocess.Popen(["sh", "-c", script, str(os.getpid())])


def late(job: Job) -> None:
    """It comes when the others have given up: all raise."""
    if job.is_last:
        time.sleep(TIMEOUT_S + 1.5)
        job.fails(f"{job.last} comes too late to open group", TimeoutError, within_s=1)
    else:
        job.fails(f"s for process {job.n - 1} (group host-", TimeoutError)


def late_for_a_retry(job: Job) -> None:
    """It comes while the others try again: all open."""
    if job.is_last:
        time.sleep(1.5 * TIMEOUT_S)
    for _ in range(20):
        try:
            with job.open() as group:
                check_calls(job, group)
                return
        except TimeoutError:
            continue
    raise AssertionError("retries do not meet")


def another_group(job: Job) -> None:
    """It opens another group: all raise at once, with what differs."""
    text = f"top_k is 2 in process 0 and 1 in process {job.n - 1}"
    if job.n > 2:
        text = f"and 1 in process {job.n - 1}"
    job.fails(text, ValueError, within_s=1, top_k=1 if job.is_last else 2, timeout_s=60.0)


def failure(job: Job) -> None:
    """It fails between two steps: the others learn why, at once."""
    from jax_ep.transports.host import HostConnection

    if not job.is_last:
        return job.fails(f"{job.last} gave up on group", RuntimeError, within_s=1, timeout_s=60.0)
    original = HostConnection.open
    HostConnection.open = lambda self, _: 1 / 0
    try:
        job.open(timeout_s=60.0)
    except ZeroDivisionError:
        return None
    finally:
        HostConnection.open = original
    raise AssertionError("opened in spite of a failure")


def interrupt(job: Job) -> None:
    """It gets SIGINT while it waits for the others: these learn it at once."""
    if not job.is_last:
        time.sleep(1.0)
        return job.fails(f"{job.last} ", (RuntimeError, TimeoutError), within_s=1, timeout_s=60.0)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    begin = time.monotonic()
    later(0.3, lambda: os.kill(os.getpid(), signal.SIGINT))
    try:
        job.open(timeout_s=60.0)
    except KeyboardInterrupt:
        assert time.monotonic() - begin < 3 + SLACK_S
        return None
    raise AssertionError("opened in spite of an interrupt")


def interrupts_at_any_time(job: Job) -> None:
    """It gets SIGINT at some time of opening: the group opens in all or in none, then the next."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for i in range(10):
        job.meet()
        try:
            if job.is_last:
                later(0.004 * i, lambda: os.kill(os.getpid(), signal.SIGINT))
            group = job.open(timeout_s=60.0)
            is_opened = True
            with contextlib.suppress(KeyboardInterrupt):
                if job.is_last:
                    time.sleep(0.2)  # until the signal has come
            group.close()
        except KeyboardInterrupt as error:
            is_opened = False
            if "in ep_init" not in "".join(traceback.format_tb(error.__traceback__)):
                job.give_up()
        except RuntimeError as error:
            assert f"{job.last} gave up on group" in str(error), error
            is_opened = False
        outcomes = job_outcomes(job, i, is_opened)
        # An interrupt after all have agreed leaves the others with an open group.
        assert len(set(outcomes[:-1])) == 1, outcomes
        assert outcomes[0] or not outcomes[-1], outcomes


def job_outcomes(job: Job, i: int, is_opened: bool) -> list[bool]:
    """Whether each process has opened the group."""
    job.client.key_value_set_bytes(f"test/outcome/{job.me}/{i}", bytes([is_opened]))
    keys = [f"test/outcome/{p}/{i}" for p in range(job.n)]
    return [job.client.blocking_key_value_get_bytes(k, BARRIER_MS) == b"\1" for k in keys]


def stopped(job: Job) -> None:
    """It is stopped for longer than the limit: the others give up, and then it learns that."""
    if not job.is_last:
        time.sleep(1.0)
        return job.fails(f"s for process {job.n - 1} (group host-", TimeoutError)
    from jax_ep.transports.host import HostConnection

    original = HostConnection.open

    def open_and_stop(self, exchange):
        stop_me(0, TIMEOUT_S + 4)
        time.sleep(1.0)
        original(self, exchange)

    HostConnection.open = open_and_stop
    try:
        job.fails(f"s for process {job.n - 1} (group host-", TimeoutError, within_s=99)
    finally:
        HostConnection.open = original
    return None


def stopped_while_it_waits(job: Job) -> None:
    """It is stopped for longer than the limit while it waits: that does not count."""
    if job.is_last:
        stop_me(0.3, 3 * TIMEOUT_S)
    else:
        time.sleep(0.3 + 3 * TIMEOUT_S + 0.5)
    with job.open(timeout_s=2 * TIMEOUT_S) as group:
        check_calls(job, group)


def garbage(job: Job) -> None:
    """Someone has written to the keys of the next meeting: all raise, and name the key."""
    from jax_ep.processes import exchange

    root = f"jax_ep/0-{job.n - 1}"
    number = exchange._members[0].next_numbers[root.removeprefix("jax_ep/")]
    key = f"{root}/open/{number}/0/end"
    planted = [b"", os.urandom(100), b"jax_ep 1" + b"\xff" * 12, b"x" * 3_000_000]
    if job.is_last:
        job.client.key_value_set_bytes(key, planted[number % len(planted)])
    job.meet()
    begin = time.monotonic()
    try:
        job.open()
    except RuntimeError as error:
        assert key in str(error), error
        assert time.monotonic() - begin < TIMEOUT_S + 2 + SLACK_S
        return
    raise AssertionError("opened with garbage in the store")


def killed(job: Job) -> None:
    """It is killed while it opens the group; the others go on without it."""
    from jax_ep.transports.host import HostConnection

    if job.is_last:
        HostConnection.open = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        job.open()
    job.fails(f"s for process {job.n - 1} (group host-", TimeoutError)
    for _ in range(2):
        job.check_next_group(job.n - 1)


QUICK = (late, another_group, interrupt, garbage)
ALL = (
    late,
    late_for_a_retry,
    another_group,
    failure,
    interrupt,
    interrupts_at_any_time,
    stopped,
    stopped_while_it_waits,
    *[garbage] * 4,
)


def run_job() -> None:
    """One process: all faults of the list, one after the other."""
    job = Job()
    job.check_next_group()  # compiles
    for fault in QUICK if os.environ.get("OPENING_QUICK") else ALL:
        print(fault.__name__, flush=True)
        job.meet()
        fault(job)
        job.check_next_group()
    job.meet()


def run_killed() -> None:
    """One process of a job whose last one is killed."""
    job = Job()
    job.check_next_group()
    job.meet()
    killed(job)
    processes.leave()


def check_killed_job(n: int) -> None:
    """All but the last process end well."""
    try:
        processes.run_processes(n, "opening:run_killed", n_local_devices=2, timeout_s=120)
    except AssertionError as error:
        lines = [line for line in str(error).splitlines() if "ended with status" in line]
        assert lines == [f"process {n - 1} of {n} ended with status -9"], error
    else:
        raise AssertionError("nobody was killed")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two processes, a few faults")
    quick = parser.parse_args().quick
    sys.path.insert(0, str(pathlib.Path(__file__).parent))
    processes.GRACE_S = 60.0  # the others go on when one is killed
    if quick:
        os.environ["OPENING_QUICK"] = "1"
    n_faults = 0
    for n in (2,) if quick else (2, 4):
        processes.run_processes(n, "opening:run_job", n_local_devices=2, timeout_s=300)
        n_faults += len(QUICK if quick else ALL)
        if not quick:
            check_killed_job(n)
            n_faults += 1
    print(f"opening: {n_faults} faults, no crash, no hang")


if __name__ == "__main__":
    main()
