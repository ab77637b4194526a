"""What launches of Triton kernels would compile, recorded without a GPU."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import driver

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


def target(capability: int) -> GPUTarget:
    return GPUTarget("cuda", capability, 32)


class _Driver:
    """A stand-in for a GPU, which has a compute capability and nothing else."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_target(self) -> GPUTarget:
        return target(self._capability)

    def get_current_device(self) -> int:
        return self._capability  # Triton has a cache for each device

    def get_current_stream(self, device: int) -> int:
        return 0


@dataclass(frozen=True)
class Resources:
    """The resources of a compiled kernel; `stack` (bytes) holds spilled registers."""

    registers: int
    stack: int
    shared: int


@dataclass(frozen=True)
class Launch:
    """One launch; launches that need different code differ in `variant`."""

    kernel: Any
    variant: str
    details: dict[str, Any]

    def compiled(self, capability: int) -> Any:
        """Compiles the launched kernel with Triton, down to machine code."""
        source = ASTSource(
            self.kernel, self.details["signature"], self.details["constants"],
            self.details["configs"][0],
        )  # fmt: skip
        names = ("num_warps", "num_stages", "enable_fp_fusion")
        options = {name: self.details[name] for name in names}
        return triton.compile(source, target=target(capability), options=options)


@contextmanager
def recorded(capability: int = 90) -> Iterator[list[Launch]]:
    """Inside, launches are recorded and nothing is compiled; tensors may be on the CPU."""
    launches: list[Launch] = []

    def hook(*, key: str, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        launches.append(Launch(fn.jit_function, key, compile))
        return True  # compile nothing, launch nothing

    before = driver._active
    driver.set_active(_Driver(capability))  # type: ignore[arg-type]
    previous, knobs.runtime.jit_cache_hook = knobs.runtime.jit_cache_hook, hook
    try:
        yield launches
    finally:
        knobs.runtime.jit_cache_hook = previous
        driver._active = before


def resources(binary: bytes, folder: Path) -> Resources:
    """Returns the resources of the only kernel of a binary."""
    path = folder / "kernel.cubin"
    path.write_bytes(binary)
    command = [str(TOOLS / "cuobjdump"), "-res-usage", str(path)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    used = {name: int(value) for name, value in re.findall(r"(REG|STACK|SHARED):(\d+)", text)}
    return Resources(used["REG"], used["STACK"], used["SHARED"])
