"""What csrc/ declares and Python uses, read from the text of csrc/.

Enumerations, structs and constants stand in channel/wire.h, C functions where they are defined.
Compilers and this module read the same text, and the key of a library covers all of it, so nothing
is written twice and nothing needs to be compared when the library is loaded. Rejected: pybind11,
which needs Python's headers and takes 20 s to compile one file; and a table that the library
exports, since modules need the values before there is a library. A form of declaration that is not
known here raises `KeyError` or `ValueError`.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator
from contextlib import suppress
from enum import EnumMeta, IntEnum
from functools import cache
from typing import Any

from symm_cp.native.sources import source_dir

_TYPES: dict[str, Any] = {
    "int": ctypes.c_int,
    "int32_t": ctypes.c_int32,
    "uint32_t": ctypes.c_uint32,
    "int64_t": ctypes.c_int64,
    "uint64_t": ctypes.c_uint64,
    "char": ctypes.c_char,
    "const char*": ctypes.c_char_p,
    "PyObject*": ctypes.py_object,
    "void": None,
}
_ENUM = re.compile(r"enum class (\w+) : int32_t \{(.*?)\};", re.DOTALL)
_STRUCT = re.compile(r"struct (\w+) \{(.*?)\n\};", re.DOTALL)
_FIELD = re.compile(r"\s*(\w+) (\w+)(?:\[(\d+)\])?")
_CONSTANT = re.compile(r"inline constexpr \w+ (k\w+) = (\w+);")
_TEXTS = re.compile(r"inline constexpr const char\* (k\w+)\[\] = \{(.*?)\};", re.DOTALL)
_FUNCTION = re.compile(
    r"^(?:SYMM_CP_EXPORT )?((?:const )?\w+\*?) (symm_cp_\w+)\(([^;{]*)\) \{", re.MULTILINE
)
_BETWEEN = re.compile(r",\s*(?![^(]*\))")  # arguments, but not those of a function pointer


@cache
def _header() -> str:
    return re.sub(r"//.*", "", (source_dir() / "channel" / "wire.h").read_text())


@cache
def constants() -> dict[str, int]:
    """Returns the constants of wire.h whose values are literals or other such constants."""
    found: dict[str, int] = {}
    for name, value in _CONSTANT.findall(_header()):
        found[name] = found[value] if value in found else int(value, 0)
    return found


def texts(name: str) -> tuple[str, ...]:
    """Returns a list of texts of wire.h."""
    lists: dict[str, str] = dict(_TEXTS.findall(_header()))
    return tuple(re.findall(r'"([^"]*)"', lists[name]))


@cache
def _enumerations() -> dict[str, str]:
    return dict(_ENUM.findall(_header()))


def _members(enumeration: str) -> Iterator[tuple[str, int]]:
    """Yields enumerators in Python's spelling, such as WAIT_EVENT for kWaitEvent, and values."""
    value = 0
    for entry in _enumerations()[enumeration].split(","):
        name, _, explicit = entry.strip().partition(" = ")
        value = int(explicit or value)
        yield re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name.removeprefix("k")).upper(), value
        value += 1


class _FromHeader(EnumMeta):
    @classmethod
    def __prepare__(  # type: ignore[override]  # as in typeshed: EnumMeta differs from type
        metacls, cls: str, bases: tuple[type, ...], **options: Any
    ) -> Any:
        namespace = super().__prepare__(cls, bases, **options)
        if bases != (IntEnum,):
            for name, value in _members(cls):
                namespace[name] = value
        return namespace

    def __getattr__(cls, name: str) -> Any:  # mypy does not know the members
        raise AttributeError(f"csrc/channel/wire.h: enum class {cls.__name__} has no {name}")


class Enumeration(IntEnum, metaclass=_FromHeader):
    """Subclasses have the members of the enumeration of their name in wire.h."""


def fields(struct: str, *structs: type[ctypes.Structure]) -> list[tuple[str, Any]]:
    """Returns the fields of a struct of wire.h; `structs` are the types of its struct fields."""
    types = {
        **_TYPES,
        **dict.fromkeys(_enumerations(), ctypes.c_int32),
        **{each.__name__: each for each in structs},
    }
    found: list[tuple[str, Any]] = []
    plain = dict(_STRUCT.findall(_header()))[struct].split("(")[0]  # functions follow the fields
    for text in plain.split(";")[:-1]:
        match = _FIELD.fullmatch(text)
        if match is None:
            raise ValueError(f"csrc/channel/wire.h: struct {struct}: unknown form:{text}")
        kind, name, count = match.groups()
        found.append((name, types[kind] * int(count) if count else types[kind]))
    return found


@cache
def functions() -> dict[str, tuple[Any, list[Any]]]:
    """Returns the result and argument types of the C functions that csrc/ defines.

    Leaves out functions with types of C++, which only C++ calls.
    """
    found: dict[str, tuple[Any, list[Any]]] = {}
    for path in source_dir().rglob("*.cpp"):
        for result, name, arguments in _FUNCTION.findall(path.read_text()):
            kinds = [re.sub(r"\w+$", "", each).strip() for each in _BETWEEN.split(arguments)]
            with suppress(KeyError):
                found[name] = _type(result), [_type(kind) for kind in kinds if kind]
    return found


def _type(text: str) -> Any:
    is_pointer = text.endswith(("*", ")"))  # ")": to a function
    return _TYPES.get(text, ctypes.c_void_p) if is_pointer else _TYPES[text]
