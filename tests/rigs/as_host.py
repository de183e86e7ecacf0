"""Runs a command as on a host of the given name: `python as_host.py NAME COMMAND...`.

Its name is all that gives the host away; it shares everything else with this one. Needs root, or
CAP_SYS_ADMIN.
"""

import ctypes
import os
import socket
import sys

_CLONE_NEWUTS = 0x04000000  # os.unshare exists from Python 3.12 on


def enter(name: str) -> None:
    """Gives this process, and those that it starts, a host name of their own.

    Raises:
        OSError: it may not.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWUTS) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"unshare: {os.strerror(error)}")
    socket.sethostname(name)


if __name__ == "__main__":
    enter(sys.argv[1])
    os.execvp(sys.argv[2], sys.argv[2:])
