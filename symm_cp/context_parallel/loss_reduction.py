"""The function that `shard_batch` returns: a loss of this rank's labels becomes the whole batch's.

Also warns of programs that cut a batch, and then forget the context or this function.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from symm_cp.context_parallel.layouts import Cut
from symm_cp.context_parallel.lengths import BalancersByLength
from symm_cp.context_parallel.load_balancers import LoadBalancer
from symm_cp.context_parallel.region import active
from symm_cp.ops.attention.layouts import encoded
from symm_cp.ops.common import attention_runs
from symm_cp.schedule.layout import sequential

_OP, _LABELS = "shard_batch", "labels"
_NO_CONTEXT = (
    "attention, if the model has any, saw this rank's part of the sequence only. Run the model "
    "within symm_cp.context_parallel(mesh, load_balancer=reduce_loss.load_balancer), or use "
    "symm_cp.training_step (for models without attention: "
    'context_parallel(on_unfused="ignore"))'
)


def _sum_over_ranks(
    value: torch.Tensor, ranks: torch.Tensor, group: str, size: int
) -> torch.Tensor:
    """Returns the sum of all ranks' values, in the order of attention's calls.

    `ranks` is the encoded layout in which each rank holds one column.

    Uses attention's channel, which detects a rank that calls attention more often than another or
    refuses a call. An all-reduce of the process group would wait until its time-out.
    """
    by_rank = torch.ops.symm_mem._gather_sequence(value.reshape(-1, 1), ranks, size, group)
    return by_rank.sum(-1).view_as(value)


class _GlobalMean(torch.autograd.Function):
    """Sums shares over ranks; each rank gets the gradient of its own share."""

    @staticmethod
    def forward(
        ctx: Any,
        loss: torch.Tensor,
        share: float,
        gain: float,
        ranks: torch.Tensor,
        group: str,
        size: int,
    ) -> torch.Tensor:
        ctx.factor = share * gain
        # A rank without targets has a mean of 0 / 0.
        total = loss.detach() * share if share else torch.zeros_like(loss)
        return _sum_over_ranks(total, ranks, group, size)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        return grad * ctx.factor, None, None, None, None, None


class PerToken(NamedTuple):
    """Labels or weights: this rank's part, which may be padding, and the whole tensor."""

    part: torch.Tensor
    whole: torch.Tensor
    is_padding: bool

    def counts(self, ignore_index: int) -> tuple[int, int]:
        """Returns how many labels count, on this rank and on all."""
        own = 0 if self.is_padding else int((self.part != ignore_index).sum())
        return own, int((self.whole != ignore_index).sum())


def _holds_labels(name: str, tensor: torch.Tensor) -> bool:
    is_number = tensor.is_floating_point() or tensor.dtype == torch.bool
    return name == _LABELS or not (is_number or name.endswith("_mask"))


class LossReduction:
    """Turns the loss of this rank's labels into the whole batch's loss, the same on all ranks.

    The gradients of its result, summed over ranks, are the gradients of the whole batch.
    """

    #: How the sequences of the batch are spread, for `context_parallel`.
    load_balancer: BalancersByLength
    #: How many `labels` of the whole batch count.
    num_items: int

    def __init__(
        self,
        group: dist.ProcessGroup,
        load_balancer: BalancersByLength,
        per_token: Mapping[str, PerToken],
        ignore_index: int,
        average_gradients: bool,
    ) -> None:
        self.load_balancer = load_balancer
        self._per_token, self._ignore_index = per_token, ignore_index
        #: The names of the tensors of the batch that are labels by their names.
        self.names = [name for name in per_token if name.endswith(_LABELS)]
        self._counts: dict[str, tuple[int, int]] = {}
        size = group.size()
        # Made here, since Dynamo does not trace it.
        self._among = encoded((sequential(size, size),)), str(group.group_name), size
        self._gain = float(size) if average_gradients else 1.0
        self.num_items = self.counts(_LABELS)[1] if _LABELS in per_token else 0
        if _LABELS in per_token:
            self._share = self._share_of(_LABELS)
        elif isinstance(load_balancer, LoadBalancer):
            self._share = load_balancer.lengths[group.rank()] / max(1, load_balancer.seq_length)
        else:
            self._share = 1.0 / size
        self._cut: Cut | None = None  # see `belongs_to`
        self._runs_before = 0
        self._warned = False

    def counts(self, name: str) -> tuple[int, int]:
        """Returns how many labels of a tensor of the batch count, on this rank and on all."""
        if name not in self._counts:
            each, first = self._per_token[name], self._per_token.get(_LABELS)
            # `shift_labels` may be the same tensor as `labels`.
            same = name != _LABELS and first is not None and each.whole is first.whole
            self._counts[name] = self.counts(_LABELS) if same else each.counts(self._ignore_index)
        return self._counts[name]

    def _share_of(self, name: str) -> float:
        own, everything = self.counts(name)
        return own / max(1, everything)

    def _name_of(self, argument: str, tensor: str | torch.Tensor) -> str:
        """Returns the name of a tensor per token; raises `ValueError` for one that was not cut."""
        known = dict(self._per_token)
        if argument == "labels":
            known = {name: each for name, each in known.items() if _holds_labels(name, each.whole)}
        for name, each in known.items():
            if isinstance(tensor, str):
                same = tensor == name
            else:
                same = tensor is each.part or getattr(tensor, "_base", None) is each.part
            if same:
                return name
        shown = repr(tensor) if isinstance(tensor, str) else f"of shape {list(tensor.shape)}"
        raise ValueError(
            f"reduce_loss: {argument} is {shown}, must be a tensor that {_OP} cut, or its name: "
            f"{sorted(known)}"
        )

    def belongs_to(self, cut: Cut) -> None:
        """Has the reduction warn unless attention over all ranks runs on these shards before it."""
        self._cut, self._runs_before = cut, attention_runs.total()
        _, group, size = self._among
        if size > 1 and not torch.compiler.is_compiling():
            labels = self.num_items > 0
            _check_first_step(_resolve_process_group(group), cut, labels)  # type: ignore[arg-type]

    def __call__(
        self,
        loss: torch.Tensor,
        *,
        summed: bool = False,
        labels: str | torch.Tensor | None = None,
        weights: str | torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Reduces the mean loss over this rank's labels (without labels, over its positions).

        `summed`: the loss is a sum over this rank's labels, or a sum divided by a number that is
        equal on all ranks, as models of transformers compute with `num_items_in_batch`. `labels`:
        the tensor of the local batch, or its name, whose labels the loss is of, if it is not
        "labels". `weights`: likewise, a tensor of weights, by which the loss is a tensor with the
        loss of each token, and becomes the weighted mean: with weights 1 / the number of a
        sample's labels, the mean of samples' means. Raises `ValueError` for a tensor that was not
        cut, and for losses of several tokens or samples without weights.
        """
        if not torch.compiler.is_compiling():
            _reduced.add(_resolve_process_group(self._among[1]))  # type: ignore[arg-type]
            self._check_context()
            if labels is weights is None and not (
                summed or self._warned or self.names == [_LABELS]
            ):
                self._warn_of_others()
        if weights is not None:
            loss, summed = self._weighted(loss, self._name_of("weights", weights)), True
        if loss.numel() != 1:
            raise ValueError(
                f"reduce_loss: loss has shape {list(loss.shape)}, must be one number, the mean "
                "over this rank's labels; the losses of tokens require weights="
            )
        share = self._share if labels is None else self._share_of(self._name_of("labels", labels))
        return _GlobalMean.apply(loss, 1.0 if summed else share, self._gain, *self._among)

    def _weighted(self, losses: torch.Tensor, name: str) -> torch.Tensor:
        """Returns this rank's share of the weighted mean of all tokens' losses."""
        part, whole, _ = self._per_token[name]  # padding has the weight 0
        if losses.numel() != part.numel():
            raise ValueError(
                f"reduce_loss: loss has shape {list(losses.shape)}, must have one number for each "
                f"of the weights {name!r}, {list(part.shape)}"
            )
        return (losses.flatten() * part.flatten()).sum() / whole.sum()

    def _warn_of_others(self) -> None:
        """Warns that a loss does not say which labels it is of, if that makes a difference."""
        self._warned = True
        if others := [n for n in self.names if self._share_of(n) != self._share]:
            warnings.warn(
                f"reduce_loss: other shares of {others} than of {_LABELS!r} are on this rank, and "
                f"a loss is taken for the mean over {_LABELS!r} (without them, over positions). "
                "Pass labels=, the name of the labels that it is the mean over, for each loss",
                stacklevel=3,
            )

    def _check_context(self) -> None:
        """Warns if this rank's part of the batch was used as if it were a whole batch."""
        cut, self._cut = self._cut, None
        _, group, size = self._among
        region = active()
        if size == 1 or cut is None or cut.entered or (region and region.group == group):
            return
        if attention_runs.total() == self._runs_before:
            cut.entered = True  # warns once
            warnings.warn(
                f"{_OP}: the loss of a batch that was cut is reduced, but no context was entered "
                f"since, and no attention ran over all ranks: {_NO_CONTEXT}",
                stacklevel=3,
            )


_first_cuts: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()  # groups with a first cut
_reduced: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()  # with a loss reduced since
_spent: list[RemovableHandle] = []  # hooks that were called: a hook cannot remove itself


def _check_first_step(group: dist.ProcessGroup, cut: Cut, labels: bool) -> None:
    """Warns at the next optimizer step if no context was entered after a group's first cut.

    Also warns if that cut had labels, and no loss was reduced over the group since; the loss of any
    batch counts, as the first batch may have been skipped, or its step have failed.

    Only the first cut counts: programs that cut ahead make a step between a cut and its context.
    """
    while _spent:
        _spent.pop().remove()
    if group in _first_cuts:
        return
    _first_cuts.add(group)
    _reduced.discard(group)
    runs_before = attention_runs.total()
    whose = weakref.ref(group)

    def before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling() or handle in _spent:
            return
        _spent.append(handle)
        if not cut.entered and attention_runs.total() == runs_before:
            warnings.warn(
                f"{_OP}: an optimizer makes a step after a batch was cut, but no context was "
                f"entered since, and no attention ran over all ranks: {_NO_CONTEXT}",
                stacklevel=3,
            )
        elif labels and (its_group := whose()) is not None and its_group not in _reduced:
            warnings.warn(
                f"{_OP}: an optimizer makes a step, but the function that shard_batch returned was "
                "not called with the loss, which is then of this rank's labels only: "
                "reduce_loss(loss).backward(). Stages of a pipeline without a loss cut batches "
                "without labels",
                stacklevel=3,
            )

    handle = register_optimizer_step_pre_hook(before_step)
