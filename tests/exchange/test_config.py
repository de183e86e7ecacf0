"""Values that `EPConfig` and `ep_init` accept, reject and compute."""

import copy
import dataclasses
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cases
import jax_ep
import oracle
import suite
from harness import AXIS, config_of, group_of, make_mesh, on_mesh, put

VALID = {"n_experts": 16, "top_k": 4, "hidden_size": 64, "max_tokens_per_rank": 8}


def config(**changes) -> jax_ep.EPConfig:
    return jax_ep.EPConfig(**(VALID | changes))


def test_defaults_are_the_documented_ones():
    defaults = config()
    assert defaults.token_format == jax_ep.BF16()
    assert jnp.dtype(defaults.combine_dtype) == jnp.bfloat16
    assert (defaults.fused_shared_expert, defaults.skip_a2a) == (False, False)
    assert defaults.zero_unused_rows is False
    assert defaults.recv_capacity is None
    assert defaults.on_drop == "count"
    assert (defaults.n_gpus_per_node, defaults.n_nodes) == (None, None)
    assert defaults.n_sms is None
    assert defaults.timeout_s == 60.0
    assert defaults.name is None


def test_bf16_is_plain_bfloat16():
    assert jax_ep.BF16() == jax_ep.Plain(jnp.bfloat16)
    assert hash(jax_ep.BF16()) == hash(jax_ep.Plain(jnp.bfloat16))
    assert jax_ep.BF16() != jax_ep.Plain(jnp.float32)


def test_equal_arguments_give_equal_configs_with_equal_hashes():
    assert config() == config(combine_dtype="bfloat16")
    assert hash(config()) == hash(config(combine_dtype=jnp.dtype("bfloat16")))
    assert config() != config(top_k=2)
    assert config(n_experts=np.int64(16)) == config()


def test_a_config_is_immutable():
    with pytest.raises(dataclasses.FrozenInstanceError):
        config().top_k = 3


def test_parameters_are_keyword_only():
    with pytest.raises(TypeError):
        jax_ep.EPConfig(16, 4, 64, 8)


OPTIONAL = ["recv_capacity", "n_gpus_per_node", "n_nodes", "n_sms"]


@pytest.mark.parametrize("value", [0, -1])
@pytest.mark.parametrize("name", [*VALID, *OPTIONAL])
def test_sizes_are_positive(name, value):
    with pytest.raises(ValueError, match=name):
        config(**{name: value})


@pytest.mark.parametrize("value", [2.5, "8"])
@pytest.mark.parametrize("name", [*VALID, *OPTIONAL])
def test_sizes_are_integers(name, value):
    with pytest.raises((TypeError, ValueError), match=name):
        config(**{name: value})


@pytest.mark.parametrize("name", VALID)
def test_sizes_must_be_given(name):
    with pytest.raises((TypeError, ValueError), match=name):
        config(**{name: None})


def test_a_token_has_at_most_as_many_choices_as_there_are_experts():
    assert config(top_k=16).top_k == 16
    for shared in (False, True):  # a shared expert is no choice
        with pytest.raises(ValueError, match="top_k must be at most n_experts; got top_k=17, n_"):
            config(top_k=17, fused_shared_expert=shared)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"top_k": 99}, "top_k must be at most n_experts"),
        ({"timeout_s": "60"}, "timeout_s must be a number"),
        ({"n_expert": 8}, "A pickled EPConfig has a field 'n_expert', which this version"),
        ({"hidden_size": None}, "hidden_size must be a positive integer"),
    ],
)
def test_an_unpickled_config_is_checked(changes, message):
    """tests/faults/pickles.py has more."""
    data = pickle.dumps(config())
    assert pickle.loads(data) == copy.copy(config()) == config()
    with pytest.raises(ValueError, match=message):
        object.__new__(jax_ep.EPConfig).__setstate__(vars(config()) | changes)


def test_a_pickle_of_an_earlier_version_may_lack_fields_that_have_defaults():
    old = object.__new__(jax_ep.EPConfig)
    old.__setstate__(VALID)
    assert old == config()
    with pytest.raises(TypeError, match=r"EPConfig.*missing 3 required .*'top_k'"):
        old.__setstate__({"n_experts": 4})


@pytest.mark.parametrize("value", ["", "a b", "a-b", "1st", "x" * 33, "é", "a\n", 3, b"decode"])
def test_a_name_is_a_short_identifier(value):
    with pytest.raises(ValueError, match="name must be None or at most 32 letters"):
        config(name=value)


def test_kinds_of_strings_do_not_make_groups_different():
    mesh = make_mesh(2)
    groups = [
        jax_ep.ep_init(mesh, kind(AXIS), config(name=kind("decode")), "xla")
        for kind in (str, np.str_)
    ]
    assert groups[0] == groups[1]
    assert groups[0].key == groups[1].key


def test_groups_of_different_names_are_different(transport):
    case = cases.SMALL[1]
    groups = [group_of(case, transport, name=name) for name in (None, "decode", "prefill")]
    assert len(set(groups)) == 3
    assert groups[1] == group_of(case, transport, name="decode")
    assert groups[1].key.startswith(f"decode-{transport}-ep1-")
    assert "EPGroup(decode-" in repr(groups[1])


def test_errors_name_the_group(transport):
    case = cases.SMALL[1]
    with group_of(case, transport, name="decode") as group:
        tokens = jnp.ones((2, case.hidden_size), jnp.bfloat16)
        ids = jnp.zeros((2, case.top_k), jnp.int32)

        def run(body):
            jax.block_until_ready(on_mesh(group.mesh, body)(*put(group.mesh, [tokens])))

        def with_wrong(name):
            def body(x):
                rows = jax_ep.dispatch(group, x, ids[:1] if name == "topk_ids" else ids)
                out = rows.tokens[:-1] if name == "expert_out" else rows.tokens
                return jax_ep.combine(group, out, rows)

            return body

        for call, name in ("dispatch", "topk_ids"), ("combine", "expert_out"):
            with pytest.raises(ValueError, match=f"^{call} of group decode: {name} must have"):
                run(with_wrong(name))
        with pytest.raises(ValueError, match="dispatch of group decode must be called inside"):
            jax_ep.dispatch(group, tokens, ids)
        with pytest.raises(TypeError, match="combine of group decode: dispatched must be"):
            run(lambda x: jax_ep.combine(group, x, x))
    with pytest.raises(ValueError, match="dispatch: group decode-.* is closed"):
        jax_ep.dispatch(group, tokens, ids)


def test_an_unpickled_format_is_checked():
    with pytest.raises(ValueError, match="scales_layout must be one of"):
        object.__new__(jax_ep.MXFP8).__setstate__({"scales_layout": "diagonal"})


@pytest.mark.parametrize("value", [0, -1.0, float("nan")])
def test_the_timeout_is_positive(value):
    with pytest.raises(ValueError, match="timeout_s"):
        config(timeout_s=value)


@pytest.mark.parametrize("value", ["soon", None])
def test_the_timeout_is_a_number(value):
    with pytest.raises((TypeError, ValueError), match="timeout_s"):
        config(timeout_s=value)


@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.int32, jnp.float64])
def test_combine_dtype_is_a_float_of_16_or_32_bits(dtype):
    with pytest.raises(ValueError, match="combine_dtype"):
        config(combine_dtype=dtype)


@pytest.mark.parametrize("value", [jnp.bfloat16, "BF16", None])
def test_token_format_is_a_token_format(value):
    with pytest.raises((TypeError, ValueError), match="token_format"):
        config(token_format=value)


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.float64])
def test_plain_takes_only_the_dtypes_that_travel_unquantized(dtype):
    with pytest.raises(ValueError, match="dtype"):
        jax_ep.Plain(dtype)


@pytest.mark.parametrize("flags", cases.FLAGS)
@pytest.mark.parametrize("name", ["plain", "blockwise_fp8"])
def test_the_worst_case_counts_the_shared_expert(name, flags, transport):
    """With `skip_a2a`, a rank has only its own tokens, and a share of the shared expert's."""
    case = cases.SMALL[4].replace(
        token_format=name, max_tokens=13, hidden_size=128, **cases.FLAGS[flags]
    )
    group = group_of(case, transport)
    assert group.n_local_experts == 4
    rows = {"shared": 13 * 4 * 4 + 13, "skip_a2a": 13 * 4, "both": 13 * 4 + 4}[flags]
    if name == "blockwise_fp8":
        rows += 3 * (4 + case.fused_shared_expert)
        rows += -rows % 4
    assert group.max_recv_tokens == suite.n_rows_of(case) == rows


@pytest.mark.parametrize("n_ranks", sorted(cases.SMALL))
def test_a_group_knows_its_sizes(n_ranks, transport):
    case = cases.SMALL[n_ranks]
    group = group_of(case, transport)
    assert group.config == config_of(case)
    assert group.axis_name == AXIS
    assert group.n_ranks == n_ranks
    assert group.n_local_experts == case.n_experts // n_ranks
    assert group.transport == transport
    devices = list(group.mesh.devices.flat)
    here = [r for r, d in enumerate(devices) if d in jax.local_devices()]
    assert list(group.ranks) == here
    assert group.max_recv_tokens == oracle.worst_case_rows(
        n_ranks, case.n_experts, case.top_k, case.max_tokens
    )
    assert group.dev_ptrs.shape == (len(here), 2, 3)
    assert group.dev_ptrs.dtype == np.uint64
    tokens = case.n_ranks * case.max_tokens * case.hidden_size * 2  # bytes that ranks may send
    assert group.memory >= tokens if transport == "p2p" else group.memory == 0


def test_ranks_are_counted_along_the_axis_only(transport):
    group = group_of(cases.SMALL[4], transport, make_mesh(4, dp=2))
    assert list(group.ranks) == [0, 1, 2, 3] * 2


def test_recv_capacity_sets_the_number_of_rows(transport):
    case = cases.SMALL[4]
    worst = oracle.worst_case_rows(4, case.n_experts, case.top_k, case.max_tokens)
    for rows in (1, worst):
        assert group_of(case, transport, recv_capacity=rows).max_recv_tokens == rows
    for rows in (worst + 1, 2**31 - 1):
        assert group_of(case, transport, recv_capacity=rows).max_recv_tokens == worst


def test_equal_arguments_give_equal_groups(transport):
    case = cases.SMALL[2]
    first, second = (group_of(case, transport) for _ in range(2))
    assert first == second
    assert hash(first) == hash(second)
    assert first != group_of(case, transport, timeout_s=7.0)


def test_a_copy_of_a_group_is_the_group(transport):
    with group_of(cases.SMALL[2], transport) as group:
        assert copy.copy(group) is group
        assert copy.deepcopy({"group": group})["group"] is group


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("axis_name", ["ep", ("dp", "ep")])
def test_a_pickled_group_is_opened_again(axis_name, transport):
    mesh = make_mesh(2, dp=2)
    case = cases.QUANTIZED_SMALL["mxfp8"]
    with jax_ep.ep_init(mesh, axis_name, config_of(case), transport) as group:
        data = pickle.dumps({"group": group})
        again = pickle.loads(data)["group"]
        assert again == group
        assert hash(again) == hash(group)
        assert again.mesh == mesh
        again.close()
    assert not (reopened := pickle.loads(data)["group"]).closed
    reopened.close()


def test_a_pickled_group_needs_its_devices(transport, monkeypatch):
    with group_of(cases.SMALL[2], transport) as group:
        data = pickle.dumps(group)
    devices = jax.devices()
    monkeypatch.setattr(jax, "devices", lambda *_: devices[:1])
    missing = "A pickled EPGroup must hold .* Unpickle it where JAX has these devices"
    with pytest.raises(ValueError, match=missing):
        pickle.loads(data)


def test_a_pickled_group_needs_its_platform(transport):
    with group_of(cases.SMALL[2], transport) as group:
        platform = group.mesh.devices.flat[0].platform
        data = pickle.dumps(group).replace(platform.encode(), b"x" * len(platform))
    message = "A pickled EPGroup must hold the platform, .* got 'x+', .* or make a group"
    with pytest.raises(ValueError, match=message):
        pickle.loads(data)


@pytest.mark.usefixtures("one_process")
def test_a_group_may_be_opened_in_a_traced_function(transport):
    case = cases.SMALL[2]
    mesh, inputs = make_mesh(2), suite.make_inputs(case)

    def body(tokens, topk_ids):
        group = jax_ep.ep_init(mesh, AXIS, config_of(case), transport)
        rows = jax_ep.dispatch(group, tokens, topk_ids)
        return jax_ep.combine(group, rows.tokens, rows)

    out = on_mesh(mesh, body)(*put(mesh, inputs.tokens, inputs.topk_ids))
    assert np.isfinite(np.float32(out)).all()


def test_a_mesh_without_devices_is_refused(transport):
    mesh = make_mesh(2)

    def traced(x):
        jax_ep.ep_init(jax.sharding.get_abstract_mesh(), AXIS, config_of(cases.SMALL[2]), transport)
        return x

    with jax.set_mesh(mesh), pytest.raises(TypeError, match=r"Call ep_init outside of jax\.jit"):
        jax.jit(traced)(1.0)


def test_a_group_is_a_context_manager_and_may_be_closed_twice(transport):
    with group_of(cases.SMALL[2], transport, timeout_s=8.0) as group:
        assert not group.closed
    assert group.closed
    group.close()


def test_experts_must_divide_evenly_among_ranks():
    with pytest.raises(ValueError, match=r"n_experts.*n_ranks.*15.*4"):
        jax_ep.ep_init(make_mesh(4), AXIS, config(n_experts=15))


def test_the_axis_must_be_in_the_mesh():
    with pytest.raises(ValueError, match="tp"):
        jax_ep.ep_init(make_mesh(4), "tp", config())


@pytest.mark.parametrize("name", ["p2p", "nvshmem", "ncll", ""])
def test_a_transport_that_cannot_serve_is_rejected(name):
    if jax.default_backend() != "cpu":
        pytest.skip("for CPU devices only")
    with pytest.raises(ValueError, match="(?i)transport"):
        jax_ep.ep_init(make_mesh(4), AXIS, config(), transport=name)


def test_nodes_partition_the_ranks():
    given = {"n_gpus_per_node": 2, "n_nodes": 2}
    assert jax_ep.ep_init(make_mesh(4), AXIS, config(**given)).n_ranks == 4
    with pytest.raises(ValueError, match="n_nodes"):
        jax_ep.ep_init(make_mesh(8), AXIS, config(**given))
    assert config().nodes(4) == (4, 1)
    for either in ({"n_gpus_per_node": 2}, {"n_nodes": 2}):
        assert config(**either).nodes(4) == (2, 2)
        assert config(**either).routed(4).n_nodes == 2
        assert config(**either, skip_a2a=True).routed(4).n_nodes == 1


@pytest.mark.usefixtures("one_process")
def test_a_group_names_the_transport_that_auto_selected():
    group = jax_ep.ep_init(make_mesh(4), AXIS, config())
    expected = ("host",) if jax.default_backend() == "cpu" else ("p2p", "xla")
    assert group.transport in expected
