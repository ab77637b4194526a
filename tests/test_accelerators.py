"""Which accelerator is found, also on builds of torch for GPUs that the machine lacks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import symm_cp
from symm_cp import accelerators

PACKAGE = Path(symm_cp.__file__).parent


def cuda_without_gpu(check_available: bool = False) -> torch.device | None:
    """Stands in for `torch.accelerator.current_accelerator` of such a build."""
    return None if check_available else torch.device("cuda")


def test_a_build_for_an_accelerator_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", cuda_without_gpu)
    assert accelerators.available() is None


def test_nobody_asks_what_torch_was_built_for() -> None:
    asks = re.compile(
        r"current_accelerator\((?!check_available=True)|_get_accelerator\(|is_built\("
    )
    found = [
        f"{path.relative_to(PACKAGE)}:{number}: {line.strip()}"
        for path in PACKAGE.rglob("*.py")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if asks.search(line)
    ]
    assert not found, "\n".join(found)
