"""What XLA gets of calls that overlap on GPUs, without a GPU."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_ep
from harness import AXIS, make_mesh, on_mesh
from jax_ep import primitives
from jax_ep.group import EPGroup
from jax_ep.transports.p2p import P2pTransport

H, T, K = 64, 8, 2
CONFIG = jax_ep.EPConfig(
    n_experts=8, top_k=K, hidden_size=H, max_tokens_per_rank=T, n_sms=16
)


@pytest.fixture
def mesh():
    return make_mesh(4)


@pytest.fixture
def group(mesh, monkeypatch):
    """A group of p2p on devices that it cannot serve: enough to lower its calls."""
    monkeypatch.setattr(P2pTransport, "open", lambda *_: None)
    return EPGroup(mesh, AXIS, CONFIG, P2pTransport(), None)


def lowered(mesh, function) -> str:
    """StableHLO for GPUs, of a function of a rank's tokens and ids."""
    tokens = jax.ShapeDtypeStruct((4, T, H), jnp.bfloat16)
    ids = jax.ShapeDtypeStruct((4, T, K), jnp.int32)
    traced = on_mesh(mesh, function).trace(tokens, ids)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


def targets(text: str) -> list[str]:
    return re.findall(r"custom_call @(jax_ep\w+)", text)


def overlapping(group, tokens, ids):
    flight = jax_ep.dispatch_async(group, tokens, ids)
    beside = jnp.tanh(flight.then(tokens))
    rows = jax_ep.dispatch_wait(group, flight, after=beside)
    flight = jax_ep.combine_async(group, rows.tokens, rows)
    more = jnp.sin(flight.then(beside))
    return jax_ep.combine_wait(group, flight, after=more) + more


def test_calls_that_overlap_have_one_result_and_the_stream_for_collectives(
    mesh, group
) -> None:
    text = lowered(mesh, lambda *args: overlapping(group, *args))
    calls = re.findall(r"(%\d+(?::\d+)?) = func.call @jax_ep_overlap\w*\(.*", text)
    assert len(calls) == 2 and not any(":" in call for call in calls)
    assert text.count('_xla_stream_annotation = "collective"') == 2
    assert text.count('inlineable = "false"') == 2
    # Functions come behind the main one.
    assert sorted(targets(text)) == [
        "jax_ep_await_begin",
        "jax_ep_await_begin",
        "jax_ep_check",
        "jax_ep_check",
        "jax_ep_combine_beside",
        "jax_ep_dispatch_begin",
        "jax_ep_dispatch_end",
        "jax_ep_reserve",
    ]
    assert text.count("order = 2 : i32") == 2
    end = next(line for line in text.splitlines() if "@jax_ep_dispatch_end" in line)
    assert end.count("output_operand_alias<") == 6  # all results stay where they are


@pytest.mark.parametrize("after", [False, True])
def test_nobody_else_has_what_was_reserved_as_an_operand(mesh, group, after) -> None:
    """XLA would copy it for the end of the call, maybe before the call has written."""

    def function(tokens, ids):
        flight = jax_ep.dispatch_async(group, tokens, ids)
        beside = jnp.tanh(flight.then(tokens))
        rows = jax_ep.dispatch_wait(group, flight, after=beside if after else None)
        return rows.tokens, beside

    lines = lowered(mesh, function).splitlines()
    reserve = next(line for line in lines if "@jax_ep_reserve" in line)
    name = re.search(r"(%\w+):7 =", reserve)[1]
    users = [line for line in lines if re.search(rf"{name}#[1-6]\b", line)]
    gate, *calls = users
    assert [re.search(r"@(\w+)", line)[1] for line in calls] == [
        "jax_ep_overlap",
        "jax_ep_dispatch_end",
    ]
    # The call has the gate as its first operand, and nobody has another of its results.
    barrier = re.search(r"(%\w+):\d+ = stablehlo.optimization_barrier", gate)[1]
    assert f"call @jax_ep_overlap({barrier}#0, " in calls[0]
    assert not [line for line in lines if re.search(rf"{barrier}#[1-9]", line)]


def test_whole_calls_stay_on_the_main_stream(mesh, group, monkeypatch) -> None:
    def whole(tokens, ids):
        rows = jax_ep.dispatch(group, tokens, ids)
        return jax_ep.combine(group, rows.tokens, rows)

    monkeypatch.setattr(primitives._Program, "overlaps", False)
    text = lowered(mesh, whole)
    assert "_xla_stream_annotation" not in text
    check = "jax_ep_check"
    assert targets(text) == [check, "jax_ep_dispatch", check, "jax_ep_combine"]
    assert text.count("order = 0 : i32") == 2


def test_each_call_comes_behind_a_check_of_its_group(mesh, group) -> None:
    """Of equal checks XLA keeps one in each computation, as they have no effect."""

    def function(tokens, ids):
        rows = jax_ep.dispatch(group, tokens, ids)
        return jax_ep.combine(group, rows.tokens, rows)

    text = lowered(mesh, function)
    checks = re.findall(r"(%\w+) = stablehlo.custom_call @jax_ep_check\((%\w+)\)", text)
    calls = re.findall(r"@jax_ep_(?:dispatch|combine)\((%\w+), (%\w+),", text)
    assert len(checks) == 2 and checks == calls
    lines = [line for line in text.splitlines() if "@jax_ep_check" in line]
    (form,) = {re.sub(r"%\w+", "", line) for line in lines}
    assert f'group = "{group.key}"' in form and "has_side_effect" not in form


def test_whole_calls_wait_for_those_that_overlap(mesh, group, monkeypatch) -> None:
    """Also if they stand before them: XLA may order them otherwise."""

    def function(tokens, ids):
        rows = jax_ep.dispatch(group, tokens, ids)
        return overlapping(group, tokens, ids) + rows.tokens[:T]

    monkeypatch.setattr(primitives._Program, "overlaps", False)
    text = lowered(mesh, function)
    line = next(x for x in text.splitlines() if "custom_call @jax_ep_dispatch(" in x)
    assert "order = 1 : i32" in line


def test_both_directions_stand_in_the_order_that_was_asked_for(mesh, group) -> None:
    """The waits have barriers with what is to come first as operands."""
    text = lowered(mesh, lambda *args: overlapping(group, *args))
    body = text[: text.index("func.func private @jax_ep_overlap")]
    order = re.findall(
        r"@jax_ep_\w+|stablehlo.(?:tanh|sine|optimization_barrier)", body
    )
    gate = settled = barrier = "stablehlo.optimization_barrier"
    second = "@jax_ep_overlap_0"
    assert order == [
        "@jax_ep_reserve",
        "@jax_ep_check",
        gate,
        "@jax_ep_overlap",
        barrier,
        "@jax_ep_await_begin",
        barrier,
        "stablehlo.tanh",
        barrier,
        "@jax_ep_dispatch_end",
        settled,
        "@jax_ep_check",
        gate,
        second,
        barrier,
        "@jax_ep_await_begin",
        barrier,
        "stablehlo.sine",
        barrier,
    ]


@pytest.mark.parametrize("outer", ["scan", "grad", "jit"])
def test_what_another_function_began_is_not_awaited_inside(mesh, group, outer) -> None:
    def function(tokens, ids):
        flight = jax_ep.dispatch_async(group, tokens, ids)

        def inner(x):
            return x + jax_ep.dispatch_wait(group, flight).tokens.sum()

        if outer == "scan":
            return jax.lax.scan(lambda x, _: (inner(x), None), tokens, length=2)[0]
        if outer == "jit":
            return jax.jit(inner)(tokens)
        return jax.grad(lambda x: inner(x).sum().astype(jnp.float32))(tokens)

    with pytest.raises(ValueError, match="dispatch_wait must stand in the function"):
        lowered(mesh, function)


def test_what_leaves_a_function_has_been_awaited(mesh, group) -> None:
    def function(tokens, ids):
        begin = jax.jit(lambda x: jax_ep.dispatch_async(group, x, ids))
        return jax_ep.dispatch_wait(group, begin(tokens)).tokens

    text = lowered(mesh, function)
    assert "jax_ep_dispatch_end" in targets(text)
    inner = text[text.index("func.func private") :]
    assert inner.index("@jax_ep_dispatch_begin") >= 0


def test_a_call_ends_once(mesh, group) -> None:
    """However often its results are asked for: by a wait, by what flattens it."""

    def function(tokens, ids):
        flight = jax_ep.dispatch_async(group, tokens, ids)
        leaves = jax.tree.leaves(flight)
        rows = jax_ep.dispatch_wait(group, flight, after=jnp.sin(tokens))
        return rows.tokens, leaves

    assert targets(lowered(mesh, function)).count("jax_ep_dispatch_end") == 1


def test_a_mapped_call_is_complete_before_its_results_are_stacked(mesh, group) -> None:
    def function(tokens, ids):
        return jax.vmap(lambda x, i: overlapping(group, x[None], i[None]))(tokens, ids)

    text = lowered(mesh, function)
    loop = text[text.index("stablehlo.while") :]
    assert "jax_ep_dispatch_end" in loop


@pytest.mark.usefixtures("one_process")
def test_gradients_of_work_beside_a_call_are_those_without(mesh, transport) -> None:
    group = jax_ep.ep_init(mesh, AXIS, CONFIG, transport=transport)

    def loss(x, ids, then):
        flight = jax_ep.dispatch_async(group, x, ids)
        beside = jnp.sin(flight.then(x) if then else x)
        rows = jax_ep.dispatch_wait(group, flight, after=beside if then else None)
        return jnp.sum((rows.tokens.sum() + beside.sum()).astype(jnp.float32))

    rng = np.random.default_rng(0)
    tokens = rng.standard_normal((4, T, H)).astype(jnp.bfloat16)
    ids = rng.integers(0, 8, (4, T, K)).astype(np.int32)
    one, two = (
        on_mesh(mesh, lambda x, i, t=t: jax.grad(loss)(x, i, t))(tokens, ids)
        for t in (False, True)
    )
    np.testing.assert_array_equal(one, two)
