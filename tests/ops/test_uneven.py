"""Parts of any sizes: many columns, background collectives, fakes and errors; see test_random."""

from __future__ import annotations

import itertools
from functools import partial

import pytest
import torch
import torch.distributed as dist

import symm_cp
from symm_cp.tensors.shards import Split
from tests.ops import calls
from tests.ops.refusals import check_disagreements, check_refusals
from tests.ops.test_fake import compare

OPS = torch.ops.symm_mem
FLOAT8 = torch.float8_e4m3fn
WORLD_SIZES = pytest.mark.parametrize("world_size", [1, 2, 3, 4])


def splits(ranks: int, dim: int = 0) -> list[Split]:
    """5 rows; none on one rank; none on all but one; none at all."""
    alone = [0] * ranks
    alone[-1] = 3
    return [
        Split.nearly_equal(5, ranks, dim),
        Split(tuple(2 * rank for rank in range(ranks)), dim),
        Split(tuple(alone), dim),
        Split.equal(0, ranks, dim),
    ]


def shape_with(shape: tuple[int, ...], dim: int, length: int) -> list[int]:
    whole = list(shape)
    whole[dim] = length
    return whole


@WORLD_SIZES
@pytest.mark.ranks
def test_columns_that_do_not_divide(group: dist.ProcessGroup, world_size: int) -> None:
    """32,001 columns: gathered, and scattered again."""
    W, rank = group.size(), group.rank()
    split = Split.nearly_equal(32_001, W, 1)
    x, up = torch.randn(3, 32_001), torch.randn(32_001, 2) / 100
    out = symm_cp.all_gather_matmul(
        split.of(rank, x), up, gather_dim=1, group=group, sizes=split.sizes
    )
    torch.testing.assert_close(out, x @ up, rtol=1e-4, atol=1e-4)
    back = symm_cp.matmul_reduce_scatter(
        x[:, :2], up.t().contiguous(), scatter_dim=-1, group=group, sizes=split.sizes
    )
    torch.testing.assert_close(back, split.of(rank, W * (x[:, :2] @ up.t())))


def float8(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).clamp(-4, 4).to(FLOAT8)


def symmetric(like: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """A view of symmetric memory of the same size on all ranks."""
    memory = calls.symmetric(like.new_empty(4096), group)
    return memory[: like.numel()].view(like.shape).copy_(like)


@WORLD_SIZES
@pytest.mark.ranks
def test_low_contention_collectives(group: dist.ProcessGroup, world_size: int) -> None:
    W, rank = group.size(), group.rank()
    for dtype in (torch.float32, torch.bfloat16, torch.int32, torch.complex64):
        wide = torch.complex128 if dtype.is_complex else torch.float64
        eps = torch.finfo(dtype).eps if dtype != torch.int32 else 0
        tolerance = {"rtol": eps, "atol": 40 * torch.finfo(torch.float32).eps}
        for split, columns, placed in itertools.product(
            splits(W), (3, 9000 // 5), (torch.clone, symmetric)
        ):
            whole = (torch.randn(split.length, columns) * 9).to(dtype)
            small = whole.numel() <= 1024
            if placed is symmetric and not small:
                continue
            own = split.of(rank, whole)
            shard = symmetric(own, group) if placed is symmetric else own.clone()
            gathered = symm_cp.low_contention_all_gather(shard, group=group, sizes=split.sizes)
            if placed is not symmetric:
                shard.zero_()  # the caller has it back
            assert torch.equal(gathered, whole)
            inputs = [(torch.randn(split.length, columns) * 9).to(dtype) for _ in range(W)]
            given = symmetric(inputs[rank], group) if placed is symmetric else inputs[rank].clone()
            for op in ("sum", "avg") if dtype != torch.int32 else ("sum",):
                part = symm_cp.low_contention_reduce_scatter(
                    given, reduce_op=op, group=group, sizes=split.sizes
                )
                exact = sum(x.to(wide) for x in inputs) / (W if op == "avg" else 1)
                torch.testing.assert_close(part.to(wide), split.of(rank, exact), **tolerance)


@WORLD_SIZES
@pytest.mark.ranks
def test_fakes(group: dist.ProcessGroup, world_size: int) -> None:
    W, rank, name = group.size(), group.rank(), group.group_name
    for dim in (-3, -2, -1):
        split = Split(tuple(range(1, W + 1)), dim % 3)
        sizes = list(split.sizes)
        whole = torch.randn(shape_with((2, 3, 16), dim, split.length))
        shard = split.of(rank, whole).contiguous()
        weights = [torch.randn(whole.shape[-1], n) for n in (16, 4)]
        for keep in (True, False):
            compare(
                OPS._all_gather_matmul_split, shard, weights, dim, name, sizes, rank, return_A=keep
            )
        a = torch.randn(2, 3, 16) if dim == -1 else whole
        weight = torch.randn(16, split.length)
        compare(OPS._matmul_reduce_scatter_split, a, weight, "avg", dim, name, sizes, rank)
        compare(OPS.all_gather_kv, shard, shard, dim, name, sizes, rank)
        compare(OPS._all_gather_kv_backward, whole, whole, dim, name, sizes, rank)
        compare(
            OPS._fused_matmul_reduce_scatter_backward,
            split.of(rank, a @ weight).contiguous() if dim == -1 else shard @ weight,
            a, weight, "sum", dim % 3, name, True, True, sizes, rank,
        )  # fmt: skip
    compare(OPS._low_contention_all_gather_split, torch.randn(rank + 1, 3), name, sizes, rank)
    compare(
        OPS._low_contention_reduce_scatter_split,
        torch.randn(split.length, 3),
        "avg",
        name,
        sizes,
        rank,
    )


def scaled_errors(group: dist.ProcessGroup, shard: torch.Tensor, weight: torch.Tensor) -> None:
    """A scale of shape (1, 1) is per row on a rank with one row, and per tensor on the other."""
    scale = torch.ones(1, 1)
    with pytest.raises((ValueError, RuntimeError), match="needs one number of no dimensions"):
        symm_cp.scaled_all_gather_matmul(
            shard, weight, scale, scale, group=group, sizes=[2, 1], out_dtype=torch.float32
        )


@pytest.mark.ranks(2)
def test_refuses_sizes_that_do_not_fit(group: dist.ProcessGroup) -> None:
    rank = group.rank()
    x, w = torch.randn(2 - rank, 4), torch.randn(4, 4)
    whole, f8 = torch.randn(3, 4), float8(2 - rank, 16)
    one, w8 = torch.tensor(1.0), float8(16, 16).t()

    def gather(sizes: list[int]) -> torch.Tensor:
        return symm_cp.all_gather_matmul(x, w, group=group, sizes=sizes)

    def scatter(sizes: list[int] | None) -> object:
        return symm_cp.matmul_reduce_scatter(whole, w, group=group, sizes=sizes)

    cases = [
        (r"all_gather_matmul: sizes=\[2\] has 1 entries, must have one for each of the 2",
         lambda: gather([2])),
        (r"all_gather_matmul: sizes=\[4, -1\] must not be negative", lambda: gather([4, -1])),
        (rf"sizes=\[3, 3\] give rank {rank} a shard of length 3, but dimension gather_dim=0 of its "
         rf"shard has length {2 - rank}", lambda: gather([3, 3])),
        (r"sizes=\[\] has 0 entries", lambda: gather([])),
        (r"matmul_reduce_scatter: sizes=\[2, 2\] add up to 4, but dimension scatter_dim=0 "
         r"has length 3", lambda: scatter([2, 2])),
        (r"has length 3, which is not divisible by world size 2: give sizes",
         lambda: scatter(None)),
        (r"scaled_all_gather_matmul: sizes=\[1, 1, 1\] has 3 entries",
         lambda: symm_cp.scaled_all_gather_matmul(
             f8, w8, one, one, group=group, sizes=[1, 1, 1], out_dtype=torch.float32)),
        (r"scaled_matmul_reduce_scatter: sizes=\[1, 1\] add up to 2",
         lambda: symm_cp.scaled_matmul_reduce_scatter(
             float8(3, 16), w8, one, one, group=group, sizes=[1, 1], out_dtype=torch.float32)),
        (r"low_contention_all_gather: sizes=\[3, 3\] give rank",
         lambda: symm_cp.low_contention_all_gather(x, group=group, sizes=[3, 3])),
        (r"low_contention_all_gather: sizes=\[\] has 0 entries",
         lambda: symm_cp.low_contention_all_gather(x, group=group, sizes=[])),
        (r"low_contention_reduce_scatter: sizes=\[3, 1\] add up to 4",
         lambda: symm_cp.low_contention_reduce_scatter(whole, group=group, sizes=[3, 1])),
        (r"all_gather_kv: sizes=\[1\] has 1 entries",
         lambda: symm_cp.all_gather_kv(x, x, seq_dim=0, group=group, sizes=[1])),
    ]  # fmt: skip
    wrong = [(ValueError, *case) for case in cases]
    background = [case for case in wrong if "low_contention" in case[1]]  # of another channel
    check_refusals(
        group, lambda: gather([2, 1]), [case for case in wrong if case not in background]
    )
    gathers = partial(symm_cp.low_contention_all_gather, x, group=group, sizes=[2, 1])
    check_refusals(group, lambda: gathers() + 0, background)  # waits
    sizes = [2, 1] if rank else [1, 2]
    differing = (
        lambda: scatter(sizes),
        lambda: symm_cp.low_contention_reduce_scatter(whole, group=group, sizes=sizes).sum(),
    )
    check_disagreements(lambda: gather([2, 1]), differing)
    scaled_errors(group, f8, w8)
    gather([2, 1])
