"""`moe.dispatch_matmul` and `moe.matmul_combine`: against one process with all tokens and experts.

A layer of each call: y_t = sum over k of w_tk (silu(t G_e) * (t U_e)) D_e for the experts e of t.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from symm_cp import moe, native
from symm_cp.testing import Ranks
from tests import device
from tests.exhaustive import some
from tests.ops import test_experts
from tests.ops.refusals import Wrong, check_refusals
from tests.ops.test_experts import Case, drawn, routed

HIDDEN, WIDTH = 6, 5

#: Tokens of a rank: their rows need larger slots than the first calls have.
MANY = 1300


class Layer(Case):
    """A case with the weights of all experts, equal on all ranks."""

    def __init__(
        self, ranks: int, sizes: list[int], num_experts: int, top_k: int, **more: Any
    ) -> None:
        super().__init__(ranks, sizes, num_experts, top_k, **{**more, "features": (HIDDEN,)})
        dtype = more.get("dtype", torch.float64)
        on: Any = {"generator": torch.Generator(device.name()).manual_seed(more.get("seed", 0))}

        def rand(*shape: int) -> torch.Tensor:
            return (torch.randn(num_experts, *shape, **on) * shape[0] ** -0.5).to(dtype)

        self.gate, self.up, self.down = (
            rand(HIDDEN, WIDTH),
            rand(HIDDEN, WIDTH),
            rand(WIDTH, HIDDEN),
        )

    def of_rank(self, rank: int, ranks: int) -> list[torch.Tensor]:
        """Tokens, gate, up, down and weights of a rank; up lies transposed, as in `nn.Linear`."""
        own = slice(rank * self.num_experts // ranks, (rank + 1) * self.num_experts // ranks)
        up = self.up[own].mT.contiguous().mT
        given = [self.tokens[rank], self.gate[own], up, self.down[own], self.weights[rank]]
        return [x.detach().clone().requires_grad_() for x in given]


def fused(
    group: dist.ProcessGroup,
    experts: torch.Tensor,
    num_experts: int,
    capacity: int | None,
    tokens: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    """The layer of this rank's tokens."""
    (a, b), routing = moe.dispatch_matmul(
        tokens, [gate, up], experts, num_experts, group=group, capacity=capacity
    )
    return moe.matmul_combine(F.silu(a) * b, down, weights, routing)


def dense(
    case: Layer, capacity: int | None, ranks: int
) -> tuple[list[torch.Tensor], list[list[torch.Tensor]]]:
    """Outputs of all ranks, and the gradients of what each has, in one process and float64."""
    given = [
        [x.detach().double().requires_grad_() for x in case.of_rank(r, ranks)] for r in range(ranks)
    ]
    outputs = [tokens * 0 for tokens, *_ in given]
    local = case.num_experts // ranks
    for owner, rows in enumerate(routed(case.experts, case.num_experts, ranks, capacity)):
        for source, token, choice in rows:
            expert = int(case.experts[source][token, choice]) - owner * local
            _, gate, up, down, _ = given[owner]
            tokens, *_, weights = given[source]
            row = tokens[token]
            result = (F.silu(row @ gate[expert]) * (row @ up[expert])) @ down[expert]
            picked = torch.zeros(len(outputs[source]), 1, dtype=torch.float64, device=device.name())
            picked[token] = 1
            outputs[source] = outputs[source] + picked * weights[token, choice] * result
    total = sum((o * g.double()).sum() for o, g in zip(outputs, case.outputs, strict=True))
    flat = [x for xs in given for x in xs]
    if not any(o.requires_grad for o in outputs):
        return outputs, [[torch.zeros_like(x) for x in xs] for xs in given]
    grads = torch.autograd.grad(total, flat, allow_unused=True)
    found = [torch.zeros_like(x) if g is None else g for g, x in zip(grads, flat, strict=True)]
    count = len(given[0])
    each = [found[i : i + count] for i in range(0, len(found), count)]
    return [o.detach() for o in outputs], each


def close(found: torch.Tensor, want: torch.Tensor, terms: int, what: str) -> None:
    """Compares with a tolerance for `terms` roundings to the dtype."""
    eps = torch.finfo(found.dtype).eps
    scale = 1 + float(want.abs().max()) if want.numel() else 1.0
    torch.testing.assert_close(
        found.double(), want, rtol=0, atol=terms * eps * scale, msg=lambda m: f"{what}: {m}"
    )


NAMES = ("tokens", "gate", "up", "down", "weights")


def agrees(
    group: dist.ProcessGroup, case: Layer, capacity: int | None = None, run: Any = None
) -> None:
    W, rank = group.size(), group.rank()
    inputs = case.of_rank(rank, W)
    function = functools.partial(
        run or fused, group, case.experts[rank], case.num_experts, capacity
    )
    out = function(*inputs)
    grads = torch.autograd.grad(out, inputs, case.outputs[rank])
    outputs, expected = dense(case, capacity, W)
    terms = 32 * (1 + case.top_k)
    close(out.detach(), outputs[rank], terms, "output")
    rows = sum(len(t) for t in case.tokens)
    for name, grad, want in zip(NAMES, grads, expected[rank], strict=True):
        close(grad, want, terms + (rows if name in NAMES[1:4] else 0), name)
    assert grads[2].mT.is_contiguous()  # laid out as the parameter is


def many_agree(group: dist.ProcessGroup, seeds: range, dtypes: list[torch.dtype]) -> None:
    test_experts.many_agree(group, seeds, dtypes, Layer, agrees)


def unfused(
    group: dist.ProcessGroup,
    experts: torch.Tensor,
    num_experts: int,
    capacity: int | None,
    tokens: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    """The same layer by `dispatch`, a matmul for each expert, and `combine`."""
    rows, routing = moe.dispatch(tokens, experts, num_experts, group=group, capacity=capacity)

    def grouped(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        parts = torch.tensor_split(rows, routing.ends.tolist()[:-1])
        return torch.cat([part @ each for part, each in zip(parts, weight, strict=True)])

    hidden = F.silu(grouped(rows, gate)) * grouped(rows, up)
    return moe.combine(grouped(hidden, down), weights, routing)


def as_the_unfused_ops(group: dist.ProcessGroup, sizes: list[int], seed: int, dtype: Any) -> None:
    """The fused ops run twice, as slots take turns."""
    W, rank = group.size(), group.rank()
    for skew in (0.0, 5.0):
        case = Layer(W, sizes, 2 * W, 2, seed=seed, skew=skew, dtype=dtype)
        results = []
        for run in (fused, unfused, fused):
            inputs = case.of_rank(rank, W)
            out = run(group, case.experts[rank], case.num_experts, None, *inputs)
            results.append([out, *torch.autograd.grad(out, inputs, case.outputs[rank])])
        tolerance = 64 * torch.finfo(dtype).eps
        for name, first, want, again in zip(("output", *NAMES), *results, strict=True):
            assert torch.equal(first, again), name
            scale = 1 + float(want.abs().max()) if want.numel() else 1.0
            torch.testing.assert_close(first, want, rtol=0, atol=tolerance * scale)


@pytest.mark.parametrize(
    ("sizes", "dtype"),
    some(
        ([MANY] * 2, torch.float32),
        of=[
            ([MANY] * 2, torch.float32),
            ([MANY] * 2, torch.bfloat16),
            ([2 * MANY, 0], torch.float64),
            ([MANY, 2 * MANY, MANY], torch.float32),
            ([MANY, 0, 2 * MANY, MANY], torch.bfloat16),
        ],
    ),
)
def test_many_rows(ranks: Ranks, sizes: list[int], dtype: torch.dtype) -> None:
    ranks.run(len(sizes), as_the_unfused_ops, sizes, drawn(), dtype)


@pytest.mark.parametrize("world_size", some(of=[2]))
@pytest.mark.ranks
def test_more_rows_than_slots_take(group: dist.ProcessGroup, world_size: int) -> None:
    """Rows that do not fit into a slot go through it in pieces."""
    W, rank = group.size(), group.rank()
    tokens = torch.randn(1100, 1 << 15)  # 256 MiB of rows for the first rank
    experts = torch.zeros(len(tokens), 1, dtype=torch.int64)
    weight = torch.randn(1, 1 << 15, 1)
    product, routing = moe.dispatch_matmul(tokens, weight, experts, W, group=group)
    assert product.shape == (W * len(tokens) if rank == 0 else 0, 1)
    back = moe.matmul_combine(product, weight.mT, None, routing)
    first = weight.clone()
    dist.broadcast(first, 0, group=group)
    want = tokens @ first[0] @ first[0].T
    torch.testing.assert_close(back, want, rtol=1e-3, atol=1e-3 * float(want.abs().max()))
    rows, routing = moe.dispatch(tokens, experts, W, group=group)
    assert torch.equal(moe.combine(rows, None, routing), tokens)


@pytest.mark.parametrize("world_size", some(2, of=[2, 3, 4]))
@pytest.mark.ranks
def test_planned(group: dist.ProcessGroup, world_size: int) -> None:
    """One plan serves all numbers of tokens and of an expert's rows."""
    W, library = group.size(), native.load()
    native.drop_plans()
    for number in range(7):
        case = Layer(
            W, [16 + (number * (rank + 2)) % 7 for rank in range(W)], 2 * W, 2, seed=number
        )
        library.symm_cp_plans_run()
        agrees(group, case)
        assert library.symm_cp_plans_run() == 4 * (number > 1), number


@pytest.mark.parametrize("world_size", some(2, of=[1, 2, 3]))
@pytest.mark.ranks
def test_wrong_arguments(group: dist.ProcessGroup, world_size: int) -> None:
    W, rank = group.size(), group.rank()
    case = Layer(W, [4] * W, 2 * W, 2)
    tokens, gate, up, down, weights = (x.detach() for x in case.of_rank(rank, W))
    _, kept = moe.dispatch(tokens, case.experts[rank], 2 * W, group=group)

    def call(**changed: Any) -> torch.Tensor:
        given = {
            "tokens": tokens, "weights": [gate, up], "down": down, "factors": weights, **changed
        }  # fmt: skip
        products, routing = moe.dispatch_matmul(
            given["tokens"], given["weights"], case.experts[rank], 2 * W, group=group
        )
        hidden = given.get("rows", products[0])
        return moe.matmul_combine(hidden, given["down"], given["factors"], routing)

    integers = torch.ones(4, HIDDEN, dtype=torch.int64)
    wrong: list[Wrong] = [
        (TypeError, "tokens is torch.int64", {"tokens": integers}),
        (ValueError, "tokens .* must have 2 dimensions", {"tokens": tokens[:, :, None]}),
        (ValueError, "weights is empty", {"weights": []}),
        (TypeError, r"weights\[1\] is torch.float32", {"weights": [gate, up.float()]}),
        (ValueError, r"weights\[0\] .* must be \(2, 6, columns\)", {"weights": [gate[:1]]}),
        (ValueError, r"weights\[0\] .* must be \(2, 6, columns\)", {"weights": [down]}),
        (TypeError, r"weights\[0\] is torch.float32", {"down": down.float()}),
        (ValueError, r"weights\[0\] .* must be \(2, 5, columns\)", {"down": gate}),
        (ValueError, r"weights \[4, 3\] must be \[4, 2\]", {"factors": weights.new_ones(4, 3)}),
        (TypeError, "weights is torch.int64", {"factors": weights.long()}),
        (ValueError, "rows .* must have", {"rows": tokens.new_ones(99, WIDTH)}),
        (TypeError, r"rows\[0\] is torch.int64", {"rows": torch.ones(8, WIDTH).long()}),
    ]
    check_refusals(group, call, wrong)
    with pytest.raises(TypeError, match="routing is Tensor"):
        moe.matmul_combine(tokens, down, None, kept.table)  # type: ignore[arg-type]
    ops = torch.ops.symm_mem
    rest = (kept.table, *kept[2:])
    rows = torch.ones(int(kept.ends[-1]), WIDTH, dtype=tokens.dtype)
    for given in (([], []), ([rows], [down, down]), ([rows, rows[1:]], [down] * 2)):
        with pytest.raises(ValueError, match=r"rows"):
            ops.fused_grouped_matmul_combine(*given, None, *rest)
    with pytest.raises(ValueError, match="columns as weights"):
        ops.fused_grouped_matmul_combine([rows] * 2, [down, down[:, :, 1:]], None, *rest)


@pytest.mark.ranks(2)
def test_ranks_that_disagree(group: dist.ProcessGroup) -> None:
    """Ranks whose weights have different columns are told that they disagree."""
    W, rank = group.size(), group.rank()
    case = Layer(W, [4] * W, W, 1)
    tokens, _, _, down, _ = (x.detach() for x in case.of_rank(rank, W))
    rows, routing = moe.dispatch(tokens[:, :WIDTH], case.experts[rank], W, group=group)
    with pytest.raises(RuntimeError, match=r"calls matmul_combine .*, rank . calls matmul_combine"):
        moe.matmul_combine(rows, down[:, :, rank:], None, routing)
    assert moe.matmul_combine(rows, down, None, routing).shape == tokens.shape
