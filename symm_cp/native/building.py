"""Builds the libraries of the native part, each once for its sources, torch, Python and processor.

Objects are cached by unit in the folder of built code; an object's key is its unit, its compiler
(version, flags, processor, torch) and its contents: the sources and all files that they include
below csrc/. All builds in a folder share one lock: each uses all cores anyway, and reuses the
objects of the build before. Only the user can change what is built (see `trusted`).

`torch.utils.cpp_extension` with ninja was tried instead (torch 2.13, g++ 12). It compiles each
source alone, with torch's headers: a first build takes about 300 s of processor time, here 145 s.
After a change of a file of ops it takes 6.5 s, here 8 s. It has one set of flags for all
sources, and ninja would have to be installed.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import sysconfig
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch

from symm_cp import env, trusted
from symm_cp.native import prebuilt
from symm_cp.native.compiler import FLAGS, Compiler, find_compiler, processor, torch_flags
from symm_cp.native.errors import BuildError, explained, say
from symm_cp.native.sources import Sources, Unit, source_dir

_LIBRARY = "libsymm_cp.so"
_GLUE = "libsymm_cp_glue.so"
#: The most libraries and objects that the folder keeps, those last used: a change of a source makes
#: new ones, of 5 MB and 0.1 to 2 MB.
_MAX_LIBRARIES, _MAX_OBJECTS = 20, 1000
#: Seconds between lines about progress where stderr is no terminal.
_QUIET = 15.0


def cache_key() -> str:
    """Returns the key of the build: sources, torch, Python tag, processor."""
    return _key(Sources(source_dir()))


def _key(sources: Sources) -> str:
    return _digest(sources.all_digest, torch.__version__, _python(), processor(), str(FLAGS))[:20]


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
    return _build(_LIBRARY, "the native part", verbose, here)


def build_glue(verbose: bool = False, here: bool = False) -> Path:
    """Like `build`, for the code that needs Python's headers: the backend, and calls of ops.

    Raises `BuildError`, also if Python's headers are missing.
    """
    return _build(_GLUE, "the backend of torch.distributed", verbose, here)


def build_for(level: str) -> Path:
    """Compiles both libraries for a level of processor, for a wheel; returns their folder."""
    with explained():
        sources = Sources(source_dir())
        folder = prebuilt.FOLDER / prebuilt.key(sources, level)
        folder.mkdir(parents=True, exist_ok=True)
        trusted.check_folder(env.build_dir(), create=True)
        with trusted.locked(env.build_dir() / "lock"):
            for name in (_LIBRARY, _GLUE):
                _compile(sources, folder / name, Compiler(sources.folder, level))
    return folder


def glue_beside(library: Path) -> Path | None:
    """Returns the path of the glue library if it lies beside the native part; never builds it."""
    path = library.with_name(_GLUE)
    with explained():
        return path if _is_there(path) else None


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


def _build(name: str, what: str, verbose: bool, here: bool) -> Path:
    with explained():
        sources = Sources(source_dir())
        target = env.build_dir() / _key(sources) / name
        if _is_there(target):
            if verbose:
                say(f"already built: {target}")
            return target
        carried = None if here else prebuilt.find(sources, name)
        if carried is not None:
            return carried
        find_compiler()
        trusted.check_folder(env.build_dir(), create=True)
        with trusted.locked(env.build_dir() / "lock"):
            if not _is_there(target):
                say(
                    f"building {what} for torch {torch.__version__}, once (two minutes of "
                    "processor time in all, less after a change) ..."
                )
                start = time.perf_counter()
                _compile(sources, target, Compiler(sources.folder))
                _prune(env.build_dir(), "[0-9a-f]" * 20, _MAX_LIBRARIES)
                _prune(env.build_dir() / "objects", "*", _MAX_OBJECTS)
                say(f"built in {time.perf_counter() - start:.0f} s")
    return target


def _compile(sources: Sources, target: Path, compiler: Compiler) -> None:
    """Makes a library; compiles the units that have no object yet."""
    libraries: tuple[str, ...]
    if target.name == _LIBRARY:
        units, libraries = [*sources.torch, *sources.plain], ("torch_cpu", "c10")
    else:
        flags = (f"-isystem{headers()}", "-fvisibility=hidden")
        units = [replace(unit, flags=(*flags, *unit.flags)) for unit in sources.glue]
        libraries = ("torch_python", "torch_cpu", "c10")
    folder = env.build_dir() / "objects"
    trusted.check_folder(folder, create=True)
    toolchain = _digest(compiler.identity, torch.__version__, _python())
    objects = {unit: folder / _object_name(unit, sources, toolchain) for unit in units}
    missing = [unit for unit in units if not _is_there(objects[unit])]
    _compile_all({unit: objects[unit] for unit in missing}, sources, compiler)
    for path in objects.values():
        with suppress(OSError):
            os.utime(path)  # see _prune
    trusted.check_folder(target.parent, create=True)
    scratch = target.with_suffix(".tmp")
    compiler.link(list(objects.values()), scratch, *libraries)
    _keep(scratch, target)


def _compile_all(objects: dict[Unit, Path], sources: Sources, compiler: Compiler) -> None:
    files, compiled = sum(len(unit.sources) for unit in objects), 0
    progress = _Progress()
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        # Units with torch, which take longest, come first, so that others compile meanwhile.
        jobs = {pool.submit(_make, u, path, sources, compiler): u for u, path in objects.items()}
        try:
            for job in as_completed(jobs):
                job.result()
                compiled += len(jobs[job].sources)
                progress.show(f"compiled {compiled} of {files} files")
        finally:
            progress.end()
            pool.shutdown(cancel_futures=True)


def _object_name(unit: Unit, sources: Sources, toolchain: str) -> str:
    contents = sources.digest(sources.closure(*unit.sources))
    return f"{unit.name}-{_digest(toolchain, str(unit.flags), contents)[:24]}.o"


def _make(unit: Unit, target: Path, sources: Sources, compiler: Compiler) -> None:
    scratch = target.with_suffix(".tmp")
    *others, last = unit.sources
    included = [part for name in others for part in ("-include", name)]
    flags = [*torch_flags(), *unit.flags] if unit.needs_torch else unit.flags
    compiler.compile([*flags, *included, "-c", last], scratch)
    sources.require_unchanged(unit.sources)  # else the object's key would be wrong
    _keep(scratch, target)


def _keep(made: Path, target: Path) -> None:
    made.chmod(0o644)  # whatever the umask: a file that a group can write is not trusted
    made.replace(target)  # atomic: a reader sees the whole file or none


class _Progress:
    """Shows how far a build is: in one line of a terminal, elsewhere by a line now and then."""

    def __init__(self) -> None:
        self._terminal = sys.stderr is not None and not sys.stderr.closed and sys.stderr.isatty()
        self._shown = time.monotonic()

    def show(self, text: str) -> None:
        if self._terminal:
            say(text, end="\r")
        elif time.monotonic() - self._shown > _QUIET:
            self._shown = time.monotonic()
            say(text)

    def end(self) -> None:
        if self._terminal:
            say(" " * 40, end="\r")


def mark_used(library: Path) -> None:
    """Keeps a library that is in use from being pruned, if permitted."""
    with suppress(OSError):
        os.utime(library.parent)


def _prune(folder: Path, pattern: str, keep: int) -> None:
    """Removes all but the last used entries of a folder."""
    entries = sorted(folder.glob(pattern), key=lambda path: path.stat().st_mtime)
    for path in entries[:-keep]:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _is_there(path: Path) -> bool:
    try:
        os.close(trusted.open_to_read(path))
    except FileNotFoundError:
        return False
    return True


def _python() -> str:
    return str(sysconfig.get_config_var("SOABI"))


def _digest(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()
