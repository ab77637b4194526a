"""An example: a block in the style of Mamba 2 over a spread sequence, by two ops.

A causal convolution takes a halo. The recurrence takes the state of the ranks before this one, and
nothing is computed twice: a rank's initial state, decayed, is only added to its states.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import symm_cp
from symm_cp.testing import Ranks
from tests.exhaustive import some

HIDDEN, HEADS, WIDTH, STATE, KERNEL, CHUNK = 12, 3, 4, 5, 4, 4


class Block(nn.Module):
    """S positions of this rank; H heads of P features with states (P, N); chunks of C positions."""

    def __init__(self) -> None:
        super().__init__()
        inner = HEADS * WIDTH
        self.inputs = nn.Linear(HIDDEN, 2 * inner + 2 * STATE + HEADS, bias=False)
        self.convolution = nn.Conv1d(
            inner + 2 * STATE, inner + 2 * STATE, KERNEL, groups=inner + 2 * STATE
        )
        self.a_log = nn.Parameter(torch.rand(HEADS))
        self.skip = nn.Parameter(torch.rand(HEADS))
        self.output = nn.Linear(inner, HIDDEN, bias=False)

    def forward(
        self, hidden: torch.Tensor, group: dist.ProcessGroup, sizes: list[int]
    ) -> torch.Tensor:
        inner = HEADS * WIDTH
        gate, mixed, steps = self.inputs(hidden).split([inner, inner + 2 * STATE, HEADS], -1)
        before = symm_cp.exchange_halo(mixed.transpose(1, 2), KERNEL - 1, group=group, sizes=sizes)
        mixed = F.silu(self.convolution(before)).transpose(1, 2)
        x, keys, queries = mixed.split([inner, STATE, STATE], -1)
        x, steps = x.unflatten(-1, (HEADS, WIDTH)), F.softplus(steps)
        y = recurrence(x * steps[..., None], -steps * self.a_log.exp(), keys, queries, group)
        y = (y + x * self.skip[:, None]).flatten(2)
        return self.output(F.rms_norm(y, (inner,)) * F.silu(gate))


def recurrence(
    x: torch.Tensor,
    decay: torch.Tensor,
    keys: torch.Tensor,
    queries: torch.Tensor,
    group: dist.ProcessGroup,
) -> torch.Tensor:
    """h[t] = exp(decay[t]) h[t-1] + x[t] keys[t]^T; returns h[t] queries[t]: (B, S, H, P)."""
    length = x.shape[1]
    after = -length % CHUNK
    x = F.pad(x, (0, 0, 0, 0, 0, after)).unflatten(1, (-1, CHUNK))
    decay = F.pad(decay, (0, 0, 0, after)).unflatten(1, (-1, CHUNK)).cumsum(2)
    keys, queries = (F.pad(t, (0, 0, 0, after)).unflatten(1, (-1, CHUNK)) for t in (keys, queries))
    # Within chunks: (B, chunks, C, C, H).
    above = torch.ones(CHUNK, CHUNK, dtype=torch.bool).triu(1)[:, :, None]
    pairs = (decay[:, :, :, None] - decay[:, :, None]).masked_fill(above, -torch.inf).exp()
    within = torch.einsum("bcin,bcjn,bcijh,bcjhp->bcihp", queries, keys, pairs, x)
    # The state that each chunk adds, and the part of it left at the end of each later chunk.
    to_end = (decay[:, :, -1:] - decay).exp()
    added = torch.einsum("bcjh,bcjhp,bcjn->bchpn", to_end, x, keys)
    total = F.pad(decay[:, :, -1].cumsum(1), (0, 0, 1, 0))  # (B, chunks + 1, H), from 0 on
    apart = total[:, :, None] - total[:, None, 1:]
    chunks = added.shape[1]
    later = torch.ones(chunks + 1, chunks, dtype=torch.bool).triu()[:, :, None]
    states = torch.einsum("bijh,bjhpn->bihpn", apart.masked_fill(later, -torch.inf).exp(), added)
    # The state of this rank's part alone, and how much is left of the one before.
    left = total.exp()[..., None, None]
    begin = symm_cp.scan_states(states[:, -1], decay=left[:, -1], group=group)
    states = states + left * begin[:, None]
    between = torch.einsum("bcin,bcih,bchpn->bcihp", queries, decay.exp(), states[:, :-1])
    return (within + between).flatten(1, 2)[:, :length]


def in_one_process(block: Block, hidden: torch.Tensor) -> torch.Tensor:
    """The same block in one process, position by position."""
    inner = HEADS * WIDTH
    gate, mixed, steps = block.inputs(hidden).split([inner, inner + 2 * STATE, HEADS], -1)
    mixed = F.silu(block.convolution(F.pad(mixed.transpose(1, 2), (KERNEL - 1, 0)))).transpose(1, 2)
    x, keys, queries = mixed.split([inner, STATE, STATE], -1)
    x, steps = x.unflatten(-1, (HEADS, WIDTH)), F.softplus(steps)
    state, rows = hidden.new_zeros(hidden.shape[0], HEADS, WIDTH, STATE), []
    for t in range(hidden.shape[1]):
        left = (-steps[:, t] * block.a_log.exp()).exp()[..., None, None]
        new = (x[:, t] * steps[:, t, :, None])[..., None] * keys[:, t, None, None]
        state = left * state + new
        rows.append(torch.einsum("bhpn,bn->bhp", state, queries[:, t]))
    y = (torch.stack(rows, 1) + x * block.skip[:, None]).flatten(2)
    return block.output(F.rms_norm(y, (inner,)) * F.silu(gate))


def runs(group: dist.ProcessGroup, sizes: list[int], compiled: bool = False) -> None:
    block = Block().double()
    whole = torch.randn(2, sum(sizes), HIDDEN, dtype=torch.float64, requires_grad=True)
    weights = torch.randn_like(whole)
    want = in_one_process(block, whole)
    leaves = [whole, *block.parameters()]
    wanted, *of_parameters = torch.autograd.grad((want * weights).sum(), leaves)
    if compiled:
        torch._dynamo.reset()
        block.compile(fullgraph=True, backend="aot_eager")
    rank = group.rank()
    mine = whole.detach().split(sizes, 1)[rank].requires_grad_()
    found = block(mine, group, sizes)
    torch.testing.assert_close(found, want.split(sizes, 1)[rank])
    loss = (found * weights.split(sizes, 1)[rank]).sum()
    grad, *own = torch.autograd.grad(loss, [mine, *block.parameters()])
    torch.testing.assert_close(grad, wanted.split(sizes, 1)[rank])
    for part, needed in zip(own, of_parameters, strict=True):
        dist.all_reduce(part, group=group)
        torch.testing.assert_close(part, needed)


SIZES = [[11], [8, 8], [6, 3], [5, 2, 9], [8, 8, 8, 8], [1, 7, 2, 6]]


@pytest.mark.parametrize("sizes", some([6, 3], of=SIZES))
def test_block(ranks: Ranks, sizes: list[int]) -> None:
    ranks.run(len(sizes), runs, sizes)
