"""Arguments that ops refuse, their errors, and good calls right after; and ranks that fail."""

from __future__ import annotations

import re
import time

import pytest
import torch
import torch.distributed as dist

import symm_cp
from symm_cp import tuning
from symm_cp.group import memory
from symm_cp.testing import Setup
from tests.exhaustive import some

OPS = torch.ops.symm_mem
FLOAT8 = torch.float8_e4m3fn


def works(group: dist.ProcessGroup) -> None:
    """Makes a good call, of a size that the other calls do not have."""
    x = torch.randn(7, 5) + group.rank()
    w = torch.randn(5, 3)
    full = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(full, x, group=group)
    torch.testing.assert_close(symm_cp.all_gather_matmul(x, w, group=group), torch.cat(full) @ w)


@pytest.mark.ranks(2)
def test_bad_arguments(group: dist.ProcessGroup) -> None:
    name = group.group_name
    ones = torch.ones
    f8 = ones(4, 16).to(FLOAT8)
    w8 = ones(16, 16).to(FLOAT8).t()
    one = torch.tensor(1.0)

    def gather(a: torch.Tensor, b: torch.Tensor, dim: int = 0) -> object:
        return OPS.fused_all_gather_matmul(a, [b], dim, name)

    def scatter(a: torch.Tensor, b: torch.Tensor, op: str = "sum", dim: int = 0) -> object:
        return OPS.fused_matmul_reduce_scatter(a, b, op, dim, name)

    def scaled(scale: torch.Tensor, b_scale: torch.Tensor, biases: list[None]) -> object:
        return OPS.fused_all_gather_scaled_matmul(
            f8, [w8], scale, [b_scale], 0, name, biases, [None], [torch.float32], [False]
        )

    def scaled_scatter(shape: list[int], scale: torch.Tensor, b_scale: torch.Tensor) -> object:
        return OPS.fused_scaled_matmul_reduce_scatter(
            f8, w8, scale, b_scale, "sum", 0, 0, name, shape, None, None, torch.float32
        )

    cases = [
        (ValueError, r"fused_all_gather_matmul: gather_dim=2 is out of range for a 2-D",
         lambda: gather(ones(2, 3), ones(3, 2), 2)),
        (ValueError, r"gather_dim=-3 is out of range", lambda: gather(ones(2, 3), ones(3, 2), -3)),
        (ValueError, r"A must have at least 2 dimensions, has shape \[3\]",
         lambda: gather(ones(3), ones(3, 2))),
        (ValueError, r"B\[0\] must be a matrix, has shape \[1, 3, 2\]",
         lambda: gather(ones(2, 3), ones(1, 3, 2))),
        (ValueError, r"B\[0\] of shape \[4, 2\] needs 3 rows to follow A of shape \[2, 3\]",
         lambda: gather(ones(2, 3), ones(4, 2))),
        (ValueError, r"B\[0\] of shape \[3, 2\] needs 6 rows",
         lambda: gather(ones(2, 3), ones(3, 2), 1)),
        (TypeError, r"B\[0\] is torch.float64 and A is torch.float32",
         lambda: gather(ones(2, 3), ones(3, 2).double())),
        (ValueError, r"no process group named 'nobody'",
         lambda: OPS.fused_all_gather_matmul(ones(2, 3), [ones(3, 2)], 0, "nobody")),
        (ValueError, r"fused_matmul_reduce_scatter: reduce_op='max' must be 'sum' or 'avg'",
         lambda: scatter(ones(2, 3), ones(3, 2), "max")),
        (ValueError, r"dimension scatter_dim=0 has length 3, which is not divisible by world size",
         lambda: scatter(ones(3, 3), ones(3, 2))),
        (ValueError, r"scatter_dim=1 has length 5", lambda: scatter(ones(2, 3), ones(3, 5), dim=1)),
        (ValueError, r"scatter_dim=-3 is out of range",
         lambda: scatter(ones(2, 3), ones(3, 2), dim=-3)),
        (ValueError, r"A_scale of shape \[3, 1\] fits no mode for A of shape \[4, 16\]",
         lambda: scaled(ones(3, 1), one, [None])),
        (ValueError, r"B_scales\[0\] of shape \[1, 3\] does not fit",
         lambda: scaled(one, ones(1, 3), [None])),
        (ValueError, r"0 biases for 1 Bs", lambda: scaled(one, one, [])),
        (ValueError, r"output_shape=\[3, 16\] does not hold a product of shape \[4, 16\]",
         lambda: scaled_scatter([3, 16], one, one)),
        (ValueError, r"A_scale of shape \[2, 1\] does not fit A",
         lambda: scaled_scatter([4, 16], ones(2, 1), one)),
        (ValueError, r"_low_contention_all_gather: tensor must have at least 1 dimension",
         lambda: OPS._low_contention_all_gather(one, name)),
        (ValueError, r"dimension dim=0 has length 3, which is not divisible by world size 2",
         lambda: OPS._low_contention_reduce_scatter(ones(3), "sum", name)),
        (TypeError, r"reduce_op='avg' of torch.int32 is not defined",
         lambda: OPS._low_contention_reduce_scatter(ones(4).int(), "avg", name)),
        (TypeError, r"tensor is torch.float8_e4m3fn, which cannot be summed",
         lambda: OPS._low_contention_reduce_scatter(f8, "sum", name)),
        (RuntimeError, r"output is torch.float32 \[3\], needs torch.float32 \[2\]",
         lambda: OPS.reduce_scatter_out(ones(4), name, False, ones(3))),
        (RuntimeError, r"out is torch.float32 \[3\], needs torch.float32 \[4\]",
         lambda: OPS.one_shot_all_reduce_out(ones(4), "sum", name, ones(3))),
        (ValueError, r"x is not in symmetric memory",
         lambda: OPS.get_remote_tensors(ones(4), name)),
        (TypeError, r"group must be a ProcessGroup", lambda: symm_cp.reserve(3, 1)),
        (ValueError, r"nbytes=-1 must not be negative", lambda: symm_cp.reserve(group, -1)),
        (ValueError, r"channel='x' must be one of",
         lambda: symm_cp.get_workspace(group, 1, channel="x")),
    ]  # fmt: skip
    works(group)
    workspace = memory.resolve(group).workspace("sync")
    before = workspace.epoch
    for error, message, call in cases:
        with pytest.raises(error, match=message):
            call()
    works(group)
    # Refused before any communication: the workspace is the one from before.
    assert workspace.epoch > before


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.ranks
def test_errors_name_what_was_called(group: dist.ProcessGroup, world_size: int) -> None:
    rank, W, ones = group.rank(), group.size(), torch.ones
    f8, one = ones(16, 16).to(FLOAT8), ones(())
    cases = [
        (r"^all_gather_matmul: weights\[1\] of shape \[4, 2\] needs 3 rows to follow shard of",
         lambda: symm_cp.all_gather_matmul(ones(2, 3), [ones(3, 2), ones(4, 2)], group=group)),
        (r"^matmul_reduce_scatter: weight of shape \[4, 2\] needs 3 rows to follow a of",
         lambda: symm_cp.matmul_reduce_scatter(ones(W, 3), ones(4, 2), group=group)),
        (r"^matmul_all_reduce: weight of shape \[4, 2\] needs 3 rows to follow a of",
         lambda: symm_cp.matmul_all_reduce(ones(4, 3), ones(4, 2), group=group)),
        (r"^scaled_all_gather_matmul: weight_scales\[0\] of shape \[1, 3\] does not fit weights of",
         lambda: symm_cp.scaled_all_gather_matmul(f8, [f8.t()], one, [ones(1, 3)], group=group)),
        (r"^scaled_matmul_reduce_scatter: a_scale of shape \[3, 1\] does not fit a of",
         lambda: symm_cp.scaled_matmul_reduce_scatter(f8, f8.t(), ones(3, 1), one, group=group)),
        (r"^low_contention_all_gather: ",
         lambda: symm_cp.low_contention_all_gather(one, group=group)),
        (r"^all_gather_attention: query has 2 heads and key 3",
         lambda: symm_cp.all_gather_attention(
             ones(1, 2, 8, 4), ones(1, 3, 8, 4), ones(1, 3, 8, 4), group=group)),
        (r"^sequence_to_heads: x has 1 heads",
         lambda: symm_cp.sequence_to_heads(ones(1, 1, 8, 4), group=group)),
        (r"^ulysses_output_projection: weight has 9 rows",
         lambda: symm_cp.ulysses_output_projection(ones(1, 2, 2 * W, 4), ones(9, 4), group=group)),
        (r"^dispatch_matmul: weights\[0\] ",
         lambda: symm_cp.moe.dispatch_matmul(
             ones(8, 4), ones(2, 5, 4), torch.zeros(8, 2, dtype=torch.int64), 2 * W, group=group)),
        (r"^training_step: batch is a Tensor, must be a mapping",
         lambda: symm_cp.training_step(
             torch.nn.Linear(2, 2), ones(1, 8), group).__enter__()),  # type: ignore[arg-type]
        (r"^shard_batch: batch is a list, must be a mapping",
         lambda: symm_cp.shard_batch(group, [ones(1, 8)])),  # type: ignore[arg-type]
    ]  # fmt: skip
    for message, call in cases:
        with pytest.raises((ValueError, TypeError), match=message):
            call()
    # Peers of a rank that refuses are told in the same words.
    with pytest.raises((ValueError, RuntimeError), match=r"all_gather_matmul: weights\[0\] of sh"):
        symm_cp.all_gather_matmul(ones(2, 3), ones(3 + (rank == 0), 2), group=group)
    lengths = [8, *[9] * (W - 1)]
    text = rf"sizes={re.escape(str(lengths))}$" if W == 2 else r"sizes, the length on each rank \("
    for dim, shape in enumerate(([lengths[rank], 3], [2, lengths[rank], 3])):
        with pytest.raises(RuntimeError, match=f"shards of unequal lengths need {text}") as caught:
            symm_cp.all_gather_matmul(ones(shape), ones(3, 2), gather_dim=dim, group=group)
        assert f"calls all_gather_matmul float32{shape} gather_dim={dim}" in str(caught.value)
    with pytest.raises(RuntimeError, match="ranks disagree") as caught:  # not only in length
        symm_cp.all_gather_matmul(ones(lengths[rank], 3 + rank), ones(3 + rank, 2), group=group)
    assert "sizes" not in str(caught.value)
    gone = dist.new_group(list(range(W)))
    symm_cp.all_gather_matmul(ones(2, 3), ones(3, 2), group=gone)
    dist.destroy_process_group(gone)
    for call in (
        lambda: symm_cp.all_gather_matmul(ones(2, 3), ones(3, 2), group=gone),
        lambda: symm_cp.low_contention_all_gather(ones(2, 3), group=gone),
        lambda: symm_cp.reserve(gone, 8),
        lambda: symm_cp.shard_batch(gone, {"input_ids": ones(1, 8).long()}),
        lambda: symm_cp.context_parallel(gone).__enter__(),
    ):
        with pytest.raises(ValueError, match=r"process group '\d+' was destroyed"):
            call()
    works(group)


@pytest.mark.parametrize("world_size", some(2, 3, of=[2, 3, 4]))
@pytest.mark.ranks
def test_ranks_that_disagree(group: dist.ProcessGroup, world_size: int) -> None:
    rank = group.rank()
    calls = [
        lambda: symm_cp.all_gather_matmul(torch.ones(2 + rank, 4), torch.ones(4, 2), group=group),
        lambda: symm_cp.all_gather_matmul(
            torch.ones(2, 4, dtype=torch.float64 if rank else torch.float32),
            torch.ones(4, 2, dtype=torch.float64 if rank else torch.float32),
            group=group,
        ),
        lambda: symm_cp.matmul_reduce_scatter(
            torch.ones(12, 4), torch.ones(4, 2), group=group, reduce_op="avg" if rank else "sum"
        ),
        lambda: torch.ops._c10d_functional.wait_tensor(
            OPS._low_contention_all_gather(torch.ones(2 + rank, 3), group.group_name)
        ),
    ]
    for call in calls:
        with pytest.raises(RuntimeError, match=r"ranks disagree"):
            call()
        works(group)
        dist.barrier(group)
    # In the background, too, where the workspace of the failed call has to grow.
    room = memory.resolve(group).workspace("async").slot_bytes
    larger = symm_cp.low_contention_all_gather(torch.ones(room), group=group)
    assert larger.sum() == room * group.size()


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.ranks
def test_a_kernel_that_fails_on_one_rank(group: dist.ProcessGroup, world_size: int) -> None:
    victim = world_size - 1
    x, w = torch.ones(4, 4), torch.ones(4, 4)
    works(group)
    original = torch.mm
    if group.rank() == victim:

        def broken(*args: object, **kwargs: object) -> torch.Tensor:
            raise MemoryError("no room for a matrix")

        torch.mm = broken
    start = time.monotonic()
    try:
        with (
            tuning.forced("shards"),  # the kernel in Python
            pytest.raises((MemoryError, RuntimeError), match="no room for a matrix"),
        ):
            symm_cp.matmul_reduce_scatter(x, w, group=group)
    finally:
        torch.mm = original
    assert time.monotonic() - start < Setup().timeout.total_seconds() / 2  # they were told
    works(group)
