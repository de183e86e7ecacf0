"""Every example runs in a process of its own and prints what it should."""

import os
import pathlib
import re
import subprocess
import sys

import jax
import numpy as np
import pytest
from matplotlib import image

import quick
from processes import child_environment, reserved_port, run_commands

REPOSITORY = pathlib.Path(__file__).parents[2]
EXAMPLES = REPOSITORY / "examples"
RECIPES = "ep_fsdp_tp", "equinox_layer", "nested_shard_map", "prefill_decode"
FRAMEWORKS = "levanter", "maxtext"  # their scripts run by `make frameworks`
MOE_LAYER_OUTPUT = """\
moe_layer    loss 77, gradient norms 26, 21, 15, 6
dense_layer  loss 77, gradient norms 26, 21, 15, 6
equal on 8 ranks, transport host
"""

# Stops the gradient of the router, which changes no shape, and no loss for given parameters.
WITHOUT_ROUTER_GRADIENT = """
import runpy, sys
import jax, jax_ep
dispatch = jax_ep.dispatch
jax_ep.dispatch = lambda group, tokens, ids, weights: dispatch(
    group, tokens, ids, jax.lax.stop_gradient(weights)
)
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture(scope="module")
def program_cache(tmp_path_factory) -> dict[str, str]:
    """Environment in which runs of one example share what they compile."""
    folder = tmp_path_factory.mktemp("programs")
    return {
        "JAX_COMPILATION_CACHE_DIR": str(folder),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
    }


@pytest.fixture
def run(tmp_path, request):
    """A function that runs Python in `tmp_path`, with warnings as errors."""
    platforms = "cuda,cpu" if request.config.option.gpu else "cpu"
    environment = child_environment() | {"JAX_PLATFORMS": platforms, "COLUMNS": "100"}
    environment.pop("PYTHONSAFEPATH", None)  # recipes import a module that lies beside them

    def run(*arguments, added_environment=None, timeout_s=300):
        return subprocess.run(
            [sys.executable, "-W", "error", *map(str, arguments)],
            cwd=tmp_path,
            env=environment | (added_environment or {}),
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )

    return run


def output_of(result: subprocess.CompletedProcess) -> str:
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_every_example_is_tested_here() -> None:
    found = {path.name for path in EXAMPLES.iterdir() if path.name != "__pycache__"}
    assert found == {
        "moe_layer.py",
        "multi_host",
        "nnx_layer.py",
        "overlap.py",
        "pretrain",  # by test_pretrain.py
        "quantized_layer.py",
        "rebalance.py",
        "recipes",
        "tensor_parallel.py",
        "train_stats.py",
        "two_processes.py",
        "demo",
    }


def test_moe_layer_equals_a_dense_layer(run, request) -> None:
    output = output_of(run(EXAMPLES / "moe_layer.py"))
    if request.config.option.gpu:
        assert output.splitlines()[-1].startswith("equal on ")
    elif jax.__version_info__[:2] == (0, 10):  # which printed MOE_LAYER_OUTPUT
        assert output == MOE_LAYER_OUTPUT
    else:
        assert_equal_to_a_last_digit(output, MOE_LAYER_OUTPUT)


def assert_equal_to_a_last_digit(output, wanted) -> None:
    """Requires equal texts, but for whole numbers, which may differ by 1."""
    number = re.compile(r"\d+")
    assert number.sub("", output) == number.sub("", wanted)
    pairs = zip(number.findall(output), number.findall(wanted), strict=True)
    assert all(abs(int(a) - int(b)) <= 1 for a, b in pairs), output


@pytest.mark.thorough
def test_layers_with_asynchronous_calls_equal_synchronous_ones(run) -> None:
    lines = output_of(run(EXAMPLES / "overlap.py")).splitlines()
    assert re.fullmatch(r"loss [\d.]+, gradients equal to .*", lines[0])
    assert re.fullmatch(r"\d+ ranks, transport (host|p2p|xla)", lines[1])


@pytest.mark.thorough
def test_quantized_layers_are_close_to_the_layer_in_bfloat16(run) -> None:
    """As close as in tests/formats/test_quantized_layer.py, up to the digits that are printed."""
    output = output_of(run(EXAMPLES / "quantized_layer.py"))
    cosines = dict(re.findall(r"^(\w+) .*cosine ([\d.]+)$", output, re.MULTILINE))
    minima = dict(blockwise_fp8=0.999, mxfp8=0.998, nvfp4=0.985, mxfp4=0.975)
    assert set(cosines) == {"plain_bfloat16", *minima}
    for name, minimum in minima.items():
        assert minimum <= float(cosines[name]) < 1


@pytest.mark.thorough
def test_tensor_parallel_layer_equals_a_dense_layer(run) -> None:
    output = output_of(run(EXAMPLES / "tensor_parallel.py"))
    assert re.fullmatch(r"equal on \d+ ranks of \d+ rows, transport \w+\n", output)


@pytest.mark.thorough
def test_a_training_run_shows_balance_drops_and_waits(run, tmp_path, request) -> None:
    command = [EXAMPLES / "train_stats.py", "--steps", 20, "--out", "stats.png"]
    output = output_of(run(*command))
    layers = re.findall(r"(\d) \W+([\d.]+) -> ([\d.]+) \W+([\d.]+) % -> ([\d.]+) %", output)
    numbers = np.array(layers, float)
    np.testing.assert_array_equal(numbers[:, 0], range(3))
    assert (numbers[:, 1:3] >= 1).all()  # the busiest rank has at least the mean
    if not request.config.option.gpu:  # GPUs may be too few for so much imbalance
        assert numbers[:, 1].max() > 2 > numbers[:, 2].max()
        # Rows beyond twice the mean are dropped.
        np.testing.assert_array_equal(numbers[:, 3] > 0, numbers[:, 1] > 2)
    before, after = re.search(r"squared error: ([\d.]+) -> ([\d.]+)\n", output).groups()
    assert float(after) < 0.5 * float(before)
    waits = re.search(r"waited per step: ([\d.]+) ms in dispatch, ([\d.]+) ms", output).groups()
    is_alone = request.config.option.gpu and len(jax.devices()) == 1
    assert (sum(map(float, waits)) > 0) is not is_alone
    pixels = image.imread(tmp_path / "stats.png")
    assert min(pixels.shape[:2]) > 400
    assert len(np.unique(pixels[..., 0])) > 50  # shades of red


@pytest.mark.thorough
def test_nnx_layer_learns_and_balances_its_experts(run) -> None:
    output = output_of(run(EXAMPLES / "nnx_layer.py"))
    steps = re.findall(r"error ([\d.]+), 0 rows dropped, .* ([\d.]+) times", output)
    errors, busiest = zip(*[map(float, step) for step in steps], strict=True)
    assert len(steps) == 3 and errors[-1] < 0.1 * errors[0]
    assert busiest[-1] < 0.7 * busiest[0]


@pytest.mark.thorough
def test_a_training_run_rebalances_without_compilation(run) -> None:
    output = output_of(run(EXAMPLES / "rebalance.py"))
    steps = re.findall(r"error ([\d.]+), the busiest rank had ([\d.]+) times the mean", output)
    errors, busiest = zip(*[map(float, step) for step in steps], strict=True)
    assert len(steps) == 4 and errors[-1] < 0.5 * errors[0]
    if len(jax.devices()) >= 8:  # others have more experts on each rank
        assert busiest[0] > 1.35 and max(busiest[1:]) < 1.3
    assert re.search(r"^1 compilation, \d+ ranks, ", output, re.MULTILINE)


@pytest.mark.thorough
@pytest.mark.parametrize("name", quick.params(RECIPES, {"ep_fsdp_tp", "prefill_decode"}))
def test_recipes_equal_a_dense_layer(run, name) -> None:
    if name == "equinox_layer":
        pytest.importorskip("equinox", reason="needs equinox: pip install 'jax_ep[test]'")
    (line,) = output_of(run(EXAMPLES / "recipes" / f"{name}.py")).splitlines()
    assert re.fullmatch(r".* equal.*, transport (host|p2p|xla)", line), line


def test_every_recipe_is_tested_and_has_a_page() -> None:
    scripts = {path.stem for path in (EXAMPLES / "recipes").glob("*.py")}
    assert scripts == {*RECIPES, "reference"}
    pages = {path.stem for path in (REPOSITORY / "docs" / "recipes").glob("*.md")}
    assert pages == {*RECIPES, *FRAMEWORKS, "README"}


@pytest.mark.parametrize("name", [*RECIPES, *FRAMEWORKS])
def test_pages_quote_their_scripts_verbatim(name) -> None:
    page = (REPOSITORY / "docs" / "recipes" / f"{name}.md").read_text()
    is_recipe = name in RECIPES
    path = f"examples/recipes/{name}.py" if is_recipe else f"tests/frameworks/train_{name}.py"
    script = (REPOSITORY / path).read_text()
    excerpts = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert excerpts and all(excerpt in script for excerpt in excerpts)
    assert f"../../{path}" in page


def test_layers_page_quotes_nnx_layer_verbatim() -> None:
    page = (REPOSITORY / "docs" / "layers.md").read_text()
    imports, excerpt = re.findall(r"```python\n(.*?)```", page, re.DOTALL)[1:3]
    assert "def train_step" in excerpt
    example = (EXAMPLES / "nnx_layer.py").read_text()
    assert excerpt in example
    assert all(line in example.splitlines() for line in imports.splitlines())


@pytest.mark.thorough
@pytest.mark.multiprocess
def test_two_processes_equal_a_dense_layer(run) -> None:
    assert output_of(run(EXAMPLES / "two_processes.py")) == (
        "process 0: ranks 0, 1, 2, 3 of 8, transport xla\n"
        "process 0: equal to a dense layer\n"
        "process 1: ranks 4, 5, 6, 7 of 8, transport xla\n"
        "process 1: equal to a dense layer\n"
    )


@pytest.mark.thorough
@pytest.mark.multiprocess
def test_a_layer_on_several_hosts_equals_a_dense_layer() -> None:
    """Two processes stand for two hosts."""
    python = pathlib.Path(sys.executable).parent
    environment = {"PATH": f"{python}{os.pathsep}{os.environ['PATH']}"}
    with reserved_port() as port:
        script = [str(EXAMPLES / "multi_host" / "plain.sh"), f"localhost:{port}", "2"]
        commands = [[*script, str(i), "--cpus", "2"] for i in range(2)]
        logs = run_commands(commands, "equal to a dense layer", 120.0, [environment] * 2)
    for i, log in enumerate(logs):
        assert f"process {i} of 2: ranks ({2 * i}, {2 * i + 1}) of 4, transport host\n" in log


@pytest.mark.parametrize("name", ["slurm", "openmpi", "plain"])
def test_scripts_of_launchers_have_no_syntax_errors(name) -> None:
    script = EXAMPLES / "multi_host" / f"{name}.sh"
    assert os.access(script, os.X_OK)
    subprocess.run(["bash", "-n", script], check=True, timeout=20)


@pytest.mark.thorough
def test_the_demo_learns_and_draws_figures(run, program_cache, tmp_path) -> None:
    demo = [EXAMPLES / "demo", "--steps", 50, "--out", "figures"]
    output = output_of(run(*demo, added_environment=program_cache))
    assert "0 rows were dropped" in output
    loss, entropy = re.search(r"loss +([\d.]+) nats.* ([\d.]+)\n", output).groups()
    assert float(loss) < float(entropy) - 0.2
    assert re.search(r"speed +[\d,]+ tokens/s", output)
    for name in ("loss.png", "traffic.png"):
        pixels = image.imread(tmp_path / "figures" / name)
        assert min(pixels.shape[:2]) > 400
        assert len(np.unique(pixels[..., 0])) > 50  # shades of red


@pytest.mark.thorough
def test_the_demo_detects_a_wrong_gradient(run, program_cache) -> None:
    demo = ["-c", WITHOUT_ROUTER_GRADIENT, EXAMPLES / "demo"]
    result = run(*demo, added_environment=program_cache)
    assert result.returncode == 1, result.stdout + result.stderr
    assert "with and without expert parallelism" in result.stderr
    losses, grads = re.findall(r"differ by (\S+) in the median step", result.stderr)
    assert float(losses) < 1e-4 and float(grads) > 0.1


@pytest.mark.thorough
def test_the_demo_says_why_a_transport_cannot_serve(run) -> None:
    result = run(EXAMPLES / "demo", "--transport", "pigeon")
    assert result.returncode == 1
    assert "pigeon" in result.stderr
    assert "Traceback" not in result.stderr
