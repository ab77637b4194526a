"""Fused matmul-all-reduce against dense float64 references, on all ranks together."""

from __future__ import annotations

import itertools

import torch
import torch.distributed as dist

import symm_cp
from tests.pool import Ranks


def quick(group: dist.ProcessGroup) -> None:
    W, rank = group.size(), group.rank()
    for dtype, op in itertools.product((torch.float32, torch.bfloat16), ("sum", "avg")):
        As = [torch.randn(2, 5, 3 * r, dtype=torch.float32).to(dtype) for r in range(W)]
        Bs = [torch.randn(3 * r, 7).to(dtype) for r in range(W)]
        bias = torch.randn(7).to(dtype)
        out = symm_cp.matmul_all_reduce(As[rank], Bs[rank], bias, reduce_op=op, group=group)
        products = [a.double() @ b.double() for a, b in zip(As, Bs, strict=True)]
        exact = sum(products) / (W if op == "avg" else 1) + bias.double()
        torch.testing.assert_close(out.double(), exact, rtol=3e-2, atol=3e-2)
    A8 = torch.randn(4, 16).to(torch.float8_e4m3fn)
    B8 = torch.randn(16, 16).to(torch.float8_e4m3fn).t()
    one, wide = torch.tensor(1.0), torch.float32
    out = symm_cp.scaled_matmul_all_reduce(A8, B8, one, one, group=group, out_dtype=wide)
    torch.testing.assert_close(out, (A8.float() @ B8.float()) * W)


def test_quick(ranks: Ranks) -> None:
    ranks.run(2, quick)
    ranks.run(3, quick)
