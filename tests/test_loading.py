"""An import of schedules alone works anywhere; everything else is loaded at first use."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.exhaustive import some

ROOT = Path(__file__).resolve().parent.parent

#: Code to run before a test's: simulates a system without some modules, or with another name.
WITHOUT = """
import importlib.abc, sys
class Without(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {names}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Without())
"""
NO_TORCH = WITHOUT.format(names={"torch", "numpy"})
WINDOWS = (
    WITHOUT.format(names={"torch", "numpy", "fcntl", "grp", "pwd"}) + "sys.platform = 'win32'\n"
)
MAC = "import os, sys\nsys.platform = 'darwin'\ndel os.O_PATH\n"


def run(code: str) -> str:
    """Returns the output of code in a new process."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("system", ["", NO_TORCH, MAC, WINDOWS], ids=["", "no torch", "mac", "win"])
def test_the_example_of_schedules_runs_anywhere(system: str, tmp_path: Path) -> None:
    page = (ROOT / "symm_cp" / "schedule" / "README.md").read_text()
    example, *_ = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(example.strip().splitlines()) <= 10
    out = run(f"""
{system}
import sys, time
begin = time.process_time()
import symm_cp.schedule
taken = time.process_time() - begin
{example}
from pathlib import Path
from symm_cp.schedule import trace
trace.save(Path({str(tmp_path / "trace.json")!r}), {{}})
print(taken, [name for name in ("torch", "numpy", "symm_cp.native") if name in sys.modules])
""")
    lines = out.splitlines()
    assert "Wait('ready' from rank 1)" in lines
    assert "4 calls on 2 ranks: no problem" in lines
    assert re.search(r"^race: nothing orders .* call 0", out, re.MULTILINE)
    taken, loaded = lines[-1].split(" ", 1)
    assert float(taken) < 1
    assert loaded == "[]"
    assert (tmp_path / "trace.json").is_file()


def test_other_systems_are_refused_by_name() -> None:
    for system, name in ((MAC, "darwin"), (WINDOWS, "win32")):
        out = run(f"""{system}
def message(statement):
    try:
        exec(statement)
    except ImportError as error:
        print(error)

message("import symm_cp")
message("from symm_cp import ops")
import symm_cp.schedule
message("import symm_cp.ops")
message("import symm_cp; symm_cp.all_gather_matmul")
message("from symm_cp import all_gather_matmul")
""")
        wanted = f"symm_cp runs on Linux only, and this is {name}; .* import symm_cp.schedule"
        assert len(re.findall(wanted, out)) == 5, out


def test_without_torch_everything_else_says_so() -> None:
    out = run(f"""{NO_TORCH}
for statement in ("import symm_cp", "import symm_cp.schedule", "symm_cp.all_gather_matmul",
                  "from symm_cp.ops import matmul", "from symm_cp import shard_batch"):
    try:
        exec(statement)
    except ModuleNotFoundError as error:
        print(statement, "-", error)
""")
    assert out.count("- No module named 'torch'") == 4, out
    assert "import symm_cp.schedule" not in out


#: Code to run after `import symm_cp.schedule`, each of which loads everything.
ASKING = {
    "torch": "import torch",
    "symm_cp, then torch": "import symm_cp, torch",
    "part of torch": "import torch.distributed",
    "a name": "from symm_cp import all_gather_matmul",
    "an attribute": "symm_cp.shard_batch",
    "a module": "import symm_cp.native",
    "a module of a room": "from symm_cp.runtime import api",
    "a room": "from symm_cp import ops",
    "all": "from symm_cp import *",
}


@pytest.mark.parametrize("asking", some("an attribute", of=ASKING))
@pytest.mark.exhaustive
def test_what_was_left_out_is_loaded_when_asked_for(asking: str) -> None:
    out = run(f"""
import sys
import symm_cp.schedule
assert "torch" not in sys.modules
{ASKING[asking]}
import torch
import torch.distributed as dist
import symm_cp
assert "symm_cp" in dist.Backend.backend_list
assert torch._C._dispatch_has_kernel_for_dispatch_key(
    "symm_mem::fused_all_gather_attention", "CPU"
)
ours = [kind for kind in map(type, sys.meta_path) if "symm_cp" in kind.__module__]
assert [kind.__name__ for kind in ours] == ["_Arrival"]  # of transformers, which is not there
assert type(torch.__spec__.loader).__module__ != "symm_cp.loading"
for name in ("schedule", "ops", "native", "group"):
    assert getattr(symm_cp, name) is sys.modules["symm_cp." + name]
print("loaded")
""")
    assert out == "loaded\n"


@pytest.mark.exhaustive
def test_everything_is_loaded_at_once_where_torch_is() -> None:
    out = run("""
import torch
import symm_cp.schedule
import torch.distributed as dist
print("symm_cp" in dist.Backend.backend_list)
""")
    assert out == "True\n"


@pytest.mark.exhaustive
def test_an_import_of_torch_succeeds_whatever_happens_to_the_rest() -> None:
    out = run("""
import sys
import symm_cp.schedule
sys.modules["symm_cp.group.memory"] = None  # cannot be imported
import torch
print(torch.ones(1).item())
try:
    symm_cp.shard_batch
except ImportError as error:
    print(error)
""")
    assert out.startswith("1.0\n")
    assert "symm_cp.group.memory" in out


@pytest.mark.parametrize("first", some("symm_cp", of=["symm_cp", "transformers.modeling_utils"]))
@pytest.mark.exhaustive
def test_transformers_knows_the_attention_as_soon_as_both_are_there(first: str) -> None:
    out = run(f"""
import sys
import {first}, symm_cp
if {first!r} == "symm_cp":
    assert "symm_cp.integrations.transformers" not in sys.modules
import transformers
from transformers import LlamaConfig, LlamaForCausalLM
config = LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
                     vocab_size=8)
model = LlamaForCausalLM._from_config(config, attn_implementation="symm_cp")
model.set_attn_implementation("sdpa")
model.set_attn_implementation("symm_cp")
print(model.config._attn_implementation, type(transformers.modeling_utils.__loader__).__name__)
""")
    assert out == "symm_cp SourceFileLoader\n"


@pytest.mark.exhaustive
def test_when_a_module_is_imported(tmp_path: Path) -> None:
    (tmp_path / "good.py").write_text("")
    (tmp_path / "broken.py").write_text("raise ValueError('broken')")
    out = run(f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
from symm_cp import loading
finders = len(sys.meta_path)
loading.when_imported("sys", lambda: print("there"))
for name in ("good", "broken", "missing"):
    loading.when_imported(name, lambda name=name: print(name, "has come"))
import good, good as again
for name in ("broken", "missing"):
    try:
        __import__(name)
    except Exception as error:
        print(type(error).__name__)
print(len(sys.meta_path) - finders)
loading.when_imported("good", lambda: 1 / 0)
""")
    assert out == "there\ngood has come\nValueError\nModuleNotFoundError\n2\n"


BACKEND = """
dist.init_process_group("symm_cp", store=dist.HashStore(), rank=0, world_size=1)
summed = torch.ones(2)
dist.all_reduce(summed)
print(dist.get_backend(), summed.tolist(), sys.modules["symm_cp"]._everything)
"""


def test_torch_knows_the_backend_by_name() -> None:
    """Importing torch loads nothing of symm_cp; the first group does."""
    out = run(f"""
import sys
import torch
import torch.distributed as dist
print([name for name in sys.modules if name.startswith("symm_cp")])
{BACKEND}
""")
    assert out == "[]\nsymm_cp [1.0, 1.0] True\n"


@pytest.mark.parametrize("before", ["symm_cp", "symm_cp.schedule", "symm_cp.autoload"])
@pytest.mark.exhaustive
def test_the_backend_is_registered_whatever_comes_first(before: str) -> None:
    out = run(f"""
import sys
import {before}
import torch
import symm_cp
import torch.distributed as dist
{BACKEND}
""")
    assert out == "symm_cp [1.0, 1.0] True\n"
