"""The key-value store of JAX's distributed runtime in one process, for threads as processes."""

import threading
import time

import jax

from jax_ep.processes.meeting import Member
from jax_ep.processes.messages import KeyValueStore


class FakeClient:
    """The part of `DistributedRuntimeClient` that jax_ep uses; each operation is atomic, too.

    Attributes:
        values: what the store holds.
    """

    def __init__(self):
        self.values: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def key_value_set_bytes(self, key, value, allow_overwrite=False):
        with self._changed:
            if key in self.values and not allow_overwrite:
                raise jax.errors.JaxRuntimeError(f"ALREADY_EXISTS: key {key} already exists.")
            self.values[key] = value
            self._changed.notify_all()

    def key_value_try_get_bytes(self, key):
        with self._changed:
            if key not in self.values:
                raise jax.errors.JaxRuntimeError(f"NOT_FOUND: Config key {key} not found.")
            return self.values[key]

    def blocking_key_value_get_bytes(self, key, timeout_in_ms):
        end = time.monotonic() + timeout_in_ms / 1000
        with self._changed:
            while key not in self.values:
                left = end - time.monotonic()
                if left <= 0 or not self._changed.wait(left):
                    raise jax.errors.JaxRuntimeError(f"DEADLINE_EXCEEDED: {timeout_in_ms} ms")
            return self.values[key]

    def key_value_dir_get_bytes(self, key):
        with self._changed:
            return [pair for pair in sorted(self.values.items()) if pair[0].startswith(key)]

    def key_value_delete(self, key):
        with self._changed:
            for each in [each for each in self.values if each == key or each.startswith(key)]:
                del self.values[each]


def members_of(client, n_processes: int) -> list[Member]:
    """A member per process."""
    return [Member(KeyValueStore(client), process) for process in range(n_processes)]


def in_threads(n: int, run) -> list:
    """`run(i)` in a thread each; their results, or the exceptions that they raised."""
    results: list = [None] * n

    def work(i: int) -> None:
        try:
            results[i] = run(i)
        except BaseException as error:
            results[i] = error

    threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive(), "hangs"
    return results
