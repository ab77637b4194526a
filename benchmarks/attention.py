"""Fused context-parallel attention against attention on local keys, and unfused torch.

python benchmarks/attention.py --ranks 2 --json benchmarks/results/attention.json
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.harness import Case, main
from benchmarks.rivals import unfused_groups
from symm_cp.commands.harness.measure import backward_alone
from symm_cp.context_parallel.attention import all_gather_attention
from symm_cp.context_parallel.load_balancers import HeadTail
from symm_cp.ops.common import unfused_all_gather, unfused_reduce_scatter

HEADS, FEATURES = 8, 64
TOKENS = 4096  # of the whole sequence
CURVE = (512, 1024, 2048, 4096, 8192, 16384)

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _shards(group: dist.ProcessGroup, tokens: int, dtype: torch.dtype) -> Tensors:
    size = tokens // group.size()
    q, k, v = (torch.randn(1, HEADS, size, FEATURES).to(dtype) for _ in range(3))
    return q, k, v


class _GatheredKeys(torch.autograd.Function):
    """Unfused: gathers keys or values, and reduce-scatters their gradient."""

    @staticmethod
    def forward(ctx: object, shard: torch.Tensor, group: str) -> torch.Tensor:
        ctx.group = group  # type: ignore[attr-defined]
        return unfused_all_gather(shard, 2, group)

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return unfused_reduce_scatter(grad, "sum", 2, ctx.group), None  # type: ignore[attr-defined]


def _cases(group: dist.ProcessGroup, tokens: int, dtype: torch.dtype) -> Iterator[Case]:
    q, k, v = _shards(group, tokens, dtype)
    name, baselines = group.group_name, unfused_groups(group)
    full = (unfused_all_gather(k, 2, name), unfused_all_gather(v, 2, name))
    balancer = HeadTail(tokens, group.size())

    def fused(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return all_gather_attention(q, k, v, group=group)

    def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return all_gather_attention(q, k, v, group=group, is_causal=True, load_balancer=balancer)

    def unfused(over: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        keys, values = (_GatheredKeys.apply(t, over) for t in (k, v))
        return F.scaled_dot_product_attention(q, keys, values)

    def check() -> None:
        close = {"rtol": 2e-2, "atol": 2e-3} if dtype == torch.bfloat16 else {}
        limit = F.scaled_dot_product_attention(q, *full)
        torch.testing.assert_close(fused(q, k, v), limit, **close)
        for over in baselines.values():
            torch.testing.assert_close(unfused(over, q, k, v), limit, **close)

    label = f"{str(dtype)[6:]}, {tokens} tokens"
    repetitions = 9 if tokens >= 4096 else 25
    with torch.no_grad():
        yield Case(
            f"attention forward {label}",
            {
                "attention alone": lambda: F.scaled_dot_product_attention(q, *full),
                "fused": lambda: fused(q, k, v),
                "fused, causal head-tail": lambda: causal(q, k, v),
                **{label: partial(unfused, over, q, k, v) for label, over in baselines.items()},
            },
            check,
            repetitions,
        )
    yield Case(
        f"attention backward {label}",
        {
            "attention alone": backward_alone(F.scaled_dot_product_attention, q, *full),
            "fused": backward_alone(fused, q, k, v),
            "fused, causal head-tail": backward_alone(causal, q, k, v),
            **{
                label: backward_alone(partial(unfused, over), q, k, v)
                for label, over in baselines.items()
            },
        },
        repetitions=repetitions,
    )


def cases(group: dist.ProcessGroup) -> Iterator[Case]:
    """Yields the cases of the README, then the curve over the length."""
    for dtype in (torch.float32, torch.bfloat16):
        yield from _cases(group, TOKENS, dtype)
    for tokens in CURVE:
        if tokens != TOKENS:
            yield from _cases(group, tokens, torch.float32)


if __name__ == "__main__":
    main(cases, __doc__)
