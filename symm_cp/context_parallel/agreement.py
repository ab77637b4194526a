"""What the ranks that share a sequence must agree on: batches, weights, and summed gradients.

A program that forgets one of them trains on, with plausible losses. What is compared, and when:

what                                when                                          otherwise
batches, buffers, how they are cut  whenever they are cut                         `RuntimeError`
parameters                          before a model's first step, and after its    `RuntimeError`
                                    next `load_state_dict`
gradients                           in the context after the model's first        a warning
                                    optimizer step, as that step saw them

Parameters and gradients count where all ranks must have the same: plain ones, and DTensors that are
not split over these ranks. Those of FSDP are not read. Buffers of models are not compared: running
statistics differ between ranks of correct programs.
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
_SAMPLED, _VALUES = 8, 8  # gradients that are compared, and how many values of each
_GRADIENT_TOLERANCE = 0.05  # sums over ranks are equal but for rounding; parts differ by about 1
_MOST_ROUNDS = 64  # contexts in which a first optimizer step is waited for

_SAME_BATCHES = (
    "the ranks of a context-parallel mesh share a sequence and must get the same batches. Give a "
    "DistributedSampler the num_replicas and rank of the data-parallel groups (mesh['dp']), not of "
    "all ranks; or broadcast the batch from one rank. Cut it by one load balancer, in one way"
)
_SAME_WEIGHTS = (
    "seed all ranks identically before the model is made, load one checkpoint on all, or broadcast "
    "the weights of one rank (DistributedDataParallel over these ranks does, or "
    "dist.broadcast(parameter.data, src, group=mesh.get_group()) for each)"
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

    Collective.
    """
    layouts = [repr(balancer.samples or balancer.layout) for balancer in balancers]
    how = equal_inputs.text_hash((layouts, options))
    plain_items = [(n, v) for n, v in items if not hasattr(v, "to_local")]
    equal_inputs.compare(
        str(group.group_name),
        op,
        [("the layout and options", how), *plain_items],
        subject="the tensors that ranks cut",
        remedy=_SAME_BATCHES,
    )


# --- models ------------------------------------------------------------------------------------


@dataclass
class _FirstStep:
    """The gradients of a model at its first optimizer step since it ran in a context."""

    parameters: list[tuple[str, weakref.ref[nn.Parameter]]]
    device: torch.device
    record: torch.Tensor | None = None
    rounds: int = 0

    def belongs_to(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the optimizer changes one of the parameters."""
        own = {id(reference()) for _, reference in self.parameters}
        return any(id(p) in own for entry in optimizer.param_groups for p in entry["params"])

    @torch.no_grad()
    def take(self) -> None:
        """Keeps some values of the gradients."""
        rows = []
        for _, reference in self.parameters:
            parameter = reference()
            grad = None if parameter is None else parameter.grad
            grad = local_part(grad) if grad is not None else None
            if parameter is None or grad is None or grad.layout != torch.strided:
                rows.append(torch.zeros(1 + _VALUES, dtype=torch.float64))
                continue
            values = equal_inputs.spread_values(grad, _VALUES)
            rows.append(torch.cat([values.new_ones(1), values]))
        self.record = torch.stack([row.to(self.device) for row in rows])


@dataclass
class _Known:
    """What is known of the models that run in contexts over a group."""

    checked: weakref.WeakSet[nn.Module] = field(default_factory=weakref.WeakSet)
    roots: weakref.WeakSet[nn.Module] = field(default_factory=weakref.WeakSet)  # of those
    stepping: weakref.WeakKeyDictionary[nn.Module, _FirstStep] = field(
        default_factory=weakref.WeakKeyDictionary
    )
    stepped: weakref.WeakSet[nn.Module] = field(default_factory=weakref.WeakSet)


_known: weakref.WeakKeyDictionary[dist.ProcessGroup, _Known] = weakref.WeakKeyDictionary()


def compare_model(op: str, group: dist.ProcessGroup | str, model: nn.Module) -> None:
    """Compares a model that is about to run on all ranks of a group. Collective.

    Raises `RuntimeError` on all ranks if the ranks have different parameters, the first time. Warns
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


def compare_parts(op: str, group: str, model: Known) -> None:
    """Compares the parts of a model that it has got since the model was compared. Collective."""
    process_group = _resolve_process_group(group)  # type: ignore[arg-type]
    if process_group in model.compared or not equal_inputs.enabled() or _transformed():
        return
    for part in model.parts()[1:]:  # the model itself is compared whenever it runs
        compare_model(op, process_group, part)
    model.compared.add(process_group)


def _awaits_step(known: _Known, model: nn.Module) -> bool:
    """Whether gradients of a model, or of the one it wraps, are compared after its first step."""
    if not torch.is_grad_enabled():
        return False
    inner = plain(model)
    return inner in known.stepping or (model in known.roots and inner not in known.stepped)


def _transformed() -> bool:
    """Whether parameters may be those of a transform of torch.func."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def _equal_parameters(model: nn.Module, group: dist.ProcessGroup) -> Iterator[tuple[str, Any]]:
    """Yields the parameters that all ranks of a group must have."""
    ranks = dist.get_process_group_ranks(group)
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        if getattr(module, "_is_fsdp_managed_module", False):
            continue
        for name, parameter in module.named_parameters(prefix, recurse=False):
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
    """Returns this rank's part of a DTensor, and other tensors as they are."""
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
        records = equal_inputs.gather_records(str(group.group_name), op, record)
    differing = [k for k in range(_SLOTS) if len({each[k] for each in records}) > 1]
    if differing:
        _forget(model)
        shown = [name for k in differing for name in names[k]] or ["names"]
        subject = f"the parameters of {type(plain(model)).__name__}"
        raise equal_inputs.disagreement(
            op, subject, shown, [tuple(r) for r in records], _SAME_WEIGHTS
        )


def _record_of(parameters: Sequence[tuple[str, Any]]) -> tuple[torch.Tensor, list[list[str]]]:
    """Returns a record of parameters, and the names of those that each of its words stands for."""
    fixed, names = [0] * _SLOTS, [list[str]() for _ in range(_SLOTS)]
    device = local_part(parameters[0][1]).device
    sums = []
    for number, (name, parameter) in enumerate(parameters):
        slot, local = number % _SLOTS, local_part(parameter)
        fixed[slot] = equal_inputs.text_hash((fixed[slot], name, local.dtype, local.shape))
        names[slot].append(name)
        sums.append((slot, _content(local).to(device) * (2 * number + 1)))
    record = torch.tensor(fixed, device=device)
    index = torch.tensor([slot for slot, _ in sums], device=device)
    record.index_add_(0, index, torch.stack([each for _, each in sums]))
    return record, names


def _content(parameter: torch.Tensor) -> torch.Tensor:
    """Returns a hash of all bytes of a tensor, read once: an int64.

    A sum of all words, which does not know their places, and a hash of a few that does.
    """
    flat = parameter.detach().contiguous().view(-1)
    if flat.numel() == 0:
        return torch.zeros((), dtype=torch.int64, device=flat.device)
    if flat.storage_offset() * flat.element_size() % 8:
        flat = flat.clone()
    as_bytes = torch.view_as_real(flat).view(-1) if flat.is_complex() else flat
    as_bytes = as_bytes.view(torch.uint8)
    whole = len(as_bytes) // 8 * 8
    words = as_bytes[:whole].view(torch.int64)
    ends = torch.cat([words[:: max(1, len(words) // 4096)], as_bytes[whole:].to(torch.int64)])
    return words.sum() + equal_inputs.hashed(ends)


def _forget(module: nn.Module, keys: Any = None) -> None:
    """Has a model compared again that has loaded other weights, and what it is part of."""
    for known in _known.values():
        for root in list(known.roots):
            parts = set(root.modules())
            if module in parts:
                known.roots.discard(root)
                known.checked.difference_update(parts)


_awaiting: list[RemovableHandle] = []  # of a hook of all optimizers


def _await_step(group: dist.ProcessGroup, known: _Known, model: nn.Module) -> None:
    """Has the gradients of a model's first step kept, by a hook until all models had theirs."""
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
    steps = [step for known in list(_known.values()) for step in list(known.stepping.values())]
    for step in steps:
        if step.record is None and step.belongs_to(optimizer):
            step.take()
    if all(step.record is not None for step in steps):
        while _awaiting:
            _awaiting.pop().remove()


def _compare_gradients(op: str, group: dist.ProcessGroup, known: _Known, model: nn.Module) -> None:
    step = known.stepping[model]
    step.rounds += 1
    with ordinary_tensors():
        taken, values = step.record is not None, step.record
        if values is None:
            shape = len(step.parameters), 1 + _VALUES
            values = torch.zeros(shape, dtype=torch.float64, device=step.device)
        record = torch.cat([values.new_full((1,), float(taken)), values.reshape(-1)])
        records = equal_inputs.gather_records(
            str(group.group_name), op, record.contiguous().view(torch.int64)
        )
    numbers = [equal_inputs.as_floats(each) for each in records]
    if not all(each[0] for each in numbers) and step.rounds < _MOST_ROUNDS:
        return
    del known.stepping[model]
    known.stepped.add(model)
    differing = []
    for number, (name, _) in enumerate(step.parameters):
        begin = 1 + number * (1 + _VALUES)
        parts = [each[begin : begin + 1 + _VALUES] for each in numbers]
        first, *others = (part[1:] for part in parts)
        everywhere = all(part[0] for part in parts)
        if everywhere and any(
            equal_inputs.far_apart(first, other, _GRADIENT_TOLERANCE) for other in others
        ):
            differing.append(name)
    if differing:
        warnings.warn(
            f"{op}: at the last optimizer step the gradients of {type(plain(model)).__name__} "
            f"differed between the ranks of its context-parallel mesh "
            f"({', '.join(differing[:4])}): "
            f"{_SUM_GRADIENTS} ({equal_inputs.OFF})",
            stacklevel=2,
        )
