"""Products of the rows of experts with the experts' weights, and the checks of both.

csrc/ops/grouped_matmuls.cpp makes the same checks for CPU tensors on one host.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from symm_cp.ops.experts.op import SUMMED
from symm_cp.ops.experts.table import Table
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


def ends_of(found: Table) -> list[int]:
    """Returns the row after the last row of each of this rank's experts."""
    first = found.rank * found.local
    each = [sum(row[e] for row in found.counts) for e in range(first, first + found.local)]
    return [sum(each[: e + 1]) for e in range(found.local)]


def multiply(
    rows: torch.Tensor, weight: torch.Tensor, ends: Sequence[int], out: torch.Tensor, *, add: bool
) -> None:
    """Writes the rows of each expert times its matrix to `out`, or (`add`) adds them."""
    for expert, (begin, end) in enumerate(zip([0, *ends], ends, strict=False)):
        if begin == end:
            continue
        if add:
            out[begin:end].addmm_(rows[begin:end], weight[expert])
        else:
            torch.mm(rows[begin:end], weight[expert], out=out[begin:end])


def multiplied(
    rows: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    ends: Sequence[int],
    addend: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns the sum of the products of rows and weights, plus an addend."""
    total = new_result(rows[0], (rows[0].shape[0], weights[0].shape[2]))
    for i, (each, weight) in enumerate(zip(rows, weights, strict=True)):
        multiply(each, weight, ends, total, add=i > 0)
    return total if addend is None else total.add_(addend)
