"""The benchmarks' items `matmuls-*`: groups, limits, checks."""

import functools
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_ep

sys.path.append(str(pathlib.Path(__file__).parents[2] / "benchmarks"))

import matmuls  # noqa: E402
import plan  # noqa: E402
import timing  # noqa: E402

SIZES = (128, 256, 4)  # H, F, groups


def make_item(*operations: str, names: tuple[str, ...] = ("jax_ep",)) -> plan.Item:
    return plan.Item(
        "matmuls-tiny",
        "matmuls",
        implementations=names,
        chains=dict.fromkeys(operations, (1, 2)),
        repeats=timing.Repeats(max_samples=1, seconds=1.0),
        sizes=SIZES,
        means=(4,),
    )


def measured(item: plan.Item) -> tuple[list[dict], set[tuple[str, str, str]]]:
    """Rows of table `matmuls`; the case, operation and implementation of each time."""
    lines = list(matmuls.measure(item, jax.devices("cpu")[0]))
    found = [line["times"] for line in lines if "times" in line]
    assert all(len(row["us"]) == 3 and row["clock"] == "chain" for row in found)
    keys = [(row["case"], row["operation"], row["implementation"]) for row in found]
    assert len(set(keys)) == len(keys)
    return [line["matmuls"] for line in lines if "matmuls" in line], set(keys)


@pytest.mark.parametrize("routing", matmuls.ROUTINGS)
@pytest.mark.parametrize("mean", [16, 64, 128, 256, 512, 1024])
def test_groups_have_the_mean_by_a_seed(routing, mean) -> None:
    sizes = matmuls.group_sizes(routing, 32, mean)
    assert sizes.shape == (32,) and sizes.sum() == 32 * mean
    assert (sizes == matmuls.group_sizes(routing, 32, mean)).all()
    if routing == "equal":
        assert (sizes == mean).all()
    if routing == "multinomial":
        assert 0 < sizes.std() < 2 * mean**0.5
    if routing == "zipf":  # the largest has nearly a quarter of all rows, the smallest 1 / 130
        assert sizes.min() >= 1 and sizes.max() > 6 * mean and (sizes < mean).sum() > 16


@pytest.mark.thorough
def test_every_routing_has_the_limits_of_its_operation() -> None:
    rows, keys = measured(make_item(*plan.MATMULS))
    cases = {f"tiny {which}, 4 rows": size for which, size in (("first", 512), ("second", 128))}
    assert {(row["name"], row["limits"], row["n"]) for row in rows} == {
        (f"{case}, {routing}", case, n) for case, n in cases.items() for routing in matmuls.ROUTINGS
    }
    limits = {("bfloat16", "dense"), ("FP8", "dense"), *((o, "memory") for o in plan.MATMULS)}
    assert keys == {
        *((row["name"], operation, "jax_ep") for row in rows for operation in plan.MATMULS),
        *((case, *limit) for case in cases for limit in limits),
    }


def programs_of(item: plan.Item) -> set[tuple[str, str]]:
    x = matmuls.make_operands(n_rows=16, n_groups=4, k=128, n=256)
    return set(matmuls.make_programs(item, x, np.array([1, 9, 4, 2])))


def test_other_implementations_are_measured_beside_ours() -> None:
    found = programs_of(make_item("bfloat16", names=("jax_ep", plan.RAGGED_DOT)))
    assert {name for _, name in found} == {"jax_ep", plan.RAGGED_DOT, "dense", "memory"}


@pytest.mark.thorough
@pytest.mark.parametrize("name", plan.MATMULS)
def test_a_wrong_matmul_is_noticed(monkeypatch, name) -> None:
    jax.clear_caches()  # of programs with the right one
    right = jax_ep.grouped_matmul
    monkeypatch.setattr(jax_ep, "grouped_matmul", lambda *args, **kw: 1.25 * right(*args, **kw))
    with pytest.raises(AssertionError, match=f"{name} must be within .* of NumPy's"):
        measured(make_item(name))
    jax.clear_caches()


@pytest.mark.parametrize(("n_read", "n_written"), [(2**20, 2**12), (2**12, 2**20), (2**16, 2**16)])
def test_the_passes_read_and_write_as_many_bytes(n_read, n_written) -> None:
    function, arrays = matmuls.memory(n_read, n_written)
    assert sum(x.nbytes for x in arrays) == pytest.approx(n_read, abs=4 * matmuls._PASS_WORDS)
    results = jax.eval_shape(function, None, *arrays)
    written = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(results))
    assert written == pytest.approx(n_written, abs=n_read / matmuls._PASS_WORDS + 4)


@pytest.mark.thorough
def test_bytes_of_a_matmul_are_those_of_rows_weights_and_results() -> None:
    x = matmuls.make_operands(n_rows=16, n_groups=4, k=128, n=256)
    n_bytes = functools.partial(matmuls.n_bytes, offsets=np.zeros(5, np.uint32))
    rows, weights, results = 16 * 128, 4 * 128 * 256, 16 * 256
    assert n_bytes(matmuls.ours("bfloat16", x)) == (2 * (rows + weights), 2 * results)
    assert n_bytes(matmuls.ours("gradient of weights", x)) == (2 * (rows + results), 2 * weights)
    scales = 4 * (16 + 4 * 2)
    assert n_bytes(matmuls.ours("FP8", x)) == (rows + weights + scales, 2 * results)


def test_every_call_of_a_chain_is_made() -> None:
    """XLA merges no steps, although their operands are equal."""
    x = matmuls.make_operands(n_rows=16, n_groups=4, k=128, n=256)
    found = {("bfloat16", "dense"): matmuls.dense("bfloat16", matmuls.ours("bfloat16", x), x)}
    sizes = {routing: np.full(4, 4) for routing in matmuls.ROUTINGS}
    pairs = matmuls.make_chains((1, 2), jax.devices("cpu")[0], found, sizes)
    ((short, long),) = pairs.values()
    counts = [call.as_text().count(" dot(") for call, _ in (short, long)]
    assert counts == [1, 2]
    assert all(jnp.isfinite(jax.tree.leaves(call(*args))[1]).all() for call, args in (short, long))
