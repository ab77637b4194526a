"""What README.md promises: its example runs, its tables and links are true."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import torch

import symm_cp
from benchmarks import readme_figures
from symm_cp import env

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def rows(text: str, pattern: str) -> set[str]:
    return {line.strip() for line in text.splitlines() if re.match(pattern, line.strip())}


def test_the_example_that_needs_gpus_names_what_there_is() -> None:
    *_, example = blocks("python")
    calls = re.findall(r"symm_cp\.nvshmem\.(\w+)\(", example)
    assert calls == ["init", "enable"]
    assert all(callable(getattr(symm_cp.nvshmem, name)) for name in calls)


def test_the_examples_run_under_torchrun(tmp_path: Path) -> None:
    code, long_sequences, compiled, _ = blocks("python")
    setting = """
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2
)
llama = LlamaForCausalLM(config)
ids = torch.randint(64, (1, 24))
ones = torch.ones(1, 24 // dist.get_world_size())
model = lambda ids, **options: llama(ids, attention_mask=ones, **options).logits
"""
    collectives = """
from torch.distributed._functional_collectives import (
    all_gather_tensor_autograd,
    reduce_scatter_tensor_autograd,
)
"""
    ends = "assert loss.item() > 0", collectives, compiled
    code = "\n".join([code, setting, long_sequences, *ends])
    script = tmp_path / "example.py"
    script.write_text(code + "\ndist.barrier()\ndist.destroy_process_group()\n")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*command, "--nproc-per-node", "2", str(script)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("4 of 4 collectives fused") == 2, done.stdout


def test_environment_variables_are_those_of_the_code() -> None:
    documented = rows(README, r"\| `(SYMM_CP_|CXX)")
    assert documented == rows(env.__doc__ or "", r"\| `")
    read = set(re.findall(r"environ[^\n]*?\"(SYMM_CP_\w+|CXX)\"", Path(env.__file__).read_text()))
    assert read == {re.findall(r"`(\w+)`", row)[0] for row in documented}


def test_named_ops_and_entry_points_exist() -> None:
    (table,) = re.findall(r"\| same result as .*?\n\n", README, re.DOTALL)
    cells = [line.split("|")[2:4] for line in table.strip().splitlines()[2:]]
    names = [[re.findall(r"`(\w+)`", cell) for cell in row] for row in cells]
    entries = {name for entry, _ in names for name in entry}
    ops = {name for _, op in names for name in op}
    assert entries <= set(symm_cp.__all__)
    assert len(ops) >= 11
    for name in ops:
        assert hasattr(torch.ops.symm_mem, name), name


def test_links_and_places_exist() -> None:
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", README):
        assert (ROOT / target).exists(), target
    for row in re.findall(r"^\| \d \| ([^|]+)\|", README, re.MULTILINE):
        for place in re.findall(r"`([^`]+)`", row):
            assert (ROOT / place).exists(), place


def test_ci_runs_the_documented_command() -> None:
    command = "pip install torch==2.13.0 -e '.[test]' && pytest"
    assert f"\n{command}\n" in "".join(blocks("sh"))
    assert f"\n{command}\n" in (ROOT / ".ci" / "run").read_text()


def test_figures_are_those_of_the_results() -> None:
    """`python benchmarks/readme_figures.py` writes them."""
    assert readme_figures.replaced(README) == README
