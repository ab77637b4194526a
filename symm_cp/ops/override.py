"""Our kernels instead of torch's, for the ops and devices (CUDA) that torch has kernels for."""

from __future__ import annotations

import functools
import itertools
import warnings
from types import TracebackType
from typing import Any

import torch
import torch.distributed._symmetric_memory as torch_symm_mem

from symm_cp import cuda, native
from symm_cp.cuda import plans
from symm_cp.group.hosts import apart_of
from symm_cp.group.memory import Group, StateKey, resolve
from symm_cp.ops.autocast import device_autocast
from symm_cp.ops.common import device_behind
from symm_cp.ops.op import Kernel, Op, declared

_installed: CudaOverride | None = None

# Devices of a group for which the message was printed that torch's kernels stay in use.
_ANNOUNCED: StateKey[set[torch.device]] = StateKey("override_announced")


def _serves(group: Group, device: torch.device) -> bool:
    """Whether our kernels run for a group: no check failed. Collective at the first call.

    Between hosts ours run unfused; torch's kernels cannot run there.
    """
    apart = apart_of(group, device)
    if apart is None or not apart.failed_check:
        return True
    announced = group.state(_ANNOUNCED, set)
    if device not in announced:
        announced.add(device)
        native.say(
            f"override_cuda_ops: torch's kernels stay in use for group {group.name!r} on {device}: "
            f"{apart.reason}"
        )
    return False


def or_torchs(op: Op) -> Kernel:
    """Returns a kernel of torch's op: ours, or torch's for groups that ours do not serve."""
    name, ours = op.name, op.kernel
    assert ours is not None
    name_of_torchs = name if name.startswith("_") else f"_{name}"
    arguments = getattr(torch.ops.symm_mem, name).default._schema.arguments
    group_name = [argument.name for argument in arguments].index("group_name")

    @functools.wraps(ours)
    def kernel(*args: Any, **kwargs: Any) -> Any:
        serves = _serves(resolve(args[group_name]), args[0].device)
        return (ours if serves else getattr(torch_symm_mem, name_of_torchs))(*args, **kwargs)

    return kernel


def as_on_device(op: Op) -> Kernel:
    """Returns the kernel that serves an op on the device of its arguments."""
    ours = op.kernel
    assert ours is not None
    if not op.replaces_torch:
        return ours
    with_torchs = or_torchs(op)

    @functools.wraps(ours)
    def kernel(*args: Any, **kwargs: Any) -> Any:
        kind = cuda.kind_for(args[0].device)
        of_torch = kind is not None and kind.torch_has_kernels
        return (with_torchs if of_torch else ours)(*args, **kwargs)

    return kernel


class CudaOverride:
    """Our kernels, installed; `undo()`, or the end of a `with` block, restores torch's."""

    def __init__(self, kinds: list[type[cuda.Device]]) -> None:
        self._library: torch.library.Library | None = torch.library.Library("symm_mem", "IMPL")
        self._plans: list[plans.Served] = []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that a kernel exists already
            ours = [op for op in declared() if op.replaces_torch]
            for op, kind in itertools.product(ours, kinds):
                self._plans.append(plans.serve(op.full_name, kind.dispatch_key, or_torchs=True))
        for (key, name), rule in device_autocast.items():
            if key.removeprefix("Autocast") in [kind.dispatch_key for kind in kinds]:
                self._library.impl(name, rule, key)

    def undo(self) -> None:
        """Restores torch's kernels; a second call does nothing."""
        global _installed
        if self._library is not None:
            for served in self._plans:
                served.undo()
            self._library._destroy()
            self._library = None
            _installed = None

    def __enter__(self) -> CudaOverride:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.undo()


def fake_kernel(ours: Kernel, torchs: str) -> Kernel:
    """Returns a fake kernel of torch's op: torch's own for devices where torch's kernel runs.

    `torchs` is its name in torch.distributed._symmetric_memory.
    """

    @functools.wraps(ours)
    def fake(*args: Any, **kwargs: Any) -> Any:
        kind = cuda.kind_for(device_behind(args[0]))
        of_torch = kind is not None and kind.torch_has_kernels and _installed is None
        return (getattr(torch_symm_mem, torchs) if of_torch else ours)(*args, **kwargs)

    return fake


def override_cuda_ops() -> CudaOverride:
    """Uses our kernels for those ops of `torch.ops.symm_mem` that torch has CUDA kernels for.

    The fused (scaled) matmuls and the low-contention collectives: copy engines move the bytes,
    streams signal, and calls in flight on a group do not disturb each other. Groups for which the
    self-test did not pass keep torch's kernels, with one line on stderr that says why. Call it on
    all ranks. Calling it again changes nothing. Returns an object with `undo()`, which is also a
    context manager. Raises `RuntimeError` where the driver does not load.
    """
    global _installed
    driver_level = native.load().symm_cp_driver
    kinds = [
        kind
        for kind in cuda.known()
        if kind.torch_has_kernels and driver_level(kind.driver.encode()) >= 0
    ]
    if not kinds:
        raise RuntimeError(f"override_cuda_ops: {native.error()}")
    if _installed is None:
        _installed = CudaOverride(kinds)
    return _installed
