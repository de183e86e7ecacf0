"""Layout: which tensors of a checkpoint fill which parameters of a layer."""

import dataclasses
import itertools
import operator
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from flax import nnx

from jax_ep.checkpoints.shards import Part, gather, load, own_shards
from jax_ep.checkpoints.tensors import BLOCKS, SCALES
from jax_ep.nnx import MoE

_VECTORS = ("logit_bias", "router_bias", "gate_up_bias", "down_bias")
_MATRICES = ("router", "gate_up", "down", "shared_gate_up", "shared_down")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """Where a kind of checkpoint has the parameters of `nnx.MoE`; frozen and hashable.

    Each attribute but the first and the last has the name of a parameter and says which tensors
    fill it, by their keys after the prefix; None if the checkpoints have none, and so must the
    layer. `{}` in a key stands for the number of an expert, from 0; a tensor without has all
    experts, along its first axis. Several tensors are parts of a matrix, along its outputs: first
    gate, then up. Matrices whose keys end in `.weight` are `[n_out, n_in]`, as PyTorch's linear
    layers store them; others are `[n_in, n_out]`.

    Two forms of quantized matrices are read: e4m3 codes with a factor for each 128 x 128 block,
    whose key ends in `_scale_inv`; and MXFP4, keys ending in `_blocks` and `_scales`.

    Attributes:
        prefix: what all keys begin with; `{}` stands for the number of a layer.
        router, logit_bias, router_bias: of the router, `[E, H]` and `[E]`.
        gate_up, down, gate_up_bias, down_bias: of the experts.
        shared_gate_up, shared_down: of the shared expert.
        interleaved: whether gate and up alternate in `gate_up`; that of the layer must be equal.
    """

    prefix: str = "model.layers.{}.mlp."
    router: str = "gate.weight"
    logit_bias: str | None = None
    router_bias: str | None = None
    gate_up: str | tuple[str, ...] = ("experts.{}.gate_proj.weight", "experts.{}.up_proj.weight")
    down: str = "experts.{}.down_proj.weight"
    gate_up_bias: str | None = None
    down_bias: str | None = None
    shared_gate_up: str | tuple[str, ...] | None = None
    shared_down: str | None = None
    interleaved: bool = False

    def load(self, moe: MoE, tensors: Mapping[str, Any], layers: int | Sequence[int]) -> None:
        """Fills the parameters of a layer, or of layers stacked by `nnx.vmap`.

        Each process reads the shards that its devices hold, one at a time, expert by expert. The
        layer's matrices may be transposed or not. Quantized tensors are multiplied by their scales
        in float32; but if `moe.quantize_experts()` has been called, experts' codes and scales are
        loaded as they are. Numbers are rounded to the dtypes of the parameters.

        Args:
            moe: on devices, or abstract, as `nnx.eval_shape(create)` makes it, so that there is no
                memory for initial values. Variables that the layout does not name stay as they are.
            tensors: by key, anything that has a shape and can be sliced, such as arrays of NumPy,
                those of `open_safetensors`, or safetensors' `get_slice(key)`. No slice that is
                asked for is larger than a shard, or than the blocks of scales that it touches.
            layers: the layer's number in the checkpoint; for stacked layers, the number of each.

        Raises:
            TypeError: `moe` is not an `nnx.MoE`, or `layers` are no integers.
            ValueError: the layer and the layout have other parameters, or a tensor is missing or
                has a shape or dtype that does not fit.
        """
        names = self._check("load", moe)
        arrays = nnx.to_pure_dict(nnx.state(moe))
        places = _places("load", arrays["router"], layers)
        for name in names:
            array = arrays.pop(name)
            parts = [self._parts(moe, name, array.shape, *each, tensors) for each in places]
            loaded = load(name, array, moe.group.mesh, [*itertools.chain(*parts)], tensors)
            nnx.update(moe, {name: loaded})

    def save(
        self, moe: MoE, layers: int | Sequence[int], dtype: Any = None
    ) -> Iterator[tuple[str, np.ndarray]]:
        """The tensors of a layer, or of stacked layers, layer by layer: what `load` takes.

        `dict(layout.save(...))` can be loaded again, with the same bits. Codes of
        `quantize_experts` stay codes with scales; all else is unquantized. Each process gets the
        tensors of experts that its devices hold, and none that another process gets, so that it
        can write them to a file of its own.

        Args:
            moe: the layer, on devices.
            layers: as for `load`.
            dtype: what `nnx.Param`s are cast to, such as `jnp.bfloat16`; None: they are not.
                `router_bias`, codes and scales never are.

        Returns:
            Keys and arrays, one by one, so the host need not hold all at once.

        Raises:
            TypeError: `moe` is not an `nnx.MoE`, or `layers` are no integers.
            ValueError: the layer and the layout have other parameters, or a tensor is spread over
                devices of several processes.
        """
        names = self._check("save", moe)
        arrays = nnx.to_pure_dict(nnx.state(moe))
        places = _places("save", arrays["router"], layers)
        shards = {name: own_shards(arrays[name]) for name in names}
        dtypes = {x: dtype for x in names if dtype and isinstance(getattr(moe, x), nnx.Param)}
        return (
            (part.key, tensor.astype(dtypes.get(name, tensor.dtype), copy=False))
            for place in places
            for name in names
            for part in self._parts(moe, name, arrays[name].shape, *place)
            if (tensor := gather(shards[name], part)) is not None
        )

    def _check(self, call: str, moe: Any) -> list[str]:
        """The names of the layer's parameters, which must be those of the layout."""
        if not isinstance(moe, MoE):
            raise TypeError(f"Layout.{call}: moe must be an nnx.MoE; got {type(moe).__name__}.")
        wanted, got = (
            [name for name in (*_MATRICES, *_VECTORS) if getattr(each, name) is not None]
            for each in (self, moe)
        )
        if got != wanted:
            raise ValueError(
                f"Layout.{call}: the layer must have the parameters {', '.join(wanted)}; got "
                f"{', '.join(got)}. Its arguments router_bias, logit_bias, expert_bias and "
                "shared_size say which it has."
            )
        if moe.interleaved != self.interleaved:
            raise ValueError(
                f"Layout.{call}: the layer must have interleaved={self.interleaved}; got "
                f"{moe.interleaved}."
            )
        return [*wanted, "gate_up_scales", "down_scales"] if _has_codes(moe) else wanted

    def _parts(
        self,
        moe: MoE,
        name: str,
        shape: tuple[int, ...],
        position: int | None,
        number: int,
        tensors: Collection[str] = (),
    ) -> Iterator[Part]:
        """What fills a parameter of one layer; or of many, at the position of this layer."""
        keys = _as_tuple(getattr(self, name.removesuffix("_scales")))
        lead = () if position is None else ((position, position + 1),)
        ranges = [*lead, *[(0, size) for size in shape[len(lead) :]]]
        by_expert, n_in_first = "{}" in keys[0], _has_inputs_first(moe, name)
        axis = -1 if n_in_first or name in _VECTORS else -2  # of outputs
        size = shape[axis] // len(keys)
        for expert in range(shape[len(lead)]) if by_expert else (0,):
            for i, key in enumerate(keys):
                if by_expert:
                    ranges[len(lead)] = expert, expert + 1
                ranges[axis] = i * size, (i + 1) * size
                full = self.prefix.format(number) + key.format(expert)
                is_stored_so = not key.endswith(".weight") and full + BLOCKS not in tensors
                swapped = name not in _VECTORS and n_in_first != is_stored_so
                full += SCALES if name.endswith("_scales") else ""
                yield Part(full, tuple(ranges), len(lead) + by_expert, swapped)


def _has_inputs_first(moe: Any, name: str) -> bool:
    """Whether a parameter is `[..., n_in, n_out]`."""
    are_codes = _has_codes(moe) and name in ("gate_up", "down")
    return name == "router" or (name in _MATRICES and not moe.transposed and not are_codes)


def _has_codes(moe: Any) -> bool:
    return moe.gate_up_scales is not None


def _places(call: str, router: Any, layers: int | Sequence[int]) -> list[tuple[int | None, int]]:
    """For each layer, its position in stacked ones or None, and its number in the checkpoint."""
    numbers = [operator.index(each) for each in _as_tuple(layers)]
    is_one, n_stacked = not isinstance(layers, Sequence), router.shape[:-2]
    if n_stacked != (() if is_one else (len(numbers),)):
        wanted = f"{n_stacked[0]} numbers, of the stacked layers" if n_stacked else "one number"
        raise ValueError(f"Layout.{call}: layers must be {wanted}; got {layers!r}.")
    return [(None if is_one else i, number) for i, number in enumerate(numbers)]


def _as_tuple(values: Any) -> tuple[Any, ...]:
    is_many = isinstance(values, Sequence) and not isinstance(values, str)
    return tuple(values) if is_many else (values,)
