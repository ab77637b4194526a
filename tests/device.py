"""Where the ranks of the tests compute: `pytest --device cpu|simulated|cuda`.

cpu        (the default) as a user without a GPU does
simulated  CPU tensors through the CUDA runtime, over the stand-in of tests/cuda/driver.cpp
cuda       on GPUs, which several ranks may share
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch

import symm_cp

CHOICES = ("cpu", "simulated", "cuda")
VARIABLE = "SYMM_CP_TEST_DEVICE"


def chosen() -> str:
    """What `--device` says, in the ranks too."""
    return os.environ.get(VARIABLE, "cpu")


def name() -> str:
    """The device of tensors that a test places itself."""
    return "cuda" if chosen() == "cuda" else "cpu"


def backend() -> str:
    """The process group's: gloo moves tensors of either device."""
    return "cpu:gloo,cuda:gloo" if chosen() == "cuda" else "gloo"


@contextlib.contextmanager
def gpu(rank: int) -> Iterator[torch.device]:
    """Inside, a rank's ops and new tensors are on its GPU, which others may share."""
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    with device, symm_cp.override_cuda_ops():
        yield device
        torch.cuda.synchronize()


@contextlib.contextmanager
def in_use(rank: int) -> Iterator[None]:
    """Inside, ops run on the chosen device, and new tensors are there."""
    if chosen() == "simulated":
        from tests.cuda.simulated import simulation

        with simulation():
            yield
    elif chosen() == "cuda":
        with gpu(rank):
            yield
    else:
        yield
