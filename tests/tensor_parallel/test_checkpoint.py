"""Loading and saving of parallel models: from transformers' files, and at other world sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from symm_cp.tensor_parallel import apply
from tests.exhaustive import some
from tests.pool import Ranks
from tests.tensor_parallel import models
from tests.tensor_parallel.common import mesh_of


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def on_meta(family: str, **changes: Any) -> nn.Module:
    with torch.device("meta"):
        return models.built(family, **changes)


def loads_from_transformers(group: dist.ProcessGroup, family: str, folder: str) -> None:
    dense = models.model_of(family)
    if group.rank() == 0:
        dense.save_pretrained(folder, max_shard_size="40KB")  # several files
    dist.barrier(group)
    model = apply(on_meta(family), mesh_of(group), checkpoint=folder)
    assert not any(t.is_meta for t in (*model.parameters(), *model.buffers()))
    tokens = models.tokens_of(dense)
    with torch.no_grad():
        logits = [m(tokens, use_cache=False).logits for m in (model, dense)]
    torch.testing.assert_close(*logits, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("family", "world_size"),
    some(
        ("llama", 2),
        ("mixtral", 2),
        of=[(family, size) for family in models.FAMILIES for size in (1, 2, 4)],
    ),
)
def test_loads_what_transformers_saved(
    ranks: Ranks, family: str, world_size: int, tmp_path: Path
) -> None:
    ranks.run(world_size, loads_from_transformers, family, str(tmp_path))
