"""Regions in which attention runs context parallel: each thread has a stack of them.

A `TorchFunctionMode` sees `scaled_dot_product_attention`, however it was imported; for
`flex_attention` see flex_hook.py.
"""

from __future__ import annotations

import functools
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.overrides import TorchFunctionMode

from symm_cp.context_parallel import guards
from symm_cp.context_parallel.attention import all_gather_attention
from symm_cp.context_parallel.flex_hook import FlexMode, flex_hook
from symm_cp.context_parallel.layouts import last_cut
from symm_cp.context_parallel.load_balancers import HeadTail, LoadBalancer
from symm_cp.context_parallel.refusals import telling_peers
from symm_cp.ops.attention.flex.graph import layout_text

SDPA = "scaled_dot_product_attention"

# Attention that calls `scaled_dot_product_attention` where no mode sees it, or does not call it.
_HIDDEN: tuple[Any, ...] = (
    F.multi_head_attention_forward,
    torch._native_multi_head_attention,
    torch._transformer_encoder_layer_fwd,
)

# Attention ops that modules call directly.
_CALLED_DIRECTLY = {
    "fused_all_gather_attention",
    "flex_all_gather_attention",
    "all_gather_kv",
}

# Functions that run the backward pass, and their argument for the gradients of the outputs.
_BACKWARD: dict[Any, str] = {
    torch.Tensor.backward: "gradient",
    torch.autograd.backward: "grad_tensors",
    torch.autograd.grad: "grad_outputs",
}


@dataclass(frozen=True)
class Region:
    """Attention within it runs over a group; `kind` restricts it to one function.

    Without a load balancer the sequence is spread head-tail.
    """

    group: str
    world_size: int
    load_balancer: LoadBalancer | None = None
    kind: str | None = None
    # The load balancer's layout as ops in graphs take it and as Dynamo can guard it; None if
    # samples have different layouts.
    layout_text: str | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        try:
            layout = None if self.load_balancer is None else self.load_balancer.layout
            text = layout_text(layout)
        except NotImplementedError:
            text = None
        object.__setattr__(self, "layout_text", text)

    def layout(self, local_length: int) -> LoadBalancer:
        """Returns how a sequence is spread of which this rank holds `local_length` positions."""
        if self.load_balancer is not None:
            return self.load_balancer
        if local_length % 2 != 0:
            raise ValueError(
                f"context_parallel: {local_length} positions on this rank cannot be split into two "
                "equal chunks: pass a load_balancer, which knows the length of the whole sequence"
            )
        balancer = HeadTail(local_length * self.world_size, self.world_size)
        if not torch.compiler.is_compiling():
            self._check_guess(balancer, local_length)
        return balancer

    def _check_guess(self, balancer: LoadBalancer, local_length: int) -> None:
        """Raises if the last shards of such a sequence were cut by another load balancer."""
        group = _resolve_process_group(self.group)  # type: ignore[arg-type]
        cut = last_cut(group, local_length)
        same = cut is None or cut.seq_length != balancer.seq_length or cut == balancer
        if not same and self.world_size > 1:
            raise ValueError(
                f"context_parallel: without a load_balancer, shards of {local_length} positions "
                f"are assumed to be cut by {balancer}, but the last ones were cut by {cut!r}: "
                "pass the load_balancer that the sequence was cut by"
            )
        guards.check_length(balancer)

    def expect(self, kind: str) -> None:
        """Raises if the region is restricted to another function."""
        if self.kind not in (None, kind):
            raise RuntimeError(
                f"ContextParallel(attention_type={self.kind!r}): the module called {kind}, which "
                "would attend to this rank's part of the sequence only"
            )

    def attend(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """`F.scaled_dot_product_attention` on this rank's parts of the sequence."""
        return telling_peers(self.group, self._attend, *args, **kwargs)

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        self.expect(SDPA)
        if dropout_p != 0.0:
            raise NotImplementedError(
                f"{SDPA}: {dropout_p=} within context_parallel: dropout is not supported, use 0.0"
            )
        if query.dim() < 3:
            raise ValueError(
                f"{SDPA}: query has shape {list(query.shape)}, must be (..., heads, sequence, "
                "features)"
            )
        lead = query.shape[:-3]
        if len(lead) != 1:
            query, key, value = (
                t.unsqueeze(0) if t.dim() == 3 else t.flatten(0, -4) for t in (query, key, value)
            )
        attend = self._attend_batch
        if self.load_balancer is not None and self.load_balancer.samples:
            attend = self._attend_samples
        out = attend(query, key, value, attn_mask, is_causal, scale, enable_gqa)
        return out if len(lead) == 1 else out.reshape(*lead, *out.shape[1:])

    def _attend_batch(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None,
        is_causal: bool,
        scale: float | None,
        enable_gqa: bool,
    ) -> torch.Tensor:
        """Attends with one layout for all samples."""
        if attn_mask is not None:
            if is_causal:
                raise ValueError(f"{SDPA}: attn_mask and is_causal=True exclude each other")
            from symm_cp.context_parallel.flex import attend_masked

            return attend_masked(self, query, key, value, attn_mask, scale, enable_gqa)
        # Keys of another length (cross-attention) are spread evenly; their order does not matter.
        crossed = query.shape[2] != key.shape[2] and not is_causal
        return all_gather_attention(  # type: ignore[no-any-return]
            query,
            key,
            value,
            group=self.group,
            is_causal=is_causal,
            scale=scale,
            enable_gqa=enable_gqa,
            load_balancer=None if crossed else self.layout(_length(query)),
        )

    def _attend_samples(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None,
        is_causal: bool,
        scale: float | None,
        enable_gqa: bool,
    ) -> torch.Tensor:
        """Attends sample by sample, each with its own layout."""
        assert self.load_balancer is not None
        samples = self.load_balancer.samples
        if len(samples) != query.shape[0]:
            raise ValueError(
                f"{SDPA}: query of shape {list(query.shape)} has {query.shape[0]} samples, "
                f"{self.load_balancer} is for {len(samples)}"
            )
        shared = attn_mask is None or attn_mask.dim() < 4 or attn_mask.shape[0] == 1
        outs = [
            replace(self, load_balancer=sample)._attend_batch(
                query[b : b + 1],
                key[b : b + 1],
                value[b : b + 1],
                attn_mask if shared or attn_mask is None else attn_mask[b : b + 1],
                is_causal,
                scale,
                enable_gqa,
            )
            for b, sample in enumerate(samples)
        ]
        return torch.cat(outs)

    def watch(self) -> guards.Watch:
        """Returns a new record of what runs within this region."""
        return guards.Watch(self.group, self.world_size, self.load_balancer)

    def mode(self, watch: guards.Watch) -> TorchFunctionMode:
        """Returns the mode that sees `F.scaled_dot_product_attention`."""
        return _Mode(self, watch)

    def __enter__(self) -> Region:
        watch = self.watch()
        mode = self.mode(watch)
        mode.__enter__()
        guards.enter(watch)
        flex_hook.acquire()
        _regions().append((self, mode))
        return self

    def __exit__(self, *error: object) -> None:
        _, mode = _regions().pop()
        flex_hook.release()
        guards.leave()
        mode.__exit__(*error)


def _length(query: torch.Tensor) -> int:
    local = query.to_local() if hasattr(query, "to_local") else query
    return int(local.shape[2])


def _is_body(value: Any) -> bool:
    """Tells a function that a checkpoint runs from the arguments of other functions."""
    if isinstance(value, torch.Tensor):
        return False
    kinds = (types.FunctionType, types.MethodType, functools.partial, torch.nn.Module)
    return isinstance(value, kinds)


class _Mode(FlexMode):
    def __init__(self, region: Region, watch: guards.Watch) -> None:
        super().__init__(region, watch)

    def __torch_function__(
        self, func: Any, _types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            self._watch.called = True
            return self._region.attend(*args, **kwargs)
        if func in _HIDDEN:
            raise NotImplementedError(
                f"{func.__name__} (torch.nn.MultiheadAttention, torch.nn.TransformerEncoderLayer) "
                "within context_parallel would attend to this rank's part of the sequence only: "
                f"use F.{SDPA} or flex_attention"
            )
        if func in _BACKWARD:
            return self._backward(func, args, kwargs)
        if torch.compiler.is_dynamo_compiling() and args and _is_body(args[0]):
            args = (self._within(args[0]), *args[1:])
        if getattr(func, "__name__", None) in _CALLED_DIRECTLY:
            self._watch.called = True
        return func(*args, **kwargs)

    def _within(self, body: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the body of a checkpoint in this mode, which is off while it handles functions.

        Dynamo then breaks the graph; without this it would trace attention to this rank's part.
        """

        def within(*args: Any, **kwargs: Any) -> Any:
            with self:
                return body(*args, **kwargs)

        return within

    def _backward(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Runs a backward pass in this mode, because it may recompute what was checkpointed.

        A mode is off while it handles a function, or the function would come back here. So it is
        entered later, when the function reads the gradients of its outputs.
        """
        name = _BACKWARD[func]
        with ExitStack() as inner:
            outputs = args[0]
            count = 1 if isinstance(outputs, torch.Tensor) else len(outputs)
            grads = _Gradients(kwargs.get(name), count)
            grads.when_read = lambda: inner.enter_context(_Mode(self._region, self._watch))
            return func(*args, **{**kwargs, name: grads})


class _Gradients:
    """Gradients that call `when_read` when they are first read."""

    def __init__(self, grads: Any, count: int) -> None:
        if grads is None:
            grads = (None,) * count
        self._grads = (grads,) if isinstance(grads, torch.Tensor) else tuple(grads)
        self.when_read: Callable[[], object] | None = None

    def __iter__(self) -> Iterator[torch.Tensor | None]:
        if self.when_read is not None:
            self.when_read()
            self.when_read = None
        return iter(self._grads)


_local = threading.local()


def _regions() -> list[tuple[Region, _Mode]]:
    stack: list[tuple[Region, _Mode]] | None = getattr(_local, "regions", None)
    if stack is None:
        stack = _local.regions = []
    return stack


def active() -> Region | None:
    """Returns the innermost region of this thread."""
    stack = _regions()
    return stack[-1][0] if stack else None
