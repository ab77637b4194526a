"""Hosts that a plan is made for: figures of their makers, and what of them is reached.

Rates are per GPU and direction, in bytes or operations a second. Peaks are NVIDIA's data sheets
(dense bfloat16): H100 SXM 989 TFLOP/s, 80 GB, 3.35 TB/s, NVLink 4 of 900 GB/s in both directions;
H200 the same with 141 GB and 4.8 TB/s; HGX B200 2250 TFLOP/s, 180 GB, 7.7 TB/s, NVLink 5 of
1.8 TB/s; GB200 NVL72 2500 TFLOP/s, 186 GB, 8 TB/s, 72 GPUs on one NVLink. Between hosts: one
400 Gbit/s adapter for each GPU, as in DGX systems. What is reached of a peak is an assumption: 0.75
for large matmuls and 0.65 for attention (FlashAttention-3, Shah et al. 2024, reports up to 0.75),
0.8 for links. A file of the same names (TOML) replaces any of it.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, fields, replace
from pathlib import Path


@dataclass(frozen=True)
class Machine:
    """A kind of host."""

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


MACHINES = {
    machine.name: machine
    for machine in (
        Machine("h100", 989e12, 80e9, 3.35e12, 450e9),
        Machine("h200", 989e12, 141e9, 4.8e12, 450e9),
        Machine("b200", 2250e12, 180e9, 7.7e12, 900e9),
        Machine("gb200", 2500e12, 186e9, 8e12, 900e9, gpus=72),
    )
}


def machine(name: str) -> Machine:
    """Returns a known machine, or one from a TOML file that says `like` which one it is else.

    Raises `ValueError` for a name that is neither, or a file with unknown keys.
    """
    if name in MACHINES:
        return MACHINES[name]
    path = Path(name)
    if not path.is_file():
        raise ValueError(
            f"--machine {name!r} is neither one of {', '.join(MACHINES)} nor a TOML file"
        )
    given = tomllib.loads(path.read_text())
    like = given.pop("like", "h100")
    known = {field.name for field in fields(Machine)}
    if like not in MACHINES or not given.keys() <= known:
        raise ValueError(
            f"{name}: 'like' must be one of {', '.join(MACHINES)}, the other keys of "
            f"{', '.join(sorted(known))}"
        )
    return replace(MACHINES[like], **given)
