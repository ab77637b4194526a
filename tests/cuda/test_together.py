"""Attention to the keys of all peers at once, on streams: where it runs, and by how many kernels.

Its results are compared with dense ones wherever tests of attention run on streams
(tests/ops/attention_cases.py).
"""

from __future__ import annotations

import unittest.mock
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

import symm_cp
from symm_cp import tuning
from symm_cp.ops.attention import kernels, together
from symm_cp.schedule import head_tail, sequential
from tests.cuda.simulated import simulation
from tests.exhaustive import exhaustive
from tests.ops import test_attention


def wrapped(module: Any, name: str) -> Any:
    """Returns a context that counts the calls of a function."""
    return unittest.mock.patch.object(module, name, wraps=getattr(module, name))


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.ranks
def test_it_runs_where_it_is_forced(group: dist.ProcessGroup, world_size: int) -> None:
    """It runs where it is forced and fits, with the expected number of kernels in each pass."""
    W, rank = group.size(), group.rank()
    test_case = test_attention.Case
    causal = head_tail(12 * W, W)
    # The chunks of the last rank adjoin, and all of the first one's keys are behind them.
    of_causal = 1 + (2 if 0 < rank < W - 1 else 1)
    cases = [
        (test_case(sequential(8 * W, W)), 1 + 1),
        (test_case(causal, causal=True), of_causal),
        (test_case(causal, causal=True, heads=4, dtype=torch.bfloat16), of_causal),
        (test_case(causal, queries=5, dtype=torch.float64), 1 + 1),
        (test_case(head_tail(12 * W + 5, W), strided="rows first"), 1 + 1),
        (test_case(test_attention.layouts(W)[3], causal=True), None),
    ]
    with simulation():
        for case, expected in cases:
            rows = len(list(case.layout.positions(rank)))
            queries = rows if case.queries is None else case.queries
            q, k = (torch.randn(1, n, r, 32) for n, r in ((case.heads, queries), (2, rows)))
            q, k = (t.to(case.dtype).requires_grad_() for t in (q, k))
            with (
                wrapped(kernels, "forward") as forward,
                wrapped(kernels, "backward") as backward,
                wrapped(together, "consume_keys") as consumed,
                wrapped(together, "reduce_gradients") as reduced,
                tuning.forced("together"),
            ):
                out, _ = test_attention.OP(q, k, k, group.group_name, **case.arguments())
                out.sum().backward()
            assert consumed.call_count >= 1, case
            assert reduced.call_count >= 1, case
            found = forward.call_count, backward.call_count
            assert expected is None or found == (expected, expected), (case, found)


@pytest.mark.parametrize("world_size", [3])
@pytest.mark.ranks
def test_what_does_not_fit_goes_by_shards(group: dist.ProcessGroup, world_size: int) -> None:
    """Batches, soft caps, windows and calls that need too many bytes go by shards."""
    W, calls = group.size(), 0

    def consume_keys(*args: Any) -> Any:
        raise AssertionError

    with (
        simulation(plan_at=-1),
        unittest.mock.patch.object(together, "consume_keys", consume_keys),
        tuning.forced("together"),
    ):
        for batch, more in (
            (2, {}),
            (1, {"softcap": 4.0}),
            (1, {"window_left": 2, "window_right": 0}),
        ):
            q = torch.randn(batch, 2, 16, 8)
            symm_cp.all_gather_attention(q, q, q, group=group, **more)
            calls += 1
        with unittest.mock.patch.object(together, "_MOST_BYTES", 4 * 2 * 16 * W * 16 - 1):
            q = torch.randn(1, 2, 16, 8)
            symm_cp.all_gather_attention(q, q, q, group=group)


@pytest.mark.parametrize("world_size", [2, *(pytest.param(n, marks=exhaustive) for n in (3, 4))])
@pytest.mark.ranks
def test_under_modes(group: dist.ProcessGroup, world_size: int) -> None:
    """Autocast, checkpoints, inference mode and torch.compile agree with dense attention."""
    seed = int(torch.randint(1 << 30, ()))
    W, rank = group.size(), group.rank()
    balancer = symm_cp.HeadTail(12 * W, W)
    rows = balancer.positions(rank)
    torch.manual_seed(seed)
    whole = [torch.randn(1, heads, 12 * W, 16) for heads in (4, 2, 2)]

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return symm_cp.all_gather_attention(
            q, k, v, group=group, is_causal=True, load_balancer=balancer, enable_gqa=True
        )

    def dense(*own: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(
            *own, is_causal=True, enable_gqa=True
        )

    def stepped(step: Any, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        leaves = [t.clone().requires_grad_() for t in inputs]
        out = step(*leaves)
        return [out.detach(), *torch.autograd.grad(out.float().square().sum(), leaves)]

    own = [t[:, :, rows] for t in whole]
    expected = [t[:, :, rows] for t in stepped(dense, whole)]
    with (
        simulation(plan_at=-1),
        tuning.forced("together"),
        wrapped(together, "consume_keys") as used,
    ):
        torch.testing.assert_close(stepped(attend, own), expected)
        recomputed = stepped(partial(checkpoint, attend, use_reentrant=False), own)
        torch.testing.assert_close(recomputed, expected)
        assert used.call_count == 1 + 2
        compiled = stepped(torch.compile(attend, fullgraph=True), own)
        torch.testing.assert_close(compiled, expected)
        with torch.inference_mode():
            out = attend(*own)
        torch.testing.assert_close(out, expected[0])
        with torch.autocast("cpu", dtype=torch.bfloat16):
            low = stepped(attend, own)
        assert low[0].dtype == torch.bfloat16
        assert all(grad.dtype == torch.float32 for grad in low[1:])
        for mine, exact in zip(low, expected, strict=True):
            assert (mine - exact).norm() < 0.05 * exact.norm()
        assert used.call_count == 1 + 2 + 1 + 1 + 1
