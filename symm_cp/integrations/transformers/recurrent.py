"""Gated delta nets of transformers' models over a sequence that is spread over ranks in order.

Their forward methods call two functions of their module that mix positions: a causal convolution,
and the gated delta rule in chunks, with a decay of each head or (Kimi Linear) of each feature.
Within a context their instances run the same code with functions that, within a region, see the
ranks before this one.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers.activations import ACT2FN

from symm_cp.context_parallel.flex_hook import current_region
from symm_cp.context_parallel.load_balancers import in_rank_order
from symm_cp.context_parallel.region import ParallelRegion
from symm_cp.context_parallel.verdicts import Select
from symm_cp.integrations.transformers.in_use import InUse
from symm_cp.integrations.transformers.limits import (
    RECURRENCE_KNOWN,
    SEES_ALL_RANKS,
    uses_transformers,
)
from symm_cp.ops.recurrent.delta_rule import gated_delta_rule
from symm_cp.ops.recurrent.halo import exchange_halo

_OP = "context_parallel"
_CONVOLUTION = "causal_conv1d_fn"
_DELTA_RULES = {"torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention"}

_forwards, _marks, _known = InUse(), InUse(), InUse()


@contextmanager
def by_sequence_before(select: Select) -> Iterator[None]:
    """Within it, and within a region, gated delta nets continue what the ranks before ended with.

    Other modules of the models that have a convolution are still refused.
    """
    nets = select(_is_delta_net)
    with ExitStack() as stack:
        for module in nets:
            function = inspect.unwrap(type(module).forward)
            _forwards.acquire(module, "forward", types.MethodType(_spread(function), module))
            stack.callback(_forwards.release, module, "forward")
            for part in module.modules():
                _marks.acquire(part, SEES_ALL_RANKS, True)
                stack.callback(_marks.release, part, SEES_ALL_RANKS)
        for module in select(uses_transformers) if nets else ():
            _known.acquire(module, RECURRENCE_KNOWN, True)
            stack.callback(_known.release, module, RECURRENCE_KNOWN)
        yield


def _is_delta_net(module: nn.Module) -> bool:
    function = inspect.unwrap(type(module).forward)
    code = getattr(function, "__code__", None)
    called = set() if code is None else {*code.co_names}
    return _CONVOLUTION in called and bool(_DELTA_RULES & called)


@functools.cache
def _spread(function: Any) -> types.FunctionType:
    """The same code, with the functions that mix positions replaced."""
    known = function.__globals__
    # Without a name of a module, in which Dynamo would look the functions up.
    scope = {name: value for name, value in known.items() if name != "__name__"}
    scope[_CONVOLUTION] = _Convolution(known[_CONVOLUTION])
    for name in _DELTA_RULES & scope.keys():
        scope[name] = _DeltaRule(known[name])
    copy = types.FunctionType(
        function.__code__, scope, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _region_of(length: int) -> tuple[ParallelRegion, list[int]] | None:
    """The region, unless there is none or one rank, and how many positions each rank holds."""
    within = current_region()
    if within is None or within[0].world_size == 1:
        return None
    region = within[0]
    balancer = region.layout(length)
    if not in_rank_order(balancer):
        raise NotImplementedError(
            f"{_OP}: linear attention continues what the rank before ended with, but {balancer} "
            "does not hold positions in rank order. Pass load_balancer=symm_cp.Sequential(...)"
        )
    lengths = balancer.lengths
    if lengths[region.rank] != length:
        raise NotImplementedError(
            f"{_OP}: a convolution of {length} positions, of which this rank holds "
            f"{lengths[region.rank]}: transformers fills the cache of a short sequence with zeros. "
            "Call the model with use_cache=False"
        )
    within[1].called = True
    return region, lengths


class _Convolution:
    """`causal_conv1d_fn` of transformers; within a region it sees the ranks before this one."""

    def __init__(self, alone: Any) -> None:
        self._alone = alone

    def __call__(
        self,
        hidden_states: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        activation: str | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        found = _region_of(hidden_states.shape[-1])
        if found is None:
            result: torch.Tensor = self._alone(
                hidden_states, weight, bias, activation=activation, **kwargs
            )
            return result
        region, lengths = found
        sizes = None if region.even else lengths
        wide = exchange_halo(
            hidden_states.to(weight.dtype), weight.shape[-1] - 1, group=region.group, sizes=sizes
        )
        out = F.conv1d(wide, weight.unsqueeze(1), bias, groups=weight.shape[0])
        if activation is not None:
            out = ACT2FN[activation](out)
        return out.to(hidden_states.dtype)


class _DeltaRule:
    """A gated delta rule of transformers; within a region it continues the rank before.

    In float32, as there, or float64.
    """

    def __init__(self, alone: Any) -> None:
        self._alone = alone

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        *,
        initial_state: torch.Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        cu_seqlens: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        found = _region_of(value.shape[1])
        if found is None:
            result: tuple[torch.Tensor, torch.Tensor | None] = self._alone(
                query,
                key,
                value,
                g,
                beta,
                initial_state=initial_state,
                output_final_state=output_final_state,
                use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
                cu_seqlens=cu_seqlens,
                **kwargs,
            )
            return result
        if cu_seqlens is not None:
            raise NotImplementedError(
                f"{_OP}: linear attention does not keep packed documents (cu_seq_lens_q) apart. "
                "Use one document in each sample"
            )
        if initial_state is not None:
            raise NotImplementedError(
                f"{_OP}: linear attention was called with the state of a cache, which belongs to "
                "the first rank only. Call the model with use_cache=False"
            )
        out, final = gated_delta_rule(
            query,
            key,
            value,
            g,
            beta,
            group=found[0].group,
            chunk_size=kwargs.get("chunk_size", 64),
            normalise=use_qk_l2norm_in_kernel,
        )
        return out, final if output_final_state else None
