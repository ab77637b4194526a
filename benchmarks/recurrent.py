"""A gated delta layer on each rank's part of a sequence against its compute alone.

The compute alone is the same layer on the same part, without ranks before it. In the head-tail
layout the states pass through two fragments of each rank. The chain of states alone, where ranks
begin one after the other, is compared with the number of its turns. `--case layer` or
`--case chain` runs a part.

    python benchmarks/recurrent.py --ranks 2 --json benchmarks/results/recurrent.json
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import symm_cp
from benchmarks.harness import Case, main
from symm_cp.commands.harness.measure import Row
from symm_cp.commands.harness.report import Written
from symm_cp.ops.recurrent.scan import pieces_of
from symm_cp.schedule.layout import SequenceLayout, head_tail

HIDDEN, HEADS, FEATURES, KERNEL, TOKENS = 512, 8, 64, 4, 1024
#: Sizes of the chain alone: rows (samples times heads), chunks of a rank, positions of a chunk.
ROWS, CHUNKS, CHUNK = (2, 4, 16), 16, 64
SIGNAL_SECONDS = 1e-6


class _Layer(nn.Module):
    """Projections, a causal convolution, the gated delta rule, a gated norm, a projection."""

    def __init__(self) -> None:
        super().__init__()
        width = HEADS * FEATURES
        self.mixed = nn.Linear(HIDDEN, 4 * width + 2 * HEADS, bias=False)
        self.convolution = nn.Parameter(torch.randn(3 * width, 1, KERNEL) / KERNEL)
        self.out = nn.Linear(width, HIDDEN, bias=False)

    def forward(
        self, x: torch.Tensor, group: dist.ProcessGroup, layout: SequenceLayout | None = None
    ) -> torch.Tensor:
        width = HEADS * FEATURES
        qkv, gate, g, beta = self.mixed(x).split([3 * width, width, HEADS, HEADS], -1)
        qkv = symm_cp.causal_convolution(
            qkv.transpose(1, 2), self.convolution.squeeze(1), group=group, layout=layout
        )
        q, k, v = (
            t.unflatten(-1, (HEADS, FEATURES)) for t in F.silu(qkv.transpose(1, 2)).split(width, -1)
        )
        decay, strength = -F.softplus(g), beta.sigmoid()
        y, _ = symm_cp.gated_delta_rule(
            q, k, v, decay, strength, group=group, normalise=True, layout=layout
        )
        y = F.rms_norm(y, (FEATURES,)).flatten(2) * F.silu(gate)
        result: torch.Tensor = self.out(y)
        return result


def _own_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """A group of this rank alone."""
    groups = [dist.new_group([rank]) for rank in range(group.size())]
    return groups[group.rank()]


def _layer_cases(group: dist.ProcessGroup, alone: dist.ProcessGroup) -> Iterator[Case]:
    torch.manual_seed(0)
    layer = _Layer()
    whole = torch.randn(1, TOKENS * group.size(), HIDDEN)
    part = whole.split(TOKENS, 1)[group.rank()].detach().requires_grad_()
    leaves = [part, *layer.parameters()]

    layout = head_tail(TOKENS * group.size(), group.size())
    rows = torch.tensor(list(layout.positions(group.rank())))

    runs: dict[str, Callable[[], torch.Tensor]] = {
        "alone": lambda: layer(part, alone),
        "spread": lambda: layer(part, group),
        "head-tail": lambda: layer(part, group, layout),
    }

    def check() -> None:
        expected = layer(whole, alone)
        found = layer(part, group)
        close: dict[str, float] = {"rtol": 1e-3, "atol": 1e-4}
        torch.testing.assert_close(found, expected.split(TOKENS, 1)[group.rank()], **close)
        mine = whole[:, rows].detach()
        by_fragments = layer(mine, group, layout)
        torch.testing.assert_close(by_fragments, expected[:, rows], **close)

    def forward(run: Callable[[], torch.Tensor]) -> Callable[[], object]:
        return torch.no_grad()(run)

    def training(run: Callable[[], torch.Tensor]) -> Callable[[], object]:
        return lambda: torch.autograd.grad(run().sum(), leaves)

    for way, made in (("forward", forward), ("forward and backward", training)):
        name = f"layer {way}, {TOKENS} tokens a rank, {HEADS} heads of {FEATURES}"
        yield Case(name, {each: made(run) for each, run in runs.items()}, check, inner=1)


def _predicted(alone: float, world_size: int, pieces: int) -> float:
    turns = pieces + world_size - 1
    return turns * (alone / pieces + SIGNAL_SECONDS)


def _chain_cases(group: dist.ProcessGroup, alone: dist.ProcessGroup) -> Iterator[Case]:
    for rows in ROWS:
        torch.manual_seed(rows)
        keys, erased, values = (
            torch.randn(rows, CHUNKS, CHUNK, FEATURES) * FEATURES**-0.5 for _ in range(3)
        )
        decay = torch.rand(rows, CHUNKS)
        pieces = len(pieces_of(rows).sizes)

        def relay(
            over: dist.ProcessGroup,
            inputs: tuple[torch.Tensor, ...] = (keys, erased, values, decay),
        ) -> Callable[[], object]:
            return lambda: torch.ops.symm_mem._delta_rule_states(
                *inputs, None, [CHUNKS], over.group_name
            )

        def compared(row: Row, pieces: int = pieces) -> dict[str, object]:
            expected = _predicted(row.median("alone"), group.size(), pieces)
            return {
                "pieces": pieces,
                "predicted_ms": expected * 1e3,
                "error": expected / row.median("relay") - 1,
            }

        name = f"chain of {rows} rows, {CHUNKS} chunks of {CHUNK} a rank"
        variants = {"alone": relay(alone), "relay": relay(group)}
        yield Case(name, variants, inner=1, after=compared)


def cases(group: dist.ProcessGroup) -> Iterator[Case]:
    """Yields the layer, then the chain."""
    alone = _own_group(group)
    yield from _layer_cases(group, alone)
    yield from _chain_cases(group, alone)


def table(rows: list[Written]) -> str:
    """Returns how the chains compare with the number of their turns."""
    lines = [
        f"{row['case']}, {row['pieces']} pieces: {row['ms']['relay']:.3g} ms, predicted "
        f"{row['predicted_ms']:.3g} ms ({row['error']:+.0%})"
        for row in rows
        if "error" in row
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main(cases, __doc__, summary=table)
