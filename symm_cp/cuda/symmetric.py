"""Workspaces and shards in torch's symmetric memory, on any device that supports it."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Sequence

import torch
import torch.distributed._symmetric_memory as symm_mem
from torch._C._distributed_c10d import _SymmetricMemory

from symm_cp.cuda.base import DeviceWorkspace, Signals
from symm_cp.cuda.rendezvous import map_peers
from symm_cp.group.memory import Group, StateKey
from symm_cp.native import wire

# The flags by which ranks signal each other.
_PADS = (*wire.FLAGS, "ready in place")
# Bytes of a signal in torch's pads.
_WORD = 4

# The number of workspaces for graphs that a group has made, by channel.
_FOR_GRAPHS: StateKey[Counter[str]] = StateKey("workspaces for graphs")


class SymmetricWorkspace(DeviceWorkspace):
    """A workspace in torch's symmetric memory; torch's kernels signal where streams do not."""

    def allocate(self, group: Group, nbytes: int) -> tuple[torch.Tensor, Sequence[int]]:
        """Returns this rank's memory, and the address here of each rank's. Collective."""
        if group.world_size == 1:  # also on GPUs that cannot share memory with peers
            own = torch.empty(nbytes, dtype=torch.uint8, device=self.device.torch_device)
            return own, [own.data_ptr()]
        made = group.state(_FOR_GRAPHS, Counter)
        self._graph = made[self.channel] + 1 if self.slots == 1 else 0
        if self.signals is Signals.TORCH:
            self._check_pad(group)
        made[self.channel] += self.slots == 1
        memory = _SymmetricMemory.empty_strided_p2p(
            (nbytes,), [1], torch.uint8, self.device.torch_device, group.name
        )
        self._mapped = map_peers(memory, group)
        # torch's kernels look up the name of the process group whenever they signal.
        weakref.finalize(self, self._mapped.forget).atexit = False
        return memory, self._mapped.addresses

    def _check_pad(self, group: Group) -> None:
        """Raises `RuntimeError` unless torch's signal pads have channels for all flags."""
        nbytes, last = symm_mem.get_signal_pad_size(), self._channel(len(_PADS))
        channels = nbytes // (_WORD * self.world_size)
        if last < channels:
            return
        what = f"graph {self._graph}" if self._graph else "calls"
        each = 2 * (len(_PADS) + 1) * _WORD * self.world_size
        needed = each * (self._graph + 1)
        raise RuntimeError(
            f"symm_cp: torch's kernels signal in group {group.name!r}, and {what} on channel "
            f"{self.channel!r} would take channels up to {last} of torch's signal pads, which have "
            f"{channels} for {self.world_size} ranks ({nbytes} bytes): before any symmetric memory "
            "is allocated, call torch.distributed._symmetric_memory.set_signal_pad_size(n) on all "
            f"ranks, with n of at least {needed}, and {each} more for each further graph; or "
            "reserve fewer graphs"
        )

    def signal(self, flag: str, peers: Sequence[int], epoch: int) -> None:
        """Signals ranks by our kernel or, one after the other, by torch's."""
        if self.signals is not Signals.TORCH:
            super().signal(flag, peers, epoch)
            return
        for peer in peers:
            self._mapped.handle.put_signal(peer, self._pad(flag, epoch))

    def wait(
        self, flag: str, peers: Sequence[int], epoch: int, *, lag: int = 0, call_name: bytes = b""
    ) -> None:
        """Waits for signals by our kernel or, one after the other, by torch's, which reset them."""
        if self.signals is not Signals.TORCH:
            super().wait(flag, peers, epoch, lag=lag, call_name=call_name)
            return
        for peer in peers:
            self._mapped.handle.wait_signal(peer, self._pad(flag, epoch - lag), self.limit_ms)

    def _pad(self, flag: str, epoch: int) -> int:
        """The channel of torch's signal pads that a flag takes in a call.

        Each slot has its own channel for "done": in the background two calls raise it before the
        first is awaited. All other flags are awaited in the call that raises them. Each workspace
        has its own channels, too: from torch 2.15 on all workspaces of a group share their signal
        pads. The self-test's workspaces come first, leave no signal, and use the channels of
        "sync".
        """
        second = flag == "done" and epoch % self.slots == 1
        return self._channel(len(_PADS) if second else _PADS.index(flag))

    def _channel(self, number: int) -> int:
        kind = 2 * self._graph + (self.channel == "async")
        return (len(_PADS) + 1) * kind + number

    def own_flags(self) -> Sequence[torch.Tensor]:
        """Returns all memory, as bytes, where peers signal this rank."""
        pad = self._mapped.handle.get_signal_pad(self.rank).view(torch.uint8)
        return (*super().own_flags(), pad[: self.header_bytes])


def is_symmetric(tensor: torch.Tensor) -> bool:
    """Whether a tensor was allocated as torch's symmetric memory, as far as torch can tell."""
    asks_torch = getattr(_SymmetricMemory, "is_symm_mem_tensor", None)
    return asks_torch is None or bool(asks_torch(tensor))
