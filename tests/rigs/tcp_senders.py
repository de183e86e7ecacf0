"""Sends over TCP as `rate_shim.cc` is to see it: `python tcp_senders.py WAY N_BYTES RATE...`.

For each rate, in bytes per second, prints the seconds that sending took and the bytes that the shim
has counted. All of them have arrived, unchanged.
"""

import contextlib
import ctypes
import os
import select
import socket
import sys
import threading
import time
from collections.abc import Callable

_PIECE = 100_000  # of a call
_FUNCTIONS = ctypes.CDLL(None)
_FUNCTIONS.jax_ep_sent_bytes.restype = ctypes.c_uint64


class _Part(ctypes.Structure):  # struct iovec
    _fields_ = [("data", ctypes.c_char_p), ("size", ctypes.c_size_t)]


class _Message(ctypes.Structure):  # struct mmsghdr
    _fields_ = [
        ("name", ctypes.c_void_p),
        ("name_size", ctypes.c_uint),
        ("parts", ctypes.POINTER(_Part)),
        ("n_parts", ctypes.c_size_t),
        ("control", ctypes.c_void_p),
        ("control_size", ctypes.c_size_t),
        ("flags", ctypes.c_int),
        ("unused", ctypes.c_int),
        ("sent", ctypes.c_uint),
    ]


def _sendmmsg(connection: socket.socket, data: bytes) -> int:
    halves = data[: len(data) // 2], data[len(data) // 2 :]
    parts = [(_Part * 1)(_Part(half, len(half))) for half in halves]
    messages = (_Message * 2)(*(_Message(parts=part, n_parts=1) for part in parts))
    assert _FUNCTIONS.sendmmsg(connection.fileno(), messages, 2, 0) == 2
    return sum(message.sent for message in messages)


def _in_parts(data: bytes) -> list[bytes]:
    return [data[:10], b"", data[10:50_000], data[50_000:]]


_CALLS: dict[str, Callable[[socket.socket, bytes], int]] = {
    "send": socket.socket.send,
    "sendto": lambda connection, data: connection.sendto(data, connection.getpeername()),
    "sendmsg": lambda connection, data: connection.sendmsg(_in_parts(data)),
    "sendmmsg": _sendmmsg,
    "write": lambda connection, data: os.write(connection.fileno(), data),
    "writev": lambda connection, data: os.writev(connection.fileno(), _in_parts(data)),
}


def _send_all(connection: socket.socket, data: bytes, way: str) -> None:
    """As a blocking socket: each call sends all that it is given."""
    for first in range(0, len(data), _PIECE):
        piece = data[first : first + _PIECE]
        assert _CALLS[way](connection, piece) == len(piece)


def _send_by_edges(connection: socket.socket, data: bytes, _: str) -> None:
    """Without blocking. Sends until the socket takes no more, then waits for an edge."""
    connection.setblocking(False)
    edges = select.epoll()
    edges.register(connection, select.EPOLLOUT | select.EPOLLET)
    left = memoryview(data)
    while left:
        try:
            left = left[connection.send(left[:_PIECE]) :]
        except BlockingIOError:
            assert edges.poll(20.0), "no edge has come"


def _send_and_receive(connection: socket.socket, data: bytes) -> bool:
    """In one thread, whenever the socket is ready for either. Returns whether all came back."""
    connection.setblocking(False)
    levels = select.epoll()
    levels.register(connection, select.EPOLLIN | select.EPOLLOUT)
    left, got = memoryview(data), bytearray()
    while left or len(got) < len(data):
        ((_, events),) = levels.poll(20.0)
        if events & select.EPOLLIN:
            got += connection.recv(1 << 16)
        if events & select.EPOLLOUT:
            with contextlib.suppress(BlockingIOError):
                left = left[connection.send(left[:_PIECE]) :]
        if not left:
            levels.modify(connection, select.EPOLLIN)
    return got == data


def _send_both_ways(pair: tuple, data: bytes) -> None:
    """Sends the data while another process, of the same rate, sends them back."""
    child = os.fork()
    is_right = _send_and_receive(pair[child == 0], data)
    if child == 0:
        os._exit(0 if is_right else 1)
    assert is_right and os.waitpid(child, 0)[1] == 0


def _receive(connection: socket.socket, expected: bytes, wrong: list[int]) -> None:
    got = bytearray()
    while len(got) < len(expected):
        got += connection.recv(1 << 16)
    if got != expected:
        wrong.append(len(got))


def _send_over_all(pairs: list, data: bytes, way: str) -> None:
    """Sends the data over each of the connections at once."""
    wrong: list[int] = []
    send = _send_by_edges if way == "edges" else _send_all
    threads = [threading.Thread(target=_receive, args=(to, data, wrong)) for _, to in pairs]
    threads += [threading.Thread(target=send, args=(each, data, way)) for each, _ in pairs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong


def _connect(family: int) -> tuple[socket.socket, socket.socket]:
    host = {socket.AF_INET: "127.0.0.1", socket.AF_INET6: "::1"}[socket.AddressFamily(family)]
    with socket.create_server((host, 0), family=family) as server:
        pair = socket.create_connection(server.getsockname()[:2]), server.accept()[0]
    for each in pair:  # without it, the end of the data may wait for an acknowledgement
        each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return pair


def _send_elsewhere() -> None:
    """What is no TCP: pipes and other sockets. The shim must neither count nor limit it."""
    data = bytes(1000)
    read, write = os.pipe()
    for _ in range(50):
        assert os.write(write, data) == len(os.read(read, 2000)) == os.writev(write, [data])
        os.read(read, 2000)
    one, other = socket.socketpair()
    for call in ("send", "sendmsg", "write", "writev", "sendmmsg"):
        assert _CALLS[call](one, data) == len(data) == len(other.recv(1000, socket.MSG_WAITALL))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as to:
        to.bind(("127.0.0.1", 0))
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
            assert sender.sendto(data, to.getsockname()) == len(to.recv(2000)) == len(data)


def main() -> None:
    """Prints a line for each rate."""
    way, n_bytes, rates = sys.argv[1], int(sys.argv[2]), list(map(float, sys.argv[3:]))
    data = os.urandom(n_bytes)
    families = [socket.AF_INET, socket.AF_INET6] if way == "two" else [socket.AF_INET]
    pairs = [_connect(family) for family in families]
    for rate in rates:
        before = _FUNCTIONS.jax_ep_sent_bytes()
        begin = time.monotonic()  # before the first byte is allowed
        _FUNCTIONS.jax_ep_limit_send_rate(ctypes.c_double(rate))
        if way == "elsewhere":
            _send_elsewhere()
        elif way == "both":
            _send_both_ways(pairs[0], data)
        else:
            _send_over_all(pairs, data, "send" if way == "two" else way)
        print(time.monotonic() - begin, _FUNCTIONS.jax_ep_sent_bytes() - before)


if __name__ == "__main__":
    main()
