"""Flex attention as an op in graphs, for Dynamo, AOTAutograd and Inductor.

The op takes `mask_mod` and `score_mod` as a key (see modifiers.py) and their captures::

    flex_all_gather_attention(query, key, value, blocks, sizes, score_tensors, score_numbers,
                              mask_tensors, mask_numbers, modifiers, group_name, layouts, scale,
                              enable_gqa, *, softcap, sinks, bias, dropout_p,
                              dropout_seed, head_offset, method, method_groups, method_columns)

`blocks` are kv_num_blocks, kv_indices and, if it has full blocks, full_kv_* of a `BlockMask`,
`sizes` its sequence lengths and block sizes; both are empty without a `BlockMask` (no mask, or only
a function). `layouts` say how the sequences are spread (see layouts.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.attention.flex_attention import BlockMask

from symm_cp.ops import autocast
from symm_cp.ops.attention.attend import Attention
from symm_cp.ops.attention.flex.mask import Modifier
from symm_cp.ops.attention.flex.modifiers import TracedModifier, keep_modifiers, kept_modifiers
from symm_cp.ops.attention.flex.op import check_flex, flex_attention_of, flex_backward
from symm_cp.ops.attention.layouts import decoded, encoded, layout_held
from symm_cp.ops.attention.mesh_calls import propagates_failure
from symm_cp.ops.attention.op import attention_types, types_of_gradient
from symm_cp.ops.attention.options import FLEX_OPTIONS, ScoreOptions
from symm_cp.ops.attention.pipeline import Grad, ScoreTerms, Tensors, fake_like, heads_in_rows
from symm_cp.ops.attention.spread import keys_held
from symm_cp.ops.common import count_attention_run, group_of
from symm_cp.ops.op import (
    LEFT_TO_TORCH,
    Caller,
    Elsewhere,
    GradientByHand,
    Op,
    arguments,
    declare,
)
from symm_cp.ops.transforms import check_transforms, once_differentiable
from symm_cp.schedule.layout import head_tail, sequential
from symm_cp.tensors.dtypes import wide

_FORWARD = "flex_all_gather_attention"
_BACKWARD = "flex_all_gather_attention_backward"

# Dispatch keys of vmap and autograd.
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
    "Tensor[] mask_tensors, SymInt[] mask_numbers, str modifiers, str group_name, Tensor layouts, "
    "float? scale, bool enable_gqa"
)
_TENSORS = ("sinks", "bias", "dropout_seed")


# --- kernels ---------------------------------------------------------------------------------


class _Arguments(NamedTuple):
    """The arguments that the forward and the backward op share, in the order of the schemas."""

    blocks: list[torch.Tensor]
    sizes: list[int]
    score_tensors: list[torch.Tensor]
    score_numbers: list[int]
    mask_tensors: list[torch.Tensor]
    mask_numbers: list[int]
    modifiers: str
    group_name: str
    layouts: torch.Tensor | None
    scale: float | None
    enable_gqa: bool

    def block_mask(self, mask: TracedModifier | None) -> BlockMask | None:
        """Returns the block mask that `blocks` and `sizes` stand for."""
        if not self.blocks:
            return None
        full = self.blocks[2:] or [None, None]
        bound = {} if mask is None else {"mask_mod": mask.bound(*self._mask_captures)}
        return BlockMask(
            (self.sizes[0], self.sizes[1]),
            *self.blocks[:2],
            *full,
            *(None,) * 4,
            BLOCK_SIZE=(self.sizes[2], self.sizes[3]),
            **bound,
        )

    @property
    def _mask_captures(self) -> tuple[list[torch.Tensor], list[int]]:
        return self.mask_tensors, self.mask_numbers

    def attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: dict[str, Any],
        wanted: Sequence[bool] | None = None,
    ) -> Attention:
        """Returns the checked call; `wanted` marks score tensors to compute gradients of."""
        score, mask = kept_modifiers(_FORWARD, self.modifiers)
        group = group_of(self.group_name)
        local = (query.shape[2], key.shape[2])
        ordered = bool(self.blocks) or mask is not None or score is not None
        place = (group.rank, group.world_size)
        assert self.layouts is not None
        known = decoded(_FORWARD, self.layouts, group.world_size)
        queries = layout_held(_FORWARD, known, local[0], *place, head_tail)
        keys = keys_held(_FORWARD, group, local, known, ordered=ordered)
        block_mask, mask_mod = self.block_mask(mask), None
        if block_mask is not None:
            mask_mod = block_mask.mask_mod
        elif mask is not None:
            mask_mod = mask.bound(*self._mask_captures)
        check_flex(query, key, value, group, (queries, keys), block_mask, self.enable_gqa)
        score_mod = captures = None
        if score is not None:
            score_mod = score.bound(self.score_tensors, self.score_numbers)
            captures = None if wanted is None else _WantedCaptures(score, self, wanted)
        return flex_attention_of(
            group,
            (query, key, value),
            (queries, keys),
            mask_mod=mask_mod,
            block_mask=block_mask,
            score_mod=score_mod,
            captures=captures,
            options=ScoreOptions(scale=self.scale, **options),
        )


class _WantedCaptures:
    """Captured tensors of a `score_mod`; `wanted` marks the ones that get gradients."""

    def __init__(
        self, score: TracedModifier, arguments: _Arguments, wanted: Sequence[bool]
    ) -> None:
        self._score, self._arguments, self._wanted = score, arguments, wanted

    def bound(self, tensors: Sequence[torch.Tensor]) -> tuple[Modifier, list[torch.Tensor]]:
        """Returns the function to differentiate, and the tensors to differentiate by."""
        leaves = [tensor.detach().requires_grad_() for tensor in tensors]
        remaining = iter(leaves)
        captured = [
            next(remaining) if wanted else tensor.detach()
            for tensor, wanted in zip(self._arguments.score_tensors, self._wanted, strict=True)
        ]
        return self._score.bound(captured, self._arguments.score_numbers), leaves


def _transforms() -> torch._C._ForceDispatchKeyGuard:
    """Lets a kernel use vmap and autograd, which are off while the dispatcher calls it."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for name in _TRANSFORMS:
        excluded = excluded.remove(getattr(torch._C.DispatchKey, name))
    return torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded)


def _kernel(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    count_attention_run()  # even if the call is refused
    with _transforms():
        with propagates_failure(*options.get("method_groups") or ()):
            attention = _Arguments(*rest).attention(query, key, value, options)
        terms = ScoreTerms(options.get("sinks"), options.get("bias"))
        out, lse = attention.forward(_FORWARD, (query, key, value), terms)
    return heads_in_rows(out), lse


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
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    arguments = _Arguments(*rest)
    *of_score, of_sinks, of_bias = wanted
    captured = itertools.compress(arguments.score_tensors, of_score)
    terms = ScoreTerms(options.get("sinks"), options.get("bias"))
    # Collective: every rank takes part, even without a gradient of its own.
    grad_out = torch.zeros_like(out) if grad_out is None else grad_out
    with _transforms(), torch.no_grad():
        with propagates_failure(*options.get("method_groups") or ()):
            attention = arguments.attention(query, key, value, options, of_score)
        saved = (query, key, value, out, lse, *captured)
        grads, of_terms, of_captured = flex_backward(attention, saved, terms, grad_out, grad_lse)
    of_query, of_key, of_value = (heads_in_rows(grad, own_memory=True) for grad in grads)
    found = [*of_captured, *itertools.compress(of_terms, (of_sinks, of_bias))]
    return of_query, of_key, of_value, [t.contiguous() for t in found if t is not None]


def _fake(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    lse = query.new_empty(query.shape[:3], dtype=wide(query.dtype))
    return fake_like(query, value.shape[3]), lse


def _backward_fake(
    grad_out: torch.Tensor | None,
    grad_lse: torch.Tensor | None,
    wanted: list[bool],
    out: torch.Tensor,
    lse: torch.Tensor,
    *args: Any,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    query, key, value, *rest = args
    others = [*_Arguments(*rest).score_tensors, options.get("sinks"), options.get("bias")]
    found = [t.new_empty(t.shape) for t in itertools.compress(others, wanted) if t is not None]
    return fake_like(query), fake_like(key), fake_like(value), found


# --- gradients -------------------------------------------------------------------------------


class _FlexOp(torch.autograd.Function):
    """Registered by hand: `register_autograd` fills a missing gradient of lse with zeros."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        arguments: _Arguments,
        options: dict[str, Any],
        *added: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`added` are the score tensors, sinks, bias and the seed of dropout."""
        tensors = dict(zip(_TENSORS, added[-len(_TENSORS) :], strict=True))
        with torch._C._AutoDispatchBelowAutograd():
            out, lse = torch.ops.symm_mem.flex_all_gather_attention(
                query, key, value, *arguments, **options, **tensors
            )
        blocks, masks = arguments.blocks, arguments.mask_tensors
        ctx.set_materialize_grads(False)  # the log-sum-exp is rarely used
        ctx.save_for_backward(
            query, key, value, out, lse, arguments.layouts, *blocks, *masks, *added
        )
        ctx.counts = len(blocks), len(masks)
        # The tensors are saved above.
        ctx.arguments = arguments._replace(
            layouts=None, blocks=[], mask_tensors=[], score_tensors=[]
        )
        ctx.options = options
        return out, lse

    @staticmethod
    @once_differentiable(_FORWARD)
    def backward(ctx: Any, saved: Tensors, grad_out: Grad, grad_lse: Grad) -> tuple[Grad, ...]:  # type: ignore[override]
        query, key, value, out, lse, layouts, *others = saved
        blocks, masks = ctx.counts
        *score_tensors, sinks, bias, seed = others[blocks + masks :]
        arguments = ctx.arguments._replace(
            layouts=layouts,
            blocks=others[:blocks],
            mask_tensors=others[blocks : blocks + masks],
            score_tensors=score_tensors,
        )
        wanted = [
            needed and tensor.is_floating_point()
            for needed, tensor in zip(
                ctx.needs_input_grad[5:-1], (*score_tensors, sinks, bias), strict=True
            )
        ]
        tensors = dict(zip(_TENSORS, (sinks, bias, seed), strict=True))
        *grads, of_others = torch.ops.symm_mem.flex_all_gather_attention_backward(
            grad_out, grad_lse, wanted, out, lse, query, key, value, *arguments,
            **ctx.options, **tensors,
        )  # fmt: skip
        remaining = iter(of_others)
        return (*grads, None, None, *(next(remaining) if want else None for want in wanted), None)


def _autograd(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    arguments = _Arguments(*rest)
    added = (*arguments.score_tensors, *(options.pop(name, None) for name in _TENSORS))
    check_transforms(_FORWARD, query, key, value, *added)
    return _FlexOp.apply(query, key, value, arguments, options, *added)  # type: ignore[no-any-return]


def _example(on: Caller) -> tuple[Any, ...]:
    """The arguments after query, key and value: no mask, no blocks."""
    lists: list[Any] = [[] for _ in range(6)]
    layouts = encoded((sequential(4 * on.world_size, on.world_size),))
    return *lists, keep_modifiers(None, [], None, []), on.group_name, layouts, None, False


declare(
    Op(
        name=_FORWARD,
        types=attention_types,
        schema=(
            f"(Tensor query, Tensor key, Tensor value, {_REST}, *, {FLEX_OPTIONS})"
            " -> (Tensor, Tensor)"
        ),
        kernel=_kernel,
        fake=_fake,
        gradient=GradientByHand(_autograd),
        autocast=autocast.cast_query_key_value,
        vmap=LEFT_TO_TORCH,
        example=lambda on: arguments(*(on.rand(1, 2, 4, 8) for _ in range(3)), *_example(on)),
        cpu_only=True,
    ),
    # `wanted`: whether to compute the gradients of each score tensor, of sinks and of bias.
    Op(
        name=_BACKWARD,
        types=types_of_gradient,
        schema=(
            "(Tensor? grad_out, Tensor? grad_lse, bool[] wanted, Tensor out, Tensor lse, "
            f"Tensor query, Tensor key, Tensor value, {_REST}, *, {FLEX_OPTIONS})"
            " -> (Tensor, Tensor, Tensor, Tensor[])"
        ),
        kernel=_backward_kernel,
        fake=_backward_fake,
        gradient=Elsewhere("attention is differentiated once", differentiable=False),
        autocast=autocast.as_they_are,
        vmap=LEFT_TO_TORCH,
        example=lambda on: arguments(
            on.rand(1, 2, 4, 8), None, [False, False], on.rand(1, 2, 4, 8), on.rand(1, 2, 4),
            *(on.rand(1, 2, 4, 8) for _ in range(3)), *_example(on),
        ),
        cpu_only=True,
        internal=True,
    ),
)  # fmt: skip
