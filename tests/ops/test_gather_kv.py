"""`all_gather_kv`: both tensors, any dimension, and a reduce-scatter of both gradients."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import symm_cp
from symm_cp.ops.common import attention_runs
from tests import device
from tests.reference import reduce_scatter

pytestmark = device.devices(*device.NAMES)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.ranks
def test_gathers_and_scatters_gradients(group: dist.ProcessGroup, world_size: int) -> None:
    seed = int(torch.randint(1 << 30, ()))
    W, rank = group.size(), group.rank()
    generator = torch.Generator(device.name()).manual_seed(seed)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        for dim in (2, 0, -1, -3):
            shapes = [[2, 3, 4, 5], [2, 3, 4, 5]]
            if dim % 4 != 3:
                shapes[1][3] = 7  # values have another number of features
            parts = [
                [torch.randn(shape, generator=generator).to(dtype) for _ in range(W)]
                for shape in shapes
            ]
            mine = [p[rank].transpose(0, 1).contiguous().transpose(0, 1) for p in parts]
            key, value = (t.requires_grad_() for t in mine)
            gathered = symm_cp.all_gather_kv(key, value, seq_dim=dim, group=group)
            for got, want in zip(gathered, parts, strict=True):
                assert torch.equal(got, torch.cat(want, dim))
                assert got.is_contiguous()
            grads = [
                [torch.randn(g.shape, generator=generator).to(dtype) for _ in range(W)]
                for g in gathered
            ]
            found = torch.autograd.grad(gathered, (key, value), [g[rank] for g in grads])
            for got, given in zip(found, grads, strict=True):
                reduce_scatter(given, dim)[rank].check(got)


@pytest.mark.ranks(2)
def test_each_call_counts_as_a_run_of_attention(group: dist.ProcessGroup) -> None:
    """A rank in Python, one that records and one that runs a plan count the same runs."""
    key, value = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 3, 5)
    before, first = attention_runs.total(), symm_cp.all_gather_kv(key, value, group=group)
    for number in range(2, 5):
        again = symm_cp.all_gather_kv(key, value, group=group)
        assert attention_runs.total() == before + number
        assert all(torch.equal(*pair) for pair in zip(first, again, strict=True))


@pytest.mark.ranks(2)
def test_refuses_what_does_not_fit(group: dist.ProcessGroup) -> None:
    k = torch.zeros(2, 3, 4, 5)
    with pytest.raises(ValueError, match="seq_dim=4 is out of range"):
        symm_cp.all_gather_kv(k, k, seq_dim=4, group=group)
    with pytest.raises(ValueError, match="the same length of dimension 2"):
        symm_cp.all_gather_kv(k, k[:, :, :3], group=group)
    with pytest.raises(TypeError, match=r"value is torch\.float64"):
        symm_cp.all_gather_kv(k, k.double(), group=group)
    symm_cp.all_gather_kv(k, k, group=group)
