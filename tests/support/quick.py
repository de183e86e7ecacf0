"""The tests of --quick: each value of each parameter once, in place of all combinations."""

import collections
import dataclasses
import zlib

import pytest


def without_combinations(items) -> set:
    """The tests to run: those that are not `thorough`, but of a function with parameters, a sample.

    Each value of each parameter, and of each field of a case, is in the sample; so transports
    alternate.
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


def _values(params):
    """Yields what identifies each parameter's value; of a case, the values of its fields."""
    for name, value in params.items():
        if dataclasses.is_dataclass(value):
            fields = dataclasses.asdict(value).items()
            yield from ((name, field, repr(each)) for field, each in fields if field != "seed")
        else:
            yield name, repr(value)


def _covering(variants) -> list:
    """A few of a function's variants, in which each of its parameters' values occurs."""
    values_of = {item: set(_values(item.callspec.params)) for item in variants}
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
    """Pytest parameters: all of `names`, of which those that are not chosen are `thorough`."""
    thorough = pytest.mark.thorough
    return [pytest.param(name, marks=[thorough] * (name not in chosen)) for name in names]
