"""Options that several commands share: `--json`, `--plot`, older spellings, sizes."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar

from symm_cp.ranks import is_rank
from symm_cp.trusted import write_output

#: `--json` without a file: JSON is printed.
STDOUT = Path("-")
DTYPES = ("bfloat16", "float32", "float64")
_PICTURES = (".png", ".pdf", ".svg")


def add_json(parser: argparse.ArgumentParser, content: str) -> None:
    """Adds `--json [FILE]`."""
    parser.add_argument(
        "--json",
        nargs="?",
        type=Path,
        const=STDOUT,
        metavar="FILE",
        help=f"write {content} to this file as JSON; without a file, print that instead of text",
    )


def write_json(path: Path, content: Any) -> None:
    """Writes the file of `--json`, or prints it."""
    text = json.dumps(content, indent=1)
    if path == STDOUT:
        print(text)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    write_output(path, text + "\n")


def what_ran(own_version: str, command: Sequence[str], *facts: str) -> str:
    """Returns the first line of a report: the program, how it ran, and versions."""
    versions = f"symm_cp {own_version}", f"torch {version('torch')}"
    return f"{shlex.join(command)}: {', '.join([*facts, *versions])}"


def shapes(text: str) -> list[tuple[int, ...]]:
    """Returns the numbers of each shape in "512x1024x512,8x8x8"."""
    found = [tuple(map(int, shape.split("x"))) for shape in text.split(",")]
    if min(map(min, found)) < 1:
        raise ValueError(text)
    return found


def size_text(nbytes: int) -> str:
    """Returns a number of bytes as text: `4 KiB`."""
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if nbytes >= 1 << power:
            return f"{nbytes / (1 << power):.4g} {unit}"
    return f"{nbytes} B"


def add_plot(parser: argparse.ArgumentParser) -> None:
    """Adds `--plot PATH`."""
    parser.add_argument(
        "--plot",
        type=Path,
        metavar="PATH",
        help="write plots: to this file (its name ends with .png, .pdf or .svg; several plots add "
        "theirs to it), or to this folder; needs matplotlib",
    )


def plot_file(path: Path, name: str, *, several: bool = False) -> Path:
    """Returns the file of a plot for `--plot PATH`; makes its folder."""
    if path.suffix.lower() in _PICTURES:
        file = path.with_stem(f"{path.stem}-{name}") if several else path
    else:
        file = path / f"{name}.png"
    file.parent.mkdir(parents=True, exist_ok=True)
    return file


class Deprecated(argparse.Action):
    """An older spelling of an option: it works, is not in the help, and warns once on stderr."""

    _said: ClassVar[set[str]] = set()

    def __init__(self, option_strings: list[str], dest: str, instead: str, **options: Any) -> None:
        self._instead = instead
        super().__init__(option_strings, dest, **{**options, "help": argparse.SUPPRESS})

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Stores the value as the newer option does."""
        setattr(namespace, self.dest, values)
        spelling = f"{parser.prog}: {option_string} is deprecated: use {self._instead}"
        if spelling not in self._said and not is_rank(os.environ):  # ranks get the same arguments
            print(spelling, file=sys.stderr)
        self._said.add(spelling)
