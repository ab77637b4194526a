"""Builds the libraries of the native part, each once for its sources, torch, Python and processor.

The C++ compiler gets the include and library paths of `torch.utils.cpp_extension`; ninja is not
needed. All builds in a folder share one lock: each build uses all cores anyway, and reuses the
objects of the build before.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sysconfig
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch

from symm_cp import env, trusted
from symm_cp.native import prebuilt
from symm_cp.native.compiler import FLAGS, Compiler, find_compiler, processor
from symm_cp.native.errors import BuildError, explained, say
from symm_cp.native.objects import Objects
from symm_cp.native.sources import Sources, source_dir

_DAY = 24 * 3600
#: Libraries that were not loaded for this many seconds are removed: each change of the sources
#: makes a new library.
_MAX_AGE = 30 * _DAY
_LIBRARY = "libsymm_cp.so"
_GLUE = "libsymm_cp_glue.so"


def cache_key() -> str:
    """Returns the key of the build: sources, torch, Python tag, processor."""
    return _key(Sources(source_dir()))


def _key(sources: Sources) -> str:
    parts = (torch.__version__, str(sysconfig.get_config_var("SOABI")), processor(), str(FLAGS))
    text = "\0".join((sources.all_digest, *parts))
    return hashlib.sha256(text.encode()).hexdigest()[:20]


def library_path() -> Path:
    """Returns the path of the library for the installed torch, whether or not it is built."""
    sources = Sources(source_dir())
    built = env.build_dir() / _key(sources) / _LIBRARY
    return built if built.is_file() else prebuilt.find(sources, _LIBRARY) or built


def build(verbose: bool = False, here: bool = False) -> Path:
    """Builds the native part for the installed torch unless it is there, and returns its path.

    Unless `here`, a library in the wheel, compiled for this torch and this processor's level, is
    used instead. Many processes may call this at once: one builds, the others wait. Raises
    `BuildError`.
    """
    what = "the native part"
    span = "10 to 40 seconds once, fewer after a change"
    return _build(_LIBRARY, _compile, what, span, verbose, here)


def build_glue(verbose: bool = False, here: bool = False) -> Path:
    """Like `build`, for the code that needs Python's headers: the backend, and calls of ops.

    Raises `BuildError`, also if Python's headers are missing.
    """
    what = "the backend of torch.distributed"
    return _build(_GLUE, _compile_glue, what, "5 to 20 seconds once", verbose, here)


def build_for(level: str) -> Path:
    """Compiles both libraries for a level of processor, for a wheel; returns their folder."""
    with explained():
        sources = Sources(source_dir())
        folder = prebuilt.FOLDER / prebuilt.key(sources, level)
        folder.mkdir(parents=True, exist_ok=True)
        with trusted.folder(env.build_dir(), create=True):
            pass
        with trusted.locked(env.build_dir() / "lock"):
            for name, compile_to in ((_LIBRARY, _compile), (_GLUE, _compile_glue)):
                compile_to(sources, folder / name, Compiler(sources.folder, level))
    return folder


def glue_beside(library: Path) -> Path | None:
    """Returns the path of the glue library if it lies beside the native part; never builds it."""
    path = library.with_name(_GLUE)
    with explained():
        return path if _built(path) else None


def _build(
    name: str,
    compile_to: Callable[[Sources, Path, Compiler], None],
    what: str,
    span: str,
    verbose: bool,
    here: bool,
) -> Path:
    with explained():
        sources = Sources(source_dir())
        target = env.build_dir() / _key(sources) / name
        if _built(target):
            if verbose:
                say(f"already built: {target}")
            return target
        carried = None if here else prebuilt.find(sources, name)
        if carried is not None:
            return carried
        find_compiler()
        with trusted.folder(env.build_dir(), create=True):
            pass
        with trusted.locked(env.build_dir() / "lock"):
            if not _built(target):
                say(f"building {what} for torch {torch.__version__} ({span}) ...")
                start = time.perf_counter()
                compile_to(sources, target, Compiler(sources.folder))
                _prune_libraries()
                say(f"built in {time.perf_counter() - start:.0f} s")
    return target


def _compile(sources: Sources, target: Path, compiler: Compiler) -> None:
    objects = Objects(env.build_dir() / "objects", sources, compiler)
    made = objects.compile(sources.plain, sources.torch)
    _link(compiler, objects, made, target, "torch_cpu", "c10")


def check_headers(headers: Path) -> None:
    """Raises `BuildError` if Python's headers are not in their folder."""
    if not (headers / "Python.h").is_file():
        raise BuildError(
            f"the backend of torch.distributed needs Python's headers; {headers / 'Python.h'} is "
            "missing. Install them (Debian, Ubuntu: apt install python3-dev; Fedora: dnf install "
            "python3-devel)"
        )


def headers() -> Path:
    """Returns the folder of Python's headers; raises `BuildError` if they are not there."""
    folder = Path(sysconfig.get_path("include"))
    check_headers(folder)
    return folder


def _compile_glue(sources: Sources, target: Path, compiler: Compiler) -> None:
    objects = Objects(env.build_dir() / "objects", sources, compiler)
    flags = (f"-isystem{headers()}", "-fvisibility=hidden")
    units = [replace(unit, flags=(*flags, *unit.flags)) for unit in sources.glue]
    made = objects.compile(units)
    _link(compiler, objects, made, target, "torch_python", "torch_cpu", "c10")


def _link(
    compiler: Compiler, objects: Objects, made: list[Path], target: Path, *libraries: str
) -> None:
    with tempfile.TemporaryDirectory(prefix="tmp", dir=made[0].parent) as scratch:
        library = Path(scratch) / target.name
        try:
            compiler.link(made, library, *libraries)
        except BuildError:
            objects.forget(made)  # one may be damaged
            raise
        library.chmod(0o644)  # whatever the umask: a library that a group can write is not loaded
        with library.open("rb") as file:
            trusted.write(_digest_path(target), _digest(file.fileno()).encode())
        library.replace(target)  # atomic: a reader sees the whole library or none


def open_verified(library: Path) -> int:
    """Returns a descriptor of the library as it was built; raises `BuildError` or `OSError`.

    A loaded library runs as the user. Only its owner can change or replace it (see `trusted`); the
    digest detects a damaged file.
    """
    wanted = trusted.read(_digest_path(library)).decode(errors="replace")
    fd = trusted.open_to_read(library)
    if _digest(fd) != wanted:
        os.close(fd)
        raise BuildError(
            f"{library} has changed since it was built: delete {library.parent} to build it again"
        )
    return fd


def mark_used(library: Path) -> None:
    """Records once a day that a library is in use, if permitted; see `_prune_libraries`."""
    with suppress(OSError):
        if time.time() - library.stat().st_mtime > _DAY:
            os.utime(library)


def _digest(fd: int) -> str:
    with open(fd, "rb", closefd=False) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest_path(library: Path) -> Path:
    return library.with_suffix(".sha256")


def _built(library: Path) -> bool:
    try:
        for path in (library, _digest_path(library)):
            os.close(trusted.open_to_read(path))
    except FileNotFoundError:
        return False
    return True


def _prune_libraries() -> None:
    """Removes libraries not loaded for `_MAX_AGE`, and files left by killed builds."""
    now = time.time()
    for folder in env.build_dir().glob("[0-9a-f]" * 20):
        with suppress(OSError):
            newest = max(path.stat().st_mtime for path in (folder, *folder.iterdir()))
            age = _MAX_AGE if (folder / _LIBRARY).exists() else _DAY
            if now - newest > age:
                shutil.rmtree(folder, ignore_errors=True)
