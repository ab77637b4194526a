"""Loads the libraries of the native part, once in a process."""

from __future__ import annotations

import atexit
import ctypes
import os
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TypeVar

from symm_cp import env, trusted
from symm_cp.native import prebuilt
from symm_cp.native.building import build, build_glue, glue_beside, headers, mark_used
from symm_cp.native.declared import functions
from symm_cp.native.errors import BuildError, explained, say

#: Takes the name of a group; see csrc/channel/groups.h.
FindGroup = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, ctypes.c_int)
_loaded: list[Path] = []  # of the native part
_L = TypeVar("_L", bound=ctypes.CDLL)


class _Library(ctypes.CDLL):
    """A library whose functions have the types that csrc/ declares."""

    def __getattr__(self, name: str) -> ctypes._NamedFuncPointer:
        if name not in functions():
            raise AttributeError(f"csrc/ defines no C function {name}")
        function = self[name]
        function.restype, function.argtypes = functions()[name]
        setattr(self, name, function)  # the next look-up finds it
        return function


class _Glue(_Library, ctypes.PyDLL):
    """A library whose functions run with Python's lock held, and may raise."""


@cache
def load() -> ctypes.CDLL:
    """Returns the native library, building it if it was never built; raises `BuildError`.

    Loading registers the CPU backend with torch's symmetric memory.
    """
    path, library = _open_native_part()
    try:
        library.symm_cp_keep_results(env.kept_bytes())
    except ValueError as error:  # an import never fails
        say(f"{error}; keeping as much as by default")
    try:
        library.symm_cp_set_threads(env.threads(), env.background_threads())
    except ValueError as error:
        say(f"{error}; using the default")
    # The watch's thread calls the CUDA driver, which ends with the process.
    atexit.register(library.symm_cp_watch_stop)
    # Built now, not in the first call that could use it: other ranks would wait for that call.
    with suppress(BuildError):
        headers()
        if glue_beside(path) is None:
            build_glue()
    _loaded.append(path)
    return library


def _open_native_part() -> tuple[Path, ctypes.CDLL]:
    path = build()
    try:
        return path, _open_library(path, _Library)
    except BuildError as error:
        if not path.is_relative_to(prebuilt.FOLDER):
            raise
        say(str(error))
    path = build(here=True)
    return path, _open_library(path, _Library)


def _open_library(path: Path, kind: type[_L]) -> _L:
    with explained():
        # Stays open: the loader identifies libraries by name, so if another file got the same
        # descriptor number, the loader would return this library again.
        fd = trusted.open_to_read(path)
    mark_used(path)
    name = f"/proc/self/fd/{fd}"  # the file that was checked, even if the path was replaced since
    try:
        return kind(name)
    except OSError as error:  # a damaged file, or a file system mounted noexec
        os.close(fd)
        raise BuildError(
            f"the native part of symm_cp does not load: {str(error).replace(name, str(path))}; "
            f"delete {path.parent} to build it again, or set SYMM_CP_BUILD_DIR to another folder"
        ) from error


@cache
def load_glue() -> ctypes.CDLL:
    """Returns the library of `build_glue`, building it if need be; raises `BuildError`."""
    load()
    return _open_library(glue_beside(_loaded[0]) or build_glue(), _Glue)


def glue_if_built() -> ctypes.CDLL | None:
    """Returns the library of `build_glue` if it was built, else None; never builds it."""
    try:
        load()
        return None if glue_beside(_loaded[0]) is None else load_glue()
    except BuildError:
        return None


def drop_plans() -> None:
    """Drops recorded plans of calls on streams, after something changed that they depend on."""
    with suppress(BuildError):  # without the native part there are no plans
        load().symm_cp_plans_drop()


def address_of(function: object) -> int:
    """Returns the address of a function of a native library."""
    return ctypes.cast(function, ctypes.c_void_p).value or 0  # type: ignore[arg-type]


def error() -> str:
    """Returns the text of the last failure of a native call in this thread."""
    text: bytes = load().symm_cp_error()
    return text.decode(errors="replace")
