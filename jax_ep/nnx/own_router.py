"""What a layer does with a router of the user's, on arrays of the whole mesh."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import P

from jax_ep.exchange.checks import as_int32, check_per_token
from jax_ep.nnx.forward import mask_tokens
from jax_ep.nnx.token_axes import spec_of_call
from jax_ep.router import Routes, route


def route_shards(layer: Any, logits: jax.Array, bias: jax.Array | None) -> Routes:
    """`route`, on each device for its own tokens: XLA would gather the operands of `top_k`."""
    by_token: Any = spec_of_call(layer.group, layer.token_axes, layer.follows_tokens, logits)
    config, top_k = layer.router_config, layer.top_k
    mapped = jax.shard_map(
        lambda logits, bias: route(config, logits, top_k, bias),
        mesh=layer.group.mesh,
        in_specs=(by_token, P()),
        out_specs=by_token,
    )
    return mapped(logits, bias)


def call_router_fn(
    layer: Any, tokens: jax.Array, mask: jax.Array | None, router_args: dict[str, Any]
) -> Routes | None:
    """The routes, checked; None if the layer has no `router_fn`."""
    call = layer.group.geometry.call("nnx.MoE")
    if layer.router_fn is not None:
        with jax.named_scope("router"):
            padded = tokens if mask is None else mask_tokens(tokens, mask)
            routes = layer.router_fn(layer, padded, mask, **router_args)
        sizes = {"K": layer.top_k, "E": layer.n_experts}
        return _check_routes(f"{call}: router_fn", routes, tokens.shape[:-1], sizes)
    if router_args:
        raise TypeError(
            f"{call}: further arguments are for router_fn, which the layer lacks; got "
            f"{', '.join(router_args)}."
        )
    return None


def _check_routes(
    name: str, routes: Any, leading: tuple[int, ...], sizes: dict[str, int]
) -> Routes:
    """Requires routes of tokens `[*leading, H]`; ids become int32."""
    if not isinstance(routes, Routes):
        raise TypeError(
            f"{name} must return jax_ep.router.Routes(topk_ids, topk_weights, scores, logits), of "
            f"which the last three may be None; got {type(routes).__name__}."
        )
    dtypes = {"topk_ids": jnp.integer}
    for field, x in routes._asdict().items():
        letter = "K" if field.startswith("topk") else "E"
        if x is not None or field == "topk_ids":
            dtype = dtypes.get(field, jnp.floating)
            check_per_token(name, field, x, leading, sizes[letter], letter, dtype)
    return routes._replace(topk_ids=as_int32(routes.topk_ids))
