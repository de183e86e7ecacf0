"""A fake CUDA extension that records what `p2p` calls."""

import cases
from harness import AXIS, config_of
from jax_ep.ffi import extension
from jax_ep.geometry import Geometry


class FakeExtension:
    """Records which groups are open; fails at the step called `fails_at`."""

    def __init__(self, fails_at: str = "", host: str = "here", reason: str = ""):
        self.fails_at, self.host, self.reason = fails_at, host, reason
        self.n_users: dict[str, int] = {}
        self.memory: dict[str, str] = {}  # of open groups
        self.allocated: set[str] = set()
        self.peers: list = []

    def host_identity(self):
        return self.host

    def peer_access_problem(self, ordinals):
        return self.reason

    def GroupConfig(self, **sizes):  # noqa: N802 (the extension's name)
        return sizes

    def stats(self, memory, ordinal):
        raise RuntimeError("this extension has no totals")

    def allocate_group(self, key, config, devices):
        if self.fails_at == "allocate":
            raise RuntimeError("no memory")
        self.n_users[key] = 1
        self.memory[key] = key
        self.allocated.add(key)
        return [f"{replica}.{rank}".encode() for _, replica, rank in devices]

    def connect_group(self, key, peers):
        if self.fails_at == "connect":
            raise RuntimeError("no peer access")
        self.peers = peers

    def disconnect_group(self, key):
        if key not in self.n_users:
            return False
        self.n_users[key] -= 1
        if self.n_users[key] > 0:
            return False
        del self.n_users[key]
        return self.memory.pop(key) not in self.memory.values()

    def free_group(self, memory):
        self.allocated.remove(memory)

    def share_group(self, key, memory, config):
        if memory not in self.allocated:
            return False
        self.n_users[key] = self.n_users.get(key, 0) + 1
        self.memory[key] = memory
        return True

    def failure(self, key, ordinal):
        return self.reason


def use(fake: FakeExtension) -> None:
    """Makes `fake` the CUDA extension of this process, permanently."""
    extension.load_cuda = lambda: fake
    extension.register_cuda = lambda: None


def geometry_of(mesh, n_experts: int = 6) -> Geometry:
    """A geometry for p2p; another number of experts gives another key."""
    config = config_of(cases.SMALL[2].replace(n_experts=n_experts))
    return Geometry(mesh, AXIS, config, "p2p")
