"""Ctrl-C in `ep_init`: wherever it arrives, no group stays open.

The signal is sent at each line that `ep_init` runs, one after the other.
"""

import itertools
import pathlib
import signal
import sys

import jax
import numpy as np
import pytest

import cases
import jax_ep
from fake_extension import FakeExtension
from harness import AXIS, config_of, make_mesh
from jax_ep.ffi import extension
from jax_ep.processes import interrupts
from jax_ep.processes.exchange import Exchange
from jax_ep.transports import p2p
from jax_ep.transports.p2p import P2pConnection

pytestmark = pytest.mark.usefixtures("one_process")
SOURCES = str(pathlib.Path(jax_ep.__file__).parent)
N_RANKS = 2


class AtLine:
    """Sends SIGINT to this process at the n-th line that jax_ep runs."""

    def __init__(self, n: int):
        self.left = n

    def __call__(self, frame, event, _):
        if not frame.f_code.co_filename.startswith(SOURCES):
            return None
        if event == "line" and self.left >= 0:
            self.left -= 1
            if self.left < 0:
                signal.raise_signal(signal.SIGINT)
        return self


def interrupted_at(n: int, run):
    """The result of `run`, None if it was interrupted, and whether it has a line n."""
    at_line = AtLine(n)
    before = sys.gettrace()
    sys.settrace(at_line)
    try:
        result = run()
    except KeyboardInterrupt:
        result = None
    finally:
        sys.settrace(before)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert not interrupts._active
    return result, at_line.left < 0


@pytest.fixture(autouse=True)
def default_handler():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def check_every_line(open_group, assert_none_is_open) -> None:
    n_interrupted = 0
    for n in itertools.count():
        group, has_line = interrupted_at(n, open_group)
        if not has_line:
            break
        if group is None:
            n_interrupted += 1
        else:
            group.close()
        assert_none_is_open()
    assert n_interrupted >= n - 1 > 50, (n_interrupted, n)
    group.close()


def test_no_group_of_host_stays_open():
    mesh, config = make_mesh(N_RANKS), config_of(cases.SMALL[N_RANKS], timeout_s=77.0)
    jax_ep.ep_init(mesh, AXIS, config, "host").close()  # registers handlers
    key = jax_ep.ep_init(mesh, AXIS, config, "host").key
    extension.load_host().close_group(key)

    def assert_none_is_open():
        with pytest.raises(Exception, match=key):
            extension.load_host().stats(key, 0, 0)

    check_every_line(lambda: jax_ep.ep_init(mesh, AXIS, config, "host"), assert_none_is_open)


@pytest.fixture
def fake(monkeypatch):
    fake = FakeExtension()
    monkeypatch.setattr(extension, "load_cuda", lambda: fake)
    monkeypatch.setattr(extension, "register_cuda", lambda: None)
    monkeypatch.setattr(P2pConnection, "unsupported_reason", lambda *_: None)
    return fake


@pytest.mark.parametrize("has_exchange", [False, True])
def test_no_group_of_p2p_stays_open(fake, has_exchange, monkeypatch):
    """Also where another process takes part, by an exchange in which it does what this one does."""
    mesh, config = make_mesh(N_RANKS), config_of(cases.SMALL[N_RANKS])
    if has_exchange:
        monkeypatch.setattr(Exchange, "over", exchange_with_a_second_process)
        monkeypatch.setattr(p2p.workspaces, "_peers", lambda *_: [])
    check_every_line(
        lambda: jax_ep.ep_init(mesh, AXIS, config, "p2p"), lambda: assert_nothing_is_left(fake)
    )


def exchange_with_a_second_process(mesh, name, timeout_s, custom, facts):
    return Exchange(name, (0, 1), 0, timeout_s, lambda _, mine: [mine, mine])


def assert_nothing_is_left(fake) -> None:
    assert not fake.n_users
    assert not fake.allocated
    assert not p2p._exchanges


@pytest.mark.parametrize("step", ["allocate_group", "connect_group", "share_group", "GroupConfig"])
def test_an_interrupt_out_of_the_extension_leaves_nothing(fake, step, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    mesh, config = make_mesh(N_RANKS), config_of(cases.SMALL[N_RANKS])
    with monkeypatch.context() as patch:
        patch.setattr(fake, step, interrupt)
        with pytest.raises(KeyboardInterrupt):
            jax_ep.ep_init(mesh, AXIS, config, "p2p")
    assert_nothing_is_left(fake)
    jax_ep.ep_init(mesh, AXIS, config, "p2p").close()
    assert_nothing_is_left(fake)


def test_a_user_s_exchange_is_interrupted_at_once():
    def exchange(key, payload):
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("goes on after an interrupt")

    with pytest.raises(KeyboardInterrupt), interrupts.deferred():
        Exchange("group", (0, 1), 0, 1.0, exchange)("step", b"")


def test_a_handler_of_the_user_s_is_called_once_and_may_go_on():
    calls = []
    signal.signal(signal.SIGINT, lambda *_: calls.append(1))
    with interrupts.deferred():
        signal.raise_signal(signal.SIGINT)
        assert not calls
        interrupts.check()
        assert calls == [1]
        signal.raise_signal(signal.SIGINT)
    assert calls == [1, 1]


def test_a_device_twice_in_a_mesh_is_named_with_both_coordinates():
    devices = np.array([jax.devices()[i] for i in (0, 1, 2, 0)]).reshape(2, 2)
    mesh = jax.sharding.Mesh(devices, ("data", AXIS))
    wanted = r"device 0 is at \(0, 0\) and at \(1, 1\) of the mesh .*'data': 2"
    with pytest.raises(ValueError, match=wanted):
        jax_ep.ep_init(mesh, AXIS, config_of(cases.SMALL[2]))
