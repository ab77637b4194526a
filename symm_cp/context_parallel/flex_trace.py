"""How Dynamo puts `flex_attention` within a region into its graph. Imported while it traces.

Dynamo can put the functions that torch's `flex_attention` takes into a graph: each as a graph of
its own, with what it captures as inputs. `graph_flex_attention` reuses that; called with them, it
becomes the op of ops/attention/flex/graph.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._dynamo.variables import higher_order_ops as dynamo_ops
from torch._ops import HigherOrderOperator
from torch.fx import GraphModule

from symm_cp.context_parallel.flex import TRANSFORMERS
from symm_cp.context_parallel.flex_hook import attend_compiled
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
        *sizes_and_blocks, mask_mod = block_mask
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
            options["layout"],
            scale,
            options["enable_gqa"],
            options["transformers"] and not mask_tensors,
        )


def _parted(captured: tuple[Any, ...]) -> tuple[list[torch.Tensor], list[Any]]:
    tensors = [value for value in captured if isinstance(value, torch.Tensor)]
    return tensors, [value for value in captured if not isinstance(value, torch.Tensor)]


graph_flex_attention = _GraphFlexAttention()


class _GraphFlexVariable(dynamo_ops.FlexAttentionHigherOrderVariable):
    """torch's, without the region's mode, and with a check of where the mask is defined."""

    _HOP_NAME = f"torch.ops.higher_order.{_NAME}"

    def call_function(self, tx: Any, args: Any, kwargs: Any) -> Any:
        # The region's mode led here and need not see the call.
        *args, options = args
        mask_mod = args[4].items[-1]
        by_transformers = _module(mask_mod) == TRANSFORMERS
        build = dynamo_ops.VariableTracker.build
        options = options.clone()
        options.call_method(
            tx, "__setitem__", [build(tx, "transformers"), build(tx, by_transformers)], {}
        )
        return self._call_function(tx, [*args, options], kwargs)


def _module(function: Any) -> str | None:
    """Returns the module in which a function, as Dynamo represents it, was defined."""
    try:
        name = function.get_globals().get("__name__")
    except (AttributeError, NotImplementedError):
        return None
    return name if isinstance(name, str) else None


# Where torch's kernels attend to gathered keys, masks are cut outside the graph.
outside_graph = torch.compiler.disable(
    attend_compiled, reason="flex_attention within context_parallel is one op on CPU only"
)

dynamo_ops._hop_name_to_variable_class[_NAME] = _GraphFlexVariable
