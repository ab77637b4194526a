"""Device tensors that are made once and kept for later calls, such as masks and tables."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, update_wrapper
from typing import Concatenate, Generic, ParamSpec, TypeVar

import torch

from symm_cp.devices.registry import device_of, has_streams
from symm_cp.modes import ordinary_tensors

P = ParamSpec("P")
T = TypeVar("T")


class Kept(Generic[P, T]):
    """A function of a device and hashable arguments that makes tensors; keeps its latest results.

    On a device with streams each stream gets its own: what another stream makes may not be complete
    yet, and once it is dropped the allocator reuses its memory without waiting for this one. While
    a graph is captured they are made anew and not kept: their memory is the graph's, holds nothing
    before the graph is replayed, and must stay as long as the graph does.
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
                return self._made(device, *args, **kwargs)
            stream = serving.streams("sync")[0]
            return self._on_stream(stream, device, *args, **kwargs)  # type: ignore[arg-type]

    def _made(self, device: torch.device, *args: P.args, **kwargs: P.kwargs) -> T:
        with ordinary_tensors():
            return self._make(device, *args, **kwargs)

    def forget(self) -> None:
        """Drops what is kept."""
        self._on_stream.cache_clear()


def kept(maxsize: int) -> Callable[[Callable[Concatenate[torch.device, P], T]], Kept[P, T]]:
    """Decorates a function whose latest `maxsize` results are kept."""
    return lambda make: Kept(make, maxsize)
