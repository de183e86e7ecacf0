"""Cached and exported programs in a process that did not compile them.

A program must contain nothing that belongs to one process: a cached executable and a serialized
module must find the group that a new process opened with the same `ep_init`.
"""

import os
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
from jax_ep.router import RouterConfig, route
from processes import child_environment

CASE = cases.SMALL[4].replace(weights="row", routing="with_minus_one")
HITS = "/jax/compilation_cache/cache_hits"
MISSES = "/jax/compilation_cache/cache_misses"


def run_fresh(function: str, *args: str) -> str:
    """Calls a function of this module in a new process; returns what it prints."""
    code = (
        f"import importlib, sys; sys.path.append({os.path.dirname(__file__)!r})\n"
        "t = importlib.import_module('test_fresh_process')\n"
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


@pytest.mark.thorough
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


@pytest.fixture
def exported_program(transport, tmp_path) -> str:
    """A file with a serialized program."""
    pytest.importorskip("flatbuffers", reason="jax.export needs flatbuffers")
    mesh = make_mesh(CASE.n_ranks)
    _, run = suite.compiled(mesh, config_of(CASE), transport, CASE.weights)
    operands = put(mesh, *suite.make_inputs(CASE).arrays())
    exported = jax.export.export(run, disabled_checks=jax_ep.disabled_checks())(*operands)
    file = tmp_path / "program"
    file.write_bytes(exported.serialize())
    return str(file)


def test_an_exported_program_runs_in_a_fresh_process(transport, exported_program):
    assert "matches the oracle" in run_fresh("check_exported", transport, exported_program)


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


@pytest.mark.thorough
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


@pytest.mark.thorough
def test_a_program_loads_in_a_process_that_opened_no_group(transport, exported_program):
    """Its custom calls are known from the import on; that the group is missing is what it says."""
    said = run_fresh("run_without_group", exported_program)
    assert transport == "xla" or re.search(r"of group \S+: the group is not open", said), said


def run_without_group(path: str) -> None:
    """Exports the loaded program again, then runs it; prints the error."""
    loaded = jax.export.deserialize(bytearray(pathlib.Path(path).read_bytes()))
    operands = put(make_mesh(CASE.n_ranks), *suite.make_inputs(CASE).arrays())
    run = jax.jit(loaded.call)
    jax.export.export(run, disabled_checks=jax_ep.disabled_checks())(*operands)
    try:
        jax.block_until_ready(run(*operands))
    except jax.errors.JaxRuntimeError as error:
        print(error)


@pytest.mark.thorough
def test_programs_compile_without_the_partitioner_shardy(transport):
    """XLA's former partitioner aborts at a sort of several operands if one result is unused."""
    make_mesh(CASE.n_ranks)
    assert run_fresh("check_without_shardy", transport).split() == ["1"]


def check_without_shardy(transport: str) -> None:
    """Every call that sorts or counts, and a loop right behind; the same bits as with Shardy."""
    n, t, k, h = CASE.n_ranks, 16, 2, 32
    mesh = make_mesh(n)
    config = jax_ep.EPConfig(n_experts=3 * n, top_k=k, hidden_size=h, max_tokens_per_rank=t)
    group = jax_ep.ep_init(mesh, "ep", config, transport)
    placement = jax_ep.ExpertPlacement(np.arange(3 * n) % (2 * n), n)
    router = RouterConfig(n_expert_groups=n, topk_expert_groups=n - 1)

    def layer(tokens, logits, gate_up, down, placement, mask):
        def loss(tokens, logits, *weights):
            routes = route(router, logits, k)
            ids = jax_ep.limit_choices(routes.topk_ids, 2 * n, 3 * t, axis_name="ep")
            experts = placement.mask_ranks(mask)
            copies = jax_ep.replicate_experts(group, weights, experts)
            placed = jax_ep.place_choices(group, ids, experts).topk_ids
            rows = jax_ep.dispatch(group, tokens, placed, routes.topk_weights)
            out = jax_ep.combine(group, jax_ep.expert_mlp(rows, *copies), rows)
            both = jax.numpy.stack([ids, placed, routes.topk_ids])
            start = jax.lax.axis_index("ep") * 0
            total = jax.lax.fori_loop(0, t, lambda i, x: x + both[:, i].sum(), start)
            return jax.numpy.sum(out.astype("float32") ** 2), total[None]

        return jax.grad(loss, (0, 1, 2, 3), has_aux=True)(tokens, logits, gate_up, down)

    rng = np.random.default_rng(0)
    shapes = (n * t, h), (n * t, 2 * n), (2 * n, h, 32), (2 * n, 16, h)
    operands = [rng.standard_normal(shape).astype("bfloat16") for shape in shapes]
    specs = (*[jax.P("ep")] * 4, jax.P(), jax.P())
    results = []
    for shardy in (False, True):
        jax.config.update("jax_use_shardy_partitioner", shardy)
        mapped = jax.shard_map(layer, mesh=mesh, in_specs=specs, out_specs=jax.P("ep"))
        results.append(jax.jit(mapped)(*operands, placement, np.arange(n) > 0))
    same = jax.tree.map(lambda *pair: np.array_equal(*pair), *results)
    print(int(all(jax.tree.leaves(same))))


def test_the_import_starts_no_backend():
    """So `jax.distributed.initialize` and settings of devices may follow it."""
    code = (
        "import jax, jax_ep\n"
        "jax.config.update('jax_platforms', 'cpu')\n"
        "jax.config.update('jax_num_cpu_devices', 3)\n"
        "assert jax.device_count() == 3\n"
    )
    environment = {key: x for key, x in child_environment().items() if key != "XLA_FLAGS"}
    subprocess.run([sys.executable, "-P", "-c", code], check=True, env=environment, timeout=120)


@pytest.mark.parametrize("kind", [ModuleNotFoundError, ImportError])
def test_the_import_does_without_extensions(kind):
    """Transport `xla` needs none; `host` says what is wrong."""
    code = (
        "import importlib, sys\n"
        "import jax\n"
        "load = importlib.import_module\n"
        "def refuse(name, package=None):\n"
        "    if name == 'jax_ep._ffi':\n"
        f"        raise {kind.__name__}('no symbol')\n"
        "    return load(name, package)\n"
        "importlib.import_module = refuse\n"
        "import jax_ep\n"
        "jax.config.update('jax_platforms', 'cpu')\n"
        "mesh = jax.sharding.Mesh(jax.devices()[:1], ('ep',))\n"
        "config = jax_ep.EPConfig(n_experts=1, top_k=1, hidden_size=16, max_tokens_per_rank=1)\n"
        "assert jax_ep.ep_init(mesh, 'ep', config).transport == 'xla'\n"
        "try:\n"
        "    jax_ep.ep_init(mesh, 'ep', config, 'host')\n"
        "except ValueError as error:\n"
        "    assert 'the extension jax_ep._ffi cannot be loaded: no symbol' in str(error), error\n"
        "else:\n"
        "    sys.exit('host opened')\n"
    )
    subprocess.run(
        [sys.executable, "-P", "-c", code], check=True, env=child_environment(), timeout=120
    )
