"""Registers the declared parts of ops (op.py) with torch."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed._symmetric_memory as torch_symm_mem

from symm_cp import cuda, native
from symm_cp.cuda import plans
from symm_cp.ops import debug_modes
from symm_cp.ops.autocast import register_autocast
from symm_cp.ops.common import device_kernels, keys_of_ours, libraries
from symm_cp.ops.compiled import called_in_order
from symm_cp.ops.error_reports import channel_of
from symm_cp.ops.op import (
    ONE_BY_ONE,
    TORCHS,
    BackwardOp,
    Composite,
    Gradient,
    GradientByHand,
    NoGradient,
    Op,
    declared,
)
from symm_cp.ops.override import as_on_device, fake_kernel, or_torchs
from symm_cp.ops.transforms import register_gradient, register_no_gradient, register_vmap
from symm_cp.ops.unsupported import refuse_without_memory
from symm_cp.ops.unused_results import keep_calls


def register() -> None:
    """Registers all declared ops; a part that is missing is left out."""
    for op in declared():
        _define(op)
    for op in declared():
        _register(op)
    debug_modes.register(declared())
    _check_ranks_of_pads()


def register_one(op: Op) -> None:
    """Registers an op that was declared after the import."""
    _define(op)
    _register(op)
    debug_modes.register([op])
    try:
        native.load()
    except native.BuildError:
        _refuse_without_native(op)
    else:
        _run_by_plans(op)


def _define(op: Op) -> None:
    if op.schema not in (None, TORCHS):
        libraries(op.namespace).ops.define(op.name + op.schema)


def _register(op: Op) -> None:
    _register_kernels(op)
    _register_fake(op)
    _register_gradient(op)
    if op.functional is not None:
        libraries(op.namespace).ops.impl(op.name, op.functional, "Functionalize")
    if op.autocast is not None:
        register_autocast(op)
    if op.vmap is ONE_BY_ONE:
        register_vmap(op)
    refuse_without_memory(op)


def _check_ranks_of_pads() -> None:
    """Makes handles refuse the signal pad of a rank that does not exist, as newer torch does.

    torch would read past its list of addresses, and the tensor that it returns end the process.
    """
    kind: Any = torch_symm_mem._SymmetricMemory
    original = kind.get_signal_pad

    @functools.wraps(original)
    def get_signal_pad(self: Any, rank: int, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not 0 <= rank < self.world_size:
            raise RuntimeError(
                f"get_signal_pad: {rank=} is not in a group of {self.world_size} ranks"
            )
        pad: torch.Tensor = original(self, rank, *args, **kwargs)
        return pad

    kind.get_signal_pad = get_signal_pad


def register_plans() -> None:
    """Runs ops by plans; kernels in Python run calls without a plan."""
    plans.begin()
    for op in declared():
        _run_by_plans(op)


def _run_by_plans(op: Op) -> None:
    if _is_planned(op):
        for key in [*_keys_of_ours(op), *([] if op.native else ["CPU"])]:
            plans.serve(op.full_name, key, free=op.free_places)
    name, key, done = op.full_name.encode(), "AutogradCPU" if _only_on_cpu(op) else "Autograd", 1
    background = channel_of(op.name_in_errors) == "async"
    if isinstance(op.gradient, BackwardOp):
        backward = f"{op.namespace}::{op.gradient.name}"
        once = op.gradient.once
        done = native.load().symm_cp_backward_op(name, backward.encode(), once, background)
    elif _is_gated(op):
        composite = isinstance(op.gradient, Composite)
        done = native.load().symm_cp_gate(name, key.encode(), background, composite)
    if not done:
        raise RuntimeError(f"symm_cp: {op.full_name} cannot be registered for {key}")


def register_without_native() -> None:
    """Makes ops with native kernels raise the reason why the native part is missing."""
    for op in declared():
        _refuse_without_native(op)


def _refuse_without_native(op: Op) -> None:
    def refuses(*args: Any, **named: Any) -> Any:
        native.load()

    planned = _is_planned(op)
    for key in [
        *(_keys_of_ours(op) if planned else []),
        *(["CPU"] if op.native or planned else []),
    ]:
        libraries(op.namespace).ops.impl(op.name, refuses, key)


def _register_kernels(op: Op) -> None:
    if op.kernel is None:
        return
    planned = _is_planned(op)
    lib, in_python = libraries(op.namespace)
    arguments = str(op.overload._schema).removeprefix(op.full_name)
    if op.native or planned:
        # csrc/ops/kernels.h calls it in groups that span hosts, in torch's test mode, and where
        # streams serve CPU tensors in tests; csrc/plan/plan.h where there is no plan.
        in_python.define(op.name + arguments)
        in_python.impl(op.name, op.kernel, "CPU")
    if not op.native and not planned:
        lib.impl(op.name, op.kernel, "CPU")
    if planned:
        in_python.define(f"{op.name}.recorded{arguments}")
        in_python.impl(f"{op.name}.recorded", plans.recorded(as_on_device(op)), "CPU")
    if op.cpu_only:
        return
    if op.replaces_torch:
        device_kernels[op.name] = op.kernel
        in_python.define(f"{op.name}.or_torchs{arguments}")
        in_python.impl(f"{op.name}.or_torchs", or_torchs(op), "CPU")


def _is_planned(op: Op) -> bool:
    return op.kernel is not None and not op.cpu_only


def _is_gated(op: Op) -> bool:
    """Whether calls that record no gradient pass a native gate (csrc/ops/autograd_gate.cpp)."""
    recorded = isinstance(op.gradient, Gradient | NoGradient | GradientByHand | Composite)
    return recorded and (op.native or _is_planned(op)) and not op.one_sided


def _only_on_cpu(op: Op) -> bool:
    """Whether torch has kernels of an op elsewhere, whose results have no gradient."""
    return isinstance(op.gradient, NoGradient) and op.schema == TORCHS


def _keys_of_ours(op: Op) -> list[str]:
    """Returns the dispatch keys of the devices on which only we have kernels of an op."""
    return [
        device.dispatch_key
        for device in cuda.known()
        if not (op.replaces_torch and device.torch_has_kernels)
    ]


def _register_fake(op: Op) -> None:
    if op.fake is None:
        return
    fake = fake_kernel(op.fake, op.torchs_fake) if op.torchs_fake else op.fake
    fake = called_in_order(op, fake)
    lib = libraries(op.namespace).ops
    keep_calls(op, lib)
    if op.mixes_devices:
        torch.library.register_fake(op.full_name, fake, lib=lib)
    else:
        lib.impl(op.name, fake, "Meta", allow_override=True)


def _register_gradient(op: Op) -> None:
    lib, in_python = libraries(op.namespace)
    library = in_python if _is_gated(op) else lib
    if isinstance(op.gradient, Gradient):
        register_gradient(op, *op.gradient, library=library)
    elif isinstance(op.gradient, NoGradient):
        keys = [f"Autograd{key}" for key in keys_of_ours()] if _only_on_cpu(op) else ["Autograd"]
        for key in keys:
            gated = _is_gated(op) and key in ("Autograd", "AutogradCPU")
            library = in_python if gated else lib
            register_no_gradient(op, op.gradient.instead, key=key, library=library)
    elif isinstance(op.gradient, Composite):
        library.impl(op.name, op.kernel, "Autograd")
    elif isinstance(op.gradient, GradientByHand):
        library.impl(op.name, op.gradient.kernel, "Autograd", with_keyset=op.gradient.with_keyset)
