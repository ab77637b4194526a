"""`causal_convolution` over parts of any length, against torch's on each document."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import symm_cp
from symm_cp.testing import Ranks
from tests import device
from tests.exhaustive import exhaustive, some

pytestmark = device.devices("cpu", "simulated")

TAPS = 4


def by_document(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, edges: Sequence[int]
) -> torch.Tensor:
    lengths = [end - begin for begin, end in itertools.pairwise(edges)]
    parts = [
        F.conv1d(F.pad(part, (TAPS - 1, 0)), weight.unsqueeze(1), bias, groups=len(weight))
        for part in x.split(lengths, 2)
        if part.shape[2]
    ]
    return torch.cat(parts, 2)


def runs(
    group: dist.ProcessGroup,
    sizes: list[int],
    edges: list[int] | None,
    *,
    biased: bool = True,
    compiled: bool = False,
    dtype: torch.dtype = torch.float64,
) -> None:
    rank, total = group.rank(), sum(sizes)
    x, weight, bias = torch.randn(2, 3, total), torch.randn(3, TAPS), torch.randn(3)
    given = [t.to(dtype) for t in ([x, weight, bias] if biased else [x, weight])]
    leaves = [t.double().requires_grad_() for t in given]
    want = by_document(leaves[0], leaves[1], leaves[2] if biased else None, edges or [0, total])
    weights = torch.randn_like(want)
    wanted, *of_parameters = torch.autograd.grad((want * weights).sum(), leaves)
    mine = [given[0].split(sizes, 2)[rank], *given[1:]]
    mine = [t.clone().requires_grad_() for t in mine]

    def layer(*args: torch.Tensor) -> torch.Tensor:
        return symm_cp.causal_convolution(*args, group=group, cu_seqlens=edges, sizes=sizes)

    if compiled:
        torch._dynamo.reset()
        layer = torch.compile(layer, fullgraph=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = layer(*mine)
    assert out.dtype == dtype
    # A product and a sum for each tap; gradients of parameters are sums over all positions.
    eps = torch.finfo(dtype).eps
    close = {"rtol": 4 * TAPS * eps, "atol": 4 * TAPS * eps * float(want.abs().max())}
    torch.testing.assert_close(out.double(), want.split(sizes, 2)[rank], **close)
    loss = (out * weights.split(sizes, 2)[rank]).sum()
    grad, *own = torch.autograd.grad(loss, mine)
    close["atol"] = 4 * TAPS * eps * float(wanted.abs().max())
    torch.testing.assert_close(grad.double(), wanted.split(sizes, 2)[rank], **close)
    for part, needed in zip(own, of_parameters, strict=True):
        summed = part.double()
        dist.all_reduce(summed, group=group)
        atol = 4 * total * eps * float(needed.abs().max())
        torch.testing.assert_close(summed, needed, rtol=0, atol=atol)


CASES: list[tuple[list[int], list[int] | None]] = [
    ([9], [0, 4, 5, 9]),
    ([8, 8], None),
    ([8, 8], [0, 8, 16]),
    ([5, 2, 9], [0, 3, 4, 4, 8, 13, 16]),
    ([3, 0, 8, 1], [0, 3, 11, 12]),
    ([3, 0, 8, 1], None),
    ([1, 1, 1, 1], [0, 2, 4]),
]


@pytest.mark.parametrize(("sizes", "edges"), some(([5, 2, 9], CASES[3][1]), of=CASES))
def test_equals_torch_on_each_document(
    ranks: Ranks, sizes: list[int], edges: list[int] | None
) -> None:
    ranks.run(len(sizes), runs, sizes, edges)


@exhaustive
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("edges", [None, [0, 5, 16]], ids=["whole", "packed"])
def test_dtypes(ranks: Ranks, dtype: torch.dtype, edges: list[int] | None) -> None:
    ranks.run(2, runs, [8, 8], edges, dtype=dtype)


def refuses(group: dist.ProcessGroup) -> None:
    x, weight, number = torch.randn(2, 3, 8), torch.randn(3, TAPS), 3
    wrong: list[tuple[type[Exception], str, tuple[Any, ...], dict[str, Any]]] = [
        (TypeError, "weight is 3, must be a tensor", (x, number), {}),
        (TypeError, "x is torch.int64, must be float64", (x.long(), weight), {}),
        (TypeError, "weight is torch.float64 on cpu, x torch.float32", (x, weight.double()), {}),
        (ValueError, r"weight \[4, 4\] must be \(channels, taps\)", (x, torch.ones(4, 4)), {}),
        (ValueError, r"bias has shape \[2\], must be \[3\]", (x, weight, torch.ones(2)), {}),
        (ValueError, "must ascend from 0 to the 16", (x, weight), {"cu_seqlens": [0, 8]}),
        (TypeError, "a sequence of ints", (x, weight), {"cu_seqlens": [0.0, 16.0]}),
        (ValueError, r"sizes=\[9, 7\] must have 2", (x, weight),
         {"cu_seqlens": [0, 16], "sizes": [9, 7]}),
    ]  # fmt: skip
    for kind, message, tensors, options in wrong:
        with pytest.raises(kind, match=f"causal_convolution: .*{message}"):
            symm_cp.causal_convolution(*tensors, group=group, **options)
    edges = [0, 5 + group.rank(), 16]
    with pytest.raises(RuntimeError, match=r"differ between .* in cu_seqlens"):
        symm_cp.causal_convolution(x, weight, group=group, cu_seqlens=edges)
    symm_cp.causal_convolution(x, weight, group=group)


def test_refuses_what_does_not_fit(ranks: Ranks) -> None:
    ranks.run(2, refuses)
