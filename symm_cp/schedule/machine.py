"""Machines: what a kernel, a copy and a signal cost on them.

A machine is known by its makers' figures, or by curves that were measured on it (`symm-cp
calibrate`); a file in TOML holds either. Rates are per GPU (or CPU core) and direction, in bytes or
operations a second.

Published are NVIDIA's data sheets (dense bfloat16): H100 SXM 989 TFLOP/s, 80 GB, 3.35 TB/s, NVLink
4 of 900 GB/s in both directions; H200 the same with 141 GB and 4.8 TB/s; HGX B200 2250 TFLOP/s,
180 GB, 7.7 TB/s, NVLink 5 of 1.8 TB/s; GB200 NVL72 2500 TFLOP/s, 186 GB, 8 TB/s, 72 GPUs on one
NVLink. Between hosts: one 400 Gbit/s adapter for each GPU, as in DGX systems. What is reached of a
peak is an assumption: 0.75 for large matmuls and 0.65 for attention (FlashAttention-3, Shah et al.
2024, reports up to 0.75), 0.8 for links.
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
    """Seconds by size, from points that were measured.

    Between points the logarithms go straight; beyond the last one the rate stays that of the last
    two, and below the first one the time stays that of the first.
    """

    sizes: tuple[float, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        rising = all(a < b for a, b in zip(self.sizes, self.sizes[1:], strict=False))
        if not self.sizes or len(self.sizes) != len(self.seconds) or not rising:
            raise ValueError("a curve needs as many seconds as sizes, and sizes that grow")
        if self.sizes[0] <= 0 or min(self.seconds) <= 0:
            raise ValueError("a curve needs sizes and seconds above 0")

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


#: What a curve may be of, by operations or bytes; those of kernels have the dtype behind a dot, as
#: in "matmul.float32". "fresh" is memory that an op takes for its result, and touches first;
#: "remote" what a kernel takes longer that reads memory which a peer has just written.
#: "weight" is what a matmul takes for its second matrix, however many rows the first one has.
CURVES = ("matmul", "weight", "attention", "copy", "transfer", "reduce", "fresh", "remote")


@dataclass(frozen=True)
class Machine:
    """A kind of host. `curves` come before the figures."""

    name: str
    flops: float
    memory: float
    memory_rate: float
    nvlink: float
    network: float = 50e9
    gpus: int = 8
    matmul_reached: float = 0.75
    attention_reached: float = 0.65
    link_reached: float = 0.8
    kernel_seconds: float = 4e-6
    signal_seconds: float = 2e-6
    #: What a call of an op takes when there is next to nothing to compute or to move.
    calls: Mapping[str, float] = field(default_factory=dict, hash=False)
    curves: Mapping[str, Curve] = field(default_factory=dict, hash=False)

    def matmul(self, flops: float, dtype: str = "bfloat16", weight: float = 0.0) -> float:
        """Seconds of a matmul of so many operations, whose second matrix has `weight` bytes."""
        seconds = self._kernel("matmul", dtype, flops, self.matmul_reached)
        curve = self.curves.get(f"weight.{dtype}")
        if curve is not None:
            return seconds + curve(weight)
        return max(seconds, weight / self.memory_rate)

    def attention(self, flops: float, dtype: str = "bfloat16") -> float:
        """Seconds of an attention kernel of so many operations."""
        return self._kernel("attention", dtype, flops, self.attention_reached)

    def copy(self, nbytes: float) -> float:
        """Seconds of a copy within one's own memory, which it reads and writes."""
        return self._move("copy", nbytes, 2 * nbytes / self.memory_rate)

    def transfer(self, nbytes: float) -> float:
        """Seconds of a copy out of a peer's memory."""
        return self._move("transfer", nbytes, nbytes / (self.nvlink * self.link_reached))

    def reduce(self, nbytes: float, parts: int) -> float:
        """Seconds of a sum of so many parts of so many bytes."""
        return self._move("reduce", parts * nbytes, (parts + 1) * nbytes / self.memory_rate)

    def fresh(self, nbytes: float) -> float:
        """Seconds of new memory, over those of memory that was used before."""
        return self._move("fresh", nbytes, 0.0)

    def remote(self, nbytes: float) -> float:
        """Seconds that a kernel takes longer when what it reads is in a peer's memory."""
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
        Machine("h100", 989e12, 80e9, 3.35e12, 450e9),
        Machine("h200", 989e12, 141e9, 4.8e12, 450e9),
        Machine("b200", 2250e12, 180e9, 7.7e12, 900e9),
        Machine("gb200", 2500e12, 186e9, 8e12, 900e9, gpus=72),
    )
}

#: What a core of a server does about, for machines that were not calibrated.
TYPICAL_CPU = Machine(
    "typical CPU", 1e11, 64e9, 2e10, 1e10,
    matmul_reached=1.0, attention_reached=1.0, link_reached=1.0, kernel_seconds=1e-5,
    signal_seconds=1e-6,
)  # fmt: skip

_FIGURES = {field.name for field in fields(Machine)} - {"calls", "curves"}


def machine(name: str) -> Machine:
    """Returns a known machine, or one from a TOML file that says `like` which one it is else.

    Raises `ValueError` for a name that is neither, and for a file that is not of that kind.
    """
    if name in MACHINES:
        return MACHINES[name]
    path = Path(name)
    if not path.is_file():
        raise ValueError(
            f"--machine {name!r} is neither one of {', '.join(MACHINES)} nor a TOML file"
        )
    return from_toml(path.read_text(), name)


def from_toml(text: str, name: str) -> Machine:
    """Returns the machine that a file of that name describes; raises `ValueError`."""
    try:
        given = tomllib.loads(text)
        like = given.pop("like", "h100")
        calls = {op: float(seconds) for op, seconds in given.pop("calls", {}).items()}
        curves = {
            kind: Curve(tuple(curve["sizes"]), tuple(curve["seconds"]))
            for kind, curve in given.pop("curves", {}).items()
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{name}: {error}") from error
    unknown = [kind for kind in curves if kind.split(".")[0] not in CURVES]
    if like not in MACHINES or not given.keys() <= _FIGURES or unknown:
        raise ValueError(
            f"{name}: 'like' must be one of {', '.join(MACHINES)}, curves of "
            f"{', '.join(CURVES)}, the other keys of {', '.join(sorted(_FIGURES))}"
        )
    return replace(MACHINES[like], **given, calls=calls, curves=curves)


def to_toml(given: Machine) -> str:
    """Returns the text of a file that `machine` reads."""
    lines = [
        f'{name} = "{value}"' if isinstance(value, str) else f"{name} = {value!r}"
        for name in sorted(_FIGURES)
        for value in (getattr(given, name),)
    ]
    if given.calls:
        lines += ["", "[calls]"]
        lines += [f'"{op}" = {float(f"{seconds:.4g}")}' for op, seconds in given.calls.items()]
    for kind, curve in given.curves.items():
        lines += ["", f'[curves."{kind}"]']
        lines.append(f"sizes = {[float(size) for size in curve.sizes]}")
        lines.append(f"seconds = {[float(f'{second:.4g}') for second in curve.seconds]}")
    return "\n".join(lines) + "\n"
