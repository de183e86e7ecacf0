"""Groups with transport `nvshmem`, as checks in jobs on GPUs open them."""

import functools

import jax

import captured_graphs
import cases
import jax_ep
from harness import AXIS, config_of, make_mesh
from jax_ep.ffi import extension
from process_checks import meet

NAME = "nvshmem"


def small() -> cases.Case:
    return cases.SMALL[len(jax.devices())].replace(n_nodes=2)


def open_group(timeout_s: float = 30.0, case: cases.Case | None = None) -> jax_ep.EPGroup:
    case = case or small()
    return jax_ep.ep_init(make_mesh(case.n_ranks), AXIS, config_of(case, timeout_s=timeout_s), NAME)


def free_heaps(group: jax_ep.EPGroup) -> list[int]:
    """The heaps that nothing uses, of the size of the group's, which may be closed."""
    n_bytes = group._connection.memory_of_rail()
    return extension.load_cuda().nvshmem.free(n_bytes)


def map_no_peers() -> None:
    """From now on, rails put through NVSHMEM also to the peers that stores reach."""
    library = extension.load_cuda().nvshmem
    library.open = functools.partial(library.open, maps_peers=False)


def open_captured(timeout_s: float):
    """A group, a program that XLA has captured there, and what it gives."""
    group = open_group(timeout_s)
    run = captured_graphs.Chain(group)
    wanted = run()
    meet()
    assert run() == wanted
    assert captured_graphs.is_captured(group._connection)
    return group, run, wanted


def open_again(group: jax_ep.EPGroup) -> jax_ep.EPGroup:
    """Closes the group, whose heap the next equal one gets, and opens that."""
    group.close()
    assert extension.load_cuda().nvshmem.pinned(group._connection.geometry.key) >= 0
    return open_group(group.config.timeout_s)
