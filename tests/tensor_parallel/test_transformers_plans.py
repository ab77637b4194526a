"""transformers' own tensor parallelism over the backend symm_cp: fused, and as in one process."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, debug

from symm_cp.testing import Ranks
from tests.backend.world import world
from tests.exhaustive import exhaustive, some
from tests.tensor_parallel.common import Recorder, whole
from tests.tensor_parallel.models import FAMILIES, config_of, save, tokens_of


def load_in_parallel(folder: str, group: dist.ProcessGroup, **options: Any) -> nn.Module:
    """Calls `from_pretrained(tp_plan="auto")`, as in a program started by a launcher."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    rank = str(group.rank())
    ids = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": str(group.size())}
    # It requires accelerate, which it uses only if a rank has several devices.
    installed = mock.patch("transformers.integrations.accelerate.is_accelerate_available")
    with mock.patch.dict(os.environ, ids), installed:
        config = DistributedConfig(tp_plan="auto")
        return AutoModelForCausalLM.from_pretrained(folder, distributed_config=config, **options)


@contextlib.contextmanager
def own_meshes() -> Iterator[None]:
    """Clears DTensor's cache, which confuses this world's meshes with equal ones of another."""
    debug._clear_sharding_prop_cache()
    yield
    debug._clear_sharding_prop_cache()


def is_fused(recorder: Recorder) -> bool:
    """Tells whether fused ops summed products over the ranks."""
    sums = {"symm_mem::fused_matmul_all_reduce", "symm_mem::_fused_matmuls_all_reduce"}
    return not sums.isdisjoint(recorder.names)


def runs_as_in_one_process(
    group: dist.ProcessGroup,
    family: str,
    folder: str,
    backend: str,
    fused: bool,
    changes: dict[str, Any],
) -> None:
    from transformers import AutoModelForCausalLM

    with world(group, backend) as inner, own_meshes():
        if inner.rank() == 0:
            save(family, folder, **changes)
        dist.barrier()
        options = {
            "dtype": "auto",
            "experts_implementation": config_of(family)._experts_implementation,
        }
        model = load_in_parallel(folder, inner, **options)
        assert any(isinstance(p, DTensor) for p in model.parameters())
        alone = AutoModelForCausalLM.from_pretrained(folder, **options)
        tokens = tokens_of(alone)
        ours, dense = (m(tokens, labels=tokens, use_cache=False) for m in (model, alone))
        # The rotary embedding and the norms of transformers are computed in float32.
        torch.testing.assert_close(ours.logits, dense.logits, rtol=1e-5, atol=1e-6)
        for m, out in ((model, ours), (alone, dense)):
            m.zero_grad()
            with Recorder() as recorder:
                out.loss.backward()
            # Where no other linear is fused, the gradient of the logits' input is.
            assert is_fused(recorder) == ((fused or family == "phi3") and m is model)
        for (name, mine), other in zip(model.named_parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(
                whole(mine.grad), whole(other.grad), rtol=1e-5, atol=1e-6,
                msg=lambda m, name=name: f"{name}: {m}",
            )  # fmt: skip
        with Recorder() as recorder:
            made = [m.generate(tokens, max_new_tokens=5, do_sample=False) for m in (model, alone)]
        assert torch.equal(*made)
        assert is_fused(recorder) == fused
        with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
            cast = [m(tokens, use_cache=False).logits.double() for m in (model, alone)]
        torch.testing.assert_close(*cast, rtol=0, atol=0.1 * float(cast[1].abs().max()))


#: Families whose linears are split differently, or not at all.
NOT_FUSED = ("gpt_oss", "phi3")
CASES = [
    *((family, size, "symm_cp", {}) for family in FAMILIES for size in (2, 4)),
    ("llama", 2, "gloo", {}),
    ("qwen3", 2, "symm_cp", {"intermediate_size": 33}),  # the last rank has fewer of them
]


@pytest.mark.parametrize(
    ("family", "world_size", "backend", "changes"), some(("llama", 2, "symm_cp", {}), of=CASES)
)
def test_auto_plan(
    ranks: Ranks,
    family: str,
    world_size: int,
    backend: str,
    changes: dict[str, Any],
    tmp_path: Path,
) -> None:
    """Linears are fused over this package's backend if all ranks have equally many features."""
    fused = backend == "symm_cp" and family not in NOT_FUSED
    ranks.run(world_size, runs_as_in_one_process, family, str(tmp_path), backend, fused, changes)


@exhaustive
@pytest.mark.ranks(2)
def test_compiled(group: dist.ProcessGroup, tmp_path: Path) -> None:
    folder = str(tmp_path)
    from transformers import AutoModelForCausalLM

    with world(group, "symm_cp") as inner, own_meshes():
        if inner.rank() == 0:
            save("llama", folder, num_hidden_layers=1)
        dist.barrier()
        model = load_in_parallel(folder, inner, dtype="auto")
        alone = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
        tokens = tokens_of(alone)
        run = torch.compile(model, backend="aot_eager")
        for m in (run, alone):
            m(tokens, labels=tokens, use_cache=False).loss.backward()
        for mine, other in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(whole(mine.grad), whole(other.grad), rtol=1e-5, atol=1e-6)


PROGRAM = """
import sys
from pathlib import Path
from unittest import mock

import symm_cp
import torch.distributed as dist
from transformers import AutoModelForCausalLM

with mock.patch("transformers.integrations.accelerate.is_accelerate_available"):
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], tp_plan="auto")
Path(sys.argv[1], f"of rank {dist.get_rank()}").write_text(dist.get_backend())
dist.destroy_process_group()
"""


@exhaustive
def test_groups_that_transformers_starts(tmp_path: Path) -> None:
    """A program that torchrun starts needs only an import."""
    save("llama", str(tmp_path), num_hidden_layers=1)
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    launched = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*launched, str(program), str(tmp_path)],
        capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    backends = [(tmp_path / f"of rank {rank}").read_text() for rank in range(2)]
    assert backends == ["symm_cp", "symm_cp"]
