"""Machines: what kernels, copies and signals cost on them.

A machine is described by its vendor's figures, or by curves measured on it (`symm-cp calibrate`); a
TOML file holds either. Rates are per GPU (or CPU core) and direction, in bytes or operations per
second.

The figures are from NVIDIA's data sheets (dense bfloat16): H100 SXM 989 TFLOP/s, 80 GB, 3.35 TB/s,
NVLink 4 with 900 GB/s in both directions together; H200 the same with 141 GB and 4.8 TB/s; HGX B200
2250 TFLOP/s, 180 GB, 7.7 TB/s, NVLink 5 with 1.8 TB/s; GB200 NVL72 2500 TFLOP/s, 186 GB, 8 TB/s, 72
GPUs on one NVLink. Between hosts: one 400 Gbit/s adapter per GPU, as in DGX systems. The share of a
peak that is reached is an assumption: 0.65 for attention (FlashAttention-3, Shah et al. 2024,
reports up to 0.75), 0.8 for links.

GPUs compute products in *tiles*, one on a multiprocessor at a time, so a shard with fewer tiles
than the GPU has multiprocessors takes as long as a shard with a tile for each (wave
quantization, as NVIDIA's guide to matrix multiplication calls it). The tiles and the share of 0.65
were fitted to ten shapes that others have measured on 8 H100 (`tests/test_tuning.py`).
"""

from __future__ import annotations

import bisect
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path


@dataclass(frozen=True)
class Curve:
    """Seconds by size, from measured points.

    Linear in the logarithms between points. Beyond the last point the last point's rate
    holds; below the first point its time.
    """

    sizes: tuple[float, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        rising = all(a < b for a, b in zip(self.sizes, self.sizes[1:], strict=False))
        if not self.sizes or len(self.sizes) != len(self.seconds) or not rising:
            raise ValueError("a curve must have as many seconds as sizes, and increasing sizes")
        if self.sizes[0] <= 0 or min(self.seconds) <= 0:
            raise ValueError("a curve must have positive sizes and seconds")

    def __call__(self, size: float) -> float:
        """Returns the seconds that `size` takes."""
        if size <= 0:
            return 0.0
        if size <= self.sizes[0] or len(self.sizes) == 1:
            return self.seconds[0] * max(1.0, size / self.sizes[0])
        if size >= self.sizes[-1]:
            return self.seconds[-1] * size / self.sizes[-1]
        right = bisect.bisect_left(self.sizes, size)
        left = right - 1
        part = math.log(size / self.sizes[left]) / math.log(self.sizes[right] / self.sizes[left])
        return self.seconds[left] * math.exp(
            part * math.log(self.seconds[right] / self.seconds[left])
        )


#: Tiles of products: rows, columns, and speed relative to the first tile. Libraries take smaller
#: tiles where large tiles would leave multiprocessors idle.
_TILES = ((128, 256, 1.0), (128, 128, 0.8), (64, 128, 0.5))

#: The kinds of curves, over operations or bytes. Curves of kernels are named with the dtype, as in
#: "matmul.float32". "fresh": the extra cost of first touching new memory for a result. "remote":
#: the extra time of a kernel that reads memory which a peer has just written. "weight": the time
#: that a matmul spends on its second matrix, independent of the rows of the first.
CURVES = ("matmul", "weight", "attention", "copy", "transfer", "reduce", "fresh", "remote")


@dataclass(frozen=True)
class Machine:
    """A kind of host. A curve, where there is one, replaces the figures."""

    name: str
    flops: float
    memory: float
    memory_rate: float
    nvlink: float
    network: float = 50e9
    gpus: int = 8
    multiprocessors: int = 0
    matmul_reached: float = 0.65
    attention_reached: float = 0.65
    link_reached: float = 0.8
    kernel_seconds: float = 4e-6
    signal_seconds: float = 2e-6
    #: The fixed cost of a call of each op: its time when there is almost nothing to do.
    calls: Mapping[str, float] = field(default_factory=dict, hash=False)
    curves: Mapping[str, Curve] = field(default_factory=dict, hash=False)

    def matmul(self, flops: float, dtype: str = "bfloat16", weight: float = 0.0) -> float:
        """Seconds of a matmul of `flops` operations whose second matrix has `weight` bytes."""
        seconds = self._kernel("matmul", dtype, flops, self.matmul_reached)
        curve = self.curves.get(f"weight.{dtype}")
        if curve is not None:
            return seconds + curve(weight)
        return max(seconds, weight / self.memory_rate)

    def product(
        self, rows: int, inner: int, columns: int, dtype: str = "bfloat16", item: int = 2
    ) -> float:
        """Seconds of a matmul of `rows` x `inner` with `inner` x `columns`, `item` bytes each."""
        weight = inner * columns * item
        if not self.multiprocessors or self.curves:
            return self.matmul(2.0 * rows * inner * columns, dtype, weight)
        rate = self.flops * self.matmul_reached / self.multiprocessors
        waves = (
            math.ceil(math.ceil(rows / height) * math.ceil(columns / width) / self.multiprocessors)
            * (2.0 * height * width * inner / (rate * speed))
            for height, width, speed in _TILES
        )
        moved = (weight + rows * (inner + columns) * item) / self.memory_rate
        return self.kernel_seconds + max(min(waves), moved)

    def attention(self, flops: float, dtype: str = "bfloat16") -> float:
        """Seconds of an attention kernel of `flops` operations."""
        return self._kernel("attention", dtype, flops, self.attention_reached)

    def copy(self, nbytes: float) -> float:
        """Seconds of a copy within local memory."""
        return self._move("copy", nbytes, 2 * nbytes / self.memory_rate)

    def transfer(self, nbytes: float) -> float:
        """Seconds of a copy from a peer's memory."""
        return self._move("transfer", nbytes, nbytes / (self.nvlink * self.link_reached))

    def reduce(self, nbytes: float, parts: int) -> float:
        """Seconds of a sum of `parts` parts of `nbytes` bytes each."""
        return self._move("reduce", parts * nbytes, (parts + 1) * nbytes / self.memory_rate)

    def fresh(self, nbytes: float) -> float:
        """Extra seconds of writing new memory compared with memory used before."""
        return self._move("fresh", nbytes, 0.0)

    def remote(self, nbytes: float) -> float:
        """Extra seconds of a kernel that reads a peer's memory."""
        return self._move("remote", nbytes, 0.0)

    def _kernel(self, kind: str, dtype: str, flops: float, reached: float) -> float:
        curve = self.curves.get(f"{kind}.{dtype}")
        return curve(flops) if curve is not None else flops / (self.flops * reached)

    def _move(self, kind: str, nbytes: float, seconds: float) -> float:
        curve = self.curves.get(kind)
        return curve(nbytes) if curve is not None else seconds


MACHINES = {
    machine.name: machine
    for machine in (
        Machine("h100", 989e12, 80e9, 3.35e12, 450e9, multiprocessors=132),
        Machine("h200", 989e12, 141e9, 4.8e12, 450e9, multiprocessors=132),
        Machine("b200", 2250e12, 180e9, 7.7e12, 900e9, multiprocessors=148),
        Machine("gb200", 2500e12, 186e9, 8e12, 900e9, gpus=72, multiprocessors=152),
    )
}

# Matmul libraries rearrange the second matrix in each call, wide numbers more slowly.
_WEIGHT_RATES = {"float64": 1e10, "float32": 1e10, "bfloat16": 25e9, "float16": 25e9}

#: About the rates of one server core, for machines that were not calibrated.
TYPICAL_CPU = Machine(
    "typical CPU", 1e11, 64e9, 2e10, 1e10,
    matmul_reached=1.0, attention_reached=1.0, link_reached=1.0, kernel_seconds=1e-5,
    signal_seconds=1e-6,
    curves={f"weight.{dtype}": Curve((1.0,), (1 / rate,)) for dtype, rate in _WEIGHT_RATES.items()},
)  # fmt: skip

_FIGURES = {field.name for field in fields(Machine)} - {"calls", "curves"}


def machine(name: str) -> Machine:
    """Returns a known machine, or one from a TOML file.

    In the file, `like` names the known machine that provides the values that the file leaves out.
    Raises `ValueError` for a name that is neither, and for an invalid file.
    """
    if name in MACHINES:
        return MACHINES[name]
    path = Path(name)
    if not path.is_file():
        raise ValueError(f"--machine {name!r} must be one of {', '.join(MACHINES)}, or a TOML file")
    return from_toml(path.read_text(), name)


def from_toml(text: str, name: str) -> Machine:
    """Returns the machine that `text` describes; raises `ValueError`, naming the file `name`."""
    try:
        figures = tomllib.loads(text)
        like = figures.pop("like", "h100")
        calls = {op: float(seconds) for op, seconds in figures.pop("calls", {}).items()}
        curves = {
            kind: Curve(tuple(curve["sizes"]), tuple(curve["seconds"]))
            for kind, curve in figures.pop("curves", {}).items()
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{name}: {error}") from error
    unknown = [kind for kind in curves if kind.split(".")[0] not in CURVES]
    if like not in MACHINES or not figures.keys() <= _FIGURES or unknown:
        raise ValueError(
            f"{name}: 'like' must be one of {', '.join(MACHINES)}; curves must be among "
            f"{', '.join(CURVES)}; other keys among {', '.join(sorted(_FIGURES))}"
        )
    return replace(MACHINES[like], **figures, calls=calls, curves=curves)


def to_toml(machine: Machine) -> str:
    """Returns the text of a file from which `from_toml` makes the machine."""
    lines = [
        f'{name} = "{value}"' if isinstance(value, str) else f"{name} = {value!r}"
        for name in sorted(_FIGURES)
        for value in (getattr(machine, name),)
    ]
    if machine.calls:
        lines += ["", "[calls]"]
        lines += [f'"{op}" = {float(f"{seconds:.4g}")}' for op, seconds in machine.calls.items()]
    for kind, curve in machine.curves.items():
        lines += ["", f'[curves."{kind}"]']
        lines.append(f"sizes = {[float(size) for size in curve.sizes]}")
        lines.append(f"seconds = {[float(f'{second:.4g}') for second in curve.seconds]}")
    return "\n".join(lines) + "\n"
