"""Programs of torch.distributed run unchanged: as over gloo, or as in one process."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from symm_cp.testing import Ranks
from tests.backend import programs, sharded
from tests.backend.world import world
from tests.exhaustive import exhaustive, some

BACKEND = "symm_cp"
#: Tolerances for 16-bit sums, which gloo rounds after each rank, after three steps at lr=0.1.
ROUNDED = {"ddp_hooks": 1e-2}
Program = Callable[..., Any]
#: Programs in which some groups have two of the four ranks. On two hosts all run on four ranks.
ON_FOUR = ("tensor_parallel", "hsdp", "redistribute_2d", "pipeline_1f1b")


def assert_same(expected: Any, actual: Any, rounding: float = 0.0) -> None:
    if isinstance(expected, torch.Tensor):
        limits = {"rtol": 0, "atol": rounding} if rounding else {}
        torch.testing.assert_close(actual, expected, **limits)
    elif isinstance(expected, dict):
        assert expected.keys() == actual.keys()
        assert_same(list(expected.values()), list(actual.values()), rounding)
    elif isinstance(expected, list):
        for one, other in zip(expected, actual, strict=True):
            assert_same(one, other, rounding)
    else:
        assert actual == expected


def compare(group: dist.ProcessGroup, program: Program, *args: Any) -> None:
    """Runs a program over gloo and over the backend."""
    results = []
    seed = torch.initial_seed()
    for backend in ("gloo", BACKEND):
        torch.manual_seed(seed)
        with world(group, backend) as inner:
            assert inner._get_backend(torch.device("cpu")).name() == backend
            results.append(program(*args))
    assert_same(*results, ROUNDED.get(program.__name__, 0.0))


def on_a_mesh(mesh: DeviceMesh) -> None:
    x = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
    made = torch.empty_like(x)
    assert isinstance(made, DTensor)
    made.device_mesh.get_local_rank()


@pytest.mark.ranks(2)
def test_a_world_knows_its_own_meshes_only(group: dist.ProcessGroup) -> None:
    on_a_mesh(DeviceMesh.from_group(group, "cpu", mesh_dim_names=("tp",)))
    with world(group, BACKEND):
        on_a_mesh(init_device_mesh("cpu", (group.size(),), mesh_dim_names=("tp",)))


@pytest.mark.parametrize(
    ("name", "world_size"),
    some(
        ("ddp", 2),
        ("ddp_sparse", 2),
        ("objects", 4),
        ("messages", 4),
        of=[*product(programs.SMALL, [2]), ("objects", 4), ("messages", 4), ("subgroups", 4)],
    ),
)
def test_small_programs(ranks: Ranks, name: str, world_size: int) -> None:
    ranks.run(world_size, compare, programs.SMALL[name])


@pytest.mark.parametrize(
    ("name", "world_size"),
    some(
        ("fsdp", 2), ("tensor_parallel", 4), of=[*product(sharded.ALL, [2]), *product(ON_FOUR, [4])]
    ),
)
def test_sharded_programs(ranks: Ranks, name: str, world_size: int) -> None:
    ranks.run(world_size, compare, sharded.ALL[name])


def checkpoint(group: dist.ProcessGroup, folder: str, backend: str, *, saves: bool) -> Any:
    with world(group, backend):
        return sharded.save(folder) if saves else sharded.load(folder)


@exhaustive
@pytest.mark.parametrize(
    ("before", "after", "backends"),
    [
        (4, 2, (BACKEND, BACKEND)),
        (4, 4, (BACKEND, BACKEND)),
        (1, 4, (BACKEND, "gloo")),
        (2, 3, (BACKEND, "gloo")),
        (2, 3, ("gloo", BACKEND)),
        (4, 2, ("gloo", BACKEND)),
    ],
)
def test_checkpoints(
    ranks: Ranks, before: int, after: int, backends: tuple[str, str], tmp_path: Path
) -> None:
    saved = ranks.run(before, checkpoint, str(tmp_path), backends[0], saves=True)[0]
    for loaded in ranks.run(after, checkpoint, str(tmp_path), backends[1], saves=False):
        assert_same(saved, loaded)


@exhaustive
@pytest.mark.parametrize("world_size", [2, 4])
def test_llama(ranks: Ranks, world_size: int, tmp_path: Path) -> None:
    ranks.run(world_size, compare, sharded.llama, str(tmp_path))
