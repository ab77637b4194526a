"""Calls of ops as plain data, drawn by hypothesis and passed to ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

Tensors = list[torch.Tensor]


@dataclass(frozen=True)
class Given:
    """Describes a tensor."""

    shape: tuple[int, ...]
    dtype: str = "float32"
    strided: bool = False  # not contiguous
    special: bool = False  # holds infinity and NaN
    device: str = "cpu"

    def make(self, generator: torch.Generator) -> torch.Tensor:
        """The tensor, with random elements."""
        x = torch.randn(self.shape, generator=generator) * 3
        if self.special and x.numel() > 0:
            places = torch.randint(x.numel(), (2,), generator=generator)
            x.view(-1)[places] = torch.tensor([float("inf"), float("nan")])
            if not getattr(torch, self.dtype).is_floating_point:
                x = x.nan_to_num(0, 0, 0)
        x = x.to(getattr(torch, self.dtype))
        if self.strided and x.dim() > 0:
            x = torch.stack([x, x], -1)[..., 0]
        return x.to(self.device)


@dataclass(frozen=True)
class Case:
    """A call on all ranks."""

    op: str
    tensors: tuple[Given, ...]
    dim: int = 0
    reduce_op: Any = "sum"
    flag: bool = False
    group: str = "this"
    differs: tuple[Given, ...] = ()  # the last rank's tensors, if they differ
    seed: int = 0
    options: tuple[tuple[str, Any], ...] = ()  # the options passed, out of `Kind.options`

    def option(self, name: str, otherwise: Any = None) -> Any:
        """An option of the op."""
        return dict(self.options).get(name, otherwise)

    def inputs(self, world_size: int) -> list[Tensors]:
        """The tensors of all ranks, which every rank can compute from the seed."""
        made = []
        for rank in range(world_size):
            generator = torch.Generator().manual_seed(self.seed * 8 + rank)
            last = rank == world_size - 1
            made.append([t.make(generator) for t in (last and self.differs) or self.tensors])
        return made


@dataclass(frozen=True)
class Kind:
    """An op."""

    name: str  # the op's name in errors
    arguments: tuple[str, ...]
    good: Callable[[int, int, int, int], tuple[tuple[int, ...], ...]]  # shapes, by W and sizes
    call: Callable[[Tensors, Case, Any], Any]
    expected: Callable[[list[Tensors], int, Case], Tensors]
    options: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)  # right and wrong values


def wide(x: torch.Tensor) -> torch.Tensor:
    """The tensor in the highest precision of its kind, for references."""
    return x.to(torch.complex128) if x.is_complex() else x.double() if x.is_floating_point() else x


def total(parts: Tensors, reduce_op: object) -> torch.Tensor:
    """The expected result of a reduction."""
    if reduce_op not in ("sum", "avg"):
        raise ValueError(reduce_op)
    summed = sum(parts[1:], parts[0])
    assert isinstance(summed, torch.Tensor)
    return summed / len(parts) if reduce_op == "avg" else summed.to(parts[0].dtype)


def part(x: torch.Tensor, rank: int, ranks: int, dim: int) -> torch.Tensor:
    if x.shape[dim] % ranks:
        raise ValueError(f"{ranks} do not divide {list(x.shape)}")
    return x.chunk(ranks, dim)[rank] if x.numel() else x.narrow(dim, 0, x.shape[dim] // ranks)


def gathered(ranks: list[Tensors], dim: int, index: int = 0) -> torch.Tensor:
    if any(x[index].dim() == 0 for x in ranks):
        raise ValueError("no dimension")
    return torch.cat([x[index] for x in ranks], dim)
