"""Libraries that a wheel carries compiled, with a stand-in for the compiler."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest
import torch

from symm_cp import native
from symm_cp.native import __main__ as command
from symm_cp.native import building, library, prebuilt
from tests.test_native import Compiler, compiler  # noqa: F401

NEEDS = {"best": frozenset({"a", "b"}), "good": frozenset({"a"})}


@pytest.fixture
def carried(
    compiler: Compiler,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> dict[str, Path]:
    """The folders of an installation that carries libraries for two levels."""
    monkeypatch.setattr(prebuilt, "FOLDER", tmp_path / "prebuilt")
    monkeypatch.setattr(prebuilt, "LEVELS", {platform.machine(): NEEDS})
    monkeypatch.setattr(building, "check_headers", lambda folder: None)
    return {level: building.build_for(level) for level in NEEDS}


def has(monkeypatch: pytest.MonkeyPatch, features: str) -> None:
    monkeypatch.setattr(prebuilt, "processor", lambda: f"flags\t\t: {features}")


@pytest.mark.parametrize(("features", "level"), [("a b c", "best"), ("a c", "good")])
def test_the_best_library_for_the_processor_is_taken(
    carried: dict[str, Path],
    compiler: Compiler,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    features: str,
    level: str,
) -> None:
    calls = compiler.calls()
    assert all(any(f"-march={each} " in call for call in calls) for each in NEEDS)
    assert not any("-march=native" in call for call in calls)
    has(monkeypatch, features)
    monkeypatch.setenv("CXX", "/none")  # users have no compiler
    assert native.build() == native.library_path() == carried[level] / "libsymm_cp.so"
    assert native.build_glue() == building.glue_beside(native.build())
    assert len(compiler.calls()) == len(calls)


def test_what_does_not_fit_is_built(
    carried: dict[str, Path],
    compiler: Compiler,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    has(monkeypatch, "b c")
    here = native.build()
    assert here.is_relative_to(compiler.build_dir)
    has(monkeypatch, "a")
    assert native.build() == native.library_path() == here  # it is for exactly this processor
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    assert native.build().is_relative_to(compiler.build_dir)


def test_releases_of_a_minor_version_share_a_library(
    carried: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    has(monkeypatch, "a")
    version = torch.__version__.split("+")[0].rpartition(".")[0]
    for release in ("0", "7", "1+cu130"):
        monkeypatch.setattr(torch, "__version__", f"{version}.{release}")
        assert native.build().parent == carried["good"]


def test_a_library_that_does_not_load_is_built_here(
    carried: dict[str, Path],
    compiler: Compiler,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As on a Linux that is older than the one it was compiled for."""
    has(monkeypatch, "a")
    loads = compiler.build_dir

    def load(path: Path, kind: object) -> Path:
        if not path.is_relative_to(loads):
            raise native.BuildError(f"{path} does not load: GLIBC_2.99 not found")
        return path

    monkeypatch.setattr(library, "_open_library", load)
    path, opened = library._open_native_part()
    assert path == opened
    assert "GLIBC_2.99" in capsys.readouterr().err
    loads = Path("/none")
    with pytest.raises(native.BuildError, match="does not load"):
        library._open_native_part()


def test_the_command_names_unknown_levels(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["z80"]) == 2
    assert "unknown levels: z80; known: " in capsys.readouterr().err
