"""What is measured, in which order: what matters most comes first."""

from __future__ import annotations

import dataclasses
from typing import Any

from gpu.contestants import OURS, RIVALS

_TOKENS = (4096, 128, 8, 1024, 64, 8192, 512, 32, 1)
_ZIPF_RIVALS = (128, 4096)  # they take long to compile
_LOOPS = (8, 128, 4096)
_NO_COMMAND_BUFFERS = (8, 128, 1, 1024, 4096)
_WITHOUT_COMMAND_BUFFERS = "--xla_gpu_enable_command_buffer="
_OVERLAP_TOKENS = 4096
# n_sms, and the layer's width.
_OVERLAPS = ((16, 12288), (12, 12288), (24, 12288), (20, 8192))
_FORMAT_TOKENS = (4096, 128)
_FORMATS = ("bf16", "blockwise_fp8", "mxfp8", "nvfp4", "mxfp4")

#: One size for tests of the program itself.
_TINY: dict[str, Any] = {
    "n_tokens": 16,
    "hidden_size": 64,
    "n_experts": 16,
    "top_k": 4,
}
TINY_EFFORT = {
    "repeats": 2,
    "n_sets": 2,
    "n_pairs": [1, 2],
    "n_loop": 2,
    "n_queued": 2,
}


@dataclasses.dataclass(frozen=True)
class Item:
    """One measurement: a contestant in a case, or the links.

    Attributes:
        name: what `--only` matches.
        who: a contestant, `"link"`, `"overlap"` or `"format"`.
        case: fields of `cases.Case` but `n_ranks`.
        parts: of `measure.measure`.
        xla_flags: of the process.
        n_bytes: of one copy, for the links.
        n_sms: of calls that overlap.
        width: of the layer beside them.
        token_format: a name in `formats.FORMATS`.
    """

    name: str
    who: str
    case: dict[str, Any] = dataclasses.field(default_factory=dict)
    parts: tuple[str, ...] = ()
    xla_flags: str = ""
    n_bytes: int = 1 << 29
    n_sms: int | None = None
    width: int = 0
    token_format: str = "bf16"


def full() -> list[Item]:
    """On GPUs. Items of equal `xla_flags` in a row share a process."""
    items = [Item("link", "link")]
    for n_tokens in _TOKENS:
        items += _of_case(n_tokens, 7168, "uniform", loops=n_tokens in _LOOPS)
    items += _formats(_FORMAT_TOKENS, 7168) + _overlaps(_OVERLAP_TOKENS, 7168)
    for n_tokens in _NO_COMMAND_BUFFERS:
        item = _item(OURS[0], n_tokens, 7168, "uniform", "period")
        items.append(
            dataclasses.replace(
                item,
                name=f"{item.name}-no_command_buffers",
                xla_flags=_WITHOUT_COMMAND_BUFFERS,
            )
        )
    for n_tokens in _TOKENS:
        items += _of_case(n_tokens, 7168, "zipf", rivals=n_tokens in _ZIPF_RIVALS)
    for n_tokens in _TOKENS:
        items += _of_case(n_tokens, 4096, "uniform")
    return items


def quick(rivals: tuple[str, ...] = tuple(RIVALS)) -> list[Item]:
    """Tiny, one of each kind."""
    everything = ("kernels", "period", "loop")
    items = [Item("link", "link", n_bytes=1 << 16)]
    for routing in ("uniform", "zipf"):
        case = {**_TINY, "routing": routing}
        for who in (*OURS, *rivals):
            parts = tuple(p for p in everything if (p == "loop") == (who in rivals))
            parts = parts if who in OURS else ("kernels", "loop")
            items.append(Item(f"tiny-{routing}-{who}", who, case, parts))
    case = {**_TINY, "routing": "uniform"}
    for name in _FORMATS:
        # Blocks of BlockwiseFP8 are of 128 elements.
        wide = {**case, "hidden_size": 128}
        items.append(Item(f"tiny-format-{name}", "format", wide, token_format=name))
    items.append(Item("tiny-overlap", "overlap", case, n_sms=4, width=128))
    return items


def _formats(tokens: tuple[int, ...], hidden: int) -> list[Item]:
    items = []
    for n_tokens in tokens:
        case = {"n_tokens": n_tokens, "hidden_size": hidden, "routing": "uniform"}
        for name in _FORMATS:
            title = f"format-T{n_tokens}-H{hidden}-{name}"
            items.append(Item(title, "format", case, token_format=name))
    return items


def _overlaps(n_tokens: int, hidden: int) -> list[Item]:
    case = {"n_tokens": n_tokens, "hidden_size": hidden, "routing": "uniform"}
    return [
        Item(
            f"overlap-T{n_tokens}-n_sms{n_sms}-width{width}",
            "overlap",
            case,
            n_sms=n_sms,
            width=width,
        )
        for n_sms, width in _OVERLAPS
    ]


def _of_case(
    n_tokens: int, hidden: int, routing: str, rivals: bool = True, loops: bool = False
) -> list[Item]:
    items = [_item(who, n_tokens, hidden, routing, "kernels", "period") for who in OURS]
    parts = ("kernels", "loop") if loops else ("kernels",)
    for who in RIVALS if rivals else ():
        items.append(_item(who, n_tokens, hidden, routing, *parts))
    return items


def _item(who: str, n_tokens: int, hidden: int, routing: str, *parts: str) -> Item:
    case = {"n_tokens": n_tokens, "hidden_size": hidden, "routing": routing}
    return Item(f"T{n_tokens}-H{hidden}-{routing}-{who}", who, case, parts)
