"""Products of the rows of experts with the experts' weights, and the checks of both."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from symm_cp.group.memory import Group
from symm_cp.ops.experts.op import SUMMED
from symm_cp.ops.matmul.derivatives import is_transposed
from symm_cp.tensors.results import new_result


def check_matrix(op: str, name: str, rows: torch.Tensor) -> None:
    """Raises `ValueError` or `TypeError` for rows that cannot be multiplied."""
    if rows.dtype not in SUMMED:
        raise TypeError(f"{op}: {name} is {rows.dtype}, must be one of {SUMMED}")
    if rows.dim() != 2:
        raise ValueError(f"{op}: {name} {list(rows.shape)} must have 2 dimensions: (rows, columns)")


def check_weight(op: str, name: str, weight: torch.Tensor, like: torch.Tensor, local: int) -> None:
    """Raises `ValueError` or `TypeError` unless a weight fits this rank's experts and rows."""
    if weight.dtype != like.dtype:
        raise TypeError(f"{op}: {name} is {weight.dtype}, must be {like.dtype} as the rows are")
    if weight.device != like.device:
        raise ValueError(f"{op}: {name} is on {weight.device}, must be on {like.device}")
    if weight.dim() != 3 or weight.shape[0] != local or weight.shape[1] != like.shape[1]:
        raise ValueError(
            f"{op}: {name} {list(weight.shape)} must be ({local}, {like.shape[1]}, columns): one "
            "matrix for each expert of a rank"
        )


def check_products(
    op: str, rows: Sequence[torch.Tensor], weights: Sequence[torch.Tensor], local: int
) -> None:
    """Raises `ValueError` or `TypeError` unless the products can be added up."""
    if not rows or len(rows) != len(weights):
        raise ValueError(
            f"{op}: got {len(rows)} rows and {len(weights)} weights, counts must match and be "
            "at least 1"
        )
    for i, (each, weight) in enumerate(zip(rows, weights, strict=True)):
        check_matrix(op, f"rows[{i}]", each)
        if each.dtype != rows[0].dtype:
            raise TypeError(f"{op}: rows[{i}] is {each.dtype}, must be {rows[0].dtype} as rows[0]")
        if each.shape[0] != rows[0].shape[0]:
            raise ValueError(
                f"{op}: rows[{i}] {list(each.shape)} must have {rows[0].shape[0]} rows as rows[0]"
            )
        check_weight(op, f"weights[{i}]", weight, each, local)
        if weight.shape[2] != weights[0].shape[2]:
            raise ValueError(
                f"{op}: weights[{i}] {list(weight.shape)} must have {weights[0].shape[2]} columns "
                "as weights[0]"
            )


class Products:
    """Matmuls of the rows of this rank's experts with the experts' weights.

    The loops over experts are native (csrc/ops/grouped_matmuls.cpp), so a plan serves all routings.
    """

    def __init__(self, table: torch.Tensor, num_experts: int, group: Group) -> None:
        self._of = (table, num_experts, group.rank, group.world_size)
        self._local = num_experts // group.world_size

    def of(self, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Returns the rows of each expert times its matrix."""
        product: torch.Tensor = torch.ops.symm_cp.experts_mm.default(rows, weight, *self._of)
        return product

    def total(self, rows: Sequence[torch.Tensor], weights: Sequence[torch.Tensor]) -> torch.Tensor:
        """Returns the sum of the products of rows and weights."""
        total = self.of(rows[0], weights[0])
        for each, weight in zip(rows[1:], weights[1:], strict=True):
            torch.ops.symm_cp.experts_addmm_.default(total, each, weight, *self._of)
        return total

    def weight_grad(
        self, rows: torch.Tensor, grad: torch.Tensor, weight: torch.Tensor
    ) -> torch.Tensor:
        """Returns rows^T @ grad of each expert, with the weight's layout."""
        transposed = is_transposed(weight)
        left, right = (grad, rows) if transposed else (rows, grad)
        out = new_result(rows, (self._local, left.shape[1], right.shape[1]))
        torch.ops.symm_cp.experts_mm_transposed_.default(out, left, right, *self._of)
        return out.mT if transposed else out


def weigh(
    products: Sequence[torch.Tensor],
    rows: Sequence[torch.Tensor],
    factors: torch.Tensor,
) -> torch.Tensor:
    """Multiplies products by the factors of their rows, (N, 1).

    Returns the dot products of rows and the products before, (N, 1).
    """
    dots = torch.zeros_like(factors)
    for product, row in zip(products, rows, strict=True):
        if product.device.type == "cpu":  # reads each row from memory once
            torch.ops.symm_cp.weigh_rows_.default(product, row, factors, dots)
        else:
            dots += (product.to(dots.dtype) * row.to(dots.dtype)).sum(1, keepdim=True)
            product.mul_(factors)
    return dots
