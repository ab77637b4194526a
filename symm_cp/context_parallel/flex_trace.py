"""How Dynamo puts `flex_attention` within a region into its graph. Imported while it traces.

Dynamo can put the function arguments of torch's `flex_attention` into a graph: each as its own
graph, with the captured values as inputs. `_graph_flex_attention` reuses this; called with these
graphs, it becomes the op of ops/attention/flex/graph.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._dynamo.variables import higher_order_ops as dynamo_ops
from torch._ops import HigherOrderOperator
from torch.fx import GraphModule
from torch.nn.attention import flex_attention as torch_flex

from symm_cp.context_parallel.region import ParallelRegion
from symm_cp.context_parallel.sequence_mask import SequenceMask
from symm_cp.ops.attention.flex.mask import Modifier
from symm_cp.ops.attention.flex.modifiers import keep_modifiers

_NAME = "symm_cp_flex_attention"


class _GraphFlexAttention(HigherOrderOperator):
    def __init__(self) -> None:
        super().__init__(_NAME)

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        score_mod: GraphModule,
        block_mask: tuple[Any, ...],
        scale: float | None,
        options: dict[str, Any],
        score_captured: tuple[Any, ...] = (),
        mask_captured: tuple[Any, ...] = (),
    ) -> tuple[torch.Tensor, torch.Tensor]:
        layouts, *sizes_and_blocks, mask_mod = block_mask
        scored, masked = options["scored"], options["masked"]
        score_captured = score_captured if scored else ()
        mask_captured = mask_captured if masked else ()
        modifiers = keep_modifiers(
            score_mod if scored else None,
            score_captured,
            mask_mod if masked else None,
            mask_captured,
        )
        score_tensors, score_numbers = _parted(score_captured)
        mask_tensors, mask_numbers = _parted(mask_captured)
        blocks = [block for block in sizes_and_blocks[4:] if block is not None]
        return torch.ops.symm_mem.flex_all_gather_attention(  # type: ignore[no-any-return]
            query,
            key,
            value,
            blocks,
            list(sizes_and_blocks[:4]) if blocks else [],
            score_tensors,
            score_numbers,
            mask_tensors,
            mask_numbers,
            modifiers,
            options["group_name"],
            layouts,
            scale,
            options["enable_gqa"],
            **options["method"],
        )


def _parted(captured: tuple[Any, ...]) -> tuple[list[torch.Tensor], list[Any]]:
    tensors = [value for value in captured if isinstance(value, torch.Tensor)]
    return tensors, [value for value in captured if not isinstance(value, torch.Tensor)]


_graph_flex_attention = _GraphFlexAttention()


class _GraphFlexVariable(dynamo_ops.FlexAttentionHigherOrderVariable):
    """Like torch's, without the region's mode, which has handled the call already."""

    _HOP_NAME = f"torch.ops.higher_order.{_NAME}"

    def call_function(self, tx: Any, args: Any, kwargs: Any) -> Any:
        return self._call_function(tx, args, kwargs)


dynamo_ops._hop_name_to_variable_class[_NAME] = _GraphFlexVariable


def flex_in_graph(
    region: ParallelRegion,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: SequenceMask,
    score_mod: Modifier | None,
    *,
    scale: float | None,
    enable_gqa: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attends with functions of positions, as one op in the graph that Dynamo traces.

    Returns the output and its log-sum-exp.
    """
    mask_mod = mask.as_mask_mod() if mask.is_function else torch_flex.noop_mask
    block_mask, blocks = mask.whole_blocks, (None,) * 8
    if block_mask is not None:
        blocks = (
            *block_mask.seq_lengths,
            *block_mask.BLOCK_SIZE,
            block_mask.kv_num_blocks,
            block_mask.kv_indices,
            block_mask.full_kv_num_blocks,
            block_mask.full_kv_indices,
        )
    options = {
        "group_name": region.group,
        "enable_gqa": enable_gqa,
        "method": region.method.as_options(),
        "scored": score_mod is not None and score_mod is not torch_flex._identity,
        "masked": mask_mod is not torch_flex.noop_mask,
    }
    score_mod = torch_flex._identity if score_mod is None else score_mod
    masked = (region.layouts, *blocks, mask_mod)
    return _graph_flex_attention(query, key, value, score_mod, masked, scale, options)  # type: ignore[no-any-return]
