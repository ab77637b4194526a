"""Gathers and reduce-scatters of unequal parts, for the engines' communicators.

The calls are `torch.distributed.all_gather` and `reduce_scatter` over the backend symm_cp, which
accept views of one tensor as parts. Invalid arguments raise `ValueError` before any communication;
the other ranks, whose calls would wait for this one, raise with its reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist

from symm_cp.ops.error_reports import reports_to_peers


def gather(
    op: str,
    inputs: Sequence[torch.Tensor],
    dim: int,
    sizes: Sequence[int] | None,
    group: dist.ProcessGroup,
    output: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """Joins all ranks' parts of each tensor along `dim`; `sizes` are their lengths.

    By default all have this rank's length. `output`, with one input, is the memory of the result.
    """
    lengths = _lengths_to_gather(op, inputs, dim, sizes, group, output)
    results = []
    for x in inputs:  # all are checked: a rank that refuses one makes none of these calls
        result = x.new_empty(_shape(x, dim, sum(lengths))) if output is None else output
        dist.all_gather(list(result.split(lengths, dim)), x, group=group)
        results.append(result)
    return results


def reduce_scatter(
    op: str,
    input: torch.Tensor,
    dim: int,
    sizes: Sequence[int] | None,
    group: dist.ProcessGroup,
    output: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns this rank's part along `dim`, `sizes[rank]` or an equal part, of the ranks' sum.

    `output` is the memory of the result.
    """
    lengths = _lengths_to_scatter(op, input, dim, sizes, group, output)
    if output is None:
        output = input.new_empty(_shape(input, dim, lengths[group.rank()]))
    dist.reduce_scatter(output, list(input.split(lengths, dim)), group=group)
    return output


# The backend's calls use this channel, so the refusal has the same number as the refused call.
@partial(reports_to_peers, channel="async")
def _lengths_to_gather(
    op: str,
    inputs: Sequence[torch.Tensor],
    dim: int,
    sizes: Sequence[int] | None,
    group: dist.ProcessGroup,
    output: torch.Tensor | None = None,
) -> list[int]:
    """Returns the length of every rank's part along `dim`."""
    rank = group.rank()
    for x in inputs:
        _check_dim(op, x, dim)
    own = inputs[0].shape[dim] if inputs else 0
    parts = [own] * group.size() if sizes is None else list(sizes)
    _check_sizes(op, parts, group.size())
    for x in inputs:
        if x.shape[dim] != parts[rank]:
            wanted = "those of the first" if sizes is None else f"{sizes=}"
            raise ValueError(
                f"{op}: input of shape {tuple(x.shape)} on rank {rank} must have the length "
                f"{parts[rank]} along {dim=}, for {wanted}"
            )
    if output is not None:
        if len(inputs) != 1:
            raise ValueError(f"{op}: output needs one input, got {len(inputs)}")
        _check_output(op, output, inputs[0], dim, sum(parts))
    return parts


@partial(reports_to_peers, channel="async")
def _lengths_to_scatter(
    op: str,
    input: torch.Tensor,
    dim: int,
    sizes: Sequence[int] | None,
    group: dist.ProcessGroup,
    output: torch.Tensor | None = None,
) -> list[int]:
    """Returns the length of every rank's part along `dim`."""
    _check_dim(op, input, dim)
    length, world_size = input.shape[dim], group.size()
    if sizes is None:
        if length % world_size:
            raise ValueError(
                f"{op}: length {length} along {dim=} is not divisible by world size {world_size}; "
                "pass sizes"
            )
        sizes = [length // world_size] * world_size
    _check_sizes(op, sizes, world_size)
    if sum(sizes) != length:
        raise ValueError(f"{op}: {sizes=} must add up to the length along {dim=}, {length}")
    if output is not None:
        _check_output(op, output, input, dim, sizes[group.rank()])
    return list(sizes)


def _check_sizes(op: str, sizes: Sequence[int], world_size: int) -> None:
    if len(sizes) != world_size or any(size < 0 for size in sizes):
        raise ValueError(f"{op}: {sizes=} must be a length for each of {world_size} ranks")


def _check_dim(op: str, x: torch.Tensor, dim: int) -> None:
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"{op}: {dim=} is out of range for a {x.dim()}-D input")


def _shape(x: torch.Tensor, dim: int, length: int) -> list[int]:
    shape = list(x.shape)
    shape[dim] = length
    return shape


def _check_output(op: str, output: torch.Tensor, like: torch.Tensor, dim: int, length: int) -> None:
    shape = _shape(like, dim, length)
    if list(output.shape) != shape or output.dtype != like.dtype:
        raise ValueError(
            f"{op}: output of shape {tuple(output.shape)} and {output.dtype} must be of shape "
            f"{tuple(shape)} and {like.dtype}"
        )
