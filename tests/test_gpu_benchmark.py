"""What can be tested of the GPU benchmark without GPUs.

The rivals' rows and sums, on virtual devices; how a trace is read; and a rehearsal of
the whole program, in which only the figures that need a GPU's trace are missing.
"""

import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh

BENCHMARKS = pathlib.Path(__file__).parent.parent / "benchmarks"
sys.path.append(str(BENCHMARKS))

from gpu import measure  # noqa: E402
from gpu.cases import Case  # noqa: E402

EFFORT = measure.Effort(repeats=2, n_sets=2, n_pairs=(1, 2), n_loop=2, n_queued=2)


def emulated_ragged_all_to_all(
    operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name
):
    """`lax.ragged_all_to_all`, which XLA:CPU lacks, out of all_gathers."""
    rank, n_ranks = lax.axis_index(axis_name), lax.axis_size(axis_name)
    everyones = (operand, input_offsets, send_sizes, output_offsets)
    everyones = [lax.all_gather(x, axis_name) for x in everyones]
    for source in range(n_ranks):
        rows, starts, sizes, places = (x[source] for x in everyones)
        i = jnp.arange(output.shape[0]) - places[rank]
        is_sent = (i >= 0) & (i < sizes[rank])
        moved = rows[jnp.clip(starts[rank] + i, 0, rows.shape[0] - 1)]
        output = jnp.where(is_sent[:, None], moved, output)
    sizes = everyones[2][:, rank]
    return jnp.where((sizes == recv_sizes).all(), output, jnp.zeros_like(output))


@pytest.fixture
def arena(request, monkeypatch):
    """A case on 4 devices."""
    monkeypatch.setattr(lax, "ragged_all_to_all", emulated_ragged_all_to_all)
    devices = np.array(jax.devices("cpu")[:4])
    mesh = Mesh(devices, ("ep",), axis_types=(AxisType.Auto,))
    case = Case(4, **{"hidden_size": 64, "n_experts": 16, "top_k": 4} | request.param)
    return measure.Arena(mesh, case, EFFORT)


@pytest.mark.parametrize(
    "arena",
    [{"n_tokens": 1}, {"n_tokens": 16, "routing": "zipf"}, {"n_tokens": 600}],
    indirect=True,
    ids=str,
)
@pytest.mark.parametrize("name", ["lax all_gather", "lax ragged_all_to_all", "jax_ep"])
def test_contestants_compute_the_contract(arena, name) -> None:
    assert measure.measure(arena, name, "host", [])["failed"] == []
