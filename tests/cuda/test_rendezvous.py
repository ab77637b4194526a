"""The check that no ranks share a GPU, and the environment that torch's rendezvous sees."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _SymmetricMemory

import symm_cp
from symm_cp.cuda import rendezvous, symmetric
from symm_cp.group import memory
from symm_cp.testing import Ranks
from tests.cuda.simulated import simulation

VARIABLES = (rendezvous.SHARE_GPUS, "TORCH_SYMM_MEM_DISABLE_MULTICAST")


def check(group: dist.ProcessGroup, gpus: list[str], allowed: list[str | None]) -> str:
    """Returns the error of a check in a new group; repeats a check that passes."""
    own = memory.resolve(dist.new_group(list(range(group.size()))))
    device, mine = torch.device("cpu"), allowed[group.rank()]
    asked = []

    def gpu_of(_: torch.device) -> str:
        asked.append(True)
        return gpus[group.rank()]

    with (
        mock.patch.dict(os.environ, {} if mine is None else {rendezvous.SHARE_GPUS: mine}),
        mock.patch.object(rendezvous, "gpu_of", gpu_of),
    ):
        if mine is None:
            os.environ.pop(rendezvous.SHARE_GPUS, None)
        try:
            rendezvous.check_gpus(own, device)
        except RuntimeError as error:
            return str(error)
        rendezvous.check_gpus(own, device)
        assert len(asked) == 1, "told once for a group"
    return ""


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_that_share_a_gpu_by_mistake_are_told(ranks: Ranks, world_size: int) -> None:
    apart, unset = [f"GPU-{rank}" for rank in range(world_size)], [None] * world_size
    assert ranks.run(world_size, check, apart, unset) == [""] * world_size
    same = ["GPU-7", *apart[1:-1], "GPU-7"]
    for allowed in (unset, ["1", *unset[1:]], ["0"] * world_size):
        for error in ranks.run(world_size, check, same, allowed):
            assert f"share a GPU: ranks [0, {world_size - 1}] use GPU GPU-7" in error
            assert "torch.cuda.set_device(local_rank)" in error
    assert ranks.run(world_size, check, same, ["1"] * world_size) == [""] * world_size


@contextlib.contextmanager
def no_writes() -> Iterator[None]:
    """Other threads may be in `getenv`, which may not run beside `setenv` and `unsetenv`."""
    wrong = AssertionError("the environment is written")
    with (
        mock.patch.object(os, "putenv", side_effect=wrong),
        mock.patch.object(os, "unsetenv", side_effect=wrong),
    ):
        yield


def seen_by_torch(group: dist.ProcessGroup) -> list[Any]:
    """The variables as the C library sees them during a rendezvous and after it."""
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_char_p

    def seen() -> list[bytes | None]:
        return [getenv(name.encode()) for name in VARIABLES]

    during = []

    class Spy:
        get_backend = _SymmetricMemory.get_backend

        @staticmethod
        def rendezvous(tensor: torch.Tensor, name: str) -> Any:
            during.append(seen())
            return _SymmetricMemory.rendezvous(tensor, name)

    memory_ = _SymmetricMemory.empty_strided_p2p((8,), [1], torch.uint8, torch.device("cpu"), None)
    os.environ.pop(VARIABLES[1], None)
    os.environ[VARIABLES[0]] = "false"
    with simulation(), mock.patch.object(rendezvous, "_SymmetricMemory", Spy), no_writes():
        rendezvous.map_peers(memory_, memory.resolve(group))
        rendezvous.map_peers(memory_, memory.resolve(group))
    after = seen()
    os.environ[VARIABLES[0]] = "1"  # the user's own is in force from now on
    with simulation(), mock.patch.object(rendezvous, "_SymmetricMemory", Spy), no_writes():
        rendezvous.map_peers(memory_, memory.resolve(group))
    assert os.environ["PATH"].encode() == getenv(b"PATH")
    return [during, after, seen()]


@pytest.mark.ranks(1)
def test_a_rank_alone_meets_nobody(group: dist.ProcessGroup) -> None:
    own, x, weight = dist.new_group([0]), torch.randn(4, 6), torch.randn(6, 5)
    with simulation(), mock.patch.object(symmetric, "map_peers", side_effect=AssertionError):
        out = symm_cp.all_gather_matmul(x, weight, gather_dim=0, group=own)
        q = torch.randn(1, 2, 4, 8, requires_grad=True)
        attended = symm_cp.all_gather_attention(q, q, q, group=own)
        assert isinstance(attended, torch.Tensor)
        attended.sum().backward()
    torch.testing.assert_close(out, x @ weight)
    assert q.grad is not None
    dist.destroy_process_group(own)


def test_torch_sets_up_no_multicast_and_compares_no_ordinals(ranks: Ranks) -> None:
    for during, after, with_users in ranks.run(2, seen_by_torch):
        assert during == [[b"1", b"1"]] * 3
        assert after == [b"0", b"0"]  # for torch as if unset
        assert with_users == [b"1", b"0"]
