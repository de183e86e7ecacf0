"""The README and docs/: their code runs, and the reference names everything that is public."""

import json
import os
import pathlib
import pydoc
import re
import runpy
import subprocess
import sys
import types

import pytest

import jax_ep
import jax_ep.checkpoints
import jax_ep.nnx
import jax_ep.router
from doc_pages import BLOCK, DOCS, ROOT, python_blocks
from processes import child_environment
from published_layers import DeepseekV3, Qwen3, in_fp8, write_safetensors


@pytest.mark.thorough
def test_every_block_of_the_quickstart_runs(tmp_path):
    """Titled blocks are files; `bash` runs; `text` is what the last command printed, … anything."""
    python = pathlib.Path(sys.executable).parent
    path = f"{python}{os.pathsep}{os.environ['PATH']}"
    environment = child_environment() | {"JAX_PLATFORMS": "cpu", "PATH": path}
    environment.pop("PYTHONSAFEPATH", None)  # scripts import their neighbors
    output = None
    for language, title, text in BLOCK.findall((DOCS / "quickstart.md").read_text()):
        if title:
            (tmp_path / title).write_text(text)
        elif language == "bash":
            command = ["bash", "-e", "-c", text]
            done = subprocess.run(
                command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
            )
            assert done.returncode == 0, done.stdout + done.stderr
            output = done.stdout
        else:
            assert language == "text"
            pattern = ".*".join(map(re.escape, text.split("…")))
            assert re.fullmatch(pattern, output), output
    assert output.startswith("rank 0, row 0")


def run_python(text: str) -> list[str]:
    """The lines that a program prints, in a process of its own with CPU devices."""
    environment = child_environment() | {"JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", text]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def test_both_snippets_of_the_readme_run_as_pasted():
    """One after the other into one program; each has at most 10 lines of code."""
    blocks = python_blocks(ROOT / "README.md")
    assert len(blocks) == 2
    assert all(len(list(filter(None, block.split("\n")))) <= 10 for block in blocks)
    show = "print(output.shape, output.dtype)\n"
    assert run_python(f"{blocks[0]}{show}{blocks[1]}{show}") == [
        "(8, 16, 64) float32",
        "(256, 64) bfloat16",
    ]


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


@pytest.mark.thorough
def test_the_first_blocks_on_layers_run_as_pasted():
    """With lines of its own for the devices and the data, as the example has them."""
    short, imports, model = python_blocks(DOCS / "layers.md")[:3]
    setup = """
import jax
jax.config.update("jax_num_cpu_devices", 16)
mesh = jax.sharding.Mesh(jax.devices()[:8], ("ep",))
x = jax.random.normal(jax.random.key(1), (64, 8, 64))
"""
    steps = """
print(output.shape == x.shape, int(report.n_dropped))
model, optimizer = create()
batch = jax.device_put((x, jnp.sin(x)), jax.NamedSharding(mesh, jax.P("ep")))
errors = [float(train_step(model, optimizer, *batch)[0]) for _ in range(8)]
print(errors[-1] < 0.5 * errors[0])
"""
    assert run_python(setup + imports + short + model + steps) == ["True 0", "True"]


@pytest.mark.thorough
def test_expert_mlp_is_short_for_the_calls_of_the_page():
    """With the same bits, in each dtype."""
    blocks = python_blocks(DOCS / "experts.md")
    (calls,) = [block for block in blocks if "fused_silu" in block]
    check = f"""
@jax.shard_map(mesh=mesh, in_specs=jax.P("ep"), out_specs=jax.P("ep"))
def both(tokens, ids, gate_up, down):
    rows = jax_ep.dispatch(group, tokens, ids)
    names = dict(jax_ep=jax_ep, rows=rows, gate_up=gate_up, down=down)
    exec({calls!r}, names)
    results = names["results"], jax_ep.expert_mlp(rows, gate_up, down)
    return tuple(jax_ep.combine(group, each, rows) for each in results)

ids = jax.numpy.arange(64).reshape(32, 2) % 8
for dtype in ("bfloat16", "float16", "float32"):
    token_format, sizes = jax_ep.Plain(dtype), dict(n_experts=8, top_k=2, hidden_size=16)
    config = jax_ep.EPConfig(
        **sizes, max_tokens_per_rank=8, token_format=token_format, combine_dtype=dtype
    )
    group = jax_ep.ep_init(mesh, "ep", config)
    shapes = (32, 16), (8, 16, 16), (8, 8, 16)
    keys = jax.random.split(jax.random.key(0), 3)
    tokens, *weights = [jax.random.normal(*each, dtype) for each in zip(keys, shapes)]
    a, b = jax.jit(both)(tokens, ids, *weights)
    print(a.dtype, bool((a == b).all() and a.any()))
"""
    setup = """
import jax, jax_ep
jax.config.update("jax_num_cpu_devices", 8)
mesh = jax.sharding.Mesh(jax.devices()[:4], ("ep",))
"""
    assert run_python(setup + check) == ["bfloat16 True", "float16 True", "float32 True"]


@pytest.mark.thorough
def test_stacked_layers_of_the_page_run_as_pasted():
    """They do what the loop over the layers does."""
    setup, *_ = python_blocks(ROOT / "README.md")
    (stacked,) = [block for block in python_blocks(DOCS / "layers.md") if "nnx.scan" in block]
    check = """
wanted = jax.numpy.ones((8, 16, 64))
for i in range(n_layers):
    graph, state = nnx.split(layers)
    output, _ = nnx.jit(nnx.merge(graph, jax.tree.map(lambda a: a[i], state)))(wanted)
    wanted += output
print(reports.n_dropped, bool(jax.numpy.abs(x - wanted).max() < 0.05 * jax.numpy.abs(x).max()))
"""
    begin = "n_layers, x = 3, jax.numpy.ones((8, 16, 64))\n"
    assert run_python(f"{setup}{begin}{stacked}{check}") == ["[0 0 0] True"]


@pytest.mark.thorough
def test_the_page_on_checkpoints_runs_as_pasted(tmp_path, monkeypatch):
    """With small checkpoints in the folders that it names, and MaxText's arrays as `block`."""
    qwen3, deepseek_v3 = Qwen3(), DeepseekV3()
    own, codes = qwen3.tensors(1), in_fp8(deepseek_v3.tensors(1))[0]
    for name, model, tensors in (
        ("Qwen3-30B-A3B", qwen3, own),
        ("DeepSeek-V3", deepseek_v3, codes),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(model.config))
        write_safetensors(tmp_path / name / "model.safetensors", tensors)
    begin = """
import numpy as np
block = {"wi_0": np.ones((8, 256, 128)), "wi_1": np.ones((8, 256, 128))}
block |= {"wo": np.ones((8, 128, 256)), "gate": {"kernel": np.ones((256, 8))}}
import jax
jax.config.update("jax_num_cpu_devices", 16)
"""
    check = """
print(len(saved), len(dict(layout.save(fp8_layer, 1))), bool((layer.gate_up[...] == 1).all()))
"""
    monkeypatch.chdir(tmp_path)
    blocks = python_blocks(DOCS / "checkpoints.md")
    assert len(blocks) == 4
    wanted = [len(own), len(codes) - 3, True]  # the shared expert has no scales
    assert run_python(begin + "".join(blocks) + check) == [" ".join(map(str, wanted))]


@pytest.mark.thorough
def test_the_page_on_balance_is_one_program():
    """Its `python` blocks; the `text` blocks, but for the example's, are what they print."""
    blocks = BLOCK.findall((DOCS / "balance.md").read_text())
    threads = 'import jax\njax.config.update("jax_num_cpu_devices", 16)\n'
    lines = run_python(threads + "\n".join(text for kind, _, text in blocks if kind == "python"))
    wanted = [text for kind, _, text in blocks if kind == "text" and "compilation" not in text]
    assert len(wanted) == 2
    pattern = ".*".join(map(re.escape, "".join(wanted).split("…")))
    assert re.fullmatch(pattern, "\n".join(lines) + "\n"), lines


def public_names(module: types.ModuleType) -> set[str]:
    """The names that users take from a module: not submodules, nor what it imports for itself."""
    return {
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and not isinstance(value, types.ModuleType)
        and getattr(value, "__module__", "jax_ep").startswith("jax_ep")
    }


def test_all_lists_what_is_public():
    for module in (jax_ep, jax_ep.checkpoints, jax_ep.nnx):
        assert module.__all__ == sorted(public_names(module))
    taken: dict[str, object] = {}
    exec("from jax_ep import *", taken)
    assert taken["dispatch"] is jax_ep.dispatch and set(jax_ep.__all__) <= set(taken)


def test_help_shows_functions_and_classes():
    text = pydoc.render_doc(jax_ep, renderer=pydoc.plaintext)
    assert "\n    dispatch(" in text
    assert "\n    class EPConfig(" in text


def test_the_api_pages_name_everything_public():
    text = "\n".join(page.read_text() for page in (DOCS / "api").glob("*.md"))
    documented = re.findall(r"^::: jax_ep\.(?:\w+\.)?(\w+)$", text, re.MULTILINE)
    documented += re.findall(r"`jax_ep\.(\w+_NAME)`", text)
    assert len(documented) == len(set(documented))
    modules = jax_ep, jax_ep.checkpoints, jax_ep.nnx, jax_ep.router
    assert set(documented) == set().union(*map(public_names, modules))


def test_the_api_pages_show_signatures():
    """As `python tools/api_signatures.py` writes them."""
    write = runpy.run_path(str(ROOT / "tools" / "api_signatures.py"))["with_signatures"]
    for page in (DOCS / "api").glob("*.md"):
        assert page.read_text() == write(page.read_text()), page
