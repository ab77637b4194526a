"""Attention by heads: ranks exchange parts of the sequence for heads, attend, and exchange back.

Shapes: a shard is (B, N, S_r, E), all heads of this rank's part of the sequence; after the exchange
(B, N_r, S, E), some heads of the whole sequence, in its order. Over a mesh of two dimensions S is
the part of the sequence that the ranks of a column hold together, and the ranks of a row gather
keys.

Masks are functions of positions, so they are as without the exchange; sinks and biases are sliced,
and dropout counts heads from the first of this rank. The backward pass exchanges again what the
forward pass was given, instead of keeping it twice.

Source: DeepSpeed Ulysses (Jacobs et al., 2023); the mix is that of USP (Fang and Zhao, 2024).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group

from symm_cp import runtime
from symm_cp.hosts import on_this_host
from symm_cp.memory import Group, resolve
from symm_cp.ops.attention.attend import Added, Given
from symm_cp.ops.attention.heads import HeadShares, shares_of
from symm_cp.ops.attention.methods import Method
from symm_cp.ops.attention.pipeline import Grad, Tensors
from symm_cp.ops.attention.spec import AttentionSpec
from symm_cp.ops.attention.tiles import dense_features, empty_output, rows_first, wide
from symm_cp.ops.common import group_of
from symm_cp.ops.head_exchange import HeadExchange, HeadPart, HeadRanges, head_exchange
from symm_cp.ops.head_exchange import rows_first as rows_of_heads
from symm_cp.schedule.layout import SequenceLayout, sequential

#: Computes attention of some heads, given query, key and value; its gradients, given whether those
#: of keys and values are wanted in the dtype that sums are taken in.
Attend: TypeAlias = Callable[[Tensors, Added], tuple[torch.Tensor, torch.Tensor]]
AttendBackward: TypeAlias = Callable[[Given, Added, bool], tuple[Tensors, Grad]]


class Part(NamedTuple):
    """A tensor that is exchanged: its layout over the ranks, and each rank's heads of it."""

    tensor: torch.Tensor
    layout: SequenceLayout
    heads: HeadRanges


def to_heads(name: bytes, group: Group, parts: Sequence[Part]) -> list[torch.Tensor]:
    """Returns (B, N_r, S, E) of each part, of which this rank gives (B, N, S_r, E). Collective."""
    exchange = _exchange_of(group, parts, [part.tensor.shape for part in parts], to_heads=True)
    tensors = [dense_features(part.tensor) for part in parts]
    outputs = exchange.new_outputs(tensors)
    runtime.of(tensors[0], group).exchange(group, exchange, tensors, outputs, name)
    return outputs


def to_sequence(
    name: bytes, group: Group, parts: Sequence[Part], results: Sequence[torch.Tensor]
) -> None:
    """Writes (B, N, S_r, E) of each part, of which this rank gives (B, N_r, S, E). Collective.

    Heads that several ranks give are added in rank order, in float32 for 16-bit types.
    """
    exchange = _exchange_of(group, parts, [result.shape for result in results], to_heads=False)
    tensors = [dense_features(part.tensor) for part in parts]
    outputs = [
        result
        if part.disjoint
        else rows_of_heads(tensor, part.arriving_shape(group.rank, to_heads=False))
        for result, part, tensor in zip(results, exchange.parts, tensors, strict=True)
    ]
    runtime.of(tensors[0], group).exchange(group, exchange, tensors, outputs, name)
    for result, found in zip(results, exchange.summed(outputs), strict=True):
        if found is not result:
            result.copy_(found)


def _exchange_of(
    group: Group, parts: Sequence[Part], shapes: Sequence[torch.Size], *, to_heads: bool
) -> HeadExchange:
    """Returns the exchange of parts; `shapes` are those of the tensors that have all heads."""
    of_parts = tuple(
        HeadPart((B, N, part.layout.length, E), part.tensor.dtype, part.layout, part.heads)
        for part, (B, N, _, E) in zip(parts, shapes, strict=True)
    )
    return head_exchange(group.rank, to_heads, of_parts)


@contextlib.contextmanager
def telling(*groups: str) -> Iterator[None]:
    """Tells the ranks of groups whose calls follow that this one will not make them."""
    try:
        yield
    except Exception as error:
        for name in groups:
            with contextlib.suppress(Exception):  # no group, nobody to tell
                # The error itself may have been reported already, but to other ranks.
                on_this_host(resolve(name), "cpu").refuse("sync", RuntimeError(str(error)))
        raise


@dataclass(frozen=True, eq=False)
class UlyssesCall:
    """One call on this rank, around an attention of this rank's heads, `spec`.

    `group` exchanges heads, `of_keys` (if any) gathers keys. `whole` is the spec of all heads.
    `queries` and `keys` are how `group` spreads what it holds of them, `gathered_queries` and
    `gathered_keys` how `of_keys` spreads what there is after the exchange.
    """

    group: Group
    of_keys: Group | None
    shares: HeadShares
    whole: AttentionSpec
    spec: AttentionSpec
    queries: SequenceLayout
    keys: SequenceLayout
    gathered_queries: SequenceLayout
    gathered_keys: SequenceLayout

    @property
    def heads(self) -> tuple[int, int]:
        """This rank's query heads."""
        return self.shares.queries[self.group.rank]

    def attend(
        self, op: str, tensors: Tensors, added: Added, attend: Attend
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the output and its log-sum-exp of all heads. Collective."""
        query, key, value = tensors
        name = self._name(op, query, key)
        with telling(*self._names_of_keys):
            of_heads = to_heads(name, self.group, self._inputs(query, key, value))
        with telling(self.group.name):
            out, lse = attend(self._repeated(*of_heads), self._slice(added))
        results = (
            empty_output(dense_features(query), value.shape[3]),
            query.new_empty(query.shape[:3], dtype=wide(query.dtype)),
        )
        parts = [self._of_queries(out), self._of_queries(lse.unsqueeze(-1))]
        to_sequence(name, self.group, parts, (results[0], results[1].unsqueeze(-1)))
        return results

    def attend_backward(
        self, op: str, given: Given, added: Added, attend_backward: AttendBackward
    ) -> tuple[Tensors, Grad]:
        """Returns the gradients of query, key and value, and that of the bias. Collective."""
        query, key, value, out, lse, grad_out, grad_lse = given
        name = self._name(op, query, key, grad_lse is None)
        rows = [out, grad_out, lse.unsqueeze(-1)]
        if grad_lse is not None:
            rows.append(grad_lse.unsqueeze(-1))
        with telling(*self._names_of_keys):
            parts = [*self._inputs(query, key, value), *map(self._of_queries, rows)]
            q, k, v, *others = to_heads(name, self.group, parts)
        out, grad_out, *of_rows = others
        lse, *of_lse = (rows.squeeze(-1) for rows in of_rows)
        q, k, v = self._repeated(q, k, v)
        with telling(self.group.name):
            inner = Given(q, k, v, out, lse, grad_out, of_lse[0] if of_lse else None)
            grads, of_bias = attend_backward(inner, self._slice(added), self.shares.keys_overlap)
            of_keys = [self._summed(grad) for grad in grads[1:]]
        parts = [self._of_queries(grads[0]), *map(self._of_keys, of_keys)]
        results = tuple(rows_first(t, t.shape, t.dtype) for t in (query, key, value))
        to_sequence(name, self.group, parts, results)
        if of_bias is not None and added.bias is not None:
            of_heads, of_bias = of_bias, torch.zeros_like(added.bias)
            of_bias[slice(*self.heads)] = of_heads
        return results, of_bias

    @property
    def _names_of_keys(self) -> tuple[str, ...]:
        return () if self.of_keys is None else (self.of_keys.name,)

    def _slice(self, added: Added) -> Added:
        """Returns what belongs to this rank's heads."""
        heads = slice(*self.heads)
        return Added(*(None if tensor is None else tensor[heads] for tensor in added))

    def _name(self, op: str, query: torch.Tensor, key: torch.Tensor, *details: object) -> bytes:
        if self.of_keys is not None:
            # Errors count ranks within the column.
            members = _resolve_process_group(self.group.name)  # type: ignore[arg-type]
            op = f"{op} over ranks {dist.get_process_group_ranks(members)}"
        return self.whole.call_name(op, key, "ulysses", self.queries, query.shape[1], *details)

    def _inputs(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> list[Part]:
        return [self._of_queries(query), self._of_keys(key), self._of_keys(value)]

    def _of_queries(self, tensor: torch.Tensor) -> Part:
        return Part(tensor, self.queries, self.shares.queries)

    def _of_keys(self, tensor: torch.Tensor) -> Part:
        return Part(tensor, self.keys, self.shares.keys)

    def _repeated(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Tensors:
        """Repeats key heads that unequally many query heads look at: kernels take no such."""
        each = self.shares.key_of_each(self.group.rank)
        if each is None:
            return query, key, value
        index = torch.tensor(each, device=key.device)
        return query, key.index_select(1, index), value.index_select(1, index)

    def _summed(self, grad: torch.Tensor) -> torch.Tensor:
        """Adds up the gradients of repeated key heads."""
        rank = self.group.rank
        each = self.shares.key_of_each(rank)
        if each is None:
            return grad
        B, _, S, E = grad.shape
        begin, end = self.shares.keys[rank]
        total = grad.new_zeros((B, end - begin, S, E), dtype=wide(grad.dtype))
        for head, key_head in enumerate(each):
            total[:, key_head] += grad[:, head]
        return total


def call_of(
    op: str,
    method: Method,
    group: Group,
    spec: AttentionSpec,
    heads: tuple[int, int],
    layouts: tuple[SequenceLayout, SequenceLayout],
) -> UlyssesCall:
    """Returns the call of all heads on this rank.

    `group` are all ranks over which the sequence is spread, `heads` the numbers of query and key
    heads, `layouts` how queries and keys are spread. Raises `ValueError` for fewer heads than
    ranks.
    """
    queries, keys = layouts
    of_heads, of_keys, grid = group, None, method.grid
    if grid is None:
        spread = queries, keys, sequential(queries.length, 1), sequential(keys.length, 1)
    else:
        of_heads, of_keys = group_of(grid.heads), group_of(grid.keys)
        spread = (
            grid.of_heads(queries, group.rank),
            grid.of_heads(keys, group.rank),
            grid.of_keys(queries),
            grid.of_keys(keys),
        )
    shares = shares_of(op, *heads, of_heads.world_size)
    _, _, gathered_queries, gathered_keys = spread
    first = shares.queries[of_heads.rank][0]
    of_rank = replace(
        spec,
        layout=gathered_keys,
        queries=None if spec.queries is None else gathered_queries,
        head_offset=spec.head_offset + first if spec.dropout_p > 0 else 0,
    )
    return UlyssesCall(of_heads, of_keys, shares, spec, of_rank, *spread)
