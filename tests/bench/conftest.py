"""A fixture that runs commands."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from symm_cp.cli import main


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs a command, with ranks as processes, and returns its output."""

    def go(*arguments: object) -> str:
        code = main([str(argument) for argument in arguments])
        out, err = capfd.readouterr()
        assert code == 0, out + err
        return out

    return go
