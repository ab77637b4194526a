"""Enters and leaves regions, and intercepts the functions called within them.

A `TorchFunctionMode` sees `scaled_dot_product_attention`, the op of `varlen_attn` and random
functions, however they were imported. flex_hook.py intercepts `flex_attention`; checkpoints.py,
checkpoints; guards.py, running modules.
"""

from __future__ import annotations

import functools
import traceback
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.distributed_c10d import _resolve_process_group

from symm_cp import native
from symm_cp.context_parallel import guards, random_numbers, sdpa, varlen
from symm_cp.context_parallel.checkpoints import checkpoint_hook
from symm_cp.context_parallel.flex_hook import FlexMode, current_modes, flex_hook
from symm_cp.context_parallel.guards import Watch
from symm_cp.context_parallel.layouts import enter_cuts
from symm_cp.context_parallel.region import ParallelRegion, pop, push
from symm_cp.ops.attention.mesh_calls import give_up, reporting_to_peers
from symm_cp.ops.error_reports import END_OF_RECOMPUTATION, refuse

# Attention that calls `scaled_dot_product_attention` out of the mode's sight, or not at all.
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


#: Makes the context around a region, for code that runs in the region after it was left.
Around = Callable[[], AbstractContextManager[None]]


@contextmanager
def entered(region: ParallelRegion, watch: Watch, around: Around = nullcontext) -> Iterator[None]:
    """Runs attention that this thread calls over the region's group.

    If a checkpoint recomputes after the end, it runs within `around()`, and in the region again.
    """
    reporting_to_peers(region.peers, _check_shards, region)
    with (
        random_numbers.own_numbers(region.rank),
        _running(RegionMode(region, watch, around, entered=True)),
    ):
        yield


@contextmanager
def _running(mode: RegionMode, *, again: bool = False) -> Iterator[None]:
    with mode:
        guards.enter(mode.watch, again=again)
        flex_hook.acquire()
        checkpoint_hook.acquire()
        push(mode.region)
        if not again and (filter_of := _filter_class()) is not None:
            mode.__dict__["__torch_function__"] = filter_of(mode)
        try:
            with _reporting_models(mode.region.peers):
                yield
        finally:
            if not again:
                mode.__dict__.pop("__torch_function__", None)  # ends a cycle of references
            pop()
            checkpoint_hook.release()
            flex_hook.release()
            guards.leave()


# Code that runs in the middle of a model's step: the peers are in the same step.
_STEPS = {torch.nn.Module._call_impl.__code__, torch.autograd.backward.__code__}
# Files that call ops. Ops report to the peers themselves; native ops leave no frame in the error.
_OPS = (torch._ops.__file__, torch.autograd.graph.__file__)


@contextmanager
def _reporting_models(group: str | tuple[str, ...]) -> Iterator[None]:
    """Reports to the peers when a module or a backward pass raises: they wait for its attention.

    Does not report errors of the caller's own code outside of these: peers may have finished, and
    make no further call.
    """
    try:
        yield
    except END_OF_RECOMPUTATION:  # nothing failed
        raise
    except (Exception, KeyboardInterrupt) as error:
        codes = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
        if not _STEPS.isdisjoint(codes) and codes[-1].co_filename not in _OPS:
            if not isinstance(group, str):
                give_up(group, error)
            else:
                with suppress(Exception):  # without a group there are no peers
                    refuse(group, "sync", error)
        raise


def _check_shards(region: ParallelRegion) -> None:
    group: dist.ProcessGroup = _resolve_process_group(region.group)  # type: ignore[arg-type]
    guesses = not region.balancers and region.choose is None
    enter_cuts(group, region.balancers, assumed=guesses)


# Types of a function that a checkpoint runs; first arguments of other functions have other types.
_BODIES = (types.FunctionType, types.MethodType, functools.partial, torch.nn.Module)


class RegionMode(FlexMode):
    """The torch function mode of a region: sees functions however they were imported."""

    def __init__(
        self,
        region: ParallelRegion,
        watch: Watch,
        around: Around = nullcontext,
        *,
        entered: bool = False,
    ) -> None:
        super().__init__(region, watch)
        self.around = around
        self.entered = entered

    @contextmanager
    def again(self) -> Iterator[None]:
        """Runs code as in the region, even after the region was left.

        Shards are not compared: the caller may have cut the next batch in another layout.
        """
        with self.around(), _running(self, again=True):
            yield

    def __torch_function__(
        self, func: Any, _types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # Makes no extra call for most functions: without Python's headers all come here.
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            self.watch.called = True
            return sdpa.attend(self.region, *args, **kwargs)
        if func in random_numbers.RANDOM:
            entered = self.entered or any(mode.entered for mode in current_modes())
            return random_numbers.call(self.region, func, args, kwargs, entered=entered)
        if func in _HIDDEN and self.region.world_size > 1:
            raise NotImplementedError(
                f"{func.__name__} (torch.nn.MultiheadAttention, torch.nn.TransformerEncoderLayer) "
                "within context_parallel would attend to this rank's part of the sequence only: "
                f"use F.{sdpa.SDPA} or flex_attention"
            )
        if func in _BACKWARD:
            return self._backward(func, args, kwargs)
        if args and isinstance(args[0], _BODIES) and torch.compiler.is_dynamo_compiling():
            args = (self._within(args[0]), *args[1:])
        name = getattr(func, "__name__", None)
        if name in varlen.OPS and varlen.is_varlen(func):
            self.watch.called = True
            return varlen.call(self.region, func, args, kwargs)
        if name in _CALLED_DIRECTLY:
            self.watch.called = True
        return func(*args, **kwargs)

    def _within(self, body: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a checkpoint's body that runs in this mode, which is off during its handler.

        Dynamo then breaks the graph; otherwise it would trace attention to this rank's part.
        """

        def within(*args: Any, **kwargs: Any) -> Any:
            with self:
                return body(*args, **kwargs)

        return within

    def _backward(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Runs a backward pass in this mode, because it may recompute checkpoints.

        A mode is off while it handles a function, or the function would come back here. So this
        mode is entered later, when the function reads the gradients of its outputs.
        """
        name = _BACKWARD[func]
        with ExitStack() as inner:
            outputs = args[0]
            count = 1 if isinstance(outputs, torch.Tensor) else len(outputs)
            grads = _Gradients(kwargs.get(name), count)
            grads.when_read = lambda: inner.enter_context(
                RegionMode(self.region, self.watch, self.around, entered=self.entered)
            )
            return func(*args, **{**kwargs, name: grads})


_SEEN = {F.scaled_dot_product_attention: None, **random_numbers.RANDOM, **_BACKWARD}
_SEEN |= dict.fromkeys(_HIDDEN)


@functools.cache
def _filter_class() -> Callable[[RegionMode], Callable[..., Any]] | None:
    """Returns the class of a mode's handler that calls Python only for what the mode handles.

    A step of a small model calls hundreds of other functions. None without Python's headers.
    """
    glue = native.glue_if_built()
    if glue is None:
        return None

    class Filter(glue.symm_cp_function_filter(_SEEN)):  # type: ignore[misc]
        def __init__(self, mode: RegionMode) -> None:
            self.__self__ = mode  # where torch looks for it

        # Dynamo traces this for all functions; csrc/ops/function_filter.cpp calls it for a few.
        def __call__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return RegionMode.__torch_function__(self.__self__, func, types, args, kwargs)

    return Filter


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
