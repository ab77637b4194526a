"""Runs programs that ask for "cuda" on the CPU, to test GPU code of several ranks without a GPU.

Calls that name a device of CUDA get the CPU: factories, `to`, `cuda()`, modules, meshes, symmetric
memory, and process groups of NCCL, which become groups of `symm_cp`. Streams and events do nothing,
since all work is done when a call returns. A `TorchFunctionMode` and replaced functions do this:
functions of `torch.cuda` and `torch.accelerator` (cuda_stand_ins.py), and others that take devices
(device_stand_ins.py). Tensors report their true device, the CPU.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from importlib import import_module
from itertools import chain
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

from symm_cp import native
from symm_cp.testing import cuda_stand_ins, device_stand_ins
from symm_cp.testing.cuda_stand_ins import UnmappedError
from symm_cp.testing.device_stand_ins import is_index, mapped

__all__ = ["UnmappedError", "cuda_on_cpu"]


class _OnCpu(TorchFunctionMode):
    """Makes torch's functions take the CPU instead of CUDA."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (torch.Tensor.cuda, torch.Tensor.pin_memory):
            return args[0]
        if func is torch.device:  # programs ask a device for its index
            return func("cuda", *args) if args and is_index(args[0]) else func(*args, **kwargs)
        if func is torch.Tensor.to and len(args) > 1 and is_index(args[1]):
            args = (args[0], "cpu", *args[2:])
        kwargs = {name: mapped(value) for name, value in kwargs.items()}
        if is_index(kwargs.get("device")):
            kwargs["device"] = "cpu"
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return func(*map(mapped, args), **kwargs)


def _in_threads() -> Iterator[device_stand_ins.StandIn]:
    """Yields the stand-in by which threads that a program starts get the CPU, too."""
    bootstrap = threading.Thread._bootstrap_inner  # type: ignore[attr-defined]

    def begin(self: threading.Thread) -> None:
        with _OnCpu():
            bootstrap(self)

    yield threading.Thread, "_bootstrap_inner", begin


@contextmanager
def _checked_as_on_gpus() -> Iterator[None]:
    """Inside, ops check their arguments as torch's CUDA kernels do (csrc/ops/as_torch.h)."""
    with suppress(native.BuildError):  # without a compiler there are no such ops
        native.load().symm_cp_check_as_gpus(1)
    try:
        yield
    finally:
        with suppress(native.BuildError):
            native.load().symm_cp_check_as_gpus(0)


@contextmanager
def cuda_on_cpu(world_size: int = 1, rank: int = 0) -> Iterator[None]:
    """Inside, programs that ask for CUDA run on the CPU.

    Args:
        world_size: the result of `torch.cuda.device_count`.
        rank: the result of `torch.cuda.current_device`.

    Features of GPUs only (graphs, free memory, ...) raise `UnmappedError`; kernels in Triton fail
    as without a GPU. What torch's kernels of symmetric memory reject on GPUs is rejected.
    """
    # Dynamo reads torch.cuda once, here, and must find torch's own functions.
    import_module("torch._dynamo")
    import_module("torch._dynamo.variables.torch").TorchInGraphFunctionVariable._get_handlers()
    replaced = chain(
        _in_threads(),
        device_stand_ins.of_modules(),
        device_stand_ins.of_autocast(),
        device_stand_ins.of_tools(),
        device_stand_ins.of_groups(),
        device_stand_ins.of_symmetric_memory(),
        device_stand_ins.of_dtensors(),
        device_stand_ins.of_attention(),
        device_stand_ins.of_compilation(),
        cuda_stand_ins.stand_ins(cuda_stand_ins.devices(world_size, rank)),
    )
    with ExitStack() as stack:
        # All originals are read before the first is replaced.
        for owner, name, stand_in in list(replaced):
            create = not hasattr(owner, name)
            stack.enter_context(mock.patch.object(owner, name, stand_in, create=create))
        stack.enter_context(_checked_as_on_gpus())
        stack.enter_context(_OnCpu())
        yield
