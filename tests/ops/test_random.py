"""All ops on random shapes, dims, dtypes and strides, against dense references."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch.distributed._functional_collectives import wait_tensor as wait

import symm_cp
from symm_cp import cuda, tuning
from symm_cp.group import memory
from symm_cp.tensors.shards import Split
from symm_cp.testing import Ranks
from tests import device, reference

pytestmark = device.devices(*device.NAMES)

FLOATING = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
DTYPES = [*FLOATING, torch.complex128]
FLOAT8 = torch.float8_e4m3fn
OPS = torch.ops.symm_mem


def laid_out(x: torch.Tensor, group: dist.ProcessGroup, kind: int) -> torch.Tensor:
    """The same values as x: contiguous, transposed, with gaps, or in symmetric memory."""
    if kind == 1 and x.dim() > 1:
        return x.transpose(0, -1).clone(memory_format=torch.contiguous_format).transpose(0, -1)
    if kind == 2 and x.dim() > 0:
        gaps = torch.zeros(*x.shape[:-1], x.shape[-1] * 2, dtype=x.dtype)
        gaps[..., ::2] = x
        return gaps[..., ::2]
    if kind == 3 and x.numel() > 0:
        # At a different offset in the block on each rank.
        block = symm_mem.empty(x.numel() + group.size(), dtype=x.dtype, device=device.name())
        part = block.narrow(0, group.rank(), x.numel()).view(x.shape).copy_(x)
        state = memory.resolve(group)
        if not cuda.has_streams(part.device):
            symm_mem.rendezvous(block, group)
        elif cuda.device_for(state, part.device).is_symmetric(part, state):
            symm_cp.read_in_place(part, group)
        return part
    return x.clone()


def random_shape(dims: int, sizes: list[int], last: list[int]) -> list[int]:
    shape = [random.choice(sizes) for _ in range(dims - 1)] + [random.choice(last)]
    if random.random() < 0.06:
        shape[random.randrange(dims)] = 0
    return shape


def parts(W: int, dim: int) -> tuple[Split, tuple[int, ...] | None]:
    """Parts of a dimension, and the argument `sizes`: equal ones need none."""
    if random.random() < 0.4:
        return Split.equal(random.choice([0, 1, 2, 3, 5, 8]), W, dim), None
    split = Split(tuple(random.choice([0, 0, 1, 2, 5]) for _ in range(W)), dim)
    return split, split.sizes


def numbers(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    if not dtype.is_floating_point and not dtype.is_complex:
        return torch.randint(0, 20, shape).to(dtype)
    return torch.randn(shape, dtype=dtype if dtype.is_complex else None).to(dtype)


def own_layout(kind: int, rank: int) -> int:
    """A kind for `laid_out` that differs between ranks, which must agree on symmetric memory."""
    own = random.Random(f"{random.random()} {rank}")
    return kind if kind == 3 else own.randrange(3)


def gathers(group: dist.ProcessGroup, index: int) -> None:
    W, rank = group.size(), group.rank()
    dtype, dims = random.choice(DTYPES), random.choice([2, 3, 4])
    dim = random.randrange(-dims, dims)
    split, sizes = parts(W, dim % dims)
    shape = split.whole_shape(random_shape(dims, [1, 2, 3, 5, 8], [1, 4, 7, 16, 33]))
    weights = [
        numbers([shape[-1], random.choice([0, 1, 3, 8, 17])], dtype) for _ in range(index % 4)
    ]
    whole = numbers(shape, dtype)
    kind = random.randrange(4 if sizes is None else 3)
    full, expected = reference.all_gather_matmul(split.parts(whole), weights, dim)
    shard = laid_out(split.of(rank, whole), group, own_layout(kind, rank))
    given = [laid_out(b, group, own_layout(0, rank) if kind != 3 else 0) for b in weights]
    options = {"gather_dim": dim, "group": group, "sizes": sizes}
    with tuning.forced(random.choice((None, *tuning.ALGORITHMS, tuning.LANES))):
        gathered, outputs = symm_cp.all_gather_matmul(shard, given, return_gathered=True, **options)
        assert torch.equal(gathered, full)
        again = symm_cp.all_gather_matmul(shard, given, **options)
    for output, repeated, exact in zip(outputs, again, expected, strict=True):
        exact.check(output)
        exact.check(repeated)
        assert torch.equal(output, repeated)


def scatters(group: dist.ProcessGroup, index: int) -> None:
    W, rank = group.size(), group.rank()
    dtype, dims = random.choice(DTYPES), random.choice([2, 3, 4])
    dim = random.randrange(-dims, dims)
    split, sizes = parts(W, dim % dims)
    shape = random_shape(dims, [1, 2, 3, 5, 8], [1, 4, 7, 16, 33])
    inner = [random.choice([shape[-1], 5]) for _ in range(W)]
    product = split.whole_shape([*shape[:-1], random.choice([0, 1, 3, 8, 17])])
    a = [numbers([*product[:-1], k], dtype) for k in inner]
    b = [numbers([k, product[-1]], dtype) for k in inner]
    reduce_op = random.choice(["sum", "avg"])
    expected = reference.matmul_reduce_scatter(a, b, dim, reduce_op, sizes=split.sizes)[rank]
    given = laid_out(a[rank], group, own_layout(0, rank))
    with tuning.forced(random.choice((None, *tuning.ALGORITHMS, tuning.LANES))):
        output = symm_cp.matmul_reduce_scatter(
            given, b[rank], scatter_dim=dim, reduce_op=reduce_op, group=group, sizes=sizes
        )
    assert output.is_contiguous()
    expected.check(output)


def all_reduces(group: dist.ProcessGroup, index: int) -> None:
    """Every rank has its own inner dimension, which may be 0; all get the same bits."""
    W, rank, name = group.size(), group.rank(), group.group_name
    dtype, columns = random.choice(FLOATING), random.choice([1, 3, 8, 17])
    lead = random_shape(random.choice([1, 2, 3]), [1, 2, 3, 5], [1, 4, 7, 33])
    inner = [random.choice([0, 1, 4, 16]) for _ in range(W)]
    a = [torch.randn(*lead, k).to(dtype) for k in inner]
    b = [torch.randn(k, columns).to(dtype) for k in inner]
    bias = torch.randn(columns).to(dtype) if index % 2 else None
    reduce_op = random.choice(["sum", "avg"])
    given = laid_out(a[rank], group, own_layout(0, rank))
    with tuning.forced(random.choice((None, *tuning.ALGORITHMS))):
        # The second op takes the forced algorithm, however few rows there are.
        outputs = [
            symm_cp.matmul_all_reduce(given, b[rank], bias, reduce_op=reduce_op, group=group),
            OPS._fused_matmuls_all_reduce([given], [b[rank]], None, bias, reduce_op, name),
        ]
    for output in outputs:
        assert output.is_contiguous()
        reference.matmul_all_reduce(a, b, reduce_op, bias).check(output)
        assert_same_bits(output, group)


def assert_same_bits(tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Checks that all ranks have the same values."""
    everyone: list[Any] = [None] * group.size()
    dist.all_gather_object(everyone, tensor.cpu(), group=group)
    assert all(torch.equal(tensor.cpu(), other) for other in everyone)


def scaled_dtype() -> torch.dtype:
    """The dtype of float8 products: cuBLAS supports only one for rows with scales."""
    on_cpu = device.name() == "cpu"
    return random.choice([torch.bfloat16, torch.float32]) if on_cpu else torch.bfloat16


def scaled_gathers(group: dist.ProcessGroup, index: int) -> None:
    W, rank = group.size(), group.rank()
    dims = random.choice([2, 3])
    dim = random.randrange(-dims, dims)
    columns = dim % dims == dims - 1
    shape = random_shape(dims, [1, 2, 3, 5, 8], [16, 32, 48])
    shape[-1] = shape[-1] or 16
    mode = ["tensor", "replicated", "sharded"][index % (2 if columns else 3)]
    dtype = scaled_dtype()
    shards = [torch.randn(shape).to(FLOAT8) for _ in range(W)]
    K, N = shape[-1] * (W if columns else 1), random.choice([16, 32])
    weight = torch.randn(N, K).to(FLOAT8).t()
    weight_scale = torch.rand(random.choice([(), (1, N)])) + 0.5
    bias = torch.randn(N).to(dtype) if index % 2 else None
    full = torch.cat(shards, dim)
    scales: Any = torch.rand(()) + 0.5
    if mode == "replicated":
        scales = torch.rand(*full.shape[:-1], 1) + 0.5
    elif mode == "sharded":
        scales = [torch.rand(*shape[:-1], 1) + 0.5 for _ in range(W)]
    own_scale = scales[rank] if mode == "sharded" else scales
    _, expected = reference.scaled_all_gather_matmul(
        shards, scales, [weight], [weight_scale], dim, [bias]
    )
    with tuning.forced(random.choice([None, "shards"])):
        gathered, output = symm_cp.scaled_all_gather_matmul(
            shards[rank], weight, own_scale, weight_scale,
            gather_dim=dim, group=group, bias=bias, out_dtype=dtype,
        )  # fmt: skip
    assert torch.equal(gathered.view(torch.uint8), full.view(torch.uint8))
    assert output.dtype == dtype
    expected[0].check(output)


def scaled_scatters(group: dist.ProcessGroup, index: int) -> None:
    W, rank = group.size(), group.rank()
    dims = random.choice([2, 3])
    dim = random.randrange(-dims, dims)
    shape = random_shape(dims, [1, 2, 3, 5, 8], [16, 32, 48])
    shape[-1] = shape[-1] or 16
    N = random.choice([16, 32])
    if dim % dims == dims - 1:
        N *= W
    else:
        shape[dim] *= W
    by_row, by_column = bool(index % 2), random.choice([False, True])
    dtype = scaled_dtype()
    a = [torch.randn(shape).to(FLOAT8) for _ in range(W)]
    b = [torch.randn(N, shape[-1]).to(FLOAT8).t() for _ in range(W)]
    a_scale = [torch.rand((*shape[:-1], 1) if by_row else ()) + 0.5 for _ in a]
    b_scale = [torch.rand((1, N) if by_column else ()) + 0.5 for _ in b]
    bias = torch.randn(N).to(dtype) if random.random() < 0.5 else None
    reduce_op = random.choice(["sum", "avg"])
    expected = reference.scaled_matmul_reduce_scatter(a, a_scale, b, b_scale, dim, reduce_op, bias)
    with tuning.forced(random.choice([None, "shards"])):
        output = symm_cp.scaled_matmul_reduce_scatter(
            a[rank], b[rank], a_scale[rank], b_scale[rank],
            scatter_dim=dim, reduce_op=reduce_op, group=group, bias=bias, out_dtype=dtype,
        )  # fmt: skip
    assert output.dtype == dtype
    expected[rank].check(output)


def check_sum(actual: torch.Tensor, exact: reference.Expected) -> None:
    """Compares a sum; integers wrap, as they do in torch."""
    if actual.dtype.is_floating_point:
        exact.check(actual)
    else:
        assert torch.equal(actual, exact.value.to(torch.int64).to(actual.dtype))


def collectives(group: dist.ProcessGroup, index: int) -> None:
    W, rank, name = group.size(), group.rank(), group.group_name
    dtype = random.choice([*FLOATING, torch.int64, torch.int32, torch.uint8])
    shape = [random.choice([1, 2, 3, 64, 1000])] + [random.choice([1, 3, 8])] * random.randrange(3)
    kind = random.randrange(4)

    shards = [numbers(shape, dtype) for _ in range(W)]
    fulls = [numbers([shape[0] * W, *shape[1:]], dtype) for _ in range(W)]
    shard, full = laid_out(shards[rank], group, kind), laid_out(fulls[rank], group, kind)
    pending = [OPS._low_contention_all_gather(shard, name) for _ in range(3)]
    reduce_op = random.choice(["sum", "avg"]) if dtype.is_floating_point else "sum"
    scattered = OPS._low_contention_reduce_scatter(full, reduce_op, name)
    small = torch.randn(3, 5)
    symm_cp.all_gather_matmul(small, small.t().contiguous(), group=group)  # in between
    if kind != 3:
        shard.zero_(), full.zero_()  # a plain input may be overwritten at once
    check_sum(wait(scattered), reference.reduce_scatter(fulls, 0, reduce_op)[rank])
    for gathered in reversed(pending):
        assert torch.equal(wait(gathered), torch.cat(shards))
    if device.chosen() != "cpu":
        return  # the others are torch's own there, and take what torch takes
    given = laid_out(fulls[rank], group, kind)
    out = torch.empty_like(shards[rank])
    OPS.reduce_scatter_out(given, name, False, out)
    check_sum(out, reference.reduce_scatter(fulls, 0)[rank])
    total = reference.reduce(fulls)
    check_sum(OPS.one_shot_all_reduce(given, "sum", name), total)
    if given.is_contiguous():
        check_sum(OPS.two_shot_all_reduce_(given.clone(), "sum", name), total)
    OPS.two_shot_all_reduce_(given, "sum", name)
    check_sum(given, total)


def repeat(group: dist.ProcessGroup, case: Callable[..., None], count: int) -> None:
    for index in range(count):
        state = random.getstate()
        try:
            case(group, index)
        except Exception as error:
            raise AssertionError(
                f"{case.__name__}, case {index}, {hash(state)}: {error}"
            ) from error


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("case", "count"),
    [
        (gathers, 90),
        (scatters, 90),
        (all_reduces, 40),
        (scaled_gathers, 30),
        (scaled_scatters, 30),
        (collectives, 40),
    ],
)
def test_random(ranks: Ranks, world_size: int, case: Callable[..., None], count: int) -> None:
    ranks.run(world_size, repeat, case, count)
