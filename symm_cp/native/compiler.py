"""The C++ compiler: which one, its flags, torch's headers and libraries."""

from __future__ import annotations

import contextlib
import os
import platform
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import torch

from symm_cp import env
from symm_cp.native.errors import BuildError

FLAGS = ("-std=c++20", "-O1", "-fPIC", "-fvisibility-inlines-hidden")
_NATIVE = "native"


def find_compiler() -> str:
    """Returns the command of a C++ compiler, or raises `BuildError` saying what to install."""
    names = [chosen] if (chosen := env.compiler()) else ["c++", "g++", "clang++"]
    for name in names:
        try:
            program, *options = shlex.split(name)  # as in CXX="ccache g++"
        except ValueError as error:
            raise BuildError(f"CXX={name!r} is no command: {error}") from error
        if path := shutil.which(program):
            return shlex.join([os.path.abspath(path), *options])
    raise BuildError(
        "symm_cp needs a C++20 compiler to build its native part; found none of "
        f"{', '.join(names)}. Install one (Debian, Ubuntu: apt install g++; Fedora: "
        "dnf install gcc-c++; conda: conda install gxx), or set CXX to its path, "
        "then run: symm-cp build"
    )


class Compiler:
    """The compiler, run in the folder of the sources, for this processor or a processor level."""

    def __init__(self, folder: Path, level: str = _NATIVE) -> None:
        self._folder = folder
        self._flags = (*FLAGS, f"-march={level}")
        self.command = shlex.split(find_compiler())
        #: The text that objects depend on, beside the sources and the flags of a unit.
        self.identity = "\0".join(
            (
                *(self.run([*self.command, "--version"]), *self.command, *self._flags),
                *([processor()] if level == _NATIVE else []),
            )
        )

    def compile(self, arguments: Sequence[str], out: Path) -> None:
        """Compiles with the common flags; file names are relative to the folder of the sources."""
        self.run([*self.command, *self._flags, "-I.", *arguments, "-o", str(out)])

    def link(self, objects: Sequence[Path], out: Path, *torch_libraries: str) -> None:
        """Links a library with libraries of torch."""
        libraries = link_flags(*torch_libraries)
        self.run([*self.command, "-shared", *map(str, objects), "-o", str(out), *libraries])

    def run(self, command: list[str]) -> str:
        """Returns the output of a command; raises `BuildError` with its stderr if it fails."""
        try:
            done = subprocess.run(
                command,
                cwd=self._folder,
                capture_output=True,
                text=True,
                errors="replace",
                check=False,
            )
        except OSError as error:
            raise BuildError(
                f"the C++ compiler does not run: {error}; set CXX to another one, then run: "
                "symm-cp build"
            ) from error
        if done.returncode != 0:
            raise BuildError(
                f"the native part of symm_cp does not compile for torch {torch.__version__}; "
                "symm-cp build shows why:\n"
                f"  cd {self._folder}; {shlex.join(command)}\n{done.stderr.strip()}"
            )
        return done.stdout


def processor() -> str:
    """Describes the processor: -march=native binds objects to it, and homes may be shared."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            if line.startswith(("flags", "Features")):
                return line
    return platform.machine()


def torch_flags() -> list[str]:
    """Returns the flags for torch's headers."""
    paths = [f"-isystem{path}" for path in _extension().include_paths()]
    return [*paths, f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]


def link_flags(*names: str) -> list[str]:
    """Returns the flags that link with libraries of torch and with the C++ runtime."""
    paths = _extension().library_paths()
    folders = [flag for path in paths for flag in (f"-L{path}", f"-Wl,-rpath,{path}")]
    return [*folders, *(f"-l{name}" for name in names), *_runtime(), "-pthread"]


def _extension() -> ModuleType:
    # Imported here, because CUDA builds of torch log a warning on machines without a GPU.
    from torch.utils import cpp_extension

    return cpp_extension


def _runtime() -> list[str]:
    """Returns the C++ runtime that torch has loaded, to link it instead of the compiler's choice.

    On a machine without the runtime's linker file, compilers link their static runtime, and two
    runtimes in one process crash at the first exception or stream that passes between them.
    """
    with open("/proc/self/maps") as file:
        mapped = {f[5].strip() for line in file if len(f := line.split(maxsplit=5)) == 6}
    found = [path for path in sorted(mapped) if Path(path).name.startswith("libstdc++.so.6")]
    return [path for path in found if Path(path).is_file()][:1]
