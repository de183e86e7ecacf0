"""Measures one case in a process of its own: `python run_case.py JSON OUT`.

A fresh process per case bounds time and memory, and sets the allocator. The parent is
__main__.py, which also sets the environment.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
import sys
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from bench_cases import N_RANKS, OPERATIONS, Case, Inputs, make_inputs
from contestants import AXIS, Contestant, make_contestants, make_operations
from memory import available_bytes, die_first
from numpy_truth import (
    Truth,
    check_combine,
    check_dispatch,
    check_round_trip,
    layout,
    make_expert_out,
)
from stopwatch import Effort, measure

#: Of what is free at the start, by allocator. The estimate knows nothing of the inputs
#: and of fragments, of which an allocator that keeps freed memory makes many.
_MEMORY_SHARE = {"default": 0.6, "keep": 0.3}


def run_case(case: Case, effort: Effort) -> dict[str, Any]:
    """Checks every contestant, then times all operations.

    Returns:
        `{"results": {operation: {contestant: figures}}, "skipped": [reason, ...]}`.
    """
    devices = jax.devices("cpu")[:N_RANKS]
    mesh = jax.sharding.Mesh(np.array(devices), (AXIS,), axis_types=(AxisType.Auto,))
    inputs = make_inputs(case)
    arena = Arena(mesh, case, inputs, layout(case, inputs))
    for who in make_contestants(mesh, case):
        arena.admit(who)
    return {
        "results": {name: arena.measure(name, effort) for name in OPERATIONS},
        "skipped": arena.skipped,
    }


class Arena:
    """The inputs on the devices, and the contestants that fit in memory."""

    def __init__(
        self, mesh: jax.sharding.Mesh, case: Case, inputs: Inputs, truth: Truth
    ) -> None:
        self.mesh, self.case, self.inputs, self.truth = mesh, case, inputs, truth
        self.skipped: list[str] = []
        self._sharding = NamedSharding(mesh, PartitionSpec(AXIS))
        self._memory = _MEMORY_SHARE[case.allocator] * available_bytes()
        self._calls: dict[str, dict[str, tuple]] = {name: {} for name in OPERATIONS}
        put = functools.partial(jax.device_put, device=self._sharding)
        self._tokens, self._ids = put(inputs.tokens), put(inputs.topk_ids)
        self._weights = put(inputs.topk_weights)
        self._cotangents = put(inputs.cotangents)
        self._no_passes = put(np.zeros(N_RANKS, np.int32))
        self._expert_out = self._put_expert_out()

    def _put_expert_out(self) -> jax.Array:
        shards = [
            jax.device_put(
                make_expert_out(self.case, self.inputs, self.truth, rank)[None], device
            )
            for rank, device in enumerate(self.mesh.devices.flat)
        ]
        shape = (N_RANKS, *shards[0].shape[1:])
        return jax.make_array_from_single_device_arrays(shape, self._sharding, shards)

    def admit(self, who: Contestant) -> None:
        """Checks each operation's result; keeps the call for `measure`."""
        functions = make_operations(who, self.mesh)
        forward = (self._tokens, self._ids, self._weights, self._no_passes)
        args: dict[str, tuple] = {
            "dispatch": (self._tokens, self._ids),
            "round trip": forward,
            "round trip + grad": (*forward, self._cotangents),
        }
        for name in OPERATIONS:  # dispatch first: combine needs its result
            if name not in args or not self._fits(who, name, functions, args):
                continue
            results = functions[name](*args[name])
            self._check(who.name, name, results)
            self._calls[name][who.name] = (functions[name], args[name])
            if name == "dispatch":
                # All combine the same expert_out, so that only one is kept.
                dispatched = _replace(results, tokens=self._expert_out)
                args["combine"] = (dispatched, self._expert_out, self._weights)
            del results

    def _fits(self, who: Contestant, name: str, functions: dict, args: dict) -> bool:
        stats = functions[name].lower(*args[name]).compile().memory_analysis()
        per_device = stats.temp_size_in_bytes + stats.output_size_in_bytes
        needs = N_RANKS * per_device
        if needs <= self._memory:
            return True
        self.skipped.append(f"{who.name}, {name}: needs {needs / 2**30:.0f} GiB")
        return False

    def _check(self, who: str, operation: str, results: Any) -> None:
        if operation == "dispatch":
            check_dispatch(who, self.case, self.inputs, self.truth, results)
        elif operation == "combine":
            check_combine(who, self.inputs, self.truth, results)
        elif operation == "round trip + grad":
            check_round_trip(who, self.inputs, self.truth, results)

    def measure(self, operation: str, effort: Effort) -> dict[str, dict]:
        """Times all contestants that were admitted to an operation."""
        samples = measure(self._calls[operation], effort)
        return {name: sample.summary() for name, sample in samples.items()}


def _replace(dispatched: Any, **fields: Any) -> Any:
    if dataclasses.is_dataclass(dispatched):
        return dataclasses.replace(dispatched, **fields)
    return dispatched._replace(**fields)


def main() -> None:
    die_first()
    request = json.loads(sys.argv[1])
    result = run_case(Case(**request["case"]), Effort(**request["effort"]))
    pathlib.Path(sys.argv[2]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
