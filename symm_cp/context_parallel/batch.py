"""Batches of a model, cut with the positions, labels and loss of the whole sequence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from symm_cp.context_parallel import agreement, inspectors
from symm_cp.context_parallel.averaging import reduction_of
from symm_cp.context_parallel.inspectors import BatchRules, positions
from symm_cp.context_parallel.layouts import check_cut, cut, note_cut, remember
from symm_cp.context_parallel.lengths import BalancersByLength, balancer_for, known_balancers
from symm_cp.context_parallel.load_balancers import PADDING_ROWS, LoadBalancer
from symm_cp.context_parallel.loss_reduction import LossReduction, PerToken
from symm_cp.context_parallel.region import active
from symm_cp.group.memory import GroupLike
from symm_cp.ops.attention.methods import MethodLike, group_by
from symm_cp.ops.error_reports import reports_to_peers

_OP = "shard_batch"

# Tensors that give the length of the sequence (the encoder's, if there is a decoder), and tensors
# that give the length of the decoder's sequence.
_SEQUENCE = ("input_ids", "inputs_embeds", "encoder_outputs")
_DECODER = ("decoder_input_ids", "decoder_inputs_embeds")
# Never cut, whatever their shapes: boundaries in the whole sequence, images and sounds.
_WHOLE = (
    *("cu_seq", "max_length", "max_seqlen"),
    *("pixel_", "image_", "video_", "input_features", "input_values"),
)
# Labels of whole samples, or positions in them: a model would compare them with this rank's part.
_OF_SAMPLES = ("start_positions", "end_positions", "next_sentence_label", "mc_labels")


def shard_batch(
    mesh: GroupLike,
    batch: Mapping[str, Any],
    *,
    model: nn.Module | None = None,
    seq_dim: int = 1,
    load_balancer: BalancersByLength | None = None,
    shift_labels: bool | None = None,
    ignore_index: int = -100,
    average_gradients: bool | None = None,
    method: MethodLike | None = None,
) -> tuple[dict[str, Any], LossReduction]:
    """Cuts a batch of a language model to this rank's part of the sequence. Collective.

    `training_step` does this and the rest of the step. Same loss as the model has on the whole
    batch in one process::

        local, reduce_loss = shard_batch(mesh, {"input_ids": ids, "labels": ids})
        with context_parallel(mesh, load_balancer=...):
            logits = model(local["input_ids"], position_ids=local["position_ids"])
            loss = reduce_loss(F.cross_entropy(logits.flatten(0, 1), local["labels"].flatten()))
            loss.backward()

    or, for a model of transformers that computes its loss::

        local, reduce_loss = shard_batch(mesh, batch, model=model)
        with context_parallel(mesh, model=model, load_balancer=reduce_loss.load_balancer):
            loss = reduce_loss(model(**local).loss)
            loss.backward()

    Args:
        mesh: a 1-D DeviceMesh, a ProcessGroup or a group name; a 2-D DeviceMesh for two methods.
        batch: tensors by name, the same on all ranks. `input_ids` (or else `inputs_embeds`,
            `encoder_outputs`, `labels`) gives the length of the sequence, `decoder_input_ids` (or
            `decoder_inputs_embeds`) the decoder's length. Tensors of such a length in
            `seq_dim` are cut, differentiably; others are returned unchanged, and so are masks of
            more than two dimensions, `cu_seq_lens_*`, `max_length_*`, images and sounds. `labels`
            are shifted first (label t becomes label t + 1, the last one `ignore_index`): shifting
            shards would lose one label at the end of each chunk. `position_ids` are added if
            missing, unless there is a decoder.
        model: the model of transformers that gets the batch. Its class then decides whether labels
            are shifted, and whether positions are added and from where they count;
            `decoder_input_ids` are made from the labels; and `shift_labels` are added for a model
            that would otherwise shift the labels again.
        load_balancer: as in `context_parallel`, but not a function; head-tail by default.
        shift_labels: whether labels are shifted. By default they are, except for a decoder that has
            an encoder, or a `model` for masked tokens or token classes.
        average_gradients: whether gradients of parameters are averaged over this group afterwards
            (as DDP and FSDP do) instead of summed. By default detected from the wrappers of
            `model`; without a `model` they are summed.
        method: required for a 2-D mesh, where the sequence is spread over all ranks; as in
            `context_parallel`.

    A rank that holds no position of a short sequence gets one row of padding, without a label.

    Returns the local batch, and a function that takes the mean loss over this rank's labels and
    returns the mean over all ranks' labels: the same on all ranks, and such that the sum of the
    ranks' gradients is the whole batch's gradient. A loss of other labels of the batch (those of
    multi-token prediction) is reduced by `reduce_loss(loss, labels="mtp_labels")`; these are not
    shifted. `reduce_loss(losses, weights="loss_weights")` is the weighted mean of the losses of all
    positions. On a rank without labels the loss itself may be
    NaN, but its gradients must be finite: those of `F.cross_entropy` are, those of a sum that is
    divided by the number of labels are not (`training_step` takes both). Raises `ValueError` for a
    batch without a sequence, of another length than the load balancer's, or without exactly one
    label for each position; `TypeError` for a batch without names; `RuntimeError` on all ranks if
    they cut different batches, or cut them differently, or if their `model`s have different
    parameters; `NotImplementedError` for a `model` that shifts
    labels by itself. Source: the recipes of torchtitan and transformers.
    """
    group = group_by(_OP, mesh, method)
    shift = (shift_labels, ignore_index)
    if average_gradients is None:
        average_gradients = model is not None and reduction_of(model, group).averages
    return _shard(group, batch, model, seq_dim, load_balancer, shift, average_gradients)


def check_mapping(op: str, batch: object) -> None:
    """Raises `TypeError` for a batch without names."""
    if not isinstance(batch, Mapping):
        raise TypeError(
            f"{op}: batch is a {type(batch).__name__}, must be a mapping from names to tensors: "
            "{'input_ids': ids, 'labels': labels}"
        )


@reports_to_peers
def _shard(
    group: dist.ProcessGroup,
    batch: Mapping[str, Any],
    model: nn.Module | None,
    seq_dim: int,
    load_balancer: BalancersByLength | None,
    shift: tuple[bool | None, int],
    average_gradients: bool,
) -> tuple[dict[str, Any], LossReduction]:
    shift_labels, ignore_index = shift
    check_mapping(_OP, batch)
    whole = _completed(dict(batch), model, seq_dim, shift_labels, ignore_index)
    lengths = _lengths(whole, seq_dim)
    balancers = {n: balancer_for(_OP, load_balancer, n, group.size()) for n in lengths}
    known_balancers(_OP, balancers, group.size())
    items = [(n, v) for n, v in sorted(whole.items()) if _matters(n, v, seq_dim, balancers)]
    options = (seq_dim, shift_labels, ignore_index, average_gradients)
    agreement.compare_cut(_OP, group, items, list(balancers.values()), options)
    if model is not None:
        agreement.compare_model(_OP, group, model)
    _check_region(group, balancers)
    rank = group.rank()
    local = {
        name: _cut(name, value, seq_dim, balancers, rank, ignore_index)
        for name, value in whole.items()
    }
    for balancer in balancers.values():
        remember(group, balancer, shards=True)
    only = next(iter(balancers.values())) if len(balancers) == 1 else None
    cut_tensors = {
        name: value
        for name, value in local.items()
        if value is not whole[name] and isinstance(value, torch.Tensor)
    }
    per_token = {}
    for name, value in cut_tensors.items():
        if value.dim() == seq_dim + 1 and not name.endswith("_ids"):
            held = balancers[whole[name].shape[seq_dim]].lengths[rank]
            per_token[name] = PerToken(value, whole[name], is_padding=held == 0)
    reduce_loss = LossReduction(
        group, only or balancers, per_token, ignore_index, average_gradients
    )
    holders = [reduce_loss, *cut_tensors.values()]
    reduce_loss.belongs_to(note_cut(group, balancers.values(), holders))
    return local, reduce_loss


def _check_region(group: dist.ProcessGroup, balancers: Mapping[int, LoadBalancer]) -> None:
    """Raises `ValueError` within a context of other layouts."""
    region = active()
    if region is not None and region.group == str(group.group_name) and group.size() > 1:
        for balancer in region.balancers:
            check_cut(_OP, balancer, balancers.values())


def _completed(
    batch: dict[str, Any],
    model: nn.Module | None,
    seq_dim: int,
    shift_labels: bool | None,
    ignore_index: int,
) -> dict[str, Any]:
    """Returns the whole batch, completed with entries that must be made before it is cut."""
    of_samples = sorted(set(_OF_SAMPLES) & set(batch))
    if of_samples:
        raise ValueError(
            f"{_OP}: batch has {of_samples}, which a model compares with the scores of all "
            "positions: gather the model's outputs, and compute the loss from them"
        )
    rules = None if model is None else inspectors.current().batch_rules(_OP, model)
    if rules is not None:
        rules.add_decoder_input(batch)
    sequence = sequence_of(batch, seq_dim)
    decoder = rules is not None and rules.has_decoder
    decoder = decoder or any(name in batch for name in _DECODER)
    if isinstance(batch.get("labels"), torch.Tensor):
        _check_labels(batch, seq_dim, decoder)
        _shift(batch, rules, seq_dim, shift_labels, ignore_index, decoder)
    if rules is not None:
        rules.add_positions(batch, sequence)
    elif "position_ids" not in batch and not decoder:
        embedded = sequence.is_floating_point() and sequence.dim() > 2
        shape = sequence.shape[:-1] if embedded else sequence.shape
        batch["position_ids"] = positions(shape, seq_dim, sequence.device)
    return batch


def _parts(value: Any) -> list[Any]:
    return list(value.values() if isinstance(value, Mapping) else value)


def _first(value: Any) -> Any:
    """Returns the hidden states of an encoder's outputs; returns tensors unchanged."""
    return value if isinstance(value, torch.Tensor) else _parts(value)[0]


def sequence_of(batch: Mapping[str, Any], seq_dim: int) -> torch.Tensor:
    """Returns the tensor that gives the sequence's length; the encoder's, if there is one."""
    present = [batch[name] for name in (*_SEQUENCE, "labels") if batch.get(name) is not None]
    if not present:
        raise ValueError(
            f"{_OP}: batch has {sorted(batch)}, must have input_ids, inputs_embeds, "
            "encoder_outputs or labels"
        )
    sequence = _first(present[0])
    if not isinstance(sequence, torch.Tensor):
        raise TypeError(f"{_OP}: {sorted(batch)} gives a sequence of {type(sequence).__name__}")
    if not 0 <= seq_dim < sequence.dim():
        raise ValueError(f"{_OP}: {seq_dim=} is out of range for shape {list(sequence.shape)}")
    return sequence


def _lengths(batch: Mapping[str, Any], seq_dim: int) -> list[int]:
    tensors = [sequence_of(batch, seq_dim)]
    tensors += [batch[name] for name in _DECODER if batch.get(name) is not None]
    return list(dict.fromkeys(tensor.shape[seq_dim] for tensor in tensors))


def _check_labels(batch: Mapping[str, Any], seq_dim: int, decoder: bool) -> None:
    labels = batch["labels"]
    names = [name for name in (_DECODER if decoder else _SEQUENCE) if batch.get(name) is not None]
    if not names:
        return
    length = _first(batch[names[0]]).shape[seq_dim]
    if labels.dim() <= seq_dim or labels.shape[seq_dim] != length:
        raise ValueError(
            f"{_OP}: labels of shape {list(labels.shape)} must have one for each of the {length} "
            f"positions of {names[0]} (for an encoder-decoder, pass decoder_input_ids or model)"
        )


def _shift(
    batch: dict[str, Any],
    rules: BatchRules | None,
    seq_dim: int,
    shift_labels: bool | None,
    ignore_index: int,
    decoder: bool,
) -> None:
    """Shifts the labels of a whole batch, unless they belong to the positions themselves."""
    by_model = rules is not None and rules.shifts_labels()
    if shift_labels is None:
        shift_labels = not decoder if rules is None else by_model
    if "shift_labels" in batch:  # the collator has already shifted them
        batch["labels"] = batch["shift_labels"]
    elif shift_labels:
        labels = batch["labels"].roll(-1, seq_dim)
        labels.select(seq_dim, labels.shape[seq_dim] - 1).fill_(ignore_index)
        batch["labels"] = labels
    if rules is not None:
        rules.check_labels(batch, ignore_index)
    if by_model:
        batch["shift_labels"] = batch["labels"]


def _dim_cut(
    name: str, value: torch.Tensor, seq_dim: int, balancers: Mapping[int, LoadBalancer]
) -> int | None:
    """Returns the dimension in which a tensor of a batch is cut; None if it stays whole."""
    if name.startswith(_WHOLE) or (name.endswith("attention_mask") and value.dim() > 2):
        return None
    if name.endswith("position_ids") and value.dim() == 3:  # several positions for each token
        seq_dim += 1
    if value.dim() <= seq_dim or value.shape[seq_dim] not in balancers:
        return None
    return seq_dim


def _matters(name: str, value: Any, seq_dim: int, balancers: Mapping[int, LoadBalancer]) -> bool:
    """Whether all ranks must have the same value: a tensor that is cut, or covers the sequence."""
    if not isinstance(value, torch.Tensor):
        return False
    whole = name.startswith(_WHOLE) or name.endswith("attention_mask")
    return whole or _dim_cut(name, value, seq_dim, balancers) is not None


def _cut(
    name: str,
    value: Any,
    seq_dim: int,
    balancers: Mapping[int, LoadBalancer],
    rank: int,
    ignore_index: int,
) -> Any:
    """Returns this rank's part of one value in a batch; a row of padding if it has no position."""
    if name == "encoder_outputs" and not isinstance(value, torch.Tensor):
        parts = [_cut("", part, seq_dim, balancers, rank, ignore_index) for part in _parts(value)]
        return (
            type(value)(**dict(zip(value, parts, strict=True)))
            if isinstance(value, Mapping)
            else parts
        )
    if not isinstance(value, torch.Tensor):
        return value
    dim = _dim_cut(name, value, seq_dim, balancers)
    if dim is None:
        return value
    balancer = balancers[value.shape[dim]]
    if balancer.lengths[rank]:
        return cut(_OP, value, dim, balancer.positions(rank))
    row = value.detach().narrow(dim, 0, PADDING_ROWS)
    if name.endswith("labels"):
        return torch.full_like(row, ignore_index)
    # A token that the model knows; its results go nowhere. Zeros would give some norms NaN.
    return row.clone() if name in ("", *_SEQUENCE, *_DECODER) else torch.zeros_like(row)
