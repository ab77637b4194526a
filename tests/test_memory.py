"""Workspaces: their size, growth, release and names."""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _symmetric_memory as symm_mem
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import symm_cp
from symm_cp import tuning
from symm_cp.group import memory
from symm_cp.native import wire
from symm_cp.testing import Ranks
from symm_cp.testing.delays import probing
from tests.exhaustive import some
from tests.faults import soak
from tests.faults.ops import ALL, results

WORLD_SIZES = pytest.mark.parametrize("world_size", [1, 2, 3, 4])


def footprint() -> tuple[int, int, int]:
    """Descriptors, mappings of ours, threads."""
    gc.collect()
    held = soak.footprint(0)
    return held.descriptors, held.mappings, held.threads


@pytest.mark.parametrize(
    ("world_size", "slot", "expected"),
    [(1, 0, 4096), (2, 1, 3 * 4096), (2, 4096, 3 * 4096), (2, 4097, 5 * 4096), (64, 8, 8 * 4096)],
)
def test_the_formula(world_size: int, slot: int, expected: int) -> None:
    assert memory.workspace_bytes(world_size, slot) == expected


@WORLD_SIZES
@pytest.mark.ranks
def test_sizes(group: dist.ProcessGroup, world_size: int) -> None:
    own = dist.new_group(list(range(group.size())))
    state = memory.resolve(own)
    workspace = state.workspace("sync")
    assert workspace.nbytes == 0
    w = torch.ones(64, 8)
    with tuning.forced("shards"):
        for rows in (100, 10, 20_000):  # exchanges of any size go through slots of two pieces
            symm_cp.all_gather_matmul(torch.ones(rows, 64), w, group=own)
    slot = 2 * wire.EXCHANGE_PIECE
    if own.size() > 1:
        assert workspace.nbytes == memory.workspace_bytes(own.size(), slot)
        assert workspace.epoch == 2 + own.size() - 1  # large shards arrive one after the other
    symm_cp.reserve(own, 4 * slot)
    assert workspace.nbytes == memory.workspace_bytes(own.size(), 4 * slot)
    reserved = [symm_cp.get_workspace(own, 0, channel=c).nbytes for c in wire.CHANNELS]
    for _ in range(3):
        symm_cp.all_gather_matmul(torch.ones(4096, 64), w, group=own)
        symm_cp.low_contention_all_gather(torch.ones(4096, 64), group=own).sum()
    assert [state.workspace(c).nbytes for c in wire.CHANNELS] == reserved  # nothing had to grow
    dist.destroy_process_group(own)


# A seed for which the probe delays the first step by 1.46 s, and the next three not at all. Peers
# take it for a rank with other memory if that lasts for more than a second.
_PAUSES_FIRST = 157


@pytest.mark.exhaustive
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.ranks
def test_a_rank_may_be_slow_to_make_its_workspace(
    group: dist.ProcessGroup, world_size: int
) -> None:
    """The last rank pauses after it learns of its peers' new memory, before it takes its own."""
    own = dist.new_group(list(range(group.size())))
    rows = 10
    for _ in range(2):  # the first workspace, and a larger one
        rows *= 10
        x = torch.full((rows, 64), 1.0 + group.rank())
        if group.rank() == group.size() - 1:
            with probing(seed=_PAUSES_FIRST, delay_us=1_500_000):
                gathered = symm_cp.all_gather_matmul(x, torch.ones(64, 1), group=own)
        else:
            gathered = symm_cp.all_gather_matmul(x, torch.ones(64, 1), group=own)
        assert gathered[::rows, 0].tolist() == [64.0 * (1 + r) for r in range(group.size())]
    dist.destroy_process_group(own)


# A seed for which the probe delays the second step by 0.58 s, and the first and the next two not.
_PAUSES_SECOND = 163


@pytest.mark.ranks(3)
def test_a_refused_call_before_one_that_takes_more_memory(group: dist.ProcessGroup) -> None:
    """All ranks refuse a call, rank 1 tells rank 2 of it late, and the next call takes more memory.

    So rank 0 is in the next call, and knows that its memory is too small, while rank 2 still waits
    for rank 1 to reach the refused call.
    """
    own = dist.new_group(list(range(group.size())))
    W, rank = own.size(), own.rank()
    for rows, symmetric in ((4, False), (40_000, False), (4, True)):
        x = torch.full((rows, 8), 1.0 + rank)
        if symmetric:
            x = symm_mem.empty(rows, 8).fill_(1.0 + rank)
            symm_mem.rendezvous(x, own)
        with (
            probing(seed=_PAUSES_SECOND, delay_us=600_000)
            if rank == 1
            else contextlib.nullcontext(),
            pytest.raises(ValueError, match="needs 8 rows"),
        ):
            symm_cp.all_gather_matmul(x, torch.ones(5, 1), group=own)
        gathered = symm_cp.all_gather_matmul(x, torch.ones(8, 1), group=own)
        assert gathered[::rows, 0].tolist() == [8.0 * (1 + r) for r in range(W)]
    dist.destroy_process_group(own)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.ranks
def test_a_workspace_is_replaced_before_its_epochs_end(
    group: dist.ProcessGroup, world_size: int
) -> None:
    own = dist.new_group(list(range(group.size())))
    expected = results(own, list(ALL), 0)
    state = memory.resolve(own)
    spaces = [state.workspace(channel) for channel in wire.CHANNELS]
    dist.barrier(own)
    for space in spaces:
        space.skip(wire.LAST_CPU_EPOCH - 3 - space.epoch)
        assert space.epoch == wire.LAST_CPU_EPOCH - 3
    for _ in range(3):
        with probing(seed=group.rank(), delay_us=200):
            found = results(own, list(ALL), 0)
        assert all(map(torch.equal, found, expected))
    for space in spaces:
        assert 0 < space.epoch < 200
    dist.destroy_process_group(own)


def without_memory(group: dist.ProcessGroup, victim: int) -> None:
    own = dist.new_group(list(range(group.size())))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def sync(elements: int) -> torch.Tensor:
        symm_cp.get_workspace(own, 4 * elements)
        return symm_cp.all_gather_matmul(torch.ones(4, 1), torch.ones(1, 1), group=own)

    def background(elements: int) -> torch.Tensor:
        return symm_cp.low_contention_all_gather(torch.ones(elements), group=own).sum()

    # A rank on its own gathers in the background without shared memory.
    for call in (sync, background) if own.size() > 1 else (sync,):
        small = call(4)
        if own.rank() == victim:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
        try:
            size = memory.workspace_bytes(own.size(), 4 << 20)
            with pytest.raises(RuntimeError, match=rf"shared memory of {size} bytes") as caught:
                call(1 << 20)
            told = f"(on rank {victim})" in str(caught.value)
            assert told == (own.rank() != victim)
            assert torch.equal(call(4), small)  # in the workspace from before
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        call(1 << 20)
    dist.destroy_process_group(own)


@WORLD_SIZES
def test_a_rank_without_shared_memory_is_an_error_on_all(ranks: Ranks, world_size: int) -> None:
    ranks.run(world_size, without_memory, world_size - 1, timeout=30)


@pytest.mark.parametrize("world_size", some(1, of=[1, 4]))
@pytest.mark.ranks
def test_released_with_the_group(group: dist.ProcessGroup, world_size: int) -> None:
    counts = []
    for index in range(3):
        own = dist.new_group(list(range(group.size())))
        x = torch.full((300, 300), float(index))
        total = torch.ops.symm_mem.one_shot_all_reduce(x, "sum", own.group_name)
        assert torch.equal(total, x * group.size())
        symm_cp.low_contention_all_gather(x, group=own).sum()
        dist.barrier(group)
        dist.destroy_process_group(own)
        del own
        counts.append(footprint())
    until = time.monotonic() + 2  # a thread that has ended may be listed for a moment
    while counts[1] != counts[2] and time.monotonic() < until:
        counts = [*counts[1:], footprint()]
    assert counts[1] == counts[2]


LISTS = memory.StateKey[list[int]]("lists of a test", close=list.clear)


@pytest.mark.ranks(2)
def test_states_are_closed_with_the_group(group: dist.ProcessGroup) -> None:
    own = dist.new_group(list(range(group.size())))
    state = memory.resolve(own)
    assert state.find(LISTS) is None
    kept = state.state(LISTS, lambda: [1, 2])
    assert state.state(LISTS, list) is kept
    assert memory.resolve(group).find(LISTS) is None
    # Keys are told apart by what they are, not by their names.
    assert state.find(memory.StateKey[list[int]]("lists of a test")) is None
    state.drop(LISTS)
    assert kept == []
    assert state.find(LISTS) is None
    last = state.state(LISTS, lambda: [3])
    state.put(LISTS, [4])
    assert last == [3]
    last = state.state(LISTS, list)
    del state
    dist.destroy_process_group(own)
    del own
    gc.collect()
    assert last == []


@pytest.mark.ranks(4)
def test_names_of_groups(group: dist.ProcessGroup) -> None:
    mesh = DeviceMesh.from_group(group, "cpu")
    workspaces = [symm_cp.get_workspace(g, 8) for g in (group, mesh, group.group_name)]
    assert workspaces[0] is workspaces[1] is workspaces[2]
    two = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    with pytest.raises(ValueError, match="must have one dimension, this one has 2: pick one"):
        symm_cp.get_workspace(two, 8)
    # The rows of the mesh are two groups at once.
    x = torch.full((2, 2), float(group.rank()))
    out = symm_cp.all_gather_matmul(x, torch.eye(2), group=two["tp"])
    row = group.rank() // 2 * 2
    assert out[:, 0].tolist() == [row, row, row + 1, row + 1]


def page_sizes(group: dist.ProcessGroup, asking: list[int]) -> list[int]:
    """The sizes in KiB of the pages of large symmetric memory of each rank."""
    os.environ["SYMM_CP_HUGE_PAGES"] = str(int(group.rank() in asking))
    try:
        nbytes = (4 << 20) + 4096  # three huge pages
        tensor = symm_mem.empty(nbytes, dtype=torch.uint8, device="cpu")
        handle = symm_mem.rendezvous(tensor, group)
    finally:
        del os.environ["SYMM_CP_HUGE_PAGES"]
    buffers = [handle.get_buffer(rank, (nbytes,), torch.uint8) for rank in range(group.size())]
    tensor.fill_(group.rank())
    handle.barrier()
    for rank, buffer in enumerate(buffers):
        assert buffer.eq(rank).all()
    handle.barrier()
    mappings: list[tuple[range, int]] = []
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *rest = line.split()
        if "-" in name:
            addresses = range(*(int(text, 16) for text in name.split("-")))
        elif name == "KernelPageSize:":
            mappings.append((addresses, int(rest[0])))
    return [size for b in buffers for at, size in mappings if b.data_ptr() in at]


HUGE_PAGES = Path("/proc/sys/vm/nr_hugepages")


def free_huge_pages() -> int:
    """Tries to reserve huge pages; returns how many are free."""
    with contextlib.suppress(OSError):
        HUGE_PAGES.write_text(str(max(64, int(HUGE_PAGES.read_text()))))
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return int(fields.get("HugePages_Free", "0"))


@pytest.mark.parametrize("asking", [[], [0], [0, 1]])
def test_reserved_huge_pages(ranks: Ranks, asking: list[int]) -> None:
    """A rank gets huge pages if it asks and enough are free, otherwise small pages."""
    before = HUGE_PAGES.read_text() if HUGE_PAGES.exists() else "0"
    try:
        has_free = free_huge_pages() >= 3 * len(asking)
        expected = [2048 if has_free and rank in asking else 4 for rank in range(2)]
        assert ranks.run(2, page_sizes, asking) == [expected] * 2
    finally:
        with contextlib.suppress(OSError):
            HUGE_PAGES.write_text(before)
