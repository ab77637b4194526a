"""What an import of symm_cp loads, of other systems, and when torch or transformers come first."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.exhaustive import some

ROOT = Path(__file__).resolve().parent.parent


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


def test_other_systems_are_refused_by_name() -> None:
    out = run("""
import sys, torch
sys.platform = "darwin"
def _import_device_backends():  # as in torch, whose import must succeed
    from symm_cp import autoload
    autoload.register()
_import_device_backends()
try:
    import symm_cp.schedule
except ImportError as error:
    print(error)
""")
    assert out == "symm_cp runs on Linux only, and this is darwin\n"


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
