"""Products of float8 matrices with scales, on every device and every supported torch."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch

from symm_cp.ops.matmul.block_scales import FORMATS, are_blocks, multiply_blocks
from symm_cp.ops.matmul.products import as_rows
from symm_cp.ops.op import NoGradient
from symm_cp.tensors.alignment import ALIGN, aligned
from symm_cp.tensors.results import new_result
from symm_cp.tensors.shards import Split

#: Types of devices whose kernels take weights at any address. cuBLAS needs float8 matrices, their
#: product and row scales at multiples of 16 bytes; slices of such tensors may begin anywhere.
ANY_ADDRESS = ("cpu",)

#: The bytes up to which a call on CPU exchanges a tensor at once. By shards torch would convert or
#: rearrange the whole weight once per shard, which costs more than the exchange that this hides.
ANY_SIZE = math.inf

SCALED_GATHER = "fused_all_gather_scaled_matmul"


NO_GRADIENT = NoGradient(
    "as torch._scaled_mm; write a torch.autograd.Function whose backward scales"
)


@functools.cache
def torch_scales_rows_on_cpu() -> bool:
    """Whether `torch._scaled_mm` takes a scale for each row on CPU; torch 2.11's does not."""
    matrix = torch.zeros(16, 16, dtype=torch.float8_e4m3fn, device="cpu")
    rows, columns = (torch.ones(shape, device="cpu") for shape in ((16, 1), (1, 16)))
    try:
        torch._scaled_mm(matrix, matrix.t(), rows, columns, out_dtype=torch.float32)
    except RuntimeError:
        return False
    return True


def scaled_mm_out(
    A: torch.Tensor,
    B: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    out: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    scale_result: torch.Tensor | None = None,
    fast: bool = False,
) -> None:
    """Writes `torch._scaled_mm(A, B, ...)` to `out`, in the dtype of `out`.

    Unlike `torch._scaled_mm`, takes one scale for one operand and a scale for each row or column
    of the other, unaligned tensors, and block scales of both.
    """
    if out.numel() == 0:
        return
    if scale_a.dtype in FORMATS:
        product = multiply_blocks(A, B, scale_a, scale_b)
        out.copy_(finish(product, bias, scale_result, out.dtype))
        return
    if out.data_ptr() % ALIGN:
        product = new_result(out, out.shape)
        scaled_mm_out(
            A, B, scale_a, scale_b, product, bias=bias, scale_result=scale_result, fast=fast
        )
        out.copy_(product)
        return
    by_rows = scale_a.numel() != 1 or scale_b.numel() != 1
    # On CPU single scales are repeated for each row, too: on processors that multiply float8, torch
    # takes hundreds of times as long with single scales (torch 2.13 on an Intel processor with AMX;
    # elsewhere both take the same time).
    by_rows |= A.device.type == "cpu" and torch_scales_rows_on_cpu()
    if by_rows:
        scale_a, scale_b = _spread(scale_a, A.shape[0], 1), _spread(scale_b, 1, B.shape[1])
    A = aligned(A)
    if B.data_ptr() % ALIGN and B.device.type not in ANY_ADDRESS:
        B = aligned(B.mT).mT  # by columns, as cuBLAS takes it
    if by_rows and A.device.type == "cpu" and not torch_scales_rows_on_cpu():
        one = scale_a.new_ones(())
        product = torch._scaled_mm(A, B, one, one, out_dtype=torch.float32)
        product.mul_(scale_a).mul_(scale_b)
        out.copy_(finish(product, bias, scale_result, out.dtype))
        return
    # torch 2.11 assumes that a bias is contiguous.
    bias = bias if bias is None else bias.contiguous()
    torch.ops.aten._scaled_mm.out(
        A, B, scale_a, scale_b, bias, scale_result, out.dtype, fast, out=out
    )


def _spread(scale: torch.Tensor, *shape: int) -> torch.Tensor:
    """Returns scales as torch requires them if the other operand has several."""
    return aligned(scale.reshape(1, 1).expand(shape) if scale.numel() == 1 else scale)


def finish(
    product: torch.Tensor,
    bias: torch.Tensor | None,
    scale_result: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Adds the bias, then rounds to `dtype`; float8 is scaled and clamped as `_scaled_mm` does."""
    if bias is not None:
        product = product + bias
    if dtype.itemsize == 1:
        if scale_result is not None:
            product = product / scale_result
        limit = torch.finfo(dtype).max
        product = product.float().clamp(-limit, limit)
    return product.to(dtype)


class ScaledWeight(NamedTuple):
    """A float8 weight, and the other arguments of `_scaled_mm` for it."""

    matrix: torch.Tensor
    scale: torch.Tensor
    dtype: torch.dtype
    bias: torch.Tensor | None = None
    result_scale: torch.Tensor | None = None
    fast: bool = False


class ScaledRows(NamedTuple):
    """Rows of a tensor, and one scale for all rows, each row, or each block of a row."""

    rows: torch.Tensor
    scale: torch.Tensor


def multiply_scaled(rows: ScaledRows, weight: ScaledWeight, *, out: torch.Tensor) -> None:
    """Like `torch.mm`: writes a scaled product to `out`, a matrix."""
    scaled_mm_out(
        rows.rows,
        weight.matrix,
        rows.scale,
        weight.scale,
        out,
        bias=weight.bias,
        scale_result=weight.result_scale,
        fast=weight.fast,
    )


class RowScales(NamedTuple):
    """The scale of A, and its mode: "tensor", "sharded", "replicated" or a format of blocks."""

    scale: torch.Tensor
    mode: str
    split: Split

    @property
    def sharded(self) -> bool:
        """Whether each rank has the scales of its own rows, which travel with them."""
        return self.mode not in ("tensor", "replicated")

    @property
    def of_blocks(self) -> bool:
        """Whether each block of a row has a scale."""
        return self.scale.dtype in FORMATS

    def of_rank(self, rank: int, shards: list[torch.Tensor]) -> torch.Tensor:
        """Returns the scales of a rank's rows; `shards` are its tensors that arrived."""
        if self.sharded:
            return aligned(shards[1]).flatten(0, -2)
        if self.mode == "replicated":
            return as_rows(self.split.of(rank, self.scale), self.split.dim)
        return self.scale

    @classmethod
    def of(cls, x_shard: torch.Tensor, scale: torch.Tensor, split: Split) -> RowScales:
        """Returns the scale and its mode; raises `ValueError` for a shape that fits no mode.

        Block scales always belong to this rank's rows; raises `NotImplementedError` for them when
        the last dimension is gathered.

        When A has one column, a scale of A's shape is ambiguous; as in torch it counts
        as one for each row. Where shards differ, one number must have fewer dimensions than A: else
        a rank that has one row would take it as the scale of that row, and its peers as the scale
        of all rows.
        """
        own = [*x_shard.shape[:-1], 1]
        # Gathering the last dimension makes rows longer, not more numerous.
        by_columns = split.dim == x_shard.dim() - 1
        full = own if by_columns else split.whole_shape(own)
        if are_blocks(SCALED_GATHER, "A_scale", scale, "A", x_shard):
            if by_columns:
                raise NotImplementedError(
                    f"{SCALED_GATHER}: gather_dim={split.dim} is the last dimension of A, which "
                    f"has block scales ({scale.dtype}): gather another dimension"
                )
            return cls(scale, FORMATS[scale.dtype].name, split)
        if list(scale.shape) == own:
            return cls(scale, "sharded", split)
        if scale.numel() == 1 and (split.is_equal or by_columns or scale.dim() < x_shard.dim()):
            return cls(scale, "tensor", split)
        if list(scale.shape) == full:
            return cls(scale, "replicated", split)
        one = "one number" if split.is_equal or by_columns else "one number of no dimensions"
        raise ValueError(
            f"{SCALED_GATHER}: A_scale of shape {list(scale.shape)} fits no mode for A of shape "
            f"{list(x_shard.shape)}: needs {one}, {own} (this rank's rows) or {full} (all rows)"
        )
