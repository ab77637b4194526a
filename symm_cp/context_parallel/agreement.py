"""Compares batches, weights and summed gradients between the ranks that share a sequence.

A program whose ranks disagree in one of these trains on, with plausible losses. Comparisons:

what                                when                                          otherwise
batches, buffers, how they are cut  whenever they are cut                         `RuntimeError`
parameters                          before a model's first step, and when a       `RuntimeError`
                                    batch is cut after a `load_state_dict`
gradients                           in the context after the model's first        a warning
                                    optimizer step, by what it added to weights

Ranks compare parameters that must be equal on all of them: plain ones, and DTensors that are not
split over these ranks (FSDP2's over other mesh dimensions). They do not compare buffers of models:
running statistics differ between ranks of correct programs.

A comparison is a collective, so an action that one rank may take alone must not start it: loading a
checkpoint that it broadcasts afterwards, or running a small module as a probe. Ranks therefore
exchange notes of both when they cut a batch.
"""

from __future__ import annotations

import math
import operator
import warnings
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import _resolve_process_group

from symm_cp.context_parallel.inspectors import plain
from symm_cp.context_parallel.load_balancers import LoadBalancer
from symm_cp.modes import ordinary_tensors
from symm_cp.ops import equal_inputs

_SAMPLED, _VALUES = 8, 8  # parameters whose first steps are compared, and values of each
_TOLERANCE = 0.05  # sums over ranks are equal but for rounding; parts differ by about 1
_MOST_ROUNDS = 64  # contexts that wait for a first optimizer step

_SAME_BATCHES = (
    "the ranks of a context-parallel mesh share a sequence and must get the same batches. Give a "
    "DistributedSampler the num_replicas and rank of the data-parallel groups (mesh['dp']), not of "
    "all ranks; or broadcast the batch from one rank. Cut it by one load balancer, in one way"
)
_SAME_WEIGHTS = (
    "seed all ranks identically before the model is made, load one checkpoint on all, or broadcast "
    "the weights of one rank (DistributedDataParallel over these ranks does, or "
    "dist.broadcast(parameter.data, src, group=mesh.get_group()) for each); freeze the same "
    "parameters on all ranks"
)
_SUM_GRADIENTS = (
    "each rank has the gradients of its part of the sequence, and nobody summed them, so the "
    "weights of ranks differ from now on. Use symm_cp.training_step, wrap the model in FSDP2 or "
    "DistributedDataParallel over these ranks (shard_batch(average_gradients=True)), or call "
    "dist.all_reduce(parameter.grad, group=mesh.get_group()) for each parameter before "
    "optimizer.step()"
)


def compare_cut(
    op: str,
    group: dist.ProcessGroup,
    items: Sequence[equal_inputs.Item],
    balancers: Sequence[LoadBalancer],
    options: Any = None,
) -> None:
    """Raises `RuntimeError` on all ranks unless all cut the same tensors in the same way.

    Also compares models that some rank has loaded, and modules that ran alone. Collective.
    """
    layouts = [repr(balancer.samples or balancer.layout) for balancer in balancers]
    how = equal_inputs.text_hash((layouts, options))
    plain_items = [(n, v) for n, v in items if not hasattr(v, "to_local")]
    known = _known.get(group)
    alone = [] if known is None else _alive(known.alone)
    notes = equal_inputs.compare(
        str(group.group_name),
        op,
        [("the layout and options", how), *plain_items],
        subject="the tensors that ranks cut",
        remedy=_SAME_BATCHES,
        notes=(known is not None and known.loaded, _kinds_of(alone)),
    )
    if notes and any(map(any, notes)):
        known = _known.setdefault(group, _Known())
        if any(loaded for loaded, _ in notes):
            for each in (known.checked, known.roots, known.met, known.stepping):
                each.clear()
            known.loaded = False
        if alone and len({kinds for _, kinds in notes}) == 1:
            known.together = ModulesByThemselves(alone)
        known.alone.clear()
    if known is not None and known.together is not None:
        modules, known.together = known.together, None
        known.met.difference_update(modules.modules())  # if this raises, they are compared again
        compare_model(op, group, modules)
        known.met.update(modules.modules())
        if modules not in known.stepped:  # compared again until their first optimizer step
            known.together = modules


def _alive(modules: Sequence[weakref.ref[nn.Module]]) -> list[nn.Module]:
    return [module for reference in modules if (module := reference()) is not None]


class ModulesByThemselves(nn.ModuleDict):
    """Modules that ran in contexts on all ranks, but not as parts of a model that ran there."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        super().__init__({f"{type(m).__name__} {n}": m for n, m in enumerate(modules)})


def _kinds_of(modules: Sequence[nn.Module]) -> int:
    """Returns a hash of the modules' classes and parameter shapes; 0 for no modules."""
    if not modules:
        return 0
    parameters = [[(n, p.dtype, p.shape) for n, p in m.named_parameters()] for m in modules]
    return equal_inputs.text_hash([(type(m).__name__, parameters) for m in modules])


# --- models ------------------------------------------------------------------------------------


class _FirstStep:
    """Some values of a model's parameters until its first optimizer step has changed them."""

    def __init__(self, parameters: Sequence[tuple[str, Any]]) -> None:
        self.parameters = [(name, weakref.ref(parameter)) for name, parameter in parameters]
        self.device = local_part(parameters[0][1]).device
        self.rounds = 0
        self.before = self._values()

    @torch.no_grad()
    def _values(self) -> torch.Tensor:
        rows = torch.zeros(len(self.parameters), _VALUES, dtype=torch.float64, device=self.device)
        for row, (_, reference) in zip(rows, self.parameters, strict=True):
            if (parameter := reference()) is not None:
                row.copy_(equal_inputs.spread_values(local_part(parameter), _VALUES))
        return rows

    def changes(self) -> torch.Tensor:
        """Returns how much the values have changed: a row for each parameter."""
        return self._values() - self.before


@dataclass
class _Known:
    """Records of the models that run in contexts over a group."""

    checked: weakref.WeakSet[nn.Module] = field(default_factory=weakref.WeakSet)
    roots: weakref.WeakSet[nn.Module] = field(default_factory=weakref.WeakSet)  # of `checked`
    stepping: weakref.WeakKeyDictionary[nn.Module, _FirstStep] = field(
        default_factory=weakref.WeakKeyDictionary
    )
    stepped: weakref.WeakSet[nn.Module] = field(default_factory=weakref.WeakSet)
    loaded: bool = False  # whether this rank has loaded a model since a batch was cut
    alone: list[weakref.ref[nn.Module]] = field(default_factory=list)  # some ranks may skip them
    met: weakref.WeakSet[nn.Module] = field(default_factory=weakref.WeakSet)  # were once in `alone`
    together: nn.Module | None = None  # the modules of `alone` that all ranks run
    # The parts of each model that were compared.
    parts: weakref.WeakKeyDictionary[nn.Module, list[weakref.ref[nn.Module]]] = field(
        default_factory=weakref.WeakKeyDictionary
    )


_known: weakref.WeakKeyDictionary[dist.ProcessGroup, _Known] = weakref.WeakKeyDictionary()


def compare_model(op: str, group: dist.ProcessGroup | str, model: nn.Module) -> None:
    """Compares a model that is about to run on all ranks of a group. Collective.

    The first time, raises `RuntimeError` on all ranks if they have different parameters. Warns
    if its first optimizer step had gradients that were not summed.
    """
    if isinstance(group, str):
        group = _resolve_process_group(group)  # type: ignore[arg-type]
    known = _known.get(group)
    if known is not None and model in known.checked and not _awaits_step(known, model):
        return
    if group.size() == 1 or not equal_inputs.enabled() or _transformed():
        return
    if known is None:
        known = _known[group] = _Known()
    if model not in known.checked:
        _compare_parameters(op, group, known, model)
    if not _awaits_step(known, model):
        return
    if plain(model) in known.stepping:
        _compare_step(op, group, known, plain(model))
        return
    found = [(name, p) for name, p in _equal_parameters(model, group) if p.requires_grad]
    if found:
        sampled = found[:: math.ceil(len(found) / _SAMPLED)]
        known.stepping[plain(model)] = _FirstStep(sampled)
    else:
        known.stepped.add(plain(model))


def compare_running(op: str, group: str, module: nn.Module) -> None:
    """Like `compare_model` for a running module; modules purely of torch wait for the next cut.

    They cannot attend over the ranks, so some ranks may run them alone.
    """
    resolved = _resolve_process_group(group)  # type: ignore[arg-type]
    known = _known.get(resolved)
    if known is not None and module in known.met:
        return
    if (known is None or module not in known.checked) and _is_torchs(module):
        if resolved.size() > 1 and equal_inputs.enabled():
            known = _known.setdefault(resolved, _Known())
            known.met.update(module.modules())
            known.alone.append(weakref.ref(module))
        return
    compare_model(op, resolved, module)


def _is_torchs(module: nn.Module) -> bool:
    """Whether a module and all its parts are of torch."""
    return all(type(part).__module__.startswith("torch.nn.modules.") for part in module.modules())


def compare_parts(op: str, group: str, parts: Sequence[nn.Module]) -> None:
    """Compares the parts that a model has gained since it was compared. Collective.

    `parts` are all of its modules; the first, the model itself, is compared whenever it runs.
    """
    known = _known.get(_resolve_process_group(group))  # type: ignore[arg-type]
    if known is None or not equal_inputs.enabled() or _transformed():
        return
    before = [reference() for reference in known.parts.get(parts[0], ())]
    if len(before) == len(parts) and all(map(operator.is_, before, parts)):
        return
    for part in parts[1:]:
        if part not in known.met:  # see `compare_running`
            compare_model(op, group, part)
    known.parts[parts[0]] = [weakref.ref(part) for part in parts]


def _awaits_step(known: _Known, model: nn.Module) -> bool:
    """Whether gradients of a model, or of its wrapped model, await comparison."""
    if not torch.is_grad_enabled():
        return False
    inner = plain(model)
    return inner in known.stepping or (model in known.roots and inner not in known.stepped)


def _transformed() -> bool:
    """Whether parameters may belong to a transform of torch.func."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def _equal_parameters(model: nn.Module, group: dist.ProcessGroup) -> Iterator[tuple[str, Any]]:
    """Yields the parameters that must be equal on all ranks of a group."""
    ranks = dist.get_process_group_ranks(group)
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        managed = getattr(module, "_is_fsdp_managed_module", False)
        for name, parameter in module.named_parameters(prefix, recurse=False):
            if managed and not hasattr(parameter, "device_mesh"):
                continue  # gathered for a forward pass
            if id(parameter) not in seen and _must_be_equal(parameter, ranks):
                seen.add(id(parameter))
                yield name, parameter


def _must_be_equal(parameter: Any, ranks: Sequence[int]) -> bool:
    if torch.nn.parameter.is_lazy(parameter) or hasattr(parameter, "ds_id"):  # DeepSpeed's parts
        return False
    mesh = getattr(parameter, "device_mesh", None)
    if mesh is None:
        return type(parameter) in (nn.Parameter, torch.Tensor) and not parameter.is_quantized
    places = [(mesh.mesh == rank).nonzero() for rank in ranks]
    if not any(len(place) for place in places):
        return False
    held = torch.cat(places)
    varies = [bool((column != column[0]).any()) for column in held.T]
    return all(
        placement.is_replicate() or not (along or placement.is_partial())
        for placement, along in zip(parameter.placements, varies, strict=True)
    )


def local_part(tensor: Any) -> torch.Tensor:
    """Returns this rank's part of a DTensor; returns other tensors unchanged."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _compare_parameters(op: str, group: dist.ProcessGroup, known: _Known, model: nn.Module) -> None:
    found = list(_equal_parameters(model, group))
    items = [(n, local_part(p).detach().requires_grad_(p.requires_grad)) for n, p in found]
    if not equal_inputs.enabled(*(local for _, local in items)):
        return
    if found:
        for module in (model, plain(model)):
            if _forget not in module._load_state_dict_post_hooks.values():
                module.register_load_state_dict_post_hook(_forget)
        subject = f"the parameters of {type(plain(model)).__name__}"
        name = str(group.group_name)
        equal_inputs.compare(name, op, items, subject=subject, remedy=_SAME_WEIGHTS, exact=True)
    known.checked.update(model.modules())
    known.roots.add(model)


def _forget(module: nn.Module, keys: Any = None) -> None:
    """Has models compared again at the next cut, since a compared module has loaded weights."""
    for known in _known.values():
        known.loaded |= module in known.checked


def _compare_step(op: str, group: dist.ProcessGroup, known: _Known, model: nn.Module) -> None:
    """Warns if the first optimizer step changed parameters differently on the ranks."""
    step = known.stepping[model]
    step.rounds += 1
    what = f"the first step of {type(model).__name__} by {op}"
    with ordinary_tensors():
        record = step.changes().reshape(-1).view(torch.int64)
        records = equal_inputs.gather_records(str(group.group_name), what, record)
    changes = [equal_inputs.as_floats(each) for each in records]
    differing, moved = [], False
    for number, (name, _) in enumerate(step.parameters):
        begin = number * _VALUES
        first, *others = (each[begin : begin + _VALUES] for each in changes)
        moved |= any(first) and all(map(any, others))
        if any(equal_inputs.far_apart(first, other, _TOLERANCE) for other in others):
            differing.append(name)
    if not differing and not moved and step.rounds < _MOST_ROUNDS:
        return
    del known.stepping[model]
    known.stepped.add(model)
    if differing:
        warnings.warn(
            f"{op}: at the last optimizer step the gradients of {type(plain(model)).__name__} "
            f"differed between the ranks of its context-parallel mesh "
            f"({', '.join(differing[:4])}): "
            f"{_SUM_GRADIENTS} ({equal_inputs.OFF})",
            stacklevel=2,
        )
