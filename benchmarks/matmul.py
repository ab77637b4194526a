"""Fused matmul ops of large matrices against the matmul alone and against unfused torch.

python benchmarks/matmul.py --ranks 2 --json benchmarks/results/matmul.json
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import symm_cp
from benchmarks.harness import Case, main
from symm_cp.commands.bench import jobs
from symm_cp.commands.bench.jobs import Setting
from symm_cp.commands.harness.measure import FUSED, IN_PLACE, LIMIT

M, K, N = 4096, 4096, 1024


def _gathered_case(setting: Setting) -> Case:
    """Also returns the gathered input; the limit copies it."""
    shard, weight = setting.normal(M, K), setting.normal(K, N, scale=K**-0.5)
    whole, shared = setting.whole(shard), setting.symmetric(shard)

    def fused(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return symm_cp.all_gather_matmul(x, weight, group=setting.group, return_gathered=True)

    def check() -> None:
        for x in (shard, shared):
            full, result = fused(x)
            assert torch.equal(full, whole)
            setting.compare(result, whole @ weight)

    variants = {
        LIMIT: lambda: (whole.clone(), whole @ weight),
        FUSED: lambda: fused(shard),
        IN_PLACE: lambda: fused(shared),
    }
    return Case("", variants, check)


def cases(group: dist.ProcessGroup) -> Iterator[Case]:
    """Yields all cases."""
    unfused = jobs.unfused_groups(group)
    for dtype in (torch.float32, torch.bfloat16):
        setting = Setting(group, unfused, dtype)
        for name, make in (
            ("all_gather_matmul {}", partial(jobs.gather_matmul, setting, M, K, N)),
            ("all_gather_matmul {}, return_A", partial(_gathered_case, setting)),
            ("matmul_reduce_scatter {}", partial(jobs.matmul_scatter, setting, M, K, N)),
            ("matmul_all_reduce {}", partial(jobs.matmul_all_reduce, setting, M, K, N)),
        ):
            yield replace(make(), name=name.format(str(dtype)[6:]), repetitions=9)


if __name__ == "__main__":
    main(cases, __doc__)
