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
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

import torch

from symm_cp import runtime
from symm_cp.hosts import on_this_host
from symm_cp.memory import Group
from symm_cp.ops.attention.attend import Added, Given
from symm_cp.ops.attention.heads import HeadShares, shares_of
from symm_cp.ops.attention.methods import Method
from symm_cp.ops.attention.pipeline import Grad, Tensors
from symm_cp.ops.attention.spec import AttentionSpec
from symm_cp.ops.attention.tiles import dense_features, empty_output, rows_first, wide
from symm_cp.ops.common import group_of
from symm_cp.results import new_result
from symm_cp.schedule.layout import SequenceLayout, sequential

#: Computes attention of some heads, given query, key and value; its gradients, given whether those
#: of keys and values are wanted in the dtype that sums are taken in.
Attend: TypeAlias = Callable[[Tensors, Added], tuple[torch.Tensor, torch.Tensor]]
AttendBackward: TypeAlias = Callable[[Given, Added, bool], tuple[Tensors, Grad]]


class Part(NamedTuple):
    """A tensor that is exchanged: its layout over the ranks, and each rank's heads of it."""

    tensor: torch.Tensor
    layout: SequenceLayout
    heads: tuple[tuple[int, int], ...]


def to_heads(name: bytes, group: Group, parts: Sequence[Part]) -> Tensors:
    """Returns (B, N_r, S, E) of each part, of which this rank gives (B, N, S_r, E). Collective."""
    begin_end = [part.heads[group.rank] for part in parts]
    whole = tuple(
        new_result(t, (t.shape[0], end - begin, layout.length, t.shape[3]))
        for (t, layout, _), (begin, end) in zip(parts, begin_end, strict=True)
    )

    def consume(shards: list[torch.Tensor], owner: int) -> None:
        for shard, result, part, (begin, end) in zip(shards, whole, parts, begin_end, strict=True):
            for span in part.layout.spans(owner):
                rows = shard[:, begin:end, span.row : span.row + span.length]
                result[:, :, span.start : span.start + span.length].copy_(rows)

    shapes = [
        tuple((t.shape[0], t.shape[1], layout.lengths[rank], t.shape[3]) for t, layout, _ in parts)
        for rank in range(group.world_size)
    ]
    tensors = [part.tensor for part in parts]
    on = runtime.of(tensors[0], group)
    on.all_gather_and_consume(group, tensors, consume, name, shapes=shapes)
    return whole


def to_sequence(
    name: bytes, group: Group, parts: Sequence[Part], results: Sequence[torch.Tensor]
) -> None:
    """Writes (B, N, S_r, E) of each part, of which this rank gives (B, N_r, S, E). Collective.

    Heads that several ranks give are added in rank order, in the dtype of the part.
    """
    shared: list[dict[int, torch.Tensor]] = [{} for _ in parts]

    def consume(shards: list[torch.Tensor], owner: int) -> None:
        for index, (shard, part) in enumerate(zip(shards, parts, strict=True)):
            begin, end = part.heads[owner]
            target = results[index][:, begin:end]
            if _overlap(part):
                target = shared[index][owner] = torch.empty_like(target, dtype=shard.dtype)
            for span in part.layout.spans(group.rank):
                rows = shard[:, :, span.start : span.start + span.length]
                target[:, :, span.row : span.row + span.length].copy_(rows)

    shapes = [
        tuple(
            (t.shape[0], heads[rank][1] - heads[rank][0], layout.length, t.shape[3])
            for t, layout, heads in parts
        )
        for rank in range(group.world_size)
    ]
    tensors = [part.tensor for part in parts]
    on = runtime.of(tensors[0], group)
    on.all_gather_and_consume(group, tensors, consume, name, shapes=shapes)
    for part, result, given in zip(parts, results, shared, strict=True):
        if given:
            total = torch.zeros_like(result, dtype=part.tensor.dtype)
            for owner, (begin, end) in enumerate(part.heads):
                total[:, begin:end] += given[owner]
            result.copy_(total)


def _overlap(part: Part) -> bool:
    return any(end > begin for (_, end), (begin, _) in itertools.pairwise(part.heads))


@contextlib.contextmanager
def _telling(*groups: Group | None) -> Iterator[None]:
    """Tells the ranks of groups whose calls follow that this one will not make them."""
    try:
        yield
    except Exception as error:
        for group in groups:
            if group is not None and group.world_size > 1:
                with contextlib.suppress(Exception):
                    # The error itself may have been reported already, but to other ranks.
                    on_this_host(group, "cpu").refuse("sync", RuntimeError(str(error)))
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
        with _telling(self.of_keys):
            of_heads = to_heads(name, self.group, self._inputs(query, key, value))
        with _telling(self.group):
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
        rows = [out, lse.unsqueeze(-1), grad_out]
        if grad_lse is not None:
            rows.append(grad_lse.unsqueeze(-1))
        with _telling(self.of_keys):
            parts = [*self._inputs(query, key, value), *map(self._of_queries, rows)]
            q, k, v, *others = to_heads(name, self.group, parts)
        out, lse, grad_out = others[0], others[1].squeeze(-1), others[2]
        of_lse = None if grad_lse is None else others[3].squeeze(-1)
        q, k, v = self._repeated(q, k, v)
        with _telling(self.group):
            inner = Given(q, k, v, out, lse, grad_out, of_lse)
            grads, of_bias = attend_backward(inner, self._slice(added), self.shares.keys_overlap)
            of_keys = [self._summed(grad) for grad in grads[1:]]
        parts = [self._of_queries(grads[0]), *map(self._of_keys, of_keys)]
        results = tuple(rows_first(t, t.shape, t.dtype) for t in (query, key, value))
        to_sequence(name, self.group, parts, results)
        if of_bias is not None and added.bias is not None:
            of_heads, of_bias = of_bias, torch.zeros_like(added.bias)
            of_bias[slice(*self.heads)] = of_heads
        return results, of_bias

    def _slice(self, added: Added) -> Added:
        """Returns what belongs to this rank's heads."""
        heads = slice(*self.heads)
        return Added(*(None if tensor is None else tensor[heads] for tensor in added))

    def _name(self, op: str, query: torch.Tensor, key: torch.Tensor, *details: object) -> bytes:
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
