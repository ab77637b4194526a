"""A mixture of experts whose experts are spread over the ranks, against its matmuls alone.

A layer is measured fused (`dispatch_matmul`, `matmul_combine`), with `dispatch`, torch's grouped
matmuls and `combine`, and *unfused* as transformers' "all_to_all" does it: tokens sorted by expert
and copied, exchanged by `all_to_all_single`, sorted by expert again, and the same on the way back.
Dispatch and combination by themselves are compared with a memcpy of the rows that a rank's experts
get.

    python benchmarks/experts.py --ranks 2 --json benchmarks/results/experts.json
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.harness import Case, main
from symm_cp import moe

HIDDEN, WIDTH, EXPERTS, TOP_K = 1024, 1024, 8, 2
TOKENS = 4096  # of all ranks
#: Added to the scores of the first expert: with 1 each token has it as one of its two.
SKEWS = {"even": 0.0, "one expert takes half": 1.0}


class _Layer:
    """One rank's experts: two matmuls with a gate between them."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        skew: float,
        tokens: int,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.group = group
        generator = torch.Generator().manual_seed(1 + group.rank())
        self.tokens = torch.randn(tokens, HIDDEN, generator=generator).to(dtype)
        scores = torch.rand(tokens, EXPERTS, generator=generator)
        scores[:, 0] += skew
        self.chosen = scores.topk(TOP_K).indices
        self.weights = torch.rand(tokens, TOP_K, generator=generator)
        local = EXPERTS // group.size()
        up = torch.randn(local, HIDDEN, 2 * WIDTH, generator=generator) * HIDDEN**-0.5
        down = torch.randn(local, WIDTH, HIDDEN, generator=generator) * WIDTH**-0.5
        self.up, self.down = up.to(dtype), down.to(dtype)
        self.rows, self.routing = self.dispatch()
        self.memory = torch.empty_like(self.rows)

    def experts(self, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        gate, up = F.grouped_mm(rows, self.up, offs=ends).chunk(2, -1)
        return F.grouped_mm(F.silu(gate) * up, self.down, offs=ends)

    def dispatch(self) -> tuple[torch.Tensor, moe.Routing]:
        return moe.dispatch(self.tokens, self.chosen, EXPERTS, group=self.group)

    def copy(self) -> torch.Tensor:
        return self.memory.copy_(self.rows)

    def combine(self) -> torch.Tensor:
        return moe.combine(self.rows, self.weights, self.routing)

    def alone(self) -> torch.Tensor:
        return self.experts(self.rows, self.routing.ends)

    def spread(self) -> torch.Tensor:
        rows, routing = self.dispatch()
        return moe.combine(self.experts(rows, routing.ends), self.weights, routing)

    def fused(self) -> torch.Tensor:
        both, routing = moe.dispatch_matmul(
            self.tokens, self.up, self.chosen, EXPERTS, group=self.group
        )
        gate, up = both.chunk(2, -1)
        return moe.matmul_combine(F.silu(gate) * up, self.down, self.weights, routing)

    def unfused_dispatch(self) -> tuple[torch.Tensor, ...]:
        chosen = self.chosen.flatten()
        order = torch.argsort(chosen, stable=True)
        counts = torch.bincount(chosen, minlength=EXPERTS)
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts, group=self.group)
        sizes = [each.view(self.group.size(), -1).sum(1).tolist() for each in (counts, theirs)]
        packed = self.tokens[order // TOP_K]
        rows = packed.new_empty(sum(sizes[1]), HIDDEN)
        dist.all_to_all_single(rows, packed, sizes[1], sizes[0], group=self.group)
        local = torch.arange(len(self.up)).repeat(self.group.size())
        sorted_rows = torch.argsort(local.repeat_interleave(theirs), stable=True)
        ends = theirs.view(self.group.size(), -1).sum(0).cumsum(0).int()
        return rows[sorted_rows], ends, sorted_rows, order, torch.tensor(sizes)

    def unfused_combine(self, out: torch.Tensor, *how: torch.Tensor) -> torch.Tensor:
        sorted_rows, order, sizes = how
        by_rank = torch.empty_like(out)
        by_rank[sorted_rows] = out
        given, taken = sizes.tolist()
        back = out.new_empty(sum(given), HIDDEN)
        dist.all_to_all_single(back, by_rank, given, taken, group=self.group)
        pairs = torch.empty_like(back)
        pairs[order] = back
        weighted = pairs.view(-1, TOP_K, HIDDEN) * self.weights.unsqueeze(-1)
        return weighted.sum(1).to(out.dtype)

    def unfused(self) -> torch.Tensor:
        rows, ends, *how = self.unfused_dispatch()
        return self.unfused_combine(self.experts(rows, ends), *how)


def _trained(layer: _Layer, forward: Callable[[], torch.Tensor]) -> Callable[[], object]:
    """Forward and backward, with gradients of tokens (or rows) and all weights."""
    inputs = [layer.tokens, layer.rows, layer.up, layer.down, layer.weights]

    def step() -> object:
        for tensor in inputs:
            tensor.requires_grad_()
        try:
            out = forward()
            return torch.autograd.grad(out, inputs, torch.ones_like(out), allow_unused=True)
        finally:
            for tensor in inputs:
                tensor.requires_grad_(False)

    return step


def _layers(layer: _Layer, name: str) -> Iterator[Case]:
    def check() -> None:
        close = 1e-4 if layer.tokens.dtype == torch.float32 else 5e-2
        torch.testing.assert_close(layer.fused(), layer.spread(), rtol=close, atol=close)
        torch.testing.assert_close(layer.spread(), layer.unfused(), rtol=close, atol=close)

    forward: dict[str, Callable[[], torch.Tensor]] = {
        "matmuls alone": layer.alone,
        "fused": layer.fused,
        "dispatch, matmuls, combine": layer.spread,
    }
    trained = {key: _trained(layer, function) for key, function in forward.items()}
    yield Case(f"layer, {name}", {**forward, "unfused": layer.unfused}, check)
    yield Case(f"layer, forward and backward, {name}", trained)


def _cases(layer: _Layer, name: str, inner: int) -> Iterator[Case]:
    def check() -> None:
        torch.testing.assert_close(layer.spread(), layer.unfused(), rtol=1e-4, atol=1e-4)
        assert torch.equal(layer.dispatch()[0], layer.unfused_dispatch()[0])

    _, _, *how = layer.unfused_dispatch()

    def unfused_combine() -> torch.Tensor:
        return layer.unfused_combine(layer.rows, *how)

    dispatch: dict[str, Callable[[], object]] = {
        "memcpy": layer.copy,
        "dispatch": layer.dispatch,
        "unfused": layer.unfused_dispatch,
    }
    combine: dict[str, Callable[[], object]] = {
        "memcpy": layer.copy,
        "combine": layer.combine,
        "unfused": unfused_combine,
    }
    yield Case(f"dispatch, {name}", dispatch, check, inner=inner)
    yield Case(f"combine, {name}", combine, check, inner=inner)
    yield from _layers(layer, name)


def cases(group: dist.ProcessGroup) -> Iterator[Case]:
    """Yields layers of many tokens, of which one expert may get most, and of one token a rank."""
    for skew, amount in SKEWS.items():
        tokens = TOKENS // group.size()
        name = f"{tokens} tokens a rank, {EXPERTS} experts, top {TOP_K}, hidden {HIDDEN}, {skew}"
        yield from _cases(_Layer(group, amount, tokens), name, inner=1)
        in_bfloat16 = _Layer(group, amount, tokens, torch.bfloat16)
        yield from _layers(in_bfloat16, f"{name}, bfloat16")
    name = f"1 token a rank, {EXPERTS} experts, top {TOP_K}, hidden {HIDDEN}"
    yield from _cases(_Layer(group, 0.0, 1), name, inner=20)


if __name__ == "__main__":
    main(cases, __doc__)
