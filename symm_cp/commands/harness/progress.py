"""A progress bar on stderr, or a few plain lines if stderr is not a terminal."""

from __future__ import annotations

import shutil
import sys
from typing import TextIO

_BAR = 24
_PLAIN_LINES = 10


class Progress:
    """Shows how many of `total` steps are done."""

    def __init__(self, total: int, out: TextIO | None = None) -> None:
        self._out = sys.stderr if out is None else out
        self._total = total
        self._done = 0
        self._shown = -1
        self._terminal = self._out.isatty()

    def advance(self, text: str) -> None:
        """Counts one more step as done, and shows `text`."""
        self._done += 1
        if self._terminal:
            filled = _BAR * self._done // self._total
            line = f"[{'#' * filled}{'.' * (_BAR - filled)}] {self._done}/{self._total} {text}"
            width = shutil.get_terminal_size().columns - 1
            self._write(f"\r\x1b[K{line[:width]}")
        elif (tenth := _PLAIN_LINES * self._done // self._total) > self._shown:
            self._shown = tenth
            self._write(f"{self._done}/{self._total} {text}\n")

    def extend(self, steps: int) -> None:
        """Adds steps to the total."""
        self._total += steps

    def close(self) -> None:
        """Removes the bar."""
        if self._terminal:
            self._write("\r\x1b[K")

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()
