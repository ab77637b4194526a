"""Flex attention as an op in a graph: what Dynamo, AOTAutograd and Inductor see of it.

A graph has tensors, numbers and strings but no functions. So `mask_mod` and `score_mod` are graphs
of their own, traced by Dynamo with what they capture as further inputs; they are kept here under a
key that is computed from their code, and the op is given the key and what they capture::

    flex_all_gather_attention(query, key, value, blocks, sizes, score_tensors, score_numbers,
                              mask_tensors, mask_numbers, modifiers, group_name, layout, scale,
                              enable_gqa, by_position)

`blocks` are kv_num_blocks, kv_indices and, if there are any, those of full blocks of a `BlockMask`,
`sizes` its sequence lengths and block sizes; both are empty without one. Since equal code has equal
keys, caches of compiled graphs on disk stay valid in other processes.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule
from torch.nn.attention.flex_attention import BlockMask

from symm_cp.ops.attention.flex.mask import MaskTiles, Modifier, whole_mask
from symm_cp.ops.attention.flex.op import FlexCall, backward, check_flex, forward
from symm_cp.ops.attention.tiles import wide
from symm_cp.ops.common import attention_runs, group_of, lib
from symm_cp.ops.transforms import check_transforms, once_differentiable
from symm_cp.schedule.layout import SequenceLayout, head_tail, sequential

_FORWARD = "flex_all_gather_attention"
_BACKWARD = "flex_all_gather_attention_backward"

_TRANSFORMS = (
    "FuncTorchDynamicLayerFrontMode",
    "FuncTorchDynamicLayerBackMode",
    "FuncTorchBatched",
    "FuncTorchVmapMode",
    "FuncTorchGradWrapper",
    "AutogradFunctionality",
    "ADInplaceOrView",
)
_REST = (
    "Tensor[] blocks, SymInt[] sizes, Tensor[] score_tensors, SymInt[] score_numbers, "
    "Tensor[] mask_tensors, SymInt[] mask_numbers, str modifiers, str group_name, str layout, "
    "float? scale, bool enable_gqa, bool by_position"
)
lib.define(f"{_FORWARD}(Tensor query, Tensor key, Tensor value, {_REST}) -> (Tensor, Tensor)")
lib.define(
    f"{_BACKWARD}(Tensor? grad_out, Tensor? grad_lse, bool[] wanted, Tensor out, Tensor lse, "
    f"Tensor query, Tensor key, Tensor value, {_REST}) -> (Tensor, Tensor, Tensor, Tensor[])"
)


# --- modifiers -------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Traced:
    """A modifier as a graph; of what it captures, `tensors` tells which are tensors."""

    graph: GraphModule
    tensors: tuple[bool, ...]

    def bound(self, tensors: Sequence[torch.Tensor], numbers: Sequence[int]) -> Modifier:
        """The function of scores and indices alone."""
        left: tuple[Any, Any] = (iter(numbers), iter(tensors))
        captured = [next(left[is_tensor]) for is_tensor in self.tensors]
        return lambda *indices: self.graph(*indices, *captured)


_modifiers: dict[str, tuple[_Traced | None, _Traced | None]] = {}


def _traced(graph: GraphModule | None, captured: Sequence[Any]) -> _Traced | None:
    if graph is None:
        return None
    tensors = tuple(isinstance(value, torch.Tensor) for value in captured)
    for value, is_tensor in zip(captured, tensors, strict=True):
        if not is_tensor and not isinstance(value, int | torch.SymInt):
            raise NotImplementedError(
                f"flex_attention: a mask_mod or score_mod that captures a {type(value).__name__} "
                "whose value the compiler does not know"
            )
    return _Traced(_without_metadata(graph), tensors)


def _without_metadata(graph_module: GraphModule) -> GraphModule:
    """A copy that does not keep what the compiler noted on its nodes."""
    copy = Graph()
    copy.output(copy.graph_copy(graph_module.graph, {}))
    for node in copy.nodes:
        node.meta.clear()
    return GraphModule(graph_module, copy)


def _text(traced: _Traced | None) -> str:
    if traced is None:
        return "-"
    if any(node.op in ("get_attr", "call_module") for node in traced.graph.graph.nodes):
        return uuid.uuid4().hex  # constants that the code does not show
    return f"{traced.graph.code}{traced.tensors}"


def keep_modifiers(
    score_mod: GraphModule | None,
    score_captured: Sequence[Any],
    mask_mod: GraphModule | None,
    mask_captured: Sequence[Any],
) -> str:
    """Keeps traced modifiers for the op, and returns their key; None stands for none."""
    both = _traced(score_mod, score_captured), _traced(mask_mod, mask_captured)
    key = hashlib.sha256("\n".join(map(_text, both)).encode()).hexdigest()[:32]
    _modifiers.setdefault(key, both)
    return key


# --- layouts ---------------------------------------------------------------------------------


@functools.lru_cache(maxsize=256)
def layout_text(layout: SequenceLayout | None) -> str:
    """A layout as the op takes it; None is head-tail over a sequence of any length."""
    if layout is None:
        return ""
    return json.dumps([layout.world_size, layout.chunk_order, layout.chunk_lengths])


@functools.lru_cache(maxsize=256)
def _layout(text: str, local_length: int, world_size: int) -> SequenceLayout:
    if text:
        ranks, order, lengths = json.loads(text)
        return SequenceLayout(ranks, tuple(order), tuple(lengths))
    if local_length % 2 != 0:
        raise ValueError(
            f"{_FORWARD}: {local_length} positions on this rank cannot be split into two equal "
            "chunks: give a load_balancer, which knows the length of the whole sequence"
        )
    return head_tail(local_length * world_size, world_size)


# --- kernels ---------------------------------------------------------------------------------


class _Inputs:
    """The arguments that a forward and a backward pass have in common."""

    def __init__(
        self,
        blocks: list[torch.Tensor],
        sizes: list[int],
        score_tensors: list[torch.Tensor],
        score_numbers: list[int],
        mask_tensors: list[torch.Tensor],
        mask_numbers: list[int],
        modifiers: str,
        group_name: str,
        layout: str,
        scale: float | None,
        enable_gqa: bool,
        by_position: bool,
    ) -> None:
        if modifiers not in _modifiers:
            raise RuntimeError(
                f"{_FORWARD}: no mask_mod or score_mod {modifiers!r} in this process: a graph that "
                "another process compiled cannot be loaded, compile the function again"
            )
        self.score, mask = _modifiers[modifiers]
        self.score_tensors, self.score_numbers = score_tensors, score_numbers
        self.mask_mod = None if mask is None else mask.bound(mask_tensors, mask_numbers)
        self.blocks, self.sizes, self.by_position = blocks, sizes, by_position
        self.group, self.layout = group_of(group_name), layout
        self.scale, self.enable_gqa = scale, enable_gqa

    def block_mask(self) -> BlockMask | None:
        """The mask of blocks that the op was given."""
        if not self.blocks:
            return None
        full = self.blocks[2:] or [None, None]
        return BlockMask(
            (self.sizes[0], self.sizes[1]),
            *self.blocks[:2],
            *full,
            *(None,) * 4,
            BLOCK_SIZE=(self.sizes[2], self.sizes[3]),
            **({} if self.mask_mod is None else {"mask_mod": self.mask_mod}),
        )

    def call(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, captures: _Bound | None
    ) -> FlexCall:
        """What the two passes share; raises for arguments that do not fit."""
        W, local = self.group.world_size, (query.shape[2], key.shape[2])
        queries = _layout(self.layout, local[0], W)
        keys = queries if local[0] == local[1] else sequential(local[1] * W, W)
        block_mask, mask_mod = whole_mask(
            self.block_mask(),
            local=local,
            whole=(queries.length, keys.length),
            by_position=self.by_position,
        )
        check_flex(query, key, value, self.group, (queries, keys), block_mask, self.enable_gqa)
        heads = (query.shape[0], query.shape[1])
        masks = MaskTiles(mask_mod, block_mask, heads, queries, keys, self.group.rank)
        score_mod = None
        if self.score is not None:
            score_mod = self.score.bound(self.score_tensors, self.score_numbers)
        return FlexCall(self.group, masks, score_mod, captures, keys, self.scale)


class _Bound:
    """Captured tensors as a backward pass takes gradients of them: those that are `wanted`."""

    def __init__(self, score: _Traced, inputs: _Inputs, wanted: Sequence[bool]) -> None:
        self._score, self._inputs, self._wanted = score, inputs, wanted

    def bound(self, tensors: Sequence[torch.Tensor]) -> tuple[Modifier, list[torch.Tensor]]:
        """Returns the function to differentiate, and what to take gradients of."""
        leaves = [tensor.detach().requires_grad_() for tensor in tensors]
        following = iter(leaves)
        captured = [
            next(following) if wanted else tensor.detach()
            for tensor, wanted in zip(self._inputs.score_tensors, self._wanted, strict=True)
        ]
        return self._score.bound(captured, self._inputs.score_numbers), leaves


def _transforms() -> torch._C._ForceDispatchKeyGuard:
    """Lets a kernel use vmap and autograd, which are off while the dispatcher calls it."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for name in _TRANSFORMS:
        excluded = excluded.remove(getattr(torch._C.DispatchKey, name))
    return torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded)


def _kernel(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    attention_runs.count += 1  # also when it is refused
    with _transforms():
        call = _Inputs(*rest).call(query, key, value, None)
        out, lse = forward(call, query, key, value)
    return _heads_in_rows(out), lse


def _backward_kernel(
    grad_out: torch.Tensor | None,
    grad_lse: torch.Tensor | None,
    wanted: list[bool],
    out: torch.Tensor,
    lse: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *rest: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    inputs = _Inputs(*rest)
    captures = None if inputs.score is None else _Bound(inputs.score, inputs, wanted)
    captured = list(itertools.compress(inputs.score_tensors, wanted))
    # Collective: every rank takes part, whatever it has a gradient of.
    grad_out = torch.zeros_like(out) if grad_out is None else grad_out
    with _transforms(), torch.no_grad():
        call = inputs.call(query, key, value, captures)
        grads = backward(call, (query, key, value, out, lse, *captured), grad_out, grad_lse)
    of_query, of_key, of_value = (_heads_in_rows(grad, copy=True) for grad in grads[:3])
    return of_query, of_key, of_value, [grad.contiguous() for grad in grads[3:]]


def _heads_in_rows(tensor: torch.Tensor, *, copy: bool = False) -> torch.Tensor:
    """Gives the result of an op the strides that the fake kernels promise, and its own memory."""
    rows = tensor.transpose(1, 2)
    shares = tensor.untyped_storage().nbytes() > tensor.numel() * tensor.element_size()
    rows = rows.clone() if copy and shares else rows
    return rows.contiguous().transpose(1, 2)


def _fake_like(tensor: torch.Tensor) -> torch.Tensor:
    B, H, S, E = tensor.shape
    return tensor.new_empty(B, S, H, E).transpose(1, 2)


def _fake(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    return _fake_like(query), query.new_empty(query.shape[:3], dtype=wide(query.dtype))


def _backward_fake(
    grad_out: torch.Tensor | None,
    grad_lse: torch.Tensor | None,
    wanted: list[bool],
    out: torch.Tensor,
    lse: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *rest: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    captured = itertools.compress(rest[2], wanted)
    of_captured = [torch.empty_like(t, memory_format=torch.contiguous_format) for t in captured]
    return _fake_like(query), _fake_like(key), _fake_like(value), of_captured


# --- gradients -------------------------------------------------------------------------------


class _FlexOp(torch.autograd.Function):
    """By hand: `register_autograd` would fill a missing gradient of the log-sum-exp with zeros."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rest: tuple[Any, ...],
        *score_tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        with torch._C._AutoDispatchBelowAutograd():
            out, lse = torch.ops.symm_mem.flex_all_gather_attention(query, key, value, *rest)
        blocks, sizes, _, score_numbers, mask_tensors, *options = rest
        ctx.set_materialize_grads(False)  # mostly, nobody uses the log-sum-exp
        ctx.save_for_backward(query, key, value, out, lse, *blocks, *mask_tensors, *score_tensors)
        ctx.counts = len(blocks), len(mask_tensors)
        ctx.numbers = sizes, score_numbers
        ctx.options = options
        return out, lse

    @staticmethod
    @once_differentiable(_FORWARD)
    def backward(  # type: ignore[override]
        ctx: Any,
        saved: tuple[torch.Tensor, ...],
        grad_out: torch.Tensor | None,
        grad_lse: torch.Tensor | None,
    ) -> tuple[torch.Tensor | None, ...]:
        query, key, value, out, lse, *others = saved
        blocks, masks = ctx.counts
        score_tensors = others[blocks + masks :]
        wanted = [
            needed and tensor.is_floating_point()
            for needed, tensor in zip(ctx.needs_input_grad[4:], score_tensors, strict=True)
        ]
        sizes, score_numbers = ctx.numbers
        *grads, of_captured = torch.ops.symm_mem.flex_all_gather_attention_backward(
            grad_out,
            grad_lse,
            wanted,
            out,
            lse,
            query,
            key,
            value,
            others[:blocks],
            sizes,
            score_tensors,
            score_numbers,
            others[blocks : blocks + masks],
            *ctx.options,
        )
        following = iter(of_captured)
        return (*grads, None, *(next(following) if want else None for want in wanted))


def _autograd(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    check_transforms(_FORWARD, query, key, value, *rest[2])
    return _FlexOp.apply(query, key, value, rest, *rest[2])  # type: ignore[no-any-return]


def register() -> None:
    """Adds the kernels, the fake kernels and the gradient."""
    lib.impl(_FORWARD, _kernel, "CPU")
    lib.impl(_BACKWARD, _backward_kernel, "CPU")
    lib.impl(_FORWARD, _fake, "Meta")
    lib.impl(_BACKWARD, _backward_fake, "Meta")
    lib.impl(_FORWARD, _autograd, "Autograd")
