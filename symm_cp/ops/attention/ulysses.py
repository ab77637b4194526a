"""Attention by heads: ranks exchange parts of the sequence for heads, attend, and exchange back.

Shapes: a shard is (B, N, S_r, E), all heads of this rank's part of the sequence; after the exchange
(B, N_r, S, E), some heads of the whole sequence, in its order. Over a mesh of two dimensions S is
the part of the sequence that the ranks of a column hold together, and the ranks of a row gather
keys.

Masks are functions of positions, so the exchange does not change them; sinks and biases are sliced,
and dropout counts heads from this rank's first head. The backward pass exchanges the inputs of the
forward pass again, instead of keeping them twice.

Source: DeepSpeed Ulysses (Jacobs et al., 2023); the mix follows USP (Fang and Zhao, 2024).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

import torch

from symm_cp import runtime
from symm_cp.cuda import has_streams
from symm_cp.group.memory import Group
from symm_cp.ops.attention.mesh_calls import propagates_failure
from symm_cp.ops.attention.methods import Grid, Method
from symm_cp.ops.attention.pipeline import AttentionInputs, Grad, ScoreTerms, Tensors
from symm_cp.ops.attention.spec import AttentionSpec
from symm_cp.ops.attention.tiles import as_dtype, dense_features, empty_output, rows_first
from symm_cp.ops.common import group_of
from symm_cp.ops.heads.packing import HeadPart, head_exchange
from symm_cp.ops.heads.packing import rows_first as rows_of_heads
from symm_cp.ops.heads.shares import HeadShares, shares_of
from symm_cp.runtime.calls import BoxesCall
from symm_cp.runtime.round_trips import RoundTrip, run_round_trips
from symm_cp.schedule.layout import SequenceLayout, sequential
from symm_cp.tensors.dtypes import wide

#: Computes attention of a group of heads (by its number) from query, key and value; or its
#: gradients, with a flag for gradients of keys and values in the dtype for sums.
Attend: TypeAlias = Callable[[int, Tensors, ScoreTerms], tuple[torch.Tensor, torch.Tensor]]
AttendBackward: TypeAlias = Callable[[int, AttentionInputs, ScoreTerms, bool], tuple[Tensors, Grad]]

# The kinds of query, key and value, in `UlyssesCall._pipeline`.
_INPUTS = "qkk"

# Groups of heads: a group travels while the previous one attends. On CPU the thread that attends
# also copies: more than one group would only make the copies smaller.
_GROUPS_ON_STREAMS = 4


@dataclass(frozen=True, eq=False)
class UlyssesCall:
    """One call on this rank, around an attention of this rank's heads.

    `group` exchanges heads, `of_keys` (if any) gathers keys. `whole` is the spec of all heads;
    `shares` and `specs` have an entry for each group of heads; the groups attend in turn.
    `queries` and `keys` are the layouts over `group`, `gathered_queries` and `gathered_keys` the
    layouts over `of_keys`, after the exchange.
    """

    group: Group
    of_keys: Group | None
    whole: AttentionSpec
    shares: tuple[HeadShares, ...]
    specs: tuple[AttentionSpec, ...]
    queries: SequenceLayout
    keys: SequenceLayout
    gathered_queries: SequenceLayout
    gathered_keys: SequenceLayout

    def heads(self, index: int) -> tuple[int, int]:
        """This rank's query heads in a group of heads."""
        return self.shares[index].queries[self.group.rank]

    @property
    def mesh_groups(self) -> tuple[str, ...]:
        """The groups of a mesh of two dimensions."""
        return () if self.of_keys is None else (self.group.name, self.of_keys.name)

    def attend(
        self, op: str, tensors: Tensors, terms: ScoreTerms, attend: Attend
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the output and its log-sum-exp of all heads. Collective."""
        query, key, value = tensors

        def new_results() -> Tensors:
            lse = query.new_empty((*query.shape[:3], 1), dtype=wide(query.dtype))
            return empty_output(dense_features(query), value.shape[3]), lse

        def work(index: int, arrived: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
            q, k, v = self._repeated(index, *arrived)
            out, lse = attend(index, (q, k, v), self._slice(index, terms))
            return out, lse.unsqueeze(-1)

        name = self._name(op, query, key)
        out, lse = self._pipeline(name, _INPUTS, tensors, work, "qq", new_results)
        return out, lse.squeeze(-1)

    def attend_backward(
        self, op: str, inputs: AttentionInputs, terms: ScoreTerms, attend_backward: AttendBackward
    ) -> tuple[Tensors, Grad]:
        """Returns the gradients of query, key and value, and of the bias. Collective."""
        query, key, value, out, lse, grad_out = inputs
        tensors = [query, key, value, out, grad_out, lse.unsqueeze(-1)]
        of_bias = None if terms.bias is None else torch.zeros_like(terms.bias)
        # Gradients that several ranks add to are rounded once, after the sum.
        summed = self.shares[0].keys_overlap
        dtype = wide(key.dtype) if summed else key.dtype
        dtypes = query.dtype, dtype, dtype

        def new_results() -> Tensors:
            pairs = zip(inputs[:3], dtypes, strict=True)
            return tuple(rows_first(t, t.shape, dtype) for t, dtype in pairs)

        def work(index: int, arrived: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
            q, k, v, out, grad_out, lse = arrived
            q, k, v = self._repeated(index, q, k, v)
            inner = AttentionInputs(q, k, v, out, lse.squeeze(-1), grad_out)
            grads, of_heads = attend_backward(index, inner, self._slice(index, terms), summed)
            if of_bias is not None and of_heads is not None:
                of_bias[slice(*self.heads(index))] = of_heads
            return grads[0], *(self._summed(index, grad).to(dtype) for grad in grads[1:])

        name = self._name(op, query, key)
        results = self._pipeline(name, _INPUTS + "qqq", tensors, work, _INPUTS, new_results)
        return tuple(as_dtype(grad, query.dtype) for grad in results), of_bias

    def _pipeline(
        self,
        name: bytes,
        kinds: str,
        given: Sequence[torch.Tensor],
        work: Callable[[int, Sequence[torch.Tensor]], Sequence[torch.Tensor]],
        kinds_back: str,
        new_outputs: Callable[[], Tensors],
    ) -> Tensors:
        """Exchanges tensors, calls `work` on them, and exchanges its results to new outputs.

        All tensors have all heads. `kinds` says which are of queries ("q") or of keys ("k").
        """
        given = [dense_features(tensor) for tensor in given]
        if len(self.shares) == 1:
            return self._at_once(name, kinds, given, partial(work, 0), kinds_back, new_outputs)
        outputs, steps = new_outputs(), []
        for index, shares in enumerate(self.shares):
            there, back = (
                head_exchange(self.group.rank, to_heads, self._parts(shares, of, tensors))
                for to_heads, of, tensors in ((True, kinds, given), (False, kinds_back, outputs))
            )
            arrivals = partial(there.new_outputs, given)
            steps.append(RoundTrip(there, given, arrivals, partial(work, index), back, outputs))
        run_round_trips(self.group, steps, given[0].device, name)
        return outputs

    def _at_once(
        self,
        name: bytes,
        kinds: str,
        given: Sequence[torch.Tensor],
        work: Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]],
        kinds_back: str,
        new_outputs: Callable[[], Tensors],
    ) -> Tensors:
        """Like `_pipeline`, with one group of heads."""
        rank, shares = self.group.rank, self.shares[0]
        there = head_exchange(rank, True, self._parts(shares, kinds, given))
        heads, mesh = self.group.name, self.of_keys is not None
        keys = () if self.of_keys is None else (self.of_keys.name,)
        with propagates_failure(*keys, calling=heads, mesh=mesh):
            arrived = there.new_outputs(given)
            runtime.run(BoxesCall(self.group, there, given, arrived, name))
        with propagates_failure(heads, calling=keys[0] if keys else None, mesh=mesh):
            results = [dense_features(result) for result in work(arrived)]
        arrived.clear()  # frees it before the next allocation
        with propagates_failure(*keys, calling=heads, mesh=mesh):
            outputs = new_outputs()
            back = head_exchange(rank, False, self._parts(shares, kinds_back, outputs))
            places = [
                output
                if part.disjoint
                else rows_of_heads(output, part.arriving_shape(rank, to_heads=False))
                for output, part in zip(outputs, back.parts, strict=True)
            ]
            runtime.run(BoxesCall(self.group, back, results, places, name))
        for output, found in zip(outputs, back.summed(places), strict=True):
            if found is not output:
                output.copy_(found)
        return outputs

    def _parts(
        self, shares: HeadShares, kinds: str, tensors: Sequence[torch.Tensor]
    ) -> tuple[HeadPart, ...]:
        spread = {"q": (self.queries, shares.queries), "k": (self.keys, shares.keys)}
        parts = []
        for kind, tensor in zip(kinds, tensors, strict=True):
            (layout, ranges), (B, N, _, E) = spread[kind], tensor.shape
            parts.append(HeadPart((B, N, layout.length, E), tensor.dtype, layout, ranges))
        return tuple(parts)

    def _slice(self, index: int, terms: ScoreTerms) -> ScoreTerms:
        """Returns sinks and biases of this rank's heads in a group."""
        heads = slice(*self.heads(index))
        return ScoreTerms(*(None if tensor is None else tensor[heads] for tensor in terms))

    def _name(self, op: str, query: torch.Tensor, key: torch.Tensor) -> bytes:
        return self.whole.call_name(op, key, "ulysses", self.queries, query.shape[1])

    def _repeated(
        self, index: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> Tensors:
        """Repeats key heads used by unequal numbers of query heads: kernels need equal numbers."""
        each = self.shares[index].key_of_each(self.group.rank)
        if each is None:
            return query, key, value
        heads = torch.tensor(each, device=key.device)
        return query, key.index_select(1, heads), value.index_select(1, heads)

    def _summed(self, index: int, grad: torch.Tensor) -> torch.Tensor:
        """Adds up the gradients of repeated key heads."""
        each = self.shares[index].key_of_each(self.group.rank)
        if each is None:
            return grad
        B, _, S, E = grad.shape
        total = grad.new_zeros((B, max(each) + 1, S, E), dtype=wide(grad.dtype))
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
    device: torch.device,
) -> UlyssesCall:
    """Returns the call of all heads on this rank.

    `group` is the group of all ranks that hold the sequence, `heads` the numbers of query and key
    heads, `layouts` the layouts of queries and keys. Raises `ValueError` for fewer heads than
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
    _, _, gathered_queries, gathered_keys = spread
    shares = shares_of(op, *heads, of_heads.world_size).in_groups(_groups(group, device, grid))
    specs = tuple(
        replace(
            spec,
            layout=gathered_keys,
            queries=None if spec.queries is None else gathered_queries,
            head_offset=spec.head_offset + each.queries[of_heads.rank][0] if spec.dropout_p else 0,
        )
        for each in shares
    )
    return UlyssesCall(of_heads, of_keys, spec, shares, specs, *spread)


def _groups(group: Group, device: torch.device, grid: Grid | None) -> int:
    """Returns the largest number of groups of heads; 1 on CPU and if ranks also gather keys."""
    on_streams = has_streams(device) and group.world_size > 1
    return _GROUPS_ON_STREAMS if on_streams and grid is None else 1
