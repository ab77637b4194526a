"""The kernels of symm_cp/cuda/kernels/signals.py on CPU memory, in the stream's thread."""

from __future__ import annotations

import ctypes
import time

import torch

#: How long a wait lasts before the process is aborted, in seconds; as in driver.cpp.
PATIENCE = 30


class FlagKernels:
    """The kernels of a simulated device that signal."""

    def signal(self, bases: torch.Tensor, offset: int, first: int, count: int, value: int) -> None:
        for base in bases.roll(-first)[:count].tolist():
            ctypes.c_int32.from_address(base + offset).value = value

    def wait(
        self, flags: torch.Tensor, first: int, count: int, needed: int, *, reset: bool
    ) -> None:
        at = flags.data_ptr()
        pitch = flags.stride(0) * flags.element_size()
        W = len(flags)
        words = [ctypes.c_int32.from_address(at + (first + i) % W * pitch) for i in range(count)]
        deadline = time.monotonic() + PATIENCE
        while any(word.value - needed < 0 for word in words):
            time.sleep(20e-6)
            if time.monotonic() > deadline:
                raise SystemError(
                    f"no signal for {PATIENCE} s: {[w.value for w in words]} < {needed}"
                )
        for word in words if reset else ():
            word.value = 0
