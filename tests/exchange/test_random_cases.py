"""Random shapes and routings: every transport matches the oracle, bitwise.

`--random-cases` says how many, `--random-seed` which. test_property.py has routings that
hypothesis makes, of few shapes.
"""

import jax

import suite
from harness import make_mesh
from random_cases import random_ids, random_shape

CASES_PER_SHAPE = 10  # a shape is compiled once


def pytest_generate_tests(metafunc) -> None:
    option = metafunc.config.option
    n_shapes = -(-option.random_cases // CASES_PER_SHAPE)
    metafunc.parametrize("shape_seed", range(option.random_seed, option.random_seed + n_shapes))


def numbers_of_ranks() -> tuple[int, ...]:
    """The numbers of ranks that the devices allow; a job of several processes uses all devices."""
    n_devices = len(jax.devices())
    if jax.process_count() > 1:
        return (n_devices,)
    return tuple(n for n in (1, 2, 3, 4, 8) if n <= n_devices)


def test_random_cases_match_the_oracle(shape_seed, transport):
    shape = random_shape(shape_seed, numbers_of_ranks())
    mesh = make_mesh(shape.n_ranks)
    is_async = shape_seed % 3 == 0
    for i in range(CASES_PER_SHAPE):
        case = shape.replace(seed=CASES_PER_SHAPE * shape_seed + i)
        topk_ids = random_ids(case, case.seed)
        suite.check(case, transport, mesh, topk_ids=topk_ids, is_async=is_async)
