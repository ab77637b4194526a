"""`apply` against the same model in one process: logits, and the gradients of all parameters."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from symm_cp.tensor_parallel import apply
from tests.exhaustive import some
from tests.pool import Ranks
from tests.tensor_parallel.common import mesh_of
from tests.tensor_parallel.models import FAMILIES, model_of, tokens_of


def whole(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def same_gradients(model: nn.Module, dense: nn.Module, rtol: float, atol: float) -> None:
    others = dict(dense.named_parameters())
    for name, mine in model.named_parameters():
        expected = whole(others.pop(name).grad)
        torch.testing.assert_close(
            whole(mine.grad).view_as(expected),  # packed experts have a dimension more
            expected,
            rtol=rtol,
            atol=atol,
            msg=lambda m, name=name: f"{name}: {m}",
        )
    assert not others


def as_in_one_process(
    group: dist.ProcessGroup, family: str, sequence_parallel: bool, **changes: Any
) -> None:
    dense = model_of(family, **changes)
    model = apply(copy.deepcopy(dense), mesh_of(group), sequence_parallel=sequence_parallel)
    assert all(isinstance(p, DTensor) for p in model.parameters())
    split = [p for p in model.parameters() if not p.placements[0].is_replicate()]
    assert split
    assert all(p.to_local().numel() * group.size() == p.numel() for p in split)
    # Norms and rotary embeddings of transformers compute in float32, routers choose by them.
    single = next(dense.parameters()).dtype == torch.float32
    limits = {"rtol": 1e-4, "atol": 1e-5} if single else {"rtol": 1e-6, "atol": 1e-7}
    for _ in range(2):  # gradients add up
        tokens = tokens_of(dense)
        outputs = [m(tokens, labels=tokens, use_cache=False) for m in (model, dense)]
        torch.testing.assert_close(outputs[0].logits, outputs[1].logits, **limits)
        for output in outputs:
            output.loss.backward()
    same_gradients(model, dense, **limits)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize(
    ("family", "world_size"),
    some(
        ("llama", 2),
        ("qwen3", 2),
        of=[(family, size) for family in FAMILIES for size in (1, 2, 4)],
    ),
)
def test_models(ranks: Ranks, family: str, world_size: int, sequence_parallel: bool) -> None:
    ranks.run(world_size, as_in_one_process, family, sequence_parallel)
