"""Attention by heads and by keys, against the compute alone of this rank's heads.

    python benchmarks/ulysses.py --ranks 2 --json benchmarks/results/ulysses.json

"Compute" is torch's attention with this rank's heads of the whole sequence, forward and backward:
the work of a rank when heads are split, without communication. "By keys" is method
"allgather", under a causal mask with the head-tail layout, in which both methods compute equally
many scores on every rank.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
import torch.nn.functional as F

import symm_cp
from benchmarks.harness import Case, main

#: Query heads, key heads, positions of the whole sequence, features of a head.
SHAPES = ((8, 8, 4096, 64), (8, 2, 4096, 64), (8, 8, 1024, 64), (32, 8, 4096, 128))


def _case(
    group: dist.ProcessGroup,
    shape: tuple[int, int, int, int],
    dtype: torch.dtype,
    *,
    causal: bool,
    backward: bool,
) -> Case:
    (heads, kv_heads, length, features), W = shape, group.size()
    balancer = symm_cp.HeadTail(length, W)
    generator = torch.Generator().manual_seed(0)
    rank, rows = group.rank(), balancer.positions(group.rank())
    whole = [
        torch.randn(1, length, n, features, generator=generator).to(dtype).transpose(1, 2)
        for n in (heads, kv_heads, kv_heads)
    ]
    shards = [t[:, :, rows].transpose(1, 2).contiguous().transpose(1, 2) for t in whole]
    own = [t.tensor_split(max(1, min(W, t.shape[1])), 1) for t in whole]
    of_heads = [parts[rank * len(parts) // W].contiguous() for parts in own]
    for tensor in (*shards, *of_heads):
        tensor.requires_grad_(backward)
    gqa = heads != kv_heads

    def attend(method: str) -> torch.Tensor:
        out: torch.Tensor = symm_cp.all_gather_attention(
            *shards, group=group, is_causal=causal, enable_gqa=gqa, load_balancer=balancer,
            method=method,
        )  # fmt: skip
        return out

    def compute() -> torch.Tensor:
        return F.scaled_dot_product_attention(*of_heads, is_causal=causal, enable_gqa=gqa)

    def timed(forward: Callable[[], torch.Tensor], inputs: list[torch.Tensor]) -> None:
        out = forward()
        if backward:
            torch.autograd.grad(out, inputs, torch.ones_like(out))

    def check() -> None:
        with torch.no_grad():
            expected = F.scaled_dot_product_attention(*whole, is_causal=causal, enable_gqa=gqa)
            error = 2e-2 if dtype == torch.bfloat16 else 1e-4
            for method in ("ulysses", "allgather"):
                torch.testing.assert_close(
                    attend(method), expected[:, :, rows], atol=error, rtol=error
                )

    variants = {
        "compute": partial(timed, compute, of_heads),
        "by heads": partial(timed, partial(attend, "ulysses"), shards),
        "by keys": partial(timed, partial(attend, "allgather"), shards),
    }
    kind = f"{'causal' if causal else 'full'}, {'training' if backward else 'forward'}"
    sizes = f"{heads}/{kv_heads} heads x {length} x {features}"
    return Case(f"{sizes}, {kind}, {str(dtype)[6:]}, {W} ranks", variants, check)


def cases(group: dist.ProcessGroup) -> Iterator[Case]:
    """Yields all cases."""
    for shape in SHAPES:
        for dtype in (torch.float32, torch.bfloat16):
            for causal, backward in ((False, False), (False, True), (True, True)):
                yield _case(group, shape, dtype, causal=causal, backward=backward)


if __name__ == "__main__":
    main(cases, __doc__)
