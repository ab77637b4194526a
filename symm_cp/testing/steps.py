"""What the optimizer steps of a program see: losses, labels, gradients, weights; for `compare.py`.

Everything is read from outside, so any program works: gradients when an optimizer takes them,
losses when their backward pass begins, labels when a cross entropy counts them.
"""

from __future__ import annotations

import functools
import gc
import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer

# What wrappers of modules put into the names of parameters.
_WRAPPERS = re.compile(r"\b(module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")


@dataclass
class Step:
    """One optimizer step of one process. Tensors that were DTensors are whole."""

    #: The roots of the backward passes since the step before.
    losses: list[float] = field(default_factory=list)
    #: How many labels counted in each cross entropy since the step before.
    labels: list[int] = field(default_factory=list)
    #: The largest probability of dropout of a module in training.
    dropout: float = 0.0
    #: What `clip_grad_norm_` returned.
    norms: list[float] = field(default_factory=list)
    #: By the names of the parameters; None: no gradient.
    grads: dict[str, torch.Tensor | None] = field(default_factory=dict)
    before: dict[str, torch.Tensor] = field(default_factory=dict)
    after: dict[str, torch.Tensor] = field(default_factory=dict)


class Recorder:
    """Records the first `most` optimizer steps of this process, of all optimizers in turn."""

    def __init__(self, most: int, path: Path | None = None) -> None:
        """With a path, saves the steps there after each."""
        self.steps: list[Step] = []
        self._most, self._path = most, path
        self._next = Step()
        self._names: dict[int, str] = {}

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Records the steps that are made in the block."""
        # Functions below the ones that programs call: modes of torch functions, such as those of
        # `context_parallel`, know the latter by identity.
        losses = torch._C._nn
        with ExitStack() as stack:
            for owner, name, note in (
                (torch.autograd, "_engine_run_backward", self._note_loss),
                (losses, "cross_entropy_loss", self._note_labels),
                (losses, "nll_loss_nd", self._note_labels),
                (torch.nn.utils, "clip_grad_norm_", self._note_norm),
            ):
                noting = _noting(getattr(owner, name), note)
                stack.enter_context(mock.patch.object(owner, name, noting))
            for register, hook in (
                (torch_optimizer.register_optimizer_step_pre_hook, self._begin),
                (torch_optimizer.register_optimizer_step_post_hook, self._end),
            ):
                stack.callback(register(hook).remove)
            yield

    def _note_loss(
        self, roots: Sequence[torch.Tensor], *_: object, accumulate_grad: bool = False, **__: object
    ) -> None:
        # Pipelines call torch.autograd.grad with tensors of no meaning, to learn shapes.
        if accumulate_grad:
            self._next.losses += [float(_whole(root)) for root in roots if root.numel() == 1]

    def _note_labels(self, _: object, target: torch.Tensor, *more: Any, **__: object) -> None:
        if not target.is_floating_point():
            ignored = more[2] if len(more) > 2 else -100
            self._next.labels.append(int((_whole(target) != ignored).sum()))

    def _note_norm(self, *_: object, result: Any, **__: object) -> None:
        self._next.norms.append(float(_whole(result)))

    def _begin(self, optimizer: torch.optim.Optimizer, _args: object, _kwargs: object) -> None:
        if len(self.steps) >= self._most:
            return
        for name, parameter in self._parameters(optimizer):
            grad = parameter.grad
            self._next.grads[name] = None if grad is None else _whole(grad)
            self._next.before[name] = _whole(parameter)

    def _end(self, optimizer: torch.optim.Optimizer, _args: object, _kwargs: object) -> None:
        if len(self.steps) >= self._most:
            return
        self._next.dropout = _dropout()
        self._next.after = {name: _whole(each) for name, each in self._parameters(optimizer)}
        self.steps.append(self._next)
        self._next = Step()
        if self._path is not None:
            torch.save(self.steps, self._path)

    def _parameters(self, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
        for index, group in enumerate(optimizer.param_groups):
            if any(id(parameter) not in self._names for parameter in group["params"]):
                self._names.update(_names())
            for number, parameter in enumerate(group["params"]):
                yield self._names.get(id(parameter), f"group {index}, {number}"), parameter


def _noting(function: Callable[..., Any], note: Callable[..., None]) -> Callable[..., Any]:
    """Returns the function, which also calls `note` with its arguments and the result."""

    @functools.wraps(function)
    def noting(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        if not torch.compiler.is_compiling():
            note(*args, **kwargs, **({"result": result} if "result" in signature else {}))
        return result

    signature = inspect.signature(note).parameters
    return noting


def _outermost() -> Iterator[nn.Module]:
    """Yields the modules of this process that no other module has."""
    # By type: `isinstance` would ask the object behind a weak proxy, which may be gone.
    modules = [each for each in gc.get_objects() if issubclass(type(each), nn.Module)]
    inner = {id(child) for module in modules for child in module.children()}
    return (module for module in modules if id(module) not in inner)


def _names() -> dict[int, str]:
    """Returns the names of all parameters, in the outermost modules that have them, by identity."""
    return {
        id(parameter): _WRAPPERS.sub("", name)
        for module in _outermost()
        for name, parameter in module.named_parameters()
    }


def _dropout() -> float:
    """Returns the largest probability of dropout of a module in training."""
    chances = [
        value
        for outer in _outermost()
        for module in outer.modules()
        if module.training
        for name, value in vars(module).items()
        if isinstance(value, float) and (name == "p" or "dropout" in name)
    ]
    return max(chances, default=0.0)


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a copy on the CPU, of all of a DTensor."""
    with torch.no_grad():
        tensor = tensor.detach()
        if hasattr(tensor, "full_tensor"):
            tensor = tensor.full_tensor()
        return tensor.cpu().clone()
