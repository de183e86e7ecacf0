"""Calls between nodes as XLA compiles them for GPUs; see test_gpu_programs.py."""

import functools

import jax
import jax.numpy as jnp
import pytest

import async_layers
import jax_ep
from gpu_compiler import CASE, CHECK, check_overlap, compiled, computations, our_steps
from gpu_compiler import mesh as mesh
from harness import AXIS, config_of
from jax_ep.geometry import Geometry
from jax_ep.group import EPGroup
from jax_ep.nodes import overlapped
from jax_ep.nodes.nvshmem.connection import NvshmemByNodes

# Of each asynchronous call that overlaps with its exchange, the start.
STARTS = {f"jax_ep_rail_{call}_start" for call in ("dispatch", "combine")}
GRAD_STARTS = {f"jax_ep_rail_{call}_grad_start" for call in ("dispatch", "combine")}


def group_of_nodes(mesh, **options) -> EPGroup:
    """A group that is not open, of two nodes."""
    config = config_of(CASE, n_nodes=2, **options)
    return EPGroup(NvshmemByNodes(Geometry(mesh, AXIS, config, "nvshmem")))


@pytest.mark.parametrize("overlaps", [False, True])
def test_nvshmem_exchanges_once_per_call(overlaps, mesh, monkeypatch) -> None:
    """A backward gathers nothing that a policy saves. Few tokens have ids and weights with them."""
    monkeypatch.setattr(overlapped, "min_tokens", 1 if overlaps else 10**6)
    group = group_of_nodes(mesh)

    def layer(tokens, topk_ids, topk_weights):
        rows = jax_ep.dispatch(group, tokens, topk_ids, topk_weights)
        return jax_ep.combine(group, jnp.tanh(rows.tokens), rows)

    (steps,) = computations(compiled(mesh, layer, n_operands=3))
    gather, total = "jax_ep_rail_gather", "jax_ep_rail_sum"
    forward = [gather, "jax_ep_dispatch", "jax_ep_combine", total]
    backward = ["jax_ep_rail", "jax_ep_combine_grad", "jax_ep_combine", total]
    if overlaps:
        forward = [gather, "jax_ep_rail_dispatch", "jax_ep_rail_combine"]
        backward = ["jax_ep_rail_combine_grad", "jax_ep_rail_combine"]
    assert our_steps(steps) == [CHECK, *forward]

    save = jax.checkpoint_policies.save_only_these_names(jax_ep.DISPATCH_NAME, jax_ep.COMBINE_NAME)
    for function in (layer, jax.checkpoint(layer, policy=save)):

        def loss(*operands, function=function):
            return jnp.sum(function(*operands).astype(jnp.float32) ** 2)

        (steps,) = computations(compiled(mesh, jax.grad(loss), n_operands=3))
        assert our_steps(steps) == [CHECK, *forward, *backward]


@pytest.mark.parametrize("program", async_layers.PROGRAMS)
def test_work_overlaps_with_a_call_and_its_exchange(program, mesh, monkeypatch) -> None:
    """Only choices travel ahead."""
    monkeypatch.setattr(overlapped, "min_tokens", 1)
    group = group_of_nodes(mesh, n_sms=16)
    text = compiled(mesh, functools.partial(program, group))
    check_overlap(text, program)
    steps = {step for found in computations(text) for step in our_steps(found)}
    starts = {step for step in steps if step.endswith("_start")}
    assert starts <= STARTS | GRAD_STARTS
    assert starts & STARTS
    has_work = program in (
        async_layers.gradient_of_loop_with_work,
        async_layers.gradient_of_layers_with_work,
    )
    assert starts & GRAD_STARTS == (GRAD_STARTS if has_work else set())
    if has_work:
        assert {step for step in steps - starts if "rail" in step} == {"jax_ep_rail_gather"}
    assert not steps & {"jax_ep_rail", "jax_ep_rail_sum"}


def test_few_tokens_start_a_call_inside_the_node(mesh, monkeypatch) -> None:
    monkeypatch.setattr(overlapped, "min_tokens", 10**6)
    group = group_of_nodes(mesh, n_sms=16)
    program = async_layers.two_layers
    text = compiled(mesh, functools.partial(program, group))
    check_overlap(text, program)
    steps = {step for found in computations(text) for step in our_steps(found)}
    assert {"jax_ep_dispatch_start", "jax_ep_combine_start", "jax_ep_rail_sum"} <= steps
    assert not steps & STARTS
