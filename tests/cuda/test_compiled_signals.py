"""The kernels that signal, as machine code of each kind of GPU: the memory order that they need."""

from __future__ import annotations

import re
from typing import Any

import pytest
from triton.backends.compiler import GPUTarget

from symm_cp import wire
from symm_cp.kernels import signals
from tests.cuda.test_compiled import compiled

ARCHITECTURES = pytest.mark.parametrize("architecture", [80, 90, 100])


def assembly(kernel: Any, types: dict[str, str], architecture: int, **constants: Any) -> str:
    target = GPUTarget("cuda", architecture, 32)
    made = compiled(kernel, types, {"BLOCK": 32, **constants}, target, num_warps=1)
    assert made.asm["cubin"]
    assert made.metadata.shared <= 256  # of the sum over a warp
    text: str = made.asm["ptx"]
    assert ".local" not in text, "registers spill"
    return text


@ARCHITECTURES
def test_a_signal_releases_what_was_written_before(architecture: int) -> None:
    text = assembly(signals.signal_kernel, {"bases": "*i64"}, architecture)
    assert re.findall(r"\batom\S*", text) == ["atom.global.sys.release.exch.b32"]


@ARCHITECTURES
@pytest.mark.parametrize("reset", [False, True])
def test_a_wait_acquires_what_the_peer_had_written(architecture: int, reset: bool) -> None:
    text = assembly(signals.wait_kernel, {"flags": "*i32"}, architecture, RESET=reset)
    atomics = re.findall(r"\batom\S*", text)
    assert atomics[0] == "atom.global.sys.acquire.add.u32"
    assert atomics[1:] == (["atom.global.sys.relaxed.exch.b32"] if reset else [])
    # The loop goes around the flag's load.
    assert re.search(r"\bbra\b", text)


@pytest.mark.parametrize(
    ("kernel", "arguments"),
    [
        (signals.signal_kernel, {"offset", "first", "count", "world_size", "value"}),
        (signals.wait_kernel, {"first", "count", "world_size", "needed"}),
    ],
)
def test_nothing_is_compiled_in_the_middle_of_training(kernel: Any, arguments: set[str]) -> None:
    """What changes from call to call is not specialised, as 1 and multiples of 16 would be."""
    assert {p.name for p in kernel.params if p.do_not_specialize} == arguments


def test_flags_are_where_the_contract_says() -> None:
    assert signals._PITCH.value * 4 == wire.FLAG_BYTES
