"""Tensors that peers read where they lie, over the simulated driver.

And rendezvous in torch's symmetric memory, over a stand-in that numbers and compares as torch's
CUDA backend does.
"""

from __future__ import annotations

import os
import resource
import signal
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch._C._distributed_c10d import _resolve_process_group, _SymmetricMemory

import symm_cp
from symm_cp import cuda
from symm_cp.cuda import rendezvous
from symm_cp.cuda import symmetric as symmetric_memory
from symm_cp.group import memory
from symm_cp.testing import Ranks
from tests.cuda.simulated import simulation
from tests.exhaustive import some

#: Torch's rendezvous on CUDA calls it; the stores of torch 2.11 have none.
_HAS_BARRIER = hasattr(dist.Store, "barrier")
#: torch 2.11 does not tell which tensors were allocated as symmetric memory.
_TELLS_SYMMETRIC = hasattr(_SymmetricMemory, "is_symm_mem_tensor")


def symmetric(*shape: int) -> torch.Tensor:
    return symm_mem.empty(*shape, dtype=torch.float32, device="cpu")


def gathers(x: torch.Tensor, group: dist.ProcessGroup, turn: int) -> None:
    """Gathers values that differ from call to call, so that a read from elsewhere shows."""
    x.fill_(100 * turn + group.rank())
    out = symm_cp.all_gather_matmul(x, torch.eye(x.shape[1]), group=group)
    ranks = range(group.size())
    expected = [100.0 * turn + rank for rank in ranks for _ in range(x.shape[0])]
    assert out[:, 0].tolist() == expected


def is_in_place(x: torch.Tensor, group: dist.ProcessGroup) -> bool:
    return cuda.found_in_place(x, memory.resolve(group)) is not None


@pytest.mark.parametrize("world_size", some((2,), of=[(2,), (3,)]))
@pytest.mark.ranks
def test_ranks_may_have_them_at_other_offsets(group: dist.ProcessGroup, world_size: int) -> None:
    with simulation(offsets=True):
        x = symmetric(8, 4)
        assert x.untyped_storage().nbytes() == x.nbytes  # nothing shows that it is a part
        symm_cp.read_in_place(x, group)
        assert is_in_place(x, group)
        for turn in range(3):
            gathers(x, group, turn)


@pytest.mark.ranks(3)
def test_a_call_looks_them_up_and_exchanges_nothing(group: dist.ProcessGroup) -> None:
    """Calls alternate between registered tensors and a plain one, and exchange nothing."""
    with simulation():
        x, y, plain = symmetric(4, 4), symmetric(4, 4), torch.empty(4, 4)
        gathers(x, group, 0)  # symmetric, but not registered: through the slot
        assert not is_in_place(x, group)
        symm_cp.read_in_place(x, group)
        symm_cp.read_in_place(y, group)
        symm_cp.read_in_place(y, group)  # again: the last one counts
        store = type(memory.resolve(group).store())
        with (
            mock.patch.object(_SymmetricMemory, "rendezvous", side_effect=AssertionError),
            mock.patch.object(store, "set", side_effect=AssertionError),
        ):
            for turn in range(6):
                gathers((x, y, plain)[turn % 3], group, turn)
            assert is_in_place(x.view(2, 8).view(torch.int32), group)
            assert not is_in_place(x.t(), group)
            assert not is_in_place(x[:2], group)


@pytest.mark.ranks(2)
def test_memory_that_is_used_again_is_not_taken_for_the_old_tensor(
    group: dist.ProcessGroup,
) -> None:
    """Allocators reuse addresses; a new tensor at an old one's address is not taken for it."""
    seen, again = set(), 0
    with simulation():
        for _ in range(20):
            x = symmetric(64, 64)
            again += x.data_ptr() in seen
            assert not is_in_place(x, group)
            symm_cp.read_in_place(x, group)
            assert is_in_place(x, group)
            seen.add(x.data_ptr())
            del x
    assert again, "no address was used twice"
    state = memory.resolve(group)
    with simulation():
        symm_cp.read_in_place(symmetric(2), group)
        symm_cp.read_in_place(symmetric(2), group)
    known = [s for k, s in state._states.items() if k.name == "tensors read in place"]
    assert len(known[0].known) <= 2  # the others are gone with their memory


@pytest.mark.ranks(2)
def test_what_one_rank_passes_wrong_is_refused_on_all(group: dist.ProcessGroup) -> None:
    odd, good = group.rank() == 1, symmetric(4, 4)
    cases = [
        (torch.empty(4, 4), "the tensor of rank 1 was not allocated as symmetric memory"),
        (symmetric(4, 4).t(), "the tensor of rank 1 is not contiguous"),
        (symmetric(5, 4), "the tensor of rank 1 has 80 bytes, the tensor of rank 0 has 64"),
    ]
    with simulation():
        for other, reason in cases if _TELLS_SYMMETRIC else cases[1:]:
            with pytest.raises(ValueError, match=reason):
                symm_cp.read_in_place(other if odd else good, group)
            gathers(other if odd and other.shape == good.shape else good, group, 1)
        with pytest.raises(ValueError, match="the tensor of rank 0 is empty"):
            symm_cp.read_in_place(symmetric(0, 4), group)
        symm_cp.read_in_place(good, group)
        gathers(good, group, 2)


def mismatched(group: dist.ProcessGroup) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    dist.barrier(group)
    os.environ["SYMM_CP_TIMEOUT_MS"] = "2000"
    with simulation(delays_us=0):
        x = symmetric(4, 4)
        symm_cp.read_in_place(x, group)
        plain = torch.empty(4, 4)
        for turn in range(4):  # all ranks have passed both before, in calls of either parity
            gathers(x if turn % 2 else plain, group, turn)
        gathers(plain if group.rank() else x, group, 4)


@pytest.mark.exhaustive
def test_ranks_of_which_only_some_read_in_place_end_with_words(ranks: Ranks) -> None:
    with ranks.own(2, mismatched) as running:
        for rank, outcome in enumerate(running.outcomes()):
            assert outcome.signal == signal.SIGABRT, outcome
            flag, who = (("ready in place", "this"), ("ready", "that"))[rank]
            awaited = f"rank {rank} waiting for flag '{flag}' of rank {1 - rank} (call 5, seen "
            assert awaited in outcome.output
            assert f"; of these two ranks only {who} one passed a tensor of symm" in outcome.output


class TorchOnCuda:
    """What torch's rendezvous on CUDA does beside mapping memory, of several versions at once.

    Until 2.14 one counter of the process is part of the keys. Later versions compare how many
    allocations each rank has made, in groups that `set_group_info` told them of.
    """

    def __init__(self, told: dist.ProcessGroup, allocations: int) -> None:
        self._told, self._allocations, self._exchanges = told.group_name, allocations, 0
        self.empty_strided_p2p = _SymmetricMemory.empty_strided_p2p

    def get_backend(self, device: torch.device) -> str:
        return "CUDA"

    def _next(self) -> str:
        self._exchanges += 1
        return f"CUDASymmetricMemory/{self._exchanges}"

    def _gather(self, group: dist.ProcessGroup, payload: bytes) -> list[bytes]:
        store, begin = group.get_group_store(), self._next()
        store.set(f"{begin}/{group.rank()}", payload)  # type: ignore[arg-type]
        return store.multi_get([f"{begin}/{rank}" for rank in range(group.size())])

    def rendezvous(self, tensor: torch.Tensor, name: str) -> _SymmetricMemory:
        group = _resolve_process_group(name)  # type: ignore[arg-type]
        count = self._allocations.to_bytes(8, "little") + b"\xff"  # not text
        counts = self._gather(group, count)
        if name == self._told:
            assert set(counts) == {count}, "Symmetric window mismatch"
        store: Any = group.get_group_store()
        if _HAS_BARRIER:
            store.barrier(self._next(), group.size())
        else:
            self._gather(group, b"barrier")
        self._gather(group, b"multicast")
        # The memory is the CPU's.
        return _SymmetricMemory.rendezvous(tensor, name.split(", symmetric memory")[0])


@pytest.mark.ranks(3)
def test_a_rendezvous_does_not_depend_on_what_ranks_did_in_other_groups(
    group: dist.ProcessGroup,
) -> None:
    """A sub-group that leaves a rank out makes rendezvous first; then the whole group does."""
    pair = dist.new_group([0, 1])
    torchs = TorchOnCuda(group, allocations=group.rank())
    cuda.workspaces_of(memory.resolve(group)).current.clear()  # of earlier tests
    with (
        simulation(delays_us=0),
        mock.patch.object(rendezvous, "_SymmetricMemory", torchs),
        mock.patch.object(rendezvous, "gpu_of", return_value=f"GPU {group.rank()}"),
        mock.patch.object(symmetric_memory, "_SymmetricMemory", torchs),
    ):
        for members in (pair, group) if group.rank() < 2 else (group,):
            x = symmetric(4, 4)
            symm_cp.read_in_place(x, members)
            gathers(x, members, 1)
            gathers(torch.empty(300, 300), members, 2)  # a larger workspace
    assert torchs._exchanges >= 9, "the stand-in was not asked"
