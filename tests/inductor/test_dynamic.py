"""Sequences of dynamic length."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed._functional_collectives import all_gather_tensor_autograd as gather

from symm_cp import inductor
from symm_cp.testing import Ranks


def lengths(group: dist.ProcessGroup) -> None:
    weight = (torch.randn(16, 96) * 0.1).requires_grad_()

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, gather(k, 2, group), gather(v, 2, group))

    def project(x: torch.Tensor) -> torch.Tensor:
        return attend(*((x @ weight).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)))

    x = torch.randn(1, 12, 16, requires_grad=True)
    torch._dynamo.mark_dynamic(x, 1)
    report = inductor.explain(project, x)
    assert len(report.fused) == 1, str(report)
    assert not report.left, str(report)

    parts = [torch.randn(1, 2, 12, 16, requires_grad=True) for _ in range(3)]
    for part in parts:
        torch._dynamo.mark_dynamic(part, 2)
    report = inductor.explain(attend, *parts)
    assert not report.fused, str(report)
    # Nothing in the graph says that keys and values have the same length.
    assert "may have sizes that do not match" in str(report)


@pytest.mark.exhaustive
def test_lengths_that_are_not_known(ranks: Ranks) -> None:
    ranks.run(2, lengths, timeout=300)
