"""The C++ sources: what each file includes, and which are compiled together.

A changed file affects the units that include it, directly or through other files. Conditions around
an include are not evaluated: the include counts.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path, PurePosixPath

from symm_cp.native.errors import BuildError

#: Files that need Python's headers, so they form a separate library (native/building.py): the
#: backend of torch.distributed, and calls of ops that are faster than torch's. Each has its
#: optimization level; the first file's code runs only once for each group.
GLUE = {
    "backend/glue.cpp": "-O0",
    "ops/glue.cpp": "-O1",
    "ops/decoding_glue.cpp": "-O1",
    "ops/plan_glue.cpp": "-O1",
}
# Arithmetic, and code that each call runs; the others compile in two thirds of the time at -O1.
LEVELS = {
    "attention/merge.cpp": "-O3",
    "attention/philox.cpp": "-O3",
    "attention/rows.cpp": "-O3",
    "channel/channel.cpp": "-O3",
    "channel/group.cpp": "-O2",
    "exchange/copy.cpp": "-O3",
    "exchange/exchange.cpp": "-O2",
    "exchange/exchange_run.cpp": "-O3",
    "exchange/lane.cpp": "-O2",
    "exchange/reduce.cpp": "-O3",
    "exchange/row_sums.cpp": "-O3",
    "messages/message_engine.cpp": "-O2",
    "messages/messages.cpp": "-O2",
}
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*(?:"([^"\n]+)"|<([^>\n]+)>)', re.MULTILINE)
_TORCH = ("ATen/", "c10/", "torch/")
_PACKAGE = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Unit:
    """Sources that are compiled together to one object, called `name`."""

    name: str
    sources: tuple[str, ...]
    needs_torch: bool
    flags: tuple[str, ...] = ()


def source_dir() -> Path:
    """Returns the folder of the C++ sources: in the installed package, else beside it."""
    for candidate in (_PACKAGE / "csrc", _PACKAGE.parent / "csrc"):
        if (candidate / "c_api.cpp").is_file():
            return candidate
    raise BuildError(f"the C++ sources are missing: looked in {_PACKAGE} and beside it")


class Sources:
    """The sources in a folder; files are named by their paths relative to it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        found = (path for path in folder.rglob("*") if path.suffix in (".cpp", ".h"))
        self.contents = {path.relative_to(folder).as_posix(): path.read_bytes() for path in found}
        self._included: dict[str, tuple[set[str], set[str]]] = {}

    @property
    def is_checkout(self) -> bool:
        """Whether the sources belong to a checkout, and may change; a wheel has its own copy."""
        return self.folder.resolve().parent != _PACKAGE

    def includes(self, name: str) -> tuple[set[str], set[str]]:
        """Returns the files in the folder, and the headers elsewhere, that a file includes."""
        if name not in self._included:
            own: set[str] = set()
            other: set[str] = set()
            for quoted, angled in _INCLUDE.findall(self.contents[name].decode(errors="replace")):
                beside = (PurePosixPath(name).parent / quoted).as_posix()  # where compilers look
                own.update({beside, quoted} & self.contents.keys() if quoted else ())
                other.update((angled,) if angled else ())
            self._included[name] = own, other
        return self._included[name]

    def closure(self, *names: str) -> list[str]:
        """Returns the files and all that they include in the folder, at any depth, sorted."""
        reached, pending = set(names), list(names)
        while pending:
            fresh = self.includes(pending.pop())[0] - reached
            reached |= fresh
            pending += fresh
        return sorted(reached)

    def torch_headers(self, *names: str) -> set[str]:
        """Returns the torch headers that the files, or files that they include, include."""
        headers = set().union(*(self.includes(name)[1] for name in self.closure(*names)))
        return {header for header in headers if header.startswith(_TORCH)}

    @cached_property
    def plain(self) -> list[Unit]:
        """The units that need no torch headers: one for each source."""
        names = (name for name in self._compiled if not self.torch_headers(name))
        return [self._alone(name) for name in names]

    @cached_property
    def torch(self) -> list[Unit]:
        """The units that include torch's headers, which cost ten times as much as the sources.

        One unit for the backend and one for all others, compiled in parallel.
        """
        names = [name for name in self._compiled if self.torch_headers(name)]
        backend = tuple(name for name in names if name.startswith("backend/"))
        ops = tuple(name for name in names if name not in backend)
        return [Unit("torch_ops", ops, True), Unit("torch_backend", backend, True)]

    @cached_property
    def glue(self) -> list[Unit]:
        """The units that include Python's headers: one for each source."""
        return [replace(self._alone(name), flags=(level,)) for name, level in GLUE.items()]

    def parts(self, unit: Unit) -> list[Unit]:
        """Returns a unit for each source of a unit."""
        return [self._alone(name) for name in unit.sources]

    def digest(self, names: Iterable[str]) -> str:
        """Returns a hash of names and contents of files."""
        digest = hashlib.sha256()
        for name in names:
            digest.update(name.encode() + b"\0" + hashlib.sha256(self.contents[name]).digest())
        return digest.hexdigest()

    @cached_property
    def all_digest(self) -> str:
        """A hash of all files."""
        return self.digest(sorted(self.contents))

    def require_unchanged(self, names: Iterable[str]) -> None:
        """Raises `BuildError` if files, or files that they include, changed after being read."""
        for name in self.closure(*names):
            if (self.folder / name).read_bytes() != self.contents[name]:
                raise BuildError(
                    f"{self.folder / name} changed while the native part of symm_cp was built; "
                    "build it again: symm-cp build"
                )

    @property
    def _compiled(self) -> list[str]:
        return sorted(name for name in self.contents if name.endswith(".cpp") and name not in GLUE)

    def _alone(self, name: str) -> Unit:
        flags = (LEVELS[name],) if name in LEVELS else ()
        stem = name.removesuffix(".cpp").replace("/", "_")
        return Unit(stem, (name,), bool(self.torch_headers(name)), flags)
