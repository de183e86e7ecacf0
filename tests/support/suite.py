"""The semantics of dispatch and combine: runs a case on a transport, compares with the oracle.

All comparisons are bitwise. What the contract leaves undefined is poisoned before combine: the
unused rows of `expert_out` and of `Dispatched` hold NaN and out-of-range indices, and so do the
weights of choices that have no row.
"""

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
from harness import AXIS, assert_same_bits, config_of, n_replicas, on_mesh, put_replicas, shards

OUT_OF_RANGE_INDEX = 1 << 30


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Inputs of one replica, each a list over its ranks, and the rows that they become."""

    tokens: list  # [T, H]
    topk_ids: list  # int32[T, K]
    topk_weights: list  # float32[T, K]; NaN where the choice has no row
    expert_out: list  # [C, H]; NaN in unused rows
    residual: list  # [T, H]
    routed: oracle.Routed

    def arrays(self) -> tuple:
        """The operands of `forward`, in order."""
        return (self.tokens, self.topk_ids, self.topk_weights, self.expert_out, self.residual)


def clear_unused(rows: jax.Array, row_offsets: jax.Array) -> jax.Array:
    """Zeroes what the contract leaves undefined in `[C, H]`, also in its cotangent."""
    row = jnp.arange(rows.shape[0], dtype=jnp.uint32)
    return jnp.where((row < row_offsets[-1])[:, None], rows, 0)


def n_rows_of(case) -> int:
    """Rows of the output of dispatch (C)."""
    sizes = case.n_ranks, case.n_experts, case.top_k, case.max_tokens, alignment_of(case)
    if case.expert_copies and case.recv_capacity is None:
        return oracle.worst_case_rows(*sizes, **case.flags, is_balanced=True)
    worst_case = oracle.worst_case_rows(*sizes, **case.flags)
    return min(case.recv_capacity or worst_case, worst_case)


def layout_of(case) -> str:
    """Layout of the scales."""
    return case.scales_layout or formats.LAYOUT.get(case.token_format, "row_major")


def alignment_of(case) -> int:
    """Groups of rows are padded to a multiple of so many rows."""
    return max(case.row_alignment, formats.ROW_ALIGNMENT[layout_of(case)])


def make_inputs(case, topk_ids=None, replica: int = 0) -> Inputs:
    """Seeded inputs of one replica, with the case's routing or the given one."""
    if topk_ids is None:
        topk_ids = _make_topk_ids(case, replica)
    rng = np.random.default_rng([case.seed, replica, case.hidden_size])
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
    weights[np.stack(routed.destinations)[..., 0] < 0] = np.nan
    return Inputs(
        tokens=list(tokens),
        topk_ids=list(topk_ids),
        topk_weights=list(weights),
        expert_out=_poisoned_rows(rng, routed, case.hidden_size, case.combine_dtype),
        residual=list(_normal(rng, shape, case.combine_dtype)),
        routed=routed,
    )


def _make_topk_ids(case, replica: int) -> np.ndarray:
    sizes = (case.n_ranks, case.n_tokens, case.n_experts, case.top_k)
    topk_ids = routing.make(case.routing, case.seed + 1000 * replica, *sizes)
    return np.broadcast_to(topk_ids[:1], topk_ids.shape) if case.skip_a2a else topk_ids


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
    """The fields of a `Dispatched` whose values are defined."""
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
    for name in ("copies", "row_weights", "scales", "scales_offsets"):
        if getattr(dispatched, name) is not None:
            named[name] = getattr(dispatched, name)
    return named


def poison(dispatched):
    """Overwrites what the contract leaves undefined: the unused rows."""
    row = jnp.arange(dispatched.tokens.shape[0], dtype=jnp.uint32)
    used = row < dispatched.row_offsets[-1]
    is_integer = jnp.issubdtype(dispatched.tokens.dtype, jnp.integer)
    poison = jnp.array(255 if is_integer else jnp.nan, dispatched.tokens.dtype)
    changes = {
        "tokens": jnp.where(used[:, None], dispatched.tokens, poison),
        "src_info": jnp.where(used[:, None], dispatched.src_info, OUT_OF_RANGE_INDEX),
    }
    if dispatched.row_weights is not None:
        # The shared expert's rows, group 0, have weights, but combine must not read them.
        if dispatched.group.config.fused_shared_expert:
            used &= row >= dispatched.row_offsets[1]
        changes["row_weights"] = jnp.where(used, dispatched.row_weights, jnp.nan)
    return dataclasses.replace(dispatched, **changes)


def dispatch(group, *args, is_async: bool = False, **options):
    """A dispatch, or the asynchronous pair that is equal to it."""
    if not is_async:
        return jax_ep.dispatch(group, *args, **options)
    return jax_ep.dispatch_wait(group, jax_ep.dispatch_async(group, *args, **options))


def combine(group, *args, is_async: bool = False, **options):
    """A combine, or the asynchronous pair that is equal to it."""
    if not is_async:
        return jax_ep.combine(group, *args, **options)
    return jax_ep.combine_wait(group, jax_ep.combine_async(group, *args, **options))


def weights_for(weights: str, topk_weights) -> tuple[tuple, tuple]:
    """Arguments (of dispatch, of combine) that apply weights where the mode says."""
    given = (topk_weights,)
    return (given if weights == "row" else ()), (given if weights == "source" else ())


def forward(group, weights: str, *, is_async: bool = False, input_scale=None, recv_capacity=None):
    """Makes a per-rank function with a dispatch and every combine that `weights` allows."""

    def body(tokens, topk_ids, topk_weights, expert_out, residual):
        at_row, at_source = weights_for(weights, topk_weights)
        options = {"input_scale": input_scale, "recv_capacity": recv_capacity}
        dispatched = dispatch(group, tokens, topk_ids, *at_row, is_async=is_async, **options)
        result = fields(dispatched)
        call = functools.partial(combine, group, expert_out, poison(dispatched), is_async=is_async)
        result["combined"] = call(*at_source)
        result["with_residual"] = call(*at_source, residual=residual)
        if weights == "none":
            result["unreduced"] = call(reduce=False)
        return result

    return body


def expected(case, inputs: Inputs) -> list[dict]:
    """For each rank, what `forward` must return, without undefined rows."""
    weights = None if case.weights == "none" else inputs.topk_weights
    dispatched = _dispatched(case, inputs, inputs.tokens, weights)
    combine = functools.partial(
        oracle.combine, inputs.routed, inputs.expert_out, n_nodes=case.n_nodes
    )
    outs = {
        "combined": combine(topk_weights=weights),
        "with_residual": combine(topk_weights=weights, residual=inputs.residual),
    }
    if case.weights == "none":
        outs["unreduced"] = combine(reduce=False)
    quantized = _quantized(case, inputs) if case.token_format != "plain" else None
    results = []
    for rank, rows in enumerate(dispatched):
        named = {k: v for k, v in vars(rows).items() if v is not None}
        named |= quantized[rank] if quantized else {}
        named["topk_ids"] = inputs.topk_ids[rank]
        if inputs.routed.copies is not None:
            named["copies"] = inputs.routed.copies
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


def _quantized(case, inputs: Inputs) -> list[dict]:
    """For each rank, its codes and scales, which travel as tokens do."""
    name, scale = case.token_format, case.input_scale or 1.0
    quantized = [formats.quantize(name, x, scale) for x in inputs.tokens]
    codes = _dispatched(case, inputs, [each.codes for each in quantized], None)
    scales = _dispatched(case, inputs, [each.scales for each in quantized], None)
    results = []
    for row_codes, row_scales in zip(codes, scales, strict=True):
        is_packed = name in formats.PACKED
        tokens = row_codes.tokens if is_packed else row_codes.tokens.view(formats.E4M3)
        offsets = row_codes.row_offsets
        array, is_defined = formats.lay_out(
            layout_of(case), row_scales.tokens, offsets, inputs.routed.n_rows
        )
        named = {"tokens": tokens, "scales": PartlyDefined(array, is_defined)}
        if layout_of(case) == "atoms":
            named["scales_offsets"] = formats.scales_offsets(offsets)
        results.append(named)
    return results


@dataclasses.dataclass(frozen=True)
class PartlyDefined:
    """An array with undefined elements."""

    array: np.ndarray
    is_defined: np.ndarray


ROW_FIELDS = ("tokens", "src_info", "row_weights")


def assert_rank_matches(actual: dict, wanted: dict, n_rows: int, what: str) -> None:
    """Compares all results of one rank, but for undefined rows and elements."""
    assert sorted(actual) == sorted(wanted), what
    for name, value in wanted.items():
        got = actual[name]
        if isinstance(value, PartlyDefined):
            assert got.shape == value.array.shape, f"{what}, {name}"
            got, value = got[value.is_defined], value.array[value.is_defined]
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
    is_async=False,
    check_vma=True,
    input_scale=None,
    recv_capacity=None,
    memory_of=None,
):
    """A group and the jitted `forward`, made once for each combination of arguments."""
    if input_scale is not None:
        input_scale = np.float32(input_scale)
    group = jax_ep.ep_init(mesh, AXIS, config, transport=transport, memory_of=memory_of)
    # With T = 0, all used operands may be empty, and XLA refuses a mapped function that has only
    # empty operands. So keep the unused ones.
    options = {"input_scale": input_scale, "recv_capacity": recv_capacity}
    body = forward(group, weights, is_async=is_async, **options)
    return group, on_mesh(mesh, body, check_vma=check_vma, keep_unused=True)


def check(
    case, transport: str, mesh, *, topk_ids=None, tokens=None, change=None, of_group=None, **options
) -> None:
    """Runs a case on every replica of the mesh and compares all ranks' results.

    `topk_ids` and `tokens`, one array per rank, replace the case's own; `change` maps the `Inputs`
    of a replica to others. `of_group` are fields of the group's config that differ from the case;
    the calls then ask for the case's capacity.
    """
    options = {"input_scale": case.input_scale} | options
    if of_group is not None:
        options["recv_capacity"] = case.recv_capacity
    config = config_of(case, **(of_group or {}))
    group, run = compiled(mesh, config, transport, case.weights, **options)
    assert group.transport == transport
    inputs = [make_inputs(case, topk_ids, r) for r in range(n_replicas(mesh))]
    if tokens is not None:
        inputs = [dataclasses.replace(each, tokens=list(tokens)) for each in inputs]
    if change is not None:
        inputs = [change(each) for each in inputs]
    wanted = [expected(case, each) for each in inputs]
    out = run(*_operands(mesh, inputs))
    for (replica, rank), actual in shards(mesh, out):
        n_rows = inputs[replica].routed.n_rows
        what = f"{case.name} on {transport}, replica {replica}, rank {rank}"
        assert_rank_matches(actual, wanted[replica][rank], n_rows, what)


def _operands(mesh, inputs: list[Inputs]) -> list[jax.Array]:
    """The operands of `forward`, from the inputs of each replica."""
    operands = zip(*(each.arrays() for each in inputs), strict=True)
    return [put_replicas(mesh, operand) for operand in operands]


def check_two_runs_agree(case, transport: str, mesh) -> None:
    """Runs a case twice and compares the results bitwise, but for undefined rows."""
    _, run = compiled(mesh, config_of(case), transport, case.weights)
    inputs = [make_inputs(case, None, r) for r in range(n_replicas(mesh))]
    operands = _operands(mesh, inputs)
    first, second = (jax.block_until_ready(run(*operands)) for _ in range(2))
    pairs = zip(shards(mesh, first), shards(mesh, second), strict=True)
    for ((replica, rank), one), (_, two) in pairs:
        used = len(inputs[replica].routed.rows[rank])
        one = {k: v[:used] if k in ROW_FIELDS else v for k, v in one.items()}
        assert_rank_matches(two, one, inputs[replica].routed.n_rows, f"rank {rank}")


def totals_of_call(case, inputs: Inputs, rank: int) -> dict:
    """The counts that one dispatch adds to the totals of a rank."""
    routed, ids = inputs.routed, inputs.topk_ids[rank]
    sent = routed.destinations[rank][..., 0]
    to_rank = np.array([(sent == r).any(axis=1).sum() for r in range(case.n_ranks)])
    token_bytes = case.hidden_size * jnp.dtype(case.token_dtype).itemsize
    return {
        "invalid_ids": routed.n_invalid[rank],
        "dropped_rows": routed.n_dropped[rank],
        "tokens_to_rank": to_rank,
        "bytes_to_rank": token_bytes * to_rank,
        "rows_to_expert": [(ids == expert).sum() for expert in range(case.n_experts)],
        "rows_per_expert": np.diff(routed.row_offsets[rank].astype(int)),
    }
