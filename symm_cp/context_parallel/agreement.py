"""Compares batches, weights and summed gradients between the ranks that share a sequence.

A program whose ranks disagree in one of these trains on, with plausible losses. Comparisons:

what                                when                                          otherwise
batches, buffers, how they are cut  whenever they are cut                         `RuntimeError`
parameters                          before a model's first step, and when a       `RuntimeError`
                                    batch is cut after a `load_state_dict`
gradients                           in the context after the model's first        a warning
                                    optimizer step, as that step saw them

Ranks compare parameters and gradients that must be equal on all of them: plain ones, and DTensors
that are not split over these ranks (FSDP2's over other mesh dimensions). They do not compare
buffers of models: running statistics differ between ranks of correct programs.

A comparison is a collective, so an action that one rank may take alone must not start it: loading a
checkpoint that it broadcasts afterwards, or running a small module as a probe. Ranks therefore
exchange notes of both when they cut a batch. Gradients may differ if the optimizer sums them, or if
they are yet to be summed: a step's comparison covers the parameters of its optimizer, and reports
them only if they differ afterwards.
"""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from symm_cp.context_parallel.inspectors import plain
from symm_cp.context_parallel.load_balancers import LoadBalancer
from symm_cp.context_parallel.verdicts import Known
from symm_cp.modes import ordinary_tensors
from symm_cp.ops import equal_inputs

_SLOTS = 1024  # words of the record of all parameters of a model
# The number of compared gradients; the number of values of each, and of its parameter before and
# after the step.
_SAMPLED, _VALUES = 8, 8
_ROW = 1 + 3 * _VALUES  # whether the optimizer saw a gradient, and the values
_GRADIENT_TOLERANCE = 0.05  # sums over ranks are equal but for rounding; parts differ by about 1
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
        _heed(_known.setdefault(group, _Known()), alone, notes)
    known = _known.get(group)
    if known is not None and known.together is not None:
        _compare_together(op, group, known)


def _heed(known: _Known, alone: Sequence[nn.Module], notes: Sequence[Sequence[int]]) -> None:
    """Records that some rank has loaded a model, and the modules that all ranks run."""
    if any(loaded for loaded, _ in notes):
        for each in (known.checked, known.roots, known.met):
            each.clear()
        known.loaded = False
    if alone and len({kinds for _, kinds in notes}) == 1:
        known.together = ModulesByThemselves(alone)
    known.alone.clear()


def _compare_together(op: str, group: dist.ProcessGroup, known: _Known) -> None:
    """Compares torch modules that all ranks run, until their first optimizer step."""
    modules, known.together = known.together, None
    assert modules is not None
    known.met.difference_update(modules.modules())
    compare_model(op, group, modules)
    known.met.update(modules.modules())
    if modules not in known.stepped:
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


@dataclass
class _FirstStep:
    """The gradients of a model at its first optimizer step since it ran in a context.

    `seen`: by parameter number, values of its gradient, and of the parameter before the step.
    """

    parameters: list[tuple[str, weakref.ref[nn.Parameter]]]
    device: torch.device
    seen: dict[int, torch.Tensor] = field(default_factory=dict)
    rounds: int = 0

    @torch.no_grad()
    def take(self, optimizer: torch.optim.Optimizer) -> None:
        """Records some values of the gradients that an optimizer is about to use."""
        used = {id(p) for entry in optimizer.param_groups for p in entry["params"]}
        for number, (_, reference) in enumerate(self.parameters):
            parameter = reference()
            if parameter is None or id(parameter) not in used or number in self.seen:
                continue
            grad = local_part(parameter.grad) if parameter.grad is not None else None
            if grad is not None and grad.layout == torch.strided:
                values = [_sampled(grad), _sampled(local_part(parameter))]
                self.seen[number] = torch.cat(values).to(self.device)

    @torch.no_grad()
    def record(self) -> torch.Tensor:
        """Returns the values seen, and current values of the parameters: a row for each."""
        rows = torch.zeros(len(self.parameters), _ROW, dtype=torch.float64, device=self.device)
        for number, values in self.seen.items():
            parameter = self.parameters[number][1]()
            if parameter is not None:
                after = _sampled(local_part(parameter)).to(self.device)
                rows[number] = torch.cat([values.new_ones(1), values, after])
        return rows


def _sampled(tensor: torch.Tensor) -> torch.Tensor:
    return equal_inputs.spread_values(tensor, _VALUES)


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
        _compare_gradients(op, group, known, plain(model))
    else:
        _await_step(group, known, plain(model))


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


def compare_parts(op: str, group: str, model: Known) -> None:
    """Compares the parts that a model has gained since it was compared. Collective."""
    process_group = _resolve_process_group(group)  # type: ignore[arg-type]
    if process_group in model.compared or not equal_inputs.enabled() or _transformed():
        return
    known = _known.get(process_group)
    for part in model.parts()[1:]:  # the model itself is compared whenever it runs
        if known is None or part not in known.met:  # see `compare_running`
            compare_model(op, process_group, part)
    model.compared.add(process_group)


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
    if not equal_inputs.enabled(*(local_part(p) for _, p in found)):
        return
    known.checked.update(model.modules())
    known.roots.add(model)
    if not found:
        return
    for module in (model, plain(model)):
        if _forget not in module._load_state_dict_post_hooks.values():
            module.register_load_state_dict_post_hook(_forget)
    with ordinary_tensors():
        record, names = _record_of(found)
        what = f"the parameters of {type(plain(model)).__name__} by {op}"
        records = equal_inputs.gather_records(str(group.group_name), what, record)
    differing = [k for k in range(_SLOTS) if len({each[k] for each in records}) > 1]
    if differing:
        known.roots.discard(model)
        known.checked.difference_update(model.modules())
        shown = [name for k in differing for name in names[k]] or ["names"]
        subject = f"the parameters of {type(plain(model)).__name__}"
        raise equal_inputs.disagreement(
            op, subject, shown, [tuple(r) for r in records], _SAME_WEIGHTS
        )


def _record_of(parameters: Sequence[tuple[str, Any]]) -> tuple[torch.Tensor, list[list[str]]]:
    """Returns a record of parameters, and the parameter names behind each of its words."""
    fixed, names = [0] * _SLOTS, [list[str]() for _ in range(_SLOTS)]
    device = local_part(parameters[0][1]).device
    sums = []
    for number, (name, parameter) in enumerate(parameters):
        slot, local = number % _SLOTS, local_part(parameter)
        kind = name, local.dtype, local.shape, parameter.requires_grad
        fixed[slot] = equal_inputs.text_hash((fixed[slot], *kind))
        names[slot].append(name)
        sums.append((slot, equal_inputs.content_hash(local).to(device) * (2 * number + 1)))
    record = torch.tensor(fixed, device=device)
    index = torch.tensor([slot for slot, _ in sums], device=device)
    record.index_add_(0, index, torch.stack([each for _, each in sums]))
    return record, names


def _forget(module: nn.Module, keys: Any = None) -> None:
    """Has models compared again at the next cut, since a compared module has loaded weights."""
    for known in _known.values():
        known.loaded |= module in known.checked


_awaiting: list[RemovableHandle] = []  # the handle of a hook of all optimizers


def _await_step(group: dist.ProcessGroup, known: _Known, model: nn.Module) -> None:
    """Records the gradients of a model's first step, in a hook of all optimizers.

    The hook stays until no model awaits its first step.
    """
    found = [(name, p) for name, p in _equal_parameters(model, group) if p.requires_grad]
    if not found:
        known.stepped.add(model)
        return
    chosen = found[:: math.ceil(len(found) / _SAMPLED)]
    references = [(name, weakref.ref(parameter)) for name, parameter in chosen]
    known.stepping[model] = _FirstStep(references, local_part(chosen[0][1]).device)
    if not _awaiting:
        _awaiting.append(register_optimizer_step_pre_hook(_before_step))


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling():
        return
    for step in _steps_awaited():
        step.take(optimizer)


def _steps_awaited() -> list[_FirstStep]:
    return [step for known in list(_known.values()) for step in list(known.stepping.values())]


def _compare_gradients(op: str, group: dist.ProcessGroup, known: _Known, model: nn.Module) -> None:
    step = known.stepping[model]
    step.rounds += 1
    with ordinary_tensors():
        record = step.record()
        what = f"the gradients of {type(model).__name__} by {op}"
        records = equal_inputs.gather_records(
            str(group.group_name), what, record.reshape(-1).view(torch.int64)
        )
    numbers = [equal_inputs.as_floats(each) for each in records]
    by_rank = [[each[k : k + _ROW] for k in range(0, len(each), _ROW)] for each in numbers]
    rows = list(zip(*by_rank, strict=True))
    differing = [name for (name, _), row in zip(step.parameters, rows, strict=True) if _parted(row)]
    if not differing and step.rounds < _MOST_ROUNDS and not any(map(_moved, rows)):
        step.seen.clear()
        return
    del known.stepping[model]
    known.stepped.add(model)
    if not _steps_awaited():  # the hook cannot remove itself while the optimizer iterates hooks
        while _awaiting:
            _awaiting.pop().remove()
    if differing:
        warnings.warn(
            f"{op}: at the last optimizer step the gradients of {type(plain(model)).__name__} "
            f"differed between the ranks of its context-parallel mesh "
            f"({', '.join(differing[:4])}): "
            f"{_SUM_GRADIENTS} ({equal_inputs.OFF})",
            stacklevel=2,
        )


def _moved(row: Sequence[Sequence[float]]) -> bool:
    """Whether a step has changed a parameter on all ranks, as far as its values show."""
    return all(each[0] and each[-2 * _VALUES : -_VALUES] != each[-_VALUES:] for each in row)


def _parted(row: Sequence[Sequence[float]]) -> bool:
    """Whether ranks took a step with different gradients, and their parameters now differ."""
    first, *others = (each[1 : 1 + _VALUES] for each in row)
    return (
        all(each[0] for each in row)
        and any(equal_inputs.far_apart(first, other, _GRADIENT_TOLERANCE) for other in others)
        and any(each[-_VALUES:] != row[0][-_VALUES:] for each in row)
    )
