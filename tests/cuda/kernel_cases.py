"""The cases that test_kernels.py runs with Triton's interpreter: `python -m ... CASES`."""

from __future__ import annotations

import random
import sys
import threading
import time
from typing import Any
from unittest import mock

import torch

from symm_cp.cuda import kernels
from symm_cp.cuda.kernels import attention_merge, tile_matmul
from symm_cp.cuda.kernels.tile_matmul import Tiling as Products
from symm_cp.cuda.kernels.tile_matmul import Words
from symm_cp.schedule import peers
from symm_cp.tensors.alignment import scratch_rows
from tests.cuda import interpreted


def add_rows() -> int:
    dtypes = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.int8]
    cases = 0
    for dtype in dtypes:
        for count, shape in ((1, (5,)), (2, (3, 7)), (3, (2049,)), (8, (1, 4096)), (2, (0, 3))):
            for mean in (False, True) if dtype.is_floating_point else (False,):
                out = torch.empty(shape, dtype=dtype)
                rows = scratch_rows(out, count)  # with gaps between them
                rows.copy_(torch.randn(count, *shape) * 4)
                kernels.add_rows(rows, out, mean=mean)
                wide = torch.float64 if dtype == torch.float64 else torch.float32
                wide = wide if dtype.is_floating_point else torch.int64
                total = rows[0].to(wide)
                for row in rows[1:]:
                    total = total + row
                total = total / count if mean else total
                # The interpreter truncates to bfloat16 where a GPU rounds: one ulp of difference.
                ulp = 2**-7 if dtype == torch.bfloat16 and out.device.type == "cpu" else 0.0
                torch.testing.assert_close(out, total.to(dtype), rtol=ulp, atol=0.0)
                cases += 1
    return cases


def dense(q: Any, k: Any, v: Any, visible: Any, scale: float) -> tuple[Any, Any]:
    q, k, v = (t.double() for t in (q, k, v))
    times = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)
    score = (q @ k.transpose(-1, -2) * scale).masked_fill(~visible, -torch.inf)
    lse = torch.logsumexp(score, -1)
    weight = torch.exp(score - lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1))
    return weight @ v, lse


def merge_attention() -> int:
    cases = 0
    for dtype, lse_dtype in ((torch.float64, torch.float64), (torch.bfloat16, torch.float32)):
        for shape in ((1, 2, 5, 16), (2, 3, 33, 24)):
            B, H, S, E = shape
            out = torch.randn(B, S, H, E).transpose(1, 2).to(lse_dtype)
            part = torch.randn(shape).to(dtype)
            lse, part_lse = (torch.randn(B, H, S, dtype=lse_dtype) for _ in range(2))
            lse[0, 0, :3] = -torch.inf
            part_lse[0, 0, 1:4] = -torch.inf
            part[0, 0, 1:4] = torch.nan  # must not be read
            weights = torch.stack([lse, part_lse]).softmax(0).nan_to_num()
            values = torch.stack([out, part.to(lse_dtype).nan_to_num()])
            expected = (weights.unsqueeze(-1) * values).sum(0)
            total = torch.logaddexp(lse, part_lse)
            nothing = (lse == -torch.inf) & (part_lse == -torch.inf)
            total = total.masked_fill(nothing, -torch.inf)
            kernels.merge_attention(out, lse, part, part_lse)
            tolerance = 1e-12 if dtype == torch.float64 else 1e-6
            torch.testing.assert_close(lse, total, rtol=tolerance, atol=tolerance)
            torch.testing.assert_close(
                out.masked_fill(nothing.unsqueeze(-1), 0.0),
                expected.masked_fill(nothing.unsqueeze(-1), 0.0),
                rtol=tolerance,
                atol=tolerance,
            )
            cases += 1
    # Batches times heads may be more than the second dimension of a grid holds (65,535).
    grids: list[Any] = []

    class Launched:
        def __getitem__(self, grid: Any) -> Any:
            grids.append(grid)
            return lambda *args, **options: None

    with mock.patch.object(attention_merge, "_merge", Launched()):
        out, lse = torch.empty(1 << 12, 1 << 6, 17, 1), torch.empty(1 << 12, 1 << 6, 17)
        attention_merge.merge_attention(out, lse, out, lse)
    assert grids == [((1 << 18) * 2,)]
    return cases


TILES = Products(16, 16, 16, 4, 1)
#: Ranks, rows of a part, columns, inner dimension, programs.
SIZES = [
    (2, 5, 17, 33, 3),
    (4, 32, 48, 16, 5),
    (3, 40, 7, 1, 2),
    (1, 5, 5, 5, 2),
    (3, 150, 2, 3, 4),
]


def close(found: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """Compares with float64; allows for sums in float32 that are rounded once."""
    eps = torch.finfo(found.dtype).eps
    exact = a.double() @ b.double()
    torch.testing.assert_close(found.double(), exact, rtol=eps, atol=a.shape[-1] * 2**-22)


def arrival_matmul() -> int:
    cases = 0
    for dtype in (torch.float32, torch.float16):
        for W, M, N, K, programs in SIZES:
            for stacked in (False, True):  # shards in rank order, or as they are pulled
                rank, epoch = random.randrange(W), random.choice([1, 7, 2**31 - 2])
                shards, weight = torch.randn(W, M, K).to(dtype), torch.randn(N, K).to(dtype).t()
                first = rank + 1 if stacked else 0
                pulled = torch.full((W, M, K), torch.nan, dtype=dtype)
                words = torch.zeros(W, 16, dtype=torch.int32)
                for turn, peer in enumerate(peers(rank, W)):
                    pulled[(first + turn) % W] = shards[peer]
                    words[turn, 0] = epoch
                out = torch.full((W * M, N), torch.nan, dtype=dtype)
                arrivals = Words(words.view(-1), 16, epoch)
                tile_matmul.arrival_matmul(
                    shards[rank], pulled, first, weight, out, rank, arrivals,
                    tiling=TILES, programs=programs,
                )  # fmt: skip
                close(out, shards.flatten(0, 1), weight)
                cases += 1
    return cases


def late_shards() -> int:
    """The kernel begins before any shard has arrived, and waits for each of them."""
    W, M, K, N, rank = 3, 20, 8, 24, 1
    shards, weight = torch.randn(W, M, K), torch.randn(K, N)
    pulled = torch.full((W - 1, M, K), torch.nan)
    words = torch.full((W, 16), 4, dtype=torch.int32)  # of the previous call
    out = torch.full((W * M, N), torch.nan)
    ended: list[bool] = []

    def run() -> None:
        arrivals = Words(words.view(-1), 16, 5)
        tile_matmul.arrival_matmul(
            shards[rank], pulled, 0, weight, out, rank, arrivals, tiling=TILES, programs=3
        )
        ended.append(True)

    thread = threading.Thread(target=run)
    thread.start()
    for turn, peer in enumerate(peers(rank, W)):
        time.sleep(0.5)
        assert not ended, "the kernel did not wait"
        pulled[turn] = shards[peer]
        words[turn, 0] = 5
    thread.join(60)
    assert ended
    close(out, shards.flatten(0, 1), weight)
    return 1


def counted_matmul() -> int:
    """Parts are complete when their words are raised, in the order of the peers."""
    cases = 0
    for dtype in (torch.float32, torch.float16):
        for W, M, N, K, programs in [*SIZES, (3, 16, 33, 0, 4)]:
            rank, a = random.randrange(W), torch.randn(W * M, K).to(dtype)
            weight, parts = torch.randn(N, K).to(dtype).t(), torch.empty(W, M + 1, N, dtype=dtype)
            words, own = torch.zeros(W, 16, dtype=torch.int32), torch.empty(M, N, dtype=dtype)
            for epoch in (3, 4):  # with the counters as the previous call has left them
                parts.fill_(torch.nan)
                raised: list[int] = []
                seen = threading.Thread(target=watch, args=(words, epoch, parts, rank, raised))
                seen.start()
                tile_matmul.counted_matmul(
                    a, weight, parts[:, :M], own, rank, Words(words.view(-1), 16, epoch),
                    tiling=TILES, programs=programs,
                )  # fmt: skip
                seen.join(60)
                assert raised == list(peers(rank, W)), "a part was incomplete, or out of order"
                for peer, rows in enumerate(a.split(M)):
                    close(own if peer == rank else parts[peer, :M], rows, weight)
                assert words[:, 0].tolist() == [epoch] * (W - 1) + [0]
                assert not words[:, 1:].any()
                cases += 1
    return cases


def watch(words: Any, epoch: int, parts: Any, rank: int, raised: list[int]) -> None:
    """Waits for one word after the other; notes each peer whose part is complete by then."""
    deadline = time.monotonic() + 60
    for turn, peer in enumerate(peers(rank, len(words))):
        while words[turn, 0] != epoch and time.monotonic() < deadline:
            time.sleep(1e-5)
        if not parts[peer, :-1].isnan().any():
            raised.append(peer)


if __name__ == "__main__":
    interpreted.mend()
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    for name in sys.argv[1:]:
        torch.manual_seed(seed)
        random.seed(seed)
        print(f"{name}: {globals()[name]()} cases checked")
