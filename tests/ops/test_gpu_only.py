"""Ops that torch has on GPUs only, on CPU, against one process that has all inputs.

Every rank knows all inputs, as generators start with the same seed.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

from symm_cp.testing import Ranks
from tests.ops.calls import reduced, symmetric
from tests.ops.newer import MISSING
from tests.ops.refusals import check_refusals

OPS = torch.ops.symm_mem
WORLD_SIZES = pytest.mark.parametrize("world_size", [1, 2, 3, 4])


def allocated(x: torch.Tensor) -> torch.Tensor:
    """A copy in memory that could be symmetric: no rank has met the others about it."""
    return symm_mem.empty(*x.shape, dtype=x.dtype, device="cpu").copy_(x)


# --- all-to-alls whose sizes lie in tensors --------------------------------------------------


def routed(group: dist.ProcessGroup, experts: int, dtype: torch.dtype) -> dict[str, Any]:
    """Rows of all ranks and how many of them go to each expert: none, some, or nearly all."""
    W = group.size()
    splits = torch.randint(0, 5, (W, W * experts)) * (torch.rand(W, W * experts) < 0.7)
    splits[random.Random(torch.initial_seed()).randrange(W), 0] = 40
    rows = [torch.randn(int(splits[r].sum()), 3, 2).to(dtype) for r in range(W)]
    return {"splits": splits, "rows": rows, "room": int(splits.sum()) + 8 * experts * W}


def chunks(rows: torch.Tensor, splits: torch.Tensor) -> list[torch.Tensor]:
    return list(rows.split(splits.tolist()))


def padded(x: torch.Tensor, room: int) -> torch.Tensor:
    return torch.cat([x, x.new_zeros(room - len(x), *x.shape[1:])])


def flat(group: dist.ProcessGroup, dtype: torch.dtype) -> None:
    W, rank = group.size(), group.rank()
    case = routed(group, 1, dtype)
    given = [chunks(case["rows"][r], case["splits"][r]) for r in range(W)]
    out = allocated(torch.zeros(case["room"], 3, 2, dtype=dtype))
    found = allocated(torch.zeros(2, W, dtype=torch.int64))
    input = symmetric(padded(case["rows"][rank], case["room"]), group)
    OPS.all_to_all_vdev(input, out, allocated(case["splits"][rank]), found, group.group_name)
    expected = torch.cat([given[r][rank] for r in range(W)])
    assert torch.equal(out[: len(expected)], expected)
    assert found[0].tolist() == case["splits"][:, rank].tolist()
    assert found[1].tolist() == [0, *found[0].cumsum(0)[:-1].tolist()]


def there_and_back(
    group: dist.ProcessGroup, dtype: torch.dtype, experts: int, align: int | None
) -> None:
    W, rank, name = group.size(), group.rank(), group.group_name
    case = routed(group, experts, dtype)
    given = [chunks(case["rows"][r], case["splits"][r]) for r in range(W)]
    room = case["room"]
    input = symmetric(padded(case["rows"][rank], room), group)
    splits = allocated(case["splits"][rank])
    out = symmetric(torch.full((room, 3, 2), -1, dtype=dtype), group)
    found = allocated(torch.zeros(2, W * experts, dtype=torch.int64))
    OPS.all_to_all_vdev_2d(input, out, splits, found, name, align)

    lengths, begins, row = [], [], 0
    for e in range(experts):
        first = row
        for r in range(W):
            chunk = given[r][rank * experts + e]
            assert torch.equal(out[row : row + len(chunk)], chunk), (e, r)
            lengths.append(len(chunk))
            begins.append(row)
            row += len(chunk)
        step = align or 1
        row = first + max(step, -(-(row - first) // step) * step)
    assert found.tolist() == [lengths, begins]

    # And back: every rank gets its rows where they were.
    back = allocated(torch.zeros(room, 3, 2, dtype=dtype))
    seen = allocated(torch.zeros(2, W * experts, dtype=torch.int64))
    OPS.all_to_all_vdev_2d_offset(out, back, found, seen, name)
    own = case["rows"][rank]
    assert torch.equal(back[: len(own)], own)
    assert seen[0].tolist() == case["splits"][rank].tolist()
    assert seen[1].tolist() == [0, *seen[0].cumsum(0)[:-1].tolist()]


@WORLD_SIZES
@pytest.mark.ranks
def test_all_to_alls_with_sizes_in_tensors(group: dist.ProcessGroup, world_size: int) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        flat(group, dtype)
        for experts in (1, 3):
            for align in (None, 1, 4):
                there_and_back(group, dtype, experts, align)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.ranks
def test_all_to_alls_that_do_not_fit(group: dist.ProcessGroup, world_size: int) -> None:
    W, rank, name = group.size(), group.rank(), group.group_name
    rows = symm_mem.empty(2 * W, 3, device="cpu").fill_(rank)
    out = symm_mem.empty(2 * W, 3, device="cpu")
    splits = allocated(torch.full((W,), 2))
    found = allocated(torch.zeros(2, W, dtype=torch.int64))

    def refused(message: str, *args: Any, everywhere: bool = True) -> None:
        with pytest.raises(RuntimeError, match=message):
            OPS.all_to_all_vdev(*args, name)
        OPS.all_to_all_vdev(rows, out, splits, found, name)  # the group works
        assert out[:, 0].tolist() == [float(r) for r in range(W) for _ in range(2)]

    refused("input is not in symmetric memory", rows.clone(), out, splits, found)
    refused("out is not in symmetric memory", rows, out.clone(), splits, found)
    refused("in_splits is torch.int32", rows, out, allocated(splits.int()), found)
    refused("rows of out are", rows, allocated(out[:, :2]), splits, found)
    refused("out is torch.float64", rows, allocated(out.double()), splits, found)
    refused(r"has 3 rows|has \d+ rows", rows[:3], out, splits, found)
    refused("is -1 rows", rows, out, allocated(splits - 3), found)
    # Ranks learn what a peer sends only when they meet, so all of them fail.
    too_much = out[: 2 * W - 1] if rank == W - 1 else out
    refused(
        rf"rank {W - 1} gets rows up to row {2 * W}, but its out", rows, too_much, splits, found
    )

    # One rank refuses what the others accept.
    given = rows.clone() if rank == W - 1 else rows
    message = "input is not in symmetric memory"
    with pytest.raises(RuntimeError, match=message):
        OPS.all_to_all_vdev(given, out, splits, found, name)
    # Tensors of different rendezvous.
    other = symm_mem.empty(2 * W, 3, device="cpu")
    symm_mem.rendezvous(other, name)
    given = other if rank == 0 else rows
    with pytest.raises(RuntimeError, match="are of different rendezvous"):
        OPS.all_to_all_vdev(given, out, splits, found, name)
    OPS.all_to_all_vdev(rows, out, splits, found, name)
    # A rank without rows, whose own part of the others' rendezvous still exists, or was freed.
    nothing = symm_mem.empty(0, 3, device="cpu")
    none = allocated(torch.zeros(W, dtype=torch.int64))
    args = (nothing, out, none) if rank == 0 else (rows, out, splits)
    OPS.all_to_all_vdev(*args, found, name)
    assert out[: 2 * (W - 1), 0].tolist() == [float(r) for r in range(1, W) for _ in range(2)]
    own = symm_mem.empty(2 * W, 3, device="cpu")
    symm_mem.rendezvous(own, name)
    if rank == 0:
        del own
        args = (nothing, out, none)
    else:
        args = (own, out, splits)
    with pytest.raises(RuntimeError, match="input is empty, and this rank has freed"):
        OPS.all_to_all_vdev(*args, found, name)
    OPS.all_to_all_vdev(rows, out, splits, found, name)


# --- sums and copies -------------------------------------------------------------------------


def numbers(group: dist.ProcessGroup, *shape: int, dtype: torch.dtype) -> list[torch.Tensor]:
    return [torch.randn(*shape).to(dtype) for _ in range(group.size())]


def sums(group: dist.ProcessGroup, dtype: torch.dtype) -> None:
    W, rank, name = group.size(), group.rank(), group.group_name
    for shape in ((3,), (70, 33), (1100, 300)):
        given = numbers(group, *shape, dtype=dtype)
        for place in (allocated, lambda x: symmetric(x, group)):
            x, out = place(given[rank]), torch.zeros(shape, dtype=dtype)
            assert torch.equal(OPS.multimem_one_shot_all_reduce(x, "sum", name), reduced(given))
            assert OPS.multimem_one_shot_all_reduce_out(x, "sum", name, out) is out
            assert torch.equal(out, reduced(given))
            for root in range(W):
                out.zero_()
                OPS.multimem_one_shot_reduce_out(x, "sum", root, name, out)
                assert torch.equal(out, reduced(given) if rank == root else torch.zeros_like(out))
            assert torch.equal(x, given[rank])
            assert OPS.multimem_all_reduce_(x, "sum", name) is x
            assert torch.equal(x, reduced(given))


def tiles(group: dist.ProcessGroup, dtype: torch.dtype) -> None:
    W, rank, name = group.size(), group.rank(), group.group_name
    given = numbers(group, 24, 10 * W, dtype=dtype)
    whole = symmetric(given[rank], group)
    for root in range(W):
        result = symmetric(torch.zeros(24, 10 * W, dtype=dtype), group)
        OPS.tile_reduce(whole[2:9, 1:8], result[2:9, 1:8], root, name)
        expected = torch.zeros_like(result)
        if rank == root:
            expected[2:9, 1:8] = reduced(given)[2:9, 1:8]
        assert torch.equal(result, expected)
    for roots in ([*range(W)], [W - 1], [*reversed(range(W))][: max(1, W - 1)]):
        result = symmetric(torch.zeros(24, 10 * W, dtype=dtype), group)
        parts = [whole[:6, 10 * i : 10 * i + 10] for i in range(len(roots))]
        OPS.multi_root_tile_reduce(parts, result[:6, :10], roots, name)
        expected = torch.zeros_like(result)
        if rank in roots:
            at = 10 * roots.index(rank)
            expected[:6, :10] = reduced(given)[:6, at : at + 10]
        assert torch.equal(result, expected)


def blocks(group: dist.ProcessGroup, dtype: torch.dtype) -> None:
    W, rank, name = group.size(), group.rank(), group.group_name
    given = numbers(group, 6 * W, 6 * W, dtype=dtype)
    x = symmetric(given[rank], group)
    for dim in () if MISSING else (0, 1):
        out = torch.zeros(6, 6 * W, dtype=dtype) if dim == 0 else torch.zeros(6 * W, 6, dtype=dtype)
        OPS.nccl_reduce_scatter_offset(x, [out], name, dim)
        assert torch.equal(out, reduced(given).narrow(dim, 6 * rank, 6))
        # Two blocks for each rank, of 4 and 2 rows or columns, in reverse order of ranks.
        ends = [4 * (i + 1) for i in range(W)] + [4 * W + 2 * (i + 1) for i in range(W)]
        roots = [*reversed(range(W))] * 2
        at = W - 1 - rank
        expected = [
            reduced(given).narrow(dim, 4 * at, 4),
            reduced(given).narrow(dim, 4 * W + 2 * at, 2),
        ]
        outs = [torch.zeros(e.shape, dtype=dtype) for e in expected]
        OPS.nccl_reduce_scatter_offset(x, outs, name, dim, ends, roots)
        for found, wanted in zip(outs, expected, strict=True):
            assert torch.equal(found, wanted)


def copies(group: dist.ProcessGroup, dtype: torch.dtype) -> None:
    W, rank, name = group.size(), group.rank(), group.group_name
    for shape in ((3, 5), (400, 700)):
        given = numbers(group, *shape, dtype=dtype)
        out = allocated(torch.zeros(W * shape[0], shape[1], dtype=dtype))
        assert OPS.multimem_all_gather_out(given[rank], name, out) is out
        assert torch.equal(out, torch.cat(given))
        mine = out[rank * shape[0] : (rank + 1) * shape[0]]
        OPS.multimem_all_gather_out(mine, name, out)
        assert torch.equal(out, torch.cat(given))
        for root in range(W):
            x = allocated(given[rank])
            assert OPS.nvshmem_broadcast(x, root, name) is x
            assert torch.equal(x, given[root])
    given = numbers(group, W * 7, 5, dtype=dtype)
    out = allocated(torch.zeros(W * 7, 5, dtype=dtype))
    assert OPS.nvshmem_all_to_all(allocated(given[rank]), out, name) is out
    assert torch.equal(out, torch.cat([x[7 * rank : 7 * rank + 7] for x in given]))


@WORLD_SIZES
@pytest.mark.ranks
def test_sums_and_copies(group: dist.ProcessGroup, world_size: int) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for check in (sums, tiles, blocks, copies):
            check(group, dtype)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.ranks
def test_arguments_that_gpus_refuse(group: dist.ProcessGroup, world_size: int) -> None:
    W, name = group.size(), group.group_name
    plain, x = torch.ones(6, 6), allocated(torch.ones(6, 6))
    wrong: list[tuple[Callable[[], Any], str]] = [
        (lambda: OPS.multimem_all_reduce_(plain, "sum", name), "input is not in symmetric memory"),
        (lambda: OPS.multimem_all_reduce_(x, "avg", name), "reduce_op='avg' must be 'sum'"),
        (lambda: OPS.multimem_one_shot_all_reduce(x.t(), "sum", name), "must be contiguous"),
        (lambda: OPS.multimem_one_shot_reduce_out(x, "sum", W, name, plain), f"root={W} is not"),
        (lambda: OPS.multimem_all_gather_out(plain, name, plain), "out is not in symmetric"),
        (lambda: OPS.tile_reduce(x, x[:2], 0, name), "out_tile is torch.float32"),
        (lambda: OPS.tile_reduce(x[0], x[0], 0, name), "in_tile has 1 dimensions, must have 2"),
        (lambda: OPS.multi_root_tile_reduce([x, x], x, [0, 0], name), "root of two tiles"),
        (lambda: OPS.multi_root_tile_reduce([x], x, [0, 1], name), "1 in_tiles and 2 roots"),
        (lambda: OPS.nvshmem_broadcast(x, -1, name), "root=-1 is not a rank"),
        (lambda: OPS.nvshmem_all_to_all(x, plain, name), "out is not in symmetric memory"),
    ]
    blocks_of = None if MISSING else OPS.nccl_reduce_scatter_offset
    if blocks_of is not None:
        wrong += [
            (lambda: blocks_of(x, [], name, 2), "dim=2 must be 0 or 1"),
            (lambda: blocks_of(x, [], name, 0, [3, 2], [0, 1]), r"offsets\[1\]=2"),
            (lambda: blocks_of(x, [], name, 0, [3, 6], [0, 0]), "give all ranks"),
        ]
    cases = [(RuntimeError, message, call) for call, message in wrong]
    check_refusals(group, lambda: OPS.multimem_all_reduce_(allocated(plain), "sum", name), cases)
    for op in (OPS.multimem_all_reduce_, OPS.multimem_one_shot_all_reduce):
        with pytest.raises(NotImplementedError, match="has no gradient"):
            op(allocated(plain).requires_grad_(), "sum", name)


@pytest.mark.ranks(2)
def test_tensors_without_dense_memory(group: dist.ProcessGroup) -> None:
    """Tensors without dense memory, on one rank: refused at once, and the next call works."""
    W, rank, name = group.size(), group.rank(), group.group_name
    x = allocated(torch.ones(6, 6))
    freed = torch.ones(6, 6)
    freed.untyped_storage().resize_(0)
    kinds = [
        torch.ones(6, 6).to_sparse(),
        torch.ones(6, 6).to_sparse_csr(),
        torch.nested.nested_tensor([torch.ones(2, 6), torch.ones(4, 6)]),
        torch.quantize_per_tensor(torch.ones(6, 6), 0.1, 0, torch.qint8),
        torch.ones(6, 6).to_mkldnn(),
        freed,
    ]
    calls = {
        "multimem_all_reduce_": lambda x: OPS.multimem_all_reduce_(x, "sum", name),
        "tile_reduce": lambda x: OPS.tile_reduce(x, allocated(torch.ones(6, 6)), 0, name),
        "nvshmem_broadcast": lambda x: OPS.nvshmem_broadcast(x, 0, name),
        "multimem_all_gather_out": lambda x: OPS.multimem_all_gather_out(
            x, name, allocated(torch.ones(6 * W, 6))
        ),
    }
    for op, call in calls.items():
        for kind in kinds:
            begin = time.monotonic()
            with pytest.raises(RuntimeError, match=op):
                call(kind if rank == 0 else x)
            assert time.monotonic() - begin < 5
            x.fill_(1)
            assert OPS.multimem_all_reduce_(x, "sum", name)[0, 0] == W
            x.fill_(1)


# --- compiled --------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [2])
@pytest.mark.exhaustive
@pytest.mark.ranks
def test_in_compiled_programs(group: dist.ProcessGroup, world_size: int) -> None:
    W, rank, name = group.size(), group.rank(), group.group_name
    given = numbers(group, 4, 6, dtype=torch.float32)
    x = allocated(given[rank])

    @torch.compile(fullgraph=True)
    def run(x: torch.Tensor) -> Any:
        summed = OPS.multimem_one_shot_all_reduce(x, "sum", name) * 2
        gathered = OPS.multimem_all_gather_out(x * 1, name, x.new_empty(4 * W, 6))
        again = OPS.multimem_all_reduce_(x + 1, "sum", name)
        sent = OPS.nvshmem_broadcast(x * 1, W - 1, name)
        exchanged = OPS.nvshmem_all_to_all(x * 1, x.new_empty(4, 6), name)
        return summed, gathered, again, sent, exchanged

    summed, gathered, again, sent, exchanged = run(x)
    assert torch.equal(summed, reduced(given) * 2)
    assert torch.equal(gathered, torch.cat(given))
    assert torch.equal(again, reduced([g + 1 for g in given]))
    assert torch.equal(sent, given[-1])
    part = slice(4 // W * rank, 4 // W * (rank + 1))
    assert torch.equal(exchanged, torch.cat([g[part] for g in given]))

    # Ops that write to symmetric memory run between two graphs.
    splits = allocated(torch.ones(W, dtype=torch.int64))
    found = allocated(torch.zeros(2, W, dtype=torch.int64))
    rows, taken = symmetric(torch.full((W, 3), float(rank)), group), allocated(torch.zeros(W, 3))

    @torch.compile
    def shuffled() -> torch.Tensor:
        rows.mul_(10)
        OPS.all_to_all_vdev(rows, taken, splits, found, name)
        return taken + 1

    assert shuffled()[:, 0].tolist() == [10.0 * r + 1 for r in range(W)]

    @torch.compile
    def to_root(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return OPS.multimem_one_shot_reduce_out(x, "sum", W - 1, name, out) + 1

    found = to_root(x, torch.zeros(4, 6))
    assert torch.equal(found, 1 + (reduced(given) if rank == W - 1 else torch.zeros(4, 6)))


# --- one rank's operations -------------------------------------------------------------------


def puts_and_gets(group: dist.ProcessGroup) -> None:
    W, rank = group.size(), group.rank()
    for library in ("nvshmem", "nccl"):
        x = symm_mem.empty(5, device="cpu").fill_(rank)
        symm_mem.rendezvous(x, group)
        dist.barrier(group)
        if rank == 0:
            getattr(OPS, f"{library}_get")(x, W - 1)
            assert x.tolist() == [float(W - 1)] * 5
        dist.barrier(group)
        if rank == W - 1:
            x.fill_(9.0)
            getattr(OPS, f"{library}_put")(x, 0)
        dist.barrier(group)
        assert x.tolist() == [9.0 if rank in (0, W - 1) else float(rank)] * 5


def signals(group: dist.ProcessGroup) -> None:
    W, rank = group.size(), group.rank()
    after, before = (rank + 1) % W, (rank - 1) % W
    rng = random.Random(f"{torch.initial_seed()} {rank}")
    box = symm_mem.empty(W, 4096, device="cpu").fill_(-1)
    pad = symm_mem.empty(1, dtype=torch.int64, device="cpu").zero_()
    symm_mem.rendezvous(pad, group)
    handle = symm_mem.rendezvous(box, group)
    dist.barrier(group)
    for turn in range(1, 6):
        time.sleep(rng.random() / 200)
        if turn == 3:  # from now on in the pad of the handle, as torch's own tests have it
            pad = handle.get_signal_pad(rank)[2:4]
        mine = box[rank].fill_(100 * turn + rank)
        OPS.nvshmem_put_with_signal(mine, pad, turn, after)
        OPS.nvshmem_wait_for_signal(pad, turn, before)
        assert (box[before] == 100 * turn + before).all()
        dist.barrier(group)
        mine.fill_(-100 * turn - rank)
        OPS.nccl_put_with_signal(mine, turn, after)
        OPS.nccl_wait_for_signal(box, turn)
        assert (box[before] == -100 * turn - before).all()
        dist.barrier(group)


def counted(group: dist.ProcessGroup) -> None:
    W, rank = group.size(), group.rank()
    after, before = (rank + 1) % W, (rank - 1) % W
    place = symm_mem.empty(6, device="cpu")
    handle: Any = symm_mem.rendezvous(place, group)
    boxed = handle.boxed() if hasattr(handle, "boxed") else handle
    for turn in range(3):
        OPS.nccl_put_signal(torch.full((6,), 10.0 * turn + rank), boxed, after)
        OPS.nccl_put_signal(torch.full((6,), 10.0 * turn + rank), boxed, after)
        OPS.nccl_wait_signal(boxed, before)
        OPS.nccl_wait_signal(boxed, before)  # two were put, two are taken
        assert place.tolist() == [10.0 * turn + before] * 6
        dist.barrier(group)
    with pytest.raises(RuntimeError, match="src has 28 bytes, hdl has 24"):
        OPS.nccl_put_signal(torch.ones(7), boxed, after)


@WORLD_SIZES
@pytest.mark.ranks
def test_puts_gets_and_signals(group: dist.ProcessGroup, world_size: int) -> None:
    puts_and_gets(group)
    signals(group)
    counted(group)
    with pytest.raises(RuntimeError, match="tensor is not in symmetric memory"):
        OPS.nvshmem_put(torch.ones(3), 0)
    with pytest.raises(RuntimeError, match="tensor was not rendezvoused"):
        OPS.nccl_get(allocated(torch.ones(3)), 0)
    x = symm_mem.empty(3, device="cpu")
    symm_mem.rendezvous(x, group)
    with pytest.raises(RuntimeError, match=f"peer={group.size()} is not a rank"):
        OPS.nccl_put(x, group.size())


def waits_for_the_dead(group: dist.ProcessGroup) -> None:
    pad = symm_mem.empty(1, dtype=torch.int64, device="cpu").zero_()
    symm_mem.rendezvous(pad, group)
    dist.barrier(group)
    if group.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match=r"waiting for the signal of rank 1.*died"):
        OPS.nvshmem_wait_for_signal(pad, 7, 1)
    assert time.monotonic() - begin < 5


def test_a_wait_for_a_dead_rank_ends(ranks: Ranks) -> None:
    with ranks.own(2, waits_for_the_dead) as running:
        survivor, dead = running.outcomes()
    assert survivor.failure == ""
    assert dead.signal == signal.SIGKILL, dead


def test_words() -> None:
    words = torch.zeros(6, dtype=torch.uint32)
    assert OPS.stream_write_value32_(words, 2, 2**32 - 1) is words
    OPS.memset32_(words, 3, 7, 2)
    assert words.tolist() == [0, 0, 2**32 - 1, 7, 7, 0]
    for call, message in (
        (lambda: OPS.memset32_(words, 4, 1, 3), "3 words from offset=4 are not in input"),
        (lambda: OPS.memset32_(words, 0, 1, 0), "count=0 must be positive"),
        (lambda: OPS.memset32_(words, 0, -1, 1), "val=-1 must be from 0"),
        (lambda: OPS.stream_write_value32_(words, 6, 1), "1 words from offset=6"),
        (lambda: OPS.stream_write_value32_(words.view(2, 3), 0, 1), "must be a contiguous"),
        (lambda: OPS.stream_write_value32_(words.to(torch.int32), 0, 1), "input is torch.int32"),
    ):
        with pytest.raises(RuntimeError, match=message):
            call()


def test_a_matmul_that_waits_for_its_rows() -> None:
    a, b = torch.zeros(12, 5), torch.randn(5, 7)
    rows, signals = torch.randn(12, 5), torch.zeros(4, dtype=torch.uint32)

    def deliver() -> None:
        for chunk in (2, 3, 0, 1):
            time.sleep(0.02)
            a[3 * chunk : 3 * chunk + 3] = rows[3 * chunk : 3 * chunk + 3]
            OPS.stream_write_value32_(signals, chunk, 1)

    thread = threading.Thread(target=deliver)
    thread.start()
    product = OPS._async_input_mm(a, b, signals, 2)
    thread.join()
    torch.testing.assert_close(product, rows @ b)
    with pytest.raises(RuntimeError, match="a_chunk_pivot=4"):
        OPS._async_input_mm(a, b, signals, 4)
    with pytest.raises(RuntimeError, match="not divisible by 5 chunks"):
        OPS._async_input_mm(a, b, torch.ones(5, dtype=torch.uint32), 0)


def test_a_chunk_that_never_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SYMM_CP_TIMEOUT_MS", "100")
    with pytest.raises(RuntimeError, match="chunk 1 of a was not signalled within 100 ms"):
        OPS._async_input_mm(
            torch.ones(4, 2), torch.ones(2, 2), torch.tensor([1, 0], dtype=torch.uint32), 0
        )


def test_a_matmul_with_a_wider_result() -> None:
    a, b = torch.randn(9, 64).bfloat16(), torch.randn(64, 5).bfloat16()
    product = torch.mm(a, b, out_dtype=torch.float32)
    assert product.dtype == torch.float32
    torch.testing.assert_close(product.double(), a.double() @ b.double(), rtol=1e-5, atol=1e-4)
