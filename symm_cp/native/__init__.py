"""Builds `csrc/` for the installed torch, loads it, and declares its C functions.

The only package that touches the native library. Code that needs Python's headers is a separate
library, so that a first import needs no headers: the backend of torch.distributed, and
`ops/glue.cpp`, through which symm_cp/ops/direct.py calls ops; without it torch calls them, some
microseconds slower.

    declared.py   what csrc/ declares, read from its text
    wire.py       the structs, enumerations and limits that Python uses
    sources.py    the files of csrc/, their includes, and which are compiled together
    compiler.py   the C++ compiler and its flags
    building.py   the libraries, built once, from a cache of objects
    prebuilt.py   libraries that a wheel contains
    library.py    the libraries, loaded once
"""

from __future__ import annotations

from symm_cp.native.building import build, build_glue, cache_key, check_headers, library_path
from symm_cp.native.compiler import find_compiler
from symm_cp.native.errors import BuildError, say
from symm_cp.native.library import (
    FindGroup,
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
