"""accelerate's context parallelism on symm_cp: call `enable()` before a model is prepared.

accelerate offers no hook for this, so `enable` replaces methods of its classes, and of
transformers' `Trainer` if it is imported; `disable` restores them. The import itself replaces
nothing.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from types import SimpleNamespace
from typing import Any

import accelerate
import torch
from accelerate import Accelerator
from accelerate.parallelism_config import ParallelismConfig
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from symm_cp.context_parallel import HeadTail, LoadBalancer, context_parallel
from symm_cp.context_parallel.inspectors import of_library, plain
from symm_cp.ops.attention.methods import (
    METHODS,
    MethodName,
    default_method,
    rotate_method,
    set_rotate_method,
)

__all__ = ["disable", "enable"]

_OP = "symm_cp.integrations.accelerate"
#: The releases whose classes this module knows, as (major, minor).
_KNOWN = ((1, 15),)


@dataclass(frozen=True)
class _Options:
    load_balancer: Callable[[int, int], LoadBalancer]
    method: MethodName | None


_options: _Options | None = None
#: The replaced methods: class, name, and the original.
_replaced: list[tuple[type, str, Any]] = []


def enable(
    *,
    load_balancer: Callable[[int, int], LoadBalancer] = HeadTail,
    method: MethodName | None = None,
) -> None:
    """Runs accelerate's context parallelism on symm_cp, for models that are prepared afterwards.

    The program needs one more line::

        symm_cp.integrations.accelerate.enable()
        accelerator = Accelerator(parallelism_config=ParallelismConfig(cp_size=2), fsdp_plugin=...)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        for batch in loader:
            buffers = [batch["input_ids"], batch["shift_labels"], batch["position_ids"]]
            with accelerator.maybe_context_parallel(buffers=buffers, buffer_seq_dims=[1, 1, 1]):
                ...

    Models of transformers keep their masks: windows, chunks, sinks, and padding or packed documents
    (cut `attention_mask` and `position_ids`, too). `Trainer` with a `parallelism_config` cuts whole
    batches with `shard_batch`. CPU works, too, with FSDP2 if there is an `fsdp_plugin`, else with
    DDP. With `tp_size`, which requires FSDP2, split models before they are prepared.

    Args:
        load_balancer: how sequences are spread: a function of the length of a whole sequence and
            the number of ranks, such as the class `symm_cp.Sequential`.
        method: how attention is split over the ranks: "allgather", "ulysses" or "auto", as in
            `context_parallel`. This does not affect `sp_size`, DeepSpeed's Ulysses.

    A second call changes the options. `disable` undoes the replacement. Raises `RuntimeError` for
    an unknown release of accelerate, `TypeError` and `ValueError` for invalid options. Source:
    accelerate's `ParallelismConfig`.
    """
    global _options
    _check_release()
    if not callable(load_balancer):
        raise TypeError(
            f"{_OP}.enable: load_balancer is a {type(load_balancer).__name__}, must be a function "
            "of the length of a sequence and the number of ranks"
        )
    if method is not None and method not in METHODS:
        raise ValueError(f"{_OP}.enable: unknown {method=}; choose one of {METHODS}")
    _options = _Options(load_balancer, method)
    if not _replaced:
        _replace(Accelerator, "_prepare_cp", _prepare_cp)
        _replace(Accelerator, "_prepare_tp", _prepare_tp)
        _replace(AcceleratorState, "__init__", _with_fsdp_on_cpu)
        _replace(ParallelismConfig, "_validate_accelerator", _validate_accelerator)
    _serve_trainer()


def disable() -> None:
    """Restores accelerate's own context parallelism, for models that are prepared afterwards."""
    global _options
    _options = None
    while _replaced:
        owner, name, original = _replaced.pop()
        setattr(owner, name, original)


def _check_release() -> None:
    release = tuple(int(part) for part in accelerate.__version__.split(".")[:2])
    if release not in _KNOWN:
        known = ", ".join(".".join(map(str, each)) for each in _KNOWN)
        raise RuntimeError(
            f"{_OP}.enable: accelerate {accelerate.__version__} is installed, must be {known}: "
            "enable replaces methods whose code other releases may have changed"
        )


def _replace(owner: type, name: str, make: Callable[[Any], Any]) -> None:
    original = vars(owner)[name]
    _replaced.append((owner, name, original))
    setattr(owner, name, wraps(original)(make(original)))


# --- a model under context parallelism ---


@dataclass(frozen=True)
class _Context:
    """The context that an accelerator enters for each step, instead of torch's."""

    accelerator: Accelerator
    options: _Options

    @property
    def mesh(self) -> DeviceMesh:
        return self.accelerator.torch_device_mesh["cp"]

    def __call__(
        self,
        *,
        buffers: Sequence[torch.Tensor] | None = None,
        buffer_seq_dims: Sequence[int] | None = None,
        no_restore_buffers: set[torch.Tensor] | None = None,
    ) -> Any:
        """Returns the context in which attention covers the whole sequence."""
        pairs = zip(buffers or (), buffer_seq_dims or (), strict=False)  # checked during the cut
        lengths = {
            buffer.shape[dim] for buffer, dim in pairs if -buffer.dim() <= dim < buffer.dim()
        }
        return self.over(
            self._balancers(lengths),
            self.accelerator._models,
            buffers=buffers,
            buffer_seq_dims=buffer_seq_dims,
            no_restore_buffers=no_restore_buffers,
        )

    def _balancers(self, lengths: set[int]) -> Any:
        size, make = self.mesh.size(), self.options.load_balancer
        if lengths:
            return {length: make(length, size) for length in lengths}
        # The caller has cut the batch. Without any load balancer its layout is checked.
        return None if make is HeadTail else lambda held: make(held * size, size)

    @contextmanager
    def over(
        self, load_balancer: Any, models: Sequence[nn.Module], **buffers: Any
    ) -> Iterator[None]:
        """Makes these models attend over sequences spread by `load_balancer`."""
        strategy = self.accelerator.parallelism_config.cp_handler.cp_comm_strategy
        ours = [model for model in map(plain, models) if of_library(model)]
        with (
            _rotating(strategy),
            context_parallel(
                self.mesh,
                model=ours or None,
                load_balancer=load_balancer,
                method=self.options.method,
                **buffers,
            ),
        ):
            yield


@contextmanager
def _rotating(strategy: str) -> Iterator[None]:
    """Sends gradients of keys and values by accelerate's strategy, unless another method is set."""
    if strategy == rotate_method() or default_method() != "allgather":
        yield
        return
    before = rotate_method()
    set_rotate_method(strategy)
    try:
        yield
    finally:
        set_rotate_method(before)


def _prepare_cp(original: Any) -> Any:
    def prepare(self: Accelerator, *args: Any) -> Any:
        # Leaves out accelerate's hooks, which would drop masks.
        assert _options is not None
        self._cp_context = _Context(self, _options)
        return args

    return prepare


def _prepare_tp(original: Any) -> Any:
    def prepare(self: Accelerator, *args: Any) -> Any:
        if self.parallelism_config.cp_enabled:
            # accelerate's method converts parameters that are not split to `Replicate()`, with a
            # class that transformers 5 no longer has. FSDP2 takes these parameters unconverted.
            for model in (arg for arg in args if isinstance(arg, nn.Module)):
                _check_tensor_parallel(self, model)
            return args
        return original(self, *args)

    return prepare


def _check_tensor_parallel(accelerator: Accelerator, model: nn.Module) -> None:
    """Raises `ValueError` for a model that accelerate would not train tensor parallel."""
    size = accelerator.parallelism_config.tp_size
    if not any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        raise ValueError(
            f"{_OP}: {type(model).__name__} is prepared with tp_size={size}, but none of its "
            "parameters is split. Call symm_cp.tensor_parallel.apply(model, "
            'accelerator.torch_device_mesh["tp"]) before, or load the model with transformers\' '
            "distributed_config"
        )
    plugin = accelerator.state.fsdp_plugin
    if plugin.cpu_ram_efficient_loading and not isinstance(model, FSDPModule):
        raise ValueError(
            f"{_OP}: fsdp_plugin has cpu_ram_efficient_loading=True, must be False with "
            f"tp_size={size}: accelerate would give all ranks the split weights of rank 0"
        )


# --- on CPU ---


def _with_fsdp_on_cpu(original: Any) -> Any:
    def init(self: AcceleratorState, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        config, plugin = kwargs.get("parallelism_config"), kwargs.get("fsdp_plugin")
        on_cpu = self.distributed_type == DistributedType.MULTI_CPU
        if not on_cpu or config is None or not config.cp_enabled or plugin is None:
            return
        if plugin.fsdp_version != 2:
            raise ValueError(
                f"{_OP}: fsdp_plugin has fsdp_version={plugin.fsdp_version}, must be 2 with cp_size"
            )
        # As accelerate does on accelerators.
        self.distributed_type = DistributedType.FSDP
        self.fsdp_plugin = plugin
        if self._mixed_precision != "no":
            plugin.set_mixed_precision(self._mixed_precision)
        PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    return init


def _started() -> int:
    """Returns the number of processes in the default group, or that the launcher has started."""
    if torch.distributed.is_initialized():
        return torch.distributed.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1"))


def _validate_accelerator(original: Any) -> Any:
    def validate(self: ParallelismConfig, accelerator: Accelerator) -> None:
        _serve_trainer()  # `Trainer` makes its accelerator here
        kind = accelerator.distributed_type
        if accelerator.num_processes == 1 < min(_started(), self.total_size):
            raise ValueError(
                f"{_OP}: accelerate uses 1 of {_started()} processes, as it finds no accelerator; "
                "on CPU set ACCELERATE_USE_CPU=true, or pass Accelerator(cpu=True) or "
                "TrainingArguments(use_cpu=True)"
            )
        if self.sp_enabled and kind != DistributedType.DEEPSPEED:
            raise ValueError(
                f"{_OP}: sp_size={self.sp_size} is DeepSpeed's sequence parallelism, and there is "
                "no deepspeed_plugin; for symm_cp's context parallelism pass cp_size"
            )
        if self.cp_enabled and self.tp_enabled and not accelerator.is_fsdp2:
            # accelerate leaves DDP out with tp_size: nothing would sum gradients over cp.
            raise ValueError(
                f"{_OP}: tp_size={self.tp_size} with cp_size={self.cp_size} requires an "
                "fsdp_plugin with fsdp_version=2"
            )
        if not self.cp_enabled or kind != DistributedType.MULTI_CPU:
            original(self, accelerator)
            return
        if self.dp_shard_enabled:
            raise ValueError(
                f"{_OP}: dp_shard_size={self.dp_shard_size} on CPU requires an fsdp_plugin with "
                "fsdp_version=2"
            )
        as_on_accelerators = SimpleNamespace(
            multi_device=True,
            is_fsdp2=False,
            distributed_type=kind,
            num_processes=accelerator.num_processes,
            is_main_process=accelerator.is_main_process,
        )
        original(self, as_on_accelerators)

    return validate


# --- transformers' Trainer ---


def _serve_trainer() -> None:
    """Makes `Trainer` cut batches with `shard_batch`, if it has been imported."""
    if "transformers.trainer" not in sys.modules:
        return
    from transformers import Trainer

    if _options is None or any(owner is Trainer for owner, _, _ in _replaced):
        return
    from symm_cp.integrations.transformers import trainer

    _replace(Trainer, "_prepare_context_parallel_inputs", _served(trainer.prepare_inputs))
    _replace(Trainer, "compute_loss", _served(trainer.compute_loss))
    _replace(Trainer, "prediction_step", _served(trainer.prediction_step))


def _served(function: Callable[..., Any]) -> Callable[[Any], Any]:
    """Returns a replacement of a method: a function of trainer.py, with context parallelism."""

    def make(original: Any) -> Any:
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            steps = _steps_of(self)
            if steps is None:
                return original(self, *args, **kwargs)
            return function(self, steps, partial(original, self), *args, **kwargs)

        return method

    return make


def _steps_of(trainer: Any) -> Any:
    """Returns the `Steps` of a trainer; None without symm_cp's context parallelism."""
    from symm_cp.integrations.transformers.trainer import Steps

    accelerator = trainer.accelerator
    config = accelerator.parallelism_config
    if config is None or not config.cp_enabled:
        return None
    # A trainer that only evaluates prepares no context.
    context = getattr(accelerator, "_cp_context", None) or _Context(accelerator, _options)  # type: ignore[arg-type]
    if not isinstance(context, _Context):
        return None

    def enter(model: nn.Module, balancers: Any) -> Any:
        return context.over(balancers, [model])

    return Steps(context.mesh.get_group(), context.options.load_balancer, enter)
