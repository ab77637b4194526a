"""The files to install from: the wheel, whose tag says Linux, and the source distribution."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

BUILD = """
from setuptools import build_meta
print(getattr(build_meta, {hook!r})({out!r}))
"""


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout, as builds leave files in it."""
    copy = tmp_path_factory.mktemp("checkout")
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", "*.so")
    for name in ("symm_cp", "csrc", "tests"):
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    return copy


def build(hook: str, checkout: Path, out: Path) -> Path:
    code = BUILD.format(hook=hook, out=str(out))
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=checkout, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return out / done.stdout.splitlines()[-1]


def files(*folders: str) -> set[str]:
    return {
        str(path.relative_to(ROOT))
        for folder in folders
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".cpp", ".h")
    }


@pytest.mark.exhaustive
def test_the_source_distribution_makes_the_wheel_and_has_no_part_of_the_tests(
    checkout: Path, tmp_path: Path
) -> None:
    with tarfile.open(build("build_sdist", checkout, tmp_path)) as archive:
        archive.extractall(tmp_path, filter="data")
    (source,) = (path for path in tmp_path.iterdir() if path.is_dir())
    assert not (source / "tests").exists()
    (listed,) = source.glob("*.egg-info/SOURCES.txt")
    names = listed.read_text().split()
    assert not any(name.startswith("tests") for name in names)
    assert [name for name in names if not (source / name).is_file()] == []
    wheel = build("build_wheel", source, tmp_path)
    assert wheel.name.endswith(f"-py3-none-linux_{platform.machine()}.whl")
    carried = set(zipfile.ZipFile(wheel).namelist())
    native = {f"symm_cp/{name}" for name in files("csrc")}
    assert sorted((files("symm_cp") | native) - carried) == []


def test_installations_from_a_checkout_are_for_linux_as_well(
    checkout: Path, tmp_path: Path
) -> None:
    wheel = build("build_editable", checkout, tmp_path)
    assert wheel.name.endswith(f"-py3-none-linux_{platform.machine()}.whl")
