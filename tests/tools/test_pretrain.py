"""examples/pretrain learns, resumes, and has the same losses with every expert layer."""

import importlib.util
import io
import json
import math
import pathlib
import re
import runpy
import subprocess
import sys

import jax
import numpy as np
import optax
import pytest
from matplotlib import image

from processes import child_environment

EXAMPLE = pathlib.Path(__file__).parents[2] / "examples" / "pretrain"
N_STEPS = 30
HOW = "experts", "expert_copies"  # what may differ between runs of equal losses


class Pretrain:
    """Runs the example in a process of its own."""

    def __init__(self, folder: pathlib.Path, on_gpu: bool):
        self.folder = folder
        n_data = 1 if on_gpu and len(jax.devices()) == 1 else 2
        self.options = ["--tiny", "--steps", N_STEPS, "--data-parallel", n_data]
        self._environment = child_environment() | {
            "JAX_PLATFORMS": "cuda,cpu" if on_gpu else "cpu",
            "JAX_DEFAULT_MATMUL_PRECISION": "float32",
            "COLUMNS": "100",
            "JAX_COMPILATION_CACHE_DIR": str(folder / "programs"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
        }

    def python(self, *arguments) -> subprocess.CompletedProcess:
        """Runs Python with warnings as errors, but where Orbax may warn."""
        warnings = "default" if "--checkpoints" in arguments else "error"
        return subprocess.run(
            [sys.executable, "-W", warnings, *map(str, arguments)],
            cwd=self.folder,
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=300,
        )

    def start(self, *options) -> subprocess.CompletedProcess:
        return self.python(EXAMPLE, *options)

    def __call__(self, name, *options) -> dict:
        """The results of a run that goes well."""
        result = self.start(*self.options, *options, "--out", name)
        assert result.returncode == 0, result.stdout + result.stderr
        return json.loads((self.folder / name / "results.json").read_text())


@pytest.fixture(scope="module")
def pretrain(tmp_path_factory, request) -> Pretrain:
    return Pretrain(tmp_path_factory.mktemp("pretrain"), request.config.option.gpu)


@pytest.fixture(scope="module")
def whole(pretrain) -> dict:
    """The results of a run without a break."""
    has_writer = importlib.util.find_spec("tensorboardX")
    return pretrain("whole", *(("--tensorboard", "events") if has_writer else ()))


@pytest.mark.thorough
def test_events_have_the_numbers_of_the_results(whole, pretrain) -> None:
    pytest.importorskip("tensorboardX")
    found = events_in(pretrain.folder / "events")
    np.testing.assert_allclose([loss for _, loss in found["loss"]], whole["steps"]["loss"])
    assert [step for step, _ in found["layers_x_experts"]] == [1, 11, 21]


@pytest.mark.thorough
def test_the_loss_falls_towards_the_entropy_of_the_data(whole) -> None:
    losses = whole["steps"]["loss"]
    assert len(losses) == N_STEPS
    assert abs(losses[0] - math.log(256)) < 0.1
    assert whole["entropy"] - 0.1 < losses[-1] < whole["entropy"] + 0.5
    assert whole["steps"]["n_dropped"] == [0] * N_STEPS


@pytest.mark.thorough
def test_results_say_what_ran_where_and_how_fast(whole, request) -> None:
    assert whole["experts"] == "jax_ep" and whole["transport"] in ("host", "p2p", "xla")
    assert whole["device"] == jax.devices()[0].device_kind
    assert whole["versions"]["jax"] == jax.__version__
    assert "--tiny" in whole["command"]
    n_devices = math.prod(whole["mesh"].values())
    tokens = whole["n_sequences"] * whole["sequence"] / n_devices
    seconds = np.median(whole["steps"]["seconds"][2:])
    np.testing.assert_allclose(whole["tokens_per_s_per_device"], tokens / seconds, rtol=1e-2)
    flops = whole["tokens_per_s_per_device"] * whole["flops_per_token"] / 1e12
    np.testing.assert_allclose(whole["model_tflop_per_s_per_device"], flops, atol=1e-3)
    if not request.config.option.gpu:
        assert whole["peak_tflop_per_s"] is None and whole["mfu"] is None


@pytest.mark.thorough
def test_figures_show_loss_and_balance(whole, pretrain) -> None:
    for name in ("loss.png", "balance.png", "loads.png"):
        pixels = image.imread(pretrain.folder / "whole" / name)
        assert min(pixels.shape[:2]) > 400
        assert len(np.unique(pixels[..., 0])) > 50  # shades of red
    n_ranks = whole["mesh"]["expert"]
    assert (pretrain.folder / "whole" / "ranks.png").exists() == (n_ranks > 1)


def events_in(folder: pathlib.Path) -> dict[str, list]:
    """What TensorBoard would show: (step, number or picture) by name."""
    from tensorboardX.proto.event_pb2 import Event

    (path,) = folder.iterdir()
    data, found = path.read_bytes(), {}
    while data:  # 8 bytes of length, 4 of a checksum, the event, 4 of its checksum
        length = int.from_bytes(data[:8], "little")
        event, data = Event.FromString(data[12 : 12 + length]), data[16 + length :]
        for value in event.summary.value:
            shown = value.image if value.HasField("image") else value.simple_value
            found.setdefault(value.tag, []).append((event.step, shown))
    return found


def test_tensorboard_gets_numbers_of_each_step_and_pictures_of_loads(tmp_path) -> None:
    pytest.importorskip("tensorboardX")
    names = runpy.run_path(str(EXAMPLE / "events.py"))
    events = names["Events"](tmp_path)
    load = np.array([[4, 4, 4, 4], [16, 0, 0, 0], [2, 2, 0, 4]])
    for step in (1, 2, 11):
        events.write(step, {"loss": np.float32(step)}, load)
    events.close()
    found = events_in(tmp_path)
    assert found["loss"] == [(1, 1), (2, 2), (11, 11)]
    busiest = [found[f"busiest_expert/layer_{i}"][0] for i in (1, 2, 3)]
    assert busiest == [(1, 1), (1, 4), (1, 2)]
    pictures = found["layers_x_experts"]
    assert [step for step, _ in pictures] == [1, 11]
    size = names["PIXELS"]
    pixels = image.imread(io.BytesIO(pictures[0][1].encoded_image_string))[::size, ::size, 0]
    darkest, white = 8 / 255, 1.0
    np.testing.assert_allclose(pixels[1], [darkest, white, white, white], rtol=1e-6)
    assert (pixels[0] == pixels[0, 0]).all() and pixels[2, 3] < pixels[2, 0] < pixels[2, 2]


def test_without_tensorboardx_its_option_says_what_to_install(monkeypatch, tmp_path) -> None:
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(ValueError, match="pip install tensorboardX"):
        runpy.run_path(str(EXAMPLE / "events.py"))["Events"](tmp_path)


@pytest.mark.thorough
def test_losses_with_ragged_dot_are_the_same(whole, pretrain) -> None:
    """Also with layers that are computed twice, and with all logits at once."""
    options = "--experts", "lax", "--remat", "--loss-chunks", 1, "--no-plots"
    assert_same_losses(whole, pretrain("lax", *options, "--stop-at", 8))


@pytest.mark.thorough
def test_losses_with_balanced_devices_are_the_same(whole, pretrain) -> None:
    options = "--expert-copies", 4, "--no-plots"
    assert_same_losses(whole, pretrain("balanced", *options, "--stop-at", 8))


@pytest.mark.thorough
def test_losses_with_tokamax_are_the_same_where_it_is_installed(whole, pretrain) -> None:
    options = "--experts", "tokamax", "--stop-at", 4
    if importlib.util.find_spec("tokamax"):
        assert_same_losses(whole, pretrain("tokamax", *options))
        return
    result = pretrain.start(*pretrain.options, *options)
    assert result.returncode == 1 and "Traceback" not in result.stderr
    assert "pip install tokamax" in result.stderr


def assert_same_losses(whole, other) -> None:
    """Within rounding, for as many steps as `other` has."""
    assert [other[name] for name in HOW] != [whole[name] for name in HOW]
    for name in ("loss", "balance_loss", "grad_norm"):
        got, wanted = other["steps"][name], whole["steps"][name]
        np.testing.assert_allclose(got, wanted[: len(got)], rtol=1e-4, err_msg=name)


@pytest.mark.thorough
def test_a_resumed_run_has_the_losses_of_an_unbroken_one(whole, pretrain, request) -> None:
    options = "--checkpoints", "checkpoints", "--save-every", 2, "--no-plots"
    first = pretrain("first", *options, "--stop-at", 3)["steps"]
    rest = pretrain("rest", *options, "--stop-at", 6)["steps"]
    assert first["first_step"] == 0 and rest["first_step"] == 3
    tolerance = 1e-4 if request.config.option.gpu else 0  # GPUs add in any order
    losses = first["loss"] + rest["loss"]
    np.testing.assert_allclose(losses, whole["steps"]["loss"][:6], rtol=tolerance)
    assert {path.name for path in (pretrain.folder / "checkpoints").iterdir()} == {"4", "6"}
    result = pretrain.start(*pretrain.options, *options, "--stop-at", 6)
    assert result.returncode == 1 and "before step 6; got 6" in result.stderr


@pytest.mark.thorough
def test_bytes_of_a_file_in_bfloat16_with_recomputed_layers(pretrain) -> None:
    options = "--text", EXAMPLE / "model.py", "--dtype", "bfloat16", "--remat", "--no-plots"
    results = pretrain("text", *options, "--stop-at", 8, "--z-loss", 1e-3, "--capacity", 1.5)
    losses = results["steps"]["loss"]
    assert losses[-1] < losses[0] - 0.5
    assert results["entropy"] is None and results["remat"]


@pytest.mark.thorough
def test_options_that_do_not_fit_are_named(pretrain) -> None:
    for options, message in (
        (["--loss-chunks", 7], "--loss-chunks must divide --sequence 64; got 7"),
        (["--batch", 3], r"--batch must be a multiple of \d+ devices; got 3"),
        (["--data-parallel", 64], "mesh must have at most"),
        (["--text", EXAMPLE / "loss.py", "--sequence", 65536], "must have more bytes than"),
    ):
        result = pretrain.start("--tiny", *options)
        assert result.returncode == 1 and "Traceback" not in result.stderr
        assert re.search(message, result.stderr), result.stderr


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["jax_ep", "lax"])
def test_the_model_follows_its_formulas(pretrain, kind) -> None:
    script = pathlib.Path(__file__).parents[1] / "support" / "pretrain_reference.py"
    output = pretrain.python(script, EXAMPLE, kind)
    assert output.returncode == 0, output.stderr
    got, wanted = map(float, output.stdout.split())
    assert abs(got - wanted) < 1e-5 * wanted


def test_sizes_are_those_of_the_model_card() -> None:
    """30.5 billion parameters, 3.3 of which are active, with the embedding table."""
    sizes = runpy.run_path(str(EXAMPLE / "sizes.py"))["QWEN3_30B_A3B"]
    assert round(sizes.n_params / 1e9, 1) == 30.5
    n_active = sizes.n_multiplied + sizes.vocabulary * sizes.hidden_size
    assert 3.3e9 < n_active < 3.4e9
    attention = 12 * 48 * 32 * 128 * 4096 / 2
    assert sizes.flops_per_token(4096) == 6 * sizes.n_multiplied + attention


@pytest.mark.thorough
def test_sizes_count_the_parameters_that_there_are(whole) -> None:
    assert whole["n_params"] == runpy.run_path(str(EXAMPLE / "sizes.py"))["TINY"].n_params


@pytest.mark.parametrize("n_chunks", [1, 3])
def test_cross_entropy_in_chunks_equals_that_of_all_logits(n_chunks) -> None:
    cross_entropy = runpy.run_path(str(EXAMPLE / "loss.py"))["cross_entropy"]
    keys = jax.random.split(jax.random.key(0), 3)
    hidden, head = jax.random.normal(keys[0], (2, 6, 8)), jax.random.normal(keys[1], (8, 20))
    targets = jax.random.randint(keys[2], (2, 6), 0, 20)

    def whole(hidden, head):
        losses = optax.softmax_cross_entropy_with_integer_labels(hidden @ head, targets)
        return 3 * losses.mean()

    def in_chunks(hidden, head):
        return 3 * cross_entropy(hidden, head, targets, n_chunks)

    wanted, wanted_grads = jax.value_and_grad(whole, (0, 1))(hidden, head)
    got, grads = jax.value_and_grad(in_chunks, (0, 1))(hidden, head)
    np.testing.assert_allclose(got, wanted, rtol=1e-5)
    for grad, wanted in zip(grads, wanted_grads, strict=True):
        np.testing.assert_allclose(grad, wanted, rtol=1e-4, atol=1e-6)


def test_the_chain_has_the_entropy_that_it_claims() -> None:
    chain = runpy.run_path(str(EXAMPLE / "data.py"))["MarkovChain"](vocabulary=16, seed=1)
    following = (np.arange(16) + chain.stride) % 16
    transitions = (1 - chain.FOLLOW) * np.tile(chain.frequencies, (16, 1))
    transitions[np.arange(16), following] += chain.FOLLOW
    stationary = np.linalg.matrix_power(transitions, 99)[0]
    entropy = -(stationary[:, None] * transitions * np.log(transitions)).sum()
    assert abs(chain.entropy - entropy) < 0.02

    batch = chain.batch(3, 8, 1000)
    assert batch.shape == (8, 1001) and batch.dtype == np.int32
    np.testing.assert_array_equal(batch, chain.batch(3, 8, 1000))
    assert (batch != chain.batch(4, 8, 1000)).any()
    counts = np.bincount(batch.reshape(-1), minlength=16) / batch.size
    np.testing.assert_allclose(counts, stationary, atol=0.02)
