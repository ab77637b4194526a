"""`ulysses_projection` with RMSNorm and RoPE of heads, against whole sequences in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import symm_cp
from symm_cp.cuda.plans import refusals
from symm_cp.testing import Ranks
from tests import device
from tests.exhaustive import pairs, some
from tests.ops.calls import python_calls
from tests.ops.test_head_projection import heads_of
from tests.reference import reduce

pytestmark = device.devices(*device.NAMES)
D, E, EPS = 10, 4, 1e-5
Tensors = list[torch.Tensor]
#: Which of queries, keys and values have norms, and which are rotated.
SHAPINGS: dict[str, tuple[list[bool], list[bool]]] = {
    "qwen3": ([True, True, False], [True, True, False]),
    "llama": ([False] * 3, [True, True, False]),
    "norms": ([False, True, True], [False] * 3),
    "mixed": ([True, False, True], [False, True, True]),
}


def dense(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None,
    norm: torch.Tensor | None, rope: Any,
) -> torch.Tensor:  # fmt: skip
    y = x @ weight if bias is None else x @ weight + bias
    y = y.unflatten(2, (-1, E))
    if norm is not None:
        y = y / (y.square().mean(-1, keepdim=True) + EPS).sqrt() * norm
    if rope is not None:
        first, second = y.chunk(2, -1)
        cos, sin = (table.unsqueeze(-2) for table in rope)
        y = y * cos + torch.cat([-second, first], -1) * sin
    return y.transpose(1, 2)


def close(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype, terms: int) -> None:
    """Rounding: of the products of 10 terms, of four steps behind them, and of sums."""
    eps = torch.finfo(dtype).eps
    size = max(1.0, float(want.abs().max())) if want.numel() else 1.0
    torch.testing.assert_close(got.double(), want, rtol=0.0, atol=16 * eps * size * terms**0.5)


def problem(
    W: int, shaping: str, parts_of: str
) -> tuple[Any, Any, list[list[tuple[int, int]]], torch.Tensor, dict[str, Any], Any]:
    uneven = parts_of == "uneven"
    (H, G), given, (queries, keys) = heads_of(W, uneven)
    counts, ranges = [H, G, G], [queries, keys, keys]
    balancer = symm_cp.HeadTail(4 * W + 3, W) if uneven else None
    if parts_of == "empty":
        balancer = symm_cp.Sequential(1, W)
    layout = balancer or symm_cp.Sequential(3 * W, W)

    def rand(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.float64, requires_grad=True)

    S = layout.seq_length
    parts = {
        "weights": [rand(D, count * E) for count in counts],
        "biases": [rand(count * E) for count in counts] if uneven else [],
        "norms": [rand(E) if normed else None for normed in SHAPINGS[shaping][0]],
    }
    # A table for each sample, or one for all.
    rope = [torch.rand(*((2,) if uneven else ()), S, E, dtype=torch.float64) for _ in range(2)]
    heads = None if given is None else [given[0], given[1], given[1]]
    return balancer, heads, ranges, rand(2, S, D), parts, (layout, counts, rope)


def projects(group: dist.ProcessGroup, shaping: str, parts_of: str, dtype: torch.dtype) -> None:
    W, rank, uneven = group.size(), group.rank(), parts_of == "uneven"
    balancer, heads, ranges, x, parts, (layout, counts, rope) = problem(W, shaping, parts_of)
    rotated, rows = SHAPINGS[shaping][1], layout.positions(rank)
    grads = [torch.randn(2, H, len(x[0]), E, dtype=torch.float64) for H in counts]
    loss, wholes = x.new_zeros(()), []
    for index, (weight, norm) in enumerate(zip(parts["weights"], parts["norms"], strict=True)):
        bias = parts["biases"][index] if parts["biases"] else None
        wholes.append(dense(x, weight, bias, norm, rope if rotated[index] else None))
        for first, last in ranges[index]:  # the loss of all ranks
            loss = loss + (wholes[-1][:, first:last] * grads[index][:, first:last]).sum()
    leaves = [x, *(t for each in parts.values() for t in each if t is not None)]
    wanted = torch.autograd.grad(loss, leaves)
    mine = [t.detach().to(dtype).requires_grad_() for t in (x[:, rows], *leaves[1:])]
    tables = tuple(table[..., rows, :].to(dtype) for table in rope) if any(rotated) else None

    def run(x: torch.Tensor, *others: torch.Tensor) -> Any:
        left = list(others)
        weights, biases = left[:3], left[3:6] if uneven else None
        norms = iter(left[6 if uneven else 3 :])
        return symm_cp.ulysses_projection(
            x, weights, features=E, group=group, biases=biases, load_balancer=balancer,
            heads=heads, norms=[next(norms) if n is not None else None for n in parts["norms"]],
            eps=EPS, rope=tables, rotated=rotated if any(rotated) else None,
        )  # fmt: skip

    before: list[Any] = []
    for _ in range(4):  # the last calls are a plan's
        got = run(*mine)
        for index, (y, whole, held) in enumerate(zip(got, wholes, ranges, strict=True)):
            assert y.is_contiguous(), index
            close(y, whole[:, slice(*held[rank])], dtype, D)
        sent = [g[:, slice(*r[rank])].to(dtype) for g, r in zip(grads, ranges, strict=True)]
        found = [*torch.autograd.grad(got, mine, sent)]
        assert all(map(torch.equal, before, found))
        before = found
    close(found[0], wanted[0][:, rows], dtype, 64)
    for grad, want in zip(found[1:], wanted[1:], strict=True):
        each = [torch.empty_like(grad) for _ in range(W)]
        dist.all_gather(each, grad.contiguous(), group=group)
        close(reduce(each).value, want, dtype, 64 * W)
    with torch.inference_mode():
        assert all(map(torch.equal, run(*mine), got))


PLAIN: list[Any] = [
    ("qwen3", "equal", torch.float32, 2),
    ("mixed", "uneven", torch.bfloat16, 3),
    ("qwen3", "empty", torch.float32, 3),
]
COMBINATIONS = pairs(
    SHAPINGS,
    ("equal", "uneven", "empty"),
    (torch.float64, torch.float32, torch.bfloat16),
    (1, 2, 3, 4),
    also=PLAIN,
)


@pytest.mark.parametrize(
    ("shaping", "parts_of", "dtype", "world_size"), some(*PLAIN, of=COMBINATIONS)
)
def test_projection(
    ranks: Ranks, world_size: int, shaping: str, parts_of: str, dtype: torch.dtype
) -> None:
    ranks.run(world_size, projects, shaping, parts_of, dtype)


def modes(group: dist.ProcessGroup) -> None:
    x, w, norm = torch.randn(1, 3, D), torch.randn(D, 2 * E * group.size()), torch.ones(E)
    tables = torch.rand(2, 3, E)

    def run(x: torch.Tensor, w: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
        return symm_cp.ulysses_projection(
            x, w, features=E, group=group, norms=norm, rope=tuple(tables), rotated=True
        )

    with torch.autocast("cpu", dtype=torch.bfloat16):
        casted = run(x, w, norm)
    assert torch.equal(casted, run(*(t.bfloat16() for t in (x, w, norm))))
    with torch.no_grad():
        assert not run(x, w.requires_grad_(), norm).requires_grad
    for empty in (x[:0], x[:, :0]):
        tables = torch.rand(2, empty.shape[1], E)
        y = run(empty, w, norm)
        assert y.shape == (len(empty), 2, empty.shape[1] * group.size(), E)
        assert all(not g.any() for g in torch.autograd.grad(y.sum(), [w]))
    tables = torch.rand(2, 3, E)
    run(x, w.detach(), norm)
    run(x, w.detach(), norm)
    calls = python_calls(
        lambda: torch.ops.symm_mem._project_normed_to_heads(
            x, [w.detach()], [], E, [norm], [True], 1e-6, *tables, [True], group.group_name
        )
    )
    assert calls == [], refusals()


@device.devices("cpu")
def test_modes(ranks: Ranks) -> None:
    ranks.run(2, modes)


def refuses(group: dist.ProcessGroup) -> None:
    x, w = torch.zeros(1, 3, 4), torch.zeros(4, 8)
    rope = torch.zeros(3, 2), torch.zeros(3, 2)
    odd = torch.zeros(3, 1), torch.zeros(3, 1)

    def project(**change: Any) -> torch.Tensor:
        arguments = {"features": 2, "group": group, **change}
        return symm_cp.ulysses_projection(x, w, **arguments)

    good = project()
    for error, text, change in (
        (ValueError, r"norms\[0\] has shape \[3\], must be \[2\]", {"norms": torch.ones(3)}),
        (TypeError, r"norms\[0\] is torch.float64", {"norms": torch.ones(2).double()}),
        (TypeError, r"norms\[0\] is 5, must be a tensor or None", {"norms": [5]}),
        (ValueError, "norms has 2 entries for 1 matrices", {"norms": [None, None]}),
        (ValueError, "eps=0.0 must be positive", {"norms": torch.ones(2), "eps": 0.0}),
        (ValueError, "rope and rotated=None must be given together", {"rope": rope}),
        (ValueError, "rope and rotated=True must be given together", {"rotated": True}),
        (ValueError, "rotated has 2 entries", {"rope": rope, "rotated": [True, False]}),
        (ValueError, "an even number of features: 1",
         {"rope": odd, "rotated": True, "features": 1}),
        (ValueError, r"cos of rope has shape \[2, 2\], must be \[1, 3, 2\] or \[3, 2\]",
         {"rope": (rope[0][:2], rope[1]), "rotated": True}),
        (TypeError, "sin of rope is torch.int64",
         {"rope": (rope[0], rope[1].long()), "rotated": True}),
        (NotImplementedError, "cos of rope has no gradient",
         {"rope": (torch.zeros(3, 2, requires_grad=True), rope[1]), "rotated": True}),
    ):  # fmt: skip
        with pytest.raises(error, match=f"ulysses_projection: .*{text}"):
            project(**change)
        with pytest.raises((error, RuntimeError), match=f"ulysses_projection: .*{text}"):
            project(**(change if group.rank() == 1 else {"norms": torch.ones(2)}))
        assert torch.equal(project(), good)
    leaf = torch.randn(1, 3, 4, requires_grad=True)
    y = symm_cp.ulysses_projection(leaf, w, features=2, group=group, norms=torch.ones(2))
    (grad,) = torch.autograd.grad(y.square().sum(), leaf, create_graph=True)
    with pytest.raises(NotImplementedError, match="second derivatives"):
        grad.sum().backward()


@device.devices("cpu")
def test_refuses_what_does_not_fit(ranks: Ranks) -> None:
    ranks.run(2, refuses)
