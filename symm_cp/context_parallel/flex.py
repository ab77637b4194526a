"""`flex_attention` within a region, on this rank's parts of the sequence, in eager mode."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.attention.flex_attention import (
    AuxOutput,
    AuxRequest,
    BlockMask,
    FlexKernelOptions,
    create_block_mask,
)

from symm_cp.context_parallel import guards, inspectors
from symm_cp.context_parallel.attention import is_dtensor
from symm_cp.context_parallel.block_mask import Cuts, local_score_mod
from symm_cp.context_parallel.load_balancers import LoadBalancer, Sequential, gathered_rows_on
from symm_cp.context_parallel.refusals import reporting_to_peers
from symm_cp.context_parallel.region import ParallelRegion, active, without_padding
from symm_cp.cuda.cached import capturing
from symm_cp.group.memory import resolve
from symm_cp.ops.attention.flex.captures import captures_tensors
from symm_cp.ops.attention.flex.mask import Modifier, whole_mask
from symm_cp.ops.attention.flex.op import flex_all_gather_attention
from symm_cp.ops.attention.gather_kv import all_gather_kv
from symm_cp.ops.error_reports import names_op

FLEX = "flex_attention"


def _copy(function: Callable[..., Any]) -> Callable[..., Any]:
    assert isinstance(function, types.FunctionType)
    copy = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


#: A copy of torch's `flex_attention` that keeps its code while flex_hook.py replaces torch's.
original = _copy(torch_flex.flex_attention)
_signature = inspect.signature(original)


def attend(*args: Any, **kwargs: Any) -> Any:
    """`flex_attention` in eager mode, inside or outside a region of this thread."""
    return _attend(original, *args, **kwargs)


def attend_compiled(*args: Any, **kwargs: Any) -> Any:
    """`flex_attention` in eager mode; if it calls torch's function, that is compiled."""
    return _attend(torch.compile(original), *args, **kwargs)


def attend_over(region: ParallelRegion, *args: Any, **kwargs: Any) -> Any:
    """`flex_attention` in eager mode, within a given region; torch's function is compiled."""
    return _attend_within(region, torch.compile(original), *args, **kwargs)


def _attend(torch_attention: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    region = active()
    if region is None:
        return torch_attention(*args, **kwargs)
    if (watch := guards.current()) is not None:
        watch.called = True
    return reporting_to_peers(
        region.peers, _attend_within, region, torch_attention, *args, **kwargs
    )


@names_op(FLEX)
def _attend_within(
    region: ParallelRegion, torch_attention: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    region.expect(FLEX)
    for balancer in (b for b in region.balancers if b.samples):
        raise NotImplementedError(
            f"{FLEX}: {balancer} within context_parallel has a layout for each sample, "
            "which is not supported: use one list of document lengths, or "
            "scaled_dot_product_attention"
        )
    bound = _signature.bind(*args, **kwargs)
    bound.apply_defaults()
    tensors = [bound.arguments.pop(name) for name in ("query", "key", "value")]
    local = (tensors[0].shape[2], tensors[1].shape[2])

    def attend(*real: torch.Tensor) -> Any:
        return _attend_parts(region, torch_attention, local, *real, **bound.arguments)

    return without_padding(region, attend, 2, *tensors)


def _attend_parts(
    region: ParallelRegion,
    torch_attention: Callable[..., Any],
    local: tuple[int, int],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    score_mod: Callable[..., torch.Tensor] | None,
    block_mask: BlockMask | None,
    scale: float | None,
    enable_gqa: bool,
    return_lse: bool,
    kernel_options: FlexKernelOptions | None,
    return_aux: AuxRequest | None,
    **unknown: Any,
) -> Any:
    """`flex_attention` on this rank's parts of the sequence; `torch_attention` is torch's.

    `local` are the model's numbers of queries and keys on this rank, with padding if it has some.
    `score_mod` and `block_mask` cover the whole sequence. Masks that transformers makes for this
    rank's part are used for the whole if they depend on positions alone.
    """
    if any(option is not None for option in unknown.values()):
        raise NotImplementedError(
            f"{FLEX}: {sorted(unknown)} within context_parallel is not supported"
        )
    masked = block_mask is not None or score_mod is not None
    queries, keys = spread(region, query, key, ordered=masked)
    # A mask that is already cut keeps the mask of the whole sequence.
    given, block_mask = block_mask, getattr(block_mask, "symm_cp_global", block_mask)
    block_mask, mask_mod = whole_mask(
        block_mask,
        local=local,
        whole=(queries.seq_length, keys.seq_length),
        by_position=block_mask is not None and _by_position(block_mask.mask_mod),
    )
    if not in_tiles(query.device):
        full_key, full_value = gathered(region, keys, key, value)
        options = (scale, enable_gqa, return_lse, kernel_options)
        if block_mask is None and mask_mod is not None:
            lengths = (queries.seq_length, keys.seq_length)
            block_mask = create_block_mask(mask_mod, None, None, *lengths, device=query.device)
        if block_mask is not None:
            block_mask = _cut(given, block_mask, queries, keys, resolve(region.group).rank)
        modifiers = (_local_score_mod(region, queries, keys, score_mod, query.device), block_mask)
        return torch_attention(
            query, full_key, full_value, *modifiers, *options, return_aux=return_aux
        )
    if return_aux is not None and return_aux.max_scores:
        raise NotImplementedError(f"{FLEX}: max_scores within context_parallel is not supported")
    out, lse = flex_all_gather_attention(
        query,
        key,
        value,
        group=resolve(region.group),
        layout=queries.layout,
        kv_layout=keys.layout,
        mask_mod=mask_mod,
        score_mod=score_mod,
        block_mask=block_mask,
        scale=scale,
        enable_gqa=enable_gqa,
        method=region.method,
    )
    if return_aux is not None:
        return out, AuxOutput(lse=lse if return_aux.lse else None, max_scores=None)
    return (out, lse) if return_lse else out


def _by_position(mask_mod: Modifier) -> bool:
    """Whether a mask depends on positions alone, so that it is valid for any sequence length."""
    known = inspectors.by_position(getattr(mask_mod, "__module__", None))
    return known and not captures_tensors(mask_mod)


_cuts = Cuts()


def _cut(
    given: BlockMask | None,
    block_mask: BlockMask,
    queries: LoadBalancer,
    keys: LoadBalancer,
    rank: int,
) -> BlockMask:
    """Returns the block mask of this rank's queries against all keys: `given` if it is that."""
    if given is not None and getattr(given, "symm_cp_cut", None) == (queries, keys, rank):
        return given
    if capturing(block_mask.kv_num_blocks.device):
        raise RuntimeError(
            f"{FLEX}: block_mask of the whole sequence cannot be cut while a CUDA graph is "
            "captured, since the host must read it: pass local_block_mask(block_mask, "
            "load_balancer, rank) of symm_cp.context_parallel.block_mask, made before, and keep it "
            "as long as the graph"
        )
    return _cuts.get(block_mask, queries, keys, rank)


def _local_score_mod(
    region: ParallelRegion,
    queries: LoadBalancer,
    keys: LoadBalancer,
    score_mod: Modifier | None,
    device: torch.device,
) -> Modifier | None:
    """Returns the `score_mod` of this rank's queries against all keys."""
    if score_mod is None:
        return None
    rank = resolve(region.group).rank
    return local_score_mod(score_mod, queries, rank, kv_load_balancer=keys, device=device)


def in_tiles(device: torch.device) -> bool:
    """Whether keys are consumed as they arrive; otherwise torch's kernels get all keys at once."""
    return device.type == "cpu"


def gathered(
    region: ParallelRegion, keys: LoadBalancer, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the keys and values of all ranks, in rank order."""
    padding = max(keys.lengths) - key.shape[2]
    full_key, full_value = all_gather_kv(
        *(F.pad(t, (0, 0, 0, padding)) if padding else t for t in (key, value)),
        seq_dim=2,
        group=region.group,
    )
    if len(set(keys.lengths)) == 1:
        return full_key, full_value
    rows = gathered_rows_on(key.device, keys)
    return full_key.index_select(2, rows), full_value.index_select(2, rows)


def spread(
    region: ParallelRegion, query: torch.Tensor, key: torch.Tensor, *, ordered: bool = True
) -> tuple[LoadBalancer, LoadBalancer]:
    """Returns the layouts of queries and keys; `ordered`: a mask depends on the keys' order."""
    if is_dtensor(query):
        raise NotImplementedError(
            "DTensors with a mask, score_mod or dropout are not supported within context_parallel: "
            "pass this rank's parts (to_local())"
        )
    local = (query.shape[2], key.shape[2])
    if region.even and len(region.balancers) == 1 and local[0] == local[1]:
        return region.balancers[0], region.balancers[0]
    queries = region.layout(local[0])
    keys = region.layout_of_keys(*local, ordered=ordered)
    return queries, keys or Sequential(local[1] * region.world_size, region.world_size)
