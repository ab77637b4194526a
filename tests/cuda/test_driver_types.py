"""csrc/cuda/driver.h declares by hand what cuda.h does: a compiler compares them, CUDA 12 and 13.

The headers come with Triton and with the packages of the CUDA runtime, which the extra `test` of
pyproject.toml installs; CUDA_HOME adds another.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from importlib import metadata
from pathlib import Path

import pytest
import triton

from symm_cp import native
from tests.exhaustive import some

_SOURCE = Path(__file__).with_name("driver_types.cpp")
_CSRC = Path(__file__).parents[2] / "csrc"


def headers() -> dict[int, Path]:
    """The installed versions of cuda.h, by CUDA_VERSION."""
    found = [Path(triton.__file__).parent / "backends" / "nvidia" / "include" / "cuda.h"]
    for package in ("nvidia-cuda-runtime-cu12", "nvidia-cuda-runtime"):
        files = metadata.files(package) or []
        found += [Path(str(file.locate())) for file in files if file.name == "cuda.h"]
    if "CUDA_HOME" in os.environ:
        found.append(Path(os.environ["CUDA_HOME"]) / "include" / "cuda.h")
    return {version(path): path for path in found if path.exists()}


def version(header: Path) -> int:
    match = re.search(r"#define CUDA_VERSION (\d+)", header.read_text(errors="replace"))
    assert match is not None, header
    return int(match[1])


def names() -> tuple[dict[str, str], dict[str, str]]:
    """The functions that driver.cpp looks up, with `Api`'s members; the constants of driver.h."""
    lookup = r'(?:require|find)\(library, (?:path, )?"(\w+)", api\.(\w+)\)'
    functions = dict(re.findall(lookup, (_CSRC / "cuda/driver.cpp").read_text()))
    text = (_CSRC / "cuda/driver.h").read_text()
    constants = dict(re.findall(r"constexpr \w+ (k\w+) = [^;]+;\s*// (CU\w+)", text))
    members = set(re.findall(r"Result \(\*(\w+)\)\(", text))
    assert members == set(functions.values()), "a member that driver.cpp does not look up"
    return functions, constants


def compiled(header: Path, folder: Path, edit: tuple[str, str] = ("", "")) -> str:
    """Compiles the comparison; returns the errors. `edit` replaces a name first."""
    functions, constants = names()
    text = header.read_text(errors="replace")
    checks = [f"FUNCTION({name}, {member});" for name, member in functions.items() if name in text]
    checks += [
        f"CONSTANT({ours}, {theirs});" for ours, theirs in constants.items() if theirs in text
    ]
    lines = "\n".join(checks)
    (folder / "driver_names.inc").write_text(lines.replace(*edit) if edit[0] else lines)
    command = [*shlex.split(native.find_compiler()), "-std=c++20", "-fsyntax-only"]
    command += [f"-I{header.parent}", f"-I{folder}", f"-I{_CSRC}", str(_SOURCE)]
    return subprocess.run(command, capture_output=True, text=True, check=False).stderr


HEADERS = headers()


def test_cuda_12_and_13_are_compared() -> None:
    """12.8 has copies in batches, with an argument that 13.0 leaves out."""
    assert any(12080 <= number < 13000 for number in HEADERS), HEADERS
    assert any(number >= 13000 for number in HEADERS), HEADERS


@pytest.mark.parametrize("number", sorted(HEADERS))
def test_types_and_functions_are_those_of_cuda_h(number: int, tmp_path: Path) -> None:
    assert not compiled(HEADERS[number], tmp_path)


def test_every_function_and_constant_is_in_the_newest_header() -> None:
    text = HEADERS[max(HEADERS)].read_text(errors="replace")
    for found in names():
        assert len(found) >= 6
        assert not [name for name in found if name.startswith("cu") and name not in text]
        assert not [name for name in found.values() if name.startswith("CU") and name not in text]


DIFFERENCES = [
    (("cuMemcpyAsync, copy)", "cuMemcpyDtoHAsync_v2, copy)"), "not declared as"),
    (("cuMemcpyBatchAsync_v2, copy_batch", "cuMemcpyBatchAsync_v2, copy_batch_12"), "not decl"),
    (("cuStreamBatchMemOp_v2, mem_ops", "cuStreamWaitEvent, mem_ops"), "not declared as"),
    (("CUDA_ERROR_NOT_READY", "CUDA_ERROR_NOT_PERMITTED"), "kNotReady"),
]


@pytest.mark.parametrize(("edit", "error"), some(DIFFERENCES[1], of=DIFFERENCES))
def test_differences_are_found(edit: tuple[str, str], error: str, tmp_path: Path) -> None:
    assert error in compiled(HEADERS[max(HEADERS)], tmp_path, edit)
