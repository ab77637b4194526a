"""Loads the libraries of the native part, once in a process."""

from __future__ import annotations

import atexit
import ctypes
import difflib
import os
from contextlib import suppress
from functools import cache
from pathlib import Path

from symm_cp import env
from symm_cp.native import prebuilt, wire
from symm_cp.native.bindings import INT, LONG, SIGNATURES, TEXT, VOID
from symm_cp.native.building import (
    build,
    build_glue,
    glue_beside,
    headers,
    mark_used,
    open_verified,
)
from symm_cp.native.errors import BuildError, explained, say

_loaded: list[Path] = []  # of the native part
_OTHER_VERSION = "csrc/ and symm_cp/ are of different versions: install symm_cp again"


def _compare(library: str) -> None:
    """Raises `BuildError` with a diff if the library's contract differs from the package's."""
    package = wire.description()
    if library != package:
        lines = difflib.unified_diff(
            library.splitlines(),
            package.splitlines(),
            "csrc/channel/wire.h",
            "symm_cp/native/wire.py",
            "",
            "",
            0,
        )
        raise BuildError("\n".join([_OTHER_VERSION, *lines]))


@cache
def load() -> ctypes.CDLL:
    """Returns the native library, building it if it was never built; raises `BuildError`.

    The library must be unchanged since it was built, in folders that only its owner can change.
    Loading registers the CPU backend with torch's symmetric memory.
    """
    path, library = _open_native_part()
    for name, (result, arguments) in SIGNATURES.items():
        function = getattr(library, name, None)
        if function is None:
            raise BuildError(f"{_OTHER_VERSION} (the library has no function {name})")
        function.restype = result
        function.argtypes = arguments
    _compare(library.symm_cp_wire().decode())
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
        return path, _open_library(path, ctypes.CDLL)
    except BuildError as error:
        if not path.is_relative_to(prebuilt.FOLDER):
            raise
        say(str(error))
    path = build(here=True)
    return path, _open_library(path, ctypes.CDLL)


def _open_library(path: Path, kind: type[ctypes.CDLL]) -> ctypes.CDLL:
    with explained():
        # Stays open: the loader identifies libraries by name, so if another file got the same
        # descriptor number, the loader would return this library again.
        fd = open_verified(path)
    mark_used(path)
    name = f"/proc/self/fd/{fd}"  # the verified file, even if the path was replaced since
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
    glue = _open_library(glue_beside(_loaded[0]) or build_glue(), ctypes.PyDLL)
    make = glue.symm_cp_backend_object
    make.restype = ctypes.py_object
    make.argtypes = [
        *(VOID, ctypes.py_object, TEXT, INT, INT, LONG),
        *(ctypes.py_object, ctypes.py_object, ctypes.POINTER(ctypes.c_int32), INT),
    ]
    glue.symm_cp_plan_launch.argtypes = [
        *(VOID, VOID, ctypes.py_object, VOID, ctypes.c_uint32, VOID, VOID, INT, TEXT),
        *(INT, ctypes.py_object, ctypes.py_object),
    ]
    glue.symm_cp_plan_ran.argtypes = [VOID, INT, TEXT, TEXT, *[ctypes.py_object] * 3]
    glue.symm_cp_plan_called.argtypes = [VOID, INT, *[ctypes.py_object] * 3]
    for name in ("launch", "ran", "called"):
        glue[f"symm_cp_plan_{name}"].restype = ctypes.py_object
    glue.symm_cp_plan_commands.argtypes = [VOID, VOID, INT]
    glue.symm_cp_plan_refuse.argtypes = [VOID, TEXT]
    glue.symm_cp_plan_ask.argtypes = [VOID, ctypes.py_object]
    for name in ("commands", "refuse", "ask"):
        glue[f"symm_cp_plan_{name}"].restype = None
    call = glue.symm_cp_op_call
    call.restype = ctypes.py_object
    call.argtypes = [TEXT, ctypes.py_object]
    glue.symm_cp_decoding.restype = ctypes.py_object
    glue.symm_cp_decoding.argtypes = [INT]
    return glue


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
    return ctypes.cast(function, VOID).value or 0  # type: ignore[arg-type]


def error() -> str:
    """Returns the text of the last failure of a native call in this thread."""
    text: bytes = load().symm_cp_error()
    return text.decode(errors="replace")
