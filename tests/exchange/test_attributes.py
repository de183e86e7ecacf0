"""The attributes of the custom calls: exactly those that the C++ handlers read."""

import functools
import re
import subprocess
import sys

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

import jax_ep
import suite
from call_attributes import (
    CASES,
    CONNECTIONS,
    GATE,
    SILU,
    attributes_by_target,
    closed_group,
    lowered,
)
from gated_matmuls import lower_for
from harness import AXIS, config_of, make_mesh, on_mesh
from jax_ep.ffi import extension
from jax_ep.formats import QuantizedFormat
from jax_ep.geometry import Geometry
from jax_ep.group import EPGroup
from jax_ep.layer.matmul.api import multiply_scaled
from jax_ep.layer.matmul.choose import Kernels
from jax_ep.nodes import overlapped
from jax_ep.nodes.nvshmem.connection import NvshmemByNodes

DISPATCH = {"group": "str", "token_format": "str", "scales_layout": "str"}
COMBINE = {"group": "str", "weighting": "i32", "reduce": "bool", "adds_shared_expert": "bool"}
STREAM = {"stream_order": "i32"}
CPU = {
    "jax_ep_dispatch": DISPATCH,
    "jax_ep_combine": COMBINE,
    "jax_ep_combine_grad": COMBINE,
    "jax_ep_exchange": {"group": "str", "splits": "bool"},
    "jax_ep_fused_silu": SILU,
}
CUDA = {
    "jax_ep_check": {"group": "str"},
    "jax_ep_dispatch": DISPATCH | STREAM,
    "jax_ep_combine": COMBINE | STREAM,
    "jax_ep_combine_grad": COMBINE | STREAM,
    "jax_ep_send_copies": STREAM | {"group": "str"},
    "jax_ep_receive_copies": STREAM | {"group": "str"},
    "jax_ep_add_copies": STREAM | {"group": "str"},
    "jax_ep_count_choices": {},
    "jax_ep_balance_choices": {"n_ranks_per_node": "i32", "n_shared": "i32"},
    "jax_ep_async_alloc": {},
    "jax_ep_dispatch_start": DISPATCH | STREAM,
    "jax_ep_wait_started": {},
    "jax_ep_async_done": {},
    "jax_ep_combine_start": COMBINE | STREAM,
    "jax_ep_dispatch_grad_start": COMBINE | STREAM,
    "jax_ep_combine_grad_start": COMBINE | STREAM,
    "jax_ep_fused_silu": SILU,
    "jax_ep_fused_silu_grad": GATE,
    "jax_ep_gated_matmul": GATE | {"keeps_hidden": "bool"},
    "jax_ep_gated_matmul_grad": GATE,
    "jax_ep_gated_scaled_matmul": GATE,
    "jax_ep_grouped_matmul": {"form": "i32", "zeroes_unused": "bool"},
    "jax_ep_quantize_rows": dict.fromkeys(("along_rows", "along_columns"), "bool"),
    "jax_ep_rail": STREAM | {"group": "str"} | dict.fromkeys(("has_mask", "by_node"), "bool"),
    "jax_ep_rail_combine": COMBINE | STREAM,
    "jax_ep_rail_combine_grad": COMBINE | STREAM,
    "jax_ep_rail_combine_grad_start": COMBINE | STREAM,
    "jax_ep_rail_combine_start": COMBINE | STREAM,
    "jax_ep_rail_dispatch": DISPATCH | STREAM,
    "jax_ep_rail_dispatch_grad_start": COMBINE | STREAM,
    "jax_ep_rail_dispatch_start": DISPATCH | STREAM,
    "jax_ep_rail_gather": STREAM
    | {"group": "str"}
    | dict.fromkeys(("has_weights", "has_tokens"), "bool"),
    "jax_ep_rail_sum": STREAM | {"group": "str", "has_residual": "bool"},
    "jax_ep_scaled_matmul_grad": {},
}
# Calls that not every layer makes.
OTHERS = {target for target in CUDA if target.endswith(("_matmul", "_matmul_grad"))}
OTHERS |= {
    "jax_ep_send_copies",
    "jax_ep_receive_copies",
    "jax_ep_add_copies",
    "jax_ep_count_choices",
    "jax_ep_balance_choices",
    "jax_ep_fused_silu",
    "jax_ep_fused_silu_grad",
    "jax_ep_exchange",
    "jax_ep_quantize_rows",
}
RAIL = {target for target in CUDA if target.startswith("jax_ep_rail")}
OTHERS |= RAIL
# Calls for which formats that quantize have no use.
NOT_QUANTIZED = {"jax_ep_dispatch_grad_start"}


FORMS = ("synchronous", "asynchronous", "overlapping")


def value_and_gradients(group, case, form, tokens, topk_ids, topk_weights, expert_out, residual):
    """A layer and its gradients: all calls, forward and backward."""
    at_row, at_source = suite.weights_for(case.weights, topk_weights)
    options = {"input_scale": None if case.input_scale is None else np.float32(case.input_scale)}

    def loss(tokens, expert_out):
        if form == "synchronous":
            dispatched = jax_ep.dispatch(group, tokens, topk_ids, *at_row, **options)
            rows = jax_ep.dequantize(dispatched) + expert_out
            out = jax_ep.combine(group, rows, dispatched, *at_source, residual=residual)
            return jnp.sum(out.astype(jnp.float32))
        in_flight = jax_ep.dispatch_async(group, tokens, topk_ids, *at_row, **options)
        after = beside(in_flight, expert_out)
        dispatched = jax_ep.dispatch_wait(group, in_flight, after=after)
        rows = jax_ep.dequantize(dispatched) + after
        in_flight = jax_ep.combine_async(group, rows, dispatched, *at_source, residual=residual)
        after = beside(in_flight, tokens)
        out = jax_ep.combine_wait(group, in_flight, after=after) + after
        return jnp.sum(out.astype(jnp.float32))

    def beside(in_flight, x):
        return in_flight.overlap(jnp.tanh, x) if form == "overlapping" else in_flight.then(x)

    return jax.value_and_grad(loss, argnums=(0, 1))(tokens, expert_out)


def silu(x, offsets):
    """fused_silu with and without each option."""
    return [
        jax_ep.fused_silu(x, offsets),
        jax_ep.fused_silu(x, offsets, jax_ep.MXFP8(), interleaved=True),
        jax_ep.fused_silu(x, offsets, jax_ep.MXFP4(), clamp=(1.702, 7.0)),
    ]


@pytest.mark.parametrize(
    ("platform", "wanted"), [("cpu", CPU), ("cuda", CUDA)], ids=("cpu", "cuda")
)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_every_call_has_the_attributes_that_its_handler_reads(case, platform, wanted):
    group = closed_group(case, platform)
    operands = [np.stack(each) for each in suite.make_inputs(case).arrays()]
    found: dict[str, list] = {}
    for form in FORMS:
        function = on_mesh(group.mesh, functools.partial(value_and_gradients, group, case, form))
        for target, calls in attributes_by_target(lowered(function, platform, *operands)).items():
            found.setdefault(target, []).extend(calls)
    quantizes = isinstance(config_of(case).token_format, QuantizedFormat)
    assert set(found) == set(wanted) - OTHERS - (NOT_QUANTIZED if quantizes else set())
    for target, calls in found.items():
        assert calls == [wanted[target]] * len(calls), target


def attributes_of_dispatch(case, platform, results):
    """Of the calls of a dispatch, of whose rows `results` are used, by target."""
    group = closed_group(case, platform)

    def dispatch(tokens, topk_ids):
        return results(jax_ep.dispatch(group, tokens, topk_ids))

    operands = [np.stack(each) for each in suite.make_inputs(case).arrays()[:2]]
    return attributes_by_target(lowered(on_mesh(group.mesh, dispatch), platform, *operands))


def test_an_exchange_has_the_attributes_that_its_handler_reads():
    found = attributes_of_dispatch(
        CASES["plain"], "cpu", lambda rows: (rows.expert_counts, rows.row_source_ranks)
    )
    assert found["jax_ep_exchange"] == [CPU["jax_ep_exchange"]] * 2


def test_a_balanced_dispatch_has_the_attributes_that_its_handlers_read():
    case = CASES["shared"].replace(expert_copies=1)
    found = attributes_of_dispatch(case, "cuda", lambda rows: (rows.tokens, rows.copies))
    calls = ("count_choices", "balance_choices", "check", "dispatch")
    assert found == {f"jax_ep_{call}": [CUDA[f"jax_ep_{call}"]] for call in calls}


# Of each form, the calls that are exchanges as well where these overlap.
OVERLAPPED = {
    "synchronous": ("dispatch", "combine", "combine_grad"),
    "asynchronous": ("dispatch_start", "combine_start", "combine", "combine_grad"),
    "overlapping": ("dispatch_start", "combine_start", "dispatch_grad_start", "combine_grad_start"),
}


@pytest.mark.parametrize("least", [1, 1000])
@pytest.mark.parametrize("weights", ["none", "row", "source"])
@pytest.mark.parametrize("form", FORMS)
def test_an_inter_node_exchange_has_the_attributes_that_its_handler_reads(
    form, weights, least, monkeypatch
):
    monkeypatch.setattr(overlapped, "min_tokens", least)
    case = CASES["plain"].replace(weights=weights, n_nodes=2)
    geometry = Geometry(make_mesh(case.n_ranks), AXIS, config_of(case), "nvshmem")
    group = EPGroup(NvshmemByNodes(geometry))
    operands = [np.stack(each) for each in suite.make_inputs(case).arrays()]
    function = functools.partial(value_and_gradients, group, case, form)
    text = lowered(on_mesh(group.mesh, function), "cuda", *operands)
    found = attributes_by_target(text)
    overlaps = least == 1
    wanted = {"jax_ep_rail_gather"}
    if overlaps:
        wanted |= {f"jax_ep_rail_{call}" for call in OVERLAPPED[form]}
    else:
        wanted |= {"jax_ep_rail_sum"}
    # Cotangents; and what only weights have: gradients, or a way to all nodes for combine.
    if not overlaps or weights == "source":
        wanted |= {"jax_ep_rail"}
    assert set(found) & RAIL == wanted
    for target in wanted:
        assert found[target] == [CUDA[target]] * len(found[target])


def test_an_exchange_that_overlaps_has_no_second_derivative(monkeypatch):
    """The first operation refuses it; none behind makes it zero."""
    monkeypatch.setattr(overlapped, "min_tokens", 1)
    case = CASES["plain"].replace(weights="none", n_nodes=2)
    geometry = Geometry(make_mesh(case.n_ranks), AXIS, config_of(case), "nvshmem")
    group = EPGroup(NvshmemByNodes(geometry))
    operands = [np.stack(each) for each in suite.make_inputs(case).arrays()[:2]]

    def loss(tokens, topk_ids):
        rows = jax_ep.dispatch(group, tokens, topk_ids)
        return jnp.sum(jax_ep.combine(group, jnp.sin(rows.tokens), rows).astype(jnp.float32) ** 3)

    def norm_of_gradient(*operands):
        return jnp.sum(jax.grad(loss)(*operands).astype(jnp.float32) ** 2)

    with pytest.raises(
        NotImplementedError, match="Differentiation rule for 'jax_ep_rail_dispatch'"
    ):
        on_mesh(group.mesh, jax.grad(norm_of_gradient)).trace(*operands)


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_fused_silu_has_the_attributes_that_its_handler_reads(platform, monkeypatch):
    monkeypatch.setattr(extension, "register_cuda", lambda: None)
    text = lowered(jax.jit(silu), platform, np.ones((4, 64), np.float32), np.uint32([0, 4]))
    assert attributes_by_target(text) == {"jax_ep_fused_silu": [SILU] * 3}


def matmuls(rows, weights, codes, offsets):
    """Matmuls that have kernels, with their gradients."""
    codes, by_row = jax_ep.BlockwiseFP8().quantize(codes)
    quantized = jax_ep.QuantizedRows(codes, by_row.T, None)
    matrices = jax_ep.quantize_weights(jnp.ones((1, 128, 8)))
    product, pull = jax.vjp(lambda *x: jax_ep.grouped_matmul(*x, offsets), rows, weights)
    sums = jax_ep.grouped_matmul_gradient(rows, product, offsets, jnp.zeros((1, 8, 16)))
    return jax_ep.grouped_matmul(quantized, matrices, offsets), pull(product), sums


def test_grouped_matmul_has_the_attributes_that_its_handler_reads(monkeypatch):
    lower_for(monkeypatch, Kernels.HOPPER)
    operands = [np.ones(shape, jnp.bfloat16) for shape in ((4, 8), (1, 8, 16), (4, 128))]
    text = lowered(jax.jit(matmuls), "cuda", *operands, np.uint32([0, 4]))
    found = attributes_by_target(text)
    assert found == {"jax_ep_grouped_matmul": [CUDA["jax_ep_grouped_matmul"]] * 5}


def fp8_gradients(tokens, weights, cotangent, offsets):
    """Of a matmul of codes, for rows and weights."""
    codes, scales = jax_ep.BlockwiseFP8().quantize(tokens)
    rows = jax_ep.QuantizedRows(codes, scales.T, None)

    def product(tokens, weights):
        quantized = jax_ep.quantize_weights(weights, fp8_gradients=True)
        return multiply_scaled(rows, quantized, offsets, tokens)

    return jax.vjp(product, tokens, weights)[1](cotangent)


def test_gradients_in_fp8_have_the_attributes_that_their_handlers_read(monkeypatch):
    lower_for(monkeypatch, Kernels.HOPPER)
    shapes = (4, 128), (1, 128, 256), (4, 256)
    operands = [np.ones(shape, jnp.bfloat16) for shape in shapes]
    found = attributes_by_target(
        lowered(jax.jit(fp8_gradients), "cuda", *operands, np.uint32([0, 4]))
    )
    counts = {"quantize_rows": 2, "grouped_matmul": 1, "scaled_matmul_grad": 1}
    wanted = {f"jax_ep_{name}": n for name, n in counts.items()}
    assert found == {target: [CUDA[target]] * n for target, n in wanted.items()}


def experts(rows, weights, offsets):
    """A matmul and an activation, which both are custom calls on GPUs."""
    return jax_ep.fused_silu(jax_ep.grouped_matmul(rows, weights, offsets), offsets)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("platform", CONNECTIONS)
def test_disabled_checks_let_jax_export_every_call(platform, form, monkeypatch):
    case = CASES["row weights"]
    group = closed_group(case, platform)
    layer = on_mesh(group.mesh, functools.partial(value_and_gradients, group, case, form))
    operands = [np.stack(each) for each in suite.make_inputs(case).arrays()]
    lower_for(monkeypatch, Kernels.HOPPER)
    rows, weights = (np.ones(shape, jnp.bfloat16) for shape in ((4, 8), (1, 8, 16)))
    programs = ((layer, operands), (jax.jit(experts), (rows, weights, np.uint32([0, 4]))))
    for function, arguments in programs:
        export = functools.partial(jax.export.export, function, platforms=[platform])
        with pytest.raises(ValueError, match="custom call"):
            export()(*arguments)
        exported = export(disabled_checks=jax_ep.disabled_checks())(*arguments)
        assert "jax_ep_" in exported.mlir_module()


def test_disabled_checks_names_all_targets_once():
    checks = map(jax.export.DisabledSafetyCheck.custom_call, set(CPU) | set(CUDA))
    script = "import jax_ep; print(*jax_ep.disabled_checks(), sep='\\n')"  # nothing else imported
    output = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert sorted(output.stdout.splitlines()) == sorted(map(str, checks))


@pytest.mark.parametrize(("name", "targets"), [("load_host", CPU), ("load_cuda", CUDA)])
def test_an_extension_has_the_handlers_of_all_targets(name, targets):
    try:
        found = getattr(extension, name)().targets()
    except ImportError as error:
        pytest.skip(f"needs the extension: {error}")
    assert set(found) == set(targets)


VALUES = {"str": "", "i32": np.int32(0), "f32": np.float32(0), "bool": np.bool_(False)}


def call_handler(target: str, attributes: dict) -> str:
    """The error of a call without operands, on a CPU."""
    call = jax.ffi.ffi_call(target, (), has_side_effect=True)
    values = {name: VALUES[kind] for name, kind in attributes.items()}
    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        with jax.default_device(jax.local_devices(backend="cpu")[0]):
            jax.block_until_ready(jax.jit(lambda: call(**values))())
    return str(caught.value)


@pytest.mark.parametrize("target", CPU)
def test_a_handler_rejects_other_attributes(target):
    """XLA compares their number and names with those that the handler declares."""
    extension.register_host()
    message = r"(?i)attribute"
    assert not re.search(message, call_handler(target, CPU[target]))
    assert re.search(message, call_handler(target, CPU[target] | {"another": "i32"}))
    for name in CPU[target]:
        fewer = {k: v for k, v in CPU[target].items() if k != name}
        assert re.search(message, call_handler(target, fewer))
