"""All-gather with one kernel that consumes all shards, and polls for those on their way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch

from symm_cp.devices import device_for, workspace
from symm_cp.memory import FLAG_BYTES, Group
from symm_cp.runtime.agreement import agree
from symm_cp.runtime.cuda import Mode, Shard, Sizes
from symm_cp.runtime.launch import Kernel, Launch, lower
from symm_cp.runtime.program import Extent
from symm_cp.schedule import staged
from symm_cp.schedule.builders import peers


@lru_cache(maxsize=512)
def _launch(rank: int, sizes: Sizes, mode: Mode) -> Launch:
    ranks, own = len(sizes.parts), sizes.parts[rank]
    turns = {peer: turn for turn, peer in enumerate(peers(rank, ranks))}
    room = sizes.offsets[-1]
    # In the order in which they are pulled.
    gathered = tuple(
        Extent(
            len(own),
            tuple(turns.get(peer, 0) * room + offset for peer in range(ranks)),
            (own[part],) * ranks,
        )
        for part, offset in enumerate(sizes.offsets[:-1])
    )
    binding = {
        "input": tuple(Extent.even(i, size) for i, size in enumerate(own)),
        "gathered": gathered,
    }
    schedule = staged.gather_and_consume(rank, ranks, slots=mode.slots)
    return lower(schedule, binding, sizes.slots(), by_kernels=mode.by_kernels, polled=True)


def all_gather_and_poll(
    group: Group,
    shard: Sequence[torch.Tensor],
    kernel: Callable[[list[torch.Tensor], torch.Tensor, int, int], None],
    what: bytes,
) -> None:
    """Calls `kernel(pulled, words, step, epoch)` once, while the peers' shards are being pulled.

    `shard` is one or more tensors, of equal shapes on all ranks. `pulled[i]` is (W - 1, *shape of
    shard[i]): the peers' in the order of `peers`. Peer number t is there once word t * `step` of
    `words` (int32) is `epoch` or a later one.
    """
    agree(group, what)
    ranks = group.world_size
    device = device_for(group, shard[0].device)
    mode = Mode.of(device)
    assert mode.slots > 1, "numbers cannot change in a CUDA graph"
    mine = Shard(shard, None, ranks)
    launch = _launch(group.rank, mine.sizes, mode)
    staging = mine.staging(ranks - 1)
    pulled = [
        staging[: (ranks - 1) * mine.room]
        .view(ranks - 1, mine.room)[:, offset : offset + size]
        .view(t.dtype)
        .unflatten(1, t.shape)
        for offset, size, t in zip(mine.sizes.offsets, mine.sizes.parts[0], mine.own, strict=False)
    ]
    with group.lock, device.guard():
        space = workspace(group, device, "sync", mine.room)
        epoch = space.next_epoch()
        words, step = space.flags("arrived"), FLAG_BYTES // 4
        kernels: dict[str, Kernel] = {"consume": lambda _: kernel(pulled, words, step, epoch)}
        operands = [*mine.addresses(), staging.data_ptr()]
        launch.run(space, epoch, operands, kernels, capturing=False, what=what)
