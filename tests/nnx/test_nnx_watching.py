"""What loggers and profiles get of jax_ep.nnx.MoE."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import quick
from jax_ep.nnx import MoEReport
from routed_layers import F, call, make, make_tokens

pytestmark = pytest.mark.usefixtures("one_process", "float32_matmuls")


def report_of(load, **changes):
    zero = jnp.zeros((), jnp.float32)
    report = MoEReport(zero, zero, jnp.asarray(load), *[zero.astype(int)] * 2, zero[None], zero)
    return report._replace(**changes)


LOADS = {
    "equal": ([3, 3, 3, 3], 1, 1),
    "one has all": ([0, 8, 0, 0], 4, 0),
    "two share it": ([4, 0, 4, 0], 2, 0.5),
    "one expert": ([5], 1, 1),
    "no tokens": ([0, 0], 0, 0),
}


@pytest.mark.parametrize("name", LOADS)
def test_scalars_say_how_even_the_loads_are(name):
    load, largest, entropy = LOADS[name]
    scalars = report_of(load).scalars()
    np.testing.assert_allclose(scalars["load_max_over_mean"], largest, rtol=1e-6)
    np.testing.assert_allclose(scalars["load_entropy"], entropy, rtol=1e-6)


def test_scalars_are_those_of_each_layer():
    """Inside and outside of jit; a logger gets numbers, by name."""
    layer, x = make(capacity_factor=1.0), make_tokens()
    _, report = call(layer, x)
    reports = jax.tree.map(lambda *each: jnp.stack(each), report, call(layer, 2 * x[::-1])[1])
    scalars = jax.jit(lambda reports: reports.scalars())(reports)
    assert scalars.keys() == reports.scalars().keys()
    names = {"balance_loss", "z_loss", "n_limited", "n_dropped", "n_unserved"}
    names |= {"load_max_over_mean", "load_entropy"}
    assert scalars.keys() == {f"layer_{i}/{name}" for i in range(2) for name in names}
    assert {value.shape for value in scalars.values()} == {()}
    for i in range(2):
        load = np.asarray(reports.expert_load[i])
        largest = load.max() / load.mean()
        np.testing.assert_allclose(scalars[f"layer_{i}/load_max_over_mean"], largest, rtol=1e-6)
        assert scalars[f"layer_{i}/n_limited"] == reports.n_limited[i] > 0
        assert scalars[f"layer_{i}/z_loss"] == reports.z_loss[i]
    assert report.scalars().keys() == names


@pytest.mark.skipif(not hasattr(nnx, "capture"), reason="needs a Flax with nnx.capture")
def test_captures_get_the_losses_and_layers_keep_nothing():
    layer, x = make(), make_tokens()
    graph = nnx.graphdef(layer)
    (_, report), sown = nnx.jit(nnx.capture(lambda *args: call(*args), nnx.Intermediate))(layer, x)
    assert sown.keys() == {"balance_loss", "z_loss"}
    for name in sown:
        assert sown[name].get_value() == (getattr(report, name),)
    assert nnx.graphdef(layer) == graph


def test_a_report_prints_in_one_line():
    report = report_of([3, 5], n_dropped=jnp.int32(7), z_loss=jnp.float32(1 / 3))
    text = "MoEReport(balance_loss=0, z_loss=0.3333, expert_load=int32[2], n_limited=0, "
    text += "n_dropped=7, topk_ids=float32[1], n_unserved=0)"
    assert repr(report) == str(report) == text
    seen = []
    jax.jit(lambda report: seen.append(repr(report)))(report)
    assert "n_dropped=int32[]" in seen[0]
    assert "z_loss=P()" in repr(report._replace(z_loss=jax.P()))


PARTS = ("router", "dispatch", "experts", "combine", "shared_expert")
KINDS = {
    "plain": {},
    "own router": {"router_fn": lambda layer, x, _: layer.route(layer.router_logits(x))},
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", quick.params(KINDS, {"plain"}))
def test_a_profile_names_the_parts_of_a_layer(name):
    layer, x = make(shared_size=F, **KINDS[name]), make_tokens()
    if layer.group.transport != "host":
        pytest.skip(f"looks at programs of transport host, not {layer.group.transport}")
    graph, state = nnx.split(layer)

    def loss(state, x):
        return jnp.sum(jnp.sin(nnx.merge(graph, state)(x)[0]))

    lowered = jax.jit(jax.grad(loss)).lower(state, x)
    names = re.findall(r'op_name="([^"]*)"', lowered.compile().as_text())
    for part in PARTS:
        of_part = [each for each in names if re.search(rf"moe\)*/.*\b{part}\b", each)]
        assert {"transpose" in each for each in of_part} == {False, True}, part
    calls = {each for each in names if each.endswith("jax_ep_dispatch")}
    assert calls and all("/dispatch/" in each or "/combine/" in each for each in calls)
    assert "moe" not in lowered.as_text()  # names are in locations alone, not in the program
