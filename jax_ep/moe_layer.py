"""moe: dispatch, experts and combine as one call."""

import jax

from jax_ep.formats import Quantized
from jax_ep.group import EPGroup
from jax_ep.layer.expert_mlp import expert_mlp
from jax_ep.layer.quantize_weights import QuantizedWeights
from jax_ep.ops import combine, dispatch


def moe(
    group: EPGroup,
    tokens: jax.Array | Quantized,
    topk_ids: jax.Array,
    topk_weights: jax.Array | None,
    gate_up: jax.Array | QuantizedWeights,
    down: jax.Array | QuantizedWeights,
    *,
    gate_up_bias: jax.Array | None = None,
    down_bias: jax.Array | None = None,
    transposed: bool = False,
    interleaved: bool = False,
    clamp: tuple[float, float] | None = None,
) -> jax.Array:
    """The whole layer: `dispatch`, `expert_mlp` and `combine`, with the weights at dispatch.

    These three calls:

    ```python
    rows = jax_ep.dispatch(group, tokens, topk_ids, topk_weights)
    results = jax_ep.expert_mlp(rows, gate_up, down)
    out = jax_ep.combine(group, results, rows)
    ```

    Only the three calls tell how many rows were dropped.

    Args:
        group: from `ep_init`.
        tokens: `[..., H]`, as for `dispatch`.
        topk_ids: `[..., K]`, as for `dispatch`.
        topk_weights: `[..., K]`, or None for sums without weights.
        gate_up: `[L + se, H, 2 F]`, as for `expert_mlp`.
        down: `[L + se, F, H]`.
        gate_up_bias: `[L + se, 2 F]` or None.
        down_bias: `[L + se, H]` or None.
        transposed: whether the weights are `[L + se, 2 F, H]` and `[L + se, H, F]`.
        interleaved: whether gate and up columns alternate, as in `fused_silu`.
        clamp: `(alpha, limit)`, as in `fused_silu`.

    Returns:
        `[..., H]` in `config.combine_dtype`.

    Raises:
        TypeError: as for the three calls, whose names messages begin with. While tracing.
        ValueError: as for the three calls. While tracing.
        jax.errors.JaxRuntimeError: as for `dispatch`.
    """
    rows = dispatch(group, tokens, topk_ids, topk_weights)
    results = expert_mlp(
        rows,
        gate_up,
        down,
        gate_up_bias=gate_up_bias,
        down_bias=down_bias,
        transposed=transposed,
        interleaved=interleaved,
        clamp=clamp,
    )
    return combine(group, results, rows)
