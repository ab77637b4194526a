"""Attention to a cache of which each rank holds a part, against dense attention to all of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist

import symm_cp
from symm_cp import native
from symm_cp.testing import Ranks
from tests import attention_reference, device
from tests.attention_reference import Problem
from tests.device import devices
from tests.exhaustive import some
from tests.ops.refusals import Wrong, check_disagreements, check_refusals

pytestmark = devices("cpu", "simulated", "cuda")


@dataclass(frozen=True)
class Case:
    """A cache of `keys` positions, in blocks that the ranks take in turns."""

    keys: int
    new: int
    block: int = 4
    window_left: int | None = None
    hidden: int = 0  # the first keys of the first sample
    causal: bool = True
    heads: tuple[int, int] = (4, 2)
    features: tuple[int, int] = (8, 8)
    dtype: torch.dtype = torch.float32
    options: dict[str, float] | None = None
    sinks: bool = False


CASES = {
    "a token": Case(70, 1),
    "a token, 16 bits": Case(70, 1, dtype=torch.bfloat16),
    "a token, padded": Case(130, 1, hidden=100),
    "a token, keys on one rank": Case(3, 1, block=8),
    "tokens": Case(90, 5, block=8),
    "tokens, float64": Case(90, 5, dtype=torch.float64),
    "prefill": Case(150, 150, block=16),
    "prefill in chunks": Case(1000, 700, block=32, heads=(12, 4), features=(64, 64)),
    "window": Case(80, 30, window_left=11),
    "window of one": Case(40, 7, window_left=0),
    "window, padded": Case(80, 30, window_left=11, hidden=60),
    "not causal": Case(50, 6, causal=False),
    "sinks, scale, soft cap": Case(60, 3, sinks=True, options={"scale": 0.3, "softcap": 2.0}),
    "values of other width": Case(60, 2, features=(8, 5), heads=(2, 2)),
    "16 bits, prefill": Case(100, 40, dtype=torch.float16, hidden=10),
    "no query": Case(20, 0),
}


def problem_of(case: Case, hidden: int) -> Problem:
    """The problem of one sample."""
    (H, G), (E, V) = case.heads, case.features
    at = torch.arange(case.keys - case.new, case.keys)[:, None] - torch.arange(case.keys)
    visible = torch.ones_like(at, dtype=torch.bool)
    if case.causal:
        visible &= at >= 0
        if case.window_left is not None:
            visible &= at <= case.window_left
    visible[:, :hidden] = False
    q = torch.randn(1, H, case.new, E).to(case.dtype)
    k, v = (torch.randn(1, G, case.keys, size).to(case.dtype) for size in (E, V))
    sinks = torch.randn(H) if case.sinks else None
    return Problem(
        q, k, v, visible, torch.zeros(1, H, case.new, V), sinks=sinks, **(case.options or {})
    )


def attend(group: dist.ProcessGroup, case: Case, problems: list[Problem]) -> Any:
    positions = torch.arange(case.keys)
    own = positions[positions // case.block % group.size() == group.rank()]
    q, k, v = (torch.cat([getattr(p, name) for p in problems]) for name in "qkv")
    mask = torch.ones(len(problems), 1, 1, len(own), dtype=torch.bool)
    mask[0] = own >= case.hidden
    places = {"key_positions": own, "first_query": case.keys - case.new}
    out, lse = symm_cp.spread_cache_attention(
        q,
        k[:, :, own],
        v[:, :, own],
        group=group,
        mask=mask if case.hidden else None,
        window_left=case.window_left,
        sinks=problems[0].sinks,
        **(places if case.causal else {}),
        **(case.options or {}),
    )
    return out, lse


@pytest.mark.parametrize("world_size", some(2, of=[1, 2, 3, 4]))
@pytest.mark.parametrize("name", CASES)
def test_equals_dense_attention(ranks: Ranks, name: str, world_size: int) -> None:
    case = CASES[name]
    first, second = problem_of(case, case.hidden), problem_of(case, 0)
    if first.sinks is not None:
        second = Problem(**{**vars(second), "sinks": first.sinks})
    results = ranks.run(world_size, attend, case, [first, second])
    for out, lse in results[1:]:
        assert torch.equal(out, results[0][0])
        assert torch.equal(lse, results[0][1])
    out, lse = results[0]
    assert out.is_contiguous()
    assert lse.is_contiguous()
    assert out.dtype == case.dtype
    for sample, problem in enumerate((first, second)):
        exact, dense = problem.solve(torch.float64), problem.solve(case.dtype)
        for part, found in (("out", out), ("lse", lse)):
            attention_reference.check(
                part, found[sample : sample + 1], exact[part], dense[part],
                torch.arange(case.new), case.dtype, case.keys,
            )  # fmt: skip


@pytest.mark.parametrize("new", [1, 2])
@pytest.mark.parametrize("options", [{}, {"scatter_heads": True}, {"mask": True}], ids=str)
@pytest.mark.ranks(2)
def test_steps_equal_one_call(group: dist.ProcessGroup, new: int, options: dict[str, Any]) -> None:
    """A plan serves all lengths of the cache: the second call with keys records it.

    Decodes some tokens at a time, compares with one call, and counts the calls made by plans.
    """
    steps = 512
    torch.manual_seed(0)
    W, rank = group.size(), group.rank()
    q, k, v = torch.randn(2, 4, steps, 8), torch.randn(2, 2, steps, 8), torch.randn(2, 2, steps, 8)
    positions = torch.arange(steps)
    own = positions[positions // 2 % W == rank]
    scattered = options.get("scatter_heads")
    heads = slice(rank * 4 // W, (rank + 1) * 4 // W) if scattered else slice(None)
    whole, _ = symm_cp.spread_cache_attention(
        q, k[:, :, own], v[:, :, own], group=group, key_positions=own, first_query=0
    )
    native.load().symm_cp_plans_run()
    for step in range(0, steps, new):
        seen = own[own < step + new]
        places = {"key_positions": seen, "first_query": step} if new > 1 else {}
        mask = torch.ones(2, 1, 1, len(seen), dtype=torch.bool) if options.get("mask") else None
        out, _ = symm_cp.spread_cache_attention(
            q[:, :, step : step + new],
            k[:, :, seen],
            v[:, :, seen],
            group=group,
            **places,
            **(options | {"mask": mask}),
        )
        torch.testing.assert_close(out, whole[:, heads, step : step + new], atol=1e-5, rtol=1e-5)
    planned = native.load().symm_cp_plans_run()
    # Not those that find no key or one on this rank, nor two of each kind.
    assert planned >= steps // new - 8 or device.chosen() != "cpu", planned


@pytest.mark.parametrize("scatter_heads", [False, True])
@pytest.mark.ranks(2)
def test_wrong_arguments_are_refused(group: dist.ProcessGroup, scatter_heads: bool) -> None:
    q, k, at = torch.randn(1, 4, 2, 8), torch.randn(1, 2, 6, 8), torch.arange(6)

    def attend(**change: Any) -> torch.Tensor:
        arguments = {"query": q, "key": k, "value": k, "scatter_heads": scatter_heads, **change}
        return symm_cp.spread_cache_attention(**arguments, group=group)[0]

    wrong: list[Wrong] = [
        (ValueError, "mask has shape", {"mask": torch.ones(1, 1, 2, 5, dtype=torch.bool)}),
        (TypeError, "mask is torch.int32", {"mask": torch.ones(1, 1, 2, 6, dtype=torch.int32)}),
        (ValueError, "first_query", {"key_positions": at}),
        (ValueError, "key_positions", {"key_positions": at[:5], "first_query": 6}),
        (ValueError, "ascend", {"key_positions": at.flip(0), "first_query": 6}),
        (ValueError, "window_left", {"key_positions": at, "first_query": 6, "window_left": -1}),
        (ValueError, "window_left", {"window_left": 3}),
        (ValueError, "softcap", {"softcap": 0.0}),
        (ValueError, "sinks has shape", {"sinks": torch.zeros(2)}),
        (ValueError, "heads", {"key": torch.randn(1, 3, 6, 8)}),
        (ValueError, "value", {"value": k[:, :, :5]}),
        (TypeError, "query", {"query": q.int()}),
    ]
    if scatter_heads:
        gradient = {"mask": torch.zeros(1, 1, 2, 6).requires_grad_()}
        three = {"query": q[:, :3], "key": k[:, :1], "value": k[:, :1]}
        wrong += [
            (ValueError, "query has 3 heads, which is not divisible by world size 2", three),
            (NotImplementedError, "mask has no gradient", gradient),
        ]
    check_refusals(group, attend, wrong, "spread_cache_attention")
    differing = [{"key_positions": at, "first_query": 6 + group.rank()}]
    check_disagreements(attend, differing, "first_query")
    if scatter_heads:
        told = r"ranks disagree.*all_to_all 1 \(2, None"
        check_disagreements(attend, [{"scale": 1.0 + group.rank()}], told)
    leaf = q.clone().requires_grad_()
    loss = attend(query=leaf).square().sum()
    if scatter_heads:  # its gradients have none
        loss = torch.autograd.grad(loss, leaf, create_graph=True)[0].sum()
    message = "second derivatives" if scatter_heads else "all_gather_attention"
    with pytest.raises(NotImplementedError, match=message):
        loss.backward()
