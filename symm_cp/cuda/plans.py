"""Records calls of ops, so that later calls like them run without Python.

Settings and the shapes, dtypes and layouts of its arguments determine the work of a call. So the
second call of a kind is recorded while Python makes it: its exchanges, or the commands and operands
of its launches on streams, and the ops that its kernels call (`TorchDispatchMode` sees these). From
then on csrc/plan/plans.cpp replays the record. Code that changes something on which such a call
depends must call `native.drop_plans`. Python still makes calls in captures, in place, in debug
mode, and calls that draw random numbers.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from symm_cp import env, native
from symm_cp.cuda.base import Device, DeviceWorkspace
from symm_cp.cuda.workspaces import give_up_on, hold
from symm_cp.native import wire
from symm_cp.runtime.lowering import Kernel

P = ParamSpec("P")
R = TypeVar("R")

_OUTSIDE = -1  # outside of all kernels


class _Here(threading.local):
    """The current recording of this thread."""

    recording: Recording | None = None
    kernel: int = _OUTSIDE


_here = _Here()


def current() -> Recording | None:
    """Returns the recording of this thread's current call; None if it is not recorded."""
    return _here.recording


#: Ops through which tolist() and numpy() read values; they call no other op.
_READERS = {torch.ops.aten.resolve_conj.default, torch.ops.aten.resolve_neg.default}


@functools.cache
def _consists_of_others(func: Any) -> bool:
    """Whether torch carries an op out by calling other ops on all devices."""
    own = any(func.has_kernel_for_dispatch_key(key) for key in ("CPU", "CUDA", "PrivateUse1"))
    return func.namespace == "aten" and func not in _READERS and func._can_decompose() and not own


class Recording(TorchDispatchMode):
    """The recording of a call, which is made inside its `with` block."""

    def __init__(self, handle: int) -> None:
        super().__init__()
        self._handle = ctypes.c_void_p(handle)
        self._glue: Any = native.load_glue()

    def __enter__(self) -> Any:
        _here.recording, _here.kernel = self, _OUTSIDE
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        _here.recording = None
        super().__exit__(*error)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Carries out an op, and records it.

        An op that consists of others is recorded as those: their tags tell what they read.
        """
        kwargs, before = kwargs or {}, _here.recording
        if _consists_of_others(func):
            super().__enter__()
            try:
                return func.decompose(*args, **kwargs)
            finally:
                super().__exit__(None, None, None)
        _here.recording = None  # a fused op inside is a separate call
        self._glue.symm_cp_plan_before_op(self._handle)
        try:
            result = func(*args, **kwargs)
        finally:
            _here.recording = before
        name, overload = func._schema.name, func._schema.overload_name
        self._glue.symm_cp_plan_ran(
            self._handle, _here.kernel, name.encode(), overload.encode(), args, kwargs, result
        )
        return result

    def refuse(self, reason: str) -> None:
        """Leaves this call, and others like it, to Python."""
        self._glue.symm_cp_plan_refuse(self._handle, reason.encode())

    def launch(
        self,
        workspace: DeviceWorkspace,
        epoch: int,
        lanes: ctypes.Array[ctypes.c_void_p],
        operands: ctypes.Array[ctypes.c_void_p],
        call_name: bytes,
    ) -> None:
        """Begins a launch; see `Launch`."""
        device = workspace.device
        if type(device).in_graph_tree is not Device.in_graph_tree:
            # The warm-up call of a graph makes the workspaces of captured calls.
            self._glue.symm_cp_plan_ask(self._handle, device.in_graph_tree)
        self._glue.symm_cp_plan_launch(
            *(self._handle, ctypes.c_void_p(workspace.handle), workspace.memory),
            *(ctypes.byref(workspace.layout), epoch, lanes, operands, len(operands), call_name),
            *(workspace, functools.partial(_failed, workspace)),
        )

    def commands(self, commands: ctypes.Array[wire.Command]) -> None:
        """Records commands that were issued."""
        self._glue.symm_cp_plan_commands(self._handle, commands, len(commands))

    def numbered(self, kernel: Kernel, lane: int) -> Kernel:
        """Returns a kernel whose ops are recorded when it runs, perhaps in another thread."""
        number = self._glue.symm_cp_plan_kernel(self._handle, lane)

        @functools.wraps(kernel)
        def run(index: int) -> Any:
            before = _here.recording, _here.kernel
            _here.recording, _here.kernel = self, number
            try:
                return kernel(index)
            finally:
                _here.recording, _here.kernel = before

        return run

    def end_launch(self) -> None:
        """Ends a launch."""
        self._glue.symm_cp_plan_end_launch(self._handle)

    def call(self, function: Callable[[list[torch.Tensor]], R], given: list[torch.Tensor]) -> R:
        """Calls a function that the plan will call again."""
        with _hidden():
            result = function(given)
        self._glue.symm_cp_plan_called(self._handle, _here.kernel, function, given, result)
        return result

    def counts_as_attention(self) -> None:
        """Makes later calls count as runs of attention: see `count_attention_run`."""
        self._glue.symm_cp_plan_counts(self._handle)

    def constant(self, tensor: torch.Tensor) -> None:
        """Notes that a tensor of the kernel has the same values in all calls with the same key."""
        self._glue.symm_cp_plan_constant(self._handle, tensor)


@contextlib.contextmanager
def _hidden() -> Iterator[None]:
    """Inside, this thread records nothing."""
    before, _here.recording = _here.recording, None
    try:
        with torch._C._DisableTorchDispatch():
            yield
    finally:
        _here.recording = before


def in_python(function: Callable[[list[torch.Tensor]], R], given: list[torch.Tensor]) -> R:
    """Calls a function of tensors that works without ops of torch, such as Triton's kernels.

    It returns None, or tensors.
    """
    recording = current()
    return function(given) if recording is None else recording.call(function, given)


def constant(function: Callable[P, R]) -> Callable[P, R]:
    """Returns a cached function, which returns a tuple; plans keep the tensors in it.

    Nobody may write to these tensors.
    """
    cached = functools.lru_cache(maxsize=256)(function)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        recording = current()
        with contextlib.nullcontext() if recording is None else _hidden():
            made: Any = cached(*args, **kwargs)  # type: ignore[arg-type]
        if recording is not None:
            for each in made:
                if isinstance(each, torch.Tensor):
                    recording.constant(each)
        return made  # type: ignore[no-any-return]

    return call


def recorded(kernel: Callable[P, R]) -> Callable[P, R]:
    """Returns an op's kernel, wrapped so that each call is recorded."""

    @functools.wraps(kernel)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with Recording(native.load().symm_cp_plan_recording()):
            return kernel(*args, **kwargs)

    return run


class Served:
    """The registration of plans, with Python as fallback, for an op; until `undo()`."""

    def __init__(self, handle: int) -> None:
        self._handle: int | None = handle

    def undo(self) -> None:
        """Restores the plan or kernel that served the op before; a second call does nothing."""
        handle, self._handle = self._handle, None
        if handle is not None:
            native.load().symm_cp_plan_op_undo(handle)


def serve(
    op: str, dispatch_key: str, *, or_torchs: bool = False, free: Sequence[int] = ()
) -> Served:
    """Runs an op for a dispatch key by a plan, or by Python if there is none.

    `or_torchs`: use the Python kernel that falls back to torch's for groups ours do not support.
    `free` tells of each argument whether it is free: see `Op.free_places`.
    """
    made = native.load().symm_cp_plan_op(
        op.encode(), dispatch_key.encode(), or_torchs, (ctypes.c_int * len(free))(*free), len(free)
    )
    if not made:
        raise RuntimeError(f"symm_cp: {op} cannot be registered for {dispatch_key}")
    return Served(made)


def refusals() -> dict[str, str]:
    """Returns why calls of ops are made by Python each time: the last reason of each, by name."""
    lines = native.load().symm_cp_plans_refusals().decode().splitlines()
    return dict(line.split(": ", 1) for line in lines)


def begin() -> None:
    """Turns recording off unless it is wanted and possible."""
    try:
        wanted = env.plans()
    except ValueError as error:  # an import must not fail
        native.say(f"{error}; recording them")
        wanted = True
    if not wanted or native.glue_if_built() is None:
        native.load().symm_cp_plans_record_at(-1)


def _failed(workspace: DeviceWorkspace, failure: tuple[list[torch.Tensor], str]) -> None:
    """Gives a workspace up after an error in the middle of a call; see `StreamCall.run`."""
    used, error = failure
    give_up_on(workspace, RuntimeError(error))
    hold(workspace, *used)
