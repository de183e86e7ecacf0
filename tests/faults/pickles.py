"""Tampered pickles of configs, formats and groups: an error that names the field, or a valid one.

python tests/faults/pickles.py [--quick]
"""

import copyreg
import dataclasses
import io
import pickle
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import edges  # noqa: F401
import misuse

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 4)

import jax_ep  # noqa: E402
from jax_ep.group import ep_group as group_module  # noqa: E402
from jax_ep.router import RouterConfig  # noqa: E402

CONFIG = jax_ep.EPConfig(
    n_experts=8, top_k=2, hidden_size=128, max_tokens_per_rank=4, token_format=jax_ep.MXFP8()
)
FIELDS = {each.name: getattr(CONFIG, each.name) for each in dataclasses.fields(CONFIG)}
GROUP_ARGUMENTS = ("cpu", [0, 1, 2, 3], ((4,), ("ep",), None), ("ep", CONFIG, "host"), None)


class _Pickler(pickle.Pickler):
    """Pickles an object as (function, arguments, state), whatever its class says."""

    def __init__(self, file: io.BytesIO, like: Any, reduced: tuple[Any, ...]) -> None:
        super().__init__(file)
        self._like, self._reduced = like, reduced

    def reducer_override(self, x: Any) -> Any:
        return self._reduced if x is self._like else NotImplemented


def load(kind: type, state: Any) -> Any:
    """An unpickled object of a class, with any state: the pickle of earlier versions, too."""
    blank, file = object.__new__(kind), io.BytesIO()
    _Pickler(file, blank, (copyreg.__newobj__, (kind,), state)).dump(blank)
    return pickle.loads(file.getvalue())


def config(without: str | None = None, **changes: Any) -> Callable[[], Any]:
    fields = {name: x for name, x in (FIELDS | changes).items() if name != without}
    return lambda: load(jax_ep.EPConfig, fields)


def group(index: int, value: Any) -> Callable[[], Any]:
    """A pickled group, with another argument."""
    arguments = [*GROUP_ARGUMENTS]
    arguments[index] = value
    marker, file = object(), io.BytesIO()
    _Pickler(file, marker, (group_module._open_pickled, tuple(arguments))).dump(marker)
    return lambda: pickle.loads(file.getvalue())


def tampered_format(kind: type, **fields: Any) -> Callable[[], Any]:
    return lambda: load(kind, fields)


def tampered_memory() -> Any:
    """A pickle that sets no field at all loads; the first use must refuse it."""
    empty = load(jax_ep.EPConfig, None)
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("ep",))
    return jax_ep.ep_init(mesh, "ep", empty)


# By the field or argument that the error must name.
FAULTS: dict[str, Callable[[], Any]] = {
    "n_experts 0": config(n_experts=0),
    "n_experts -8": config(n_experts=-8),
    "n_experts float": config(n_experts=8.0),
    "n_experts huge": config(n_experts=2**40),
    "n_experts missing": config(without="n_experts"),
    "top_k None": config(top_k=None),
    "top_k 9": config(top_k=9),
    "top_k bool": config(top_k=True),
    "top_k missing": config(without="top_k"),
    "hidden_size 100": config(hidden_size=100),
    "hidden_size str": config(hidden_size="128"),
    "hidden_size missing": config(without="hidden_size"),
    "max_tokens_per_rank list": config(max_tokens_per_rank=[4]),
    "max_tokens_per_rank array": config(max_tokens_per_rank=np.arange(4)),
    "max_tokens_per_rank missing": config(without="max_tokens_per_rank"),
    "token_format str": config(token_format="mxfp8"),
    "token_format None": config(token_format=None),
    "token_format class": config(token_format=jax_ep.MXFP8),
    "token_format dtype": config(token_format=jnp.bfloat16),
    "combine_dtype int": config(combine_dtype=np.int32),
    "combine_dtype None": config(combine_dtype=None),
    "combine_dtype float8": config(combine_dtype=jnp.float8_e4m3fn),
    "fused_shared_expert 1": config(fused_shared_expert=1),
    "skip_a2a None": config(skip_a2a=None),
    "zero_unused_rows str": config(zero_unused_rows="yes"),
    "on_drop None": config(on_drop=None),
    "row_alignment 3": config(row_alignment=3),
    "row_alignment 0": config(row_alignment=0),
    "recv_capacity 0": config(recv_capacity=0),
    "recv_capacity odd": config(recv_capacity=3, row_alignment=4),
    "n_gpus_per_node float": config(n_gpus_per_node=1.5),
    "n_nodes -1": config(n_nodes=-1),
    "n_sms dict": config(n_sms={}),
    "timeout_s nan": config(timeout_s=float("nan")),
    "timeout_s str": config(timeout_s="60"),
    "timeout_s negative": config(timeout_s=-1.0),
    "name dash": config(name="a-b"),
    "name int": config(name=3),
    "n_expert extra": config(n_expert=8),
    "EPConfig list": lambda: load(jax_ep.EPConfig, [8, 2]),
    "n_experts of none": tampered_memory,
    "scales_layout of MXFP8": tampered_format(jax_ep.MXFP8, scales_layout="diagonal"),
    "block_size of BlockwiseFP8": tampered_format(jax_ep.BlockwiseFP8, block_size=3),
    "dtype of Plain": tampered_format(jax_ep.Plain, dtype=np.dtype(np.int8)),
    "scores of RouterConfig": lambda: load(RouterConfig, {"scores": "relu"}),
    "platform 3": group(0, 3),
    "devices of tpu": group(0, "tpu"),
    "ids None": group(1, None),
    "ids repeated": group(1, [0, 1, 2, 2]),
    "device 99": group(1, [0, 1, 2, 99]),
    "axes two": group(2, ((4,), ("ep",))),
    "arguments empty": group(3, ()),
    "memory_of smaller": group(4, dataclasses.replace(CONFIG, max_tokens_per_rank=1)),
}
# Pickles that load, and equal a config that is made from the same fields.
VALID = {
    "name missing": config(without="name"),
    "zero_unused_rows missing": config(without="zero_unused_rows"),
    "timeout_s of NumPy": config(timeout_s=np.float32(60)),
    "recv_capacity beyond need": config(recv_capacity=2**31 - 4),
}


def check(name: str, error: BaseException | None, result: Any) -> str | None:
    if name in VALID:
        is_valid = isinstance(result, jax_ep.EPConfig) and result == dataclasses.replace(result)
        return None if is_valid else f"must load; got {error!r}"
    if not isinstance(error, ValueError | TypeError):
        return f"must raise ValueError or TypeError; got {error!r}, {result!r}"
    what = name.split()[0]
    return None if what in str(error) else f"the error must name {what}; got {error}"


def works() -> None:
    """A right config and a right group, pickled and loaded."""
    assert pickle.loads(pickle.dumps(CONFIG)) == CONFIG
    loaded = group(0, "cpu")()
    assert loaded.config == CONFIG
    loaded.close()


if __name__ == "__main__":
    misuse.run("pickles", FAULTS | VALID, check, works)
