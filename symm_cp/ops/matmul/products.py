"""Products of shards, and their sums."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from symm_cp.group.memory import Group
from symm_cp.tensors.dtypes import NARROW, wide
from symm_cp.tensors.results import new_result
from symm_cp.tensors.shards import Split


def at_last(run: Callable[[], None], group: Group) -> Callable[[list[torch.Tensor], int], None]:
    """Returns a `consume` that calls `run` once, when the shards of all ranks have arrived."""
    left = group.world_size

    def consume(shards: list[torch.Tensor], rank: int) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            run()

    return consume


def as_rows(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """Returns a matrix with the tensor's last dimension, whose rows are in the order of `dim`."""
    return tensor.movedim(dim, 0).flatten(0, -2)


class Sum:
    """Adds up several terms, in float32 for the 16-bit types, and writes the result once.

    A product of 16-bit matrices is rounded by the kernel; adding the rounded products in 16 bits
    would round at every step, and the error would grow with the number of ranks.
    """

    def __init__(self, out: torch.Tensor, terms: int) -> None:
        self._out = out
        in_place = terms <= 1 or out.dtype not in NARROW
        self._total = out if in_place else new_result(out, out.shape, wide(out.dtype))
        self._part = None if in_place else new_result(out, out.shape)
        self._empty = True

    def add_product(
        self, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None
    ) -> None:
        """Adds a @ b, and a bias to every row."""
        if self._part is not None:
            self.add(_product(a, b, bias, self._part))
        elif self._empty:
            _product(a, b, bias, self._total)
            self._empty = False
        else:
            self._total.addmm_(a, b)
            if bias is not None:
                self._total.add_(bias)

    def add(self, term: torch.Tensor) -> None:
        """Adds a tensor, or a row to every row."""
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


def _product(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
) -> torch.Tensor:
    return torch.mm(a, b, out=out) if bias is None else torch.addmm(bias, a, b, out=out)


class Terms(NamedTuple):
    """A sum: the products lefts[i] @ rights[i], and an addend; `split` divides it.

    A rank's part travels as `Split.leading` moves it: split by `front` from the shape `moved`.
    """

    lefts: list[torch.Tensor]
    rights: list[torch.Tensor]
    addend: torch.Tensor | None
    like: torch.Tensor
    shape: list[int]
    split: Split
    front: Split
    moved: list[int]
    by_columns: bool

    @classmethod
    def of(
        cls,
        lefts: list[torch.Tensor],
        rights: list[torch.Tensor],
        addend: torch.Tensor | None,
        split: Callable[[list[int]], Split],
    ) -> Terms:
        """Returns at least one term; `split` returns the division of a sum's shape."""
        like = lefts[0] if lefts else addend
        assert like is not None
        shape = [*like.shape[:-1], rights[0].shape[1]] if lefts else list(like.shape)
        divided = split(shape)
        front, moved = divided.leading(shape)
        by_columns = divided.dim == len(shape) - 1
        return cls(lefts, rights, addend, like, shape, divided, front, moved, by_columns)

    def add_up(
        self, out: torch.Tensor, rank: int | None = None, bias: torch.Tensor | None = None
    ) -> None:
        """Writes the sum in the shape `moved`, or a rank's part of it, to `out`.

        `bias` is added to every row.
        """
        matrix, split, addend = out.flatten(0, -2), self.split, self.addend
        if rank is not None and self.by_columns and bias is not None:
            bias = split.along(0).of(rank, bias)
        terms = len(self.lefts) + (addend is not None)
        total = Sum(matrix, terms + (bias is not None and not self.lefts))
        for left, right in zip(self.lefts, self.rights, strict=True):
            if rank is None:
                rows = left.movedim(split.dim, self.front.dim) if not self.by_columns else left
                total.add_product(rows.flatten(0, -2), right, bias)
            elif self.by_columns:
                total.add_product(left.flatten(0, -2), split.along(1).of(rank, right), bias)
            else:
                total.add_product(as_rows(split.of(rank, left), split.dim), right, bias)
            bias = None
        if addend is not None:
            moved = addend.movedim(split.dim, self.front.dim)
            part = moved if rank is None else self.front.of(rank, moved)
            total.add(part.reshape(matrix.shape))
        if bias is not None:
            total.add(bias)
        total.finish()
