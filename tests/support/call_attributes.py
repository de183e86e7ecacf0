"""The attributes of the custom calls in lowered programs."""

import re

import cases
from harness import AXIS, config_of, make_mesh
from jax_ep.geometry import Geometry
from jax_ep.group import EPGroup
from jax_ep.transports.host import HostConnection
from jax_ep.transports.p2p import P2pConnection

SILU = {
    "token_format": "str",
    "scales_layout": "str",
    "interleaved": "bool",
    "clamped": "bool",
    "alpha": "f32",
    "limit": "f32",
}
GATE = {name: SILU[name] for name in ("interleaved", "clamped", "alpha", "limit")}
CONNECTIONS = {"cpu": HostConnection, "cuda": P2pConnection}
SMALL = {"hidden_size": 128, "max_tokens": 4}
CASES = {
    "plain": cases.SMALL[2].replace(**SMALL),
    "row weights": cases.SMALL[2].replace(weights="row", **SMALL),
    "unweighted": cases.SMALL[2].replace(weights="none", **SMALL),
    "shared": cases.SMALL[2].replace(fused_shared_expert=True, **SMALL),
    "skip_a2a": cases.SMALL[2].replace(skip_a2a=True, **SMALL),
    "transposed": cases.SMALL[2].replace(token_format="blockwise_fp8", **SMALL),
    "input scale": cases.SMALL[2].replace(token_format="nvfp4", input_scale=0.3, **SMALL),
}


def closed_group(case, platform: str) -> EPGroup:
    """A group that is not open: enough to lower its calls, for any platform."""
    connection = CONNECTIONS[platform]
    geometry = Geometry(make_mesh(case.n_ranks), AXIS, config_of(case), connection.name)
    return EPGroup(connection(geometry))


def lowered(function, platform: str, *operands) -> str:
    return function.trace(*operands).lower(lowering_platforms=(platform,)).as_text()


def attributes_by_target(text: str) -> dict[str, list[dict[str, str]]]:
    """For each custom call of ours, the types of its attributes by name."""
    found: dict[str, list] = {}
    for target, config in re.findall(
        r"custom_call @(jax_ep_\w+)\(.*?(?:mhlo\.)?backend_config = \{(.*?)\}", text
    ):
        attributes = re.findall(r'(\w+) = ("[^"]*"|[^,]+)', config)
        found.setdefault(target, []).append({name: type_of(value) for name, value in attributes})
    return found


def type_of(value: str) -> str:
    if value.startswith('"'):
        return "str"
    return "bool" if value in ("true", "false") else value.split(" : ")[1]
