"""`flex_attention` within a region, on this rank's parts of the sequence."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention.flex_attention import (
    AuxOutput,
    AuxRequest,
    BlockMask,
    FlexKernelOptions,
)

from symm_cp.context_parallel import guards
from symm_cp.context_parallel.gathered_keys import compiled_flex, original
from symm_cp.context_parallel.region import ParallelRegion, active
from symm_cp.context_parallel.sequence_attention import attend_sequence
from symm_cp.context_parallel.sequence_mask import SequenceMask
from symm_cp.ops.attention.flex.mask import Modifier
from symm_cp.ops.attention.mesh_calls import reporting_to_peers
from symm_cp.ops.error_reports import names_op

FLEX = "flex_attention"


def attend(*args: Any, **kwargs: Any) -> Any:
    """`flex_attention` in eager mode, inside or outside a region of this thread."""
    return _attend(original, *args, **kwargs)


def attend_compiled(*args: Any, **kwargs: Any) -> Any:
    """`flex_attention` in eager mode; if it calls torch's function, that is compiled."""
    return _attend(compiled_flex, *args, **kwargs)


def _attend(torch_flex: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    region = active()
    if region is None:
        return torch_flex(*args, **kwargs)
    if (watch := guards.current()) is not None:
        watch.called = True
    return reporting_to_peers(region.peers, attend_within, region, torch_flex, *args, **kwargs)


@names_op(FLEX)
def attend_within(
    region: ParallelRegion,
    torch_flex: Callable[..., Any],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Modifier | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: FlexKernelOptions | None = None,
    *,
    return_aux: AuxRequest | None = None,
    **unknown: Any,
) -> Any:
    """`flex_attention` in a region; `torch_flex` is torch's, where its kernels attend.

    `score_mod` and `block_mask` cover the whole sequence.
    """
    region.expect(FLEX)
    if any(option is not None for option in unknown.values()):
        raise NotImplementedError(
            f"{FLEX}: {sorted(unknown)} within context_parallel is not supported"
        )
    if return_aux is not None and return_aux.max_scores:
        raise NotImplementedError(f"{FLEX}: max_scores within context_parallel is not supported")
    if kernel_options is not None:
        torch_flex = functools.partial(torch_flex, kernel_options=kernel_options)
    out, lse = attend_sequence(
        FLEX,
        region,
        query,
        key,
        value,
        None if block_mask is None else SequenceMask(block_mask=block_mask),
        score_mod=score_mod,
        scale=scale,
        enable_gqa=enable_gqa,
        torch_flex=torch_flex,
    )
    if return_aux is not None:
        return out, AuxOutput(lse=lse if return_aux.lse else None, max_scores=None)
    return (out, lse) if return_lse else out
