"""Fused matmul ops against the matmul alone, unfused torch, and unfused torch's communication.

python benchmarks/matmul.py --ranks 2 --json benchmarks/results/matmul.json
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import symm_cp
from benchmarks.harness import Case, main
from benchmarks.rivals import unfused_groups
from symm_cp.ops.common import unfused_all_gather, unfused_reduce_scatter
from symm_cp.ops.matmul.all_reduce import unfused_all_reduce

M, K, N = 4096, 4096, 1024


def symmetric(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Returns a copy in symmetric memory."""
    copy = symm_mem.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    symm_mem.rendezvous(copy, group)
    return copy.copy_(tensor)


def _gather_cases(group: dist.ProcessGroup, dtype: torch.dtype) -> Iterator[Case]:
    shard = torch.randn(M, K).to(dtype)
    shared = symmetric(shard, group)
    weight = torch.randn(K, N).to(dtype)
    gathered = unfused_all_gather(shard, 0, group.group_name)
    baselines = unfused_groups(group)

    # Every variant allocates its results, as an op does.
    def limit() -> torch.Tensor:
        return gathered @ weight

    def limit_and_copy() -> object:
        return gathered.clone(), limit()

    def unfused(name: str) -> torch.Tensor:
        return unfused_all_gather(shard, 0, name) @ weight

    def fused(a: torch.Tensor, return_gathered: bool) -> object:
        return symm_cp.all_gather_matmul(
            a, weight, gather_dim=0, group=group, return_gathered=return_gathered
        )

    def check() -> None:
        full, result = fused(shared, True)  # type: ignore[misc]
        torch.testing.assert_close(full, gathered)
        torch.testing.assert_close(result, limit(), rtol=2e-2, atol=2e-1)

    name = f"all_gather_matmul {str(dtype)[6:]}"
    yield Case(
        name,
        {
            "matmul alone": limit,
            "fused, symmetric input": lambda: fused(shared, False),
            "fused, plain input": lambda: fused(shard, False),
            **{label: partial(unfused, over) for label, over in baselines.items()},
        },
        check,
        repetitions=9,
    )
    yield Case(
        f"{name}, return_A",
        {
            "matmul and memcpy": limit_and_copy,
            "fused, symmetric input": lambda: fused(shared, True),
            "fused, plain input": lambda: fused(shard, True),
        },
        repetitions=9,
    )


def _scatter_case(group: dist.ProcessGroup, dtype: torch.dtype) -> Case:
    ranks, baselines = group.size(), unfused_groups(group)
    a = torch.randn(ranks * M, K).to(dtype)
    weight = torch.randn(K, N).to(dtype)

    def unfused(name: str) -> torch.Tensor:
        return unfused_reduce_scatter(a @ weight, "sum", 0, name)

    def fused() -> torch.Tensor:
        return symm_cp.matmul_reduce_scatter(a, weight, scatter_dim=0, group=group)

    def check() -> None:
        for name in baselines.values():
            torch.testing.assert_close(fused(), unfused(name), rtol=4e-2, atol=5e-1)

    return Case(
        f"matmul_reduce_scatter {str(dtype)[6:]}",
        {
            "matmul alone": lambda: a @ weight,
            "fused": fused,
            **{label: partial(unfused, over) for label, over in baselines.items()},
        },
        check,
        repetitions=9,
    )


def _all_reduce_case(group: dist.ProcessGroup, dtype: torch.dtype) -> Case:
    """Few rows are in few_rows.py."""
    name, baselines = group.group_name, unfused_groups(group)
    a, weight = torch.randn(M, K).to(dtype), torch.randn(K, N).to(dtype)
    all_reduce = torch.ops.symm_mem.one_shot_all_reduce.default

    def unfused(over: str) -> torch.Tensor:
        return unfused_all_reduce(a @ weight, "sum", over)

    def fused() -> torch.Tensor:
        return symm_cp.matmul_all_reduce(a, weight, group=group)

    def check() -> None:
        for over in baselines.values():
            torch.testing.assert_close(fused(), unfused(over), rtol=4e-2, atol=5e-1)

    return Case(
        f"matmul_all_reduce {str(dtype)[6:]}",
        {
            "matmul alone": lambda: a @ weight,
            "fused": fused,
            "matmul, native all-reduce": lambda: all_reduce(a @ weight, "sum", name),
            **{label: partial(unfused, over) for label, over in baselines.items()},
        },
        check,
        repetitions=9,
    )


def cases(group: dist.ProcessGroup) -> Iterator[Case]:
    """Yields all cases."""
    for dtype in (torch.float32, torch.bfloat16):
        yield from _gather_cases(group, dtype)
        yield _scatter_case(group, dtype)
        yield _all_reduce_case(group, dtype)


if __name__ == "__main__":
    main(cases, __doc__)
