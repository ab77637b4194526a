"""transformers' own tensor parallelism, unchanged, over the backend symm_cp: as in one process."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, debug

from symm_cp.testing import Ranks
from tests.backend.world import world
from tests.exhaustive import some
from tests.tensor_parallel.models import FAMILIES, config_of, save, tokens_of


def load_in_parallel(folder: str, group: dist.ProcessGroup, **options: Any) -> nn.Module:
    """`from_pretrained(tp_plan="auto")`, as a program that a launcher started calls it."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    rank = str(group.rank())
    ids = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": str(group.size())}
    # It asks whether accelerate is installed, which is used only where a rank has several devices.
    installed = mock.patch("transformers.integrations.accelerate.is_accelerate_available")
    with mock.patch.dict(os.environ, ids), installed:
        config = DistributedConfig(tp_plan="auto")
        return AutoModelForCausalLM.from_pretrained(folder, distributed_config=config, **options)


def whole(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@contextlib.contextmanager
def own_meshes() -> Iterator[None]:
    """DTensor remembers meshes, and would take one of another world for an equal one of this."""
    debug._clear_sharding_prop_cache()
    yield
    debug._clear_sharding_prop_cache()


def runs_as_in_one_process(group: dist.ProcessGroup, family: str, folder: str) -> None:
    from transformers import AutoModelForCausalLM

    with world(group, "symm_cp") as inner, own_meshes():
        if inner.rank() == 0:
            save(family, folder)
        dist.barrier()
        options = {
            "dtype": "auto",
            "experts_implementation": config_of(family)._experts_implementation,
        }
        model = load_in_parallel(folder, inner, **options)
        assert any(isinstance(p, DTensor) for p in model.parameters())
        alone = AutoModelForCausalLM.from_pretrained(folder, **options)
        tokens = tokens_of(alone)
        ours, dense = (m(tokens, labels=tokens, use_cache=False) for m in (model, alone))
        # The rotary embedding and the norms of transformers are computed in float32.
        torch.testing.assert_close(ours.logits, dense.logits, rtol=1e-5, atol=1e-6)
        for m, out in ((model, ours), (alone, dense)):
            m.zero_grad()
            out.loss.backward()
        for (name, mine), other in zip(model.named_parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(
                whole(mine.grad), whole(other.grad), rtol=1e-5, atol=1e-6,
                msg=lambda m, name=name: f"{name}: {m}",
            )  # fmt: skip
        made = [m.generate(tokens, max_new_tokens=5, do_sample=False) for m in (model, alone)]
        assert torch.equal(*made)


@pytest.mark.parametrize(
    ("family", "world_size"),
    some(("llama", 2), of=[(family, size) for family in FAMILIES for size in (2, 4)]),
)
def test_auto_plan(ranks: Ranks, family: str, world_size: int, tmp_path: Path) -> None:
    ranks.run(world_size, runs_as_in_one_process, family, str(tmp_path))
