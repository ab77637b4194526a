"""The table of a routing: which rows ranks send to which experts; kernels for streams and hosts.

W ranks, E experts; each rank has E / W experts in order. A table begins with the numbers of rows
that each rank sends to each expert, (W, E). A place for each pair of a token and one of its experts
follows: its place among all rows that this rank sends, in the order of experts, or -1 for a
dropped pair. csrc/ops/experts.cpp reads the same table for CPU tensors on one host.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from symm_cp import runtime
from symm_cp.group.memory import Group
from symm_cp.ops.common import name_of
from symm_cp.runtime.calls import ExchangeCall, GatherCall
from symm_cp.tensors.dtypes import wide
from symm_cp.tensors.results import contiguous
from symm_cp.tensors.shards import viewing


class Table:
    """The table of a routing on one rank."""

    def __init__(self, op: str, table: torch.Tensor, num_experts: int, group: Group) -> None:
        """Raises `ValueError` or `TypeError` for a tensor that is not a table."""
        ranks, self.rank, self.experts = group.world_size, group.rank, num_experts
        if table.dtype != torch.int64 or not table.is_contiguous():
            raise TypeError(
                f"{op}: table must be a contiguous torch.int64 tensor, is {table.dtype}"
            )
        if table.dim() != 1 or table.numel() < ranks * num_experts:
            raise ValueError(
                f"{op}: table {list(table.shape)} is not of a routing of {ranks} ranks to "
                f"{num_experts} experts"
            )
        self.local = num_experts // ranks
        self.places = table[ranks * num_experts :]
        self.counts = table[: ranks * num_experts].view(ranks, num_experts).tolist()
        self.sent = sum(self.counts[self.rank])
        if self.sent > self.places.numel() or min(map(min, self.counts)) < 0:
            raise ValueError(f"{op}: table is not one of a routing of rank {self.rank}")

    @property
    def pairs(self) -> torch.Tensor:
        """The pair that is sent at each place."""
        return torch.argsort(self.places)[self.places.numel() - self.sent :]

    def count(self, source: int, to: int) -> int:
        """The number of rows from a rank to another."""
        return sum(self.counts[source][to * self.local : (to + 1) * self.local])

    def given(self, packed: torch.Tensor, to: int) -> torch.Tensor:
        """The rows for a rank among all rows that this rank sends."""
        begin = sum(self.count(self.rank, peer) for peer in range(to))
        return packed.narrow(0, begin, self.count(self.rank, to))

    @property
    def rows(self) -> int:
        """The number of rows of this rank's experts."""
        return sum(self.count(source, self.rank) for source in range(len(self.counts)))

    def arriving(self, rows: torch.Tensor, source: int) -> Iterator[torch.Tensor]:
        """Yields the slice of a rank's tokens in `rows` for each of this rank's experts."""
        begin = 0
        for expert in range(self.rank * self.local, (self.rank + 1) * self.local):
            for rank, counts in enumerate(self.counts):
                if rank == source:
                    yield rows.narrow(0, begin, counts[expert])
                begin += counts[expert]

    def exchange(
        self, op: str, group: Group, packed: torch.Tensor, rows: torch.Tensor, *, back: bool
    ) -> None:
        """Sends `packed` (in send order) to the experts' `rows`; with `back`, the other way."""
        ranks = range(group.world_size)
        item = math.prod(rows.shape[1:]) * rows.element_size()
        counts = [[self.count(*((t, s) if back else (s, t))) for t in ranks] for s in ranks]
        name = name_of(op, rows.dtype, rows.shape[1:], f"{self.experts} experts")

        def view(memory: torch.Tensor, count: int) -> torch.Tensor:
            return viewing(memory)(0, (count, *rows.shape[1:]), rows.dtype)

        def give(to: int, memory: torch.Tensor) -> None:
            message = view(memory, counts[self.rank][to])
            if back:
                _collect(message, self.arriving(rows, to))
            else:
                message.copy_(self.given(packed, to))

        def take(source: int, memory: torch.Tensor) -> None:
            message = view(memory, counts[source][self.rank])
            if back:
                self.given(packed, source).copy_(message)
            else:
                _distribute(message, self.arriving(rows, source))

        def keep() -> None:
            copy = _collect if back else _distribute
            copy(self.given(packed, self.rank), self.arriving(rows, self.rank))

        sizes = tuple(tuple(count * item for count in row) for row in counts)
        runtime.run(ExchangeCall(group, give, keep, take, rows.device, name, sizes))


def _collect(message: torch.Tensor, parts: Iterator[torch.Tensor]) -> None:
    torch.cat(list(parts), out=message)


def _distribute(message: torch.Tensor, parts: Iterator[torch.Tensor]) -> None:
    begin = 0
    for part in parts:
        part.copy_(message.narrow(0, begin, part.shape[0]))
        begin += part.shape[0]


def gathered_counts(
    op: str, group: Group, experts: torch.Tensor, num_experts: int, detail: str
) -> list[list[int]]:
    """Returns how many tokens each rank has for each expert. Collective."""
    chosen = experts[experts >= 0]
    own = torch.bincount(chosen.reshape(-1), minlength=num_experts)
    everybody = own.new_zeros((group.world_size, num_experts))

    def consume(shards: list[torch.Tensor], rank: int) -> None:
        everybody[rank].copy_(shards[0])

    name = name_of(op, own.dtype, own.shape, detail)
    runtime.run(GatherCall(group, [own], consume, name))
    return everybody.tolist()


def limited(counts: list[list[int]], capacity: int | None) -> list[list[int]]:
    """Returns the counts limited to each expert's first `capacity` tokens, in rank order."""
    if capacity is None:
        return counts
    left = [capacity] * len(counts[0])
    result = []
    for of_rank in counts:
        result.append([min(pair) for pair in zip(of_rank, left, strict=True)])
        left = [most - taken for most, taken in zip(left, result[-1], strict=True)]
    return result


def places_of(experts: torch.Tensor, counts: list[int]) -> torch.Tensor:
    """Returns the place of each pair among the rows sent, -1 for dropped pairs."""
    flat = experts.reshape(-1)
    order = torch.argsort(flat, stable=True)
    by_expert = flat[order]
    sent = torch.tensor([0, *counts], device=flat.device)
    wanted = torch.bincount(flat + 1, minlength=len(counts) + 1)  # entry 0: pairs of no expert
    first = torch.cumsum(wanted, 0) - wanted
    within = torch.arange(flat.numel(), device=flat.device) - first[by_expert + 1]
    begins = torch.cumsum(sent, 0) - sent
    places = torch.where(within < sent[by_expert + 1], begins[by_expert + 1] + within, -1)
    return torch.empty_like(flat).scatter_(0, order, places)


def added(
    table: Table, packed: torch.Tensor, weights: torch.Tensor | None, top_k: int
) -> torch.Tensor:
    """Returns the weighted sum of each token's rows, which lie in the order of sending."""
    places = table.places.view(-1, top_k)
    dtype = wide(packed.dtype)
    total = packed.new_zeros((places.shape[0], *packed.shape[1:]), dtype=dtype)
    if packed.shape[0] == 0:
        return total.to(packed.dtype)
    ones = (1,) * (packed.dim() - 1)
    for choice in range(top_k):
        at = places[:, choice]
        factor = (at >= 0).to(dtype)
        if weights is not None:
            factor = factor * weights[:, choice].to(dtype)
        row = packed.index_select(0, at.clamp(min=0)).to(dtype)
        # Not a product with zero: other tokens' rows may be infinite.
        total += torch.where((at >= 0).view(-1, *ones), row * factor.view(-1, *ones), 0)
    return contiguous(total.to(packed.dtype))
