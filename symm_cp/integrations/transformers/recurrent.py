"""Recurrent layers of transformers' models over a sequence that is spread over ranks.

The forward methods of gated delta nets and Mamba 2 call two functions that mix positions: a causal
convolution, and a recurrence in chunks (the gated delta rule, with a decay per head or, in Kimi
Linear, per feature; the scan of Mamba 2). Within a context, instances run the same code with
replaced functions. Within a region these continue from the positions before each of this rank's
fragments, whichever rank holds them.
"""

from __future__ import annotations

import functools
import inspect
import math
import types
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from transformers.activations import ACT2FN

from symm_cp.context_parallel.flex_hook import current_mode
from symm_cp.context_parallel.guards import Watch
from symm_cp.context_parallel.load_balancers import LoadBalancer, in_rank_order
from symm_cp.context_parallel.region import ParallelRegion, without_padding
from symm_cp.integrations.transformers.in_use import hold
from symm_cp.ops.recurrent.convolution import causal_convolution
from symm_cp.ops.recurrent.delta_rule import gated_delta_rule
from symm_cp.ops.recurrent.linear_attention import gated_linear_attention

_OP = "context_parallel"
_CONVOLUTION = "causal_conv1d_fn"
_DELTA_RULES = {"torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention"}
_SCAN = "mamba2_chunk_scan"
_RECURRENCES = {*_DELTA_RULES, _SCAN}
# One kernel for convolution, scan, norm and projection of Mamba 2, which models try in training.
_ALL_IN_ONE = "mamba2_split_conv1d_scan_combined"


def use_sequence_before(stack: ExitStack, parts: Sequence[nn.Module]) -> None:
    """Has recurrent layers continue across ranks within a region, until the end of `stack`."""
    for module in parts:
        if is_recurrent(module.__class__):
            function = inspect.unwrap(type(module).forward)
            hold(stack, module, "forward", types.MethodType(_spread(function), module))


@functools.cache
def is_recurrent(kind: type[nn.Module]) -> bool:
    """Tells whether a class is of recurrent layers, by the functions that its forward calls."""
    function = inspect.unwrap(kind.forward)
    code = getattr(function, "__code__", None)
    called = set() if code is None else {*code.co_names}
    return _CONVOLUTION in called and bool(_RECURRENCES & called)


@functools.cache
def _spread(function: Any) -> types.FunctionType:
    """Returns a copy of a forward method in which the functions that mix positions are replaced."""
    known = function.__globals__
    # Leaves out `__name__`: Dynamo would look the functions up in the module of that name.
    scope = {name: value for name, value in known.items() if name != "__name__"}
    replacements: dict[str, Callable[..., Any]] = dict.fromkeys(_DELTA_RULES, _delta_rule)
    replacements |= {_CONVOLUTION: _convolve, _SCAN: _scan, _ALL_IN_ONE: _all_in_one}
    for name in replacements.keys() & scope.keys():
        scope[name] = partial(replacements[name], known[name])
    copy = types.FunctionType(
        function.__code__, scope, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


class _Spread(NamedTuple):
    """The region of a call, and how the sequence is spread over its ranks."""

    region: ParallelRegion
    watch: Watch
    balancer: LoadBalancer

    def arguments(self, samples: int, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Returns documents and layout as arguments of ops; records missing documents."""
        edges = _edges(kwargs)
        self.watch.recurred_without_documents = edges is None
        layout = None if in_rank_order(self.balancer) else self.balancer.layout
        sizes = None if self.region.even or layout is not None else self.balancer.lengths
        if edges is None and kwargs.get("seq_idx") is not None:
            raise NotImplementedError(
                f"{_OP}: a recurrent layer was called with seq_idx alone, which has only the "
                "documents of this rank's part. Pass the cu_seq_lens_q of the whole batch, too"
            )
        if edges is not None and samples != 1:
            raise NotImplementedError(
                f"{_OP}: a recurrent layer was called with cu_seq_lens_q and {samples} samples: "
                "pack documents into one sample"
            )
        return {"cu_seqlens": edges, "sizes": sizes, "layout": layout}

    def call(
        self, recurrence: Callable[..., tuple[torch.Tensor, torch.Tensor]], *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns results (B, S, ...) and the last state, without the padding of `tensors`."""
        final: list[torch.Tensor] = []

        def call(*real: torch.Tensor) -> torch.Tensor:
            out, last = recurrence(*real)
            final.append(last)
            return out

        return without_padding(self.region, call, 1, *tensors), final[0]


def _edges(kwargs: dict[str, Any]) -> torch.Tensor | None:
    edges: torch.Tensor | None = kwargs.get("cu_seq_lens_q")
    return kwargs.get("cu_seqlens") if edges is None else edges


def _spread_call(length: int, kwargs: dict[str, Any]) -> _Spread | None:
    """Returns the region of a call with `length` positions, or None to run transformers' own code.

    A single rank runs transformers' code only without documents: on CPU that code mixes them.
    """
    mode = current_mode()
    if mode is None or (mode.region.world_size == 1 and _edges(kwargs) is None):
        return None
    region = mode.region
    balancer = region.layout(length)
    lengths = balancer.lengths
    if length not in (lengths[region.rank], balancer.rows(region.rank)):
        raise NotImplementedError(
            f"{_OP}: a convolution got {length} positions, but this rank holds "
            f"{lengths[region.rank]}: transformers fills the cache of a short sequence with zeros. "
            "Call the model with use_cache=False"
        )
    mode.watch.called = True
    return _Spread(region, mode.watch, balancer)


def _check_state(state: torch.Tensor | None) -> None:
    if state is not None:
        raise NotImplementedError(
            f"{_OP}: a recurrent layer got a cache's state, which only the first rank may "
            "continue. Call the model with use_cache=False"
        )


def _convolve(
    alone: Any,
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """transformers' `causal_conv1d_fn`; within a region it sees positions before each fragment."""
    spread = _spread_call(hidden_states.shape[-1], kwargs)
    if spread is None:
        result: torch.Tensor = alone(hidden_states, weight, bias, activation=activation, **kwargs)
        return result
    arguments = spread.arguments(len(hidden_states), kwargs)

    def convolve(states: torch.Tensor) -> torch.Tensor:
        return causal_convolution(states, weight, bias, group=spread.region.group, **arguments)

    out = without_padding(spread.region, convolve, 2, hidden_states.to(weight.dtype))
    if activation is not None:
        out = ACT2FN[activation](out)
    return out.to(hidden_states.dtype)


def _delta_rule(
    alone: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A gated delta rule of transformers; within a region it continues across ranks.

    Computes in float32, as transformers does, or float64.
    """
    spread = _spread_call(value.shape[1], kwargs)
    if spread is None:
        result: tuple[torch.Tensor, torch.Tensor | None] = alone(
            query, key, value, g, beta, **kwargs
        )
        return result
    _check_state(kwargs.get("initial_state"))
    rule = partial(
        gated_delta_rule,
        group=spread.region.group,
        chunk_size=kwargs.get("chunk_size", 64),
        normalise=kwargs.get("use_qk_l2norm_in_kernel", False),
        **spread.arguments(len(value), kwargs),
    )
    out, final = spread.call(rule, query, key, value, g, beta)
    return out, final if kwargs.get("output_final_state") else None


def _scan(
    alone: Any,
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    chunk_size: int,
    **kwargs: Any,
) -> Any:
    """The scan of Mamba 2 in transformers; within a region it continues across ranks.

    Shapes: hidden_states (B, S, H, P), dt (B, S, H), A and D (H,), B and C (B, S, groups, N),
    states (B, H, P, N). Computes in float32, as transformers does, or float64.
    """
    spread = _spread_call(hidden_states.shape[1], kwargs)
    if spread is None:
        return alone(hidden_states, dt, A, B, C, chunk_size, **kwargs)
    _check_state(kwargs.get("initial_states"))
    if kwargs.get("z") is not None:
        raise NotImplementedError(f"{_OP}: {_SCAN} was called with z, which is not supported")
    if (bias := kwargs.get("dt_bias")) is not None:
        dt = dt + bias.to(dt.dtype)
    if kwargs.get("dt_softplus"):
        dt = F.softplus(dt)
    dt = dt.clamp(*kwargs.get("dt_limit", (0.0, math.inf)))
    values = hidden_states.to(torch.promote_types(hidden_states.dtype, torch.float32))
    dt = dt.to(values.dtype)
    scan = partial(
        gated_linear_attention,
        group=spread.region.group,
        scale=1.0,
        chunk_size=chunk_size,
        **spread.arguments(len(values), kwargs),
    )
    decay = A.to(values.dtype) * dt
    out, final = spread.call(scan, C.to(values.dtype), B, values * dt[..., None], decay)
    if (skipped := kwargs.get("D")) is not None:
        out = out + skipped[:, None] * values
    out = out.contiguous()  # Falcon H1 calls view on it
    return (out, final.mT) if kwargs.get("return_final_states") else out


def _all_in_one(alone: Any, *args: Any, **kwargs: Any) -> Any:
    """The kernel of a whole layer of Mamba 2, which sees only this rank: returns None in a region.

    Models then call the convolution and the scan.
    """
    if _spread_call(args[0].shape[1], kwargs) is None:
        return alone(*args, **kwargs)
    return None
