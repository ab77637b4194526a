"""Text as bytes, and batches of it."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch

_MAX_BYTES = 8 << 20  # limit for the standard library's text: more than a demo reads


def read_text(path: Path | None) -> tuple[torch.Tensor, str]:
    """Returns a text as uint8, and its name; without a path, the standard library's source.

    Raises `ValueError` for a file that cannot be read, and if the library's source is missing.
    """
    if path is not None:
        try:
            content = path.read_bytes()
        except OSError as error:
            raise ValueError(f"--text {path}: cannot be read: {error.strerror}") from error
        return _as_tensor(content), str(path)
    folder = Path(sysconfig.get_paths()["stdlib"])
    content = b""
    for source in sorted(folder.glob("*.py")):
        content += source.read_bytes()
        if len(content) >= _MAX_BYTES:
            break
    if not content:
        raise ValueError(f"no source of the standard library in {folder}: use --text FILE")
    return _as_tensor(content), "source of Python's standard library"


def _as_tensor(content: bytes) -> torch.Tensor:
    if not content:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def batches(text: torch.Tensor, steps: int, seq: int, batch: int, seed: int) -> torch.Tensor:
    """Returns (steps, S + 1, B) bytes: windows of the text, chosen by the seed.

    Inputs are [:, :-1], targets [:, 1:]. The text must be longer than `seq`.
    """
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - seq, (steps, 1, batch), generator=generator)
    return text[starts + torch.arange(seq + 1).view(1, -1, 1)].long()
