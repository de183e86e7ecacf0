"""The tests of --quick: each value of each parameter once, in place of all combinations."""

import collections


def without_combinations(items) -> set:
    """The tests to run: none that is `thorough`, and of each function with parameters, a sample.

    Every value of every parameter is in the sample. Values that go along with many others, such as
    the transports, alternate.
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
        # Most new values first, then those that occur least so far, then the order of the file.
        best = max(
            variants,
            key=lambda item: (
                len(missing & values_of[item]),
                -sum(counts[value] for value in values_of[item]),
            ),
        )
        chosen.append(best)
        missing -= values_of[best]
        counts.update(values_of[best])
    return chosen
