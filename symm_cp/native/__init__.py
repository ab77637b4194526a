"""Builds `csrc/` for the installed torch, loads it, and declares its C functions.

The only package that touches the native library. `wire.py` mirrors `csrc/channel/wire.h` by hand:
`load` compares both sides' descriptions of every enumeration, struct and limit, so a difference is
an error with a diff, never a wrong offset. That costs 1.8 s of processor time in a cold build
(`wire.cpp`) and a millisecond at import. pybind11 was rejected: it needs Python's headers, which
the import must not require, and more time: one file (`backend/glue.cpp`) takes 21 s on the same
busy machine. So was a mirror generated from the header: it would have no types for mypy, and no
names before the library is built. Code that needs Python's headers is a separate library: the
backend of torch.distributed, and `ops/glue.cpp`, through which symm_cp/ops/direct.py calls ops;
without it torch calls them, some microseconds slower.

    wire.py       structs, enumerations and limits that Python and C++ share
    bindings.py   the C functions with their types
    sources.py    the files of csrc/ and their includes
    compiler.py   the C++ compiler and its flags
    objects.py    the cache of compiled objects
    building.py   the libraries, built once
    prebuilt.py   libraries that a wheel contains
    library.py    the libraries, loaded once
"""

from __future__ import annotations

from symm_cp.native.bindings import FindGroup, NoteCall
from symm_cp.native.building import build, build_glue, cache_key, check_headers, library_path
from symm_cp.native.compiler import find_compiler
from symm_cp.native.errors import BuildError, say
from symm_cp.native.library import (
    address_of,
    drop_plans,
    error,
    glue_if_built,
    load,
    load_glue,
)
from symm_cp.native.sources import source_dir

__all__ = [
    "BuildError",
    "FindGroup",
    "NoteCall",
    "address_of",
    "build",
    "build_glue",
    "cache_key",
    "check_headers",
    "drop_plans",
    "error",
    "find_compiler",
    "library_path",
    "load",
    "glue_if_built",
    "load_glue",
    "say",
    "source_dir",
]
