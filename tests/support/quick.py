"""The tests of --quick: each value of each parameter once, in place of all combinations."""

import collections
import zlib

import pytest


def without_combinations(items) -> set:
    """The tests to run: those that are not `thorough`, but of a function with parameters, a sample.

    Each value of each parameter is in the sample; so transports alternate from case to case.
    """
    by_function = collections.defaultdict(list)
    chosen = set()
    for item in items:
        if item.get_closest_marker("thorough"):
            continue
        if hasattr(item, "callspec"):
            by_function[item.nodeid.partition("[")[0]].append(item)
        else:
            chosen.add(item)
    for variants in by_function.values():
        chosen.update(_covering(variants))
    return chosen


def _covering(variants) -> list:
    """A few of a function's variants, in which each of its parameters' values occurs."""
    values_of = {
        item: {(name, repr(value)) for name, value in item.callspec.params.items()}
        for item in variants
    }
    counts = collections.Counter()
    missing = {value for values in values_of.values() for value in values}
    chosen = []
    while missing:
        # Most new values first, then those that occur least so far, then any, but always the same:
        # in the order of the file, parameters that have equal values would have equal ones always.
        best = max(
            variants,
            key=lambda item: (
                len(missing & values_of[item]),
                -sum(counts[value] for value in values_of[item]),
                zlib.crc32(item.nodeid.encode()),
            ),
        )
        chosen.append(best)
        missing -= values_of[best]
        counts.update(values_of[best])
    return chosen


def params(names, chosen) -> list:
    """Pytest parameters: all names, of which those that are not chosen are `thorough`."""
    thorough = pytest.mark.thorough
    return [pytest.param(name, marks=[thorough] * (name not in chosen)) for name in names]
