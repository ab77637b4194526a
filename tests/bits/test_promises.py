"""What README.md promises about bits, over products whose last bits depend on addresses.

Odd shapes, so that rows, chunks and blocks begin anywhere. `SYMM_CP_DEBUG_OFFSETS` has calls find
their slots and scratch at other places each time.
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

import symm_cp
from symm_cp import cuda, tuning
from symm_cp.group import memory
from symm_cp.ops.matmul.scaled_mm import torch_scales_rows_on_cpu
from symm_cp.tensors import alignment
from symm_cp.testing import Ranks
from tests import device as test_device
from tests.bits.products import watched
from tests.cuda.simulated import simulation
from tests.exhaustive import some

#: Many, so that two layouts rarely get the same error.
ULPS = 1000
Run = Callable[[], Any]

WORLD_SIZES = pytest.mark.parametrize("world_size", some(3, of=[1, 2, 3, 4]))

pytestmark = test_device.devices("cpu", "simulated")


@contextmanager
def moved(group: dist.ProcessGroup, unit: int = alignment.ALIGN) -> Iterator[None]:
    """Places slots and scratch at other multiples of `unit`."""
    state, streams = memory.resolve(group), test_device.chosen() == "simulated"
    with (
        mock.patch.dict(os.environ, {"SYMM_CP_DEBUG_OFFSETS": "7"}),
        mock.patch.object(alignment, "offset_unit", unit),
        simulation(delays_us=0) if streams else nullcontext(),
    ):
        dist.barrier(group)
        state.workspace("sync").renew()
        cuda.workspaces_of(state).current.clear()
        yield
        dist.barrier(group)
        if streams:
            cuda.device_of(torch.device("cpu")).synchronize()
        state.workspace("sync").renew()
        cuda.workspaces_of(state).current.clear()


def flattened(results: Any) -> list[torch.Tensor]:
    if isinstance(results, torch.Tensor):
        return [results.detach()]
    return [tensor for result in results for tensor in flattened(result)]


def same(one: Any, other: Any) -> bool:
    pairs = zip(flattened(one), flattened(other), strict=True)
    # Compares bytes, so that NaNs with the same bits are equal.
    return all(
        torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
        for a, b in pairs
    )


def with_grads(op: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> Run:
    def run() -> Any:
        leaves = [x.detach().requires_grad_() for x in inputs]
        out = op(*leaves)
        torch.manual_seed(1)
        return out, torch.autograd.grad(out, leaves, torch.randn(out.shape, dtype=out.dtype))

    return run


def matmuls(group: dist.ProcessGroup) -> dict[str, Run]:
    W, runs = group.size(), {}
    for dim, shape in ((0, (3, 1, 7)), (1, (2, 5, 33)), (-1, (3, 5, 7)), (0, (1, 33))):
        x, w = torch.randn(shape), torch.randn(shape[-1] * (W if dim == -1 else 1), 3)
        runs[f"gather {dim} {shape}"] = with_grads(
            lambda x, w, dim=dim: symm_cp.all_gather_matmul(x, w, gather_dim=dim, group=group),
            x,
            w,
        )
    for dim, shape, n in ((0, (3 * W, 1, 7), 3), (1, (2, W, 33), 5), (-1, (3, 5, 7), 3 * W)):
        x, w = torch.randn(shape), torch.randn(shape[-1], n)
        runs[f"scatter {dim} {shape}"] = with_grads(
            lambda x, w, dim=dim: symm_cp.matmul_reduce_scatter(x, w, scatter_dim=dim, group=group),
            x,
            w,
        )
    for shape in ((7, 5), (2, 5, 33)):
        x, w, bias = torch.randn(shape), torch.randn(shape[-1], 3), torch.ones(3)
        runs[f"all-reduce {shape}"] = with_grads(
            lambda x, w, bias: torch.ops.symm_mem._fused_matmuls_all_reduce(
                [x], [w], None, bias, "sum", group.group_name
            ),
            x,
            w,
            bias,
        )
        runs[f"native all-reduce {shape}"] = with_grads(
            lambda x, w, bias: symm_cp.matmul_all_reduce(x, w, bias, group=group), x, w, bias
        )
    return runs


def scaled(group: dist.ProcessGroup) -> dict[str, Run]:
    runs: dict[str, Run] = {}
    a, w = torch.randn(3, 48).to(torch.float8_e4m3fn), torch.randn(16, 48)
    weight, rows, one = w.to(a.dtype).t(), torch.rand(3, 1) + 0.5, torch.ones(())
    a_full = torch.randn(3 * group.size(), 48).to(a.dtype)
    for dtype in (torch.float32, torch.bfloat16):
        runs[f"scaled gather {dtype}"] = lambda dtype=dtype: symm_cp.scaled_all_gather_matmul(
            a, weight, rows, one, group=group, out_dtype=dtype
        )[1]
        runs[f"scaled scatter {dtype}"] = lambda dtype=dtype: symm_cp.scaled_matmul_reduce_scatter(
            a_full, weight, one, one, group=group, out_dtype=dtype
        )
    return runs


def rotating(method: str, run: Run) -> Run:
    def chosen() -> Any:
        symm_cp.set_rotate_method(method)
        try:
            return run()
        finally:
            symm_cp.set_rotate_method("allgather")

    return chosen


def attentions(group: dist.ProcessGroup) -> dict[str, Run]:
    runs: dict[str, Run] = {}
    for length, features, rotate in ((33, 7, "allgather"), (17, 5, "alltoall"), (5, 3, "alltoall")):
        # q and v have the heads within a row, as a projection returns them; k is contiguous.
        q, k, v = (torch.randn(1, length, 2, features).transpose(1, 2) for _ in range(3))

        def attend(*qkv: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = symm_cp.all_gather_attention(*qkv, is_causal=True, group=group)
            return out

        run = with_grads(attend, q, k.contiguous(), v)
        runs[f"attention {length} {features} {rotate}"] = rotating(rotate, run)
    return runs


def all_ops(group: dist.ProcessGroup) -> dict[str, tuple[Run, tuple[str | None, ...]]]:
    """The ops and the algorithms to run them; None: natively, the default at these sizes."""
    return {
        **{name: (run, (*tuning.ALGORITHMS, None)) for name, run in matmuls(group).items()},
        **{name: (run, (*tuning.ALGORITHMS[:1], None)) for name, run in scaled(group).items()},
        **{name: (run, ("pipeline", None)) for name, run in attentions(group).items()},
    }


def repeated(group: dist.ProcessGroup, unit: int) -> list[str]:
    """The ops for which a repeated call gave different bits, or multiplied different operands."""
    differ = []
    torch.manual_seed(group.rank())
    torch_scales_rows_on_cpu()  # it multiplies to find out
    for name, (run, algorithms) in all_ops(group).items():
        for algorithm in algorithms:
            with moved(group, unit), tuning.forced(algorithm), watched(ULPS) as calls:
                first, before = run(), list(calls)
                for size in (1, 2, 40):  # the last one makes the slots larger
                    x = torch.randn(8 * size, 64)
                    symm_cp.all_gather_matmul(x, x.t().contiguous(), group=group)
                    calls.clear()
                    again = run()
                    if not same(first, again) or calls != before:
                        differ.append(f"{name} {algorithm}")
    return differ


@pytest.mark.exhaustive
@WORLD_SIZES
def test_a_call_repeats_its_bits(ranks: Ranks, world_size: int) -> None:
    assert ranks.run(world_size, repeated, alignment.ALIGN) == [[]] * world_size


@pytest.mark.exhaustive
def test_other_offsets_would_be_noticed(ranks: Ranks) -> None:
    for differ in ranks.run(2, repeated, 8):
        assert any(name.startswith("gather") for name in differ)
        assert any(name.startswith("scatter") for name in differ)
        assert any(name.startswith("scaled gather") for name in differ)


def elsewhere(x: torch.Tensor, kind: str, group: dist.ProcessGroup) -> torch.Tensor:
    """The same values at another address, or with other strides."""
    offset = {"view": 1, "symmetric": 0, "symmetric view": 1 + group.rank()}.get(kind)
    if kind == "transposed":
        return x.transpose(0, -1).contiguous().transpose(0, -1)
    if kind == "strides of 1":  # for dimensions of length 1, if x has any
        strides = zip(x.stride(), x.shape, strict=True)
        return x.as_strided(x.shape, [stride if size > 1 else 1 for stride, size in strides])
    assert offset is not None
    if kind == "view":
        block = x.new_empty(x.numel() + offset)
    else:
        block = symm_mem.empty(x.numel() + group.size() + 1, dtype=x.dtype, device="cpu")
        symm_mem.rendezvous(block, group)
    return block[offset : offset + x.numel()].view(x.shape).copy_(x)


def gather(
    group: dist.ProcessGroup, dtype: torch.dtype, dim: int, shape: tuple[int, ...]
) -> tuple[torch.Tensor, Callable[[torch.Tensor], Any]]:
    """This rank's shard, and a function that returns its all-gather-matmul and its gradient."""
    torch.manual_seed(0)
    x = [torch.randn(shape, dtype=dtype) for _ in range(group.size())][group.rank()]
    w = torch.randn(shape[-1] * (group.size() if dim == -1 else 1), 3, dtype=dtype)

    def run(shard: torch.Tensor) -> Any:
        options = {"gather_dim": dim, "group": group}
        _, kept = symm_cp.all_gather_matmul(shard, w, return_gathered=True, **options)
        out = symm_cp.all_gather_matmul(shard, w, **options)
        assert same(kept, out), "return_gathered"
        leaf = w.clone().requires_grad_()
        grad = torch.ones_like(out)
        product = symm_cp.all_gather_matmul(shard, leaf, **options)
        return out, torch.autograd.grad(product, leaf, grad)

    return x, run


def scatter_backward(
    group: dist.ProcessGroup, dtype: torch.dtype, dim: int, shape: tuple[int, ...]
) -> tuple[torch.Tensor, Callable[[torch.Tensor], Any]]:
    """This rank's gradient, and the backward pass of a matmul-reduce-scatter for it."""
    longer = list(shape)
    longer[dim] *= group.size()
    x = torch.randn(*longer[:-1], 5, dtype=dtype, requires_grad=True)
    w = torch.randn(5, longer[-1], dtype=dtype, requires_grad=True)
    out = symm_cp.matmul_reduce_scatter(x, w, scatter_dim=dim, group=group)
    return torch.randn(shape, dtype=dtype), lambda grad: torch.autograd.grad(
        out, (x, w), grad, retain_graph=True
    )


@WORLD_SIZES
@pytest.mark.exhaustive
@pytest.mark.ranks
def test_where_a_shard_lies_changes_no_bit(group: dist.ProcessGroup, world_size: int) -> None:
    kinds = ["view", "symmetric", "symmetric view", "transposed", "strides of 1"]
    shapes = [(0, (3, 7)), (1, (2, 5, 33)), (-1, (3, 5, 7)), (0, (1, 33)), (0, (5, 1))]
    for dtype, (dim, shape) in itertools.product((torch.float32, torch.bfloat16), shapes):
        for op, algorithm in itertools.product((gather, scatter_backward), tuning.ALGORITHMS):
            case = (op.__name__, dtype, dim, shape, algorithm)
            with moved(group), tuning.forced(algorithm), watched(ULPS):
                x, run = op(group, dtype, dim, shape)
                plain = run(x)
                for kind in kinds:
                    assert same(plain, run(elsewhere(x, kind, group))), (*case, kind)
            # Equal weights give equal rows on all ranks, unless each rank adds its own part first.
            if op is gather and (dim != -1 or dtype == torch.bfloat16):
                found: list[Any] = [None] * group.size()
                dist.all_gather_object(found, plain[0], group)
                assert all(same(plain[0], other) for other in found), case


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.ranks
def test_operands_are_aligned(group: dist.ProcessGroup, world_size: int) -> None:
    """Operands of sharded matmuls begin at multiples of 64 bytes and have contiguous strides."""
    torch_scales_rows_on_cpu()  # it multiplies to find out
    for kind in ("view", "symmetric view"):
        with moved(group), tuning.forced("shards"), watched() as calls:
            x = elsewhere(torch.randn(3, 5, 7), kind, group)
            w = torch.randn(7, 3)
            symm_cp.all_gather_matmul(x, w, gather_dim=1, group=group, return_gathered=True)
            a = elsewhere(torch.randn(3, 48).to(torch.float8_e4m3fn), kind, group)
            scale = elsewhere(torch.rand(3, 1), kind, group)
            symm_cp.scaled_all_gather_matmul(
                a, torch.randn(16, 48).to(a.dtype).t(), scale, torch.ones(()), group=group,
                out_dtype=torch.float32,
            )  # fmt: skip
            assert len(calls) == 2 * group.size()
            for name, (shard, *_) in calls:
                address, shape, strides = shard
                assert address == 0, (name, shard)
                assert strides == alignment.contiguous_strides(shape), (name, shard)
            assert all(call[1][2][0] == 0 for call in calls if call[0] == "_scaled_mm")
            # Each rank's partial sum has 36 bytes in float32 and 72 in float64.
            for dtype in (torch.float32, torch.float64):
                calls.clear()
                y = torch.randn(3 * group.size(), 7, dtype=dtype)
                symm_cp.matmul_reduce_scatter(y, w.to(dtype), group=group)
                assert [call[1][-1][0] for call in calls] == [0] * group.size()


@pytest.mark.exhaustive
@pytest.mark.ranks(3)
def test_torchs_own_products(group: dist.ProcessGroup) -> None:
    """Bits are equal with the real matrix library, too, whose sums may depend on addresses."""
    with simulation(delays_us=0), tuning.forced("shards"):
        for _ in range(200):
            inner = random.choice([7, 16, 33, 132])
            x = torch.randn(random.choice([1, 2, 3, 5, 8, 15]), inner)
            w = torch.randn(inner, random.choice([1, 3, 8, 17]))
            out = symm_cp.all_gather_matmul(x, w, group=group)
            _, kept = symm_cp.all_gather_matmul(x, w, group=group, return_gathered=True)
            assert same(out, kept), (x.shape, w.shape)
