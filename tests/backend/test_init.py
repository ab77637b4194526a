"""Programs that ask torch.distributed for the backend, as users write them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.exhaustive import some

_ROOT = Path(__file__).resolve().parents[2]

_PROGRAM = """
import sys
import torch
import torch.distributed as dist
import symm_cp
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

rank, size, store, backend = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
torch.set_num_threads(1)
assert dist.Backend.default_device_backend_map["cpu"] == "gloo"
dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=size)

x = torch.full((3,), rank + 1.0)
dist.all_reduce(x)
assert (x == size * (size + 1) / 2).all()

mesh = init_device_mesh("cpu", (1, size), mesh_dim_names=("dp", "tp"))
for group in mesh.get_all_groups():
    y = torch.ones(2)
    dist.all_reduce(y, group=group)
    assert (y == group.size()).all()

torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
inputs = torch.randn(size, 5, 4)
expected = torch.autograd.grad(model(inputs).square().mean(), model.weight)[0]
parallel = DistributedDataParallel(model)
parallel(inputs[rank]).square().mean().backward()
torch.testing.assert_close(model.weight.grad, expected)

if dist.get_debug_level() != dist.DebugLevel.DETAIL:  # whose wrapper cannot be split
    part = dist.group.WORLD.split_group([0], group_name="part")
    assert (part is not None) == (rank == 0)

sparse = torch.ones(3).to_sparse()
dist.all_reduce(sparse)
assert (sparse.to_dense() == size).all()
try:
    dist.all_reduce(torch.ones(3, 3).to_sparse_csr())
    raise SystemExit("sparse tensors of other layouts must be refused")
except (NotImplementedError, RuntimeError):
    pass
dist.barrier()
dist.destroy_process_group()

# Again, under the same names.
dist.init_process_group(backend, init_method=f"file://{store}2", rank=rank, world_size=size)
dist.all_reduce(x)
assert (x == size * size * (size + 1) / 2).all()
dist.destroy_process_group()
print("as it should be")
"""


@pytest.mark.parametrize(
    ("size", "backend", "debug"),
    some(
        (2, "cpu:symm_cp", "DETAIL"),
        of=[(1, "symm_cp", "DETAIL"), (2, "cpu:symm_cp", "DETAIL"), (3, "symm_cp", "OFF")],
    ),
)
@pytest.mark.exhaustive
def test_a_program(tmp_path: Path, size: int, backend: str, debug: str) -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(_ROOT), os.environ.get("PYTHONPATH", "")]),
        "TORCH_DISTRIBUTED_DEBUG": debug,
    }
    command = [sys.executable, "-c", _PROGRAM]
    started = [
        subprocess.Popen(
            [*command, str(rank), str(size), str(tmp_path / "store"), backend],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(size)
    ]
    for process in started:
        output, _ = process.communicate(timeout=100)
        assert process.returncode == 0, output
        assert "as it should be" in output
