"""Causal convolutions over a sequence that is spread over ranks in order."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from symm_cp.group.memory import GroupLike, group_name
from symm_cp.ops.equal_inputs import same_on_all_ranks
from symm_cp.ops.error_reports import entry_point
from symm_cp.ops.recurrent.documents import documents_of
from symm_cp.ops.recurrent.fragments import fragments_of, halos
from symm_cp.ops.recurrent.halo import exchange_halo
from symm_cp.ops.tensor_checks import with_memory
from symm_cp.schedule.layout import SequenceLayout
from symm_cp.tensors.dtypes import FLOATING, one_of, wide

_OP = "causal_convolution"


def _check(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    named = {"x": x, "weight": weight, **({} if bias is None else {"bias": bias})}
    for name, tensor in named.items():
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{_OP}: {name} is {tensor!r}, must be a tensor")
        # torch would refuse these tensors only after the exchange.
        if not (torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()):
            with_memory(_OP, name, tensor)
        if tensor.dtype not in FLOATING:
            raise TypeError(f"{_OP}: {name} is {tensor.dtype}, must be {one_of(FLOATING)}")
        if tensor.dtype != x.dtype or tensor.device != x.device:
            raise TypeError(
                f"{_OP}: {name} is {tensor.dtype} on {tensor.device}, x {x.dtype} on {x.device}: "
                "they must agree"
            )
    if x.dim() != 3 or weight.dim() != 2 or weight.shape[0] != x.shape[1] or weight.shape[1] < 1:
        raise ValueError(
            f"{_OP}: weight {list(weight.shape)} must be (channels, taps) for x {list(x.shape)}, "
            "(B, channels, S)"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"{_OP}: bias has shape {list(bias.shape)}, must be [{weight.shape[0]}]")


@entry_point()
def causal_convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    group: GroupLike,
    cu_seqlens: torch.Tensor | Sequence[int] | None = None,
    sizes: Sequence[int] | None = None,
    layout: SequenceLayout | None = None,
) -> torch.Tensor:
    """Convolves each channel of a sequence that is spread over ranks in order.

    Same result as, for each document of the whole sequence (all of it without `cu_seqlens`)::

        F.conv1d(F.pad(document, (taps - 1, 0)), weight.unsqueeze(1), bias, groups=channels)

    Args:
        x: (B, channels, S), S positions of this rank: any number, even 0.
        weight: (channels, taps); the last tap is for the position itself.
        bias: (channels,).
        group: a ProcessGroup, a 1-D DeviceMesh or a group name.
        cu_seqlens: documents + 1 boundaries of packed documents, in positions of the whole
            sequence. The same for all samples; a sequence of ints, or a 1-D tensor of int32 or
            int64.
        sizes: the length of every rank's part; by default all are as long as this rank's.
        layout: which chunks of the sequence each rank holds, in ascending order, such as
            `symm_cp.HeadTail(length, W).layout`; by default parts are in rank order.

    Returns (B, channels, S) in the dtype of all tensors: float64, float32, bfloat16 or float16,
    even under autocast. Twice differentiable. Raises `ValueError` or `TypeError` for arguments that
    do not fit, before any communication; `RuntimeError` when a peer fails or disagrees. Source:
    `causal_conv1d_fn` of causal-conv1d.
    """
    _check(x, weight, bias)
    name, before = group_name(group), weight.shape[1] - 1
    fragments = fragments_of(_OP, sizes, layout, x.shape[2], name)
    agreed = None if layout is None else torch.tensor(fragments.agreed, device="cpu")
    documents: list[torch.Tensor | None] = [None] * len(fragments.lengths)
    if cu_seqlens is not None:
        agreed, each = documents_of(_OP, cu_seqlens, fragments, x.device, before)
        documents = [*each]
    if agreed is not None:
        what = "layout" if cu_seqlens is None else "cu_seqlens"
        same_on_all_ranks(agreed, _OP, what, "pass that of the whole sequence", name)
    if layout is None:
        extended = exchange_halo(x, before, group=name, sizes=sizes)
        return _convolved(extended, weight, bias, documents[0])
    ends, parts = halos(x, fragments, before, name).unbind(2), x.split(fragments.lengths, 2)
    found = []
    for end, part, own in zip(ends, parts, documents, strict=True):
        found.append(_convolved(torch.cat([end, part], 2), weight, bias, own))
    return torch.cat(found, 2)


def _convolved(
    extended: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    documents: torch.Tensor | None,
) -> torch.Tensor:
    """The convolution of positions that follow `taps - 1` others."""
    taps = weight.shape[1]
    if documents is None and extended.shape[2] < taps:  # no positions, which torch refuses
        documents = torch.zeros(extended.shape[2], device=extended.device)
    with torch.autocast(extended.device.type, enabled=False):
        if documents is None:
            return F.conv1d(extended, weight.unsqueeze(1), bias, groups=weight.shape[0])
        return _within_documents(extended, weight, bias, documents)


def _within_documents(
    extended: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, documents: torch.Tensor
) -> torch.Tensor:
    """The same within documents; `documents` has one entry for each position of `extended`."""
    taps, dtype = weight.shape[1], wide(weight.dtype)
    length = extended.shape[2] - taps + 1
    own = documents[taps - 1 :]
    out = extended.new_zeros((), dtype=dtype) if bias is None else bias.to(dtype)[:, None]
    # Tap by tap: torch's convolutions cannot leave out the positions of other documents.
    for tap in range(taps):
        rows = slice(tap, tap + length)
        out = out + extended[..., rows] * (
            weight[:, tap, None].to(dtype) * (documents[rows] == own)
        )
    return out.to(weight.dtype)
