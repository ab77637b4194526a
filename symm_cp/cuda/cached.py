"""Caches for later calls: tensors on devices, and values that the host has read from them."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import lru_cache, update_wrapper
from typing import Concatenate, Generic, ParamSpec, TypeVar

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from symm_cp.cuda.registry import device_of, has_streams
from symm_cp.modes import ordinary_tensors

P = ParamSpec("P")
T = TypeVar("T")


def capturing(device: torch.device) -> bool:
    """Whether a torch device's current stream is being captured into a graph."""
    if not has_streams(device):
        return False
    serving = device_of(device)
    with serving.guard():
        return serving.capturing()


class Cached(Generic[P, T]):
    """A function of a device and hashable arguments that makes tensors; caches its latest results.

    On a device with streams each stream has its own results: a tensor of another stream may not be
    complete yet, and when it is dropped the allocator reuses its memory without waiting for this
    stream. While a graph is captured nothing is cached: the memory belongs to the graph, has no
    contents before the graph is replayed, and must stay as long as the graph does.
    """

    def __init__(self, make: Callable[Concatenate[torch.device, P], T], maxsize: int) -> None:
        def on_stream(stream: int, device: torch.device, *args: P.args, **kwargs: P.kwargs) -> T:
            return self._made(device, *args, **kwargs)

        self._make = make
        self._on_stream = lru_cache(maxsize=maxsize)(on_stream)
        update_wrapper(self, make)

    def __call__(self, device: torch.device, *args: P.args, **kwargs: P.kwargs) -> T:
        """Returns the tensors for use on the current stream of the device."""
        if not has_streams(device):
            return self._on_stream(0, device, *args, **kwargs)  # type: ignore[arg-type]
        serving = device_of(device)
        with serving.guard():
            if serving.capturing():
                return self._make(device, *args, **kwargs)
            stream = serving.streams("sync")[0]
            return self._on_stream(stream, device, *args, **kwargs)  # type: ignore[arg-type]

    def _made(self, device: torch.device, *args: P.args, **kwargs: P.kwargs) -> T:
        if not has_streams(device):
            with ordinary_tensors():
                return self._make(device, *args, **kwargs)
        return device_of(device).keep(lambda: self._make(device, *args, **kwargs))

    def forget(self) -> None:
        """Drops all results."""
        self._on_stream.cache_clear()


def cached(maxsize: int) -> Callable[[Callable[Concatenate[torch.device, P], T]], Cached[P, T]]:
    """Decorates a function whose latest `maxsize` results are cached."""
    return lambda make: Cached(make, maxsize)


class HostReads(Generic[T]):
    """Caches results that the host computed from tensors on devices, while these do not change.

    Reading a tensor makes the host wait for all earlier kernels. Only changes that torch counts are
    noticed: not changes by a replayed graph, nor by a kernel that torch does not know.
    """

    def __init__(self) -> None:
        self._known: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

    def get(self, tensor: torch.Tensor, read: Callable[[], T], *, context: Hashable = None) -> T:
        """Returns `read()`, which depends on the values of `tensor` and on `context` alone."""
        if tensor.device.type == "cpu" or tensor.is_inference():  # versions are not counted then
            return read()
        version = tensor._version
        known = self._known.get(tensor)
        if known is None or known[:2] != (version, context):
            known = self._known[tensor] = version, context, read()
        result: T = known[2]
        return result
