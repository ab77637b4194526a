"""`moe.dispatch` and `moe.combine`: against one process that has all tokens and all experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from symm_cp import moe
from tests import device
from tests.exhaustive import some
from tests.ops.refusals import Wrong, check_refusals

FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
EPS = {torch.float16: 2**-24, torch.bfloat16: 2**-24}  # sums are in float32, and rounded once


def routed(
    all_experts: list[torch.Tensor], num_experts: int, ranks: int, capacity: int | None = None
) -> list[list[tuple[int, int, int]]]:
    """The rows of each rank's experts: (rank, token, choice) of each, in order."""
    rows: list[list[tuple[int, int, int]]] = [[] for _ in range(ranks)]
    for expert in range(num_experts):
        found = [
            (rank, token, choice)
            for rank, experts in enumerate(all_experts)
            for token, choice in (experts == expert).nonzero().tolist()
        ]
        rows[expert * ranks // num_experts] += found[:capacity]
    return rows


class Case:
    """Tokens, experts and weights of all ranks, equal on all of them."""

    def __init__(
        self,
        ranks: int,
        sizes: list[int],
        num_experts: int,
        top_k: int,
        features: tuple[int, ...] = (5,),
        dtype: torch.dtype = torch.float64,
        seed: int = 0,
        skew: float = 0.0,
    ) -> None:
        on: Any = {"generator": torch.Generator(device.name()).manual_seed(seed + 1)}
        self.num_experts, self.top_k = num_experts, top_k
        self.tokens = [torch.randn(n, *features, **on).to(dtype) for n in sizes]
        self.weights = [torch.rand(n, top_k, **on).to(dtype) for n in sizes]
        self.experts = []
        for n in sizes:
            scores = torch.rand(n, num_experts + 1, **on)
            scores[:, :1] += skew
            chosen = scores.topk(top_k, dim=1).indices
            self.experts.append(torch.where(chosen == num_experts, -1, chosen))  # or none at all
        self.outputs = [torch.randn(n, *features, **on).to(dtype) for n in sizes]


def layer(rows: torch.Tensor, begin: int, ends: torch.Tensor) -> torch.Tensor:
    """Experts that differ from each other: the e-th multiplies by e + 2, and squares."""
    parts = torch.tensor_split(rows, ends.tolist()[:-1])
    return torch.cat([part.square() * (begin + e + 2) for e, part in enumerate(parts)])


def dense(case: Case, capacity: int | None, ranks: int) -> tuple[list[torch.Tensor], ...]:
    """Outputs of all ranks, and the gradients of all tokens and weights, in one process."""
    tokens = [t.detach().double().requires_grad_() for t in case.tokens]
    weights = [w.detach().double().requires_grad_() for w in case.weights]
    outputs = [t * 0 for t in tokens]
    taken = {
        row for rows in routed(case.experts, case.num_experts, ranks, capacity) for row in rows
    }
    for rank, token, choice in sorted(taken):
        factor = weights[rank][token, choice] * (int(case.experts[rank][token, choice]) + 2)
        picked = torch.zeros(len(outputs[rank]), dtype=torch.float64, device=device.name())
        picked[token] = 1
        row = picked.view(-1, *(1,) * (outputs[rank].dim() - 1))
        outputs[rank] = outputs[rank] + row * factor * tokens[rank][token].square()
    total = sum((out * g.double()).sum() for out, g in zip(outputs, case.outputs, strict=True))
    grads = torch.autograd.grad(total, tokens + weights, allow_unused=True)
    given = zip(grads, tokens + weights, strict=True)
    found = [torch.zeros_like(x) if g is None else g for g, x in given]
    return [o.detach() for o in outputs], found[: len(tokens)], found[len(tokens) :]


def close(found: torch.Tensor, want: torch.Tensor, terms: int) -> None:
    eps = torch.finfo(found.dtype).eps
    torch.testing.assert_close(found.double(), want, rtol=terms * eps, atol=8 * terms * eps)


def agrees(group: dist.ProcessGroup, case: Case, capacity: int | None = None) -> None:
    W, rank = group.size(), group.rank()
    tokens = case.tokens[rank].clone().requires_grad_()
    weights = case.weights[rank].clone().requires_grad_()
    rows, routing = moe.dispatch(
        tokens, case.experts[rank], case.num_experts, group=group, capacity=capacity
    )
    expected = routed(case.experts, case.num_experts, W, capacity)[rank]
    assert rows.is_contiguous()
    assert rows.shape == (len(expected), *tokens.shape[1:])
    for row, (source, token, _) in zip(rows, expected, strict=True):
        assert torch.equal(row, case.tokens[source][token])
    assert routing.ends[-1] == len(expected)
    local = case.num_experts // W
    out = moe.combine(layer(rows, rank * local, routing.ends), weights, routing)
    grads = torch.autograd.grad(out, (tokens, weights), case.outputs[rank])
    outputs, of_tokens, of_weights = dense(case, capacity, W)
    width = case.tokens[rank][:1].numel()
    close(out, outputs[rank], 8 * case.top_k)
    close(grads[0], of_tokens[rank], 16 * case.top_k)
    close(grads[1], of_weights[rank], 32 * (1 + width))


def many_agree(
    group: dist.ProcessGroup,
    seeds: range,
    dtypes: list[torch.dtype],
    make: Callable[..., Any] = Case,
    check: Callable[..., None] = agrees,
) -> None:
    W = group.size()
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)

        def draw(low: int, high: int, generator: torch.Generator = generator) -> int:
            return int(torch.randint(low, high, (1,), generator=generator))

        sizes = [draw(0, 9) for _ in range(W)]
        num_experts = W * draw(1, 4)
        case = make(
            W, sizes, num_experts, draw(1, min(5, num_experts + 1)),
            features=[(), (7,), (3, 2), (1,)][draw(0, 4)], dtype=dtypes[seed % len(dtypes)],
            seed=seed, skew=[0.0, 0.0, 5.0][draw(0, 3)],
        )  # fmt: skip
        check(group, case, [None, None, 0, 3][draw(0, 4)])


def drawn() -> int:
    return int(torch.randint(1 << 20, (1,)))


@pytest.mark.parametrize("world_size", some(2, of=[1, 2, 3]))
@pytest.mark.ranks
def test_wrong_arguments(group: dist.ProcessGroup, world_size: int) -> None:
    W, rank = group.size(), group.rank()
    case = Case(W, [4] * W, 2 * W, 2, features=(3,))
    tokens, experts, weights = case.tokens[rank], case.experts[rank], case.weights[rank]

    def call(**changed: Any) -> torch.Tensor:
        given = {"tokens": tokens, "experts": experts, "num_experts": 2 * W, **changed}
        back = {name: given.pop(name) for name in ("rows", "weights") if name in given}
        rows, routing = moe.dispatch(**given, group=group)
        return moe.combine(back.get("rows", rows), back.get("weights", weights), routing)

    wrong: list[Wrong] = [
        (ValueError, "experts .* must be .tokens, experts of each.", {"experts": experts[:3]}),
        (TypeError, "experts is torch.float64, must be torch.int64", {"experts": experts.double()}),
        (ValueError, f"expert {2 * W} .*must be from 0 to", {"experts": experts * 0 + 2 * W}),
        (ValueError, "expert -2 .*or -1 for none", {"experts": experts * 0 - 2}),
        (ValueError, f"num_experts={-W} must be a positive multiple", {"num_experts": -W}),
        (ValueError, "capacity=-1 must not be negative", {"capacity": -1}),
        (ValueError, r"weights \[4, 3\] must be \[4, 2\]", {"weights": weights.new_ones(4, 3)}),
        (TypeError, "weights is torch.int64", {"weights": torch.ones_like(experts)}),
        (ValueError, "rows .* must have", {"rows": tokens.new_ones(99, 3)}),
        (TypeError, "rows is torch.int64", {"rows": torch.ones(8, 3, dtype=torch.int64)}),
    ]
    check_refusals(group, call, wrong)


@pytest.mark.ranks(2)
def test_tables_of_others(group: dist.ProcessGroup) -> None:
    """Tables that belong to no routing of this rank are refused, whatever is in them."""
    W = group.size()
    rows, routing = moe.dispatch(torch.ones(2, 3), torch.zeros(2, 1).long(), W, group=group)
    for table in (
        routing.table[:-1],
        routing.table + 1,
        routing.table * 0 - 5,
        torch.full_like(routing.table, 1 << 60),
        routing.table.float(),
        routing.table[: W * W - 1],
    ):
        with pytest.raises((ValueError, TypeError), match=r"table|weights|pairs"):
            moe.combine(rows, torch.ones(2, 1), routing._replace(table=table))
    assert torch.equal(moe.combine(rows, None, routing), torch.ones(2, 3))
    with pytest.raises(TypeError, match="routing is Tensor, must be from dispatch"):
        moe.combine(rows, None, routing.table)  # type: ignore[arg-type]
