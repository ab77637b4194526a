"""Splits LoRA adapters that PEFT has put on linears, together with the linears.

With an input x (B, S, K), the weight (N, K) of a linear, A (r, K) and B (N, r), LoRA computes

    x @ weight^T + scaling * dropout(x) @ A^T @ B^T

kind      split by                              replicated
colwise   weight and B, by output features      A; the gradients of its output are summed
rowwise   weight and A, by input features       B; the products with A are summed before it

B multiplies the sum, not each rank's product with A: otherwise its gradient would be a part of a
sum, and each backward pass would send N * r values instead of B * S * r. Under sequence parallelism
the replicated matrix processes a part of the sequence, and its gradients are summed; r features are
gathered or scattered instead of K or N.

Nothing here imports PEFT: a model that has its modules has imported it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_module_registration_hook
from torch.utils.hooks import RemovableHandle

from symm_cp.tensor_parallel.linear import FusedColwiseLinear, FusedRowwiseLinear
from symm_cp.tensor_parallel.replicated import sum_ranks
from symm_cp.tensor_parallel.whole import Seat
from symm_cp.tensor_parallel.wrappers import wrap

_INSTEAD = (
    "merge it into the model first (merge_and_unload()), or apply the plan to the model without it"
)
_FIRST = "add adapters first, then apply the plan to the model with all of them"


def _peft(module: str, name: str) -> Any:
    return getattr(sys.modules.get(f"peft.{module}"), name, None)


def is_adapted(module: nn.Module) -> bool:
    """Whether PEFT has put this module around a module of the model."""
    kinds = (
        _peft("tuners.tuners_utils", "BaseTunerLayer"),
        _peft("utils", "AuxiliaryTrainingWrapper"),
    )
    return isinstance(module, tuple(kind for kind in kinds if kind is not None))


def adapted(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Returns (name, module) for the modules of a model that PEFT has put around others."""
    return ((name, module) for name, module in model.named_modules() if is_adapted(module))


def wrapped_model(model: nn.Module) -> tuple[str, nn.Module]:
    """Returns the name and the model inside a `PeftModel`; for others, no name and the model."""
    kind = _peft("peft_model", "PeftModel")
    if kind is None or not isinstance(model, kind):
        return "", model
    inner = model.get_base_model()
    return next(name for name, module in model.named_modules() if module is inner), inner


def linear_name(model: nn.Module, name: str) -> str:
    """Returns the name of a rule's linear: inside of its adapters, if it has any."""
    return f"{name}.base_layer" if is_adapted(model.get_submodule(name)) else name


def original(module: nn.Module) -> Any:
    """Returns the module that PEFT copied to train it whole (`modules_to_save`); others as is."""
    return getattr(module, "original_module", module) if is_adapted(module) else module


def check(model: nn.Module, rules: Sequence[str]) -> None:
    """Raises `NotImplementedError` for adapters that cannot be used with a plan.

    `rules` are names of modules that the plan splits.
    """
    if len(getattr(model, "prompt_encoder", ())):
        raise NotImplementedError(
            f"apply: {type(model).__name__} has a prompt encoder (prompt or prefix tuning), which "
            "is not supported: apply the plan to a model with LoRA, or without adapters"
        )
    for name, module in adapted(model):
        if reason := _refusal(name, module, rules):
            raise NotImplementedError(f"apply: {name} ({type(module).__name__}): {reason}")


def _refusal(name: str, module: Any, rules: Sequence[str]) -> str:
    if inside := [rule for rule in rules if rule.startswith(f"{name}.")]:
        return f"is an adapter, and the plan names {inside[0]} in it: name the adapter instead"
    if type(module) is _peft("utils", "ModulesToSaveWrapper"):
        return (
            "modules_to_save of a module that the plan splits is not supported: leave its rule "
            "out of the plan to replicate it, or name it as a target of LoRA"
            if name in rules
            else ""
        )
    if type(module) is not _peft("tuners.lora.layer", "Linear"):
        return f"only LoRA on linears is supported: {_INSTEAD}"
    if module.lora_variant:
        names = sorted({type(variant).__name__ for variant in module.lora_variant.values()})
        return f"of LoRA, {', '.join(names)} is not supported: {_INSTEAD}"
    base = module.base_layer
    if type(base) is not nn.Linear or "forward" in vars(base) or module.fan_in_fan_out:
        return f"LoRA on a {type(base).__name__} is not supported, only on an nn.Linear itself"
    return ""


def split_with(layer: nn.Module, columns: bool) -> list[nn.Module]:
    """Returns the adapters' linears that are split like the layer; `columns`: by outputs."""
    if not is_adapted(layer):
        return []
    parts: Any = layer.lora_B if columns else layer.lora_A
    return list(parts.values())


def kept_whole(name: str, layer: nn.Module, columns: bool) -> list[str]:
    """Returns the names of parameters of a layer's adapters that every rank has whole."""
    if not is_adapted(layer):
        return []
    side = "lora_A" if columns else "lora_B"
    parts: nn.Module = getattr(layer, side)
    return [f"{name}.{side}.{parameter}" for parameter, _ in parts.named_parameters()]


def wrap_layer(
    name: str, layer: Any, seat: Seat, dim: int | None, sizes: tuple[int, ...] | None
) -> None:
    """Wraps a layer whose adapters have been split, and the adapters' dropouts.

    The input is split along `dim`, into parts of `sizes` or, with None, equal parts; if `dim` is
    None, each rank has all of it.
    """
    if dim is not None:
        for dropout in layer.lora_dropout.values():
            wrap(dropout, DropoutOfPart, seat=seat, dim=dim, sizes=sizes)
    wrap(layer, SplitAdapters, own_name=name)


def wrap_all(model: nn.Module, seat: Seat) -> None:
    """Wraps all layers with adapters of a model whose parameters are DTensors, split or not."""
    for _, layer in adapted(model):
        if hasattr(layer, "merge"):
            wrap(layer, MergesDTensors, seat=seat)


class SplitAdapters(nn.Module):
    """A layer whose adapters are split: no adapter can be added, or chosen by sample."""

    own_name: str

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the layer; raises `NotImplementedError` for adapters by sample.

        PEFT calls adapters in the order of a set of names, which differs from process to process.
        """
        if kwargs.get("adapter_names") is not None:
            raise NotImplementedError(
                f"tensor_parallel.apply: adapter_names, given to {self.own_name}, is not "
                "supported: call the model once for each adapter (set_adapter)"
            )
        return super().forward(*args, **kwargs)

    def update_layer(self, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        """Raises `NotImplementedError`."""
        raise NotImplementedError(
            f"tensor_parallel.apply: {self.own_name} has been split, and the adapter "
            f"{adapter_name!r} cannot be added to it any more: {_FIRST}"
        )


class MergesDTensors(nn.Module):
    """A layer with adapters whose `merge` changes DTensors in place.

    PEFT would assign to the `data` of a DTensor, which changes nothing.
    """

    seat: Seat

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Merges adapters, as in one process; all ranks must call it if `safe_merge`.

        Raises `ValueError` on all ranks, with nothing changed, if `safe_merge` and the weights of
        any rank would not be finite.
        """
        layer: Any = self
        merge: Any = super().merge  # type: ignore[misc]
        if not safe_merge:
            merge(False, adapter_names)
            return
        before = list(layer.merged_adapters)
        copies = {p: p.detach().clone() for p in layer.base_layer.parameters()}
        merge(False, adapter_names)
        parts = [p.to_local() if isinstance(p, DTensor) else p for p in copies]
        finite = all(bool(torch.isfinite(part).all()) for part in parts)
        wrong = parts[0].new_full((1, 1), float(not finite), dtype=torch.float32)
        with torch.no_grad():
            if sum_ranks(wrong, self.seat.group).item() == 0:
                return
            for parameter, copy in copies.items():
                parameter.copy_(copy)
        layer.merged_adapters = before
        raise ValueError(
            f"merge: with the adapters {adapter_names or 'that are active'} the weights would not "
            "be finite"
        )


class DropoutOfPart(nn.Module):
    """The dropout before an adapter, where a rank has a part of the input.

    It draws the mask of the whole input and takes this rank's part: ranks with the same seed drop
    the values that one process drops, and their generators stay equal, also if parts are unequal.
    """

    seat: Seat
    dim: int
    sizes: tuple[int, ...] | None  # None: equal parts

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Returns the rank's part, a plain tensor."""
        part = input.to_local() if isinstance(input, DTensor) else input
        rate = getattr(self, "p", 0.0)  # PEFT's nn.Identity has none
        if not self.training or rate == 0:
            return part
        dim = self.dim % part.dim()
        sizes = self.sizes or self.seat.equal_parts(part.shape[dim])
        shape = [*part.shape[:dim], sum(sizes), *part.shape[dim + 1 :]]
        mask = F.dropout(part.new_ones(shape), rate)
        return part * mask.narrow(dim, sum(sizes[: self.seat.rank]), part.shape[dim])


_watching: list[RemovableHandle] = []


def refuse_later() -> None:
    """Makes PEFT's layers raise when they are put around a linear that is already split."""
    if not _watching:
        _watching.append(register_module_module_registration_hook(_refuse_split_linear))


def _refuse_split_linear(module: nn.Module, name: str, submodule: nn.Module | None) -> None:
    if (
        name == "base_layer"
        and isinstance(submodule, (FusedColwiseLinear, FusedRowwiseLinear))
        and is_adapted(module)
    ):
        raise NotImplementedError(
            f"{type(module).__name__}: an adapter cannot be added to a linear of "
            f"{submodule.in_features} input and {submodule.out_features} output features that is "
            f"split over ranks ({type(submodule).__name__}): {_FIRST}"
        )
