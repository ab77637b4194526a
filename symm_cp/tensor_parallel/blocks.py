"""Which modules of a model process a part of the sequence, under sequence parallelism.

Between the blocks of a model (the members of a `ModuleList` that the plan names) each rank has a
part of the sequence. Inside a block, a child module

- is *token-wise* (norms, dropout): it runs on the part, so its parameters' gradients are summed;
- has *fused* linears: they gather the sequence and reduce-scatter it as they multiply;
- or is neither (routed experts, attention that the plan does not split): it gets the whole
  sequence, and its output is cut to this rank's part again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torch import nn

from symm_cp.tensor_parallel.adapters import original
from symm_cp.tensor_parallel.plans import COLWISE, ROWWISE, Rule

_CONTAINERS = (nn.ModuleList, nn.ModuleDict)
_TOKEN_WISE = (nn.Dropout, nn.Identity, nn.Linear, nn.LayerNorm)


@dataclass
class Blocks:
    """Names of modules, by how they process the sequence."""

    first: list[str] = field(default_factory=list)
    last: list[str] = field(default_factory=list)
    all: list[str] = field(default_factory=list)
    token_wise: list[str] = field(default_factory=list)
    fused: set[str] = field(default_factory=set)
    whole: list[str] = field(default_factory=list)

    def is_fused(self, rule: Rule) -> bool:
        """Tells whether a linear's input or output is a part of the sequence."""
        return rule.owner.rpartition(".")[0] in self.fused


def _list_of(model: nn.Module, name: str) -> str | None:
    """Returns the name of the outermost `ModuleList` that holds the module."""
    pieces = name.split(".")
    for count in range(1, len(pieces)):
        outer = ".".join(pieces[:count])
        if isinstance(model.get_submodule(outer), nn.ModuleList):
            return outer
    return None


def members_of_lists(model: nn.Module) -> list[nn.Module]:
    """Returns the modules in the outermost `ModuleList`s of a model: its blocks."""
    return [
        module
        for name, module in model.named_modules()
        if _list_of(model, name) == name.rpartition(".")[0] != ""
    ]


def _children(block: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    for name, child in block.named_children():
        if isinstance(child, _CONTAINERS):
            yield from _children(child, f"{prefix}.{name}")
        else:
            yield f"{prefix}.{name}", child


def _is_token_wise(module: nn.Module) -> bool:
    return isinstance(module, _TOKEN_WISE) or "Norm" in type(module).__name__


def blocks_of(model: nn.Module, rules: Sequence[Rule]) -> Blocks:
    """Sorts the modules of a model; raises `ValueError` where there are no blocks."""
    lists = dict.fromkeys(found for rule in rules if (found := _list_of(model, rule.owner)))
    if not lists:
        raise ValueError(
            "apply: sequence_parallel=True splits the sequence between the blocks of a ModuleList, "
            f"but the plan names no module in a ModuleList of {type(model).__name__}: use "
            "sequence_parallel=False"
        )
    result = Blocks()
    for outer in lists:
        names = [f"{outer}.{name}" for name, _ in model.get_submodule(outer).named_children()]
        result.first.append(names[0])
        result.last.append(names[-1])
        for block in names:
            result.all.append(block)
            for name, child in _children(model.get_submodule(block), block):
                _sort(result, name, child, [r for r in rules if _is_in(r.name, name)])
    return result


def _is_in(name: str, module: str) -> bool:
    return name == module or name.startswith(f"{module}.")


def _sort(blocks: Blocks, name: str, child: nn.Module, rules: Sequence[Rule]) -> None:
    linears = [rule for rule in rules if not rule.parameter and rule.kind in COLWISE | ROWWISE]
    if any(rule.owner == name for rule in linears):
        raise NotImplementedError(
            f"apply: {name} is split by the plan and a direct child of a block, which may use the "
            "length of its input; sequence_parallel=True supports linears of modules inside blocks "
            "(attention, feed-forward): use sequence_parallel=False"
        )
    own = all(rule.owner.rpartition(".")[0] == name for rule in linears)
    # Without a row-wise linear nothing is reduced, and a linear that is not split takes no parts.
    own &= any(rule.kind in ROWWISE for rule in linears)
    own &= all(
        any(_is_in(f"{name}.{part}", rule.owner) for rule in linears)
        for part, module in child.named_modules()
        if isinstance(module, nn.Linear)
    )
    others = {rule.kind for rule in rules if rule not in linears}
    if linears and own and others <= {"replicated_with_grad_allreduce"}:
        blocks.fused.add(name)
    elif not rules and _is_token_wise(original(child)):
        blocks.token_wise.append(name)
    else:
        blocks.whole.append(name)
