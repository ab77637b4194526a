"""transformers' `Trainer` under context parallelism.

Ranks of a context-parallel group get the same batches, and each cuts its part; gradients are the
whole sequence's. accelerate wraps the model in DDP or FSDP, which averages gradients over all
ranks, so `shard_batch` scales the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import Trainer

from symm_cp.context_parallel import LoadBalancer, context_parallel, shard_batch
from symm_cp.context_parallel.batch import LossReduction
from symm_cp.context_parallel.load_balancers import HeadTail
from symm_cp.group.memory import GroupLike
from symm_cp.ops.attention.methods import MethodLike, group_by

_OP = "ContextParallelTrainer"


def check_loss(op: str, trainer: Any) -> None:
    """Raises `NotImplementedError` for losses that would shift shifted labels again."""
    if trainer.label_smoother is not None or trainer.compute_loss_func is not None:
        raise NotImplementedError(
            f"{op}: label_smoothing_factor and compute_loss_func would get labels that are "
            "shifted already: override compute_loss instead"
        )


def check_prediction(op: str, prediction_loss_only: bool) -> None:
    """Raises `NotImplementedError` unless `prediction_loss_only`."""
    if not prediction_loss_only:
        raise NotImplementedError(
            f"{op}: predictions would cover only this rank's part: predict with a Trainer"
        )


def cut_inputs(
    trainer: Any,
    group: dist.ProcessGroup,
    load_balancer: Callable[[int, int], LoadBalancer],
    model: nn.Module,
    inputs: dict[str, Any],
) -> tuple[dict[str, Any], LossReduction]:
    """Cuts a batch of a `Trainer` whose gradients will be averaged over the group."""
    whole = trainer._prepare_inputs(inputs)
    tensors = [value for value in whole.values() if isinstance(value, torch.Tensor)]
    lengths = {tensor.shape[1] for tensor in tensors if tensor.dim() > 1}
    balancers = {length: load_balancer(length, group.size()) for length in lengths}
    return shard_batch(group, whole, model=model, load_balancer=balancers, average_gradients=True)


def computed_loss(
    trainer: Any,
    reduce_loss: LossReduction,
    compute: Callable[[bool], Any],
    return_outputs: bool,
    items: torch.Tensor | int | None,
) -> Any:
    """Returns the result of `Trainer.compute_loss` for the whole batch.

    `compute` returns the result for this rank's part; its argument says whether to add the outputs,
    for which TRL's trainers compute the logits in another forward pass.
    """
    if not return_outputs:
        return _loss_of_step(trainer, reduce_loss, compute(False), items)
    loss, outputs = compute(True)
    return _loss_of_step(trainer, reduce_loss, loss, items), outputs


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
    count them. Evaluation computes the loss only. Refused with `NotImplementedError`: label
    smoothing, `compute_loss_func`, and metrics, which would get this rank's logits.
    """

    def __init__(
        self,
        *args: Any,
        cp_mesh: GroupLike,
        cp_load_balancer: Callable[[int, int], LoadBalancer] = HeadTail,
        cp_method: MethodLike | None = None,
        **kwargs: Any,
    ) -> None:
        self._cp_group = group_by(_OP, cp_mesh, cp_method, argument="cp_mesh")
        self._cp_mesh, self._cp_method = cp_mesh, cp_method
        self._cp_load_balancer = cp_load_balancer
        self._cp_reduce_loss: LossReduction | None = None
        super().__init__(*args, **kwargs)
        trainer: Any = self
        check_loss(_OP, trainer)
        if trainer.compute_metrics is not None:
            raise NotImplementedError(
                f"{_OP}: compute_metrics would get the logits of this rank's part: compute metrics "
                "with a Trainer"
            )

    def create_accelerator_and_postprocess(self) -> None:
        """Creates the accelerator, whose data loaders give all ranks of a group the same batch."""
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        trainer: Any = self
        ranks, size = dist.get_process_group_ranks(self._cp_group), self._cp_group.size()
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
        return self._cp_group.size()

    def _prepare_context_parallel_inputs(
        self, model: nn.Module, inputs: dict[str, Any]
    ) -> tuple[Callable[[], Any], dict[str, Any]]:
        """Cuts a batch; `Trainer` calls it before each step, and enters the context it returns."""
        local, self._cp_reduce_loss = cut_inputs(
            self, self._cp_group, self._cp_load_balancer, model, inputs
        )
        balancer = self._cp_reduce_loss.load_balancer
        context = partial(
            context_parallel,
            self._cp_mesh,
            model=model,
            load_balancer=balancer,
            method=self._cp_method,
        )
        return context, local

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        """Computes the loss of the whole batch, from the mean over this rank's labels."""
        reduce_loss, self._cp_reduce_loss = self._cp_reduce_loss, None
        if reduce_loss is None:
            raise RuntimeError(f"{_OP}: compute_loss was called with a batch that was not cut")
        compute = partial(super().compute_loss, model, inputs)  # type: ignore[misc]
        return computed_loss(self, reduce_loss, compute, return_outputs, num_items_in_batch)

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> Any:
        """Computes the loss of a batch; refuses predictions."""
        check_prediction(_OP, prediction_loss_only)
        return super().prediction_step(model, inputs, True, ignore_keys)  # type: ignore[misc]


class ContextParallelTrainer(ContextParallelMixin, Trainer):
    """transformers' `Trainer`, context parallel: see `ContextParallelMixin`.

    Gives the same losses and weights as one process::

        trainer = ContextParallelTrainer(model, args, train_dataset=data, cp_mesh=mesh["cp"])
        trainer.train()
    """
