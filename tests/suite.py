"""The semantics, once, for every transport: runs a case and compares with the oracle.

Everything is compared in bits. Whatever the contract leaves undefined is poisoned: the
unused rows of `expert_out` and of `Dispatched` hold NaN and absurd indices before
combine, and so do the weights of choices that have no row.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes  # noqa: F401 (gives NumPy its bfloat16)
import numpy as np

import jax_ep
import oracle
import oracle_formats as formats
import routing
from harness import AXIS, assert_same_bits, config_of, n_groups, on_mesh, place, shards

ABSURD_INDEX = 1 << 30


@dataclasses.dataclass(frozen=True)
class Inputs:
    """One group's inputs, a list over its ranks each, and where its rows go."""

    tokens: list  # [T, H]
    topk_ids: list  # int32[T, K]
    topk_weights: list  # float32[T, K]; NaN where the choice has no row
    expert_out: list  # [C, H]; NaN in unused rows
    residual: list  # [T, H]
    routed: oracle.Routed

    def arrays(self) -> tuple:
        """Gives the operands of `forward`, in order."""
        return (
            self.tokens,
            self.topk_ids,
            self.topk_weights,
            self.expert_out,
            self.residual,
        )


def n_rows_of(case) -> int:
    """Gives C."""
    return case.recv_capacity or oracle.worst_case_rows(
        case.n_ranks,
        case.n_experts,
        case.top_k,
        case.max_tokens,
        alignment_of(case),
        **case.flags,
    )


def layout_of(case) -> str:
    """Gives the layout of the scales."""
    return case.scales_layout or formats.LAYOUT.get(case.token_format, "row_major")


def alignment_of(case) -> int:
    """Gives the rows that groups are padded to a multiple of."""
    return formats.ROW_ALIGNMENT[layout_of(case)]


def make_inputs(case, topk_ids=None, group: int = 0) -> Inputs:
    """Builds seeded inputs of one group, with the case's routing or the given one."""
    if topk_ids is None:
        topk_ids = routing.make(
            case.routing,
            case.seed + 1000 * group,
            case.n_ranks,
            case.n_tokens,
            case.n_experts,
            case.top_k,
        )
        if case.skip_a2a:
            topk_ids = np.broadcast_to(topk_ids[:1], topk_ids.shape)
    rng = np.random.default_rng([case.seed, group, case.hidden_size])
    routed = oracle.route(
        case.n_ranks,
        case.n_experts,
        n_rows_of(case),
        list(topk_ids),
        alignment_of(case),
        **case.flags,
    )
    shape = (case.n_ranks, case.n_tokens, case.hidden_size)
    tokens = _normal(rng, shape, case.token_dtype)
    weights = rng.uniform(0.05, 1.0, topk_ids.shape).astype(np.float32)
    if case.skip_a2a:
        tokens[1:], weights[1:] = tokens[0], weights[0]
    weights[np.stack(routed.places)[..., 0] < 0] = np.nan
    return Inputs(
        tokens=list(tokens),
        topk_ids=list(topk_ids),
        topk_weights=list(weights),
        expert_out=_poisoned_rows(rng, routed, case.hidden_size, case.combine_dtype),
        residual=list(_normal(rng, shape, case.combine_dtype)),
        routed=routed,
    )


def _normal(rng, shape, dtype) -> np.ndarray:
    return rng.standard_normal(shape, np.float32).astype(dtype)


def _poisoned_rows(rng, routed: oracle.Routed, hidden_size: int, dtype) -> list:
    result = []
    for rows in routed.rows:
        array = np.full((routed.n_rows, hidden_size), np.nan, dtype)
        array[: len(rows)] = _normal(rng, (len(rows), hidden_size), dtype)
        array[: len(rows)][rows[:, 0] < 0] = np.nan  # padding
        result.append(array)
    return result


def fields(dispatched) -> dict:
    """Gives every field of a `Dispatched` that has a defined value."""
    named = {
        "tokens": dispatched.tokens,
        "row_offsets": dispatched.row_offsets,
        "group_sizes": dispatched.group_sizes,
        "expert_ids": dispatched.expert_ids,
        "src_info": dispatched.src_info,
        "n_dropped": dispatched.n_dropped,
        "n_invalid": dispatched.n_invalid,
        "topk_ids": dispatched.topk_ids,
    }
    for name in ("row_weights", "scales", "scales_offsets"):
        if getattr(dispatched, name) is not None:
            named[name] = getattr(dispatched, name)
    return named


def poison(dispatched):
    """Overwrites what the contract leaves undefined: the rows that are not in use."""
    row = jnp.arange(dispatched.tokens.shape[0], dtype=jnp.uint32)
    used = row < dispatched.row_offsets[-1]
    is_integer = jnp.issubdtype(dispatched.tokens.dtype, jnp.integer)
    poison = jnp.array(255 if is_integer else jnp.nan, dispatched.tokens.dtype)
    changes = {
        "tokens": jnp.where(used[:, None], dispatched.tokens, poison),
        "src_info": jnp.where(used[:, None], dispatched.src_info, ABSURD_INDEX),
    }
    if dispatched.row_weights is not None:
        # The shared expert's rows, group 0, have weights, which combine does not read.
        if dispatched.group.config.fused_shared_expert:
            used &= row >= dispatched.row_offsets[1]
        changes["row_weights"] = jnp.where(used, dispatched.row_weights, jnp.nan)
    return dataclasses.replace(dispatched, **changes)


def forward(group, weights: str, *, split: bool = False, input_scale=None):
    """Gives the per-rank function that calls everything that `weights` mode allows.

    With `split`, the calls are the asynchronous pairs.
    """

    def dispatch(*args):
        if split:
            flight = jax_ep.dispatch_async(group, *args, input_scale=input_scale)
            return jax_ep.dispatch_wait(group, flight)
        return jax_ep.dispatch(group, *args, input_scale=input_scale)

    def combine(*args, **kwargs):
        if split:
            flight = jax_ep.combine_async(group, *args, **kwargs)
            return jax_ep.combine_wait(group, flight)
        return jax_ep.combine(group, *args, **kwargs)

    def body(tokens, topk_ids, topk_weights, expert_out, residual):
        at_row = (topk_weights,) if weights == "row" else ()
        at_source = (topk_weights,) if weights == "source" else ()
        dispatched = dispatch(tokens, topk_ids, *at_row)
        result = fields(dispatched)
        dispatched = poison(dispatched)
        result["combined"] = combine(expert_out, dispatched, *at_source)
        result["with_residual"] = combine(
            expert_out, dispatched, *at_source, residual=residual
        )
        if weights == "none":
            result["unreduced"] = combine(expert_out, dispatched, reduce=False)
        return result

    return body


def expected(case, inputs: Inputs) -> list[dict]:
    """Gives, for each rank, what `forward` must return, undefined rows cut off."""
    weights = None if case.weights == "none" else inputs.topk_weights
    dispatched = _dispatched(case, inputs, inputs.tokens, weights)
    combine = functools.partial(oracle.combine, inputs.routed, inputs.expert_out)
    weighted = {"topk_weights": weights, "weights_at": case.weights}
    outs = {
        "combined": combine(**weighted),
        "with_residual": combine(**weighted, residual=inputs.residual),
    }
    if case.weights == "none":
        outs["unreduced"] = combine(reduce=False)
    quantised = _quantised(case, inputs) if case.token_format != "plain" else None
    results = []
    for rank, rows in enumerate(dispatched):
        named = {k: v for k, v in vars(rows).items() if v is not None}
        named |= quantised[rank] if quantised else {}
        named["topk_ids"] = inputs.topk_ids[rank]
        results.append(named | {name: out[rank] for name, out in outs.items()})
    return results


def _dispatched(case, inputs: Inputs, tokens: list, weights) -> list:
    return oracle.dispatch(
        case.n_ranks,
        case.n_experts,
        inputs.routed.n_rows,
        tokens,
        inputs.topk_ids,
        weights if case.weights == "row" else None,
        alignment_of(case),
        **case.flags,
    )


def _quantised(case, inputs: Inputs) -> list[dict]:
    """Gives, for each rank, codes and scales: both travel as tokens do."""
    name, scale = case.token_format, case.input_scale or 1.0
    quantised = [formats.quantize(name, x, scale) for x in inputs.tokens]
    codes = _dispatched(case, inputs, [each.codes for each in quantised], None)
    scales = _dispatched(case, inputs, [each.scales for each in quantised], None)
    results = []
    for row_codes, row_scales in zip(codes, scales, strict=True):
        is_packed = name in formats.PACKED
        tokens = row_codes.tokens if is_packed else row_codes.tokens.view(formats.E4M3)
        offsets = row_codes.row_offsets
        array, defined = formats.lay_out(
            layout_of(case), row_scales.tokens, offsets, inputs.routed.n_rows
        )
        named = {"tokens": tokens, "scales": Partial(array, defined)}
        if layout_of(case) == "atoms":
            named["scales_offsets"] = formats.scales_offsets(offsets)
        results.append(named)
    return results


@dataclasses.dataclass(frozen=True)
class Partial:
    """An array of which some elements are defined."""

    array: np.ndarray
    defined: np.ndarray


ROW_FIELDS = ("tokens", "src_info", "row_weights")


def assert_rank_matches(actual: dict, wanted: dict, n_rows: int, what: str) -> None:
    """Compares one rank's results: undefined rows are left out, all else is not."""
    assert sorted(actual) == sorted(wanted), what
    for name, value in wanted.items():
        got = actual[name]
        if isinstance(value, Partial):
            assert got.shape == value.array.shape, f"{what}, {name}"
            got, value = got[value.defined], value.array[value.defined]
        if name in ROW_FIELDS:
            assert got.shape == (n_rows, *value.shape[1:]), f"{what}, {name}"
            got = got[: len(value)]
        assert_same_bits(got, value, f"{what}, {name}")


@functools.cache
def compiled(
    mesh,
    config,
    transport: str,
    weights: str,
    split=False,
    check_vma=True,
    input_scale=None,
):
    """Gives the jitted `forward` and its group, once for each combination."""
    if input_scale is not None:
        input_scale = np.float32(input_scale)
    group = jax_ep.ep_init(mesh, AXIS, config, transport=transport)
    # With T = 0 the operands that are used may all be empty, and XLA refuses a mapped
    # function that has only empty operands: the unused ones stay.
    run = on_mesh(
        mesh,
        forward(group, weights, split=split, input_scale=input_scale),
        check_vma=check_vma,
        keep_unused=True,
    )
    return group, run


def check(
    case, transport: str, mesh, *, topk_ids=None, tokens=None, change=None, **options
) -> None:
    """Runs a case on every group of the mesh and compares all ranks' results.

    `topk_ids` and `tokens`, one array per rank, replace the case's own; `change` gives
    other `Inputs` for a group's.
    """
    config = config_of(case)
    options = {"input_scale": case.input_scale} | options
    group, run = compiled(mesh, config, transport, case.weights, **options)
    assert group.transport == transport
    inputs = [make_inputs(case, topk_ids, g) for g in range(n_groups(mesh))]
    if tokens is not None:
        inputs = [dataclasses.replace(each, tokens=list(tokens)) for each in inputs]
    if change is not None:
        inputs = [change(each) for each in inputs]
    wanted = [expected(case, each) for each in inputs]
    operands = zip(*(each.arrays() for each in inputs), strict=True)
    out = run(*(place(mesh, operand) for operand in operands))
    for (g, rank), actual in shards(mesh, out):
        n_rows = inputs[g].routed.n_rows
        what = f"{case.name} on {transport}, group {g}, rank {rank}"
        assert_rank_matches(actual, wanted[g][rank], n_rows, what)


def run_twice_same_bits(case, transport: str, mesh) -> None:
    """Two runs with the same input give the same bits, undefined rows left out."""
    _, run = compiled(mesh, config_of(case), transport, case.weights)
    inputs = [make_inputs(case, None, g) for g in range(n_groups(mesh))]
    operands = zip(*(each.arrays() for each in inputs), strict=True)
    operands = [place(mesh, operand) for operand in operands]
    first, second = (jax.block_until_ready(run(*operands)) for _ in range(2))
    pairs = zip(shards(mesh, first), shards(mesh, second), strict=True)
    for ((g, rank), one), (_, two) in pairs:
        used = len(inputs[g].routed.rows[rank])
        one = {k: v[:used] if k in ROW_FIELDS else v for k, v in one.items()}
        assert_rank_matches(two, one, inputs[g].routed.n_rows, f"rank {rank}")
