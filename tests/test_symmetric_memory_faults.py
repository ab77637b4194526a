"""Failures of symmetric memory on CPU, and the resources left afterwards."""

from __future__ import annotations

import gc
import os
import re
import resource
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch._C._distributed_c10d import _SymmetricMemory

import symm_cp  # noqa: F401 - registers the CPU backend
from symm_cp.testing import Ranks, say
from tests.exhaustive import exhaustive, some

LIMIT_MS = 300


def make(group: dist.ProcessGroup, size: int = 1024):
    tensor = symm_mem.empty(size, device="cpu")
    handle = symm_mem.rendezvous(tensor, group)
    handle.barrier()
    return tensor, handle


def time_out(group: dist.ProcessGroup, op: str) -> None:
    """Rank 0 waits for something that rank 1 does not do."""
    _, handle = make(group)
    if group.rank() == 0:
        calls: dict[str, Callable[[], None]] = {
            "barrier": lambda: handle.barrier(channel=3, timeout_ms=LIMIT_MS),
            "wait_signal": lambda: handle.wait_signal(1, channel=3, timeout_ms=LIMIT_MS),
            "put_signal": lambda: handle.put_signal(1, channel=3, timeout_ms=LIMIT_MS),
        }
        if op == "put_signal":
            handle.put_signal(1, channel=3)  # never consumed, so that the second one has no room
        start = time.monotonic()
        with pytest.raises(RuntimeError) as caught:
            calls[op]()
        elapsed = time.monotonic() - start
        message = str(caught.value)
        for part in (op, "channel 3", "rank 0", "rank 1", f"{LIMIT_MS} ms"):
            assert part in message, f"{part!r} is missing: {message}"
        assert elapsed > LIMIT_MS / 1000 * 0.99
    handle.barrier(channel=0)  # other channels still work


@pytest.mark.parametrize("op", ["barrier", "put_signal", "wait_signal"])
def test_time_outs_say_what_was_waited_for(ranks: Ranks, op: str) -> None:
    start = time.monotonic()
    ranks.run(3 if op == "barrier" else 2, time_out, op)
    assert time.monotonic() - start < 30


@pytest.mark.ranks(2)
def test_negative_time_out(group: dist.ProcessGroup) -> None:
    _, handle = make(group)
    with pytest.raises((TypeError, ValueError, RuntimeError)):
        handle.barrier(timeout_ms=-1)
    handle.barrier()


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.ranks
def test_ranks_that_disagree_on_the_size(group: dist.ProcessGroup, world_size: int) -> None:
    """Every rank learns that the sizes differ, and between which ranks."""
    size = 2048 if group.rank() == group.size() - 1 else 1024
    with pytest.raises(RuntimeError, match="size") as caught:
        symm_mem.rendezvous(symm_mem.empty(size, device="cpu"), group)
    message = str(caught.value)
    for part in (f"rank {group.rank()}", "4096", "8192"):
        assert part in message, f"{part!r} is missing: {message}"
    make(group)  # the group still works


@exhaustive
@pytest.mark.ranks(2)
def test_more_memory_than_there_is(group: dist.ProcessGroup) -> None:
    make(group)
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    # Only a limit: if memory really ran out, the kernel could kill any process.
    resource.setrlimit(resource.RLIMIT_AS, (used + (256 << 20), hard))
    try:
        before = footprint()
        with pytest.raises(RuntimeError, match=rf"shared memory of {1 << 30} bytes"):
            symm_mem.empty(1 << 30, dtype=torch.uint8, device="cpu")
        assert footprint() == before
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    make(group)


def footprint() -> tuple[int, int]:
    gc.collect()
    maps = Path("/proc/self/maps").read_text().count("memfd:")
    return maps, len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("world_size", some(2, of=[1, 2, 4]))
@pytest.mark.ranks
def test_memory_goes_with_its_handles(group: dist.ProcessGroup, world_size: int) -> None:
    cycles = 200
    make(group)
    gc.collect()
    dist.barrier(group)
    before = footprint()
    for cycle in range(cycles):
        tensor, handle = make(group, 1 + cycle * 100)
        if cycle % 2:  # in either order
            del tensor, handle
        else:
            del handle, tensor
    assert footprint() == before


def shared_descriptors() -> int:
    count = 0
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except FileNotFoundError:
            continue
        count += "memfd:" in target or "pidfd" in target
    return count


@exhaustive
@pytest.mark.ranks(2)
def test_destroyed_groups_leave_no_descriptors(group: dist.ProcessGroup) -> None:
    def cycle() -> None:
        made = dist.new_group([0, 1])
        make(made)
        dist.destroy_process_group(made)

    # gloo's threads end some time after their group: count only descriptors of shared memory and
    # of processes.
    cycle()
    gc.collect()
    before = shared_descriptors()
    for _ in range(10):
        cycle()
    gc.collect()
    # The last group's sockets may stay until another takes its place.
    assert shared_descriptors() <= before + 2


@pytest.mark.ranks(2)
def test_freeing_is_not_collective(group: dist.ProcessGroup) -> None:
    """Rank 0 frees everything while rank 1 keeps its own, and reads rank 0's memory."""
    tensor, handle = make(group)
    tensor.fill_(group.rank())
    handle.barrier()
    if group.rank() == 0:
        del tensor, handle
        gc.collect()
    dist.barrier(group)
    if group.rank() == 1:
        assert handle.get_buffer(0, (1024,), torch.float32)[7].item() == 0
        with pytest.raises(RuntimeError, match=r"wait_signal.*rank 0"):
            handle.wait_signal(0, timeout_ms=100)
    make(group)


def hold_memory(group: dist.ProcessGroup, size: int) -> None:
    tensor, handle = make(group, size)
    tensor.fill_(1)
    maps = Path("/proc/self/maps").read_text()
    say(" ".join({line.split()[4] for line in maps.splitlines() if "memfd:symm_cp" in line}))
    handle.wait_signal((group.rank() + 1) % group.size())


def inodes_in_use() -> set[str]:
    found = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            text = maps.read_text()
        except OSError:
            continue
        found |= set(re.findall(r" (\d+) +/memfd:symm_cp", text))
    return found


def test_killing_all_leaves_nothing(ranks: Ranks) -> None:
    named_before = set(os.listdir("/dev/shm"))
    with ranks.own(3, hold_memory, 1 << 20) as running:
        inodes = set(" ".join(running.hear_all()).split())
        assert len(inodes) == 9  # data, control and board of each rank
        assert inodes <= inodes_in_use()
        running.kill(0, 1, 2)
        assert not inodes & inodes_in_use()
    left = {name for name in set(os.listdir("/dev/shm")) - named_before if "symm" in name}
    assert not left


def one_leaves(group: dist.ProcessGroup) -> None:
    tensor, handle = make(group)
    tensor.fill_(group.rank())
    handle.barrier()
    say("ready")
    if group.rank() == 0:
        return  # an orderly end: the process exits
    time.sleep(1.0)
    assert handle.get_buffer(0, (1024,), torch.float32)[3].item() == 0  # its memory stays readable
    try:
        handle.wait_signal(0)
    except RuntimeError as error:
        say(str(error))


def test_a_rank_that_ends_orderly(ranks: Ranks) -> None:
    with ranks.own(2, one_leaves) as running:
        running.hear_all()
        assert "rank 0 died" in running.hear(1)


def world_again(group: dist.ProcessGroup, port: int) -> None:
    """The same group name, again and again."""
    old = make(group)
    for count in range(3):
        dist.destroy_process_group()
        # gloo itself fails on its keys of an earlier group in the same store.
        store = dist.PrefixStore(str(count), dist.TCPStore("127.0.0.1", port, is_master=False))
        rank, world_size = old[1].rank, old[1].world_size
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
        assert dist.group.WORLD is not None
        tensor, handle = make(dist.group.WORLD)
        tensor.fill_(10 * count + rank)
        handle.barrier()
        peer = (rank + 1) % world_size
        assert handle.get_buffer(peer, (1024,), torch.float32)[9].item() == 10 * count + peer
        handle.barrier()
        old = tensor, handle
    say("done")
    handle.wait_signal((rank + 1) % world_size)


def test_the_world_is_made_again(ranks: Ranks) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with ranks.own(3, world_again, store.port) as running:
        assert running.hear_all() == ["done"] * 3


def test_large_blocks_ask_for_huge_pages() -> None:
    tensor = symm_mem.empty(8 << 20, dtype=torch.uint8, device="cpu")
    smaps = Path("/proc/self/smaps").read_text()
    (block,) = re.findall(rf"^{tensor.data_ptr():x}-.*?VmFlags:([^\n]*)", smaps, re.S | re.M)
    kernel_has_them = Path("/sys/kernel/mm/transparent_hugepage").exists()
    assert ("hg" in block.split()) == kernel_has_them


def many_ranks(group: dist.ProcessGroup, rounds: int) -> None:
    tensor, handle = make(group, 2)
    peers = [handle.get_buffer(peer, (2,), torch.float32) for peer in range(group.size())]
    for count in range(rounds):
        tensor[count % 2] = count
        handle.barrier()
        assert all(peer[count % 2].item() == count for peer in peers)
    say("done")
    handle.wait_signal((group.rank() + 1) % group.size(), timeout_ms=60_000)


def test_more_ranks_than_processors(ranks: Ranks) -> None:
    with ranks.own(5, many_ranks, 200) as running:
        assert running.hear_all(timeout=120) == ["done"] * 5


def test_rendezvous_before_init_names_the_group() -> None:
    tensor = symm_mem.empty(4, device="cpu")
    with pytest.raises(RuntimeError, match="nobody"):
        _SymmetricMemory.rendezvous(tensor, "nobody")
