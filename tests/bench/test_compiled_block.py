"""The benchmark of torchtitan's block: variants compute the same, and as much as the limit."""

from __future__ import annotations

from collections import Counter
from unittest import mock

import torch
import torch._inductor.config as inductor_config
import torch.distributed as dist
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import compiled_block
from benchmarks.compile import TORCHS_OVERLAP
from benchmarks.compiled_block import FEW, SMALL
from symm_cp.inductor.decisions import recording
from symm_cp.testing import Ranks
from tests.exhaustive import exhaustive
from tests.inductor.titan import Block, rotation


def variants(group: dist.ProcessGroup) -> Counter[str]:
    """Runs all of them at a small size, without generated code; returns what was fused."""
    small = mock.patch.multiple(compiled_block, SIZES=SMALL, TOKENS=FEW)
    plain = inductor_config.patch(fallback_by_default=True, force_disable_caches=True)
    with small, plain, recording() as report:
        training, compilation = compiled_block.cases(group, TORCHS_OVERLAP)
        training.check()
        for case in (training, compilation):
            for step in case.variants.values():
                step()
    return Counter(str(decision.fused_into) for decision in report.fused)


@exhaustive
def test_variants_compute_the_same(ranks: Ranks) -> None:
    # One step of the benchmark, one compilation of it with the passes.
    of_block = {"fused_all_gather_matmul": 4, "fused_matmul_reduce_scatter": 4}
    expected = {name: 2 * count for name, count in of_block.items()}
    with ranks.own(2, variants) as running:
        outcomes = running.outcomes(300)
    assert [(each.failure, each.result) for each in outcomes] == [("", expected)] * 2


def operations(block: nn.Module, tokens: int, of_all: int) -> int:
    rotated = rotation(of_all, SMALL.features, torch.float32)
    with FlopCounterMode(display=False) as counter:
        block(torch.randn(1, tokens, SMALL.width, requires_grad=True), rotated).sum().backward()
    return counter.get_total_flops()


def limit(group: dist.ProcessGroup) -> tuple[int, int]:
    alone = compiled_block._Alone(SMALL, group)
    return operations(alone, FEW // group.size(), FEW), operations(Block(SMALL), FEW, FEW)


def test_the_limit_computes_its_share(ranks: Ranks) -> None:
    for alone, whole in ranks.run(2, limit):
        assert alone * 2 == whole > 0
