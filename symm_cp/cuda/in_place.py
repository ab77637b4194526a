"""Tensors that peers read where they lie. The ranks agree beforehand which tensors, and where.

Ranks cannot agree in each call: a stream's flags carry no more than a number, and an exchange
through the store would cost more than the copy that it saves. Nor can ranks agree at the first call
with a tensor: if one rank alternates between two buffers and another reuses one, the tensor is new
to some ranks only, and an exchange that only some ranks enter never ends. So the user calls
`read_in_place` once for each tensor, on all ranks. There the ranks exchange whether each of them
has such a tensor, of how many bytes, and at which offset of its allocation: torch's memory pools
give ranks different offsets (pytorch #190977).

Afterwards a call looks up its input by its storage, address and size. If the lookups of ranks
differ, so do their programs: if one rank reads in place and another goes through its slot, they
await different flags ("ready in place" and "ready"), so that both time out with an error; if they
pass different tensors, debug mode raises an error (stream_call.py).
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

import torch
import torch.distributed._symmetric_memory as symm_mem
from torch.multiprocessing.reductions import StorageWeakRef

from symm_cp import native
from symm_cp.cuda.base import Device
from symm_cp.cuda.registry import device_for, has_streams, spans_hosts
from symm_cp.cuda.rendezvous import map_peers
from symm_cp.group.hosts import apart_of
from symm_cp.group.liveness import share
from symm_cp.group.memory import Group, GroupLike, StateKey, resolve


@dataclass(frozen=True)
class InPlace:
    """A tensor that peers read where it lies."""

    #: The group's tensors are numbered in the order of `read_in_place`.
    number: int
    #: Where each rank's tensor is mapped here.
    addresses: tuple[int, ...]
    # The address of a storage object is not used again while there is a weak reference to it.
    storage: StorageWeakRef


@dataclass
class _Tensors:
    #: Keyed by storage object, address and number of bytes.
    known: dict[tuple[int, int, int], InPlace]
    count: int = 0


_TENSORS: StateKey[_Tensors] = StateKey("tensors read in place")


def _key(tensor: torch.Tensor) -> tuple[int, int, int]:
    return tensor.untyped_storage()._cdata, tensor.data_ptr(), tensor.nbytes


def found_in_place(tensor: torch.Tensor, group: Group) -> InPlace | None:
    """Returns the entry of a tensor; None if peers do not read it in place."""
    tensors = group.find(_TENSORS)
    if tensors is None or not tensor.is_contiguous():
        return None
    return tensors.known.get(_key(tensor))


def any_in_place(group: Group) -> bool:
    """Whether ranks read tensors of a group in place."""
    tensors = group.find(_TENSORS)
    return tensors is not None and any(not t.storage.expired() for t in tensors.known.values())


def read_in_place(tensor: torch.Tensor, group: GroupLike) -> None:
    """Has the ops of a group read a symmetric tensor where it lies, instead of copying it first.

    `tensor` was allocated as symmetric memory (`torch.distributed._symmetric_memory.empty`), is
    contiguous, and has the same number of bytes on all ranks; it need not be a whole allocation.
    From then on pass it to an op of the group on all ranks or on none, in any shape. This lasts as
    long as its memory. Collective; on CPU it is torch's rendezvous. Does nothing where the group's
    ops run over the process group. Raises `ValueError` on every rank when one of them passes
    another tensor, and `NotImplementedError` on NVSHMEM.
    """
    resolved = resolve(group)
    if not has_streams(tensor.device):
        symm_mem.rendezvous(tensor, resolved.name)
        return
    if spans_hosts(resolved, tensor.device):
        raise NotImplementedError(
            f"read_in_place: not supported on {device_for(resolved, tensor.device)}"
        )
    if apart_of(resolved, tensor.device) is not None:
        return
    device = device_for(resolved, tensor.device)
    with resolved.lock, device.guard():
        tensors = resolved.state(_TENSORS, lambda: _Tensors({}))
        for key in [key for key, old in tensors.known.items() if old.storage.expired()]:
            del tensors.known[key]
        _agree(device, tensor, resolved)
        addresses = device.keep(lambda: map_peers(tensor, resolved))
        native.drop_plans()
        tensors.count += 1
        storage = StorageWeakRef(tensor.untyped_storage())
        tensors.known[_key(tensor)] = InPlace(tensors.count, addresses, storage)


@dataclass(frozen=True)
class _Facts:
    """Facts about the tensor of a rank."""

    nbytes: int
    symmetric: bool
    contiguous: bool

    def reason(self, first: _Facts) -> str:
        """Why it cannot be read in place; empty if it can. `first`: the facts of rank 0."""
        if not self.symmetric:
            return "was not allocated as symmetric memory"
        if not self.contiguous:
            return "is not contiguous"
        if self.nbytes == 0:
            return "is empty"
        if self.nbytes != first.nbytes:
            return f"has {self.nbytes} bytes, the tensor of rank 0 has {first.nbytes}"
        return ""


def _agree(device: Device, tensor: torch.Tensor, group: Group) -> None:
    """Raises `ValueError` on every rank unless all tensors can be read in place. Collective."""
    own = _Facts(tensor.nbytes, device.is_symmetric(tensor, group), tensor.is_contiguous())
    texts = share(group, "in place", json.dumps(asdict(own)))
    ranks = [_Facts(**json.loads(text)) for text in texts]
    for rank, facts in enumerate(ranks):
        if reason := facts.reason(ranks[0]):
            raise ValueError(f"read_in_place: the tensor of rank {rank} {reason}")
