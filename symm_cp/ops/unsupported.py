"""Makes every op refuse tensors without dense memory, and report the error to the peers.

Sparse, compressed, quantised, MKL-DNN and nested tensors have dispatch keys of their own, at
which torch would refuse a call before it reaches our kernels: the peers would wait for this
rank until their time-out. So each op that runs on CPU tensors has a kernel at these keys that
raises.

The autograd kernels, through which all calls go, report torch's other refusals: named tensors,
wrappers without a rule for the op (common.py, csrc/ops/kernels.cpp).
"""

from __future__ import annotations

from typing import Any

from symm_cp.ops.attention import mesh_calls
from symm_cp.ops.common import libraries, public_name
from symm_cp.ops.op import Op
from symm_cp.ops.tensor_checks import TensorArguments, unsupported

_KEYS = (
    "SparseCPU",
    "SparseCsrCPU",
    "QuantizedCPU",
    "MkldnnCPU",
    "NestedTensorCPU",
    "AutogradNestedTensor",  # no alias of "AutogradCPU", where some ops have their kernel
)


def _refusal(declaration: Op) -> Any:
    arguments = TensorArguments(declaration.overload._schema)
    op = public_name(declaration.name_in_errors)

    def refuse(*args: Any, **kwargs: Any) -> Any:
        error: Exception = NotImplementedError(f"{op}: takes dense tensors only")
        for argument, tensor in arguments.named(args, kwargs):
            if tensor is None:
                error = TypeError(f"{op}: {argument} is None, must be a tensor")
                break
            if what := unsupported(tensor):
                error = NotImplementedError(f"{op}: {argument} is {what}")
                break
        if groups := kwargs.get("method_groups"):
            mesh_calls.give_up(tuple(groups), error)
        raise error

    return refuse


def refuse_without_memory(op: Op) -> None:
    """Makes an op refuse CPU tensors without dense memory."""
    refuse = _refusal(op)
    for key in _KEYS:
        libraries(op.namespace).ops.impl(op.name, refuse, key)
