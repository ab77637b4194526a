"""A matrix library whose last bits depend on addresses, as MKL's do on some processors.

`watched()` records every product that an op computes in a pipeline: where its operands and its
result begin, modulo 64 bytes, and with which strides. With `ulps` it shifts the result by a number
of ulps that depends on this record only, so that on any processor a comparison of bits fails if the
same product was computed with other addresses or strides.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from symm_cp import runtime
from symm_cp.tensors.alignment import ALIGN
from tests.cuda.simulated import by_python

#: torch's products, and attention, which is made of them.
PRODUCTS = (
    "mm",
    "addmm",
    "addmm_",
    "bmm",
    "baddbmm",
    "_scaled_mm",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention_for_cpu_backward",
)
_BITS = {torch.float32: torch.int32, torch.float64: torch.int64}

#: A tensor's layout as a matrix library may see it: address modulo 64, shape and strides.
Place = tuple[int, tuple[int, ...], tuple[int, ...]]


def place_of(tensor: torch.Tensor) -> Place:
    if not tensor.numel():  # a library reads nothing
        return 0, tuple(tensor.shape), ()
    return tensor.data_ptr() % ALIGN, tuple(tensor.shape), tensor.stride()


class Watch(TorchDispatchMode):
    """Records products, and makes their last bits depend on the recorded layouts."""

    def __init__(self, ulps: int) -> None:
        super().__init__()
        self.ulps = ulps
        self.calls: list[tuple[str, tuple[Place, ...]]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        if func.namespace != "aten" or name not in PRODUCTS:
            return func(*args, **kwargs)
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
        call = name, tuple(place_of(tensor) for tensor in tensors)
        self.calls.append(call)
        result = func(*args, **kwargs)
        self._change(result[0] if isinstance(result, tuple) else result, call)
        return result

    def _change(self, result: torch.Tensor, call: tuple[str, tuple[Place, ...]]) -> None:
        places = zlib.crc32(repr(call).encode()) % (self.ulps + 1)
        if result.dtype in _BITS and places:
            bits = result.view(_BITS[result.dtype])
            bits.add_(places * result.isfinite())

    def over(self, call: Any) -> Any:
        """Returns a call whose kernels run under this watch."""
        twin = copy.copy(call)
        for name, field in vars(call).items():
            if callable(field) and not isinstance(field, torch.Tensor):
                setattr(twin, name, self._watched(field))
        return twin

    def _watched(self, function: Callable[..., object]) -> Callable[..., None]:
        def kernel(*args: Any) -> None:
            with self:
                function(*args)

        return kernel


@contextmanager
def watched(ulps: int = 0) -> Iterator[list[tuple[str, tuple[Place, ...]]]]:
    """Records the products of pipelines in the list that it yields."""
    watch, run = Watch(ulps), runtime.run
    with by_python(), mock.patch.object(runtime, "run", lambda call: run(watch.over(call))):
        yield watch.calls
