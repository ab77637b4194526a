"""Functions whose graphs all-reduce products, sums of them, and other tensors."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F

from symm_cp.inductor.options import Options
from tests.inductor.graphs import AR, AR8, SUM, Case
from tests.inductor.scaled_graphs import product, with_bias


def reduce(x: torch.Tensor, group: Any, op: str = "sum") -> torch.Tensor:
    return funcol.all_reduce(x, op, group)


class InputOfColumns(torch.autograd.Function):
    """The input of a column-parallel layer: its gradient is all-reduced."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return reduce(grads[0], ctx.group), None


class InRows(torch.autograd.Function):
    """The output of a row-parallel layer: it is all-reduced."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        return reduce(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None


def mean(group: Any, product: Any) -> Any:
    if torch.compiler.is_compiling():
        return reduce(product, group, "avg")
    return reduce(product, group) / group.size()  # gloo only sums


def shared_all_reduce(group: Any, x: Any, w: Any, u: Any) -> Any:
    full = InputOfColumns.apply(x, group)
    return (full @ w).relu() * (full @ u)


def sum_used_twice(group: Any, x: Any, w: Any, y: Any, u: Any) -> Any:
    first, second = reduce(x @ w, group), reduce(y @ u, group)
    return first + second, second.exp()


def reduced_twice(group: Any, x: Any, w: Any, u: Any) -> Any:
    once = reduce(x @ w, group)
    return reduce(once, group), reduce(once + x @ u, group)


def input_in_place(group: Any, x: Any) -> Any:
    y = x.clone()
    dist.all_reduce(y, group=group)
    return x * y


def graphs(W: int) -> dict[str, Case]:
    x2, x3, w2, y3, u2 = (4, 6), (2, 4, 6), (6, 4), (2, 4, 3), (3, 4)
    none, scaled = "is not the product of a matmul", ((16, 32), (32, 16))
    cases = {
        "product": Case(lambda g, x, w: reduce(x @ w, g), (x2, w2), (AR,), (none,), grad=True),
        "linear": Case(
            lambda g, x, w: reduce(F.linear(x, w.mT), g).relu(), (x3, w2), (AR,), (none,), grad=True
        ),
        "transposed": Case(
            lambda g, x, w: reduce((x @ w).transpose(0, 1), g) * 2, (x2, w2), (AR,)
        ),
        "heads": Case(
            lambda g, x, w: reduce((x @ w).unflatten(-1, (2, -1)).permute(2, 0, 1, 3), g).exp(),
            (x3, w2), (AR,),
        ),
        "mean": Case(lambda g, x, w: mean(g, x @ w), (x3, w2), (AR,)),
        "bias": Case(
            lambda g, x, w, b: reduce(F.linear(x, w.mT, b), g), (x3, w2, (4,)), (SUM,), (none,),
            grad=True,
        ),
        "bias, mean": Case(
            lambda g, x, w, b: mean(g, F.linear(x, w.mT, b)), (x3, w2, (4,)), (SUM,)
        ),
        "bias after": Case(lambda g, x, w, b: reduce(x @ w, g) + b, (x3, w2, (4,)), (AR,)),
        "two products": Case(
            lambda g, x, w, y, u: reduce(x @ w + y @ u, g), (x3, w2, y3, u2), (SUM,)
        ),
        "products and biases": Case(
            lambda g, x, w, y, u, b, c: reduce(
                F.linear(x, w.mT, b) + (F.linear(y, u.mT, c) + x @ w), g
            ),
            (x3, w2, y3, u2, (4,), (4,)), (SUM,),
        ),
        "sum of sums": Case(
            lambda g, x, w, y, u: (reduce(x @ w, g) + reduce(y @ u, g)).relu() * 2,
            (x3, w2, y3, u2), (SUM,),
        ),
        "sum of three": Case(
            lambda g, x, w, y, u: reduce(x @ w, g) + reduce(y @ u, g) + reduce(y @ w, g),
            (x3, w2, x3, w2), (SUM,),
        ),
        "sum of unlike": Case(
            lambda g, x, w: reduce(x @ w, g) + reduce(x, g, "max")[..., :4], (x3, w2), (AR,),
            ("reduces by max",),
        ),
        "sum and mean": Case(
            lambda g, x, w, y, u: reduce(x @ w, g) + mean(g, y @ u), (x3, w2, y3, u2), (AR, AR)
        ),
        "sum used twice": Case(sum_used_twice, (x3, w2, y3, u2), (AR, AR)),
        "shared input": Case(  # two column-parallel layers, each reduces the gradient
            lambda g, x, w, u: (InputOfColumns.apply(x, g) @ w, InputOfColumns.apply(x, g) @ u),
            (x3, w2, (6, 3)), (SUM,), grad=True,
        ),
        "shared all-reduce": Case(shared_all_reduce, (x3, w2, w2), (SUM,), grad=True),
        "block": Case(
            lambda g, x, w, u: InRows.apply(torch.relu(InputOfColumns.apply(x, g) @ w) @ u, g),
            (x3, w2, (4, 6)), (AR, AR), grad=True,
        ),
        "in turn": Case(  # the second product needs the first sum
            lambda g, x, w, u: reduce(reduce(x @ w, g) @ u, g), (x3, w2, (4, 5)), (AR, AR)
        ),
        "reduced twice": Case(reduced_twice, (x3, w2, w2), (AR,), (none,)),
        "coalesced": Case(
            lambda g, x, w: funcol.all_reduce_coalesced([x @ w, x.exp(), x.sum()], "sum", g),
            (x3, w2), (AR,), (none,),
        ),
        "cast down": Case(lambda g, x, w: reduce((x @ w).float(), g), (x3, w2), (AR,)),
        "cast up": Case(
            lambda g, x, w: reduce((x @ w).double(), g), (x3, w2), (), ("wider than",),
            dtype=torch.float32,
        ),
        "used elsewhere": Case(
            lambda g, x, w: (reduce(y := x @ w, g), y.exp()), (x3, w2), (), ("is used elsewhere",)
        ),
        "largest": Case(
            lambda g, x, w: reduce(x @ w, g, "max"), (x3, w2), (), ("it reduces by max",)
        ),
        "some rows": Case(
            lambda g, x, w: reduce((x @ w)[1:], g), (x2, w2), (), ("rearranged",)
        ),
        "flipped": Case(lambda g, x, w: reduce((x @ w).flip(0), g), (x2, w2), (), ("rearranged",)),
        "residual": Case(
            lambda g, x, w: reduce(x @ w + x[:, :4], g), (x2, w2), (), ("rearranged",)
        ),
        "of a function": Case(lambda g, x, w: reduce((x @ w).relu(), g), (x2, w2), (), (none,)),
        "by batch": Case(
            lambda g, x, w: reduce(x @ w, g), (x3, (2, 6, 4)), (), ("each batch by a matrix",)
        ),
        "feeds": Case(lambda g, x, w: reduce(x, g) @ w, (x2, w2), (), (none,)),
        "alone": Case(
            lambda g, x: (reduce(x * 2, g).exp(), reduce(x.sum(), g), reduce(x.mT[1:], g)), (x2,),
            (), (none,),
        ),
        "integers": Case(
            lambda g, x: (reduce((x * 9).long(), g), reduce(x.exp() > 1, g, "max")), (x2,),
            (), (none, "reduces by max"),
        ),
        "input in place": Case(input_in_place, (x2,), (), (none,)),
        "small": Case(
            lambda g, x, w: reduce(x @ w, g), (x2, w2), (), ("is too small",),
            options=Options(min_flops=1e6),
        ),
        "no native": Case(
            lambda g, x: reduce(x * 2, g), (x2,), (), ("all_reduce is off",),
            options=Options(all_reduce=False),
        ),
        "scaled": Case(
            lambda g, x, w: reduce(product(x, w), g), scaled, (AR8,), dtype=torch.float32
        ),
        "scaled rows": Case(
            lambda g, x, w: reduce(product(x, w, by_row=True).view(2, -1, w.shape[1]), g),
            ((32, 32), (32, 16)), (AR8,), dtype=torch.float32,
        ),
        "scaled, bias": Case(
            lambda g, x, w: reduce(with_bias(x, w), g), scaled, (),
            ("its bias is added on every rank",), dtype=torch.float32,
        ),
    }  # fmt: skip
    return {f"all-reduce: {name}": case for name, case in cases.items()}


_OFTEN = {
    "transposed", "bias", "sum of three", "sum and mean", "shared input", "reduced twice",
    "coalesced", "cast up", "some rows", "alone", "integers", "scaled rows", "scaled, bias",
}  # fmt: skip
#: The graphs that run with `--all` only.
RARE = {name for name in graphs(2) if name.removeprefix("all-reduce: ") not in _OFTEN}
