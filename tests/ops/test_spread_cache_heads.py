"""`spread_cache_attention(scatter_heads=True)` against dense attention to the whole cache."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import symm_cp
from symm_cp.testing import Ranks
from tests import attention_reference
from tests.attention_reference import Problem
from tests.device import devices
from tests.exhaustive import pairs, some
from tests.ops.test_spread_cache import Case, problem_of

pytestmark = devices("cpu", "simulated", "cuda")

CASES = {
    "a token": Case(70, 1, heads=(12, 4)),
    "a token, padded": Case(130, 1, hidden=100, heads=(12, 12)),
    "a token, keys on one rank": Case(3, 1, block=8, heads=(12, 2)),
    "tokens": Case(90, 5, block=8, heads=(12, 4)),
    "prefill": Case(150, 150, block=16, heads=(12, 4)),
    "window": Case(80, 30, window_left=11, heads=(12, 4)),
    "window, padded": Case(80, 30, window_left=11, hidden=60, heads=(12, 4)),
    "not causal": Case(50, 6, causal=False, heads=(12, 4)),
    "sinks, scale": Case(60, 3, sinks=True, options={"scale": 0.3}, heads=(12, 4)),
    "soft cap": Case(60, 3, sinks=True, options={"softcap": 2.0}, heads=(12, 4)),
    "values of other width": Case(60, 2, features=(8, 5), heads=(12, 12)),
    "no query": Case(20, 0, heads=(12, 4)),
}
DTYPES = (torch.float32, torch.float64, torch.bfloat16)
PLAIN = [("tokens", torch.bfloat16, 2), ("sinks, scale", torch.float32, 3)]


def given(
    group: dist.ProcessGroup, case: Case, problems: list[Problem]
) -> tuple[dict[str, torch.Tensor], dict[str, Any], torch.Tensor]:
    """The tensors that take gradients, the other arguments, and this rank's positions."""
    positions = torch.arange(case.keys)
    own = positions[positions // case.block % group.size() == group.rank()]
    q, k, v = (torch.cat([getattr(p, name) for p in problems]) for name in "qkv")
    tensors = {"query": q, "key": k[:, :, own], "value": v[:, :, own]}
    if problems[0].sinks is not None:
        tensors["sinks"] = problems[0].sinks
    mask = torch.ones(len(problems), 1, 1, len(own), dtype=torch.bool)
    mask[0] = own >= case.hidden
    places = {"key_positions": own, "first_query": case.keys - case.new}
    options = {
        "group": group,
        "mask": mask if case.hidden else None,
        "window_left": case.window_left,
        "scatter_heads": True,
        **(places if case.causal else {}),
        **(case.options or {}),
    }
    return {name: t.clone().requires_grad_() for name, t in tensors.items()}, options, own


def trained(
    group: dist.ProcessGroup, case: Case, problems: list[Problem]
) -> tuple[torch.Tensor, ...]:
    """This rank's results, its positions, and its gradients."""
    tensors, options, own = given(group, case, problems)
    names, W, rank = list(tensors), group.size(), group.rank()

    def attend(*inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return symm_cp.spread_cache_attention(**dict(zip(names, inputs, strict=True)), **options)

    grad_out = torch.cat([p.grad_out for p in problems]).to(case.dtype).chunk(W, 1)[rank]
    grad_lse = torch.cat([p.grad_lse for p in problems if p.grad_lse is not None])
    inputs = list(tensors.values())
    found: list[Any] = []
    for _ in range(4):  # the last calls are a plan's
        out, lse = attend(*inputs)
        seen = torch.where(lse == -torch.inf, 0.0, lse)
        sent = grad_lse.chunk(W, 1)[rank].to(lse.dtype)
        grads = torch.autograd.grad((out, seen), inputs, (grad_out, sent))
        before, found = found, [out.detach(), lse.detach(), own, *grads]
        assert all(map(torch.equal, before, found))
    with torch.inference_mode():
        assert torch.equal(attend(*inputs)[0], found[0])
    assert all(t.is_contiguous() for t in found[:2])
    return tuple(found)


def problems_of(case: Case) -> list[Problem]:
    both = []
    for hidden in (case.hidden, 0):
        problem = problem_of(case, hidden)
        H, S, V = problem.q.shape[1], case.new, problem.v.shape[3]
        grads = {"grad_out": torch.randn(1, H, S, V), "grad_lse": torch.randn(1, H, S)}
        both.append(replace(problem, **grads))
    return [both[0], replace(both[1], sinks=both[0].sinks)]


def compare(case: Case, problems: list[Problem], results: list[Any]) -> None:
    out, lse = (torch.cat([found[i] for found in results], 1) for i in range(2))
    assert (out.dtype, lse.dtype) == (case.dtype, torch.promote_types(case.dtype, torch.float32))
    positions = torch.cat([found[2] for found in results])
    grads = {"q": sum(found[3].double() for found in results)}
    for name, at in (("k", 4), ("v", 5)):
        whole = torch.cat([found[at] for found in results], 2)
        grads[name] = torch.empty_like(whole).index_copy_(2, positions, whole)
    rows = {"out": case.new, "lse": case.new, "q": case.new, "k": case.keys, "v": case.keys}
    of_sinks = 0.0
    for sample, problem in enumerate(problems):
        size = problem.terms()
        exact, dense = problem.solve(torch.float64), problem.solve(case.dtype)
        for part, found in {"out": out, "lse": lse, **grads}.items():
            attention_reference.check(
                part, found[sample : sample + 1], exact[part], dense[part],
                torch.arange(rows[part]), case.dtype, case.keys + case.new,
                size=size.get(part, 1.0),
            )  # fmt: skip
        if problem.sinks is not None:
            of_sinks = of_sinks + exact["sinks"]
    if problems[0].sinks is not None:
        summed = sum(found[6].double() for found in results)
        eps = 64 * max(torch.finfo(case.dtype).eps, torch.finfo(problems[0].sinks.dtype).eps)
        torch.testing.assert_close(summed, of_sinks, rtol=eps, atol=eps)


@pytest.mark.parametrize(
    ("name", "dtype", "world_size"),
    some(*PLAIN, of=pairs(CASES, DTYPES, (1, 2, 3, 4), also=PLAIN)),
)
def test_equals_dense_attention(
    ranks: Ranks, name: str, dtype: torch.dtype, world_size: int
) -> None:
    case = replace(CASES[name], dtype=dtype)
    problems = problems_of(case)
    compare(case, problems, ranks.run(world_size, trained, case, problems))


@pytest.mark.parametrize("world_size", some(2, of=[2, 4]))
@pytest.mark.ranks
def test_equals_gathered_results(group: dist.ProcessGroup, world_size: int) -> None:
    """The heads of the result that all ranks get without `scatter_heads`."""
    torch.manual_seed(0)
    q = torch.randn(2, 8, 3, 16)
    torch.manual_seed(group.rank())
    k, v = (torch.randn(2, 4, 30, 16) for _ in range(2))
    whole = symm_cp.spread_cache_attention(q, k, v, group=group)
    own = symm_cp.spread_cache_attention(q, k, v, group=group, scatter_heads=True)
    for part, everything in zip(own, whole, strict=True):
        torch.testing.assert_close(part, everything.chunk(group.size(), 1)[group.rank()])
