"""`symm-cp tune attention` on simulated GPUs."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
import torch.distributed as dist

from symm_cp import tuning
from symm_cp.commands.bench import parsers, tune
from symm_cp.testing import Ranks
from tests.cuda.simulated import build, simulation
from tests.exhaustive import some


def tunes(group: dist.ProcessGroup, path: str) -> int:
    arguments = f"attention --shapes 8x4x64x2,4x2x32 --ranks {group.size()} --dtype bfloat16"
    parser = argparse.ArgumentParser()
    parsers.tune(parser)
    args = parser.parse_args([*arguments.split(), "--seconds", "0.01", "--out", path])
    with simulation(delays_us=0):
        return tune.run_rank(args, group)


@pytest.mark.parametrize("world_size", some(2, of=[2, 3]))
def test_attention_is_tuned(ranks: Ranks, world_size: int, tmp_path: Path) -> None:
    build()
    path = tmp_path / "tuned.json"
    path.write_text('{"kept": "whole"}')
    assert ranks.run(world_size, tunes, str(path)) == [0] * world_size
    choices = json.loads(path.read_text())
    assert choices.pop("kept") == "whole"
    sizes, kinds = ("1x4x2x8x8x64", "1x2x2x4x4x32"), ("full 1 chunks", "causal 2 chunks")
    assert choices.keys() == {
        f"all_gather_attention bfloat16 {size} {kind}" for size in sizes for kind in kinds
    }
    assert set(choices.values()) <= set(tuning.ATTENTION_WAYS)
