"""The pages of docs/: their code runs, and the reference names everything that is public."""

import os
import pathlib
import re
import subprocess
import sys
import types

import jax_ep
import jax_ep.nnx
import jax_ep.router
from processes import child_environment

DOCS = pathlib.Path(__file__).parent.parent / "docs"
BLOCK = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)


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


def public_names(module: types.ModuleType) -> set[str]:
    """What users take from a module: not submodules, nor what it imports for itself."""
    return {
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and not isinstance(value, types.ModuleType)
        and getattr(value, "__module__", "jax_ep").startswith("jax_ep")
    }


def test_the_api_pages_name_everything_public():
    text = "\n".join(page.read_text() for page in (DOCS / "api").glob("*.md"))
    documented = re.findall(r"^::: jax_ep\.(?:\w+\.)?(\w+)$", text, re.MULTILINE)
    documented += re.findall(r"`jax_ep\.(\w+_NAME)`", text)
    assert len(documented) == len(set(documented))
    modules = jax_ep, jax_ep.nnx, jax_ep.router
    assert set(documented) == set().union(*map(public_names, modules))
