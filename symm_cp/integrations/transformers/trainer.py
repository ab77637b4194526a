"""transformers' `Trainer` under context parallelism.

Ranks of a context-parallel group get the same batches, and each cuts its part; gradients are the
whole sequence's. accelerate wraps the model in DDP or FSDP, which averages gradients over all
ranks, so `shard_batch` scales the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import recursively_apply
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from transformers import Trainer

from symm_cp.context_parallel import (
    HeadTail,
    LoadBalancer,
    context_parallel,
    context_parallel_unshard,
    shard_batch,
)
from symm_cp.context_parallel.lengths import BalancersByLength
from symm_cp.context_parallel.loss_reduction import LossReduction
from symm_cp.group.hosts import numbers_of_all
from symm_cp.group.memory import GroupLike, resolve
from symm_cp.ops.attention.methods import MethodLike, group_by

_OP = "ContextParallelTrainer"
#: A trainer's attributes: the reduction of a step's loss, the group and layouts of the last batch.
_REDUCTION, _LAST_CUT = "_symm_cp_reduce_loss", "_symm_cp_last_cut"


@dataclass(frozen=True)
class Steps:
    """How the ranks of a group make the steps of a `Trainer`.

    `enter(model, load_balancer)` returns the context for a batch that was cut; its gradients will
    be averaged over the group.
    """

    group: dist.ProcessGroup
    load_balancer: Callable[[int, int], LoadBalancer]
    enter: Callable[[nn.Module, BalancersByLength], AbstractContextManager[None]]


# The functions that replace methods of `Trainer`: they get the trainer, its `Steps`, the original
# method, and the arguments.


def _check_loss(trainer: Any) -> None:
    """Refuses losses that would shift shifted labels again."""
    if trainer.label_smoother is not None or trainer.compute_loss_func is not None:
        raise NotImplementedError(
            f"{_OP}: label_smoothing_factor and compute_loss_func would get labels that are "
            "shifted already: override compute_loss instead"
        )


def prepare_inputs(
    trainer: Any, steps: Steps, original: Any, model: nn.Module, inputs: dict[str, Any]
) -> tuple[Callable[[], Any], dict[str, Any]]:
    """Cuts a batch; `Trainer` calls it before each step, and enters the context it returns."""
    _check_loss(trainer)
    whole, size = trainer._prepare_inputs(inputs), steps.group.size()
    tensors = [value for value in whole.values() if isinstance(value, torch.Tensor)]
    lengths = {tensor.shape[1] for tensor in tensors if tensor.dim() > 1}
    balancers = {length: steps.load_balancer(length, size) for length in lengths}
    local, reduce_loss = shard_batch(
        steps.group, whole, model=model, load_balancer=balancers, average_gradients=True
    )
    setattr(trainer, _REDUCTION, reduce_loss)
    setattr(trainer, _LAST_CUT, (steps.group, reduce_loss.load_balancer))
    return partial(steps.enter, model, reduce_loss.load_balancer), local


def compute_loss(
    trainer: Any,
    steps: Steps,
    original: Any,
    model: nn.Module,
    inputs: dict[str, Any],
    return_outputs: bool = False,
    num_items_in_batch: torch.Tensor | int | None = None,
) -> Any:
    """Computes the loss of the whole batch, from the mean over this rank's labels."""
    reduce_loss: LossReduction | None = vars(trainer).pop(_REDUCTION, None)
    if reduce_loss is None:
        raise RuntimeError(f"{_OP}: compute_loss was called with a batch that was not cut")
    # With outputs TRL's trainers compute the logits in another forward pass: only if asked for.
    result = original(model, inputs, return_outputs)
    loss, *outputs = result if return_outputs else (result,)
    loss = _loss_of_step(trainer, reduce_loss, loss, num_items_in_batch)
    return (loss, *outputs) if return_outputs else loss


def _loss_of_step(
    trainer: Any, reduce_loss: LossReduction, loss: torch.Tensor, items: torch.Tensor | int | None
) -> torch.Tensor:
    """Returns a batch's share of the loss of a step, from the mean over this rank's labels.

    `items` is `Trainer`'s count of labels: of all batches of the step, on all replicas or on this
    one, divided by the number of ranks that get the same batches.
    """
    loss = reduce_loss(loss)
    if items is None:
        return loss
    loss = loss * reduce_loss.num_items / items
    ranks = trainer.get_cp_size() * trainer.get_tp_size()
    if trainer.args.average_tokens_across_devices:
        return loss * (trainer.accelerator.num_processes // ranks)
    # transformers divides by the number of ranks even if it counted the labels of only one.
    return loss / ranks if torch.is_tensor(items) else loss


# --- evaluation --------------------------------------------------------------------------------


def prediction_step(trainer: Any, steps: Steps, original: Any, *args: Any, **kwargs: Any) -> Any:
    """Computes the loss, the predictions and the labels of a whole batch, on all ranks.

    Consecutive ranks have the same samples, of which metrics must see one.
    """
    copies = steps.group.size() * trainer.get_tp_size()
    gather = trainer.gather_function
    if getattr(gather, "func", None) is not _gather_once:  # the loop resets it at its end
        trainer.gather_function = partial(_gather_once, trainer.accelerator, copies, gather)
    setattr(trainer, _LAST_CUT, None)
    loss, outputs, labels = original(*args, **kwargs)
    last_cut = getattr(trainer, _LAST_CUT)
    if last_cut is not None and outputs is not None:
        outputs = _whole(outputs, *last_cut)
    return loss, outputs, labels


def _whole(outputs: Any, group: dist.ProcessGroup, balancers: BalancersByLength) -> Any:
    """Gathers the outputs (B, S, ...) of a model that ran on this rank's part."""
    known = (balancers,) if isinstance(balancers, LoadBalancer) else tuple(balancers.values())
    leaves, structure = tree_flatten(outputs)
    lengths = [t.shape[1] if isinstance(t, torch.Tensor) and t.dim() > 1 else 0 for t in leaves]
    everywhere = numbers_of_all(resolve(group), f"{_OP}: lengths of outputs", lengths)
    for number, held in enumerate(zip(*everywhere, strict=True)):
        for balancer in known:
            if list(held) == [balancer.rows(rank) for rank in range(group.size())]:
                part = leaves[number]
                (leaves[number],) = context_parallel_unshard(group, [part], [1], balancer)
    return tree_unflatten(leaves, structure)


def _gather_once(accelerator: Any, copies: int, gather: Any, data: Any) -> Any:
    """The same as `gather` (accelerate's `gather_for_metrics`) of the ranks with different data.

    `gather` leaves out copies only in the last batch, and counts from its beginning.
    """
    method = getattr(gather, "func", gather).__name__
    options = getattr(gather, "keywords", {})
    if options.get("use_gather_object"):
        data = data if accelerator.process_index % copies == 0 else []
        return getattr(accelerator, method)(data, **options)
    gather_all = accelerator.gather

    def first_copies(gathered: torch.Tensor) -> torch.Tensor:
        each = len(gathered) // accelerator.num_processes
        return gathered.unflatten(0, (-1, copies, each))[:, 0].flatten(0, 1)

    accelerator.gather = lambda data: recursively_apply(first_copies, gather_all(data))
    try:
        return getattr(accelerator, method)(data)  # calls `gather`
    finally:
        del accelerator.gather


@dataclass(frozen=True)
class _Sizes:
    """The part of a device mesh that data loaders read: which ranks get the same batch."""

    sizes: Mapping[str, int]

    @property
    def mesh_dim_names(self) -> tuple[str, ...]:
        return tuple(self.sizes)

    def __getitem__(self, name: str) -> _Sizes:
        return _Sizes({name: self.sizes[name]})

    def size(self) -> int:
        (size,) = self.sizes.values()
        return size


class ContextParallelMixin:
    """Makes a `Trainer` context parallel: `class MyTrainer(ContextParallelMixin, Trainer)`.

    Adds keyword arguments:

    cp_mesh: the ranks that share a sequence: a 1-D DeviceMesh, a ProcessGroup or a group name (a
        2-D DeviceMesh for two methods). The ranks must be consecutive, and accelerate must see
        them (torchrun). Further ranks are replicas with other batches.
    cp_load_balancer: a function of the length of a whole sequence and the number of ranks, such as
        the class `symm_cp.Sequential`; `symm_cp.HeadTail` by default.
    cp_method: how attention is split over the ranks, as in `context_parallel`.

    Batches are the same as in one process, for any model that `context_parallel(model=...)` takes;
    see `shard_batch`. The loss is the mean over all labels, as accelerate and gradient accumulation
    count them. Evaluation and prediction give the loss, metrics and predictions of a `Trainer`
    without context parallelism: each sample counts once, and outputs cover the whole sequence.
    Refused with `NotImplementedError`: label smoothing and `compute_loss_func`.
    """

    def __init__(
        self,
        *args: Any,
        cp_mesh: GroupLike,
        cp_load_balancer: Callable[[int, int], LoadBalancer] = HeadTail,
        cp_method: MethodLike | None = None,
        **kwargs: Any,
    ) -> None:
        def enter(model: nn.Module, balancers: BalancersByLength) -> AbstractContextManager[None]:
            return context_parallel(cp_mesh, model=model, load_balancer=balancers, method=cp_method)

        group = group_by(_OP, cp_mesh, cp_method, argument="cp_mesh")
        self._cp_steps = Steps(group, cp_load_balancer, enter)
        super().__init__(*args, **kwargs)
        _check_loss(self)

    def create_accelerator_and_postprocess(self) -> None:
        """Creates the accelerator, whose data loaders give all ranks of a group the same batch."""
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        trainer: Any = self
        ranks = dist.get_process_group_ranks(self._cp_steps.group)
        size = len(ranks)
        processes = trainer.accelerator.num_processes
        if processes != dist.get_world_size():
            raise RuntimeError(
                f"{_OP}: accelerate sees {processes} processes of {dist.get_world_size()}: start "
                "them with torchrun"
            )
        if ranks != list(range(ranks[0], ranks[0] + size)) or ranks[0] % size or processes % size:
            raise ValueError(
                f"{_OP}: cp_mesh has ranks {ranks} of {processes}, must be {size} consecutive "
                f"ranks that begin at a multiple of {size}"
            )
        sizes = _Sizes({"dp_replicate": processes // size, "cp": size})
        trainer.accelerator._prepare_device_mesh = lambda: sizes

    def get_cp_size(self) -> int:
        """Returns the number of ranks that share a sequence."""
        return self._cp_steps.group.size()

    def _prepare_context_parallel_inputs(self, *args: Any, **kwargs: Any) -> Any:
        return prepare_inputs(self, self._cp_steps, None, *args, **kwargs)

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        """Computes the loss of the whole batch, from the mean over this rank's labels."""
        return compute_loss(self, self._cp_steps, super().compute_loss, *args, **kwargs)  # type: ignore[misc]

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        """Computes the loss, the predictions and the labels of a whole batch."""
        return prediction_step(self, self._cp_steps, super().prediction_step, *args, **kwargs)  # type: ignore[misc]


class ContextParallelTrainer(ContextParallelMixin, Trainer):
    """transformers' `Trainer`, context parallel: see `ContextParallelMixin`.

    Gives the same losses and weights as one process::

        trainer = ContextParallelTrainer(model, args, train_dataset=data, cp_mesh=mesh["cp"])
        trainer.train()
    """
