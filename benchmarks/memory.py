"""What memory there is, and who goes first when there is none. Linux."""

from __future__ import annotations

import os
import pathlib


def available_bytes() -> int:
    """Memory that could be taken without swapping."""
    with open("/proc/meminfo") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return total_bytes()


def total_bytes() -> int:
    """Of the machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def die_first() -> None:
    """Asks the kernel to end this process, not another one, if memory runs out."""
    pathlib.Path("/proc/self/oom_score_adj").write_text("1000")
