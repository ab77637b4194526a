"""The kernels that signal, as machine code of each kind of GPU: the memory order that they need."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

import pytest
import torch

from symm_cp.cuda.kernels import signals
from symm_cp.native import wire
from tests.cuda.launches import recorded

ARCHITECTURES = pytest.mark.parametrize("architecture", [80, 90, 100])


def signal(
    offset: int = 64, first: int = 1, count: int = 3, value: int = 7, ranks: int = 4
) -> None:
    signals.signal(torch.zeros(ranks, dtype=torch.int64), offset, first, count, value)


def wait(
    first: int = 1, count: int = 3, needed: int = 7, ranks: int = 4, *, reset: bool = False
) -> None:
    flags = torch.zeros(ranks * 16, dtype=torch.int32)[::16]
    signals.wait(flags, first, count, needed, reset=reset)


def assembly(launch: Callable[[], None], architecture: int) -> str:
    with recorded(architecture) as launches:
        launch()
    made = launches[0].compiled(architecture)
    assert made.asm["cubin"]
    assert made.metadata.shared <= 256  # of the sum over a warp
    text: str = made.asm["ptx"]
    assert ".local" not in text, "registers spill"
    return text


@ARCHITECTURES
def test_a_signal_releases_what_was_written_before(architecture: int) -> None:
    text = assembly(signal, architecture)
    assert re.findall(r"\batom\S*", text) == ["atom.global.sys.release.exch.b32"]


@ARCHITECTURES
@pytest.mark.parametrize("reset", [False, True])
def test_a_wait_acquires_what_the_peer_had_written(architecture: int, reset: bool) -> None:
    text = assembly(partial(wait, reset=reset), architecture)
    atomics = re.findall(r"\batom\S*", text)
    assert atomics[0] == "atom.global.sys.acquire.add.u32"
    assert atomics[1:] == (["atom.global.sys.relaxed.exch.b32"] if reset else [])
    # The loop goes around the flag's load.
    assert re.search(r"\bbra\b", text)


def test_nothing_is_compiled_in_the_middle_of_training() -> None:
    """Arguments that change from call to call are not specialised on 1 and multiples of 16."""
    with recorded() as launches:
        for number in (1, 2, 16, 17, wire.LAST_EPOCH):
            signal(value=number)
            wait(needed=number)
        for number in (1, 2, 16, 17):
            signal(offset=number * 64, first=number, count=number, ranks=number + 1)
            wait(first=number, count=number, ranks=number + 1)
    assert (
        len({launch.variant for launch in launches if launch.kernel is signals.signal_kernel}) == 1
    )
    assert len({launch.variant for launch in launches if launch.kernel is signals.wait_kernel}) == 1


def test_flags_are_where_the_contract_says() -> None:
    assert signals._PITCH.value * 4 == wire.FLAG_BYTES
