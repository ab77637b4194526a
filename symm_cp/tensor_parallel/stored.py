"""Reads parts of tensors in safetensors files without reading the whole tensors.

A model may hold several stored tensors as one (the experts of a layer); `Stacked` and `Joined` are
such tensors, and read only the requested part, too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

#: A range of each dimension.
Slices = tuple[slice, ...]


class Stored(Protocol):
    """A tensor that is read in parts."""

    @property
    def shape(self) -> list[int]:
        """The shape of the whole."""
        ...

    def read(self, region: Slices) -> torch.Tensor:
        """Returns a part: `whole[region]`."""
        ...


@dataclass
class Single:
    """One tensor of a file."""

    file: Any
    name: str

    @property
    def shape(self) -> list[int]:
        """The shape of the whole."""
        return list(self.file.get_slice(self.name).get_shape())

    def read(self, region: Slices) -> torch.Tensor:
        """Returns a part."""
        part: torch.Tensor = (
            self.file.get_slice(self.name)[region] if region else self.file.get_tensor(self.name)
        )
        return part


@dataclass
class Joined:
    """Two-dimensional tensors, concatenated along dimension 0."""

    parts: Sequence[Stored]

    @property
    def shape(self) -> list[int]:
        """The shape of the whole."""
        return [sum(part.shape[0] for part in self.parts), *self.parts[0].shape[1:]]

    def read(self, region: Slices) -> torch.Tensor:
        """Returns a part."""
        first, *others = region
        pieces, begin = [], 0
        for part in self.parts:
            length = part.shape[0]
            start, stop = max(first.start - begin, 0), min(first.stop - begin, length)
            if start < stop or length == 0:
                pieces.append(part.read((slice(start, max(start, stop)), *others)))
            begin += length
        if not pieces:
            pieces = [self.parts[0].read((slice(0, 0), *others))]
        return torch.cat(pieces)


@dataclass
class Stacked:
    """Tensors of one shape, along a new first dimension."""

    parts: Sequence[Stored]

    @property
    def shape(self) -> list[int]:
        """The shape of the whole."""
        return [len(self.parts), *self.parts[0].shape]

    def read(self, region: Slices) -> torch.Tensor:
        """Returns a part."""
        first, *others = region
        chosen = self.parts[first]
        if not chosen:
            return self.parts[0].read(tuple(others))[None][:0]
        return torch.stack([part.read(tuple(others)) for part in chosen])


#: How checkpoints name the weights of single experts: for an ending of a parameter's name, the
#: endings of the tensors of expert {} that are joined.
_EXPERTS: dict[str, list[tuple[str, ...]]] = {
    "experts.gate_up_proj": [
        ("experts.{}.w1.weight", "experts.{}.w3.weight"),
        ("experts.{}.gate_proj.weight", "experts.{}.up_proj.weight"),
    ],
    "experts.down_proj": [("experts.{}.w2.weight",), ("experts.{}.down_proj.weight",)],
}
#: Other names that transformers has for modules in files and in models.
_RENAMED = [(r"\.mlp\.(gate|experts)\.", r".block_sparse_moe.\1.")]


class Folder:
    """The tensors of all safetensors files of a folder, by name."""

    def __init__(self, folder: str | Path) -> None:
        try:
            from safetensors import safe_open
        except ImportError as error:
            raise ImportError(
                "load: reading a checkpoint needs `pip install safetensors`"
            ) from error
        self.path = Path(folder)
        index = self.path / "model.safetensors.index.json"
        if index.exists():
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        else:
            names = sorted(path.name for path in self.path.glob("*.safetensors"))
        if not names:
            raise FileNotFoundError(f"load: there are no safetensors files in {self.path}")
        files: list[Any] = [safe_open(str(self.path / name), "pt") for name in names]
        self._files = {key: file for file in files for key in file.keys()}  # noqa: SIM118

    def find(self, name: str, prefix: str) -> Stored | None:
        """Returns the tensor of this name, or of a name by which transformers would find it.

        `prefix` is the name of the base model, which files of base models lack.
        """
        shorter = name.removeprefix(f"{prefix}.") if prefix else name
        for each in dict.fromkeys([name, shorter, f"{prefix}.{name}"]):
            for pattern, replacement in [("$^", ""), *_RENAMED]:
                renamed = re.sub(pattern, replacement, each)
                if found := self._single(renamed) or self._experts(renamed):
                    return found
        return None

    def _single(self, name: str) -> Stored | None:
        return Single(self._files[name], name) if name in self._files else None

    def _experts(self, name: str) -> Stored | None:
        for ending, layouts in _EXPERTS.items():
            if not name.endswith(ending):
                continue
            start = name.removesuffix(ending)
            for layout in layouts:
                experts: list[Stored] = []
                while all(start + each.format(len(experts)) in self._files for each in layout):
                    names = [start + each.format(len(experts)) for each in layout]
                    parts = [Single(self._files[each], each) for each in names]
                    experts.append(Joined(parts) if len(parts) > 1 else parts[0])
                if experts:
                    return Stacked(experts)
        return None
