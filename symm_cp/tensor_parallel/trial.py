"""Tries the forward of a split model without data, before `apply` changes the model itself.

A plan says which linears are split. Whether the code between them works with parts (and, under
sequence parallelism, with parts of the sequence), and which gradients are then parts of a sum, only
that code says. So a copy of the model without memory is split and called: its ops compute shapes,
communicate nothing, and raise what they would raise.
"""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from symm_cp.tensor_parallel.linear import FusedColwiseLinear
from symm_cp.tensor_parallel.quantised import is_quantised

_SAMPLES, _LENGTH_OF_A_RANK = 2, 8
_COMMUNICATING = {"symm_mem", "c10d", "_c10d_functional"}
#: Begins of names of ops that read no values of other tensors.
_OF_SHAPES = ("new_", "zeros", "ones", "empty", "full", "rand")
_REPLICATED = "an activation"


def partial_gradients(
    model: nn.Module, split: Callable[[nn.Module], None], mesh: DeviceMesh
) -> frozenset[str]:
    """Returns the replicated parameters of which each rank computes a part of the gradient.

    These are applied to features that a column-wise linear has split. Raises `NotImplementedError`
    on all ranks if the model runs as it is, but not after `split` on one of them. Models that
    `input_ids` alone do not run, and models whose ops depend on values, are not tried.
    """
    tensors = [*model.parameters(), *model.buffers()]
    names = inspect.signature(model.forward).parameters
    if mesh.size() == 1 or "input_ids" not in names or any(map(is_quantised, tensors)):
        return frozenset()
    mode, device, ranks = _Gradients(), mesh.device_type, mesh.size()
    error = _error_of(model, split, device, ranks, mode)
    if error is not None and _error_of(model, lambda whole: None, device, ranks, _Gradients()):
        error = None
    own = error and f"{_place(error.__traceback__)} raises {type(error).__name__}: {error}"
    found: list[str | None] = [None] * ranks
    dist.all_gather_object(found, own, mesh.get_group())  # heads may be uneven
    if reason := next(filter(None, found), None):
        raise NotImplementedError(
            f"apply: {type(model).__name__} cannot run when the plan is applied: {reason}. Leave "
            "the rules inside it out (pass the other rules as plan={...}; what no rule names is "
            "replicated), or use sequence_parallel=False"
        ) from error
    return frozenset(mode.partial)


class _Gradients(TorchDispatchMode):
    """Follows values from replicated parameters until they meet split features."""

    def __init__(self) -> None:
        super().__init__()
        self.origins: Any = WeakIdKeyDictionary()  # of replicated values: names of parameters
        self.parts: Any = WeakIdKeyDictionary()
        self.partial: set[str] = set()

    def follow(self, model: nn.Module) -> None:
        """Begins with the parameters of a split model, and with the results of its linears."""
        for name, parameter in model.named_parameters():
            if hasattr(parameter, "placements") and parameter.placements[0].is_replicate():
                self.origins[parameter._local_tensor] = {name}
        for module in model.modules():
            if isinstance(module, FusedColwiseLinear) and not module.gathers_output:
                module.register_forward_hook(self._split_by)

    def _split_by(self, linear: nn.Module, args: Any, part: torch.Tensor) -> None:
        self.origins.pop(part, None)
        self.parts[part] = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func._opname.startswith(_OF_SHAPES) or func._opname.endswith("_like"):
            return result
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        origins = {name for x in given for name in self.origins.get(x, ())}
        if func.namespace in _COMMUNICATING or func is torch.ops.aten.embedding.default:
            origins, is_part = {_REPLICATED}, False
        else:
            is_part = any(x in self.parts for x in given)
        if is_part and _REPLICATED in origins:
            raise NotImplementedError(
                "a value that all ranks have is combined with features that the plan splits, which "
                "would leave each rank a part of its gradient"
            )
        self.partial |= origins if is_part else set()
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor) and x.is_floating_point():
                if is_part:
                    self.parts[x] = None
                else:
                    self.origins[x] = origins
        return result


def _error_of(
    model: nn.Module,
    split: Callable[[nn.Module], None],
    device: str,
    ranks: int,
    mode: _Gradients,
) -> Exception | None:
    """Returns what a copy of the model raises."""
    names = inspect.signature(model.forward).parameters
    inputs = [name for name in ("input_ids", "decoder_input_ids") if name in names]
    try:
        with _unlogged(), FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
            tried = _copied(model, device)
            split(tried)
            mode.follow(tried)
            ids = torch.zeros(_SAMPLES, _LENGTH_OF_A_RANK * ranks, dtype=torch.int64, device=device)
            with mode:
                tried(**dict.fromkeys(inputs, ids))
    except Exception as error:  # of any kind, from code that is not ours
        return error
    return None


@contextmanager
def _unlogged() -> Iterator[None]:
    """Keeps torch from logging errors, which this module handles."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def _copied(model: nn.Module, device: str) -> Any:
    """Copies a model whose parameters and buffers have no memory."""
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        empty = torch.empty_like(tensor, device=device)
        parameter = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if parameter else empty
    tried = copy.deepcopy(model, memo)
    for part in tried.modules():
        config: Any = getattr(part, "config", None)
        if hasattr(config, "_experts_implementation"):
            config._experts_implementation = "batched_mm"  # the one that reads no values
    return tried


def _place(trace: TracebackType | None) -> str:
    """Returns the class of the innermost module whose forward was running."""
    found = ""
    while trace is not None:
        module = trace.tb_frame.f_locals.get("self")
        if isinstance(module, nn.Module):
            found = type(module).__name__
        trace = trace.tb_next
    return found
