"""The program that XLA gets for moe's gradient on GPUs; needs no GPU."""

import dataclasses
import importlib.util
import re

import jax
import jax.numpy as jnp
import pytest

import jax_ep
from async_layers import CONFIG, H, K, T, closed_group
from harness import AXIS, make_mesh, on_mesh
from jax_ep.geometry import Geometry
from jax_ep.group import EPGroup
from jax_ep.nodes.connection import P2pByNodes

pytestmark = pytest.mark.filterwarnings("ignore:grouped_matmul")

# A kernel, whose results pass through a barrier, or what takes its place without the extension.
MATMUL = r'custom_call @jax_ep_grouped_matmul|"chlo.ragged_dot"'
BARRIER = "stablehlo.optimization_barrier"
SIZES = {"tokens": (T, H), "topk_weights": (T, K), "gate_up": (2, H, 2 * H), "down": (2, H, H)}


@pytest.fixture
def mesh():
    return make_mesh(4)


def lowered(group, of=tuple(SIZES), change=lambda layer: layer, *, overlap=True) -> str:
    """StableHLO for GPUs of the gradients of the arguments `of`."""

    def layer(arrays, ids):
        tokens, weights, *matrices = (arrays[name] for name in SIZES)
        return jax_ep.moe(group, tokens, ids, weights, *matrices, overlap=overlap)

    def gradients(arrays, ids):
        def loss(chosen):
            return jnp.sum(change(layer)(arrays | chosen, ids).astype(jnp.float32) ** 2)

        return jax.grad(loss)({name: arrays[name] for name in of})

    def type_of(name, shape):
        dtype = jnp.float32 if name == "topk_weights" else jnp.bfloat16
        return jax.ShapeDtypeStruct((4, *shape), dtype)

    arrays = {name: type_of(name, shape) for name, shape in SIZES.items()}
    ids = jax.ShapeDtypeStruct((4, T, K), jnp.int32)
    traced = on_mesh(group.mesh, gradients).trace(arrays, ids)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


def lines_of(text: str) -> list[str]:
    """The instructions of the main function."""
    return text[: text.index("func.func private")].splitlines()


def steps_of(lines: list[str]) -> list[str]:
    """Our calls, matmuls and barriers."""
    names = re.compile(rf"({MATMUL})|custom_call @(jax_ep_\w+)|call @(jax_ep_async)|({BARRIER})")
    found = filter(None, map(names.search, lines))
    return ["matmul" if step[1] else step[step.lastindex] for step in found]


@pytest.mark.parametrize("rematerializes", [False, True])
def test_gradients_of_weights_come_between_start_and_done(mesh, rematerializes) -> None:
    change = jax.checkpoint if rematerializes else lambda layer: layer
    steps = steps_of(lines_of(lowered(closed_group(mesh), change=change)))
    assert steps.count("jax_ep_async") == 1
    # Rows' gradients of both matmuls, the second one's with that of the activation if there are
    # kernels, then the call.
    has_kernels = importlib.util.find_spec("jax_ep._ffi_cuda") is not None
    combine_grad, alloc = (steps.index(f"jax_ep_{x}") for x in ("combine_grad", "async_alloc"))
    of_rows = [step for step in steps[combine_grad + 1 : alloc] if step != BARRIER]
    assert of_rows == ["jax_ep_gated_matmul_grad" if has_kernels else "matmul", "matmul"]
    start, done = steps.index("jax_ep_wait_started"), steps.index("jax_ep_async_done")
    in_flight = steps[start + 1 : done]
    # Barriers before: what the matmuls read. After: their results, and that the call has started.
    assert in_flight[0] == BARRIER and in_flight[-2:] == [BARRIER, BARRIER]
    assert in_flight.count("matmul") == 2 and set(in_flight) == {BARRIER, "matmul"}
    assert steps[done + 1 :] == [BARRIER]


def test_what_the_gradients_of_weights_read_waits_for_the_start(mesh) -> None:
    """All of it, or XLA could compute them before the call."""
    lines = lines_of(lowered(closed_group(mesh)))
    (start,), (done,) = (
        [i for i, line in enumerate(lines) if f"@jax_ep_{name}" in line]
        for name in ("wait_started", "async_done")
    )
    before = {
        name
        for line in lines[:start]
        if "stablehlo.constant" not in line
        for name in re.findall(r"^ *(%\w+)", line)
    }
    between = [line for line in lines[start + 2 : done] if BARRIER not in line]
    assert sum(bool(re.search(MATMUL, line)) for line in between) == 2
    for line in between:
        operands = set(re.findall(r"%\w+", line.partition("=")[2]))
        assert not operands & before, line


@pytest.mark.parametrize(
    ("of", "n_combines"),
    [(("tokens", "topk_weights"), 2), (("topk_weights",), 2), (("gate_up", "down"), 1)],
)
def test_the_backward_is_synchronous_if_nothing_overlaps(mesh, of, n_combines) -> None:
    """And has no exchange, a second combine, if neither tokens nor their weights need it."""
    text = lowered(closed_group(mesh), of)
    assert "jax_ep_async" not in text
    assert text.count("custom_call @jax_ep_combine(") == n_combines


def test_the_backward_is_synchronous_unless_asked(mesh) -> None:
    assert "jax_ep_async" not in lowered(closed_group(mesh), overlap=False)


def test_the_backward_is_synchronous_where_nodes_are_served_by_themselves(mesh) -> None:
    config = dataclasses.replace(CONFIG, n_nodes=2)
    group = EPGroup(P2pByNodes(Geometry(mesh, AXIS, config, "p2p")))
    assert "jax_ep_async" not in lowered(group)
