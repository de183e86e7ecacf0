"""Cached and exported programs in a process that did not compile them.

A program must contain nothing that belongs to one process: a cached executable and a serialized
module must find the group that a new process opened with the same `ep_init`.
"""

import pathlib
import re
import subprocess
import sys

import jax
import jax.export
import numpy as np
import pytest

import cases
import jax_ep
import suite
from harness import config_of, make_mesh, put, shards
from processes import child_environment

CASE = cases.SMALL[4].replace(weights="row", routing="with_minus_one")
HITS = "/jax/compilation_cache/cache_hits"
MISSES = "/jax/compilation_cache/cache_misses"


def run_fresh(function: str, *args: str) -> str:
    """Calls a function of this module in a new process; returns what it prints."""
    code = (
        "import sys, test_fresh_process as t\n"
        f"t.use_devices({jax.default_backend()!r})\n"
        f"t.{function}(*sys.argv[1:])"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, *args],
        # This process holds most of a GPU's memory.
        env=child_environment() | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def use_devices(platform: str) -> None:
    """Uses the platform of the process that started this one."""
    if platform == "gpu":
        jax.config.update("jax_platforms", "cuda,cpu")
        return
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", CASE.n_ranks)


def test_a_cached_program_serves_the_next_process(transport, tmp_path):
    make_mesh(CASE.n_ranks)  # skips where that many devices are missing
    first = run_fresh("check_with_cache", transport, str(tmp_path))
    second = run_fresh("check_with_cache", transport, str(tmp_path))
    assert re.search(r"hits 0 misses [1-9]", first), first
    assert re.search(r"hits [1-9]\d* misses 0", second), second


def check_with_cache(transport: str, folder: str) -> None:
    """Compares with the oracle; prints whether the program came from the cache."""
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    events = []
    jax.monitoring.register_event_listener(lambda event, **_: events.append(event))
    suite.check(CASE, transport, make_mesh(CASE.n_ranks))
    print("hits", events.count(HITS), "misses", events.count(MISSES))


def test_an_exported_program_runs_in_a_fresh_process(transport, tmp_path):
    pytest.importorskip("flatbuffers", reason="jax.export needs flatbuffers")
    mesh = make_mesh(CASE.n_ranks)
    _, run = suite.compiled(mesh, config_of(CASE), transport, CASE.weights)
    operands = put(mesh, *suite.make_inputs(CASE).arrays())
    exported = jax.export.export(run, disabled_checks=jax_ep.disabled_checks())(*operands)
    file = tmp_path / "program"
    file.write_bytes(exported.serialize())
    assert "matches the oracle" in run_fresh("check_exported", transport, str(file))


def check_exported(transport: str, file: str) -> None:
    """Runs the serialized program and compares with the oracle."""
    mesh = make_mesh(CASE.n_ranks)
    # As a user would: the same ep_init, then only the exported program.
    suite.compiled(mesh, config_of(CASE), transport, CASE.weights)
    inputs = suite.make_inputs(CASE)
    wanted = suite.expected(CASE, inputs)
    exported = jax.export.deserialize(bytearray(pathlib.Path(file).read_bytes()))
    out = jax.jit(exported.call)(*put(mesh, *inputs.arrays()))
    for (_, rank), actual in shards(mesh, out):
        n_rows = inputs.routed.n_rows
        suite.assert_rank_matches(actual, wanted[rank], n_rows, f"rank {rank}")
    print("matches the oracle")


def test_two_processes_lower_to_the_same_program(transport, tmp_path):
    """The text of the program depends only on the arguments of `ep_init`."""
    make_mesh(CASE.n_ranks)
    texts = [tmp_path / "first", tmp_path / "second"]
    for path, n_other_groups in zip(texts, "01", strict=True):
        run_fresh("write_program", transport, str(path), n_other_groups)
    assert texts[0].read_text() == texts[1].read_text()


def write_program(transport: str, file: str, n_other_groups: str) -> None:
    """Writes the lowered program, after opening some other groups."""
    mesh = make_mesh(CASE.n_ranks)
    for i in range(int(n_other_groups)):
        other = CASE.replace(hidden_size=64 * (i + 1))
        suite.compiled(mesh, config_of(other), transport, CASE.weights)
    _, run = suite.compiled(mesh, config_of(CASE), transport, CASE.weights)
    shapes = [np.stack(x) for x in suite.make_inputs(CASE).arrays()]
    pathlib.Path(file).write_text(run.lower(*shapes).as_text())
