"""Which implementation runs, by what is to be computed and on which platform."""

import dataclasses

import jax
import jax.export
import numpy as np
import pytest

from jax_ep.layer.matmul import choose
from jax_ep.layer.matmul.choose import Implementation, Kernels, Operation, Work

KERNEL, TILES = Implementation.KERNEL, Implementation.TILES
RAGGED_DOT, SEPARATE = Implementation.RAGGED_DOT, Implementation.SEPARATE
BLOCKS = Implementation.BLOCKS
NONE, AMPERE, HOPPER = Kernels
BFLOAT16, FLOAT16, FLOAT32, E4M3 = map(
    np.dtype, ("bfloat16", "float16", "float32", "float8_e4m3fn")
)
(OPEN,) = jax.export.symbolic_shape("c")

# Work that a kernel just does.
PLAIN = Work(Operation.MULTIPLY, 1, 1, 8, 8, BFLOAT16, BFLOAT16)
SCALED = Work(Operation.MULTIPLY, 1, 1, 128, 8, E4M3, BFLOAT16, is_scaled=True)
ACTIVATE = Work(Operation.ACTIVATE, 0, 1, 1024, 48832, BFLOAT16, BFLOAT16)
KEEPING = Work(Operation.ACTIVATE, 256, 2, 4096, 6400, BFLOAT16, BFLOAT16, keeps_hidden=True)
BIASED = Work(Operation.ACTIVATE, 0, 512, 8, 16, BFLOAT16, BFLOAT16, has_bias=True)
ACTIVATE_SCALED = Work(Operation.ACTIVATE, 0, 512, 4096, 256, E4M3, BFLOAT16, is_scaled=True)
FEW_TERMS = dataclasses.replace(ACTIVATE_SCALED, n_rows=64 * 512, k=3968)
DIFFERENTIATE = Work(Operation.DIFFERENTIATE, 4096, 4, 4096, 6104, BFLOAT16, BFLOAT16)
QUANTIZE = Work(Operation.QUANTIZE, 1, 1, 0, 128, BFLOAT16, E4M3)
COLUMNS = Work(Operation.MULTIPLY_COLUMNS, 128, 1, 8, 8, E4M3, BFLOAT16, is_scaled=True)

# Of each: changes after which another implementation runs, or the same one.
CASES = [
    (PLAIN, {}, KERNEL),
    (PLAIN, {"n_rows": OPEN}, KERNEL),
    (PLAIN, {"dtype": FLOAT16, "out_dtype": FLOAT16}, KERNEL),
    (PLAIN, {"out_dtype": FLOAT32}, KERNEL),
    (PLAIN, {"out_dtype": FLOAT16}, RAGGED_DOT),
    (PLAIN, {"dtype": FLOAT32, "out_dtype": FLOAT32}, RAGGED_DOT),
    (PLAIN, {"k": 12}, RAGGED_DOT),
    (PLAIN, {"n": 12}, RAGGED_DOT),
    (SCALED, {}, KERNEL),
    (SCALED, {"n_groups": 513}, KERNEL),
    (SCALED, {"k": 136}, RAGGED_DOT),
    (SCALED, {"n": 12}, RAGGED_DOT),
    (ACTIVATE, {}, KERNEL),
    (ACTIVATE, {"n_rows": OPEN}, KERNEL),
    (ACTIVATE, {"k": 1016, "n": 51200}, SEPARATE),
    (ACTIVATE, {"n": 48816}, SEPARATE),  # just under 50 M numbers
    (ACTIVATE, {"n": 48840}, SEPARATE),  # not a multiple of 16
    (ACTIVATE, {"n_groups": 512}, KERNEL),
    (ACTIVATE, {"n_groups": 513}, SEPARATE),
    (ACTIVATE, {"keeps_hidden": True}, KERNEL),
    (KEEPING, {}, KERNEL),
    (KEEPING, {"n_rows": 255}, SEPARATE),
    (KEEPING, {"n_rows": OPEN}, SEPARATE),
    (KEEPING, {"n_rows": 255, "keeps_hidden": False}, KERNEL),
    (KEEPING, {"n_rows": 255, "has_bias": True}, KERNEL),
    (BIASED, {}, KERNEL),
    (BIASED, {"n_groups": 513}, SEPARATE),
    (BIASED, {"n": 24}, SEPARATE),
    (BIASED, {"k": 12}, SEPARATE),
    (ACTIVATE_SCALED, {}, KERNEL),
    (ACTIVATE_SCALED, {"n_rows": OPEN, "has_bias": True}, KERNEL),
    (ACTIVATE_SCALED, {"n_groups": 513}, SEPARATE),
    (FEW_TERMS, {}, KERNEL),
    (FEW_TERMS, {"n_rows": 64 * 512 - 1}, SEPARATE),
    (FEW_TERMS, {"n_rows": OPEN}, SEPARATE),
    (FEW_TERMS, {"n_rows": 64 * 512 - 1, "has_bias": True}, SEPARATE),
    (DIFFERENTIATE, {}, KERNEL),
    (DIFFERENTIATE, {"n_rows": 4095}, SEPARATE),
    (DIFFERENTIATE, {"n_rows": OPEN}, SEPARATE),
    (DIFFERENTIATE, {"k": 4088, "n": 6400}, SEPARATE),
    (DIFFERENTIATE, {"n": 6096}, SEPARATE),  # just under 100 M numbers
    (DIFFERENTIATE, {"n": 6108}, SEPARATE),
    (DIFFERENTIATE, {"n_groups": 513, "n_rows": 1 << 20}, SEPARATE),
    (QUANTIZE, {}, KERNEL),
    (QUANTIZE, {"n_rows": OPEN, "n_groups": 513, "dtype": E4M3, "is_scaled": True}, KERNEL),
    (QUANTIZE, {"n": 64}, BLOCKS),
    (COLUMNS, {}, KERNEL),
    (COLUMNS, {"n_rows": OPEN, "n_groups": 513, "out_dtype": FLOAT32}, KERNEL),
    (COLUMNS, {"k": 12}, BLOCKS),
    (COLUMNS, {"n": 12}, BLOCKS),
]


@pytest.mark.parametrize(("work", "changes", "wanted"), CASES)
def test_sizes_and_dtypes_choose_for_hopper(work, changes, wanted, monkeypatch):
    monkeypatch.setattr(choose, "kernels", lambda: HOPPER)
    assert choose.choose(dataclasses.replace(work, **changes), "cuda") == wanted


# On Hopper GPUs, older ones, GPUs without kernels, CPUs and other platforms.
PLATFORMS = [("cuda", HOPPER), ("cuda", AMPERE), ("cuda", NONE), ("cpu", None), ("other", None)]
ELSEWHERE = [
    (PLAIN, [KERNEL, KERNEL, RAGGED_DOT, TILES, RAGGED_DOT]),
    (SCALED, [KERNEL, RAGGED_DOT, RAGGED_DOT, TILES, RAGGED_DOT]),
    (ACTIVATE, [KERNEL, *[SEPARATE] * 4]),
    (BIASED, [KERNEL, *[SEPARATE] * 4]),
    (ACTIVATE_SCALED, [KERNEL, *[SEPARATE] * 4]),
    (DIFFERENTIATE, [KERNEL, *[SEPARATE] * 4]),
    (QUANTIZE, [KERNEL, *[BLOCKS] * 4]),
    (COLUMNS, [KERNEL, *[BLOCKS] * 4]),
]


@pytest.mark.parametrize(("work", "wanted"), ELSEWHERE)
def test_platforms_and_kernels_choose(work, wanted, monkeypatch):
    for (platform, kernels), each in zip(PLATFORMS, wanted, strict=True):
        monkeypatch.setattr(choose, "kernels", lambda kernels=kernels: kernels)
        assert choose.choose(work, platform) == each


@pytest.mark.parametrize("is_for_hopper", [False, True], ids=["", "for Hopper"])
def test_the_extension_and_the_gpus_say_which_kernels_run(is_for_hopper, monkeypatch):
    names = ["jax_ep_grouped_matmul", *["jax_ep_gated_matmul"] * is_for_hopper]
    module = type("module", (), {"targets": staticmethod(lambda: dict.fromkeys(names))})
    monkeypatch.setattr(choose.extension, "register_cuda", lambda: None)
    monkeypatch.setattr(choose.extension, "load_cuda", lambda: module)
    newest = HOPPER if is_for_hopper else AMPERE
    for capability, wanted in {7: NONE, 8: AMPERE, 9: newest, 10: AMPERE}.items():
        monkeypatch.setattr(choose, "_compute_capability", lambda x=capability: x)
        assert choose.kernels.__wrapped__() == wanted


def test_without_gpus_programs_are_for_hopper(monkeypatch):
    def local_devices(backend):
        raise RuntimeError(f"no {backend}")

    monkeypatch.setattr(jax, "local_devices", local_devices)
    assert choose._compute_capability() == HOPPER
