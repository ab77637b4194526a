"""How products of shards are made and added up."""

from __future__ import annotations

from collections.abc import Callable

import torch

from symm_cp.memory import Group
from symm_cp.results import new_result


def at_last(run: Callable[[], None], group: Group) -> Callable[[list[torch.Tensor], int], None]:
    """Returns a `consume` that runs something once, when the shards of all ranks have come."""
    left = group.world_size

    def consume(shards: list[torch.Tensor], rank: int) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            run()

    return consume


def as_rows(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """Returns a matrix with the tensor's last dimension, whose rows are in the order of `dim`."""
    return moved(tensor, dim, 0).flatten(0, -2)


def moved(tensor: torch.Tensor, dim: int, to: int) -> torch.Tensor:
    """As `movedim`: returns the tensor itself where nothing moves."""
    return tensor if dim == to else tensor.movedim(dim, to)


class Sum:
    """Adds up several terms, in float32 for the 16-bit types, and writes the result once.

    A product of 16-bit matrices is rounded by the kernel; adding the rounded products in 16 bits
    would round at every step, and the error would grow with the number of ranks.
    """

    def __init__(self, out: torch.Tensor, terms: int) -> None:
        self._out = out
        wide = terms <= 1 or out.dtype not in (torch.bfloat16, torch.float16)
        self._total = out if wide else new_result(out, out.shape, torch.float32)
        self._part = None if wide else new_result(out, out.shape)
        self._empty = True

    def add_product(self, a: torch.Tensor, b: torch.Tensor) -> None:
        """Adds a @ b."""
        if self._part is not None:
            self.add(torch.mm(a, b, out=self._part))
        elif self._empty:
            torch.mm(a, b, out=self._total)
            self._empty = False
        else:
            self._total.addmm_(a, b)

    def add(self, term: torch.Tensor) -> None:
        """Adds a tensor."""
        if self._empty:
            self._total.copy_(term)
        else:
            self._total.add_(term)
        self._empty = False

    def finish(self) -> None:
        """Writes the sum; zeros when nothing was added."""
        if self._empty:
            self._total.zero_()
        if self._total is not self._out:
            self._out.copy_(self._total)
