"""Importing symm_cp: only what is needed."""

from __future__ import annotations

import subprocess
import sys

import pytest

import symm_cp

#: They take from half a second to several.
SLOW = ("torch.distributed.tensor", "torch._inductor", "torch._dynamo", "triton", "matplotlib")


def test_import_leaves_out_what_is_slow() -> None:
    code = f"import symm_cp, sys; print([name for name in {SLOW} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]", done.stderr


def test_all_names_are_there() -> None:
    for name in symm_cp.__all__:
        assert getattr(symm_cp, name) is not None
    with pytest.raises(AttributeError, match="'symm_cp' has no attribute 'nothing'"):
        _ = symm_cp.nothing
