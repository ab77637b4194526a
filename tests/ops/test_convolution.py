"""`causal_convolution` over parts of any length and layout, against torch's on each document."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import symm_cp
from symm_cp.testing import Ranks
from tests import device
from tests.exhaustive import exhaustive, pairs, some
from tests.ops.refusals import Wrong, check_refusals
from tests.ops.test_recurrence import EDGES, KINDS, layout_of, options_of

pytestmark = device.devices("cpu", "simulated")


def by_document(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, edges: Sequence[int]
) -> torch.Tensor:
    taps = weight.shape[1]
    lengths = [end - begin for begin, end in itertools.pairwise(edges)]
    parts = [
        F.conv1d(F.pad(part, (taps - 1, 0)), weight.unsqueeze(1), bias, groups=len(weight))
        for part in x.split(lengths, 2)
        if part.shape[2]
    ]
    return torch.cat(parts, 2)


def runs(
    group: dist.ProcessGroup, kind: str, packed: str, dtype: torch.dtype = torch.float64
) -> None:
    """Also with more taps than some parts have positions, and without a bias."""
    layout = layout_of(kind, group.size())
    rows, total = torch.tensor(list(layout.positions(group.rank())), dtype=int), layout.length
    edges = [min(edge, total) for edge in EDGES[packed]]
    edges = edges and [*edges[:-1], total]
    for taps, biased in ((4, True), (1, False), (9, True)):
        x, weight, bias = torch.randn(2, 3, total), torch.randn(3, taps), torch.randn(3)
        given = [t.to(dtype) for t in ([x, weight, bias] if biased else [x, weight])]
        leaves = [t.double().requires_grad_() for t in given]
        want = by_document(*leaves[:2], leaves[2] if biased else None, edges or [0, total])
        weights = torch.randn_like(want)
        wanted, *of_parameters = torch.autograd.grad((want * weights).sum(), leaves)
        mine = [t.clone().requires_grad_() for t in (given[0][..., rows], *given[1:])]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = symm_cp.causal_convolution(*mine, group=group, **options_of(kind, layout, edges))
        assert out.dtype == dtype
        # A product and a sum for each tap; gradients of parameters are sums over all positions.
        eps = torch.finfo(dtype).eps
        close = {"rtol": 4 * taps * eps, "atol": 4 * taps * eps * float(want.abs().max())}
        torch.testing.assert_close(out.double(), want[..., rows], **close)
        grad, *own = torch.autograd.grad((out * weights[..., rows]).sum(), mine)
        close["atol"] = 4 * taps * eps * float(wanted.abs().max())
        torch.testing.assert_close(grad.double(), wanted[..., rows], **close)
        for part, needed in zip(own, of_parameters, strict=True):
            summed = part.double()
            dist.all_reduce(summed, group=group)
            atol = 4 * total * eps * float(needed.abs().max())
            torch.testing.assert_close(summed, needed, rtol=0, atol=atol)


PLAIN = [(3, "any sizes", "packed"), (2, "head-tail", "whole"), (3, "head-tail", "packed")]


@pytest.mark.parametrize(
    ("world_size", "kind", "packed"),
    some(*PLAIN, of=pairs((1, 2, 3, 4), KINDS, EDGES, also=PLAIN)),
)
def test_equals_torch_on_each_document(
    ranks: Ranks, world_size: int, kind: str, packed: str
) -> None:
    ranks.run(world_size, runs, kind, packed)


@exhaustive
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("packed", EDGES)
def test_dtypes(ranks: Ranks, dtype: torch.dtype, packed: str) -> None:
    ranks.run(2, runs, "equal", packed, dtype)


@pytest.mark.ranks(2)
def test_refuses_what_does_not_fit(group: dist.ProcessGroup) -> None:
    x, weight, number = torch.randn(2, 3, 8), torch.randn(3, 4), 3
    good = partial(symm_cp.causal_convolution, x=x, weight=weight, group=group)
    wrong: list[Wrong] = [
        (TypeError, "weight is 3, must be a tensor", {"weight": number}),
        (TypeError, "x is torch.int64, must be float64", {"x": x.long()}),
        (TypeError, "weight is torch.float64 on cpu, x torch.float32", {"weight": weight.double()}),
        (ValueError, r"weight \[4, 4\] must be \(channels, taps\)", {"weight": torch.ones(4, 4)}),
        (ValueError, r"bias has shape \[2\], must be \[3\]", {"bias": torch.ones(2)}),
        (ValueError, "must ascend from 0 to the 16", {"cu_seqlens": [0, 8]}),
        (TypeError, "a sequence of ints", {"cu_seqlens": [0.0, 16.0]}),
        (ValueError, r"sizes=\[9, 7\] must have 2", {"cu_seqlens": [0, 16], "sizes": [9, 7]}),
    ]
    check_refusals(group, good, wrong, "causal_convolution")
    edges = [0, 5 + group.rank(), 16]
    with pytest.raises(RuntimeError, match=r"differ between .* in cu_seqlens"):
        good(cu_seqlens=edges)
    good()
