"""Runs a training script of this folder in its framework's environment."""

import dataclasses
import functools
import json
import os
import pathlib
import subprocess
import tempfile

import numpy as np

HERE = pathlib.Path(__file__).parent
TIMEOUT_S = 600

# Both runs of a comparison are in float32 and differ in the order of few sums, of top_k terms and
# of rows: by some 1e-7 in a step, of which the later steps make up to 1e-6. Experts that lose a
# few rows change losses by more than 1e-3.
TOLERANCE = 1e-5
# Of results that have another one. For a tiny DeepSeek-V3, MaxText without jax_ep has gradient
# norms that differ by 2e-5 between XLA's code for AVX2 and for SSE 4.2 (`--xla_cpu_max_isa`), and
# losses that differ by 6e-6.
TOLERANCES = {"raw_grad_norm": 1e-4}


@dataclasses.dataclass(frozen=True)
class Run:
    """What a script printed, and whether its compiled step calls jax_ep."""

    steps: dict[str, np.ndarray]  # of each result, its value at each step
    calls_jax_ep: bool


@functools.cache
def train(framework: str, *arguments: str) -> Run:
    """Trains five steps; the same arguments once only."""
    with tempfile.TemporaryDirectory() as folder:
        result = run(framework, folder, *arguments)
        assert result.returncode == 0, result.stdout + result.stderr
        programs = pathlib.Path(folder).glob("xla/*step*.txt")
        calls = ['custom_call_target="jax_ep' in program.read_text() for program in programs]
    assert calls, "XLA wrote no program"
    lines = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    assert len(lines) == 5, result.stdout
    steps = {name: np.array([line[name] for line in lines]) for name in lines[0]}
    return Run(steps, any(calls))


def run(framework: str, folder: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The finished process."""
    python = HERE.parents[1] / f".venv-frameworks-{framework}" / "bin" / "python"
    dump = f"--xla_dump_to={folder}/xla --xla_dump_hlo_module_re=.*step.*"
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "PJRT_NPROC": "16",  # before jaxlib 0.12, XLA needs two threads per device
        "XLA_FLAGS": f"{dump} --xla_dump_hlo_as_text",
    }
    environment.pop("PYTHONPATH", None)  # of pytest's Python
    output = [folder] if framework == "maxtext" else []
    command = [python, "-P", HERE / f"train_{framework}.py", *output, *arguments]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S
    )


def assert_equal_losses(with_jax_ep: Run, unmodified: Run) -> None:
    """Also equal norms of gradients, and whatever else the script prints."""
    assert with_jax_ep.calls_jax_ep and not unmodified.calls_jax_ep
    assert with_jax_ep.steps.keys() == unmodified.steps.keys()
    for name, values in with_jax_ep.steps.items():
        tolerance = TOLERANCES.get(name, TOLERANCE)
        np.testing.assert_allclose(values, unmodified.steps[name], rtol=tolerance, err_msg=name)
