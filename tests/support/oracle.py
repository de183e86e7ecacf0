"""The expected results of dispatch and combine, in plain NumPy.

Written from the contract alone: nothing here imports `jax_ep` or JAX, and no transport shares this
code. Arrays of all ranks are lists with one entry per rank.

Symbols: R ranks, E experts, L = E / R local experts, K choices per token, T tokens of a rank,
H hidden size, C rows of a rank's output. Expert `g` lives on rank `g // L`.

With copies of experts (`oracle_balance.py`), the last B groups of every rank's rows are theirs.
With a fused shared expert, the first group of every rank's rows is the rank's own tokens, as if all
of them had chosen it; then se = 1, otherwise se = 0. With `skip_a2a`, all ranks hold the same
tokens: a rank has rows only for its own experts, and a share of the shared expert's tokens.
"""

import dataclasses

import numpy as np

import oracle_balance

Arrays = list[np.ndarray]
F32 = np.dtype(np.float32)
SHARED = -1  # stands for k in the shared expert's rows


@dataclasses.dataclass(frozen=True)
class Routed:
    """The row that each choice of each token becomes."""

    n_rows: int  # C
    rows: Arrays  # per rank int32[n, 3]: source rank, token, k; -1 for padding rows
    row_offsets: Arrays  # per rank uint32[L + se + 1], clipped to C
    destinations: Arrays  # per source rank int32[T, K, 2]: rank and row; (-1, -1) = no row
    shared_rows: Arrays | None  # per rank int32[T]: row at its shared expert; -1 = no row
    n_dropped: list[int]  # per receiving rank
    n_invalid: list[int]  # per source rank
    copies: np.ndarray | None  # int32[R, B]: the expert that each copy is of; -1 = none


@dataclasses.dataclass(frozen=True)
class Dispatched:
    """One rank's result; `tokens`, `src_info` and `row_weights` have used rows only."""

    tokens: np.ndarray  # [n, H]
    row_offsets: np.ndarray  # uint32[L + se + 1]
    group_sizes: np.ndarray  # int32[L + se]
    expert_ids: np.ndarray  # int32[L + se]
    src_info: np.ndarray  # int32[n, 2]: token, k (SHARED in the shared expert's rows)
    row_weights: np.ndarray | None  # float32[n]
    n_dropped: np.ndarray  # int32[]
    n_invalid: np.ndarray  # int32[]


def worst_case_rows(
    n_ranks: int,
    n_experts: int,
    top_k: int,
    max_tokens: int,
    alignment: int = 1,
    *,
    fused_shared_expert: bool = False,
    skip_a2a: bool = False,
    expert_copies: int = 0,
    n_nodes: int = 1,
    is_balanced: bool = False,
) -> int:
    """The most rows of a rank (C).

    Each group that has rows may need up to `alignment` - 1 more. Balanced, a rank has room
    for its part of the choices that may name experts of its node, and for 1/8 more.
    """
    n_local = n_experts // n_ranks
    rows = max_tokens * (1 if skip_a2a else n_ranks) * min(top_k, n_local)
    if is_balanced:
        rows = max_tokens * n_nodes * min(top_k, n_experts // n_nodes)
        rows += rows // 8
    n_groups = min(n_local + expert_copies, rows)
    if fused_shared_expert:
        rows += -(-max_tokens // n_ranks) if skip_a2a else max_tokens
        n_groups += 1
    rows += n_groups * (alignment - 1)
    return rows + -rows % alignment


def shared_tokens(rank: int, n_ranks: int, n_tokens: int, skip_a2a: bool) -> range:
    """The tokens that the shared expert of `rank` processes: all of them, or a share."""
    if not skip_a2a:
        return range(n_tokens)
    each, rest = divmod(n_tokens, n_ranks)  # the first ranks have one more
    first = rank * each + min(rank, rest)
    return range(first, first + each + (rank < rest))


def route(
    n_ranks: int,
    n_experts: int,
    n_rows: int,
    topk_ids: Arrays,
    alignment: int = 1,
    *,
    fused_shared_expert: bool = False,
    skip_a2a: bool = False,
    expert_copies: int = 0,
    n_nodes: int = 1,
) -> Routed:
    """Orders rows by group, source rank, token, k, and drops those from `n_rows` on.

    Groups are the shared expert, if there is one, then the local experts, then copies of others;
    each group's rows are padded to a multiple of `alignment`.
    """
    n_groups = n_experts // n_ranks + expert_copies
    group_ids, copies = topk_ids, None
    if expert_copies:
        copies, routed = oracle_balance.balance(topk_ids, n_experts, expert_copies, n_nodes)
        group_ids = [np.where(x[..., 0] < 0, -1, x @ [n_groups, 1]) for x in routed]
    destinations = [np.full((*ids.shape, 2), -1, np.int32) for ids in topk_ids]
    shared_rows = [np.full(len(ids), -1, np.int32) for ids in topk_ids]
    rows, offsets, n_dropped = [], [], []
    for rank in range(n_ranks):
        groups = []
        if fused_shared_expert:
            own = shared_tokens(rank, n_ranks, len(topk_ids[rank]), skip_a2a)
            groups.append([(rank, t, SHARED) for t in own])
        sources = [rank] if skip_a2a else range(n_ranks)
        for group in range(rank * n_groups, (rank + 1) * n_groups):
            groups.append(_choices_of(group, sources, group_ids))
        order, ends = _concatenate(groups, alignment)
        for row, (source, t, k) in enumerate(order[:n_rows]):
            if source >= 0 and k == SHARED:
                shared_rows[source][t] = row
            elif source >= 0:
                destinations[source][t, k] = rank, row
        rows.append(np.array(order[:n_rows], np.int32).reshape(-1, 3))
        offsets.append(np.minimum(ends, n_rows).astype(np.uint32))
        n_dropped.append(sum(source >= 0 for source, _, _ in order[n_rows:]))
    n_invalid = [int(np.sum((ids < -1) | (ids >= n_experts))) for ids in topk_ids]
    shared_rows = shared_rows if fused_shared_expert else None
    return Routed(n_rows, rows, offsets, destinations, shared_rows, n_dropped, n_invalid, copies)


def _choices_of(group: int, sources, group_ids: Arrays) -> list[tuple[int, int, int]]:
    """(source, token, k) of each choice that goes to `group`, in this order."""
    # argwhere lists (token, k) by token first, then k.
    return [(s, t, k) for s in sources for t, k in np.argwhere(group_ids[s] == group).tolist()]


def _concatenate(groups: list[list], alignment: int) -> tuple[list, list[int]]:
    """The rows of all groups, padded, and where each group begins and the last one ends."""
    order, ends = [], [0]
    for group in groups:
        order += group
        order += [(-1, -1, -1)] * (-len(order) % alignment)
        ends.append(len(order))
    return order, ends


def dispatch(
    n_ranks: int,
    n_experts: int,
    n_rows: int,
    tokens: Arrays,
    topk_ids: Arrays,
    topk_weights: Arrays | None = None,
    alignment: int = 1,
    **flags,
) -> list[Dispatched]:
    """Sends every token to the ranks of its experts: moves bytes and rounds nothing.

    Padding rows hold zeros.
    """
    routed = route(n_ranks, n_experts, n_rows, topk_ids, alignment, **flags)
    results = []
    for rank, rows in enumerate(routed.rows):
        offsets = routed.row_offsets[rank]
        results.append(
            Dispatched(
                tokens=rows_of(routed, tokens, rank),
                row_offsets=offsets,
                group_sizes=np.diff(offsets.astype(np.int32)),
                expert_ids=np.arange(len(offsets) - 1, dtype=np.int32),
                src_info=rows[:, 1:],
                row_weights=row_weights(routed, topk_weights, rank),
                n_dropped=np.int32(routed.n_dropped[rank]),
                n_invalid=np.int32(routed.n_invalid[rank]),
            )
        )
    return results


def rows_of(routed: Routed, tokens: Arrays, rank: int) -> np.ndarray:
    """The used rows of `rank`: [n, H]."""
    source, token, _ = routed.rows[rank].T
    return _gather(tokens, source, token)


def row_weights(routed: Routed, topk_weights: Arrays | None, rank: int):
    """The weight that traveled with each used row of `rank`: float32[n].

    1 for the shared expert's rows, 0 for padding rows.
    """
    if topk_weights is None:
        return None
    source, token, k = routed.rows[rank].T
    weights = np.stack(topk_weights)[source, token, k]
    weights = np.where(k == SHARED, F32.type(1), weights)
    return np.where(source >= 0, weights, F32.type(0))


def combine(
    routed: Routed,
    expert_out: Arrays,
    *,
    topk_weights: Arrays | None = None,
    residual: Arrays | None = None,
    reduce: bool = True,
    n_nodes: int = 1,
) -> Arrays:
    """Brings the rows back to their tokens; the result has `expert_out`'s dtype.

    `_sum_by_node` says in which order they are added; it does not matter which call was given the
    weights. The residual is added before the cast. The shared expert's row is added to the rounded
    sum, unweighted, and the result is rounded again. Without `reduce`, the shared expert's rows are
    left out.
    """
    results = []
    for source, destinations in enumerate(routed.destinations):
        if not reduce:
            results.append(_unreduced(destinations, expert_out))
            continue
        weights = None if topk_weights is None else topk_weights[source]
        total = _sum_by_node(destinations, expert_out, weights, n_nodes)
        if residual is not None:
            total = total + residual[source].astype(F32)
        out = total.astype(expert_out[0].dtype)
        if routed.shared_rows is not None:
            total = _plus_shared(out, routed.shared_rows[source], expert_out[source])
            out = total.astype(expert_out[0].dtype)
        results.append(out)
    return results


def dispatch_grad(
    routed: Routed, d_rows: Arrays, d_row_weights: Arrays | None = None, n_nodes: int = 1
) -> tuple[Arrays, Arrays | None]:
    """(d_tokens, d_topk_weights) of dispatch, for the cotangents of its rows.

    d_tokens is the unweighted sum of combine, in `d_rows`' dtype. In it, the shared expert's row is
    that of one more choice, the last.
    """
    d_tokens = []
    for source, destinations in enumerate(routed.destinations):
        if routed.shared_rows is not None:
            destinations = _with_shared(destinations, routed.shared_rows[source], source)
        total = _sum_by_node(destinations, d_rows, None, n_nodes)
        d_tokens.append(total.astype(d_rows[0].dtype))
    if d_row_weights is None:
        return d_tokens, None
    d_weights = []
    for destinations in routed.destinations:
        d_weight = np.zeros(destinations.shape[:2], F32)
        has_row = destinations[..., 0] >= 0
        rank, row = destinations[has_row].T
        d_weight[has_row] = _gather(d_row_weights, rank, row)
        d_weights.append(d_weight)
    return d_tokens, d_weights


def combine_grad(
    routed: Routed, expert_out: Arrays, d_out: Arrays, *, topk_weights: Arrays | None = None
) -> tuple[Arrays, Arrays]:
    """(d_expert_out, d_topk_weights) of combine, for the cotangent of its result.

    It does not matter where weights are applied: a row's cotangent is the weight times the token's,
    rounded once, and zero in unused rows. A weight's cotangent, float64[T, K], is the inner product
    of its row with the token's cotangent. `d_out` is [T, H] or, for `reduce=False`, [T, K, H]. The
    residual's cotangent is `d_out` itself, and so is that of the shared expert's row; without
    `reduce`, the latter is zero.
    """
    d_expert_out = [np.zeros_like(rows) for rows in expert_out]
    d_weights = []
    for source, destinations in enumerate(routed.destinations):
        d_weight = np.zeros(destinations.shape[:2], np.float64)
        for t, k in np.argwhere(destinations[..., 0] >= 0):
            rank, row = destinations[t, k]
            g = d_out[source][t] if d_out[source].ndim == 2 else d_out[source][t, k]
            g = g.astype(F32)
            out = expert_out[rank][row]
            d_weight[t, k] = np.dot(g.astype(np.float64), out.astype(np.float64))
            if topk_weights is not None:
                g = topk_weights[source][t, k] * g
            d_expert_out[rank][row] = g.astype(out.dtype)
        if routed.shared_rows is not None and d_out[source].ndim == 2:
            (tokens,) = np.nonzero(routed.shared_rows[source] >= 0)
            rows = routed.shared_rows[source][tokens]
            d_expert_out[source][rows] = d_out[source][tokens]
        d_weights.append(d_weight)
    return d_expert_out, d_weights


def _gather(arrays: Arrays, which: np.ndarray, index: np.ndarray) -> np.ndarray:
    """arrays[which[i]][index[i]] for every i; zeros where which[i] is -1."""
    result = np.zeros((len(which), *arrays[0].shape[1:]), arrays[0].dtype)
    for i in np.unique(which[which >= 0]):
        result[which == i] = arrays[i][index[which == i]]
    return result


def _term(destinations_k, expert_out: Arrays, weights_k) -> tuple[np.ndarray, np.ndarray]:
    """The tokens whose k-th choice has a row, and that row in float32, weighted."""
    (tokens,) = np.nonzero(destinations_k[:, 0] >= 0)
    rank, row = destinations_k[tokens].T
    term = _gather(expert_out, rank, row).astype(F32)
    if weights_k is not None:
        term = weights_k[tokens, None] * term
    return tokens, term


def _sum_by_k(destinations, expert_out: Arrays, weights) -> np.ndarray:
    """acc = +0; for k in order: acc = acc + w * row."""
    n_tokens, top_k = destinations.shape[:2]
    total = np.zeros((n_tokens, expert_out[0].shape[1]), F32)
    for k in range(top_k):
        weights_k = None if weights is None else weights[:, k]
        tokens, term = _term(destinations[:, k], expert_out, weights_k)
        total[tokens] = total[tokens] + term
    return total


def _sum_by_node(destinations, expert_out: Arrays, weights, n_nodes: int) -> np.ndarray:
    """float32[T, H]: the sum of every token's rows.

    Each rank adds its own rows of a token in k order and rounds the sum to the rows' dtype, unless
    that is float16. Each node adds its ranks' sums in rank order and, if there are several nodes,
    rounds as well. The source adds the nodes' sums in node order.
    """
    dtype = F32 if expert_out[0].dtype == np.float16 else expert_out[0].dtype
    ranks_per_node = len(expert_out) // n_nodes
    node_sums = []
    for node in range(n_nodes):
        ranks = range(node * ranks_per_node, (node + 1) * ranks_per_node)
        rank_sums = [_sum_of_rank(rank, destinations, expert_out, weights) for rank in ranks]
        node_sums.append(_sum_in_order(rank_sums, dtype))
    if n_nodes == 1:
        return node_sums[0][0]
    return _sum_in_order(node_sums, dtype)[0]


def _sum_of_rank(rank: int, destinations, expert_out: Arrays, weights):
    """A rank's sum for each token, float32[T, H], and which tokens have rows there."""
    here = np.where(destinations[..., :1] == rank, destinations, -1)
    return _sum_by_k(here, expert_out, weights), (here[..., 0] >= 0).any(axis=1)


def _sum_in_order(terms, dtype):
    """Adds what `_sum_of_rank` returns, each rounded to `dtype`; of the same form."""
    total, has_any = np.zeros_like(terms[0][0]), np.zeros_like(terms[0][1])
    for term, has_rows in terms:
        rounded = term.astype(dtype).astype(F32)
        total[has_rows] = total[has_rows] + rounded[has_rows]
        has_any = has_any | has_rows
    return total, has_any


def _with_shared(destinations, shared_rows, source: int) -> np.ndarray:
    """`destinations` with one more choice: the shared expert, on the token's own rank."""
    rank = np.where(shared_rows >= 0, source, -1)
    return np.concatenate([destinations, np.stack([rank, shared_rows], 1)[:, None]], axis=1)


def _plus_shared(out, rows, expert_out: np.ndarray) -> np.ndarray:
    """Adds each token's row of the shared expert, where it has one, in float32."""
    total = out.astype(F32)
    (tokens,) = np.nonzero(rows >= 0)
    total[tokens] = total[tokens] + expert_out[rows[tokens]].astype(F32)
    return total


def _unreduced(destinations, expert_out: Arrays) -> np.ndarray:
    """[T, K, H]: every choice's row; zeros for choices without one."""
    shape = (*destinations.shape[:2], expert_out[0].shape[1])
    result = np.zeros(shape, expert_out[0].dtype)
    for k in range(shape[1]):
        (tokens,) = np.nonzero(destinations[:, k, 0] >= 0)
        rank, row = destinations[tokens, k].T
        result[tokens, k] = _gather(expert_out, rank, row)
    return result
