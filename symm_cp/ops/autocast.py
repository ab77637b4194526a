"""What the ops do under `torch.autocast`: what torch's own matmul, attention and `cat` do.

Matmuls and attention cast floating inputs to autocast's dtype, except float64; sinks and biases of
attention stay as they are. `all_gather_kv` brings keys and values to one dtype, the wider. Scaled
matmuls and the backward ops take their inputs as they are, and compute in their dtypes. Collectives
compute nothing: autocast does not reach them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch.amp.autocast_mode import _cast

from symm_cp import cuda
from symm_cp.ops.common import Op, device_kernels, keys_of_ours, lib, named_with_sizes

#: Takes the arguments of an op and the device; returns the arguments to use under autocast.
Prepare: TypeAlias = Callable[[tuple[Any, ...], str], tuple[Any, ...]]

#: What `symm_cp.override_cuda_ops` registers for torch's ops, by dispatch key and name.
device_autocast: dict[tuple[str, str], Op] = {}


def cast(args: tuple[Any, ...], device: str) -> tuple[Any, ...]:
    """Returns arguments with tensors, also those in lists, as autocast casts those of a matmul."""
    result: tuple[Any, ...] = _cast(args, device, torch.get_autocast_dtype(device))
    return result


def cast_query_key_value(args: tuple[Any, ...], device: str) -> tuple[Any, ...]:
    """Returns the arguments, of which the first three are cast."""
    return *cast(args[:3], device), *args[3:]  # what masks and scores look up stays as it is


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


def _rule(name: str, device: str, key: str, prepare: Prepare) -> Op:
    op = getattr(torch.ops.symm_mem, name).default
    keys = torch._C.DispatchKeySet(torch._C._parse_dispatch_key(key))

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(keys):
            return op(*prepare(args, device), **kwargs)

    return kernel


def register(prepare: Prepare, *names: str) -> None:
    """Registers what ops, and those that take sizes, do with their inputs under autocast.

    The kernels are called only while autocast is on for the device of an input. Where torch has
    kernels, autocast leaves the inputs of torch's ops alone until ours are installed instead.
    """
    kinds = ((kind.torch_type, kind.dispatch_key) for kind in cuda.known())
    for device, dispatch_key in (("cpu", "CPU"), *kinds):
        key = f"Autocast{dispatch_key}"
        for name in named_with_sizes(*names):
            rule = _rule(name, device, key, prepare)
            if name in device_kernels and dispatch_key not in keys_of_ours():
                device_autocast[key, name] = rule
            else:
                lib.impl(name, rule, key)
