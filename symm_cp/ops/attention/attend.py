"""One way through a call of attention, forward and backward: `Attention`.

Keys arrive rank by rank, and a `TileKernel` attends to them tile by tile. The kernels differ only
in how they know the tiles of a mask: from options (`OptionTiles`), or from functions (flex/op.py).

Shapes: query (B, H, S_q, E), key (B, G, S_k, E) and value (B, G, S_k, V), this rank's shards; H, G
and the lengths count heads and positions after an exchange of heads, if there is one. Without a
group, this rank holds all keys.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch

from symm_cp.group.memory import Group
from symm_cp.ops.attention import pipeline, together
from symm_cp.ops.attention.mesh_calls import propagates_failure
from symm_cp.ops.attention.methods import Method
from symm_cp.ops.attention.pipeline import AttentionInputs, Grad, ScoreTerms, Tensors
from symm_cp.ops.attention.scoring import ScoredTiles
from symm_cp.ops.attention.spec import AttentionSpec
from symm_cp.ops.attention.tiles import Backward, Forward, as_dtype, dense_features
from symm_cp.ops.attention.ulysses import UlyssesCall, call_of
from symm_cp.schedule.layout import SequenceLayout
from symm_cp.schedule.tiles import Tile, most_parts
from symm_cp.tensors.dtypes import wide

#: The output of attention, and its log-sum-exp.
Results: TypeAlias = tuple[torch.Tensor, torch.Tensor]


class BackwardPass(NamedTuple):
    """A backward pass: what travels, and what takes the shards that arrive."""

    spec: AttentionSpec
    key: torch.Tensor
    value: torch.Tensor
    #: Takes keys and values, their owner, and memory for their gradients.
    consume: Callable[[list[torch.Tensor], int, Tensors], None]
    #: Returns the gradients of the query, and of the bias if wanted, in the end.
    result: Callable[[], tuple[torch.Tensor, Grad]]


class TileKernel(Protocol):
    """Attends with this rank's queries to the keys of one rank after the other."""

    @property
    def details(self) -> tuple[object, ...]:
        """What must be identical on all ranks, beside the spec."""

    def forward(
        self, query: torch.Tensor, terms: ScoreTerms
    ) -> tuple[Callable[[list[torch.Tensor], int], None], Callable[[], Results]]:
        """Returns what takes keys and values with their owner, and what gives the results."""

    def backward(
        self, inputs: AttentionInputs, terms: ScoreTerms, bias_grad: bool, *more: Any
    ) -> BackwardPass:
        """Returns the backward pass; `bias_grad`: whether the bias, if any, gets a gradient."""


#: Returns the kernel for a range of heads, which a group (None: no group) gathers keys for, with
#: the layouts of queries and keys over that group.
KernelOf: TypeAlias = Callable[
    [AttentionSpec, Group | None, tuple[int, int], tuple[SequenceLayout, SequenceLayout]],
    TileKernel,
]


@dataclass(frozen=True, eq=False)
class Attention:
    """A checked call on this rank; its methods are collective."""

    #: The ranks that gather keys; None: this rank has all keys.
    group: Group | None
    spec: AttentionSpec
    kernel: TileKernel
    #: Whether the keys of all peers arrive together.
    at_once: bool = False
    #: Replaces the above: an exchange of heads, and the attention of each group of heads.
    by_heads: tuple[UlyssesCall, tuple[Attention, ...]] | None = None

    @staticmethod
    def of(
        op: str,
        group: Group,
        spec: AttentionSpec,
        method: Method,
        query: torch.Tensor,
        key: torch.Tensor,
        layouts: tuple[SequenceLayout, SequenceLayout],
        kernel_of: KernelOf,
        *,
        at_once: bool = False,
    ) -> Attention:
        """Returns a call by a method; `layouts` are of queries and keys."""
        heads = query.shape[1], key.shape[1]
        if method.name == "allgather":
            kernel = kernel_of(spec, group, (0, heads[0]), layouts)
            return Attention(group, spec, kernel, at_once)
        call = call_of(op, method, group, spec, heads, layouts, query.device)
        gathered = call.gathered_queries, call.gathered_keys
        of_heads = tuple(
            Attention(call.of_keys, each, kernel_of(each, call.of_keys, call.heads(i), gathered))
            for i, each in enumerate(call.specs)
        )
        return replace(of_heads[0], by_heads=(call, of_heads))

    def forward(self, op: str, tensors: Tensors, terms: ScoreTerms) -> Results:
        """Returns the output and its log-sum-exp. `tensors` are query, key and value."""
        if self.by_heads is not None:
            call, of_heads = self.by_heads
            with propagates_failure(*call.mesh_groups):
                return call.attend(
                    op, tensors, terms, lambda index, *args: of_heads[index].forward(op, *args)
                )
        query, key, value = tensors
        consume, result = self.kernel.forward(dense_features(query), terms)
        if self.at_once:
            assert self.group is not None
            together.consume_keys(op, self.spec, self.group, key, value, consume)
        else:
            details = self.kernel.details
            pipeline.consume_keys(op, self.spec, self.group, key, value, consume, *details)
        return result()

    def backward(
        self,
        op: str,
        inputs: AttentionInputs,
        terms: ScoreTerms,
        *more: Any,
        wide_keys: bool = False,
        bias_grad: bool = True,
    ) -> tuple[Tensors, Grad]:
        """Returns the gradients of query, key and value, and of the bias if wanted.

        With `wide_keys` the gradients of keys and values are not rounded to their dtype. `more` is
        passed on to the kernel.
        """
        if self.by_heads is not None:
            call, of_heads = self.by_heads
            with propagates_failure(*call.mesh_groups):
                return call.attend_backward(
                    op,
                    inputs,
                    terms,
                    lambda index, own, of_own, wide_keys: of_heads[index].backward(
                        op, own, of_own, *more, wide_keys=wide_keys, bias_grad=bias_grad
                    ),
                )
        E, V, dtype = inputs.query.shape[3], inputs.value.shape[3], inputs.key.dtype
        inputs = inputs._replace(query=dense_features(inputs.query))
        spec, key, value, consume, result = self.kernel.backward(inputs, terms, bias_grad, *more)
        if self.at_once:
            assert self.group is not None
            of_keys = together.reduce_gradients(op, spec, self.group, key, value, consume)
        else:
            details = self.kernel.details
            of_keys = pipeline.reduce_gradients(op, spec, self.group, key, value, consume, *details)
        if not wide_keys:
            of_keys = tuple(as_dtype(grad, dtype) for grad in of_keys)
        of_query, of_bias = result()
        grads = zip((of_query, *of_keys), (E, E, V), strict=True)
        return tuple(grad[..., :features] for grad, features in grads), of_bias


@dataclass(frozen=True, eq=False)
class OptionTiles:
    """Attends by the mask of a spec, as rank `place[0]` of `place[1]`."""

    spec: AttentionSpec
    place: tuple[int, int]
    at_once: bool = False
    details: tuple[object, ...] = ()

    def _tiles(self, owner: int, rows: int) -> tuple[Tile, ...]:
        rank, _ = self.place
        if self.at_once:
            return together.tiles_of(self.spec, rank, rows)[owner]
        return self.spec.tiles(rank, owner, rows)

    def _first(self, owner: int, tiles: tuple[Tile, ...]) -> int:
        """Returns the first row that arrives of a rank's keys."""
        return 0 if self.at_once else self.spec.first_sent(self.place[0], owner, tiles)

    def forward(
        self, query: torch.Tensor, terms: ScoreTerms
    ) -> tuple[Callable[[list[torch.Tensor], int], None], Callable[[], Results]]:
        """See `TileKernel`."""
        rank, ranks = self.place
        owners = (together.OWN, together.OTHERS) if self.at_once else range(ranks)
        tiles = tuple(self._tiles(owner, query.shape[2]) for owner in owners)
        parts = most_parts([tile for some in tiles for tile in some])
        scored = ScoredTiles.of(query, self.spec, rank, terms.bias)
        forward = Forward(query, self.spec, parts, sinks=terms.sinks, scored=scored)

        def consume(shards: list[torch.Tensor], owner: int) -> None:
            first = self._first(owner, tiles[owner])
            for tile in tiles[owner]:
                forward.add(tile, shards[0], shards[1], owner, first)

        return consume, forward.result

    def backward(
        self, inputs: AttentionInputs, terms: ScoreTerms, bias_grad: bool, *more: Any
    ) -> BackwardPass:
        """See `TileKernel`."""
        spec, bias = self.spec, terms.bias if bias_grad else None
        scored = ScoredTiles.of(inputs.query, spec, self.place[0], terms.bias)
        query, key, value, out, lse, grad_out = inputs
        backward = Backward(grad_out, query, out, lse, spec, scored=scored, bias=bias)

        def consume(shards: list[torch.Tensor], owner: int, partials: Tensors) -> None:
            tiles = self._tiles(owner, query.shape[2])
            first = self._first(owner, tiles)
            backward.add_tiles(tiles, shards[0], shards[1], partials, owner, first)

        def result() -> tuple[torch.Tensor, Grad]:
            return backward.grad_query(), None if bias is None else backward.grad_bias(bias)

        return BackwardPass(spec, key, value, consume, result)


def place_of(group: Group | None) -> tuple[int, int]:
    """Returns this rank and the number of ranks that gather keys."""
    return (0, 1) if group is None else (group.rank, group.world_size)


def with_grad_of_lse(
    grad_out: torch.Tensor, out: torch.Tensor, grad_lse: Grad
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns `grad_out` and `out` whose inner product in each row is less by `grad_lse`.

    The gradient of a score is weight * (grad_out . v - grad_out . out), plus weight * grad_lse: so
    kernels need not know of it, and ranks exchange the same whether they have one or not.

    The feature of `out` changes where `grad_out` is largest. If that is below 2^-60 of `grad_lse`,
    `grad_out` gets this value there, so that `out` stays in range: the error is below any rounding.
    In float16, whose range is small, it is 2^-12, or the smallest number.
    """
    if grad_lse is None or out.numel() == 0:
        return grad_out, out
    less = grad_lse.unsqueeze(-1).to(wide(out.dtype))
    at = grad_out.abs().argmax(-1, keepdim=True)
    grad_there, out_there = grad_out.gather(-1, at), out.gather(-1, at)
    share, least = (2.0**-12, 2.0**-24) if out.dtype == torch.float16 else (2.0**-60, 2.0**-120)
    floor = (less.abs() * share).clamp_min(least).masked_fill(less == 0, 0)
    largest = torch.where(grad_there.abs() < floor, floor, grad_there).to(out.dtype)
    changed = (grad_there * out_there.to(less.dtype) - less) / largest
    changed = torch.where(less == 0, out_there, changed.to(out.dtype))
    return grad_out.scatter(-1, at, largest), out.scatter(-1, at, changed)
