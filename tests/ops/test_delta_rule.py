"""`gated_delta_rule` and `gated_linear_attention` over parts of any length.

Against the recurrence position by position.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

import symm_cp
from symm_cp.testing import Ranks
from tests import device
from tests.exhaustive import some

pytestmark = device.devices("cpu", "simulated")

Tensors = list[torch.Tensor]
RULES: dict[bool, Any] = {True: symm_cp.gated_delta_rule, False: symm_cp.gated_linear_attention}


def recurrence(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor | None = None,
    edges: Sequence[int] = (),
) -> tuple[torch.Tensor, Tensors]:
    """The output and the states after each position, computed in one process.

    Without `beta`, the rule is linear attention.
    """
    repeats = v.shape[2] // k.shape[2]
    q, k = (t.repeat_interleave(repeats, 2) for t in (q, k))
    state = (k[:, 0, :, :, None] * v[:, 0, :, None, :]) * 0
    rows, states, decay = [], [state], g.reshape(*v.shape[:3], -1, 1).exp()
    for t in range(v.shape[1]):
        state = state * (0 if t in edges else decay[:, t])
        written = v[:, t]
        if beta is not None:
            missing = written - torch.einsum("bhk,bhkv->bhv", k[:, t], state)
            written = beta[:, t, :, None] * missing
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], written)
        rows.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state) * k.shape[-1] ** -0.5)
        states.append(state)
    return torch.stack(rows, 1), states


def inputs(
    length: int,
    dtype: torch.dtype,
    heads: int = 4,
    *,
    by_feature: bool = False,
    erasing: bool = True,
) -> Tensors:
    """The same on all ranks: q, k, v, g, beta of two samples; fast and slow decays.

    There is no beta unless `erasing`.
    """
    q, k = (torch.nn.functional.normalize(torch.randn(2, length, 2, 5), dim=-1) for _ in range(2))
    v = torch.randn(2, length, heads, 3)
    g = -torch.rand(2, length, heads, *((5,) if by_feature else ())).mul(4).exp() / 4
    beta = [torch.rand(2, length, heads)] if erasing else []
    return [t.to(dtype) for t in (q, k, v, g, *beta)]


def runs(
    group: dist.ProcessGroup,
    sizes: list[int],
    *,
    by_feature: bool,
    erasing: bool = True,
    edges: Sequence[int] = (),
    compiled: bool = False,
) -> None:
    rank, op = group.rank(), RULES[erasing]
    whole = inputs(sum(sizes), torch.float64, by_feature=by_feature, erasing=erasing)
    whole = [t.requires_grad_() for t in whole]
    q, k, v, g, *beta = whole
    want, states = recurrence(q, k, v, g, beta[0] if erasing else None, edges)
    want_final = states[sum(sizes[: rank + 1])]
    weights = torch.randn_like(want)
    loss = (want * weights).sum() + sum(
        (1 + r) * states[sum(sizes[: r + 1])].sum() for r in range(len(sizes))
    )
    wanted = torch.autograd.grad(loss, whole)
    mine = [t.detach().split(sizes, 1)[rank].requires_grad_() for t in whole]

    def layer(*args: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        packed = {"cu_seqlens": torch.tensor(edges), "sizes": sizes} if edges else {}
        return op(*args, group=group, chunk_size=3 if by_feature else 4, **packed)

    if compiled:
        torch._dynamo.reset()
        layer = torch.compile(layer, fullgraph=True)
    out, final = layer(*mine)
    torch.testing.assert_close(out, want.split(sizes, 1)[rank])
    torch.testing.assert_close(final, want_final)
    loss = (out * weights.split(sizes, 1)[rank]).sum() + (1 + rank) * final.sum()
    for got, needed in zip(torch.autograd.grad(loss, mine), wanted, strict=True):
        torch.testing.assert_close(got, needed.split(sizes, 1)[rank])


ERASING = pytest.mark.parametrize("erasing", [True, False], ids=["delta", "linear"])
BY_FEATURE = pytest.mark.parametrize("by_feature", [False, True], ids=["head", "feature"])


@ERASING
@BY_FEATURE
@pytest.mark.parametrize("sizes", [[9], [8, 8], [5, 2, 9], [3, 0, 8, 1]])
def test_equals_the_recurrence(
    ranks: Ranks, sizes: list[int], by_feature: bool, erasing: bool
) -> None:
    ranks.run(len(sizes), runs, sizes, by_feature=by_feature, erasing=erasing)


@ERASING
@BY_FEATURE
@pytest.mark.parametrize(
    ("sizes", "edges"),
    some(
        ([5, 2, 9], [0, 3, 4, 4, 8, 13, 16]),
        of=[
            ([9], [0, 4, 5, 9]),
            ([8, 8], [0, 8, 16]),
            ([8, 8], [0, 16]),
            ([5, 2, 9], [0, 3, 4, 4, 8, 13, 16]),
            ([3, 0, 8, 1], [0, 3, 11, 12]),
        ],
    ),
)
def test_packed_documents(
    ranks: Ranks, sizes: list[int], edges: list[int], by_feature: bool, erasing: bool
) -> None:
    ranks.run(len(sizes), runs, sizes, by_feature=by_feature, erasing=erasing, edges=edges)


def other_dtypes(group: dist.ProcessGroup) -> None:
    """16-bit inputs are computed in float32: only inputs and output are rounded."""
    rank = group.rank()
    dtypes = (torch.float32, torch.bfloat16)
    for dtype, by_feature, erasing in itertools.product(dtypes, (False, True), (False, True)):
        whole = inputs(12, dtype, by_feature=by_feature, erasing=erasing)
        want, _ = recurrence(*(t.double() for t in whole))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            mine = [t.split(6, 1)[rank] for t in whole]
            out, final = RULES[erasing](*mine, group=group, chunk_size=4)
        assert (out.dtype, final.dtype) == (dtype, torch.float32)
        eps = max(torch.finfo(dtype).eps, 50 * torch.finfo(torch.float32).eps)
        torch.testing.assert_close(out.double(), want.split(6, 1)[rank], rtol=eps, atol=eps)


def test_dtypes_under_autocast(ranks: Ranks) -> None:
    ranks.run(2, other_dtypes)


def refuses(group: dist.ProcessGroup) -> None:
    q, k, v, g, beta = inputs(8, torch.float32)
    with pytest.raises(ValueError, match=r"gated_delta_rule: query \[2, 8, 2, 5\] and key"):
        symm_cp.gated_delta_rule(q, k[..., :3], v, g, beta, group=group)
    with pytest.raises(ValueError, match="a multiple of its heads"):
        symm_cp.gated_delta_rule(q, k, v[:, :, :3], g, beta, group=group)
    with pytest.raises(ValueError, match=r"beta \[2, 8, 3\] must be \[2, 8, 4\]"):
        symm_cp.gated_delta_rule(q, k, v, g, beta[..., :3], group=group)
    with pytest.raises(ValueError, match=r"g \[2, 8, 4, 2\] must be \[2, 8, 4\] or \[2, 8, 4, 5\]"):
        symm_cp.gated_delta_rule(q, k, v, g[..., None].expand(-1, -1, -1, 2), beta, group=group)
    with pytest.raises(ValueError, match="chunk_size=0 must be at least 1"):
        symm_cp.gated_delta_rule(q, k, v, g, beta, group=group, chunk_size=0)
    for edges, error, message in (
        ([0, 9, 8], ValueError, r"cu_seqlens \[0, 9, 8\] must ascend from 0 to the 16 positions"),
        ([1, 16], ValueError, "must ascend from 0"),
        ([0.0, 16.0], TypeError, "of ints, or a 1-D tensor of int32 or int64"),
    ):
        with pytest.raises(error, match=message):
            symm_cp.gated_delta_rule(q, k, v, g, beta, group=group, cu_seqlens=edges)
    with pytest.raises(ValueError, match=r"sizes=\[9, 7\] must have 2 numbers, for rank"):
        symm_cp.gated_delta_rule(q, k, v, g, beta, group=group, cu_seqlens=[0, 16], sizes=[9, 7])
    with pytest.raises(
        ValueError, match=r"gated_linear_attention: g \[2, 8, 3\] must be \[2, 8, 4\]"
    ):
        symm_cp.gated_linear_attention(q, k, v, g[..., :3], group=group)
    leaf = v.clone().requires_grad_()
    out, _ = symm_cp.gated_delta_rule(q, k, leaf, g, beta, group=group)
    (grad,) = torch.autograd.grad(out.square().sum(), leaf, create_graph=True)
    with pytest.raises(NotImplementedError, match="second derivatives of gated_delta_rule"):
        torch.autograd.grad(grad.sum(), leaf)


def test_refuses_what_it_cannot_do(ranks: Ranks) -> None:
    ranks.run(2, refuses)


def disagree(group: dist.ProcessGroup) -> None:
    """Parts of 8 and 4 positions; rank 1 passes arguments with a user's mistake."""
    rank = group.rank()
    mine = [t.split([8, 4], 1)[rank] for t in inputs(12, torch.float32)]
    right: dict[str, Any] = {"cu_seqlens": [0, 4, 12], "sizes": [8, 4]}
    for forgotten in (
        {"cu_seqlens": [0, 4, 8]},  # and sizes: two parts of 4 would be as long
        {"cu_seqlens": [0, 5, 12], "sizes": [8, 4]},
        {},
    ):
        given = forgotten if rank == 1 else right
        with pytest.raises(RuntimeError, match="ranks disagree"):
            symm_cp.gated_delta_rule(*mine, group=group, chunk_size=4, **given)
    with pytest.raises(RuntimeError, match="ranks disagree"):
        RULES[rank == 0](*mine[: 4 + (rank == 0)], group=group, chunk_size=4, **right)
    with torch.inference_mode():
        out, _ = symm_cp.gated_delta_rule(*mine, group=group, chunk_size=4, **right)
    again, _ = symm_cp.gated_delta_rule(*mine, group=group, chunk_size=4, **right)
    assert torch.equal(out, again)


@device.devices("cpu")  # on other devices ranks compare only if SYMM_CP_DEBUG=1
def test_ranks_that_disagree_on_documents(ranks: Ranks) -> None:
    ranks.run(2, disagree)
