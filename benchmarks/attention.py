"""Fused context-parallel attention against attention on gathered keys, and unfused torch.

python benchmarks/attention.py --ranks 2 --json benchmarks/results/attention.json
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.harness import Case, main
from symm_cp.commands.bench import jobs
from symm_cp.commands.bench.jobs import Setting
from symm_cp.commands.harness.measure import FUSED

HEADS, FEATURES = 8, 64
TOKENS = 4096  # of the whole sequence
CURVE = (512, 1024, 2048, 4096, 8192, 16384)


def _checks(*checks: Callable[[], None]) -> None:
    for check in checks:
        check()


def cases(group: dist.ProcessGroup) -> Iterator[Case]:
    """Yields the cases of the README, then the curve over the length."""
    unfused = jobs.unfused_groups(group)
    wanted = [(TOKENS, torch.float32), (TOKENS, torch.bfloat16)]
    wanted += [(tokens, torch.float32) for tokens in CURVE if tokens != TOKENS]
    for tokens, dtype in wanted:
        sizes = (tokens // group.size(), HEADS, HEADS, FEATURES)
        for label, passes in (("forward", jobs.FORWARD), ("backward", jobs.BACKWARD)):
            setting = Setting(group, unfused, dtype, passes)
            case = jobs.attention(setting, *sizes)
            causal = jobs.attention(setting, *sizes, causal=True)
            case.variants = {**case.variants, "fused, causal head-tail": causal.variants[FUSED]}
            case.name = f"attention {label} {str(dtype)[6:]}, {tokens} tokens"
            case.check = partial(_checks, case.check, causal.check)
            yield case


if __name__ == "__main__":
    main(cases, __doc__)
