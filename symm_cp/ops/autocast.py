"""The ops' rules under `torch.autocast`, as for torch's own matmul, attention and `cat`.

Matmuls and attention cast floating inputs to autocast's dtype, except float64; sinks and biases of
attention stay as they are. `all_gather_kv` brings keys and values to one dtype, the wider. Scaled
matmuls and the backward ops take their inputs as they are, and compute in their dtypes. Collectives
compute nothing: autocast does not reach them.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.amp.autocast_mode import _cast

from symm_cp import cuda
from symm_cp.ops.common import keys_of_ours, libraries
from symm_cp.ops.op import Kernel, Op, Prepare, untouched

#: Kernels that `symm_cp.override_cuda_ops` registers for torch's ops, by dispatch key and name.
device_autocast: dict[tuple[str, str], Kernel] = {}


def cast(args: tuple[Any, ...], device: str) -> tuple[Any, ...]:
    """Returns arguments with tensors, also in lists, cast as autocast casts a matmul's."""
    result: tuple[Any, ...] = _cast(args, device, torch.get_autocast_dtype(device))
    return result


def cast_query_key_value(args: tuple[Any, ...], device: str) -> tuple[Any, ...]:
    """Returns the arguments with the first three cast."""
    return *cast(args[:3], device), *args[3:]  # tensors that masks and scores read stay as they are


def cast_operands(args: tuple[Any, ...], device: str) -> tuple[Any, ...]:
    """Returns the arguments with the first two cast, but not the weights of a sum."""
    return *cast(args[:2], device), *args[2:]


def widen(args: tuple[Any, ...], device: str) -> tuple[Any, ...]:
    """Returns arguments with floating tensors in the widest of their dtypes."""
    dtypes = {t.dtype for t in args if isinstance(t, torch.Tensor) and t.is_floating_point()}
    dtypes -= {torch.float64}
    if not dtypes:
        return args
    result: tuple[Any, ...] = _cast(args, device, functools.reduce(torch.promote_types, dtypes))
    return result


def as_they_are(args: tuple[Any, ...], device: str) -> tuple[Any, ...]:
    """Returns the arguments; autocast is off within the op."""
    return args


def _rule(op: Any, device: str, key: str, prepare: Prepare) -> Kernel:
    keys = torch._C.DispatchKeySet(torch._C._parse_dispatch_key(key))

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(keys):
            return op(*prepare(args, device), **kwargs)

    return kernel


def register_autocast(op: Op) -> None:
    """Registers an op's rule for its inputs under autocast.

    The kernels are called only while autocast is on for the device of an input. Where torch has
    kernels, autocast leaves the inputs of torch's ops alone until ours are installed instead.
    """
    if op.autocast is None or op.autocast is untouched:
        return
    kinds = ((kind.torch_type, kind.dispatch_key) for kind in cuda.known())
    for device, dispatch_key in (("cpu", "CPU"), *kinds):
        key = f"Autocast{dispatch_key}"
        rule = _rule(op.overload, device, key, op.autocast)
        if op.replaces_torch and dispatch_key not in keys_of_ours():
            device_autocast[key, op.name] = rule
        else:
            libraries(op.namespace).ops.impl(op.name, rule, key)
