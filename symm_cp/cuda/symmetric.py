"""Workspaces and shards in torch's symmetric memory, on any device that supports it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch._C._distributed_c10d import _SymmetricMemory

from symm_cp.cuda.base import DeviceWorkspace
from symm_cp.cuda.rendezvous import map_peers
from symm_cp.group.memory import Group


class SymmetricWorkspace(DeviceWorkspace):
    """A workspace in torch's symmetric memory."""

    def allocate(self, group: Group, nbytes: int) -> tuple[torch.Tensor, Sequence[int]]:
        """Returns this rank's memory, and the address here of each rank's. Collective."""
        if group.world_size == 1:  # also on GPUs that cannot share memory with peers
            own = torch.empty(nbytes, dtype=torch.uint8, device=self.device.torch_device)
            return own, [own.data_ptr()]
        memory = _SymmetricMemory.empty_strided_p2p(
            (nbytes,), [1], torch.uint8, self.device.torch_device, group.name
        )
        return memory, map_peers(memory, group, seconds=self.patience)


def is_symmetric(tensor: torch.Tensor) -> bool:
    """Whether a tensor was allocated as torch's symmetric memory, as far as torch can tell."""
    asks_torch = getattr(_SymmetricMemory, "is_symm_mem_tensor", None)
    return asks_torch is None or bool(asks_torch(tensor))
