"""`training_step`: a training step on a batch spread over ranks, from the cut to the gradients.

It covers the steps that a program could forget: it cuts the batch with the labels shifted once,
runs the model in a context of the same layout, makes the loss cover the whole batch, and sums
gradients that nothing else sums.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from symm_cp.context_parallel import inspectors
from symm_cp.context_parallel.agreement import local_part
from symm_cp.context_parallel.averaging import Reduction, is_spread, reduction_of
from symm_cp.context_parallel.batch import check_mapping, sequence_of, shard_batch
from symm_cp.context_parallel.context import context_parallel
from symm_cp.context_parallel.inspectors import modules_of, of_library, plain
from symm_cp.context_parallel.lengths import BalancersByLength
from symm_cp.context_parallel.loss_reduction import LossReduction
from symm_cp.group.memory import GroupLike
from symm_cp.modes import ordinary_tensors
from symm_cp.ops import equal_inputs
from symm_cp.ops.attention.methods import MethodLike, group_by
from symm_cp.ops.error_reports import refuse, reports_to_peers

_OP = "training_step"
_BITS = 32  # parameters per word of a record of which gradients are present

#: Returns the mean loss of a model's output and the local batch, or such losses by the names of
#: their labels.
LossFunction = Callable[[Any, Mapping[str, Any]], torch.Tensor | Mapping[str, torch.Tensor]]


@dataclass
class TrainingStep:
    """The results of a step; `loss` covers the whole batch and is the same on all ranks."""

    loss: torch.Tensor
    #: The model's output for this rank's part of the sequence.
    output: Any
    #: This rank's part of the batch.
    batch: Mapping[str, Any]
    #: How many labels of the whole batch count.
    num_items: int


@contextmanager
def training_step(
    model: nn.Module,
    batch: Mapping[str, Any],
    mesh: GroupLike,
    *,
    loss_function: LossFunction | None = None,
    load_balancer: BalancersByLength | None = None,
    method: MethodLike | None = None,
    shift_labels: bool | None = None,
    ignore_index: int = -100,
    average_gradients: bool | None = None,
) -> Iterator[TrainingStep]:
    """Runs a model on a batch whose sequence is spread over ranks; sums its gradients at the end.

    Same loss and gradients as in one process::

        with symm_cp.training_step(model, batch, mesh) as step:
            step.loss.backward()
        optimizer.step()

    Args:
        model: a model of transformers, or any other with a `loss_function`; may be wrapped in DDP,
            FSDP2, PEFT, or `torch.compile`.
        batch: tensors of the whole sequence by name, the same on all ranks; see `shard_batch`. The
            model gets this rank's part by keyword; with a `loss_function` it gets no labels, and
            `position_ids` only if it takes them.
        mesh: the ranks that share the sequence: a 1-D DeviceMesh (`mesh["cp"]`), a ProcessGroup or
            a group name; a 2-D DeviceMesh for two methods.
        loss_function: takes the model's output and the local batch, and returns the mean loss over
            `batch["labels"]`, or the mean losses by the names of their labels, which are added up:
            `{"labels": loss, "mtp_labels": 0.3 * mtp_loss}`. By default the model computes its loss
            (`output.loss`).
        load_balancer, method: as in `context_parallel`.
        shift_labels, ignore_index: as in `shard_batch`; with a `loss_function` labels are shifted
            unless there is a decoder with an encoder.
        average_gradients: whether DDP or FSDP averages gradients over these ranks; detected by
            default, except for FSDP2's `set_gradient_divide_factor`.

    Run the backward pass inside, once; gradients of earlier steps add up. At the end gradients
    that neither FSDP2 nor DDP reduces over these ranks are summed over the mesh, except of DTensors
    that these ranks divide (experts); over further replicas (`mesh["dp"]`) only DDP or FSDP
    averages them. Clip gradients after the block: inside, a rank has the gradients of its part
    only. A term that is the same on all ranks, such
    as a penalty on weights, counts once for each rank: divide it by their number. For evaluation
    enter the block under `torch.no_grad()`. Raises as `shard_batch` and `context_parallel` do,
    `ValueError` for a model without a loss, or if it is unknown whether the model shifts labels,
    and `RuntimeError` if the loss had no backward pass inside, if its gradients are gone at the
    end, or if DDP did not reduce them.
    """
    group = group_by(_OP, mesh, method)
    by_model = loss_function is None
    transformers = of_library(model)
    reduction = reduction_of(model, group)
    whole, shift_labels = _prepared(
        group, model, batch, by_model, transformers, shift_labels, reduction.no_sync
    )
    if average_gradients is None:
        average_gradients = reduction.averages
    local, reduce_loss = shard_batch(
        mesh,
        whole,
        model=model if transformers and by_model else None,
        load_balancer=load_balancer,
        shift_labels=shift_labels,
        ignore_index=ignore_index,
        average_gradients=average_gradients,
        method=method,
    )
    labelled = _labelled(local, reduce_loss)
    inputs = labelled if by_model else _inputs(model, local, reduce_loss.names)
    with (
        _own_gradients(group, model, reduction, average_gradients) as gradients,
        context_parallel(
            mesh,
            model=model if transformers else None,
            load_balancer=reduce_loss.load_balancer,
            method=method,
        ),
    ):
        output = model(**inputs)
        loss = _loss(model, output, labelled, loss_function, reduce_loss)
        gradients.awaits(loss)
        yield TrainingStep(loss, output, local, reduce_loss.num_items)


@reports_to_peers
def _prepared(
    group: dist.ProcessGroup,
    model: nn.Module,
    batch: Mapping[str, Any],
    by_model: bool,
    transformers: bool,
    shift_labels: bool | None,
    no_sync: bool,
) -> tuple[dict[str, Any], bool | None]:
    """Returns the whole batch in the model's form, and whether its labels are to be shifted."""
    check_mapping(_OP, batch)
    if no_sync and torch.is_grad_enabled():
        raise NotImplementedError(
            f"{_OP}: no_sync() of a wrapper over other ranks than the mesh is not supported, since "
            "the step sums gradients over the mesh: wrap the model in DistributedDataParallel over "
            "all ranks, or leave no_sync() out"
        )
    whole = dict(batch)
    if by_model and not transformers and shift_labels is None:
        raise ValueError(
            f"{_OP}: {type(plain(model)).__name__} is no model of transformers, and "
            "may shift labels by itself: pass loss_function=, which computes the mean loss of the "
            "model's output and of labels that are shifted already, or shift_labels if the model "
            "takes such labels"
        )
    rules = inspectors.current().batch_rules(_OP, model)
    if not by_model and transformers:
        rules.add_decoder_input(whole)
        rules.add_positions(whole, sequence_of(whole, 1))
    if not by_model and shift_labels is None:
        shift_labels = not (rules.has_decoder or "decoder_input_ids" in whole)
    return whole, shift_labels


def _labelled(local: dict[str, Any], reduce_loss: LossReduction) -> dict[str, Any]:
    """Returns the local batch, with a label if this rank has none; its loss counts 0 times.

    The gradients of a mean over no labels may be 0 / 0, and NaN times 0 is NaN.
    """
    labelled = dict(local)
    for name in reduce_loss.names:
        if not reduce_loss.counts(name)[0]:
            labels = local[name].clone(memory_format=torch.contiguous_format)
            labels.view(-1)[:1] = 0
            labelled[name] = labels
    return labelled


def _inputs(model: nn.Module, local: Mapping[str, Any], labels: Sequence[str]) -> dict[str, Any]:
    """Returns a model's inputs from a batch whose loss is computed from the model's output."""
    names = inspect.signature(plain(model).forward).parameters
    outside = {name for name in labels if name not in names} | {"labels", "shift_labels"}
    inputs = {name: value for name, value in local.items() if name not in outside}
    anything = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in names.values())
    if not anything and "position_ids" not in names:
        inputs.pop("position_ids", None)
    return inputs


def _loss(
    model: nn.Module,
    output: Any,
    local: Mapping[str, Any],
    loss_function: LossFunction | None,
    reduce_loss: LossReduction,
) -> torch.Tensor:
    if loss_function is not None:
        losses = loss_function(output, local)
        if isinstance(losses, torch.Tensor):
            return reduce_loss(losses)
        return sum(reduce_loss(loss, labels=name) for name, loss in losses.items())  # type: ignore[return-value]
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if not isinstance(loss, torch.Tensor):
        raise ValueError(
            f"{_OP}: {type(plain(model)).__name__} returned no loss for a batch of "
            f"{sorted(local)}: pass labels, or loss_function="
        )
    return reduce_loss(loss)


# --- gradients ---------------------------------------------------------------------------------


class _Gradients:
    """Gradients of one step, without gradients accumulated before."""

    def __init__(self, reduction: Reduction) -> None:
        self.reduction = reduction
        self.parameters = reduction.left if torch.is_grad_enabled() else []
        self.before = [parameter.grad for parameter in self.parameters]
        self.expected = self.arrived = False

    def awaits(self, loss: torch.Tensor) -> None:
        """Records whether a backward pass of the loss is due, and later that it runs."""
        self.expected = loss.requires_grad and torch.is_grad_enabled()
        if self.expected:
            loss.register_hook(self._note)

    def _note(self, grad: torch.Tensor) -> None:
        self.arrived = True

    def put_aside(self) -> None:
        """Removes the gradients of earlier steps from the parameters."""
        for parameter in self.parameters:
            parameter.grad = None

    @torch.no_grad()
    def add_to_earlier(self) -> None:
        """Adds the gradients of this step to the gradients of earlier steps."""
        for parameter, before in zip(self.parameters, self.before, strict=True):
            if before is not None:
                if parameter.grad is not None:
                    before += parameter.grad
                parameter.grad = before

    def restore(self) -> None:
        """Replaces the gradients of this step by the gradients of earlier steps."""
        for parameter, before in zip(self.parameters, self.before, strict=True):
            parameter.grad = before


@contextmanager
def _own_gradients(
    group: dist.ProcessGroup, model: nn.Module, reduction: Reduction, averaged: bool
) -> Iterator[_Gradients]:
    """Sums, at the end of the body, its gradients of parameters that nothing else reduces."""
    gradients = _Gradients(reduction)
    gradients.put_aside()
    try:
        yield gradients
        _finish(group, model, gradients, averaged)
    except BaseException as error:
        gradients.restore()
        with contextlib.suppress(Exception):  # the peers wait for this rank at the end
            refuse(str(group.group_name), "sync", error)
        raise
    gradients.add_to_earlier()


@reports_to_peers
def _finish(
    group: dist.ProcessGroup, model: nn.Module, gradients: _Gradients, averaged: bool
) -> None:
    if gradients.expected and not gradients.arrived:
        raise RuntimeError(
            f"{_OP}: the block ended without a backward pass of step.loss: call "
            "step.loss.backward() inside, or enter it under torch.no_grad() for evaluation"
        )
    if gradients.expected:
        _check_reduced(model)
    if gradients.expected and gradients.parameters:
        missing = all(parameter.grad is None for parameter in gradients.parameters)
        if missing and not gradients.reduction.holds:
            raise RuntimeError(
                f"{_OP}: the block ends without gradients, though step.loss had its backward pass: "
                "call zero_grad() before the block, or after the optimizer's step"
            )
        _sum(group, gradients, averaged)


def _check_reduced(model: nn.Module) -> None:
    """Raises if a DDP still waits for gradients: it has then reduced none, or only some of them."""
    for module in modules_of(model):
        if isinstance(module, DistributedDataParallel):
            try:
                module._check_reducer_finalized()
            except RuntimeError as error:
                raise RuntimeError(
                    f"{_OP}: DDP did not reduce the gradients, since parameters of "
                    f"{type(module.module).__name__} took no part in step.loss: wrap it in "
                    "DistributedDataParallel(model, find_unused_parameters=True), or set "
                    "requires_grad=False for these parameters before it is wrapped"
                ) from error


@torch.no_grad()
def _sum(group: dist.ProcessGroup, gradients: _Gradients, averaged: bool) -> None:
    """Sums gradients over the ranks of a group, or averages them if the loss was scaled up.

    Gradients of parameters that are spread over the ranks are complete: these are only scaled down.
    If some ranks lack a parameter's gradient (an expert that got none of their tokens), they get a
    zero gradient, so that all ranks reduce the same.
    """
    parameters: Sequence[Any] = gradients.parameters
    present = _present_anywhere(group, parameters)
    ranks, works = dist.get_process_group_ranks(group), []
    for parameter, is_present in zip(parameters, present, strict=True):
        if not is_present:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        elif parameter.grad.layout != torch.strided:
            parameter.grad = parameter.grad.to_dense()
        if not parameter.grad.is_contiguous():
            parameter.grad = parameter.grad.contiguous()
        grad = parameter.grad
        is_dtensor = hasattr(grad, "to_local")
        local = grad.to_local() if is_dtensor else grad
        if averaged and id(parameter) not in gradients.reduction.divided:
            local /= group.size()
        if not (is_dtensor and is_spread(parameter, ranks)):
            works.append(dist.all_reduce(local, group=group, async_op=True))
    for work in works:
        if work is not None:
            work.wait()


def _present_anywhere(group: dist.ProcessGroup, parameters: Sequence[Any]) -> list[bool]:
    """Returns for each parameter whether some rank has a gradient. Collective.

    Uses attention's channel, which reports a peer that failed in its backward pass; an all-reduce
    would wait for it until its time-out.
    """
    words = [0] * (-(-len(parameters) // _BITS))
    for number, parameter in enumerate(parameters):
        words[number // _BITS] |= (parameter.grad is not None) << number % _BITS
    with ordinary_tensors():
        record = torch.tensor(words, device=local_part(parameters[0]).device)
        rows = equal_inputs.gather_records(str(group.group_name), _OP, record)
    anywhere = [0] * len(words)
    for row in rows:
        anywhere = [word | other for word, other in zip(anywhere, row, strict=True)]
    return [
        bool(anywhere[number // _BITS] >> number % _BITS & 1) for number in range(len(parameters))
    ]
