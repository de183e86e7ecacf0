"""`EPConfig(on_drop="raise")`: a dispatch that drops a row fails, on all devices."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jax_ep
import quick
from harness import AXIS, make_mesh, on_mesh, put, succeed_in_callbacks
from jax_ep.nnx import MoE
from nnx_layers import F, make_layer, make_tokens

pytestmark = [pytest.mark.usefixtures("one_process"), pytest.mark.xla_collectives]
R, L, K, H, T = 4, 2, 2, 128, 6
E = R * L
FORMATS = {"bfloat16": jax_ep.BF16(), "mxfp8": jax_ep.MXFP8()}
GROUPS = {
    "plain": {},
    "shared": {"fused_shared_expert": True},
    "same_tokens": {"skip_a2a": True},
    "nodes": {"n_nodes": 2},
    "zeros": {"zero_unused_rows": True},
}


@pytest.fixture(scope="module", autouse=True)
def no_failure_is_left():
    """JAX keeps the last failure of callbacks, and prints it when the process ends."""
    yield
    succeed_in_callbacks()


def open_group(transport, n_replicas=1, **options) -> jax_ep.EPGroup:
    n_devices = n_replicas * R
    if len(jax.devices()) < n_devices:
        pytest.skip(f"needs {n_devices} devices, found {len(jax.devices())}")
    devices = np.array(jax.devices()[:n_devices]).reshape(n_replicas, R)
    defaults = {"n_experts": E, "top_k": K, "hidden_size": H, "max_tokens_per_rank": T}
    config = jax_ep.EPConfig(**defaults | {"on_drop": "raise", "name": "train"} | options)
    return jax_ep.ep_init(jax.sharding.Mesh(devices, ("dp", "ep")), "ep", config, transport)


def make_ids(n_replicas=1) -> np.ndarray:
    """Different experts for each token, that of all ranks are not equally popular."""
    rng = np.random.default_rng(3)
    p = np.arange(1, E + 1) / np.arange(1, E + 1).sum()
    draws = [rng.choice(E, K, replace=False, p=p) for _ in range(n_replicas * R * T)]
    return np.stack(draws).astype(np.int32)


def run(group, ids, *, experts=lambda rows: rows.tokens * 2, wrap=jax.jit):
    """The output of a layer, and the gradients of tokens and weights."""

    def layer(tokens, ids, weights):
        rows = jax_ep.dispatch(group, tokens, ids, weights)
        numbers = jax_ep.dequantize(rows, jnp.bfloat16) * 2 if rows.scales is not None else None
        return jax_ep.combine(group, experts(rows) if numbers is None else numbers, rows)

    spec = jax.P(("dp", "ep"))
    mapped = jax.shard_map(layer, mesh=group.mesh, in_specs=spec, out_specs=spec)
    rng = np.random.default_rng(4)
    tokens = jnp.asarray(rng.normal(size=(len(ids), H)), jnp.bfloat16)
    weights = jnp.asarray(rng.random(ids.shape), jnp.float32)
    return jax.block_until_ready(wrap(mapped)(tokens, ids, weights))


def rows_of_ranks(ids, n_replicas=1) -> np.ndarray:
    """`[n_replicas, R]`, rows that arrive."""
    by_replica = ids.reshape(n_replicas, -1)
    return np.stack([np.bincount(each // L, minlength=R) for each in by_replica])


def gradients(mapped):
    """Of tokens and weights alone, by a loss whose value nothing uses."""

    def loss(tokens, ids, weights):
        return mapped(tokens, ids, weights).astype(jnp.float32).sum()

    return jax.jit(jax.grad(loss, (0, 2)))


def remat(mapped):
    return gradients(jax.checkpoint(mapped))


WRAPS = {"jit": jax.jit, "gradients": gradients, "remat": remat}


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("n_replicas", [1, 2])
def test_the_error_says_how_many_each_rank_dropped(n_replicas, wrap, transport):
    ids = make_ids(n_replicas)
    arriving = rows_of_ranks(ids, n_replicas)
    capacity = int(np.sort(arriving.ravel())[-2]) - 1  # two ranks drop
    group = open_group(transport, n_replicas, recv_capacity=capacity)
    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        run(group, ids, wrap=WRAPS[wrap])
    dropped = np.maximum(arriving - capacity, 0)
    found = re.search(
        r"dispatch of group train: rows must fit into recv_capacity=(\d+); (\d+) were dropped, "
        r"(.+)\. Raise recv_capacity to (\d+) or more, or balance the experts",
        str(caught.value),
    )
    assert found is not None, caught.value
    numbers = int(found[1]), int(found[2]), int(found[4])
    assert numbers == (capacity, dropped.sum(), arriving.max())
    text = r"(\d+) on rank (\d)" + (r" of replica (\d)" if n_replicas > 1 else "()")
    got = np.zeros_like(dropped)
    for n, rank, replica in re.findall(text, found[3]):
        got[int(replica or 0), int(rank)] = int(n)
    np.testing.assert_array_equal(got, dropped)
    # With that capacity, the same tokens fit.
    run(open_group(transport, n_replicas, recv_capacity=numbers[2]), ids, wrap=WRAPS[wrap])


@pytest.mark.thorough
@pytest.mark.parametrize("name", GROUPS)
def test_the_capacity_that_the_error_advises_has_room_for_padding(name, transport):
    options = GROUPS[name] | {"row_alignment": 4}
    ids = make_ids()
    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        run(open_group(transport, recv_capacity=4, **options), ids)
    found = re.search(r"Raise recv_capacity to (\d+) or more", str(caught.value))
    assert found is not None, caught.value
    run(open_group(transport, recv_capacity=int(found[1]), **options), ids)


def test_no_capacity_is_advised_where_none_is_larger(transport):
    group = open_group(transport, top_k=4)
    ids = np.zeros((R * T, 4), np.int32)  # four times the same expert, of two on a rank
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"cannot be larger; let each token name"):
        run(group, ids)


@pytest.mark.thorough
@pytest.mark.parametrize("token_format", FORMATS)
@pytest.mark.parametrize("name", GROUPS)
def test_without_drops_the_bits_are_those_of_counting(name, token_format, transport):
    ids, options = make_ids(), GROUPS[name] | {"token_format": FORMATS[token_format]}
    wanted = run(open_group(transport, on_drop="count", **options), ids)
    np.testing.assert_array_equal(run(open_group(transport, **options), ids), wanted)


@pytest.mark.parametrize("token_format", FORMATS)
@pytest.mark.parametrize("name", GROUPS)
def test_every_kind_of_group_raises(name, token_format, transport):
    options = GROUPS[name] | {"token_format": FORMATS[token_format], "recv_capacity": 4}
    with pytest.raises(jax.errors.JaxRuntimeError, match="rows must fit into recv_capacity=4; "):
        run(open_group(transport, **options), make_ids())


def test_a_call_has_a_capacity_of_its_own(transport):
    """Also where the rows themselves are not used, and in an asynchronous call."""
    group, spec = open_group(transport), jax.P(("dp", "ep"))

    def layer(tokens, ids, results):
        in_flight = jax_ep.dispatch_async(group, tokens, ids, recv_capacity=4)
        rows = jax_ep.dispatch_wait(group, in_flight)
        return jax_ep.combine(group, results, rows)

    mapped = jax.jit(jax.shard_map(layer, mesh=group.mesh, in_specs=spec, out_specs=spec))
    tokens, results = jnp.ones((R * T, H), jnp.bfloat16), jnp.ones((R * 4, H), jnp.bfloat16)
    with pytest.raises(jax.errors.JaxRuntimeError, match="must fit into recv_capacity=4; "):
        jax.block_until_ready(mapped(tokens, make_ids(), results))


@pytest.mark.thorough
def test_a_call_without_jit_raises():
    with pytest.raises(jax.errors.JaxRuntimeError, match="must fit into recv_capacity=4; "):
        run(open_group("host", recv_capacity=4), make_ids(), wrap=lambda layer: layer)


def test_the_group_serves_after_the_error(transport):
    group, balanced = open_group(transport, recv_capacity=T * K), np.arange(R * T * K) % E
    for _ in range(2):
        with pytest.raises(jax.errors.JaxRuntimeError, match="rows must fit"):
            run(group, np.zeros((R * T, K), np.int32))
        run(group, balanced.reshape(R * T, K).astype(np.int32))


def check_every_process_raises() -> None:
    """A target of `processes.run_processes`, with at least two ranks in all."""
    transport = "xla" if jax.default_backend() == "cpu" else "p2p"
    n_ranks = len(jax.devices())
    config = jax_ep.EPConfig(
        n_experts=n_ranks * L,
        top_k=K,
        hidden_size=H,
        max_tokens_per_rank=T,
        recv_capacity=T * K,
        on_drop="raise",
        timeout_s=30.0,
    )
    mesh = make_mesh(n_ranks)
    group = jax_ep.ep_init(mesh, AXIS, config, transport)

    def layer(tokens, ids, weights):
        rows = jax_ep.dispatch(group, tokens, ids, weights)
        return jax_ep.combine(group, rows.tokens, rows)

    call = on_mesh(mesh, layer)
    weights = np.full((n_ranks, T, K), 1 / K, np.float32)
    tokens = np.ones((n_ranks, T, H), jnp.bfloat16)
    of_rank_0 = np.broadcast_to(np.arange(K, dtype=np.int32), (n_ranks, T, K))
    balanced = np.arange(n_ranks * T * K, dtype=np.int32).reshape(n_ranks, T, K) % (n_ranks * L)
    wanted = rf"{(n_ranks - 1) * T * K} were dropped, {(n_ranks - 1) * T * K} on rank 0\."
    for _ in range(2):
        with pytest.raises(jax.errors.JaxRuntimeError, match=wanted):
            jax.block_until_ready(call(*put(mesh, tokens, of_rank_0, weights)))
        for shard in call(*put(mesh, tokens, balanced, weights)).addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data, np.float32), 1)


def test_counting_costs_nothing():
    """The program has neither the callback nor the collective that raising adds."""

    def text(**options):
        group, spec = open_group("host", recv_capacity=4, **options), jax.P(("dp", "ep"))

        def layer(tokens, ids):
            rows = jax_ep.dispatch(group, tokens, ids)
            return jax_ep.combine(group, rows.tokens, rows)

        mapped = jax.shard_map(layer, mesh=group.mesh, in_specs=spec, out_specs=spec)
        shapes = jnp.ones((R * T, H), jnp.bfloat16), make_ids()
        return jax.jit(mapped).lower(*shapes).as_text()

    for each in ("all_gather", "callback", "stablehlo.case"):
        assert each in text() and each not in text(on_drop="count")


@pytest.mark.parametrize("value", ["Raise", True, None, b"raise", ["raise"]])
def test_other_values_are_refused(value):
    with pytest.raises(ValueError, match='on_drop must be "count" or "raise"; got '):
        open_group("xla", on_drop=value)


@nnx.jit
def run_layer(layer, tokens):
    return layer(tokens)


LAYERS = {
    "one_axis": {"axes": {"ep": 4}},
    "same_tokens": {"axes": {"ep": 2, "tp": 2}, "token_axes": "ep"},
    "sequence": {"axes": {"dp": 2, "ep": 2}, "token_axes": jax.P("dp", "ep")},
    "skip_a2a": {"axes": {"dp": 2, "ep": 2}, "config": {"skip_a2a": True}},
    "capacity_of_all": {"axes": {"ep": 4}, "capacity_axis": "ep"},
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", quick.params(LAYERS, {"same_tokens", "capacity_of_all"}))
def test_layers_raise_where_choices_exceed_their_capacity(name):
    options = LAYERS[name] | {"capacity_factor": 0.5, "on_limit": "raise"}
    tokens = make_tokens()
    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        jax.block_until_ready(run_layer(make_layer("auto", **options), tokens))
    message = (
        r"nnx.MoE: choices must fit into capacity_factor=0.5, .*; (\d+) were dropped, .* on rank"
    )
    found = re.search(message, str(caught.value))
    assert found is not None, caught.value
    layer = make_layer("auto", **options)  # `nnx.jit` has put failed results into the other one
    layer.on_limit = "count"
    output, report = run_layer(layer, tokens)
    # Devices that have the same tokens drop the same, and the report counts those once.
    n_alike = 2 if name in ("same_tokens", "skip_a2a") else 1
    assert int(found[1]) == n_alike * report.n_limited > 0
    layer.on_limit, layer.capacity_factor = "raise", None
    wanted, _ = run_layer(layer, tokens)
    layer.capacity_factor = 16.0  # enough for all
    output, report = run_layer(layer, tokens)
    assert report.n_limited == 0
    np.testing.assert_array_equal(output, wanted)


@pytest.mark.parametrize("name", LAYERS)
def test_layers_raise_where_rows_do_not_fit(name):
    config = {"recv_capacity": 8, "on_drop": "raise", "name": "layers"}
    options = LAYERS[name] | {"config": config | LAYERS[name].get("config", {})}
    if "capacity_axis" in options:
        options["capacity_factor"] = 16.0  # enough for all choices
    layer, tokens = make_layer("auto", **options), make_tokens()
    with pytest.raises(jax.errors.JaxRuntimeError, match="of group layers: rows must fit into"):
        jax.block_until_ready(run_layer(layer, tokens))


@pytest.mark.thorough
def test_stacked_layers_and_their_gradients_raise():
    """In `nnx.scan` under `nnx.remat`, one layer after the other."""
    config = {"recv_capacity": 40, "on_drop": "raise"}
    group, no_name = make_layer("auto", config=config).group, {nnx.PARTITION_NAME: None}

    @nnx.split_rngs(splits=3)
    @nnx.vmap(in_axes=0, out_axes=0, transform_metadata=no_name)
    def make(rngs):
        return MoE(group, F, rngs=rngs)

    @nnx.scan(in_axes=(0, nnx.Carry), out_axes=(nnx.Carry, 0), transform_metadata=no_name)
    @nnx.remat
    def apply(layer, x):
        return x + layer(x)[0], None

    @nnx.jit
    def gradients(layers, x):
        return nnx.grad(lambda layers: jnp.sum(apply(layers, x)[0]))(layers)

    layers, tokens = make(nnx.Rngs(0)), make_tokens()
    jax.block_until_ready(gradients(layers, tokens[:4, :1]))  # these fit
    with pytest.raises(jax.errors.JaxRuntimeError, match="rows must fit into recv_capacity=40"):
        jax.block_until_ready(gradients(layers, tokens))
