"""The program that XLA gets for asynchronous calls on GPUs; needs no GPU."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_ep
from async_layers import CONFIG, H, K, T, closed_group, lower, overlapped_layer
from harness import AXIS, make_mesh, on_mesh
from jax_ep.ffi import lowering

CHECK, BARRIER = "@jax_ep_check", "stablehlo.optimization_barrier"


@pytest.fixture
def mesh():
    return make_mesh(4)


@pytest.fixture
def group(mesh):
    return closed_group(mesh)


def lowered(mesh, function) -> str:
    """StableHLO for GPUs, for a function of a rank's tokens and ids."""
    return lower(mesh, function).as_text()


def targets(text: str) -> list[str]:
    return re.findall(r"custom_call @(jax_ep\w+)", text)


def line_with(text: str, part: str) -> str:
    return next(line for line in text.splitlines() if part in line)


def test_asynchronous_calls_have_one_result_and_run_on_the_collective_stream(mesh, group) -> None:
    text = lowered(mesh, lambda *args: overlapped_layer(group, *args))
    calls = re.findall(r"(%\d+(?::\d+)?) = func.call @jax_ep_async\w*\(.*", text)
    assert len(calls) == 2 and not any(":" in call for call in calls)
    assert text.count('_xla_stream_annotation = "collective"') == 2
    assert text.count('inlineable = "false"') == 2
    # Sorted: the functions that the main one calls follow it.
    assert sorted(targets(text)) == [
        "jax_ep_async_alloc",
        "jax_ep_async_done",
        "jax_ep_check",
        "jax_ep_check",
        "jax_ep_combine_start",
        "jax_ep_dispatch_start",
        "jax_ep_wait_started",
        "jax_ep_wait_started",
    ]
    assert text.count("stream_order = 2 : i32") == 2
    done = line_with(text, "@jax_ep_async_done")
    assert done.count("output_operand_alias<") == 6  # all results stay where they are


@pytest.mark.parametrize("after", [False, True])
def test_only_the_call_itself_takes_the_allocated_results(mesh, group, after) -> None:
    """XLA would copy them for another user, maybe before the call has written them."""

    def function(tokens, ids):
        in_flight = jax_ep.dispatch_async(group, tokens, ids)
        overlapped = jnp.tanh(in_flight.then(tokens))
        rows = jax_ep.dispatch_wait(group, in_flight, after=overlapped if after else None)
        return rows.tokens, overlapped

    text = lowered(mesh, function)
    lines = text.splitlines()
    allocated = re.search(r"(%\w+):7 =", line_with(text, "@jax_ep_async_alloc"))[1]
    gate, *calls = [line for line in lines if re.search(rf"{allocated}#[1-6]\b", line)]
    assert [re.search(r"@(\w+)", line)[1] for line in calls] == [
        "jax_ep_async",
        "jax_ep_async_done",
    ]
    # The gate's first result is the call's first operand; its other results have no user.
    barrier = re.search(rf"(%\w+):\d+ = {BARRIER}", gate)[1]
    assert f"call @jax_ep_async({barrier}#0, " in calls[0]
    assert not [line for line in lines if re.search(rf"{barrier}#[1-9]", line)]


def synchronous_layer(group, tokens, ids):
    rows = jax_ep.dispatch(group, tokens, ids)
    return jax_ep.combine(group, rows.tokens, rows)


def test_synchronous_calls_stay_on_the_main_stream(mesh, group, monkeypatch) -> None:
    monkeypatch.setattr(lowering._AsyncCalls, "traced", False)
    text = lowered(mesh, lambda *args: synchronous_layer(group, *args))
    assert "_xla_stream_annotation" not in text
    calls = ["jax_ep_check", "jax_ep_dispatch", "jax_ep_check", "jax_ep_combine"]
    assert targets(text) == calls
    assert text.count("stream_order = 0 : i32") == 2


def test_each_call_takes_the_result_of_a_check_of_its_group(mesh, group) -> None:
    """XLA merges equal checks in each computation, because they have no side effect."""
    text = lowered(mesh, lambda *args: synchronous_layer(group, *args))
    checks = re.findall(r"(%\w+) = stablehlo.custom_call @jax_ep_check\((%\w+)\)", text)
    calls = re.findall(r"@jax_ep_(?:dispatch|combine)\((%\w+), (%\w+),", text)
    assert len(checks) == 2 and checks == calls
    lines = [line for line in text.splitlines() if CHECK in line]
    (form,) = {re.sub(r"%\w+", "", line) for line in lines}
    assert f'group = "{group.key}"' in form and "has_side_effect" not in form


def test_synchronous_calls_wait_for_asynchronous_ones(mesh, group, monkeypatch) -> None:
    """Even for those that come later in the program: XLA may reorder them."""

    def function(tokens, ids):
        rows = jax_ep.dispatch(group, tokens, ids)
        return overlapped_layer(group, tokens, ids) + rows.tokens[:T]

    monkeypatch.setattr(lowering._AsyncCalls, "traced", False)
    line = line_with(lowered(mesh, function), "custom_call @jax_ep_dispatch(")
    assert "stream_order = 1 : i32" in line


def test_then_and_after_order_the_work_with_barriers(mesh, group) -> None:
    """Each wait takes a barrier whose operands are what must come first."""
    text = lowered(mesh, lambda *args: overlapped_layer(group, *args))
    body = text[: text.index("func.func private @jax_ep_async")]
    order = re.findall(r"@jax_ep_\w+|stablehlo.(?:tanh|sine|optimization_barrier)", body)
    fusion_barrier = BARRIER
    assert order == [
        "@jax_ep_async_alloc",
        *start("@jax_ep_async"),
        "stablehlo.tanh",
        BARRIER,
        "@jax_ep_async_done",
        fusion_barrier,
        *start("@jax_ep_async_0"),
        "stablehlo.sine",
        BARRIER,
    ]


def start(function: str) -> list[str]:
    """The start of a call, and what work that overlaps waits for."""
    gate = BARRIER
    return [CHECK, gate, function, BARRIER, "@jax_ep_wait_started", BARRIER]


@pytest.mark.parametrize("transform", ["scan", "grad", "jit"])
def test_an_inner_function_must_not_wait_for_a_call_of_the_outer_one(
    mesh, group, transform
) -> None:
    def function(tokens, ids):
        in_flight = jax_ep.dispatch_async(group, tokens, ids)

        def inner(x):
            return x + jax_ep.dispatch_wait(group, in_flight).tokens.sum()

        if transform == "scan":
            return jax.lax.scan(lambda x, _: (inner(x), None), tokens, length=2)[0]
        if transform == "jit":
            return jax.jit(inner)(tokens)
        return jax.grad(lambda x: inner(x).sum().astype(jnp.float32))(tokens)

    with pytest.raises(ValueError, match="dispatch_wait must .* in the function that started"):
        lowered(mesh, function)


def gradient_with_work(group, tokens, ids, work=jnp.tanh):
    """Of a dispatch beside work, the work, and a sum over rows."""

    def loss(tokens):
        in_flight = jax_ep.dispatch_async(group, tokens, ids)
        overlapped = in_flight.overlap(work, tokens)
        rows = jax_ep.dispatch_wait(group, in_flight)
        return jnp.sum((jnp.sin(rows.tokens).sum() + overlapped.sum()).astype(jnp.float32))

    return jax.grad(loss)(tokens)


def test_the_backward_orders_the_call_and_the_work_as_the_forward_does(mesh, group) -> None:
    @jax.custom_vjp
    def work(x):
        return jnp.tanh(x)

    work.defvjp(lambda x: (work(x), x), lambda x, cotangent: (cotangent * jnp.expm1(x),))
    text = lowered(mesh, lambda *args: gradient_with_work(group, *args, work))
    body = text[text.index("stablehlo.cosine") : text.index("func.func private @jax_ep_async")]
    order = re.findall(rf"@jax_ep_\w+|stablehlo.exponential_minus_one|{BARRIER}", body)
    fusion_barrier = BARRIER
    assert order == [
        "@jax_ep_async_alloc",
        *start("@jax_ep_async_0"),
        "stablehlo.exponential_minus_one",
        BARRIER,  # the wait comes after the work
        BARRIER,  # and after the start
        "@jax_ep_async_done",
        fusion_barrier,
    ]
    assert "jax_ep_dispatch_grad_start" in targets(text)


def test_xla_keeps_the_barriers_that_order_the_work(mesh, group) -> None:
    """It drops an operand whose result is not used, unless something else uses the operand, too."""
    text = lowered(mesh, lambda *args: gradient_with_work(group, *args))
    starts = re.findall(r"(%\w+) = stablehlo.custom_call @jax_ep_wait_started", text)
    floats = re.findall(r"(%\w+) = stablehlo.bitcast_convert (%\w+)", text)
    as_floats = {integers: name for name, integers in floats}
    barriers = [line for line in text.splitlines() if BARRIER in line]
    assert len(starts) == 2
    for start in starts:
        name = as_floats.get(start, start)
        assert sum(bool(re.search(rf"{name}\b", line)) for line in barriers) == 2


def test_work_in_another_function_than_the_call_keeps_the_backward_synchronous(mesh, group) -> None:
    def loss(tokens, ids):
        in_flight = jax_ep.dispatch_async(group, tokens, ids)

        @jax.jit
        def rest(in_flight, tokens):
            overlapped = in_flight.overlap(jnp.tanh, tokens)
            return jnp.sum(jax_ep.dispatch_wait(group, in_flight).tokens) + jnp.sum(overlapped)

        return rest(in_flight, tokens).astype(jnp.float32)

    found = targets(lowered(mesh, lambda *args: jax.grad(loss)(*args)))
    assert "jax_ep_combine" in found and "jax_ep_dispatch_grad_start" not in found


def test_what_overlap_returns_varies_only_if_the_work_says_so(mesh, group) -> None:
    """Such as a sum over ranks, which does not. With jax 0.10, see docs/overlap.md, "Versions"."""
    found = []

    def loss(tokens, ids):
        in_flight = jax_ep.dispatch_async(group, tokens, ids)
        total = in_flight.overlap(lambda x: jax.lax.psum(x.sum(), AXIS), tokens)
        found.append(jax.typeof(total).mat.varying)
        return jnp.sum(jax_ep.dispatch_wait(group, in_flight).tokens) * total

    lowered(mesh, lambda *args: jax.grad(lambda x, i: loss(x, i).astype(jnp.float32))(*args))
    assert found == [{AXIS} if jax.__version_info__ < (0, 11) else set()]


def test_a_call_in_flight_is_done_before_it_leaves_its_function(mesh, group) -> None:
    def function(tokens, ids):
        start = jax.jit(lambda x: jax_ep.dispatch_async(group, x, ids))
        return jax_ep.dispatch_wait(group, start(tokens)).tokens

    text = lowered(mesh, function)
    assert "jax_ep_async_done" in targets(text)
    inner = text[text.index("func.func private") :]
    assert "@jax_ep_dispatch_start" in inner


def test_a_call_has_one_done(mesh, group) -> None:
    """However often its results are taken: by a wait, or by flattening it."""

    def function(tokens, ids):
        in_flight = jax_ep.dispatch_async(group, tokens, ids)
        leaves = jax.tree.leaves(in_flight)
        rows = jax_ep.dispatch_wait(group, in_flight, after=jnp.sin(tokens))
        return rows.tokens, leaves

    assert targets(lowered(mesh, function)).count("jax_ep_async_done") == 1


def test_a_call_under_vmap_is_done_before_its_results_are_stacked(mesh, group) -> None:
    def function(tokens, ids):
        return jax.vmap(lambda x, i: overlapped_layer(group, x[None], i[None]))(tokens, ids)

    text = lowered(mesh, function)
    loop = text[text.index("stablehlo.while") :]
    assert "jax_ep_async_done" in loop


@pytest.mark.usefixtures("one_process")
def test_then_and_after_change_no_gradient(mesh, transport) -> None:
    group = jax_ep.ep_init(mesh, AXIS, CONFIG, transport=transport)

    def loss(x, ids, is_ordered):
        in_flight = jax_ep.dispatch_async(group, x, ids)
        overlapped = jnp.sin(in_flight.then(x) if is_ordered else x)
        after = overlapped if is_ordered else None
        rows = jax_ep.dispatch_wait(group, in_flight, after=after)
        return jnp.sum((rows.tokens.sum() + overlapped.sum()).astype(jnp.float32))

    rng = np.random.default_rng(0)
    tokens = rng.standard_normal((4, T, H)).astype(jnp.bfloat16)
    ids = rng.integers(0, 8, (4, T, K)).astype(np.int32)
    wanted, got = (
        on_mesh(mesh, lambda x, i, o=is_ordered: jax.grad(loss)(x, i, o))(tokens, ids)
        for is_ordered in (False, True)
    )
    np.testing.assert_array_equal(got, wanted)
