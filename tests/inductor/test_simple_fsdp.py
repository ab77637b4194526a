"""torchtitan's simple FSDP: sharded parameters that a parametrization gathers, in one graph."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.utils import parametrize

from symm_cp import inductor
from symm_cp.inductor.decisions import recording
from tests.context_parallel.common import mesh_of
from tests.inductor.graphs import without_kernels

WIDTH, LAYERS = 16, 2


class Gathered(nn.Module):
    """Gathers a sharded parameter, and averages its gradient over the ranks."""

    def forward(self, parameter: DTensor) -> torch.Tensor:
        whole = parameter.redistribute(placements=[Replicate()])
        return whole.to_local(grad_placements=[Partial("avg")])


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(x)))


@pytest.mark.parametrize("bucketed", [False, True])
@pytest.mark.ranks(2)
def test_simple_fsdp(group: dist.ProcessGroup, bucketed: bool) -> None:
    seed = int(torch.randint(1 << 30, ()))
    torch._dynamo.reset()
    torch.manual_seed(seed)
    alone = nn.Sequential(*(FeedForward() for _ in range(LAYERS))).double()
    batch = torch.randn(group.size(), 6, WIDTH, dtype=torch.float64)
    expected = alone(batch)
    expected.mean().backward()
    model, mesh = copy.deepcopy(alone), mesh_of(group)
    model.zero_grad()
    for module in [m for m in model.modules() if isinstance(m, nn.Linear)]:
        sharded = distribute_tensor(module.weight.data, mesh, [Shard(0)])
        module.weight = nn.Parameter(sharded)
        parametrize.register_parametrization(module, "weight", Gathered(), unsafe=True)
    buckets = {f"bucket_{kind}_fx": "all" for kind in ("all_gathers", "reduce_scatters")}
    options = buckets if bucketed else {}
    with without_kernels(**options), inductor.enable(), recording() as report:
        result = torch.compile(model, fullgraph=True)(batch[group.rank()])
        result.mean().backward()
    torch._dynamo.reset()
    torch.testing.assert_close(result, expected[group.rank()])
    for mine, other in zip(model.parameters(), alone.parameters(), strict=True):
        assert isinstance(mine.grad, DTensor)
        torch.testing.assert_close(mine.grad.full_tensor(), other.grad)
    # Gradients are products, which are reduced as they are computed. The gathered weights are right
    # operands, so torch's op gathers them.
    fused = [decision.fused_into for decision in report.fused]
    assert fused == ["fused_matmul_reduce_scatter"] * 2 * LAYERS, report
    assert len(report.left) == 2 * LAYERS, report
    for left in report.left:
        assert "takes the gathered tensor as its right operand" in left.reason, report
