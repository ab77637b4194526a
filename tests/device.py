"""Where the ops of a test run, which its marker ``devices`` says: ``@devices("cpu", "cuda")``.

cpu        (without a marker) as a user without a GPU does
simulated  CPU tensors through the CUDA runtime, over the stand-in of tests/cuda/driver.cpp
cuda       on GPUs, which several ranks may share; marked ``gpu``, and skipped where there is none

A test is repeated on each device that its marker names. What also runs on the CPU is repeated on
the simulator with ``pytest --all`` only, for the parameters of plain runs. The pool puts the device
in use on every rank; a function that makes tensors by a generator asks `name` for where they are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

import symm_cp
from symm_cp.context_parallel import layouts

NAMES = ("cpu", "simulated", "cuda")
devices = pytest.mark.devices

_in_use = "cpu"


def chosen() -> str:
    """The device in use on this rank, one of `NAMES`."""
    return _in_use


def name() -> str:
    """torch's name for it: the device of tensors that a test places itself."""
    return "cuda" if _in_use == "cuda" else "cpu"


@contextlib.contextmanager
def in_use(group: dist.ProcessGroup, seed: int, device: str = "cpu") -> Iterator[None]:
    """Inside, the ops of a rank run on this device, and new tensors are there."""
    global _in_use
    # Groups outlive tests: how an earlier one cut its sequences says nothing about this one.
    for records in (layouts._used, layouts._last_cut, layouts._cuts):
        records.clear()
    before, _in_use = _in_use, device
    try:
        with _ops_on(device, group.rank()):
            yield
    finally:
        _in_use = before


@contextlib.contextmanager
def _ops_on(device: str, rank: int) -> Iterator[None]:
    if device == "simulated":
        from tests.cuda.simulated import simulation

        with simulation():
            yield
    elif device == "cuda":
        gpu = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(gpu)
        with gpu, symm_cp.override_cuda_ops():
            yield
            torch.cuda.synchronize()
    else:
        yield
