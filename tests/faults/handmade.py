"""Programs as somebody might make them by hand: lowered ones, with calls of ours that are changed.

The functions change operations of a module in place; `lowered.compile()` then compiles the result.
"""

from collections.abc import Iterator
from typing import Any

import jax
from jax.extend.mlir import ir

CONFIG = "mhlo.backend_config"


def calls(lowered: jax.stages.Lowered, target: str) -> list[ir.Operation]:
    """The custom calls of that target."""
    found = _operations(lowered.compiler_ir("stablehlo").operation)
    custom_calls = (op for op in found if op.name == "stablehlo.custom_call")
    name = "call_target_name"
    return [op for op in custom_calls if ir.StringAttr(op.attributes[name]).value == target]


def _operations(operation: ir.Operation) -> Iterator[ir.Operation]:
    for region in operation.regions:
        for block in region:
            for op in block:
                yield op.operation
                yield from _operations(op.operation)


def set_attribute(call: ir.Operation, name: str, value: str) -> None:
    """Sets an attribute that the handler reads, to text such as `3 : i32`."""
    with call.context:
        old = ir.DictAttr(call.attributes[CONFIG])
        config = {old[i].name: old[i].attr for i in range(len(old))}
        config[name] = ir.Attribute.parse(value)
        call.attributes[CONFIG] = ir.DictAttr.get(config)


def alias(call: ir.Operation, operand: int, result: int) -> None:
    """Puts a result into the memory of an operand of its type."""
    indices = [result] if len(call.results) > 1 else []
    with call.context:
        text = (
            f"#stablehlo.output_operand_alias<output_tuple_indices = {indices}, "
            f"operand_index = {operand}, operand_tuple_indices = []>"
        )
        call.attributes["output_operand_aliases"] = ir.ArrayAttr.get([ir.Attribute.parse(text)])


def set_operands(call: ir.Operation, operands: list[ir.Value]) -> None:
    """Replaces the call by one with these operands."""
    layouts = ("operand_layouts", "result_layouts")  # those of row-major arrays are the default
    attributes = (call.attributes[i] for i in range(len(call.attributes)))
    with call.context, call.location, ir.InsertionPoint(call):
        other = ir.Operation.create(
            call.name,
            [result.type for result in call.results],
            operands,
            {each.name: each.attr for each in attributes if each.name not in layouts},
        )
    for old, new in zip(call.results, other.results, strict=True):
        old.replace_all_uses_with(new)
    call.erase()


def filled(call: ir.Operation, shape: list[int], element_type: str, value: int = 0) -> ir.Value:
    """An array of equal numbers that the call may have as an operand.

    `element_type` is text such as `bf16`.
    """
    type_text = f"tensor<{''.join(f'{size}x' for size in shape)}{element_type}>"
    number = str(value) if "i" in element_type else str(float(value))
    with call.context, call.location, ir.InsertionPoint(call):
        array: Any = ir.Attribute.parse(f"dense<{'' if 0 in shape else number}> : {type_text}")
        type_ = ir.Type.parse(type_text)
        return ir.Operation.create("stablehlo.constant", [type_], [], {"value": array}).result
