"""rebalance: how many copies each expert gets, and which ranks get them; on the host, in NumPy."""

import heapq
from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_ep.config import check_count
from jax_ep.exchange.checks import as_values, is_finite


def rebalance(
    load: Any,
    n_ranks: int,
    n_redundant: int,
    *,
    n_nodes: int = 1,
    n_expert_groups: int | None = None,
    home_slack: float = 0.1,
) -> np.ndarray:
    """Places physical experts so that ranks get equally many rows; on the host.

    Uses the heuristics of DeepSeek's EPLB (https://github.com/deepseek-ai/EPLB). The expert with
    the highest load per copy gets one more copy, until there are P = E + `n_redundant`. Then copies
    go to ranks, P / R to each: the copy with the highest load first, to the least loaded rank that
    has room and no copy of the expert. Unlike in EPLB, an expert may stay on its home rank at the
    price of some balance, since experts that stay need not travel (`replicate_experts`).

    With several nodes, groups of consecutive experts first go to nodes in the same way,
    E / `n_nodes` experts to each. All copies of an expert are then on one node, so that tokens of a
    router that limits groups go to few nodes.

    Equal arguments give equal placements, so processes that know the same load need not exchange
    placements.

    Args:
        load: `[E]` or `[steps, E]`, numbers of 0 or more: the rows or choices of each logical
            expert; steps are added up. With several processes, pass the total over all of them.
        n_ranks: R; E must be a multiple.
        n_redundant: physical experts beyond E: a multiple of R, at most `E / n_nodes - E / R` per
            rank.
        n_nodes: nodes of `R / n_nodes` consecutive ranks each.
        n_expert_groups: with several nodes, the number of groups of consecutive experts that stay
            together: a multiple of `n_nodes`, usually the number of the router's groups. None: each
            expert is a group of its own.
        home_slack: a copy goes to its expert's home rank if the load there exceeds that of the
            least loaded rank by at most this fraction of the mean load per rank. 0: only balance
            counts, as in EPLB.

    Returns:
        `int32[P]`, for `ExpertPlacement`; each rank's experts in ascending order.

    Raises:
        TypeError: `load` is traced.
        ValueError: an argument is not as above.
    """
    load = _check_load(load)
    n_ranks, n_nodes = check_count("n_ranks", n_ranks), check_count("n_nodes", n_nodes)
    n_groups = (
        len(load) if n_expert_groups is None else check_count("n_expert_groups", n_expert_groups)
    )
    _check_sizes(len(load), n_ranks, n_redundant, n_nodes, n_groups)
    if not is_finite(home_slack) or home_slack < 0:
        raise ValueError(
            f"rebalance: home_slack must be a finite number, 0 or more; got {home_slack!r}."
        )
    per_node, n_home = n_ranks // n_nodes, len(load) // n_ranks
    n_physical = (len(load) + n_redundant) // n_nodes  # of a node
    slack = home_slack * load.sum() / n_ranks
    groups = np.arange(len(load)).reshape(n_groups, -1)
    by_group = load[groups].sum(1)
    n_home_groups = n_groups // n_nodes
    nodes = _pack(by_group, np.arange(n_groups), n_home_groups, n_nodes, 0, slack * per_node)
    placement = []
    for node, held in enumerate(nodes):
        experts = np.sort(groups[held].reshape(-1))
        copies = _count_copies(load[experts], experts % n_home, n_physical, per_node)
        experts, shares = np.repeat(experts, copies), np.repeat(load[experts] / copies, copies)
        ranks = _pack(shares, experts, n_home, per_node, node * per_node, slack)
        placement += [experts[each] for each in ranks]
    return np.concatenate(placement).astype(np.int32)


def _check_load(given: Any) -> np.ndarray:
    """`float64[E]`, summed over steps."""
    load = as_values("rebalance", "load", given, "Call it outside of jax.jit.")
    is_number = any(jnp.issubdtype(load.dtype, kind) for kind in (jnp.integer, jnp.floating))
    if load.ndim not in (1, 2) or not load.shape[-1] or not is_number:
        raise ValueError(
            f"rebalance: load must be numbers [E] or [steps, E]; got {load.dtype.name}{load.shape}."
        )
    load = load.astype(np.float64).reshape(-1, load.shape[-1]).sum(0)
    if not np.isfinite(load).all() or load.min() < 0:
        raise ValueError(
            f"rebalance: load must be finite and 0 or more; got {load.min()} to {load.max()}."
        )
    return load


def _check_sizes(
    n_experts: int, n_ranks: int, n_redundant: Any, n_nodes: int, n_groups: int
) -> None:
    sizes = f"E={n_experts}, n_ranks={n_ranks}, n_nodes={n_nodes}, n_expert_groups={n_groups}"
    divides = n_experts % n_ranks == n_ranks % n_nodes == n_groups % n_nodes == 0
    if not divides or n_experts % n_groups:
        raise ValueError(
            "rebalance: E must be a multiple of n_ranks and of n_expert_groups, and both of these "
            f"of n_nodes; got {sizes}."
        )
    most = n_ranks * (n_experts // n_nodes - n_experts // n_ranks)
    is_count = isinstance(n_redundant, int | np.integer) and not isinstance(n_redundant, bool)
    if not is_count or not 0 <= n_redundant <= most or n_redundant % n_ranks:
        raise ValueError(
            f"rebalance: n_redundant must be a multiple of n_ranks={n_ranks}, from 0 to {most}, as "
            f"a rank holds an expert at most once; got {n_redundant!r}."
        )


def _count_copies(load: np.ndarray, turns: np.ndarray, n_physical: int, most: int) -> np.ndarray:
    """Copies of each expert, at most so many: one by one for the highest load per copy.

    Among equals, for the lowest turn.
    """
    copies = np.ones(len(load), int)
    heap = list(zip(-load, turns, range(len(load)), strict=True)) if most > 1 else []
    heapq.heapify(heap)
    for _ in range(n_physical - len(load)):
        _, turn, expert = heapq.heappop(heap)
        copies[expert] += 1
        if copies[expert] < most:
            heapq.heappush(heap, (-load[expert] / copies[expert], turn, expert))
    return copies


def _pack(
    load: np.ndarray, labels: np.ndarray, home_size: int, n_packs: int, first: int, slack: float
) -> list[list[int]]:
    """Distributes items evenly over packs, from `first` on, in each of which a label is once.

    In descending order of load, those of equal loads from all homes in turn: each to its home, pack
    `label // home_size`, if that is one of these packs, and its load at most `slack` above the
    least; otherwise to the pack with the least.
    """
    size = len(load) // n_packs
    held: list[dict[int, int]] = [{} for _ in range(n_packs)]  # item by label
    total = [0.0] * n_packs
    for item in np.lexsort((labels, labels % home_size, -load)).tolist():
        label = int(labels[item])
        home = label // home_size - first
        have_room = [pack for pack in range(n_packs) if len(held[pack]) < size]
        candidates = [pack for pack in have_room if label not in held[pack]]
        if not candidates:
            candidates = [_make_room(held, total, load, label, have_room[0])]
        best = min(candidates, key=lambda pack: (total[pack], pack))
        pack = home if home in candidates and total[home] <= total[best] + slack else best
        held[pack][label] = item
        total[pack] += load[item]
    return [sorted(each.values()) for each in held]


def _make_room(
    held: list[dict[int, int]], total: list[float], load: np.ndarray, label: int, other: int
) -> int:
    """Moves an item to another pack, from one without the label, which is returned.

    There is such an item: a full pack without the label has more labels than one that has both
    the label and room.
    """
    full = [pack for pack, each in enumerate(held) if label not in each]
    pack = min(full, key=lambda pack: (total[pack], pack))
    movable = [each for each in held[pack] if each not in held[other]]
    moved = max(movable, key=lambda each: (load[held[pack][each]], -each))
    item = held[other][moved] = held[pack].pop(moved)
    total[pack] -= load[item]
    total[other] += load[item]
    return pack
