"""Numbers that each rank knows of itself only, and by which all ranks decide the same."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TypeAlias

import torch

from symm_cp import native
from symm_cp.group.hosts import hosts_of
from symm_cp.group.liveness import share
from symm_cp.group.memory import Group, reported
from symm_cp.native import wire

Numbers: TypeAlias = tuple[int, ...]


_CPU = torch.device("cpu")
#: Begins the names of calls in which ranks tell each other where the inputs of an op lie.
QUESTION = b"inputs of "


def numbers_of_all(group: Group, name: str, numbers: Sequence[int]) -> tuple[Numbers, ...]:
    """Returns the numbers that each rank passes, in rank order; all pass equally many. Collective.

    They travel through memory on one host, which takes some microseconds, and through the group's
    store between hosts, on whichever device the tensors are that they are about. `name` names the
    call in errors. Raises `RuntimeError` when a peer fails or makes another call.
    """
    if group.world_size == 1:
        return (tuple(numbers),)
    if hosts_of(group, _CPU) is None:
        return numbers_on_host(group, name.encode(), numbers)
    texts = share(group, name, " ".join(map(str, numbers)))
    return tuple(tuple(map(int, text.split())) for text in texts)


def numbers_on_host(group: Group, name: bytes, numbers: Sequence[int]) -> tuple[Numbers, ...]:
    """As `numbers_of_all`, in a group of several ranks that are all on this host."""
    ranks, count = group.world_size, len(numbers)
    given = (ctypes.c_int64 * count)(*numbers)
    taken = (ctypes.c_int64 * (count * ranks))()
    nbytes, begin = count * 8, ctypes.addressof(taken)
    done = native.load().symm_cp_exchange(
        group.handle,
        wire.CHANNELS.index("sync"),
        wire.ExchangeKind.ALL_GATHER,
        False,
        name,
        (ctypes.c_void_p * 1)(ctypes.addressof(given)),
        (ctypes.c_int64 * 1)(nbytes),
        1,
        (ctypes.c_void_p * ranks)(*(begin + rank * nbytes for rank in range(ranks))),
        (ctypes.c_int64 * ranks)(*(nbytes,) * ranks),
        ranks,
        wire.DType.UINT8,
        0,
    )
    if done < 0:
        raise reported(RuntimeError(native.error()))
    return tuple(tuple(taken[at : at + count]) for at in range(0, count * ranks, count))
