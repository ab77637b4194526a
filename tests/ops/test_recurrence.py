"""Linear recurrences over parts of any lengths and layouts, against loops over positions."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import symm_cp
from symm_cp.ops.recurrent.fragments import runs_of
from symm_cp.schedule import SequenceLayout, head_tail, sequential
from symm_cp.testing import Ranks
from tests import device
from tests.exhaustive import pairs, some
from tests.ops.functions import users
from tests.ops.refusals import check_refusals

pytestmark = device.devices("cpu", "simulated")

Tensors = list[torch.Tensor]
Results = tuple[torch.Tensor, Tensors]

# --- each recurrence in one process: its output, and the states after each position -----------


def gated(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, *beta: torch.Tensor,
    edges: Sequence[int] = (),
) -> Results:  # fmt: skip
    """The delta rule, or linear attention without `beta`."""
    repeats = v.shape[2] // k.shape[2]
    q, k = (t.repeat_interleave(repeats, 2) for t in (q, k))
    state = (k[:, 0, :, :, None] * v[:, 0, :, None, :]) * 0
    rows, states, decay = [], [state], g.reshape(*v.shape[:3], -1, 1).exp()
    for t in range(v.shape[1]):
        state = state * (0 if t in edges else decay[:, t])
        written = v[:, t]
        if beta:
            missing = written - torch.einsum("bhk,bhkv->bhv", k[:, t], state)
            written = beta[0][:, t, :, None] * missing
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], written)
        rows.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state) * k.shape[-1] ** -0.5)
        states.append(state)
    return torch.stack(rows, 1), states


def rwkv7(
    r: torch.Tensor, w: torch.Tensor, k: torch.Tensor, v: torch.Tensor, a: torch.Tensor,
    b: torch.Tensor, edges: Sequence[int] = (),
) -> Results:  # fmt: skip
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
    edges: Sequence[int] = (),
) -> Results:  # fmt: skip
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


# --- their inputs: whole sequences of two samples, equal on all ranks; fast and slow decays ---


def unit(*shape: int) -> torch.Tensor:
    return F.normalize(torch.randn(shape), dim=-1)


def decays(*shape: int) -> torch.Tensor:
    return -torch.rand(shape).mul(4).exp() / 4


def of_gated(length: int, features: tuple[int, ...], erasing: bool) -> Tensors:
    heads = (2, length, 4)
    beta = [torch.rand(heads)] if erasing else []
    q, k = unit(2, length, 2, 5), unit(2, length, 2, 5)
    return [q, k, torch.randn(*heads, 3), decays(*heads, *features), *beta]


def of_rwkv7(length: int) -> Tensors:
    """`a` and `b` as the model makes them."""
    heads = (2, length, 3)
    r, k, key = torch.randn(*heads, 5), torch.randn(*heads, 5), unit(*heads, 5)
    return [r, decays(*heads, 5), k, torch.randn(*heads, 4), -key, key * torch.rand(*heads, 5)]


def of_user(length: int, features: tuple[int, ...]) -> Tensors:
    """The last tensor is a parameter."""
    heads = (2, length, 3)
    r, k = torch.randn(*heads, 5), torch.randn(*heads, 5)
    return [r, decays(*heads, *features), k, torch.randn(*heads, 4), torch.randn(5)]


def ours(*tensors: torch.Tensor, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return symm_cp.rwkv7(*tensors, scale=0.7, **options)


#: A loop, the function, and its tensors.
RULES: dict[str, tuple[Any, Any, Callable[[int], Tensors]]] = {
    "delta": (gated, symm_cp.gated_delta_rule, lambda n: of_gated(n, (), True)),
    "delta, by feature": (gated, symm_cp.gated_delta_rule, lambda n: of_gated(n, (5,), True)),
    "linear": (gated, symm_cp.gated_linear_attention, lambda n: of_gated(n, (), False)),
    "linear, by feature": (
        gated, symm_cp.gated_linear_attention, lambda n: of_gated(n, (5,), False)
    ),
    "rwkv7": (rwkv7, ours, of_rwkv7),
    "user": (rwkv6, users, lambda n: of_user(n, ())),
    "user, by feature": (rwkv6, users, lambda n: of_user(n, (5,))),
}  # fmt: skip


def parts(tensors: Tensors, rows: Any) -> Tensors:
    """A rank's part of tensors, of which the parameters are whole."""
    return [t if t.dim() == 1 else t[:, rows] for t in tensors]


# --- against the loops ------------------------------------------------------------------------

LENGTH = 23
EDGES: dict[str, list[int]] = {"whole": [], "packed": [0, 2, 9, 9, 10, LENGTH]}
KINDS = ("equal", "any sizes", "head-tail", "documents", "in turns", "in order")


def layout_of(kind: str, ranks: int) -> SequenceLayout:
    if kind == "equal":
        return sequential(6 * ranks, ranks)
    if kind == "any sizes":
        sizes = ([LENGTH], [5, 18], [5, 2, 16], [3, 0, 8, 12])[ranks - 1]
        return SequenceLayout(ranks, tuple(range(ranks)), tuple(sizes))
    if kind == "head-tail":
        return head_tail(LENGTH, ranks)
    if kind == "documents":
        lengths = [b - a for a, b in itertools.pairwise(EDGES["packed"])]
        return symm_cp.PerDocumentHeadTail(lengths, ranks).layout
    if kind == "in order":
        return sequential(LENGTH, ranks)
    # Dealt in turns, like blocks of a mask; some are empty, and rank 0 has two in a row.
    order = [c for rank in range(ranks) for c in range(4 * ranks) if (c // 2) % ranks == rank]
    lengths = [3, 0, 1, 2] * ranks
    return SequenceLayout(ranks, tuple(order), (LENGTH - sum(lengths[1:]), *lengths[1:]))


def options_of(kind: str, layout: SequenceLayout, edges: Sequence[int]) -> dict[str, Any]:
    """The arguments that tell a function about parts and documents."""
    told: dict[str, Any] = {"cu_seqlens": torch.tensor(edges)} if edges else {}
    if kind not in ("equal", "any sizes"):
        told["layout"] = layout
    elif edges or kind == "any sizes":
        told["sizes"] = list(layout.chunk_lengths)
    return told


def runs(group: dist.ProcessGroup, rule: str, kind: str, packed: str) -> None:
    rank, (loop, op, make) = group.rank(), RULES[rule]
    layout = layout_of(kind, group.size())
    edges = [min(edge, layout.length) for edge in EDGES[packed]]
    edges = edges and [*edges[:-1], layout.length]
    whole = [t.double().requires_grad_() for t in make(layout.length)]
    want, states = loop(*whole, edges=edges)
    weights = torch.randn_like(want)
    of_ranks = [torch.tensor(list(layout.positions(r)), dtype=int) for r in range(group.size())]
    rows = of_ranks[rank]
    ends = [int(each[-1]) + 1 if len(each) else None for each in of_ranks]
    if kind == "in turns":  # the state after a rank's last position may be another rank's
        ends = [end if end == layout.length else None for end in ends]
    if kind == "any sizes":  # a rank without positions has the state of those before it
        ends = [sum(layout.chunk_lengths[: r + 1]) for r in range(group.size())]
    loss = (want * weights).sum()
    loss = loss + sum((1 + r) * states[end].sum() for r, end in enumerate(ends) if end)
    wanted = torch.autograd.grad(loss, whole)
    mine = [t.detach().clone().requires_grad_() for t in parts(whole, rows)]
    out, final = op(*mine, group=group, chunk_size=3, **options_of(kind, layout, edges))
    torch.testing.assert_close(out, want[:, rows])
    loss = (out * weights[:, rows]).sum()
    if ends[rank] is not None:
        torch.testing.assert_close(final, states[ends[rank]])
        loss = loss + (1 + rank) * final.sum()
    found = torch.autograd.grad(loss, mine)
    for grad, needed in zip(found, parts([*wanted], rows), strict=True):
        if grad.dim() == 1:  # of a parameter: the ranks' sum
            dist.all_reduce(grad, group=group)
        torch.testing.assert_close(grad, needed)


PLAIN: list[Any] = [
    (2, "equal", "whole", "delta, by feature"),
    (3, "any sizes", "packed", "delta"),
    (4, "any sizes", "whole", "linear"),
    (2, "head-tail", "whole", "delta"),
    (3, "head-tail", "packed", "linear, by feature"),
    (3, "in turns", "whole", "delta, by feature"),
    (3, "any sizes", "packed", "rwkv7"),
    (4, "equal", "whole", "user"),
    (3, "head-tail", "packed", "user, by feature"),
]
CASES = pairs((1, 2, 3, 4), KINDS, EDGES, RULES, also=PLAIN)


@pytest.mark.parametrize(("world_size", "kind", "packed", "rule"), some(*PLAIN, of=CASES))
def test_equals_the_loop(ranks: Ranks, world_size: int, kind: str, packed: str, rule: str) -> None:
    ranks.run(world_size, runs, rule, kind, packed)


@pytest.mark.ranks(2)
def test_dtypes_under_autocast(group: dist.ProcessGroup) -> None:
    """16-bit inputs are computed in float32: only inputs and output are rounded."""
    rows = slice(6 * group.rank(), 6 * group.rank() + 6)
    for (loop, op, make), dtype in itertools.product(
        RULES.values(), (torch.float32, torch.bfloat16)
    ):
        whole = [t.to(dtype) for t in make(12)]
        want, _ = loop(*(t.double() for t in whole))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out, final = op(*parts(whole, rows), group=group, chunk_size=4)
        assert (out.dtype, final.dtype) == (dtype, torch.float32)
        eps = max(torch.finfo(dtype).eps, 100 * torch.finfo(torch.float32).eps)
        torch.testing.assert_close(out.double(), want[:, rows], rtol=eps, atol=eps)


# --- errors -----------------------------------------------------------------------------------


def wrong_calls(group: dist.ProcessGroup) -> list[tuple[Any, type[Exception], str]]:
    q, k, v, g, beta = of_gated(8, (), True)
    given = {"query": q, "key": k, "value": v, "g": g, "beta": beta}
    r, w, key, value, a, b = of_rwkv7(8)
    named = {"r": r, "w": w, "k": key, "v": value, "a": a, "b": b}
    layout = head_tail(16, 2)
    unsorted = SequenceLayout(2, (3, 0, 1, 2), (4,) * 4)

    def delta(**change: Any) -> Any:
        return lambda: symm_cp.gated_delta_rule(**{**given, "group": group, **change})

    def rwkv(**change: Any) -> Any:
        return lambda: symm_cp.rwkv7(**{**named, "group": group, **change})

    def folds(**change: Any) -> Any:
        rest = {"summary": len, "local": len, "tensors": (r, key, value), "g": w, **change}
        return lambda: symm_cp.recurrence(**rest, group=group)

    return [
        (delta(key=k[..., :3]), ValueError, r"gated_delta_rule: query \[2, 8, 2, 5\] and key"),
        (delta(value=v[:, :, :3]), ValueError, "a multiple of its heads"),
        (delta(beta=beta[..., :3]), ValueError, r"beta \[2, 8, 3\] must be \[2, 8, 4\]"),
        (delta(g=g[..., None].expand(-1, -1, -1, 2)), ValueError,
         r"g \[2, 8, 4, 2\] must be \[2, 8, 4\] or \[2, 8, 4, 5\]"),
        (delta(chunk_size=0), ValueError, "chunk_size=0 must be at least 1"),
        (delta(cu_seqlens=[0, 9, 8]), ValueError,
         r"cu_seqlens \[0, 9, 8\] must ascend from 0 to the 16 positions"),
        (delta(cu_seqlens=[1, 16]), ValueError, "must ascend from 0"),
        (delta(cu_seqlens=[0.0, 16.0]), TypeError, "of ints, or a 1-D tensor of int32 or int64"),
        (delta(cu_seqlens=[0, 16], sizes=[9, 7]), ValueError,
         r"sizes=\[9, 7\] must have 2 numbers, for rank"),
        (delta(layout=head_tail(16, 4)), ValueError, "layout is of 4 ranks, the group has 2"),
        (delta(layout=head_tail(12, 2)), ValueError, r"layout gives rank \d 6 positions, its part"),
        (delta(layout=layout, sizes=[8, 8]), ValueError, "got sizes and layout"),
        (delta(layout=unsorted), NotImplementedError, "must hold their chunks in ascending order"),
        (lambda: symm_cp.gated_linear_attention(q, k, v, g[..., :3], group=group), ValueError,
         r"gated_linear_attention: g \[2, 8, 3\] must be \[2, 8, 4\]"),
        (rwkv(a=a[..., :3]), ValueError, r"rwkv7: a \[2, 8, 3, 3\] must be \(B, S, H, K\)"),
        (rwkv(v=value[:, :7]), ValueError, r"rwkv7: v \[2, 7, 3, 4\] must be"),
        (rwkv(b=b.long()), TypeError, "rwkv7: b is torch.int64, must be"),
        (rwkv(w=None), TypeError, "rwkv7: w is None, must be a tensor"),
        (rwkv(chunk_size=0), ValueError, "rwkv7: chunk_size=0 must be at least 1"),
        (rwkv(cu_seqlens=[1, 16]), ValueError, r"rwkv7: cu_seqlens \[1, 16\] must ascend from 0"),
        (folds(local=5), TypeError, "recurrence: .*local=5 must be functions"),
        (folds(tensors=(r, key[:, :7], value)), ValueError,
         r"recurrence: tensors\[1\] \[2, 7, 3, 5\] must begin with \[2, 8, 3\]"),
        (folds(tensors=(r, 5)), TypeError, r"recurrence: tensors\[1\] is 5"),
        (folds(tensors=()), ValueError, "recurrence: needs tensors"),
        (folds(), TypeError, "recurrence: "),  # `len` takes no decay
    ]  # fmt: skip


@device.devices("cpu")  # on other devices ranks compare only if SYMM_CP_DEBUG=1
@pytest.mark.ranks(2)
def test_refuses_what_it_cannot_do(group: dist.ProcessGroup) -> None:
    args = of_gated(8, (), True)
    wrong = [(error, text, run) for run, error, text in wrong_calls(group)]
    check_refusals(group, lambda: symm_cp.gated_delta_rule(*args, group=group)[0], wrong)


@device.devices("cpu")
@pytest.mark.ranks(2)
def test_ranks_that_disagree(group: dist.ProcessGroup) -> None:
    """Parts of 8 and 4 positions, or of 8; rank 1 passes arguments with a user's mistake."""
    rank = group.rank()
    whole = of_gated(12, (), True)
    mine, args = [t.split([8, 4], 1)[rank] for t in whole], of_gated(8, (), True)
    right: dict[str, Any] = {"cu_seqlens": [0, 4, 12], "sizes": [8, 4]}
    layout, other = head_tail(16, 2), SequenceLayout(2, (0, 3, 1, 2), (4, 3, 5, 4))

    def works(mine: Tensors) -> None:
        dist.barrier(group)
        out, _ = symm_cp.gated_delta_rule(*mine, group=group, chunk_size=4, **right)
        want = gated(*whole, edges=[0, 4, 12])[0].split([8, 4], 1)[rank]
        torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-5)

    for given, told, mistake in (
        (mine, right, {"cu_seqlens": [0, 4, 8]}),  # no sizes: two parts of 4 would be as long
        (mine, right, {"cu_seqlens": [0, 5, 12], "sizes": [8, 4]}),
        (mine, right, {}),
        (args, {"layout": layout}, {}),
        (args, {"layout": layout}, {"layout": other}),
    ):
        options = mistake if rank == 1 else told
        with pytest.raises(RuntimeError, match="ranks disagree"):
            symm_cp.gated_delta_rule(*given, group=group, chunk_size=4, **options)
        works(mine)
    op = symm_cp.gated_delta_rule if rank else symm_cp.gated_linear_attention
    with pytest.raises(RuntimeError, match="ranks disagree"):
        op(*mine[: 4 + rank], group=group, chunk_size=4, **right)
    works(mine)


def test_sweeps() -> None:
    """Head-tail takes two sweeps, documents two each, parts in rank order one."""
    for ranks in range(1, 9):
        for layout, sweeps in (
            (head_tail(64, ranks), 2),
            (sequential(64, ranks), 1),
            (symm_cp.PerDocumentHeadTail([64, 32, 16], ranks).layout, 6),
        ):
            runs = runs_of(list(layout.chunk_order), list(layout.chunk_lengths), ranks)
            assert runs[-1].sweep + 1 == sweeps
            ends = [run.start + run.length for run in runs]
            assert [run.start for run in runs] == [0, *ends[:-1]]
