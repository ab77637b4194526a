"""A new kind of device takes one file, which registers itself (symm_cp/cuda/README.md).

In a copy of the package, on torch's device type for backends outside its source tree. What the ops
do on streams is tested on the simulated device.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import symm_cp
from symm_cp.ops.common import device_kernels

TOY = """
from symm_cp.cuda import registry
from symm_cp.cuda.base import Device


@registry.register
class ToyDevice(Device):
    torch_type, dispatch_key = "toy", "PrivateUse1"
    driver = "libtoy.so"

    streams = launch = mark = synchronize = copies_ended = None
    workspace = is_symmetric = None
"""

# Imports symm_cp, then does what a vendor's package for torch would do: the order is the user's.
VENDOR = """
import json, types, torch, torch.distributed._symmetric_memory
torchs = {
    s.name for s in torch._C._jit_get_all_schemas() if s.name.startswith("symm_mem::")
    and torch._C._dispatch_has_kernel_for_dispatch_key(s.name, "CUDA")
}
import symm_cp
torch.utils.rename_privateuse1_backend("toy")
toy = types.ModuleType("torch.toy")
toy.is_available = lambda: True
toy.device_count = lambda: 2
toy.current_device = lambda: 1
toy.get_device_name = lambda index: f"Toy {index}"
toy.can_device_access_peer = lambda index, peer: True
torch._register_device_module("toy", toy)
"""


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a copy of the package that knows toy devices."""
    folder = tmp_path_factory.mktemp("with_toy")
    source = Path(symm_cp.__file__).parent
    shutil.copytree(source, folder / "symm_cp", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "symm_cp/cuda/toy.py").write_text(TOY)
    wing = folder / "symm_cp/cuda/__init__.py"
    text, imported = wing.read_text(), "from symm_cp.cuda import gpu as _gpu"
    assert text.count(imported) == 1
    wing.write_text(text.replace(imported, f"from symm_cp.cuda import toy\n{imported}"))
    return folder


def run(package: Path, script: str) -> Any:
    """Runs a script with torch and symm_cp imported; returns the value it assigns to `result`."""
    script = f"{VENDOR}\n{script}\nprint(json.dumps(result))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False,
        cwd=package, env={**os.environ, "PYTHONPATH": str(package)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.exhaustive
def test_kernels_are_registered_for_its_key_as_for_cuda(package: Path) -> None:
    kernels = run(package, """
from symm_cp.ops.common import device_kernels

def keys(name):
    names = ("CPU", "CUDA", "PrivateUse1", "AutocastCUDA", "AutocastPrivateUse1")
    return [key for key in names if torch._C._dispatch_has_kernel_for_dispatch_key(name, key)]

names = {s.name for s in torch._C._jit_get_all_schemas() if s.name.startswith("symm_mem::")}
replaced = {f"symm_mem::{name}" for name in device_kernels}
result = {name: keys(name) for name in names - torchs | replaced}
""")  # fmt: skip
    assert "PrivateUse1" in kernels["symm_mem::fused_all_gather_attention"]
    replaced = kernels["symm_mem::fused_all_gather_matmul"]
    assert {"PrivateUse1", "AutocastPrivateUse1"} < set(replaced)
    assert "AutocastCUDA" not in replaced
    for name, keys in kernels.items():
        assert ("CUDA" in keys) == ("PrivateUse1" in keys), name
        # Autocast leaves torch's kernels for CUDA alone.
        if name.removeprefix("symm_mem::") not in device_kernels:
            assert ("AutocastCUDA" in keys) == ("AutocastPrivateUse1" in keys), name


@pytest.mark.exhaustive
def test_doctor_lists_its_driver_and_devices(package: Path) -> None:
    findings = run(package, """
from symm_cp.commands import doctor
result = {f.name: [f.state, f.detail] for f in doctor.examine() if f.name.startswith("TOY")}
""")  # fmt: skip
    state, detail = findings.pop("TOY driver")
    assert state == "missing"
    assert detail.startswith("the driver library libtoy.so does not load: ")
    assert findings == {
        "TOY 0": ["ok", "Toy 0; reaches 1"],
        "TOY 1": ["ok", "Toy 1; reaches 0"],
    }


@pytest.mark.exhaustive
def test_a_function_that_torchs_module_lacks_is_named(package: Path) -> None:
    errors = run(package, """
from symm_cp import accelerators
result = {}
for function in (accelerators.index_of, accelerators.uuid_of):
    try:
        result[function.__name__] = function(torch.device("toy"))
    except NotImplementedError as error:
        result[function.__name__] = str(error)
""")  # fmt: skip
    assert errors == {
        "index_of": 1,
        "uuid_of": (
            "symm_cp: torch.toy has no function get_device_properties(), which ops on 'toy' require"
        ),
    }


@pytest.mark.exhaustive
def test_what_a_group_chose_for_cuda_does_not_serve_it(package: Path) -> None:
    served = run(package, """
from symm_cp import cuda as wing
from symm_cp.group import memory
from symm_cp.cuda import nvshmem
store = torch.distributed.HashStore()
torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
group, cuda = memory.resolve(torch.distributed.group.WORLD), torch.device("cuda", 0)
wing.choose(group, nvshmem.NvshmemDevice(cuda, None))
result = [repr(wing.device_for(group, device)) for device in (cuda, torch.device("toy"))]
torch.distributed.destroy_process_group()
""")  # fmt: skip
    assert served == ["NvshmemDevice(cuda:0)", "ToyDevice(toy:1)"]
