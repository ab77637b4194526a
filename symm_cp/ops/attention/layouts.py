"""Finds the layout of a sequence; encodes layouts as a tensor, for graphs that run with any one.

A graph would hold numbers as constants, and be compiled again for each length, load balancer, or
set of documents. The tensor is an input of the graph instead; kernels read it when they run.

It is 1-D, of int64, on CPU: the number of layouts, and for each the number of its chunks, their
order and their lengths (see schedule/layout.py). Zeros fill it up to a power of two, so that it
has one of few sizes. With no layouts, sequences of any length are spread head-tail. A first number
of -B means B sequences in a row, each spread by the one layout that follows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Protocol, TypeVar

import torch
import torch.nn.functional as F

from symm_cp.modes import ordinary_tensors
from symm_cp.schedule.layout import SequenceLayout, held_layout, in_a_row

_LEAST = 64


@lru_cache(maxsize=64)
def encoded(layouts: tuple[SequenceLayout, ...]) -> torch.Tensor:
    """Returns the layout of the only sequence, or the layouts of several lengths, as one tensor."""
    numbers = [len(layouts)]
    for layout in layouts:
        numbers += [len(layout.chunk_order), *layout.chunk_order, *layout.chunk_lengths]
    size = max(_LEAST, 1 << (len(numbers) - 1).bit_length())
    with ordinary_tensors():
        return torch.tensor(numbers + [0] * (size - len(numbers)), dtype=torch.int64, device="cpu")


def encoded_in_a_row(layout: SequenceLayout, count: int, size: int) -> torch.Tensor:
    """Returns the layout of `count` sequences in a row as one tensor of `size` numbers.

    Its size does not depend on `count`, which may be known only when a graph runs.
    """
    tensor = encoded((layout,)).new_zeros(size)
    one = encoded((layout,))[:size]
    tensor[: len(one)] = one
    if count != 1:
        tensor[0] = -count
    return tensor


def in_rank_order(*lengths: torch.Tensor) -> torch.Tensor:
    """Returns one tensor of layouts that give each rank one run of positions, in rank order.

    `lengths` are each sequence's run lengths, (W,) of int64 on CPU, known only when a graph runs.
    """
    world_size = lengths[0].shape[0]
    order = torch.arange(world_size, device="cpu")
    parts = [torch.tensor([len(lengths)], device="cpu")]
    for of_ranks in lengths:
        parts += [torch.tensor([world_size], device="cpu"), order, of_ranks]
    numbers = torch.cat(parts)
    size = max(_LEAST, 1 << (numbers.shape[0] - 1).bit_length())
    return F.pad(numbers, (0, size - numbers.shape[0]))


def decoded(op: str, layouts: torch.Tensor, world_size: int) -> tuple[SequenceLayout, ...]:
    """Returns the layouts that a tensor encodes; raises `ValueError` for other tensors."""
    if (layouts.dtype, layouts.device.type, layouts.dim()) != (torch.int64, "cpu", 1):
        raise ValueError(
            f"{op}: layouts must be a 1-D tensor of int64 on CPU, is {layouts.dtype} "
            f"{list(layouts.shape)} on {layouts.device}"
        )
    try:
        numbers = tuple(layouts.tolist())
    except MemoryError:
        raise ValueError(f"{op}: layouts of {len(layouts)} numbers do not fit in memory") from None
    return _decoded(op, numbers, world_size)


@lru_cache(maxsize=64)
def _decoded(op: str, numbers: tuple[int, ...], world_size: int) -> tuple[SequenceLayout, ...]:
    found: list[SequenceLayout] = []
    begin = 1
    in_row = -numbers[0] if numbers and numbers[0] < 0 else 0
    try:
        for _ in range(1 if in_row else numbers[0]):
            order = begin + 1
            lengths = order + numbers[begin]
            end = lengths + numbers[begin]
            found.append(SequenceLayout(world_size, numbers[order:lengths], numbers[lengths:end]))
            begin = end
    except (IndexError, ValueError) as error:
        raise ValueError(
            f"{op}: layouts={list(numbers[:16])}... holds no layouts: {error}"
        ) from None
    return (in_a_row(found * in_row),) if in_row else tuple(found)


class Spread(Protocol):
    """A layout: a `SequenceLayout`, or a load balancer, which wraps one."""

    @property
    def lengths(self) -> Sequence[int]:
        """How many positions each rank holds."""


S = TypeVar("S", bound=Spread)


def layout_held(
    op: str,
    known: Sequence[S],
    rows: int,
    rank: int,
    world_size: int,
    head_tail: Callable[[int, int], S],
) -> S:
    """Returns the layout of a sequence with `rows` positions on this rank.

    Without known layouts it is head-tail; `head_tail(length, world_size)` makes it.
    """
    if len(known) == 1:
        return known[0]
    if known:
        return known[held_layout(op, [layout.lengths[rank] for layout in known], rows)]
    if rows % 2 != 0:
        raise ValueError(
            f"{op}: {rows} positions on this rank cannot be split into two equal chunks: pass a "
            "load_balancer, which knows the length of the whole sequence"
        )
    return head_tail(rows * world_size, world_size)


def layout_of_keys(
    op: str,
    known: Sequence[S],
    rows: tuple[int, int],
    rank: int,
    world_size: int,
    head_tail: Callable[[int, int], S],
    *,
    ordered: bool,
) -> S | None:
    """Returns the layout of keys, or None if it is unknown and makes no difference.

    It makes none if keys and queries differ in length (cross-attention) and keys are not `ordered`:
    every query sees all keys. `rows` are this rank's numbers of queries and keys.
    """
    queries, keys = rows
    if queries != keys and len(known) < 2 and not ordered:
        return None
    if queries != keys and len(known) == 1:
        raise ValueError(
            f"{op}: this rank has {queries} queries and {keys} keys, and the load_balancer is for "
            f"sequences of one length, {sum(known[0].lengths)}: pass load_balancer={{length of the "
            "whole sequence: its LoadBalancer, ...}"
        )
    return layout_held(op, known, keys, rank, world_size, head_tail)


def must_count_keys(known: Sequence[Spread], *, ordered: bool) -> bool:
    """Whether ranks must count all keys to decide if the keys have the only known layout.

    If that layout is uneven and keys are not `ordered`, a rank may have equal numbers of keys and
    queries although the keys belong to another sequence.
    """
    return len(known) == 1 and not ordered and len(set(known[0].lengths)) > 1
