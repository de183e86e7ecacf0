"""The token formats of Python against the table in C++ (ffi/core/formats.h), fact by fact.

A format, layout or fact that only one side has fails.
"""

import inspect

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jax_ep
from harness import QUANTIZED_FORMATS
from jax_ep.ffi import extension
from jax_ep.formats import QuantizedFormat, TokenFormat

DTYPES = [jnp.bfloat16, jnp.float16, jnp.float32]
FORMATS = [*map(jax_ep.Plain, DTYPES), *(each() for each in QUANTIZED_FORMATS.values())]
SCALE_TYPES = {
    None: None,
    np.dtype(np.float32): "float32",
    np.dtype(ml_dtypes.float8_e8m0fnu): "e8m0",
    np.dtype(ml_dtypes.float8_e4m3fn): "e4m3",
}
ELEMENT_BITS = {"e4m3": 8, "e2m1": 4}


def facts_of(token_format: TokenFormat) -> dict:
    """The entry of a format that `token_formats()` of the host extension must have."""
    scale_dtype = token_format.scale_dtype
    facts = {
        "name": token_format.name,
        "block_size": 0,
        "element": token_format.row_dtype.name,
        "element_bits": 8 * token_format.row_dtype.itemsize,
        "packed": False,
        "scale_type": SCALE_TYPES[scale_dtype],
        "scale_bytes": 0 if scale_dtype is None else scale_dtype.itemsize,
        "takes_input_scale": token_format.takes_input_scale,
        "scales_layouts": [],
        "row_alignment": {},
    }
    if isinstance(token_format, QuantizedFormat):
        facts |= facts_of_quantized(token_format)
    return facts


def facts_of_quantized(token_format: QuantizedFormat) -> dict:
    layouts = token_format.scales_layouts
    # The default, which is that of an instance without arguments, comes first.
    assert type(token_format)().layout == token_format.layout == layouts[0]
    return {
        "block_size": token_format.block_size,
        "element": token_format.element,
        "element_bits": ELEMENT_BITS[token_format.element],
        "packed": token_format.packed,
        "scales_layouts": [layout.name for layout in layouts],
        "row_alignment": {x.name: x.row_alignment for x in layouts if x.row_alignment != 1},
    }


def test_python_and_the_extension_have_the_same_formats():
    table = {facts["name"]: facts for facts in extension.load_host().token_formats()}
    assert table == {each.name: facts_of(each) for each in FORMATS}


def test_the_comparison_covers_every_quantized_format():
    classes = [each for each in vars(jax_ep).values() if inspect.isclass(each)]
    quantized = {each for each in classes if issubclass(each, QuantizedFormat)}
    assert {each for each in quantized if not inspect.isabstract(each)} == set(
        QUANTIZED_FORMATS.values()
    )


@pytest.mark.parametrize("token_format", FORMATS, ids=lambda each: each.name)
def test_a_row_has_as_many_bytes_as_its_elements(token_format):
    facts, hidden_size = facts_of(token_format), 1024
    assert token_format.payload_bytes(hidden_size) * 8 == hidden_size * facts["element_bits"]
    block_size = facts["block_size"] or 1
    scale_bytes = facts["scale_bytes"] * (hidden_size // block_size)
    assert token_format.token_bytes(hidden_size) == (
        token_format.payload_bytes(hidden_size) + scale_bytes
    )
