"""torch's own symmetric-memory API on CPU tensors: allocation, rendezvous, buffers, signals.

Time-outs, deaths and leaks are in `test_symmetric_memory_faults.py`.
"""

from __future__ import annotations

import ctypes
import datetime
import itertools
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch._C._distributed_c10d import _SymmetricMemory

import symm_cp  # noqa: F401 - registers the CPU backend
from symm_cp.testing import Ranks

WORLD_4S = range(1, 5)
CPU = torch.device("cpu")
# torch 2.11 does not tell.
is_symmetric = getattr(symm_mem, "is_symm_mem_tensor", None)


def make(group: dist.ProcessGroup, *size: int, dtype: torch.dtype = torch.float32):
    """Returns a symmetric tensor filled with the rank, and its handle, after a barrier."""
    tensor = symm_mem.empty(*size, dtype=dtype, device="cpu")
    tensor.fill_(group.rank())
    handle = symm_mem.rendezvous(tensor, group)
    handle.barrier()
    return tensor, handle


def describe_handle(group: dist.ProcessGroup) -> None:
    tensor, handle = make(group, 16, 8)
    world_size = group.size()
    assert (handle.rank, handle.world_size) == (group.rank(), world_size)
    assert handle.buffer_size == tensor.numel() * 4
    assert handle.offset == 0
    assert handle.device == CPU
    assert len(handle.buffer_ptrs) == len(handle.signal_pad_ptrs) == world_size
    assert handle.buffer_ptrs[handle.rank] == tensor.data_ptr()
    assert len(set(handle.buffer_ptrs)) == len(set(handle.signal_pad_ptrs)) == world_size
    assert handle.signal_pad_size == symm_mem.get_signal_pad_size()
    assert handle.multicast_ptr == 0


@pytest.mark.parametrize("world_size", WORLD_4S)
def test_handle(ranks: Ranks, world_size: int) -> None:
    ranks.run(world_size, describe_handle)


def test_the_backend_is_registered() -> None:
    assert symm_mem.get_backend("cpu") is not None
    tensor = symm_mem.empty(4, device="cpu")
    if is_symmetric is not None:
        assert is_symmetric(tensor)
        assert is_symmetric(tensor[1:])
        assert not is_symmetric(torch.empty(4))


def test_new_memory_is_zero_and_aligned() -> None:
    for size in (1, 3, 4097, 1 << 20):
        tensor = symm_mem.empty(size, dtype=torch.uint8, device="cpu")
        assert tensor.data_ptr() % 4096 == 0
        assert not tensor.any()


@pytest.mark.parametrize("shape", [([],), (0,), (3, 0, 2), (5,), ([2, 3],)])
def test_empty_takes_shapes_as_torch_does(shape: tuple) -> None:
    tensor = symm_mem.empty(*shape, dtype=torch.int16, device="cpu")
    assert tensor.shape == torch.empty(*shape).shape
    assert tensor.is_contiguous()


@pytest.mark.ranks(2)
def test_empty_tensors_rendezvous(group: dist.ProcessGroup) -> None:
    tensor = symm_mem.empty(0, 3, device="cpu")
    handle = symm_mem.rendezvous(tensor, group)
    handle.barrier()
    assert handle.buffer_size == 0
    assert handle.get_buffer(group.size() - 1, (0, 3), torch.float32).shape == (0, 3)


@pytest.mark.ranks(2)
def test_strided_allocation(group: dist.ProcessGroup) -> None:
    tensor = _SymmetricMemory.empty_strided_p2p((4, 6), (1, 4), torch.float32, CPU)
    assert tensor.stride() == (1, 4)
    values = torch.arange(24.0).view(4, 6)
    tensor.copy_(values + group.rank())
    handle = symm_mem.rendezvous(tensor, group)
    handle.barrier()
    for peer in range(group.size()):
        got = handle.get_buffer(peer, (6, 4), torch.float32).t()
        torch.testing.assert_close(got, values + peer, rtol=0, atol=0)
    handle.barrier()


@pytest.mark.parametrize("world_size", WORLD_4S)
@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.uint8],
)
@pytest.mark.ranks
def test_buffers_of_all_ranks(
    group: dist.ProcessGroup, world_size: int, dtype: torch.dtype
) -> None:
    tensor, handle = make(group, 6, 4, dtype=dtype)
    for peer in range(group.size()):
        whole = handle.get_buffer(peer, (6, 4), dtype)
        assert whole.dtype == dtype
        assert whole.device == CPU
        assert torch.equal(whole.double(), torch.full((6, 4), peer).double())
        assert torch.equal(handle.get_remote_tensor(peer, (6, 4), dtype).double(), whole.double())
        assert whole.data_ptr() == handle.buffer_ptrs[peer]
        part = handle.get_buffer(peer, (2, 3), dtype, storage_offset=5)
        assert part.data_ptr() == whole.data_ptr() + 5 * dtype.itemsize
    # As bytes, up to the last one.
    count = tensor.numel() * dtype.itemsize
    last = handle.get_buffer(group.size() - 1, (1,), torch.uint8, storage_offset=count - 1)
    assert last.numel() == 1
    handle.barrier()


@pytest.mark.parametrize("world_size", WORLD_4S)
@pytest.mark.ranks
def test_writes_reach_peers(group: dist.ProcessGroup, world_size: int) -> None:
    tensor, handle = make(group, group.size(), 1000)
    for peer in range(group.size()):
        handle.get_buffer(peer, (group.size(), 1000), torch.float32)[group.rank()] = (
            10.0 * group.rank() + peer
        )
    handle.barrier()
    expected = 10.0 * torch.arange(group.size()) + group.rank()
    assert torch.equal(tensor, expected[:, None].expand_as(tensor))


@pytest.mark.ranks(2)
def test_bounds_of_buffers(group: dist.ProcessGroup) -> None:
    _, handle = make(group, 8)
    with pytest.raises(RuntimeError, match="exceeds"):
        handle.get_buffer(0, (9,), torch.float32)
    with pytest.raises(RuntimeError, match="exceeds"):
        handle.get_buffer(0, (8,), torch.float32, storage_offset=1)
    for rank in (-1, group.size()):
        with pytest.raises(RuntimeError, match=r"[rR]ank"):
            handle.get_buffer(rank, (8,), torch.float32)
    handle.barrier()


@pytest.mark.ranks(3)
def test_views_and_sub_allocations(group: dist.ProcessGroup) -> None:
    whole, handle = make(group, 4, 2048)
    # A view: torch looks at the storage, so this is the whole allocation again.
    view = symm_mem.rendezvous(whole[2:, 5:], group)
    assert view.buffer_ptrs == handle.buffer_ptrs
    assert (view.offset, view.buffer_size) == (0, handle.buffer_size)
    # A sub-allocation, as a memory pool makes them: a storage that begins inside the block.
    start = 2048 * 4
    memory = (ctypes.c_char * start).from_address(whole.data_ptr() + start)
    part = torch.frombuffer(memory, dtype=torch.float32)
    assert is_symmetric is None or is_symmetric(part)
    inner = symm_mem.rendezvous(part, group)
    assert (inner.offset, inner.buffer_ptrs) == (start, handle.buffer_ptrs)
    part.fill_(100 + group.rank())
    inner.barrier()
    for peer in range(group.size()):
        row = inner.get_remote_tensor(peer, (2048,), torch.float32)
        assert row.data_ptr() == handle.buffer_ptrs[peer] + start
        assert torch.equal(row, torch.full((2048,), 100.0 + peer))
    inner.barrier()


@pytest.mark.ranks(2)
def test_rendezvous_is_cached(group: dist.ProcessGroup) -> None:
    tensor, handle = make(group, 64)
    again = symm_mem.rendezvous(tensor, group.group_name)  # by name, too
    assert again.buffer_ptrs == handle.buffer_ptrs
    assert again.signal_pad_ptrs == handle.signal_pad_ptrs
    if group.rank() == 0:  # cached, so not collective
        symm_mem.rendezvous(tensor, group)


@pytest.mark.ranks(2)
def test_rendezvous_of_what_cannot_be(group: dist.ProcessGroup) -> None:
    result = symm_mem.rendezvous(torch.empty(4), group)
    assert result is None
    with pytest.raises(RuntimeError, match="no_such_group"):
        symm_mem.rendezvous(symm_mem.empty(4, device="cpu"), "no_such_group")
    make(group, 4)  # the group still works


@pytest.mark.ranks(4)
def test_two_groups_on_one_allocation(group: dist.ProcessGroup) -> None:
    """The world and a group of two ranks share one allocation."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    pair = pairs[group.rank() // 2]
    tensor, everyone = make(group, 1024)
    both = symm_mem.rendezvous(tensor, pair)
    assert (both.world_size, both.rank) == (2, group.rank() % 2)
    assert both.buffer_ptrs[both.rank] == everyone.buffer_ptrs[group.rank()] == tensor.data_ptr()
    assert not set(both.signal_pad_ptrs) & set(everyone.signal_pad_ptrs)
    partner = group.rank() ^ 1
    other = both.get_buffer(1 - both.rank, (1024,), torch.float32)
    assert other[0].item() == partner
    other.fill_(50 + group.rank())
    # Waits in one group see no signals of the other.
    both.barrier()
    everyone.barrier()
    assert tensor[0].item() == 50 + partner
    dist.barrier(group)
    for made in pairs:
        if made is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(made)


@pytest.mark.ranks(2)
def test_group_given_at_allocation(group: dist.ProcessGroup) -> None:
    tensor = _SymmetricMemory.empty_strided_p2p((8,), (1,), torch.float32, CPU, group.group_name)
    assert _SymmetricMemory.rendezvous(tensor).world_size == group.size()
    nameless = symm_mem.empty(8, device="cpu")
    with pytest.raises(RuntimeError, match="group_name"):
        _SymmetricMemory.rendezvous(nameless)


def persistent(group: dist.ProcessGroup, alloc_id: int) -> None:
    def allocate(size: int) -> torch.Tensor:
        return _SymmetricMemory.empty_strided_p2p(
            (size,), (1,), torch.float32, CPU, group.group_name, alloc_id
        )

    tensor = allocate(256)
    address = tensor.data_ptr()
    pads = symm_mem.rendezvous(tensor, group).signal_pad_ptrs
    with pytest.raises(RuntimeError, match="still active"):
        allocate(256)
    del tensor
    with pytest.raises(RuntimeError, match="different from the size"):
        allocate(128)
    tensor = allocate(256)
    assert tensor.data_ptr() == address
    handle = symm_mem.rendezvous(tensor, group)
    assert handle.signal_pad_ptrs == pads  # the same rendezvous
    handle.barrier()


def test_persistent_allocation(ranks: Ranks) -> None:
    ranks.run(2, persistent, 41)
    ranks.run(3, persistent, 42)


@pytest.mark.parametrize("world_size", WORLD_4S)
@pytest.mark.ranks
def test_signals_publish_writes(group: dist.ProcessGroup, world_size: int) -> None:
    rounds = 300
    rank, world_size = group.rank(), group.size()
    tensor, handle = make(group, 1, dtype=torch.int64)
    right = handle.get_buffer((rank + 1) % world_size, (1,), torch.int64)
    for count in range(rounds):
        channel = count % 3
        right.fill_(1000 * count + rank)
        handle.put_signal((rank + 1) % world_size, channel=channel)
        handle.wait_signal((rank - 1) % world_size, channel=channel)
        assert tensor.item() == 1000 * count + (rank - 1) % world_size
        handle.barrier(channel=3)  # before the next round overwrites it


@pytest.mark.parametrize("world_size", WORLD_4S)
@pytest.mark.ranks
def test_barrier_orders_writes(group: dist.ProcessGroup, world_size: int) -> None:
    rounds = 500
    world_size = group.size()
    tensor, handle = make(group, 2, dtype=torch.int64)
    peers = [handle.get_buffer(peer, (2,), torch.int64) for peer in range(world_size)]
    for count in range(1, rounds):
        # Two cells in turn: a fast rank may be one round ahead.
        tensor[count % 2] = count
        handle.barrier()
        assert [int(peer[count % 2]) for peer in peers] == [count] * world_size


@pytest.mark.parametrize("world_size", WORLD_4S)
@pytest.mark.ranks
def test_signal_pads(group: dist.ProcessGroup, world_size: int) -> None:
    rank, world_size = group.rank(), group.size()
    _, handle = make(group, 4)
    assert handle.get_signal_pad(rank).dtype == torch.uint32
    assert handle.get_signal_pad(rank).numel() * 4 == handle.signal_pad_size
    # Words of the user's own, away from the channels used here.
    words = [handle.get_signal_pad(peer, (2, 8), torch.int64, 64) for peer in range(world_size)]
    assert words[rank].shape == (2, 8)
    for peer in range(world_size):
        words[peer][0, rank] = 100 * rank + peer
    handle.barrier()
    got = words[rank][0, :world_size].tolist()
    assert got == [100 * source + rank for source in range(world_size)]
    handle.barrier()
    words[rank].zero_()
    handle.barrier()
    assert not handle.get_signal_pad(rank).view(torch.int32).any()  # zero when nothing is under way
    with pytest.raises(RuntimeError):
        handle.get_signal_pad(rank, (handle.signal_pad_size // 4 + 1,))
    for peer in (-1, world_size):
        with pytest.raises(RuntimeError, match=f"rank={peer} is not in a group"):
            handle.get_signal_pad(peer)
        for call in (handle.get_buffer, handle.get_remote_tensor):
            with pytest.raises(RuntimeError):
                call(peer, (4,), torch.float32)
        for call in (handle.put_signal, handle.wait_signal):
            with pytest.raises(RuntimeError, match="rank"):
                call(peer)


@pytest.mark.parametrize("world_size", WORLD_4S)
@pytest.mark.ranks
def test_channels_and_ranks_are_checked(group: dist.ProcessGroup, world_size: int) -> None:
    _, handle = make(group, 4)
    count = handle.signal_pad_size // 4 // group.size()
    peer = (group.rank() + 1) % group.size()
    calls: list[Callable[[int], None]] = [
        lambda channel: handle.barrier(channel=channel),
        lambda channel: handle.put_signal(peer, channel=channel),
        lambda channel: handle.wait_signal(peer, channel=channel),
    ]
    for call in calls:
        for channel in (-1, count, count + 1, 1 << 30):
            with pytest.raises(RuntimeError, match=f"channel {channel} is out of range"):
                call(channel)
    for rank in (-1, group.size()):
        with pytest.raises(RuntimeError, match=f"rank {rank}"):
            handle.put_signal(rank)
        with pytest.raises(RuntimeError, match=f"rank {rank}"):
            handle.wait_signal(rank)
    handle.barrier(channel=count - 1)  # the last one is good


@pytest.mark.ranks(2)
def test_enabling_a_group_is_harmless(group: dist.ProcessGroup) -> None:
    symm_mem.enable_symm_mem_for_group(group.group_name)
    describe_handle(group)
    symm_mem.enable_symm_mem_for_group(group.group_name)
    describe_handle(group)


@pytest.mark.ranks(3)
def test_group_info(group: dist.ProcessGroup) -> None:
    """A group that only symmetric memory knows, with a store of its own."""
    store = dist.PrefixStore("by_group_info", dist.distributed_c10d._get_process_group_store(group))
    _SymmetricMemory.set_group_info("by_group_info", group.rank(), group.size(), store)
    tensor = symm_mem.empty(32, device="cpu").fill_(group.rank())
    handle = _SymmetricMemory.rendezvous(tensor, "by_group_info")
    handle.barrier()
    for peer in range(group.size()):
        assert handle.get_buffer(peer, (32,), torch.float32)[31].item() == peer
    handle.barrier()


@pytest.mark.ranks(2)
def test_threads_on_two_groups(group: dist.ProcessGroup) -> None:
    """Two threads use two groups; the ranks start their threads in opposite order."""
    repeats = 20
    limit = datetime.timedelta(seconds=20)
    groups = [dist.new_group([0, 1], timeout=limit) for _ in range(2)]
    errors: list[BaseException] = []

    def use(own: dist.ProcessGroup) -> None:
        try:
            for count in range(repeats):
                tensor, handle = make(own, 100 + count)
                peer = handle.get_buffer(1 - own.rank(), (1,), torch.float32)
                assert peer.item() == 1 - own.rank()
                handle.barrier()
                tensor.zero_()
        except BaseException as error:
            errors.append(error)

    order = groups if group.rank() == 0 else groups[::-1]
    threads = [threading.Thread(target=use, args=(own,)) for own in order]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    for own in groups:
        dist.destroy_process_group(own)


@pytest.mark.ranks(2)
def test_groups_come_and_go(group: dist.ProcessGroup) -> None:
    for _ in range(3):
        made = dist.new_group([0, 1])
        make(made, 16)
        dist.destroy_process_group(made)


def worlds(group: dist.ProcessGroup, folder: Path) -> None:
    """A new group may have an old one's address and name; rank 1 keeps its old groups."""
    rank, size = group.rank(), group.size()
    kept, due, gaps = [], 0, itertools.cycle(range(1, 9))
    del group
    dist.destroy_process_group()
    for life in range(180):
        store, limit = dist.FileStore(str(folder / str(life)), size), datetime.timedelta(seconds=20)
        dist.init_process_group("symm_cp", store=store, rank=rank, world_size=size, timeout=limit)
        dist.all_reduce(torch.ones(8))
        if life == due:
            due += next(gaps)
            make(dist.group.WORLD, 16)
        if rank == 1:
            kept.append(dist.group.WORLD)
        dist.destroy_process_group()


def test_worlds_come_and_go(ranks: Ranks, tmp_path: Path) -> None:
    with ranks.own(2, worlds, tmp_path) as running:
        assert [outcome.failure for outcome in running.outcomes(90)] == ["", ""]


@pytest.mark.ranks(2)
def test_many_allocations_at_once(group: dist.ProcessGroup) -> None:
    made = [make(group, 10 + count) for count in range(50)]
    made = made[::2]  # free every other one, then read the rest
    for _, handle in made:
        for peer in range(group.size()):
            assert handle.get_buffer(peer, (10,), torch.float32)[9].item() == peer
    made[0][1].barrier()


@pytest.mark.ranks(2)
def test_a_handle_keeps_the_memory(group: dist.ProcessGroup) -> None:
    tensor, handle = make(group, 1 << 18)
    del tensor
    handle.barrier()
    for peer in range(group.size()):
        assert handle.get_buffer(peer, (1 << 18,), torch.float32)[-1].item() == peer
    handle.barrier()
