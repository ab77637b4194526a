"""Converts between this rank's part and a whole tensor, equal on all ranks like its gradient.

function   forward                       gradient
gather     the ranks' parts, joined      this rank's part: all ranks have the whole gradient
own_part   this rank's part              the ranks' parts, joined
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed._functional_collectives import wait_tensor
from torch.distributed.device_mesh import DeviceMesh

from symm_cp.group.memory import group_name
from symm_cp.ops.collectives.low_contention import low_contention_all_gather
from symm_cp.ops.matmul import all_gather_matmul


class Seat(NamedTuple):
    """This rank's place in the group of a mesh."""

    group: str
    rank: int
    world_size: int

    @classmethod
    def in_mesh(cls, mesh: DeviceMesh) -> Seat:
        """Raises `ValueError` for a mesh of several dimensions."""
        return cls(group_name(mesh), mesh.get_local_rank(), mesh.size())

    def equal_parts(self, length: int) -> list[int]:
        """Returns the lengths of all ranks' parts, if each has this length."""
        return [length] * self.world_size


def gather(part: torch.Tensor, dim: int, seat: Seat, sizes: Sequence[int]) -> torch.Tensor:
    """Joins the ranks' parts along `dim`; `sizes` are their lengths."""
    result: torch.Tensor = _Gather.apply(part, dim % part.dim(), seat, tuple(sizes))
    return result


def own_part(whole: torch.Tensor, dim: int, seat: Seat, sizes: Sequence[int]) -> torch.Tensor:
    """Returns this rank's part along `dim`; `sizes` are the lengths of all ranks' parts."""
    result: torch.Tensor = _OwnPart.apply(whole, dim % whole.dim(), seat, tuple(sizes))
    return result


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, part: torch.Tensor, dim: int, seat: Seat, sizes: tuple[int, ...]
    ) -> torch.Tensor:
        ctx.options = dim, seat, sizes
        if len(sizes) == 1:
            return part.view_as(part)
        if part.dim() > 1 and part.is_floating_point() and not torch.compiler.is_compiling():
            # One native call, which blocks until the gather is complete.
            each = sizes if len(set(sizes)) > 1 else None
            whole, _ = all_gather_matmul(
                part, [], gather_dim=dim, group=seat.group, sizes=each, return_gathered=True
            )
            return whole.contiguous()
        # Parts are sent flat: they may differ in length, and need not be contiguous along `dim`.
        before, after = part.shape[:dim], part.shape[dim + 1 :]
        lengths = [size * math.prod(before) * math.prod(after) for size in sizes]
        uneven = lengths if len(set(sizes)) > 1 else None
        flat = low_contention_all_gather(part.reshape(-1), group=seat.group, sizes=uneven)
        pieces = wait_tensor(flat).split(lengths)
        shaped = [p.view(*before, size, *after) for p, size in zip(pieces, sizes, strict=True)]
        return torch.cat(shaped, dim)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        return own_part(grad, *ctx.options), None, None, None


class _OwnPart(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, whole: torch.Tensor, dim: int, seat: Seat, sizes: tuple[int, ...]
    ) -> torch.Tensor:
        ctx.options = dim, seat, sizes
        return whole.narrow(dim, sum(sizes[: seat.rank]), sizes[seat.rank]).contiguous()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        return gather(grad, *ctx.options), None, None, None
