"""Reads tensor-parallel plans: which module or parameter of a model is split in which way.

A plan of transformers maps patterns ("model.layers.*.mlp.up_proj") to kinds ("colwise"); a star
stands for the number of a layer. Nothing here imports transformers: a plan is read from attributes
of the model and its config.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import nn

from symm_cp.tensor_parallel.adapters import wrapped_model

#: Kinds of linears that hold some output features on each rank.
COLWISE = {"colwise", "colwise_gather_output", "colwise_rep"}
#: Kinds of linears that hold some input features on each rank.
ROWWISE = {"rowwise", "rowwise_split_input", "rowwise_rep"}
#: Kinds of modules around experts.
EXPERTS = {"moe_tp_experts", "ep_dispatch_experts"}
#: Kinds of parameters that a module itself owns: experts, attention sinks.
_OF_PARAMETERS = {"colwise", "rowwise", "packed_colwise", "packed_rowwise", "grouped_gemm"}
_OF_MODULES = (
    COLWISE
    | ROWWISE
    | EXPERTS
    | {"embedding_rowwise", "replicated_with_grad_allreduce", "all_reduce", "local_params"}
)
_WITHOUT_EFFECT = {"replicate"}

#: What to do instead of kinds that cannot be mapped.
_WAYS_OUT = {
    "sequence_parallel": "leave the rule out: sequence_parallel=True splits the sequence between "
    "all blocks",
    "ep_router": "experts that are split with 'ep_dispatch_experts' and 'grouped_gemm' need no "
    "rule for their router",
}
_WAY_OUT = (
    "leave the rule out (pass the other rules as plan={...}; what no rule names is replicated), or "
    "use the tensor parallelism of transformers itself, which runs on the backend 'symm_cp'"
)


def is_packed(kind: str) -> bool:
    """Tells whether a parameter holds two matrices, each split over the ranks."""
    return kind.startswith("packed")


def split_dim(kind: str, dims: int) -> int:
    """Returns the dimension to split; the last two dimensions of experts are (output, input)."""
    if kind == "grouped_gemm":
        return 0
    return dims - 1 if kind in {"rowwise", "packed_rowwise"} else max(dims - 2, 0)


@dataclass(frozen=True)
class Rule:
    """One module or parameter, and the kind that the plan gives it."""

    name: str  # of the module, or of the parameter
    kind: str
    owner: str  # the name of the module, or of the module that has the parameter
    parameter: str  # its name in the owner; empty for a module


def own_plan(model: nn.Module) -> dict[str, str]:
    """Returns the plan that a model of transformers brings along, with full names.

    Experts that its tensor-parallel plan does not split are split as its expert-parallel plan says.
    """
    plan: dict[str, str] = dict(getattr(model, "_tp_plan", None) or {})
    config = getattr(model, "config", None)
    prefix = getattr(model, "base_model_prefix", "")
    prefix = f"{prefix}." if prefix and hasattr(model, prefix) else ""
    for pattern, kind in (getattr(config, "base_model_tp_plan", None) or {}).items():
        plan.setdefault(prefix + pattern, kind)
    for pattern, kind in (getattr(model, "_ep_plan", None) or {}).items():
        experts = pattern if kind in EXPERTS else pattern.rpartition(".")[0]
        if not any(key == experts or key.startswith(f"{experts}.") for key in plan_keys(plan)):
            plan[pattern] = kind
    if not plan:
        raise ValueError(
            f"apply: {type(model).__name__} has no tensor-parallel plan of its own (no _tp_plan, "
            "no config.base_model_tp_plan): pass plan={pattern: kind}"
        )
    return plan


def plan_keys(plan: Mapping[str, str]) -> list[str]:
    """Returns the patterns that come from a tensor-parallel plan, not an expert-parallel one."""
    return [
        key for key, kind in plan.items() if kind not in {"ep_dispatch_experts", "grouped_gemm"}
    ]


def _pattern(key: str) -> re.Pattern[str]:
    return re.compile(r"\d+".join(re.escape(piece) for piece in key.split("*")))


def _kind_of(plan: Iterable[tuple[re.Pattern[str], str, str]], name: str) -> tuple[str, str] | None:
    return next(((kind, key) for pattern, kind, key in plan if pattern.fullmatch(name)), None)


def rules_of(model: nn.Module, plan: str | Mapping[str, str]) -> list[Rule]:
    """Returns a plan's rules for modules and parameters, in the model's order.

    Patterns are relative to the model that PEFT has wrapped, if any; full names match, too.

    Raises before anything is changed: `ValueError` for a pattern of a given plan that names nothing
    (a model's own plan may have such patterns, for layers that the model lacks), and for a model's
    own plan in which no pattern names anything; `NotImplementedError` for a kind that cannot be
    mapped, with an alternative.
    """
    if isinstance(plan, str) and plan != "auto":
        raise ValueError(f'apply: plan must be "auto" or a dict of patterns, not {plan!r}')
    prefix, inner = wrapped_model(model)
    given = own_plan(inner) if isinstance(plan, str) else dict(plan)
    for key, kind in given.items():
        if not isinstance(key, str) or not isinstance(kind, str):
            raise TypeError(
                f"apply: plan must map patterns to names of kinds, not {key!r} to {kind!r}; pass "
                "ParallelStyle objects to torch's parallelize_module"
            )
    patterns = [(_pattern(key), kind, key) for key, kind in given.items()]
    rules, used = [], set()
    for owner, module in model.named_modules():
        names = [(owner, "")]
        names += [
            (f"{owner}.{p}" if owner else p, p) for p, _ in module.named_parameters("", False)
        ]
        for name, parameter in names:
            relative = name.removeprefix(f"{prefix}.")
            if found := _kind_of(patterns, relative) or _kind_of(patterns, name):
                kind, key = found
                used.add(key)
                _check_kind(name, kind, module, parameter)
                if kind not in _WITHOUT_EFFECT:
                    rules.append(Rule(name, kind, owner, parameter))
    if not isinstance(plan, str) and (unused := sorted(given.keys() - used)):
        raise ValueError(
            f"apply: the patterns {unused} of the plan name no module or parameter of "
            f"{type(model).__name__}"
        )
    if given and not used:
        raise ValueError(
            f"apply: {type(model).__name__}'s own plan names none of its modules; a pattern is "
            f"{next(iter(given))!r}. If it wraps a model, apply the plan to that, or pass "
            "plan={pattern: kind} with the names that modules have here"
        )
    return rules


def _check_kind(name: str, kind: str, module: nn.Module, parameter: str) -> None:
    if kind in _WITHOUT_EFFECT or kind in (_OF_PARAMETERS if parameter else _OF_MODULES):
        return
    raise NotImplementedError(
        f"apply: the plan gives {name} ({type(module).__name__}) the kind {kind!r}, which symm_cp "
        f"does not have for a {'parameter' if parameter else 'module'}: "
        f"{_WAYS_OUT.get(kind, _WAY_OUT)}"
    )
