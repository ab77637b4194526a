"""Refuses optimizers that were made before `apply`: the model no longer has their parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

#: The names of parameters that `apply` has replaced, as long as something references them.
_replaced: Any = WeakIdKeyDictionary()
_hook: list[RemovableHandle] = []  # of all optimizers


def replaced(before: Mapping[str, nn.Parameter], model: nn.Module) -> None:
    """Makes optimizers raise at a step with parameters of `before` that the model no longer has."""
    now = {id(parameter) for parameter in model.parameters()}
    for name, parameter in before.items():
        if id(parameter) not in now:
            _replaced[parameter] = name
    if not _hook:
        _hook.append(register_optimizer_step_pre_hook(_check))


def _check(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling() or not len(_replaced):
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter in _replaced:
                raise RuntimeError(
                    f"tensor_parallel.apply: {type(optimizer).__name__} was made before apply, "
                    f"which has replaced its parameter {_replaced[parameter]}: its steps would "
                    "change nothing. Make the optimizer after apply"
                )
