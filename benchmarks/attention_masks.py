"""Attention under windows, documents and chunks against its share of full attention.

A mask that leaves a tenth of the pairs of queries and keys should take a tenth of the time of
"full", and of "torch": full attention to local keys by torch's kernel. The cost of sinks and a soft
cap is measured, too. `--case masks` or `--case scores` runs a part.

python benchmarks/attention_masks.py --ranks 2 --json benchmarks/results/attention_masks.json
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.harness import Case, main
from symm_cp.commands.harness.measure import Row
from symm_cp.commands.harness.report import Written
from symm_cp.context_parallel.load_balancers import HeadTail, LoadBalancer, Sequential

HEADS, FEATURES, TOKENS, WINDOW = 8, 64, 8192, 512
#: The lengths of packed documents, and of the chunks that attention stays in.
DOCUMENTS, CHUNK = (3000, 1500, 900, 292, 2000, 500), 1024
BALANCERS = {"head-tail": HeadTail, "sequential": Sequential}

Tensors = tuple[torch.Tensor, ...]


def _masks() -> dict[str, dict[str, Any]]:
    """Options by name; all causal."""
    number = torch.arange(len(DOCUMENTS))
    return {
        "window": {"window_left": WINDOW - 1},
        "documents": {"document_ids": number.repeat_interleave(torch.tensor(DOCUMENTS))[None]},
        "chunks": {"document_ids": (torch.arange(TOKENS) // CHUNK)[None]},
    }


def _visible(options: dict[str, Any], rows: torch.Tensor) -> torch.Tensor:
    """Returns a mask, (rows, TOKENS), of the keys that rows see."""
    offset = torch.arange(TOKENS) - rows.unsqueeze(1)
    seen = offset <= 0
    if "window_left" in options:
        seen &= offset >= -options["window_left"]
    if "document_ids" in options:
        ids = options["document_ids"][0]
        seen &= ids[rows].unsqueeze(1) == ids
    return seen


def _share(options: dict[str, Any]) -> float:
    blocks = torch.arange(TOKENS).split(1024)
    return sum(int(_visible(options, rows).sum()) for rows in blocks) / TOKENS**2


class _Calls:
    """Attention with some options on this rank's part of one problem."""

    def __init__(self, group: dist.ProcessGroup, balancer: LoadBalancer, dtype: torch.dtype):
        generator = torch.Generator().manual_seed(0)
        self.rows = balancer.positions(group.rank())
        self.whole = [
            torch.randn(1, HEADS, TOKENS, FEATURES, generator=generator).to(dtype) for _ in range(3)
        ]
        self._parts = [t[:, :, self.rows].detach() for t in self.whole]
        self._group, self._balancer = group, balancer

    def __call__(self, *tensors: torch.Tensor, **options: Any) -> torch.Tensor:
        out: torch.Tensor
        out, _ = torch.ops.symm_mem.fused_all_gather_attention(
            *tensors,
            self._group.group_name,
            chunk_order=self._balancer.chunk_order,
            chunk_lengths=self._balancer.chunk_lengths,
            **options,
        )
        return out

    def forward(self, **options: Any) -> Callable[[], object]:
        def run() -> None:
            with torch.no_grad():
                self(*self._parts, **options)

        return run

    def backward(self, **options: Any) -> Callable[[], object]:
        """The backward pass alone: the graph is made once, at the first call."""
        leaves = [t.detach().requires_grad_() for t in self._parts]
        made: list[torch.Tensor] = []

        def run() -> object:
            if not made:
                made.append(self(*leaves, **options))
            return torch.autograd.grad(made[0], leaves, made[0].detach(), retain_graph=True)

        return run

    def by_torch(self, way: str) -> Callable[[], object]:
        """Full attention of this rank's queries to all keys, which are local, by torch's kernel."""
        inputs = [self._parts[0], *self.whole[1:]]
        if way == "forward":
            return lambda: F.scaled_dot_product_attention(*inputs)
        leaves = [t.detach().requires_grad_() for t in inputs]
        out = F.scaled_dot_product_attention(*leaves)
        grad = torch.ones_like(out)
        return lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True)

    def check(self, options: dict[str, Any]) -> None:
        """Compares some rows with dense attention."""
        out = self(*self._parts, is_causal=True, **options)
        some = torch.arange(0, len(self.rows), 97)
        q, k, v = (t.float() for t in self.whole)
        seen = _visible(options, self.rows[some])
        exact = F.scaled_dot_product_attention(q[:, :, self.rows[some]], k, v, seen)
        close = {"rtol": 2e-2, "atol": 2e-2} if out.dtype == torch.bfloat16 else {}
        torch.testing.assert_close(out[:, :, some].float(), exact, **close)


def _mask_cases(group: dist.ProcessGroup, layout: str, dtype: torch.dtype) -> Iterator[Case]:
    calls = _Calls(group, BALANCERS[layout](TOKENS, group.size()), dtype)
    masks = _masks()
    shares = {name: _share(options) for name, options in masks.items()}

    def check() -> None:
        for options in masks.values():
            calls.check(options)

    def of_share(row: Row) -> dict[str, object]:
        return {
            of: {name: row.ratio(name) / row.ratio(full) / share for name, share in shares.items()}
            for of, full in (("of_share", "full"), ("of_torch", "torch"))
        }

    for way in ("forward", "backward"):
        made = calls.forward if way == "forward" else calls.backward
        named = {name: made(is_causal=True, **options) for name, options in masks.items()}
        yield Case(
            f"masks {way} {str(dtype)[6:]}, {layout}",
            {"full": made(), **named, "torch": calls.by_torch(way)},
            check if way == "forward" else lambda: None,
            after=of_share,
        )


def _score_cases(group: dist.ProcessGroup, dtype: torch.dtype) -> Iterator[Case]:
    calls = _Calls(group, HeadTail(TOKENS, group.size()), dtype)
    variants: dict[str, dict[str, Any]] = {
        "plain": {},
        "sinks": {"sinks": torch.randn(HEADS).to(dtype)},
        "softcap": {"softcap": 30.0},
    }
    for way in ("forward", "backward"):
        made = calls.forward if way == "forward" else calls.backward
        yield Case(
            f"scores {way} {str(dtype)[6:]}, causal",
            {name: made(is_causal=True, **options) for name, options in variants.items()},
        )


def cases(group: dist.ProcessGroup) -> Iterator[Case]:
    """Yields masks, then scores."""
    dtypes = (torch.float32, torch.bfloat16)
    for dtype, layout in itertools.product(dtypes, BALANCERS):
        yield from _mask_cases(group, layout, dtype)
    for dtype in dtypes:
        yield from _score_cases(group, dtype)


def table(rows: list[Written]) -> str:
    """Returns how many times its share of full attention each mask takes."""
    lines = []
    for key, full in (("of_share", "full attention"), ("of_torch", "torch's on local keys")):
        lines.append(f"time divided by (share of the pairs x time of {full})")
        lines += [
            f"{row['case']}: " + ", ".join(f"{n} {x:.2f}" for n, x in row[key].items())
            for row in rows
            if key in row
        ]
    return "\n".join(lines)


if __name__ == "__main__":
    main(cases, __doc__, summary=table)
