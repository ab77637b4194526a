"""Features and heads that the world size does not divide, against dense modules."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module

from symm_cp.tensor_parallel import FusedColwiseGroup, FusedColwiseParallel, FusedRowwiseParallel
from symm_cp.tensor_parallel.features import Features, chunks
from tests.exhaustive import some
from tests.tensor_parallel.common import leaf, local, mesh_of, own, same, same_grads, whole

D = 4  # the dimension of a head
LAYOUTS = {"sequence": Shard(1), "replicated": Replicate()}


class Attention(nn.Module):
    """Grouped-query attention with `queries` heads for each key head; shapes give head counts."""

    def __init__(self, dim: int, keys: int, queries: int) -> None:
        super().__init__()
        self.wq = nn.Linear(dim, keys * queries * D)
        self.wk = nn.Linear(dim, keys * D)
        self.wv = nn.Linear(dim, keys * D, bias=False)
        self.wo = nn.Linear(keys * queries * D, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (w(x).unflatten(-1, (-1, D)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        out = nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return self.wo(out.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(dim, hidden), nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(nn.functional.silu(self.w1(x)) * self.w3(x))


def plan(queries: int, layout: str) -> dict[str, Any]:
    kept = LAYOUTS[layout]
    units = {"wq": queries * D, "wk": D, "wv": D}
    return {
        "0": FusedColwiseGroup(tuple(units), multiple_of=units, input_layouts=kept),
        "0.wo": FusedRowwiseParallel(multiple_of=queries * D, output_layouts=kept),
        "1": FusedColwiseGroup(("w1", "w3"), input_layouts=kept),
        "1.w2": FusedRowwiseParallel(output_layouts=kept),
    }


CASES = [
    (3, 5, 2, 7, "sequence", False),
    (3, 5, 2, 7, "replicated", False),
    (4, 7, 1, 5, "sequence", False),  # the last rank has no hidden features
    (4, 7, 1, 5, "replicated", False),
    (3, 3, 1, 2, "replicated", False),
    (2, 3, 2, 5, "sequence", False),
    (2, 3, 2, 5, "replicated", False),
    (1, 3, 2, 5, "sequence", False),
    (3, 5, 2, 7, "sequence", True),
    (3, 5, 2, 7, "replicated", True),
]


@pytest.mark.parametrize(
    ("world_size", "keys", "queries", "hidden", "layout", "compiled"),
    some(*CASES[:4], of=CASES),
)
@pytest.mark.ranks
def test_trains(
    group: dist.ProcessGroup,
    world_size: int,
    keys: int,
    queries: int,
    hidden: int,
    layout: str,
    compiled: bool,
) -> None:
    width, sequence = 6, 2 * world_size
    dim = 1 if layout == "sequence" else None
    dense = nn.Sequential(Attention(width, keys, queries), FeedForward(width, hidden)).double()
    model = parallelize_module(copy.deepcopy(dense), mesh_of(group), plan(queries, layout))
    run: Any = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.05, eps=1e-3) for m in (dense, model)]
    for _ in range(2):
        x = torch.randn(2, sequence, width, dtype=torch.float64)
        x_all, x_own = leaf(x), leaf(own(x, group, dim))
        expected, actual = dense(x_all), run(x_own)
        expected.square().sum().backward()
        actual.square().sum().backward()
        same(actual, own(expected, group, dim))
        same(whole(x_own.grad), own(whole(x_all.grad), group, dim))
        same_grads(model, dense)
        norms = [nn.utils.clip_grad_norm_(m.parameters(), 0.1) for m in (dense, model)]
        same(whole(norms[1]), norms[0])
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for name, parameter in model.named_parameters():
        same(parameter.full_tensor(), dense.get_parameter(name).detach())
    # No padding anywhere: every rank stores what torch.chunk gives it.
    parts = dense[1].w1.weight.chunk(world_size)
    rows = len(parts[group.rank()]) if group.rank() < len(parts) else 0
    assert local(model[1].w1.weight).shape == (rows, width)


def test_features() -> None:
    heads = [Features.divided(12 * 64, rank, 5, 64) for rank in range(5)]
    assert [f.count for f in heads] == [192, 192, 128, 128, 128]
    assert chunks(32001, 5).sizes == (6401, 6401, 6401, 6401, 6397)
    assert chunks(5, 4).sizes == (2, 2, 1, 0)
    for length in range(1, 20):
        for ranks in range(1, 6):
            parts = [len(p) for p in torch.empty(length).chunk(ranks)]
            assert list(chunks(length, ranks).sizes) == parts + [0] * (ranks - len(parts))
    assert Features.divided(24, 0, 3, 4).as_stored
    assert not Features.divided(20, 0, 3, 4).as_stored


def test_features_that_ranks_share() -> None:
    """Each rank repeats its key heads equally often, to match its query heads."""
    for keys, shared_by, ranks in (
        (1, 4, 3),
        (2, 4, 3),
        (2, 4, 4),
        (2, 3, 4),
        (3, 2, 5),
        (2, 4, 8),
    ):
        start = 0
        for rank in range(ranks):
            mine = Features.divided(keys * 8, rank, ranks, 8, shared_by)
            query = Features.divided(keys * shared_by * 8, rank, ranks, 8)
            needed = [(start + i) // shared_by for i in range(query.count // 8)]
            start += len(needed)
            taken = [run.start // 8 for run in mine.shared]
            assert all(
                run == range(8 * head, 8 * head + 8)
                for run, head in zip(mine.shared, taken, strict=True)
            )
            repeats = query.count // mine.count
            assert [head for head in taken for _ in range(repeats)] == needed
            assert mine.stored == chunks(keys * 8, ranks)
            assert not mine.as_stored
    # Enough for all ranks: nothing is shared.
    assert Features.divided(32, 1, 2, 8, 4) == Features.divided(32, 1, 2, 8)


@pytest.mark.ranks(3)
def test_errors(group: dist.ProcessGroup) -> None:
    mesh = mesh_of(group)
    heads = nn.ModuleDict({"wq": nn.Linear(8, 10 * D), "wk": nn.Linear(8, 5 * D)})
    cases: list[tuple[type[Exception], str, nn.Module, Any]] = [
        (ValueError, "out_features=10 is not a multiple of multiple_of=4", nn.Linear(6, 10), D),
        (
            ValueError,
            "has 2 units of multiple_of=4, which is less than one for each of 3 ranks",
            nn.Linear(6, 8),
            D,
        ),
        (
            ValueError,
            "use_local_output=False needs parts of out_features=20 as torch.chunk makes them, "
            r"\[7, 7, 6\], but multiple_of=4 makes \[8, 8, 4\]",
            nn.Linear(6, 20),
            FusedColwiseParallel(multiple_of=D, use_local_output=False),
        ),
        (
            ValueError,
            "same number of units",
            heads,
            FusedColwiseGroup(("wq", "wk"), multiple_of=D),
        ),
        (
            ValueError,
            "wk.out_features=20 is not a multiple of multiple_of=3",
            heads,
            FusedColwiseGroup(("wq", "wk"), multiple_of={"wq": D, "wk": 3}),
        ),
    ]
    for error, message, module, style in cases:
        if isinstance(style, int):
            style = FusedColwiseParallel(multiple_of=style)
        with pytest.raises(error, match=message):
            parallelize_module(module, mesh, style)
        assert not any(isinstance(p, DTensor) for p in module.parameters())
    with pytest.raises(ValueError, match="must have an entry for each of"):
        FusedColwiseGroup(("wq", "wk"), multiple_of={"wq": D})
    with pytest.raises(TypeError, match="multiple_of must be an int"):
        FusedRowwiseParallel(multiple_of=1.5)  # type: ignore[arg-type]
