"""Mixture-of-Experts expert parallelism for JAX: dispatch and combine."""

from jax_ep.config import EPConfig
from jax_ep.formats import BF16, Plain, TokenFormat
from jax_ep.group import EPGroup, ep_init
from jax_ep.ops import (
    combine,
    combine_async,
    combine_wait,
    dispatch,
    dispatch_async,
    dispatch_wait,
)
from jax_ep.results import Dispatched, InFlight
from jax_ep.transports import COMBINE_NAME, DISPATCH_NAME

__version__ = "0.1.0"

__all__ = [
    "BF16",
    "COMBINE_NAME",
    "DISPATCH_NAME",
    "Dispatched",
    "EPConfig",
    "EPGroup",
    "InFlight",
    "Plain",
    "TokenFormat",
    "combine",
    "combine_async",
    "combine_wait",
    "dispatch",
    "dispatch_async",
    "dispatch_wait",
    "ep_init",
]
