"""Misuses of configs, of meshes and of groups that open."""

import json
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jax_ep
from error_triggers.base import E, R, T, closed_group, config, init, make_mesh
from fake_store import FakeClient
from jax_ep.geometry import Geometry, MeshCoordinate
from jax_ep.nodes.nvshmem.connection import NvshmemByNodes, room_problem
from jax_ep.processes.exchange import Exchange
from jax_ep.processes.meeting import _Ending
from jax_ep.processes.messages import Message


def mesh_with_a_device_twice() -> jax.sharding.Mesh:
    devices = jax.devices()[:R]
    return make_mesh([*devices[:-1], devices[0]])


def init_in_memory_of(group: Any) -> jax_ep.EPGroup:
    return jax_ep.ep_init(make_mesh(), "ep", config(), memory_of=group)


def set_up(**changes: Any) -> None:
    """One step of opening a group, in process 0 of 2."""
    facts = {"top_k": "2"}
    exchange = Exchange("group", (0, 1), 0, 0.1, facts=facts, **changes)
    exchange.gather("workspaces", lambda: b"address")


def set_up_with(other: bytes, when: str = "0/1") -> None:
    """Sets up with a value from process 1 in JAX's store; `when`: step and name of the key."""
    client = FakeClient()
    client.values[f"jax_ep/0-1/open/0/{when}"] = other
    set_up(client=client)


def message(payload: bytes, group: str = "group", step: str = "workspaces") -> bytes:
    return Message(group, step, payload, {"top_k": "8"}).encode()


def given_up(kind: str) -> None:
    """Process 1 has given up before process 0 came."""
    ending = _Ending("group", kind, 1, "process 1 waited 9 s for process 0 (group group, ...")
    set_up_with(ending.encode(), when="0/end")


def init_host_of_two_processes() -> None:
    """Pretends that one of the CPU devices belongs to another process."""
    devices = [types.SimpleNamespace(process_index=process) for process in (0, 1)]
    replica = [MeshCoordinate(device, 0, rank) for rank, device in enumerate(devices)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Geometry, "routed_replicas", [replica])
        jax_ep.ep_init(make_mesh(), "ep", config(), transport="host")


def init_nvshmem_of_three_processes_on_a_gpu() -> None:
    """Pretends that they share it by MPS."""
    room = ["uuid", 132, True]
    library = types.SimpleNamespace(n_blocks=64, room=lambda _: room)
    answers = [json.dumps(room).encode()] * 3
    exchange = Exchange("group", (0, 1, 2), 0, 0.1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Exchange, "__call__", lambda *_: answers)
        reason = room_problem(library, exchange, 0)
        patch.setattr(NvshmemByNodes, "unsupported_reason", classmethod(lambda *_: reason))
        init(transport="nvshmem", n_nodes=2)


TRIGGERS: dict[str, Callable[[], Any]] = {
    "count-type": lambda: config(top_k=2.5),
    "count-range": lambda: config(n_experts=2**40),
    "count-value": lambda: config(hidden_size=0),
    "top-k": lambda: config(top_k=E + 1),
    "format-type": lambda: config(token_format=jnp.bfloat16),
    "format-dtype": lambda: jax_ep.Plain(jnp.int8),
    "block-size": lambda: config(token_format=jax_ep.BlockwiseFP8()),
    "scales-layout": lambda: jax_ep.MXFP8("transposed"),
    "capacity-alignment": lambda: config(
        token_format=jax_ep.BlockwiseFP8(), hidden_size=128, recv_capacity=6
    ),
    "on-drop": lambda: config(on_drop="ignore"),
    "row-alignment": lambda: config(row_alignment=8),
    "combine-dtype": lambda: config(combine_dtype=jnp.float64),
    "timeout-type": lambda: config(timeout_s="soon"),
    "timeout": lambda: config(timeout_s=float("inf")),
    "name": lambda: config(name="decode-1"),
    "config-type": lambda: jax_ep.ep_init(make_mesh(), "ep", None),
    "copies": lambda: config(expert_copies=-1),
    "copies-same": lambda: config(expert_copies=2, skip_a2a=True),
    "copies-choices": lambda: init(max_tokens_per_rank=2**28, recv_capacity=8, expert_copies=2),
    "flag": lambda: config(skip_a2a=0),
    "config-pickle": lambda: object.__new__(jax_ep.EPConfig).__setstate__({"n_expert": 8}),
    "config-empty": lambda: jax_ep.ep_init(make_mesh(), "ep", object.__new__(jax_ep.EPConfig)),
    "exchange-type": lambda: jax_ep.ep_init(make_mesh(), "ep", config(), exchange="store"),
    "mesh-abstract": lambda: jax_ep.ep_init(
        jax.sharding.AbstractMesh((1,), ("ep",)), "ep", config()
    ),
    "mesh-twice": lambda: init(mesh_with_a_device_twice()),
    "mesh-type": lambda: jax_ep.ep_init(jax.devices(), "ep", config()),
    "axis": lambda: jax_ep.ep_init(make_mesh(), "expert", config()),
    "experts": lambda: init(n_experts=6),
    "shared-experts": lambda: init(n_experts=2**31 - R, fused_shared_expert=True),
    "row-numbers": lambda: init(max_tokens_per_rank=2**30),
    "nodes": lambda: init(n_gpus_per_node=2, n_nodes=4),
    "node-counts": lambda: init(n_gpus_per_node=3),
    "transport-name": lambda: init(transport="carrier-pigeon"),
    "transport-mesh": init_host_of_two_processes,
    "memory-type": lambda: init_in_memory_of(make_mesh()),
    "memory-closed": lambda: init_in_memory_of(closed_group()),
    "memory-mesh": lambda: init_in_memory_of(init(make_mesh(jax.devices()[:R][::-1]))),
    "memory-other": lambda: init_in_memory_of(init(n_experts=2 * E)),
    "memory-smaller": lambda: init_in_memory_of(init(max_tokens_per_rank=T - 1)),
    "setup-missing": lambda: set_up(client=FakeClient()),
    "setup-late": lambda: given_up("timeout"),
    "setup-failed": lambda: set_up(custom=lambda _, mine: [mine, message(b"-no memory")]),
    "setup-other": lambda: set_up_with(message(b"+", group="other")),
    "setup-gave-up": lambda: given_up("failure"),
    "setup-garbage": lambda: set_up_with(b"garbage"),
    "setup-exchange": lambda: set_up(custom=lambda _, mine: [mine]),
    "setup-exchange-type": lambda: set_up(custom=lambda *_: None),
    "setup-exchange-garbage": lambda: set_up(custom=lambda _, mine: [mine, b"garbage"]),
    "gpu-platform": lambda: init(transport="p2p"),
    "rail-room": init_nvshmem_of_three_processes_on_a_gpu,
}
