"""Exchanging a sequence for heads, and back, against a memcpy of the bytes and torch's all-to-all.

    python benchmarks/exchange.py --ranks 2 --json benchmarks/results/exchange.json

Queries, keys and values of one length, as a projection leaves them: heads of a position side by
side. "Unfused" copies the parts for each rank together, exchanges them with `all_to_all_single`,
and copies what arrives to its place, for queries, keys and values one after the other.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist

import symm_cp
from benchmarks.harness import Case, main
from symm_cp.commands.bench.jobs import groups_over

#: Heads, positions of the whole sequence, features of a head.
SHAPES = ((8, 4096, 64), (8, 512, 64), (32, 4096, 128), (32, 16384, 128))


def unfused_to_heads(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """(B, H, s, E) to (B, h, S, E), for a sequence of which rank r holds the r-th part."""
    W = group.size()
    batch, heads, rows, features = x.shape
    sent = x.view(batch, W, heads // W, rows, features).transpose(0, 1).contiguous()
    arrived = torch.empty_like(sent)
    dist.all_to_all_single(arrived, sent, group=group)
    return arrived.permute(1, 2, 0, 3, 4).flatten(2, 3)


def unfused_to_sequence(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The way back, with the heads of a position side by side."""
    W = group.size()
    batch, heads, length, features = x.shape
    sent = x.view(batch, heads, W, length // W, features).permute(2, 0, 3, 1, 4).contiguous()
    arrived = torch.empty_like(sent)
    dist.all_to_all_single(arrived, sent, group=group)
    return arrived.permute(1, 2, 0, 3, 4).flatten(2, 3).transpose(1, 2)


def _case(group: dist.ProcessGroup, shape: tuple[int, int, int], dtype: torch.dtype) -> Case:
    heads, length, features = shape
    W, rows = group.size(), length // group.size()
    qkv = [torch.randn(1, rows, heads, features).to(dtype).transpose(1, 2) for _ in range(3)]
    copies = [torch.empty_like(x) for x in qkv]
    whole = symm_cp.sequence_to_heads(qkv, group=group)
    out = whole[0]
    unfused = {"gloo": group, **groups_over(group, "symm_cp")}

    def memcpy() -> None:
        for copy, x in zip(copies, qkv, strict=True):
            copy.copy_(x)

    def check() -> None:
        for on in unfused.values():
            for x, want in zip(qkv, whole, strict=True):
                assert torch.equal(unfused_to_heads(x, on), want)
            assert torch.equal(unfused_to_sequence(out, on), qkv[0])
        assert torch.equal(symm_cp.heads_to_sequence(out, group=group), qkv[0])

    variants = {
        "memcpy": memcpy,
        "op": partial(symm_cp.sequence_to_heads, qkv, group=group),
        "op, one by one": lambda: [symm_cp.sequence_to_heads(x, group=group) for x in qkv],
        "op, way back": partial(symm_cp.heads_to_sequence, whole, group=group),
    }
    for name, on in unfused.items():
        variants[f"unfused ({name})"] = lambda on=on: [unfused_to_heads(x, on) for x in qkv]
    label = f"q, k, v of {heads} heads x {length} x {features}, {str(dtype)[6:]}, {W} ranks"
    return Case(label, variants, check, inner=0)


def cases(group: dist.ProcessGroup) -> Iterator[Case]:
    """Yields all cases."""
    for shape in SHAPES:
        for dtype in (torch.float32, torch.bfloat16):
            yield _case(group, shape, dtype)


if __name__ == "__main__":
    main(cases, __doc__)
