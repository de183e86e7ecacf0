"""Balance in NumPy: what ranks give and take, row by row, and where each choice goes.

Written apart from `jax_ep/exchange/balance.py`, by loops. The rule, for the R ranks of a node, its
experts and the choices of these by all tokens:

1. The quota q is m + floor(m / 32), of the mean m = ceil(choices / R). A rank above q gives its
   surplus: rows of its largest expert, then of the next one, ties by id, until it has q.
2. Ranks give in the order of surplus, the largest first, ties by rank. What they give goes to the
   rank with the most room below q, ties by rank, until it has q, then to the next one.
3. A rank has B slots, one for each expert that it is given rows of, in this order. What it has no
   slot for stays at home, and its room stays empty.

Why this ends: the surplus of all is at most the room of all, as R q is at least all choices. Why
L + R slots always suffice: if a rank gives its j >= 1 largest experts as a whole, what it keeps, q
rows, is of at most L - j experts that are not larger; so each of those given has at least
q / (L - 1) rows. A rank has room for at most q rows, so for L - 1 of them, beside one that is cut
at either end of its room, and one of each of the R - 1 others that a giver cut.
"""

import numpy as np


def quota_of(counts: np.ndarray, n_ranks: int) -> int:
    """The most rows of a rank, if slots suffice, of the `[E]` choices of a node's experts."""
    mean = -(-int(counts.sum()) // n_ranks)
    return mean + mean // 32


def give(counts: np.ndarray, n_ranks: int) -> list[tuple[int, int, int]]:
    """(home, expert, rows) that ranks give, in order, of the `[E]` choices of a node's experts."""
    n_local = len(counts) // n_ranks
    loads = counts.reshape(n_ranks, n_local).sum(1)
    quota = quota_of(counts, n_ranks)
    given = []
    for home in sorted(range(n_ranks), key=lambda rank: (-loads[rank], rank)):
        surplus = int(loads[home]) - quota
        own = range(home * n_local, (home + 1) * n_local)
        for expert in sorted(own, key=lambda expert: (-counts[expert], expert)):
            n_rows = min(surplus, int(counts[expert]))
            if n_rows > 0:
                given.append((home, expert, n_rows))
                surplus -= n_rows
    return given


def plan(counts: np.ndarray, n_ranks: int, n_slots: int) -> tuple[np.ndarray, np.ndarray]:
    """`[R, B]`, the expert of each slot, -1 for none; `[R, E]`, the rows of each a rank takes."""
    loads = counts.reshape(n_ranks, -1).sum(1)
    quota = quota_of(counts, n_ranks)
    takers = sorted(range(n_ranks), key=lambda rank: (loads[rank], rank))
    room = {rank: max(quota - int(loads[rank]), 0) for rank in takers}
    rows = np.zeros((n_ranks, len(counts)), np.int64)
    for expert, count in enumerate(counts):
        rows[expert * n_ranks // len(counts), expert] = count
    held: list[list[int]] = [[] for _ in range(n_ranks)]
    for home, expert, n_rows in give(counts, n_ranks):
        for rank in takers:
            taken = min(n_rows, room[rank])
            if taken == 0:
                continue
            room[rank] -= taken
            n_rows -= taken
            if len(held[rank]) < n_slots:
                held[rank].append(expert)
                rows[rank, expert] += taken
                rows[home, expert] -= taken
        assert n_rows == 0
    slots = [each + [-1] * (n_slots - len(each)) for each in held]
    return np.array(slots).reshape(n_ranks, n_slots), rows


def balance(
    topk_ids: list, n_experts: int, n_slots: int, n_nodes: int = 1
) -> tuple[np.ndarray, list]:
    """`[R, B]`, global experts in the slots; per rank `[T, K, 2]`, the rank and the group there.

    (-1, -1) for ids that name no expert. Groups are the L experts of a rank, then its slots.
    """
    n_ranks = len(topk_ids)
    n_local, per_node, of_node = n_experts // n_ranks, n_ranks // n_nodes, n_experts // n_nodes
    counts = np.zeros((n_ranks, n_experts), int)
    for rank, ids in enumerate(topk_ids):
        np.add.at(counts[rank], ids[(ids >= 0) & (ids < n_experts)], 1)
    copies = np.full((n_ranks, n_slots), -1)
    rows = np.zeros((n_ranks, n_experts), int)
    for node in range(n_nodes):
        ranks = slice(node * per_node, (node + 1) * per_node)
        experts = slice(node * of_node, (node + 1) * of_node)
        slots, rows[ranks, experts] = plan(counts[:, experts].sum(0), per_node, n_slots)
        copies[ranks] = np.where(slots < 0, -1, slots + node * of_node)
    own = np.minimum(counts, rows)  # what a rank takes of its own tokens' choices
    free = rows - own
    routed = [np.full((*ids.shape, 2), -1) for ids in topk_ids]
    for source, ids in enumerate(topk_ids):
        for (token, k), expert in np.ndenumerate(ids):
            if not 0 <= expert < n_experts:
                continue
            if own[source, expert] > 0:
                rank = source
                own[source, expert] -= 1
            else:
                rank = int(np.argmax(free[:, expert] > 0))
                free[rank, expert] -= 1
            is_home = rank == expert // n_local
            group = expert % n_local if is_home else n_local + list(copies[rank]).index(expert)
            routed[source][token, k] = rank, group
    assert not own.any() and not free.any()
    return copies.astype(np.int32), routed
