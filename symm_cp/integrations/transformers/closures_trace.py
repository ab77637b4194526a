"""Reads the variables that a function captures in Dynamo. Imported while Dynamo traces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch._dynamo.variables import TupleVariable
from torch._dynamo.variables import higher_order_ops as dynamo_ops
from torch._dynamo.variables.functions import NestedUserFunctionVariable
from torch._ops import HigherOrderOperator

_NAME = "symm_cp_captured"


class _Captured(HigherOrderOperator):
    """Never in a graph: Dynamo replaces the call by its result."""

    def __init__(self) -> None:
        super().__init__(_NAME)

    def __call__(self, function: Any, read: Callable[[Any], tuple[Any, ...]]) -> tuple[Any, ...]:
        return read(function)


class _CapturedVariable(dynamo_ops.TorchHigherOrderOperatorVariable):
    _HOP_NAME = f"torch.ops.higher_order.{_NAME}"

    def call_function(self, tx: Any, args: Any, kwargs: Any) -> Any:
        function, read = args[0].realize(), args[1]
        if not isinstance(function, NestedUserFunctionVariable):  # made outside of the traced code
            return read.call_function(tx, [function], {})
        contents = function.closure.items if function.closure else ()
        return TupleVariable([tx.output.side_effects.load_cell(cell) for cell in contents])


dynamo_ops._hop_name_to_variable_class[_NAME] = _CapturedVariable

captured_in_trace = _Captured()
