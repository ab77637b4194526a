"""Our kernels instead of torch's, for the ops and devices (CUDA) that torch has kernels for."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Sequence
from types import TracebackType

import torch

from symm_cp import devices, native
from symm_cp.ops.common import device_kernels

_installed: CudaOverride | None = None


class CudaOverride:
    """Our kernels, installed; `undo()`, or the end of a `with` block, restores torch's."""

    def __init__(self, dispatch_keys: Sequence[str]) -> None:
        self._library: torch.library.Library | None = torch.library.Library("symm_mem", "IMPL")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there is a kernel already
            for key, (name, kernel) in itertools.product(dispatch_keys, device_kernels.items()):
                self._library.impl(name, kernel, key, allow_override=True)

    def undo(self) -> None:
        """Restores torch's kernels; a second call does nothing."""
        global _installed
        if self._library is not None:
            self._library._destroy()
            self._library = None
            _installed = None

    def __enter__(self) -> CudaOverride:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.undo()


def installed() -> bool:
    """Returns whether our kernels are installed instead of torch's."""
    return _installed is not None


def override_cuda_ops() -> CudaOverride:
    """Uses our kernels for those ops of `torch.ops.symm_mem` that torch has CUDA kernels for.

    The fused (scaled) matmuls and the low-contention collectives: copy engines move the bytes,
    streams signal, and calls in flight on a group do not disturb each other. Call it on all ranks.
    Calling it again changes nothing. Returns an object with `undo()`, which is also a
    context manager. Raises `RuntimeError` where the driver does not load.
    """
    global _installed
    kinds = [kind for kind in devices.known() if kind.torch_has_kernels]
    driver_level = native.load().symm_cp_driver
    keys = [kind.dispatch_key for kind in kinds if driver_level(kind.driver.encode()) >= 0]
    if not keys:
        raise RuntimeError(f"override_cuda_ops: {native.error()}")
    if _installed is None:
        _installed = CudaOverride(keys)
    return _installed
