"""Runs measurements in a process of its own; one JSON object per line on stdout.

The parent is main.py, which sets the environment. First comes a description of the
devices, then the result of each item, in order.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType

from gpu import formats, link, overlap
from gpu.cases import Case
from gpu.contestants import AXIS
from gpu.measure import (
    LARGE,
    LARGE_EFFORT,
    Arena,
    Effort,
    breaks_devices,
    measure,
)


def main(request: dict[str, Any]) -> None:
    """`request`: `platform`, `transport`, `effort`, `items`."""
    devices = jax.devices(request["platform"])
    mesh = jax.sharding.Mesh(np.array(devices), (AXIS,), axis_types=(AxisType.Auto,))
    _say(describe(devices))
    arenas = _Arenas(mesh, request.get("effort"))
    for item in request["items"]:
        try:
            if item["who"] == "link":
                result = link.measure(devices, item["n_bytes"])
            else:
                arena = arenas.of(item["case"])
                result = _measure(arena, item, request["transport"])
                result |= {
                    "capacity": arena.case.n_rows,
                    "effort": dataclasses.asdict(arena.effort),
                }
        except Exception as error:  # the other items go on
            result = {"failed": [f"{type(error).__name__}: {error}"[:2000]]}
            if breaks_devices(error):
                result["is_fatal"] = True
        _say(result)
        if result.get("is_fatal"):
            return


def _measure(arena: Arena, item: dict[str, Any], transport: str) -> dict[str, Any]:
    if item["who"] == "overlap":
        return overlap.measure(arena, item["n_sms"], transport, item["width"])
    if item["who"] == "format":
        return formats.measure(arena, item["token_format"], transport)
    return measure(arena, item["who"], transport, item["parts"])


def describe(devices: list[jax.Device]) -> dict[str, Any]:
    """What the figures depend on, as JAX knows it."""
    return {
        "device": devices[0].device_kind,
        "n_devices": len(devices),
        "n_processes": jax.process_count(),
        "platform_version": devices[0].client.platform_version,
    }


class _Arenas:
    """The last case's inputs: contestants of one case follow each other."""

    def __init__(self, mesh: jax.sharding.Mesh, effort: dict | None) -> None:
        self._mesh, self._effort = mesh, effort
        self._arena: Arena | None = None

    def of(self, fields: dict[str, Any]) -> Arena:
        case = Case(n_ranks=self._mesh.size, **fields)
        if self._arena is None or self._arena.case != case:
            self._arena = None  # frees its arrays first
            self._arena = Arena(self._mesh, case, self._effort_of(case))
        return self._arena

    def _effort_of(self, case: Case) -> Effort:
        if self._effort is not None:
            return Effort(**self._effort)
        return LARGE_EFFORT if case.n_tokens > LARGE else Effort()


def _say(result: dict[str, Any]) -> None:
    print(json.dumps(result), flush=True)
