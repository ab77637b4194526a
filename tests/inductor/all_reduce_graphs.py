"""Functions whose graphs all-reduce products, sums of them, and other tensors."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F

from symm_cp.inductor.options import Options
from tests.inductor.graphs import AR, AR8, SUM, GraphCase
from tests.inductor.scaled_graphs import FLOAT8, eight_bits, eight_bits_by_row, scaled


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


def product(group: Any, x: Any, w: Any) -> Any:
    return reduce(x @ w, group)


def linear(group: Any, x: Any, w: Any) -> Any:
    return reduce(F.linear(x, w.mT), group).relu()


def transposed(group: Any, x: Any, w: Any) -> Any:
    return reduce((x @ w).transpose(0, 1), group) * 2


def in_heads(group: Any, x: Any, w: Any) -> Any:
    return reduce((x @ w).unflatten(-1, (2, -1)).permute(2, 0, 1, 3), group).exp()


def mean(group: Any, x: Any, w: Any) -> Any:
    if torch.compiler.is_compiling():
        return reduce(x @ w, group, "avg")
    return reduce(x @ w, group) / group.size()  # gloo only sums


def biased(group: Any, x: Any, w: Any, b: Any) -> Any:
    return reduce(F.linear(x, w.mT, b), group)


def biased_mean(group: Any, x: Any, w: Any, b: Any) -> Any:
    if torch.compiler.is_compiling():
        return reduce(F.linear(x, w.mT, b), group, "avg")
    return reduce(F.linear(x, w.mT, b), group) / group.size()


def biased_after(group: Any, x: Any, w: Any, b: Any) -> Any:
    return reduce(x @ w, group) + b


def two_products(group: Any, x: Any, w: Any, y: Any, u: Any) -> Any:
    return reduce(x @ w + y @ u, group)


def biased_products(group: Any, x: Any, w: Any, y: Any, u: Any, b: Any, c: Any) -> Any:
    return reduce(F.linear(x, w.mT, b) + (F.linear(y, u.mT, c) + x @ w), group)


def sum_of_sums(group: Any, x: Any, w: Any, y: Any, u: Any) -> Any:
    first, second = reduce(x @ w, group), reduce(y @ u, group)
    return (first + second).relu() * 2


def sum_of_three(group: Any, x: Any, w: Any, y: Any, u: Any) -> Any:
    parts = reduce(x @ w, group), reduce(y @ u, group), reduce(y @ w, group)
    return parts[0] + parts[1] + parts[2]


def sum_of_unlike(group: Any, x: Any, w: Any) -> Any:
    return reduce(x @ w, group) + reduce(x, group, "max")[..., : w.shape[1]]


def sum_and_mean(group: Any, x: Any, w: Any, y: Any, u: Any) -> Any:
    return reduce(x @ w, group) + mean(group, y, u)


def sum_used_twice(group: Any, x: Any, w: Any, y: Any, u: Any) -> Any:
    first, second = reduce(x @ w, group), reduce(y @ u, group)
    return first + second, second.exp()


def shared_input(group: Any, x: Any, w: Any, u: Any) -> Any:
    """Two column-parallel layers, each with its own all-reduce of the gradient."""
    return InputOfColumns.apply(x, group) @ w, InputOfColumns.apply(x, group) @ u


def shared_all_reduce(group: Any, x: Any, w: Any, u: Any) -> Any:
    full = InputOfColumns.apply(x, group)
    return (full @ w).relu() * (full @ u)


def block(group: Any, x: Any, w: Any, u: Any) -> Any:
    return InRows.apply(torch.relu(InputOfColumns.apply(x, group) @ w) @ u, group)


class InRows(torch.autograd.Function):
    """The output of a row-parallel layer: it is all-reduced."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        return reduce(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None


def in_turn(group: Any, x: Any, w: Any, u: Any) -> Any:
    # The second product needs the first sum.
    return reduce(reduce(x @ w, group) @ u, group)


def reduced_twice(group: Any, x: Any, w: Any, u: Any) -> Any:
    once = reduce(x @ w, group)
    return reduce(once, group), reduce(once + x @ u, group)


def coalesced(group: Any, x: Any, w: Any) -> Any:
    return funcol.all_reduce_coalesced([x @ w, x.exp(), x.sum()], "sum", group)


def cast_down(group: Any, x: Any, w: Any) -> Any:
    return reduce((x @ w).float(), group)


def cast_up(group: Any, x: Any, w: Any) -> Any:
    return reduce((x @ w).double(), group)


def used_elsewhere(group: Any, x: Any, w: Any) -> Any:
    y = x @ w
    return reduce(y, group), y.exp()


def largest(group: Any, x: Any, w: Any) -> Any:
    return reduce(x @ w, group, "max")


def some_rows(group: Any, x: Any, w: Any) -> Any:
    return reduce((x @ w)[1:], group)


def flipped(group: Any, x: Any, w: Any) -> Any:
    return reduce((x @ w).flip(0), group)


def with_residual(group: Any, x: Any, w: Any) -> Any:
    return reduce(x @ w + x[..., : w.shape[1]], group)


def of_a_function(group: Any, x: Any, w: Any) -> Any:
    return reduce((x @ w).relu(), group)


def by_batch(group: Any, x: Any, w: Any) -> Any:
    return reduce(x @ w, group)


def feeds(group: Any, x: Any, w: Any) -> Any:
    return reduce(x, group) @ w


def alone(group: Any, x: Any) -> Any:
    return reduce(x * 2, group).exp(), reduce(x.sum(), group), reduce(x.mT[1:], group)


def of_integers(group: Any, x: Any) -> Any:
    return reduce((x * 9).long(), group), reduce(x.exp() > 1, group, "max")


def input_in_place(group: Any, x: Any) -> Any:
    y = x.clone()
    dist.all_reduce(y, group=group)
    return x * y


def scaled_product(group: Any, x: Any, w: Any) -> Any:
    (a, scale_a), (b, scale_b) = eight_bits(x), eight_bits(w.t().contiguous())
    return reduce(scaled(a, b.t(), scale_a, scale_b), group)


def scaled_rows(group: Any, x: Any, w: Any) -> Any:
    (a, scale_a), (b, scale_b) = eight_bits_by_row(x), eight_bits_by_row(w.t())
    return reduce(scaled(a, b.t(), scale_a, scale_b.t()).view(2, -1, w.shape[1]), group)


def scaled_bias(group: Any, x: Any, w: Any) -> Any:
    a, b = x.to(FLOAT8), w.t().contiguous().to(FLOAT8).t()
    one, bias = torch.ones(()), torch.ones(w.shape[1], dtype=torch.bfloat16)
    return reduce(scaled(a, b, one, one, bias=bias), group)


X2, X3, W2 = (4, 6), (2, 4, 6), (6, 4)
Y3, U2 = (2, 4, 3), (3, 4)
NO_PRODUCT = "is not the product of a matmul"


def graphs(W: int) -> dict[str, GraphCase]:
    cases = {
        "product": GraphCase(product, (X2, W2), (AR,), (NO_PRODUCT,), grad=True),
        "linear": GraphCase(linear, (X3, W2), (AR,), (NO_PRODUCT,), grad=True),
        "transposed": GraphCase(transposed, (X2, W2), (AR,)),
        "heads": GraphCase(in_heads, (X3, W2), (AR,)),
        "mean": GraphCase(mean, (X3, W2), (AR,)),
        "bias": GraphCase(biased, (X3, W2, (4,)), (SUM,), (NO_PRODUCT,), grad=True),
        "bias, mean": GraphCase(biased_mean, (X3, W2, (4,)), (SUM,)),
        "bias after": GraphCase(biased_after, (X3, W2, (4,)), (AR,)),
        "two products": GraphCase(two_products, (X3, W2, Y3, U2), (SUM,)),
        "products and biases": GraphCase(biased_products, (X3, W2, Y3, U2, (4,), (4,)), (SUM,)),
        "sum of sums": GraphCase(sum_of_sums, (X3, W2, Y3, U2), (SUM,)),
        "sum of three": GraphCase(sum_of_three, (X3, W2, X3, W2), (SUM,)),
        "sum of unlike": GraphCase(sum_of_unlike, (X3, W2), (AR,), ("reduces by max",)),
        "sum and mean": GraphCase(sum_and_mean, (X3, W2, Y3, U2), (AR, AR)),
        "sum used twice": GraphCase(sum_used_twice, (X3, W2, Y3, U2), (AR, AR)),
        "shared input": GraphCase(shared_input, (X3, W2, (6, 3)), (SUM,), grad=True),
        "shared all-reduce": GraphCase(shared_all_reduce, (X3, W2, W2), (SUM,), grad=True),
        "block": GraphCase(block, (X3, W2, (4, 6)), (AR, AR), grad=True),
        "in turn": GraphCase(in_turn, (X3, W2, (4, 5)), (AR, AR)),
        "reduced twice": GraphCase(reduced_twice, (X3, W2, W2), (AR,), (NO_PRODUCT,)),
        "coalesced": GraphCase(coalesced, (X3, W2), (AR,), (NO_PRODUCT,)),
        "cast down": GraphCase(cast_down, (X3, W2), (AR,)),
        "cast up": GraphCase(cast_up, (X3, W2), (), ("wider than",), dtype=torch.float32),
        "used elsewhere": GraphCase(used_elsewhere, (X3, W2), (), ("is used elsewhere",)),
        "largest": GraphCase(largest, (X3, W2), (), ("it reduces by max",)),
        "some rows": GraphCase(some_rows, (X2, W2), (), ("rearranged",)),
        "flipped": GraphCase(flipped, (X2, W2), (), ("rearranged",)),
        "residual": GraphCase(with_residual, (X2, W2), (), ("rearranged",)),
        "of a function": GraphCase(of_a_function, (X2, W2), (), (NO_PRODUCT,)),
        "by batch": GraphCase(by_batch, (X3, (2, 6, 4)), (), ("each batch by a matrix",)),
        "feeds": GraphCase(feeds, (X2, W2), (), (NO_PRODUCT,)),
        "alone": GraphCase(alone, (X2,), (), (NO_PRODUCT,)),
        "integers": GraphCase(of_integers, (X2,), (), (NO_PRODUCT, "reduces by max")),
        "input in place": GraphCase(input_in_place, (X2,), (), (NO_PRODUCT,)),
        "small": GraphCase(
            product, (X2, W2), (), ("is too small",), options=Options(min_flops=1e6)
        ),
        "no native": GraphCase(
            alone, (X2,), (), ("all_reduce is off",), options=Options(all_reduce=False)
        ),
        "scaled": GraphCase(scaled_product, ((16, 32), (32, 16)), (AR8,), dtype=torch.float32),
        "scaled rows": GraphCase(scaled_rows, ((32, 32), (32, 16)), (AR8,), dtype=torch.float32),
        "scaled, bias": GraphCase(
            scaled_bias,
            ((16, 32), (32, 16)),
            (),
            ("its bias is added on every rank",),
            dtype=torch.float32,
        ),
    }
    return {f"all-reduce: {name}": case for name, case in cases.items()}


_OFTEN = {
    "transposed", "bias", "sum of three", "sum and mean", "shared input", "reduced twice",
    "coalesced", "cast up", "some rows", "alone", "integers", "scaled rows", "scaled, bias",
}  # fmt: skip
#: The graphs that run with `--all` only.
RARE = {name for name in graphs(2) if name.removeprefix("all-reduce: ") not in _OFTEN}
