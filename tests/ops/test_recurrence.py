"""`rwkv7`, and a recurrence of a user, against loops over positions in one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

import symm_cp
from symm_cp.ops.recurrent.recurrence import Summary
from symm_cp.testing import Ranks
from tests import device
from tests.exhaustive import exhaustive, some

pytestmark = device.devices("cpu", "simulated")

Tensors = list[torch.Tensor]


def rwkv7(
    r: torch.Tensor, w: torch.Tensor, k: torch.Tensor, v: torch.Tensor, a: torch.Tensor,
    b: torch.Tensor, edges: Sequence[int],
) -> tuple[torch.Tensor, Tensors]:  # fmt: skip
    """The output and the states after each position."""
    state = (k[:, 0, :, :, None] * v[:, 0, :, None, :]) * 0
    rows, states = [], [state]
    for t in range(r.shape[1]):
        state = state * (0 if t in edges else 1)
        read = torch.einsum("bhk,bhkv->bhv", a[:, t], state)
        state = w[:, t].exp()[..., None] * state + b[:, t, :, :, None] * read[:, :, None]
        state = state + k[:, t, :, :, None] * v[:, t, :, None]
        rows.append(0.7 * torch.einsum("bhk,bhkv->bhv", r[:, t], state))
        states.append(state)
    return torch.stack(rows, 1), states


def rwkv6(
    r: torch.Tensor, w: torch.Tensor, k: torch.Tensor, v: torch.Tensor, u: torch.Tensor,
    edges: Sequence[int],
) -> tuple[torch.Tensor, Tensors]:  # fmt: skip
    state = (k[:, 0, :, :, None] * v[:, 0, :, None, :]) * 0
    rows, states = [], [state]
    decay = w.reshape(*v.shape[:3], -1, 1).exp()
    for t in range(r.shape[1]):
        state = state * (0 if t in edges else 1)
        new = k[:, t, :, :, None] * v[:, t, :, None]
        rows.append(torch.einsum("bhk,bhkv->bhv", r[:, t], state + u[:, None] * new))
        state = decay[:, t] * state + new
        states.append(state)
    return torch.stack(rows, 1), states


def users(
    r: torch.Tensor, w: torch.Tensor, k: torch.Tensor, v: torch.Tensor, u: torch.Tensor,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """As in symm_cp/ops/README.md."""

    def summary(decay: Any, r: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Summary:
        bonus = (r * u.to(r.dtype) * k).sum(-1, keepdim=True) * v
        return Summary(k * decay.to_end, v, kept=(r, decay.pairs_before(r, k), bonus))

    def local(
        decay: Any, before: torch.Tensor, written: torch.Tensor, r: torch.Tensor,
        attended: torch.Tensor, bonus: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        return (r * decay.before) @ before + attended @ written + bonus

    return symm_cp.recurrence(summary, local, (r, k, v), w, **options)


def ours(*tensors: torch.Tensor, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return symm_cp.rwkv7(*tensors, scale=0.7, **options)


def of_rwkv7(length: int, dtype: torch.dtype) -> Tensors:
    """Fast and slow decays; `a` and `b` as the model makes them."""
    r, k = torch.randn(2, 2, length, 3, 5)
    v, w = torch.randn(2, length, 3, 4), -torch.rand(2, length, 3, 5).mul(4).exp() / 4
    key = torch.nn.functional.normalize(torch.randn(2, length, 3, 5), dim=-1)
    b = key * torch.rand(2, length, 3, 5)
    return [t.to(dtype) for t in (r, w, k, v, -key, b)]


def of_rwkv6(length: int, dtype: torch.dtype, by_feature: bool) -> Tensors:
    r, w, k, v, *_ = of_rwkv7(length, dtype)
    return [r, w if by_feature else w[..., 0], k, v, torch.randn(5).to(dtype)]


#: A sequential loop, the function, and its tensors; the last tensor of users is a parameter.
RULES: dict[str, tuple[Any, Any, Callable[[int, torch.dtype], Tensors]]] = {
    "rwkv7": (rwkv7, ours, of_rwkv7),
    "user, by feature": (rwkv6, users, lambda n, dtype: of_rwkv6(n, dtype, True)),
    "user, by head": (rwkv6, users, lambda n, dtype: of_rwkv6(n, dtype, False)),
}


def parts(rule: str, tensors: Tensors, rows: Any) -> Tensors:
    """A rank's part of tensors, of which the parameters are whole."""
    count = len(tensors) if rule == "rwkv7" else 4
    return [t[:, rows] if i < count else t for i, t in enumerate(tensors)]


def runs(
    group: dist.ProcessGroup, rule: str, sizes: list[int], edges: Sequence[int] = (),
    compiled: bool = False, head_tail: bool = False,
) -> None:  # fmt: skip
    rank, (loop, op, make) = group.rank(), RULES[rule]
    whole = [t.requires_grad_() for t in make(sum(sizes), torch.float64)]
    want, states = loop(*whole, edges)
    balancer = symm_cp.HeadTail(sum(sizes), len(sizes)) if head_tail else None
    starts = [sum(sizes[:r]) for r in range(len(sizes))]
    rows = [torch.arange(s, s + n) for s, n in zip(starts, sizes, strict=True)]
    if balancer is not None:
        rows = [balancer.positions(r) for r in range(len(sizes))]
    weights = torch.randn_like(want)
    ends = [int(each[-1]) + 1 if len(each) else s for each, s in zip(rows, starts, strict=True)]
    loss = (want * weights).sum() + sum((1 + r) * states[end].sum() for r, end in enumerate(ends))
    wanted = torch.autograd.grad(loss, whole)
    mine = [t.detach().clone().requires_grad_() for t in parts(rule, whole, rows[rank])]
    options: dict[str, Any] = {"group": group, "chunk_size": 4}
    if balancer is not None:
        options["layout"] = balancer.layout
    elif edges:
        options["sizes"] = sizes
    if edges:
        options["cu_seqlens"] = torch.tensor(edges)

    def layer(*args: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return op(*args, **options)

    if compiled:
        torch._dynamo.reset()
        layer = torch.compile(layer, fullgraph=True)
    out, final = layer(*mine)
    torch.testing.assert_close(out, want[:, rows[rank]])
    torch.testing.assert_close(final, states[ends[rank]])
    loss = (out * weights[:, rows[rank]]).sum() + (1 + rank) * final.sum()
    found = torch.autograd.grad(loss, mine)
    for grad, needed in zip(found, parts(rule, [*wanted], rows[rank]), strict=True):
        if grad.dim() == 1:  # of a parameter: the ranks' sum
            dist.all_reduce(grad, group=group)
        torch.testing.assert_close(grad, needed)
    with torch.inference_mode():  # compiled again, perhaps with other roundings
        torch.testing.assert_close(layer(*mine)[0], out)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("sizes", some([5, 2, 9], of=[[9], [8, 8], [5, 2, 9], [3, 0, 8, 1]]))
def test_equals_the_recurrence(ranks: Ranks, sizes: list[int], rule: str) -> None:
    ranks.run(len(sizes), runs, rule, sizes)


PACKED = [
    ([9], [0, 4, 5, 9]),
    ([8, 8], [0, 8, 16]),
    ([5, 2, 9], [0, 3, 4, 4, 8, 13, 16]),
    ([3, 0, 8, 1], [0, 3, 11, 12]),
]


@pytest.mark.parametrize("rule", some("rwkv7", of=RULES))
@pytest.mark.parametrize(("sizes", "edges"), some(PACKED[2], of=PACKED))
def test_packed_documents(ranks: Ranks, sizes: list[int], edges: list[int], rule: str) -> None:
    ranks.run(len(sizes), runs, rule, sizes, edges)


@exhaustive
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("edges", [[], [0, 5, 16]], ids=["whole", "packed"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_layouts(ranks: Ranks, rule: str, edges: list[int], world_size: int) -> None:
    ranks.run(world_size, runs, rule, [16 // world_size] * world_size, edges, head_tail=True)


def other_dtypes(group: dist.ProcessGroup) -> None:
    """16-bit inputs are computed in float32: only inputs and output are rounded."""
    for rule, (loop, op, make) in RULES.items():
        for dtype in (torch.float32, torch.bfloat16):
            whole = make(12, dtype)
            want, _ = loop(*(t.double() for t in whole), ())
            rows = slice(6 * group.rank(), 6 * group.rank() + 6)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                out, final = op(*parts(rule, whole, rows), group=group, chunk_size=4)
            assert (out.dtype, final.dtype) == (dtype, torch.float32)
            eps = max(torch.finfo(dtype).eps, 100 * torch.finfo(torch.float32).eps)
            torch.testing.assert_close(out.double(), want[:, rows], rtol=eps, atol=eps)


def test_dtypes_under_autocast(ranks: Ranks) -> None:
    ranks.run(2, other_dtypes)


def refuses(group: dist.ProcessGroup) -> None:
    r, w, k, v, a, b = of_rwkv7(8, torch.float32)
    named = {"r": r, "w": w, "k": k, "v": v, "a": a, "b": b}
    good, _ = symm_cp.rwkv7(**named, group=group)
    tensors = r, k, v

    def folds(**change: Any) -> Any:
        given = {"summary": len, "local": len, "tensors": tensors, "g": w, **change}
        return symm_cp.recurrence(**given, group=group)

    for run, error, text in (
        (lambda: symm_cp.rwkv7(**{**named, "a": a[..., :3]}, group=group), ValueError,
         r"rwkv7: a \[2, 8, 3, 3\] must be \(B, S, H, K\)"),
        (lambda: symm_cp.rwkv7(**{**named, "v": v[:, :7]}, group=group), ValueError,
         r"rwkv7: v \[2, 7, 3, 4\] must be"),
        (lambda: symm_cp.rwkv7(**{**named, "b": b.long()}, group=group), TypeError,
         "rwkv7: b is torch.int64, must be"),
        (lambda: symm_cp.rwkv7(**{**named, "w": None}, group=group), TypeError,
         "rwkv7: w is None, must be a tensor"),
        (lambda: symm_cp.rwkv7(**named, group=group, chunk_size=0), ValueError,
         "rwkv7: chunk_size=0 must be at least 1"),
        (lambda: symm_cp.rwkv7(**named, group=group, cu_seqlens=[1, 16]), ValueError,
         r"rwkv7: cu_seqlens \[1, 16\] must ascend from 0"),
        (lambda: folds(local=5), TypeError, "recurrence: .*local=5 must be functions"),
        (lambda: folds(tensors=(r, k[:, :7], v)), ValueError,
         r"recurrence: tensors\[1\] \[2, 7, 3, 5\] must begin with \[2, 8, 3\]"),
        (lambda: folds(tensors=(r, 5)), TypeError, r"recurrence: tensors\[1\] is 5"),
        (lambda: folds(tensors=()), ValueError, "recurrence: needs tensors"),
        (lambda: folds(), TypeError, "recurrence: "),  # `len` takes no decay
    ):  # fmt: skip
        with pytest.raises(error, match=text):
            run()
        with pytest.raises((error, RuntimeError), match=text):
            run() if group.rank() == 1 else symm_cp.rwkv7(**named, group=group)
        assert torch.equal(symm_cp.rwkv7(**named, group=group)[0], good)
    leaf = v.clone().requires_grad_()
    out, _ = symm_cp.rwkv7(r, w, k, leaf, a, b, group=group)
    (grad,) = torch.autograd.grad(out.square().sum(), leaf, create_graph=True)
    with pytest.raises(NotImplementedError, match="second derivatives"):
        torch.autograd.grad(grad.sum(), leaf)


@device.devices("cpu")  # on other devices ranks compare only if SYMM_CP_DEBUG=1
def test_refuses_what_it_cannot_do(ranks: Ranks) -> None:
    ranks.run(2, refuses)
