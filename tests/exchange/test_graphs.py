"""Transport `p2p` in CUDA graphs, which XLA captures from five calls on."""

import dataclasses

import jax
import pytest

import cases
import jax_ep
from captured_graphs import N_PAIRS, Chain, group_of_equal_size, is_captured
from harness import AXIS, config_of, make_mesh

pytestmark = pytest.mark.gpu


@pytest.fixture
def mesh():
    return make_mesh(4 if len(jax.devices()) >= 4 else len(jax.devices()))


@pytest.fixture
def config(mesh, request):
    """The config of a group that no other test opens."""
    timeout_s = 20.0 + len(request.node.name) / 1000
    return config_of(cases.SMALL[mesh.size], timeout_s=timeout_s)


def test_calls_are_captured(mesh, config) -> None:
    with jax_ep.ep_init(mesh, AXIS, config, transport="p2p") as group:
        run = Chain(group)
        wanted = [run() for _ in range(2)][-1]
        assert is_captured(group)
        for _ in range(5):
            assert run() == wanted
        calls = [each.dispatch_calls for each in group.stats()]
        assert calls == [7 * N_PAIRS] * mesh.size
        # One check for all calls.
        assert run.compiled.as_text().count('custom_call_target="jax_ep_check"') == 1


def test_a_graph_outlives_its_group(mesh, config) -> None:
    """Its buffers are kept, and the next equal group gets them."""
    group = jax_ep.ep_init(mesh, AXIS, config, transport="p2p")
    run = Chain(group)
    wanted = [run() for _ in range(2)][-1]
    assert is_captured(group)
    addresses = group.dev_ptrs
    for _ in range(2):
        group.close()
        with pytest.raises(jax.errors.JaxRuntimeError, match="is not open"):
            run()
        other = group_of_equal_size(mesh, config)
        group = jax_ep.ep_init(mesh, AXIS, config, transport="p2p")
        assert (group.dev_ptrs == addresses).all()
        assert [each.dispatch_calls for each in group.stats()] == [0] * mesh.size
        assert run() == wanted
        calls = [each.dispatch_calls for each in group.stats()]
        assert calls == [N_PAIRS] * mesh.size
        other.close()
    group.close()


def test_a_graph_in_the_memory_of_another_group_outlives_both(mesh, config) -> None:
    sizes = dataclasses.replace(config, max_tokens_per_rank=2 * config.max_tokens_per_rank)
    large = jax_ep.ep_init(mesh, AXIS, sizes, transport="p2p")
    group = jax_ep.ep_init(mesh, AXIS, config, memory_of=large)
    run = Chain(group)
    wanted = [run() for _ in range(2)][-1]
    assert is_captured(group)
    addresses = group.dev_ptrs
    for _ in range(2):
        large.close()
        assert run() == wanted
        group.close()
        with pytest.raises(jax.errors.JaxRuntimeError, match="is not open"):
            run()
        other = group_of_equal_size(mesh, sizes)
        large = jax_ep.ep_init(mesh, AXIS, sizes, transport="p2p")
        group = jax_ep.ep_init(mesh, AXIS, config, memory_of=large)
        assert (group.dev_ptrs == addresses).all()
        assert run() == wanted
        other.close()
    large.close()
    group.close()


def test_buffers_without_a_graph_are_freed(mesh) -> None:
    """Together, the buffers of these groups would exceed the memory that XLA leaves."""
    config = jax_ep.EPConfig(
        n_experts=mesh.size, top_k=1, hidden_size=8192, max_tokens_per_rank=2**14, recv_capacity=16
    )
    for _ in range(60):
        jax_ep.ep_init(mesh, AXIS, config, transport="p2p").close()
