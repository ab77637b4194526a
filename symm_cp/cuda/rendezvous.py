"""Rendezvous in torch's symmetric memory that depend on nothing but the group.

torch's rendezvous on CUDA depends on what each rank did before, in other groups: until 2.14 all
exchanges of a process share one counter, which is part of their keys, so that ranks with different
histories wait for each other without end (pytorch #196082); later versions compare how many
allocations each rank has made, and raise "Symmetric window mismatch". Pipeline stages and uneven
sub-groups have different histories. So each rendezvous here has its own process group, of the same
ranks: torch makes these comparisons only for groups that were registered by `set_group_info`. Its
store numbers the exchanges itself, waits for peers no longer than the group does, and notices when
one exits. Since each has its own process group, torch's cache has the same entries on all ranks.

Torch assumes that ranks share a GPU when their GPUs have the same ordinal, as they all have where
each rank sees one GPU (Slurm, Ray, Kubernetes). It also sets up multicast, which nothing here uses
and which is known to hang or to fail on some hosts. This module prevents both, and tells GPUs apart
by UUID.
"""

from __future__ import annotations

import ctypes
import datetime
import itertools
import os
import re
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (
    FakeProcessGroup,
    _register_process_group,
    _SymmetricMemory,
    _unregister_process_group,
)

from symm_cp.group.liveness import generation, share, share_made, wait_for_keys, wait_limit
from symm_cp.group.memory import Group, StateKey
from symm_cp.group.stores import TimedStore

# torch's keys: "CUDASymmetricMemory/<number>/<rank>"; a barrier's: "CUDASymmetricMemory/<number>".
_NUMBERED = re.compile(r"(?P<begin>.*SymmetricMemory/)(?P<number>\d+)(?P<end>.*)")

# The backends of symmetric memory whose rendezvous uses the process group's store. NCCL's uses a
# communicator; this package's backend counts the rendezvous of each group.
_BY_STORE = ("CUDA",)


def by_store(device: torch.device) -> bool:
    """Whether torch's rendezvous on a device uses the process group's store."""
    return _SymmetricMemory.get_backend(device) in _BY_STORE


#: Lets ranks share a GPU, as for tests.
SHARE_GPUS = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
_LIBC = ctypes.PyDLL(None)  # its functions keep the interpreter's lock
for _name in ("getenv", "malloc", "strdup"):
    getattr(_LIBC, _name).restype = ctypes.c_void_p


class _Setting:
    """A variable that torch reads with `getenv` in each rendezvous, and is on during ours.

    Other threads may call `getenv` meanwhile, which is undefined while `setenv` runs (before glibc
    2.41). So nothing here calls that, nor frees memory of the environment: the variable's text
    stays in one place, and its last character changes from 0 (to torch: unset) to 1.
    """

    def __init__(self, name: str) -> None:
        self._begin, self._users = f"{name}=".encode(), 0
        self._text: int = _LIBC.strdup(self._begin + b"0")
        self._value = self._text + len(self._begin)

    def add(self, users: int) -> None:
        """Adds users; the setting is on while it has any."""
        self._users += users
        present = _LIBC.getenv(self._begin[:-1])
        if present != self._value and (present is None or ctypes.string_at(present) != b"1"):
            self._install()
        ctypes.memset(self._value, ord("1" if self._users else "0"), 1)

    def _install(self) -> None:
        """Puts the text into a copy of the environment, which takes the old one's place."""
        environ = ctypes.POINTER(ctypes.c_void_p).in_dll(_LIBC, "environ")
        texts = itertools.takewhile(bool, (environ[place] for place in itertools.count()))
        others = [text for text in texts if not ctypes.string_at(text).startswith(self._begin)]
        array = (ctypes.c_void_p * (len(others) + 2))(*others, self._text)
        copy = _LIBC.malloc(ctypes.sizeof(array))
        ctypes.memmove(copy, array, ctypes.sizeof(array))
        ctypes.c_void_p.in_dll(_LIBC, "environ").value = copy


_SETTINGS_LOCK = threading.Lock()
_SETTINGS = (_Setting(SHARE_GPUS), _Setting("TORCH_SYMM_MEM_DISABLE_MULTICAST"))


@contextmanager
def _settings() -> Iterator[None]:
    _add_users(1)
    try:
        yield
    finally:
        _add_users(-1)


def _add_users(users: int) -> None:
    with _SETTINGS_LOCK:
        for setting in _SETTINGS:
            setting.add(users)


_CHECKED: StateKey[bool] = StateKey("GPUs that were told apart")


def gpu_of(device: torch.device) -> str:
    """Returns the UUID of a GPU."""
    return str(torch.cuda.get_device_properties(device).uuid)


def check_gpus(group: Group, device: torch.device) -> None:
    """Raises `RuntimeError` on every rank if ranks share a GPU. Collective at its first call.

    They may if the environment sets `SHARE_GPUS` on all ranks.
    """
    if group.find(_CHECKED):
        return
    allowed = os.environ.get(SHARE_GPUS) == "1"
    told = [text.partition(" ") for text in share(group, "gpu", f"{allowed} {gpu_of(device)}")]
    ranks_by_gpu: dict[str, list[int]] = {}
    for rank, (_, _, gpu) in enumerate(told):
        ranks_by_gpu.setdefault(gpu, []).append(rank)
    shared = {gpu: ranks for gpu, ranks in ranks_by_gpu.items() if len(ranks) > 1}
    if shared and any(allows != "True" for allows, _, _ in told):
        which = "; ".join(f"ranks {ranks} use GPU {gpu}" for gpu, ranks in shared.items())
        raise RuntimeError(
            f"symm_cp: ranks of group {group.name!r} share a GPU: {which}. Call "
            "torch.cuda.set_device(local_rank) before the first op, or make one GPU visible to "
            f"each; {SHARE_GPUS}=1 lets ranks share one, slowly"
        )
    group.state(_CHECKED, lambda: True)


class ExchangeStore(dist.Store):
    """A store for one rendezvous of torch's; numbers exchanges in the order of their first use."""

    def __init__(self, group: Group, inner: TimedStore, seconds: float | None = None) -> None:
        super().__init__()
        self._group, self._inner, self._seconds = group, inner, seconds
        limit = wait_limit(group)
        self._limit = limit if seconds is None else min(limit, datetime.timedelta(seconds=seconds))
        self._numbers: dict[str, int] = {}

    def _key(self, key: str) -> str:
        numbered = _NUMBERED.fullmatch(key)
        if numbered is None:
            return key
        number = self._numbers.setdefault(numbered["number"], len(self._numbers))
        return f"{numbered['begin']}{number}{numbered['end']}"

    def set(self, key: str, value: Any) -> None:
        """Writes a value."""
        self._inner.set(self._key(key), value)

    def get(self, key: str) -> bytes:
        """Returns a value, when it is there."""
        self.wait([key])
        return self._inner.get(self._key(key))

    def add(self, key: str, value: int) -> int:
        """Adds to a number; returns the sum."""
        return self._inner.add(self._key(key), value)

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are there."""
        return self._inner.check([self._key(key) for key in keys])

    def wait(self, keys: list[str], timeout: datetime.timedelta | None = None) -> None:
        """Returns when all keys are there; raises an error after the time-out."""
        self._inner.wait([self._key(key) for key in keys], timeout or self._limit)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Returns values, when all are there; notices when a rank exits first."""
        own = [self._key(key) for key in keys]
        if len(own) == self._group.world_size:  # one key for each rank, in rank order
            wait_for_keys(self._group, self._inner, own, seconds=self._seconds)
        else:
            self._inner.wait(own, self._limit)
        return [self._inner.get(key) for key in own]


class PrivateGroup:
    """A process group of a group's ranks that only torch's symmetric memory uses."""

    def __init__(self, group: Group, seconds: float | None = None) -> None:
        made = group.state(_MADE, Counter)
        number = made["all"] = made["all"] + 1
        inner = group.store().under(f"symm_cp/{generation(group)}/meet/{number}")
        # The native process group holds these, but not their Python halves.
        self._store = ExchangeStore(group, inner, seconds)
        self._process_group = dist.ProcessGroup(self._store, group.rank, group.world_size)
        # A process group gets its name from a backend; nothing is sent over this one.
        make = getattr(FakeProcessGroup, "_create_internal", FakeProcessGroup)
        backend = make(group.rank, group.world_size)
        kind = dist.ProcessGroup.BackendType.CUSTOM
        self._process_group._register_backend(torch.device("cpu"), kind, backend)
        self._process_group._set_default_backend(kind)  # else torch warns that it has none
        self.name = f"{group.name}, symmetric memory {generation(group)} {number}"
        self._process_group._set_group_name(self.name)
        _register_process_group(self.name, self._process_group)

    def close(self) -> None:
        """Unregisters the process group's name."""
        _unregister_process_group(self.name)


# All ranks of a group make their rendezvous in the same order.
_MADE: StateKey[Counter[str]] = StateKey("rendezvous made")


def map_peers(
    tensor: torch.Tensor, group: Group, *, seconds: float | None = None
) -> tuple[int, ...]:
    """Maps all ranks' tensors, which are symmetric and of one size; returns where. Collective.

    They stay mapped as long as `tensor` is allocated, and may lie at different offsets of their
    allocations: torch's memory pools hand out any free block of a rank (pytorch #190977). Raises
    `RuntimeError` on every rank if a mapping fails, or when a peer does not come within `seconds`
    (by default the group's time-out).
    """
    private = None
    if by_store(tensor.device):
        check_gpus(group, tensor.device)
        private = PrivateGroup(group, seconds)
    try:
        name = group.name if private is None else private.name
        with _settings():
            handle: _SymmetricMemory | None = _SymmetricMemory.rendezvous(tensor, name)
        offset = partial(_offset, tensor, handle, group.rank)
        texts = share_made(group, "mapped", lambda: str(offset()), seconds=seconds)
        assert handle is not None
        bases = zip(handle.buffer_ptrs, map(int, texts), strict=True)
        return tuple(base + offset for base, offset in bases)
    finally:
        if private is not None:
            private.close()


def _offset(tensor: torch.Tensor, handle: _SymmetricMemory | None, rank: int) -> int:
    """Returns the offset of a tensor in its allocation, in bytes."""
    if handle is None:
        raise RuntimeError("the tensor does not lie in symmetric memory")
    bases = handle.buffer_ptrs
    if not all(bases):
        missing = [peer for peer, base in enumerate(bases) if not base]
        raise RuntimeError(f"the memory of ranks {missing} is not mapped on rank {rank}")
    offset = tensor.data_ptr() - bases[rank]
    if not 0 <= offset <= handle.buffer_size - tensor.nbytes:
        raise RuntimeError(f"the tensor at byte {offset} of its allocation reaches outside of it")
    return offset
