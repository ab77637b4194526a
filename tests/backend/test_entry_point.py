"""torch 2.14 and later load the backend by its name, through an entry point of this package."""

from __future__ import annotations

import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch.distributed as dist

import symm_cp

GROUP = "torch.distributed.backends"
PROJECT = Path(symm_cp.__file__).resolve().parents[1] / "pyproject.toml"


def test_the_entry_point_registers_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    found = tomllib.loads(PROJECT.read_text())["project"]["entry-points"][GROUP]
    assert set(found) == {"symm_cp"}
    register = EntryPoint("symm_cp", found["symm_cp"], GROUP).load()
    register()  # registering it again does no harm
    before = list(dist.Backend.backend_list)
    monkeypatch.setattr(dist.Backend, "backend_list", [n for n in before if n != "symm_cp"])
    monkeypatch.delattr(dist.Backend, "SYMM_CP")
    register()
    assert dist.Backend.SYMM_CP == "symm_cp"  # type: ignore[attr-defined]
    assert "symm_cp" in dist.Backend.backend_list
