"""Collectives with native kernels: every op, size and place of its input, to the last bit."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch.distributed._functional_collectives import wait_tensor as wait
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_leaves

import symm_cp
from symm_cp import native
from symm_cp.group import memory
from symm_cp.ops.op import Op, declared
from symm_cp.testing import Ranks
from tests.exhaustive import some
from tests.ops.calls import alone, caller, completed, reduced, symmetric
from tests.ops.refusals import check_refusals

OPS = torch.ops.symm_mem
WORLD_SIZES = pytest.mark.parametrize("world_size", [1, 2, 3, 4])
#: Elements: none, a few, more than a piece takes up in float32, no multiple of anything.
LENGTHS = (0, 7, 5_001, 300_007)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int32, torch.complex64)


def numbers(group: dist.ProcessGroup, length: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """The inputs of all ranks; each rank knows them all, as generators start with the same seed."""
    if dtype.is_floating_point or dtype.is_complex:
        return [torch.randn(length, dtype=dtype) for _ in range(group.size())]
    return [torch.randint(-100, 100, (length,)).to(dtype) for _ in range(group.size())]


def strided(like: torch.Tensor) -> torch.Tensor:
    return torch.stack([like, like], -1)[..., 0]


@pytest.mark.parametrize(
    ("world_size", "dtype"),
    some(
        *((2, dtype) for dtype in DTYPES[:3]), (1, DTYPES[0]), (3, DTYPES[0]), (4, DTYPES[2]),
        of=[(world_size, dtype) for world_size in (1, 2, 3, 4) for dtype in DTYPES],
    ),
)  # fmt: skip
@pytest.mark.ranks
def test_all_reduces(group: dist.ProcessGroup, world_size: int, dtype: torch.dtype) -> None:
    name, rank = group.group_name, group.rank()
    reduce_ops = ("sum", "avg") if dtype.is_floating_point or dtype.is_complex else ("sum",)
    places: list[Callable[[torch.Tensor], torch.Tensor]] = [
        torch.clone,
        strided,
        lambda x: symmetric(x, group),
    ]
    for length in LENGTHS:
        for reduce_op in reduce_ops:
            given = numbers(group, length, dtype)
            expected = reduced(given, reduce_op)
            for place in places:
                x, out = place(given[rank]), torch.empty_like(expected)
                buffer = torch.empty(length + 3, dtype=dtype)
                for found in (
                    OPS.one_shot_all_reduce(x, reduce_op, name),
                    OPS.one_shot_all_reduce_out(x, reduce_op, name, out.zero_()),
                    OPS.one_shot_all_reduce_copy(buffer, x, reduce_op, name),
                    OPS.one_shot_all_reduce_copy_out(buffer, x, reduce_op, name, out.zero_()),
                    OPS.two_shot_all_reduce_out(x, reduce_op, name, out.zero_()),
                ):
                    assert torch.equal(found, expected), (length, reduce_op)
                    assert torch.equal(x, given[rank])  # left as it was
                assert OPS.two_shot_all_reduce_(x, reduce_op, name) is x
                assert torch.equal(x, expected), (length, reduce_op)


@WORLD_SIZES
@pytest.mark.ranks
def test_a_result_in_the_memory_of_the_input(group: dist.ProcessGroup, world_size: int) -> None:
    """Writes results into the memory of inputs, exactly or in part."""
    name, rank, W = group.group_name, group.rank(), group.size()
    for place in (torch.clone, lambda x: symmetric(x, group)):
        for length in (5_000, 300_000):
            given = numbers(group, length * W, torch.float32)
            x = place(given[rank])
            OPS.one_shot_all_reduce_out(x, "sum", name, x)
            assert torch.equal(x, reduced(given, "sum"))
            x = place(given[rank])
            OPS.one_shot_all_reduce_out(x[: length - 5], "sum", name, x[5:length])
            assert torch.equal(x[5:length], reduced([g[: length - 5] for g in given], "sum"))
            x = place(given[rank])
            OPS.reduce_scatter_out(x, name, False, x[:length])
            assert torch.equal(x[:length], reduced([g.chunk(W)[rank] for g in given], "sum"))


@WORLD_SIZES
@pytest.mark.ranks
def test_reduce_scatter(group: dist.ProcessGroup, world_size: int) -> None:
    name, rank, W = group.group_name, group.rank(), group.size()
    for rows, columns in ((1, 3), (0, 2), (300, 700)):
        given = [t.view(rows * W, columns * W) for t in numbers(group, rows * columns * W * W,
                                                                torch.float32)]  # fmt: skip
        for place in (torch.clone, strided, lambda x: symmetric(x, group)):
            x = place(given[rank])
            for last, dim in ((False, 0), (True, 1)):
                expected = reduced([g.chunk(W, dim)[rank] for g in given], "sum")
                out = torch.empty_like(expected, memory_format=torch.contiguous_format)
                assert torch.equal(OPS.reduce_scatter_out(x, name, last, out), expected)
                assert torch.equal(out, expected)


@WORLD_SIZES
@pytest.mark.ranks
def test_inputs_of_background_collectives_may_be_overwritten(
    group: dist.ProcessGroup, world_size: int
) -> None:
    """A plain input may be overwritten at once, even while transfers are in flight."""
    name, rank, W = group.group_name, group.rank(), group.size()
    for length in (10, 60_000, 150_001, *([700_003] if W == 2 else [])):
        given = numbers(group, length * W, torch.float32)
        uneven = [length * W - (W - 1), *(1 for _ in range(W - 1))]
        x = given[rank].clone()
        pending = []
        for _ in range(3):
            pending += [
                OPS._low_contention_reduce_scatter(x, "avg", name),
                OPS._low_contention_reduce_scatter_split(x, "sum", name, uneven, rank),
                OPS._low_contention_all_gather(x, name),
            ]
            x.zero_()
            x.copy_(given[rank])
        x.zero_()
        expected = [
            reduced([g.chunk(W)[rank] for g in given], "avg"),
            reduced([g.split(uneven)[rank] for g in given], "sum"),
            torch.cat(given),
        ]
        for found, want in zip(pending, expected * 3, strict=True):
            assert torch.equal(wait(found), want)


@WORLD_SIZES
@pytest.mark.ranks
def test_large_keys_and_values(group: dist.ProcessGroup, world_size: int) -> None:
    """Rows are right wherever pieces cut them."""
    W, rank = group.size(), group.rank()
    for length, uneven in ((1000, None), (3, None), (500, [500, *(rank for rank in range(1, W))])):
        sizes = uneven or [length] * W
        shards = [[torch.randn(2, 3, size, n) for size in sizes] for n in (61, 37)]
        key, value = (of_all[rank] for of_all in shards)
        found = symm_cp.all_gather_kv(
            key.transpose(0, 1).contiguous().transpose(0, 1), value, group=group, sizes=uneven
        )
        for whole, of_all in zip(found, shards, strict=True):
            assert torch.equal(whole, torch.cat(of_all, 2))
            assert whole.is_contiguous()


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.ranks
def test_refusals(group: dist.ProcessGroup, world_size: int) -> None:
    name, ones = group.group_name, torch.ones
    x, out = ones(4), ones(4)
    half, gaps = ones(4).half(), ones(4, 2)[:, 0]
    leaf = ones(4, requires_grad=True)
    cases: list[tuple[str, Callable[[], object]]] = [
        (r"one_shot_all_reduce_copy: symm_buffer is torch.float32 \[3\], needs torch.fl"
         r"oat32 and room for local_input of shape \[4\]",
         lambda: OPS.one_shot_all_reduce_copy(ones(3), x, "sum", name)),
        (r"one_shot_all_reduce_copy: symm_buffer is torch.float16 \[4\]",
         lambda: OPS.one_shot_all_reduce_copy_out(half, x, "sum", name, out)),
        (r"one_shot_all_reduce_copy: symm_buffer must be contiguous, has shape \[4\] an"
         r"d strides \[2\]",
         lambda: OPS.one_shot_all_reduce_copy(gaps, x, "sum", name)),
        (r"one_shot_all_reduce_copy: out is torch.float32 \[3\], needs torch.float32 ",
         lambda: OPS.one_shot_all_reduce_copy_out(x, x, "sum", name, ones(3))),
        (r"one_shot_all_reduce_copy: reduce_op='max' must be 'sum' or 'avg'",
         lambda: OPS.one_shot_all_reduce_copy(x, x, "max", name)),
        (r"two_shot_all_reduce_out: out is torch.float16 \[4\]",
         lambda: OPS.two_shot_all_reduce_out(x, "sum", name, half)),
        (r"two_shot_all_reduce_out: out must be contiguous",
         lambda: OPS.two_shot_all_reduce_out(x, "sum", name, gaps)),
        (r"two_shot_all_reduce_out: input is torch.bool, which cannot be summed",
         lambda: OPS.two_shot_all_reduce_out(x.bool(), "sum", name, out.bool())),
        (r"one_shot_all_reduce: reduce_op='avg' of torch.int32 is not defined",
         lambda: OPS.one_shot_all_reduce(x.int(), "avg", name)),
    ]  # fmt: skip
    unheard: list[tuple[str, Callable[[], object]]] = [
        (r"group: there is no process group named 'nobody'",
         lambda: OPS.one_shot_all_reduce_copy(x, x, "sum", "nobody")),
        (r"one_shot_all_reduce_copy_out: has no gradient",
         lambda: OPS.one_shot_all_reduce_copy_out(x, leaf, "sum", name, out)),
        (r"two_shot_all_reduce_out: has no gradient",
         lambda: OPS.two_shot_all_reduce_out(leaf, "sum", name, out)),
    ]  # fmt: skip
    check_refusals(
        group,
        lambda: OPS.one_shot_all_reduce(x, "sum", name),
        [(RuntimeError, *case) for case in cases],
    )
    for message, call in unheard:
        with pytest.raises(RuntimeError, match=message):
            call()


@pytest.mark.parametrize("world_size", some(2, of=[1, 2, 3]))
@pytest.mark.ranks
def test_the_test_mode_of_torch(group: dist.ProcessGroup, world_size: int) -> None:
    """torch's test mode runs ops over the process group, with the same results."""
    seed = random.randrange(1 << 30)
    channels = [memory.resolve(group).workspace(channel) for channel in ("sync", "async")]
    for op in declared():
        # Native kernels of experts and of ops on peers' memory know no test mode.
        native_only = (op.native and op.complete is None) or "grouped_matmul" in op.name
        if op.cpu_only or op.one_sided or native_only or op.name == "_same_on_all_ranks":
            continue

        def call(op: Op = op) -> list[torch.Tensor]:
            torch.manual_seed(seed)
            args, kwargs = op.example(caller(group))  # type: ignore[misc]
            result = completed(op, op.overload(*args, **kwargs))
            return [each for each in tree_leaves(result) if isinstance(each, torch.Tensor)]

        fused = call()
        native.drop_plans()  # a plan would run
        before = [channel.epoch for channel in channels]
        with symm_mem._test_mode():
            unfused = call()
        assert [channel.epoch for channel in channels] == before, op.name
        for one, other in zip(fused, unfused, strict=True):
            # Attention of few tokens has a form of its own on one host.
            near = {"rtol": 1e-5, "atol": 1e-4} if one.dtype == torch.float32 else {}
            near = {"rtol": 2.0**-6, "atol": 0.1} if one.dtype == torch.bfloat16 else near
            torch.testing.assert_close(one, other, msg=lambda text, op=op: op.name + text, **near)


def in_test_mode_without_peers(group: dist.ProcessGroup) -> None:
    """A rank of torch's backend "fake" can meet nobody: the unfused definitions need not."""
    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    name, a, b = str(dist.group.WORLD.group_name), torch.rand(8, 6), torch.rand(6, 5)
    eight = torch.float8_e4m3fn
    x, w, scale = torch.rand(8, 16).to(eight), torch.rand(16, 16).to(eight).t(), torch.ones(())
    calls: dict[str, Callable[[], Any]] = {
        "8, 5": lambda: OPS.fused_all_gather_matmul(a, [b], 0, name)[1][0][:8],
        "2, 5": lambda: OPS.fused_matmul_reduce_scatter(a, b, "avg", 0, name),
        "4, 16": lambda: OPS.fused_all_gather_scaled_matmul(
            x[:1], [w], scale, [scale], 0, name, [None], [None], [torch.bfloat16], [False]
        )[1][0],
        "2, 16": lambda: OPS.fused_scaled_matmul_reduce_scatter(
            x, w, scale, scale, "sum", 0, 0, name, [8, 16], None, None, torch.bfloat16, False
        ),
        "32, 6": lambda: wait(OPS._low_contention_all_gather(a, name)),
        "2, 6": lambda: wait(OPS._low_contention_reduce_scatter(a, "sum", name)),
        "8, 5 too": lambda: symm_cp.matmul_all_reduce(a, b, group=name),
    }
    with symm_mem._test_mode():
        for shape, call in calls.items():
            assert f"[{shape.removesuffix(' too')}]" == str(list(call().shape))
        product = OPS.fused_all_gather_matmul(a.requires_grad_(), [b], 0, name)[1][0]
        product.sum().backward()
        assert a.grad is not None


def test_the_test_mode_without_peers(ranks: Ranks) -> None:
    alone(ranks, in_test_mode_without_peers)
