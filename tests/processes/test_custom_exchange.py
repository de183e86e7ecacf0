"""The arguments and results of an `exchange` that a user gives to `ep_init`."""

import itertools
import os
import pathlib
import time

import jax
import numpy as np
import pytest

from fake_extension import FakeExtension, geometry_of, use
from harness import make_mesh
from jax_ep._jax_compat import distributed_client
from jax_ep.ffi import extension
from jax_ep.processes.exchange import Exchange
from jax_ep.processes.messages import Message
from jax_ep.transports import workspaces
from processes import run_processes


def test_a_custom_exchange_gets_keys_and_must_return_all_payloads():
    keys = []

    def custom(key, payload):
        keys.append(key)
        return answers(payload)

    exchange = Exchange("group", (0, 4), 4, 1.0, custom, label="group/1")
    theirs = Message("group", "step", b"theirs").encode()
    for kind, of_one in itertools.product((list, tuple), (bytes, bytearray, memoryview)):
        answers = lambda mine: kind([of_one(theirs), of_one(mine)])  # noqa: B023, E731
        assert exchange("step", b"mine") == [b"theirs", b"mine"]
    assert set(keys) == {"group/1/step"}
    for wrong in (lambda p: [p], lambda p: [p, theirs], lambda p: [b"", p, b""], lambda _: []):
        answers = wrong
        with pytest.raises(ValueError, match=r"processes \(0, 4\), in this order; got "):
            exchange("step", b"mine")


@pytest.mark.parametrize(
    ("returned", "error", "text"),
    [
        (lambda _: None, TypeError, "list or tuple .* got NoneType"),
        (lambda mine: mine, TypeError, "list or tuple .* got bytes"),
        (lambda mine: {0: mine}, TypeError, "list or tuple .* got dict"),
        (lambda mine: iter([mine, mine]), TypeError, "list or tuple .* got list_iterator"),
        (lambda mine: ["text", mine], TypeError, "got str for process 0"),
        (lambda mine: [None, mine], TypeError, "got NoneType for process 0"),
        (lambda mine: [np.frombuffer(mine, np.uint8), mine], TypeError, "got ndarray for process"),
        (lambda mine: [b"", mine], ValueError, "what process 0 has passed .* it has 0 bytes"),
        (lambda mine: [mine[:-1], mine], ValueError, "what process 0 has .* and should have"),
        (lambda mine: [mine[:-1] + b"?", mine], ValueError, "what process 0 .* checksum"),
        (lambda mine: [mine + bytes(2**20), mine], ValueError, "the limit is 1048576"),
        (lambda mine: [Message("group", "next", b"").encode(), mine], ValueError, "step 'next'"),
        (lambda mine: [Message("other", "step", b"").encode(), mine], ValueError, "opens group ot"),
    ],
)
def test_what_a_custom_exchange_may_return(returned, error, text):
    exchange = Exchange("group", (0, 4), 4, 1.0, lambda _, mine: returned(mine))
    with pytest.raises(error, match=text):
        exchange("step", b"mine")


@pytest.mark.parametrize(
    "record", [b"", b"[]", b'["host"]', b"[1, null]", b'["host", 1]', b'{"a": 1}', b"[" * 5000]
)
def test_what_a_process_says_of_its_host_is_checked(record, monkeypatch):
    monkeypatch.setattr(extension, "load_cuda", FakeExtension)
    exchange = Exchange(
        "group", (0, 1), 0, 1.0, lambda _, mine: [mine, Message("group", "choice", record).encode()]
    )
    with pytest.raises(RuntimeError, match="process 1: what it says of its host"):
        workspaces.unsupported_reason(geometry_of(make_mesh(2)), exchange)


BOARD_VARIABLE = "JAX_EP_TEST_BOARD"


@pytest.mark.thorough
@pytest.mark.multiprocess
def test_a_custom_exchange_replaces_the_distributed_runtime(tmp_path, monkeypatch):
    monkeypatch.setenv(BOARD_VARIABLE, str(tmp_path))
    run_processes(2, "test_custom_exchange:check_files", n_local_devices=1, timeout_s=90)


def check_files() -> None:
    """The steps of `p2p`, with an exchange of files."""
    assert distributed_client() is not None
    mesh = make_mesh(2)
    fake = FakeExtension()
    use(fake)
    exchange = Exchange.over(mesh, "files", 30.0, exchange_files)
    geometry = geometry_of(mesh)
    assert workspaces.unsupported_reason(geometry, exchange) is None
    workspaces.open_workspaces(geometry, exchange)
    assert [peer[1] for peer in fake.peers] == [0, 1]
    assert workspaces.disconnect(geometry.key)
    workspaces.free_workspaces(geometry.key, exchange)
    n_files = len(list(pathlib.Path(os.environ[BOARD_VARIABLE]).iterdir()))
    assert n_files == 2 * 4  # of 2 processes: choice, workspaces, connected, closed


def exchange_files(key: str, payload: bytes) -> list[bytes]:
    """Writes the payload to a file in a shared folder and waits for that of the other process."""
    board, me = pathlib.Path(os.environ[BOARD_VARIABLE]), jax.process_index()
    name = key.replace("/", "_")
    (board / f"{name}.{me}.new").write_bytes(payload)
    (board / f"{name}.{me}.new").rename(board / f"{name}.{me}")
    files = [board / f"{name}.{process}" for process in range(2)]
    end = time.monotonic() + 30
    while not all(file.exists() for file in files):
        assert time.monotonic() < end, "the other process wrote nothing"
        time.sleep(0.01)
    return [file.read_bytes() for file in files]
