"""Prefix-LM masks: all queries see the first keys, the limits of the mask hold for the others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import symm_cp
from symm_cp.schedule import Mask, head_tail, sequential
from symm_cp.schedule.tiles import seen_by_peers
from symm_cp.testing import Ranks
from tests.attention_reference import Problem, check
from tests.exhaustive import some

BATCH, LENGTH = 3, 48


def visible(prefixes: torch.Tensor, left: int | None) -> torch.Tensor:
    """(B or 1, 1, S, S)."""
    position = torch.arange(LENGTH)
    offset = position - position.unsqueeze(1)
    limits = (offset <= 0) & (offset >= -(LENGTH if left is None else left))
    return limits | (position < prefixes.view(-1, 1, 1, 1))


def attends(group: dist.ProcessGroup, seed: int, method: str, backend: str | None) -> None:
    torch._dynamo.reset()
    generator = torch.Generator().manual_seed(seed)

    def draw(heads: int) -> torch.Tensor:
        shape = (BATCH, heads, LENGTH, 8)
        return torch.randn(shape, dtype=torch.float64, generator=generator)

    q, k, v, grad_out = draw(4), draw(2), draw(2), draw(4)
    balancer = symm_cp.HeadTail(LENGTH, group.size())
    rows = balancer.positions(group.rank())

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Any:
        return symm_cp.all_gather_attention(
            q, k, v, group=group, is_causal=True, enable_gqa=True, load_balancer=balancer,
            method=method, return_lse=True, **options,
        )  # fmt: skip

    function = attend if backend is None else torch.compile(attend, backend=backend, fullgraph=True)
    each = torch.tensor([0, 17, LENGTH])
    for prefixes, left in ((each, None), (5, None), (each.int(), 6)):
        whole = torch.tensor([prefixes]) if isinstance(prefixes, int) else prefixes
        problem = Problem(q, k, v, visible(whole, left), grad_out)
        exact = problem.solve(torch.float64)
        parts = [t[:, :, rows].clone().requires_grad_() for t in (q, k, v)]
        out, lse = function(*parts, prefix_lengths=prefixes, window_left=left)
        grads = torch.autograd.grad(out, parts, grad_out[:, :, rows])
        for name, found in zip(("out", "lse", "q", "k", "v"), (out, lse, *grads), strict=True):
            check(name, found, exact[name], exact[name], rows, torch.float64)


@pytest.mark.parametrize("world_size", some(2, 3, of=[1, 2, 3, 4]))
@pytest.mark.parametrize("method", ["allgather", "ulysses"])
def test_forward_and_backward(ranks: Ranks, world_size: int, method: str) -> None:
    ranks.run(world_size, attends, int(torch.randint(1 << 30, ())), method, None)


@pytest.mark.parametrize("backend", some("aot_eager", of=["aot_eager", "inductor"]))
def test_compiled(ranks: Ranks, backend: str) -> None:
    ranks.run(2, attends, int(torch.randint(1 << 30, ())), "allgather", backend)


def refused(group: dist.ProcessGroup) -> None:
    q = torch.randn(1, 2, 6, 4)
    options: dict[str, Any] = {"group": group, "is_causal": True}
    with pytest.raises(TypeError, match="prefix_lengths must be a tensor or an int, is 2"):
        symm_cp.all_gather_attention(q, q, q, prefix_lengths=2.5, **options)
    with pytest.raises(ValueError, match=r"prefix_lengths=\[-1\] must be between 0 and"):
        symm_cp.all_gather_attention(q, q, q, prefix_lengths=-1, **options)
    edges = [0, 4, 6 * group.size()]
    with pytest.raises(ValueError, match="prefix_lengths and document_edges are both given"):
        symm_cp.all_gather_attention(q, q, q, prefix_lengths=2, cu_seqlens=edges, **options)
    assert symm_cp.all_gather_attention(q, q, q, prefix_lengths=2, **options).isfinite().all()


def test_what_is_refused(ranks: Ranks) -> None:
    ranks.run(2, refused)


def test_peers_are_sent_the_prefix_and_no_more() -> None:
    window = Mask(left=2, right=0, prefix=6)
    # Rank 1's queries see the prefix and the two keys before them: rows 0 to 16 hold both.
    assert seen_by_peers(sequential(32, 2), (window,)) == ((0, 16), (0, 0))
    assert seen_by_peers(sequential(32, 4), (window,)) == ((0, 8), (6, 8), (6, 8), (0, 0))
    assert seen_by_peers(head_tail(32, 2), (Mask(right=0, prefix=6),)) == ((0, 8), (0, 16))
