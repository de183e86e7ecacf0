"""Where ranks read each other's arrays. Tests of layers and of copies run the calls."""

from types import SimpleNamespace

import numpy as np
import pytest

from jax_ep.exchange.copy_calls import can_reach
from jax_ep.geometry import MeshCoordinate

WEIGHTS = np.zeros((4, 3, 8), np.float16)  # 48 bytes each


def geometry(*replicas):
    """Of ranks in these processes, by replica."""
    coordinates = [
        MeshCoordinate(SimpleNamespace(process_index=process), replica, rank)
        for replica, processes in enumerate(replicas)
        for rank, process in enumerate(processes)
    ]
    return SimpleNamespace(coordinates=coordinates, n_ranks=len(replicas[0]))


@pytest.mark.parametrize(
    ("replicas", "weights", "n_entries", "wanted"),
    [
        ([(0, 0, 0, 0)], WEIGHTS, 6, True),
        ([(0, 0), (1, 1)], WEIGHTS, 6, True),
        ([(0, 1)], WEIGHTS, 6, False),
        ([(0, 0), (0, 1)], WEIGHTS, 6, False),
        ([(0, 1), (1, 0)], WEIGHTS, 6, False),
        ([(0, 0)], WEIGHTS[:, :, :4], 6, False),
        ([(0, 0)], WEIGHTS[:, :0], 6, False),
        ([(0, 0)], WEIGHTS, 2005, True),
        ([(0, 0)], WEIGHTS, 2006, False),
        ([(0,) * 16], WEIGHTS, 6, True),
        ([(0,) * 17], WEIGHTS, 6, False),
    ],
)
def test_can_reach(replicas, weights, n_entries, wanted):
    """Replicas within processes, entries of whole vectors, lists that fit into shared memory."""
    assert can_reach(geometry(*replicas), weights, n_entries) is wanted
