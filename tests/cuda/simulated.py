"""The runtime for devices with streams on CPU memory: real schedules, launches and peers.

`driver.cpp` is its driver; it guarantees what CUDA's does and no more. Kernels are Python functions
that run on the thread of their stream. Tensors are the CPU's and tests read them at once, so the
calling thread waits for its stream at the end of each call (unless the simulation is `deferred`);
within a call the host is ahead of the device, as with CUDA. In calls by plans that is true of every
op of torch (ahead.py): all that the call allocates is freed again before its streams get there.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import inspect
import json
import os
import random
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Collection, Hashable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from typing import Any
from unittest import mock

import torch
import torch.distributed._symmetric_memory as symm_mem
from torch.utils import _python_dispatch as dispatch

from symm_cp import cuda, native
from symm_cp.cuda.stream_program import Launch
from symm_cp.cuda.symmetric import SymmetricWorkspace, is_symmetric
from symm_cp.group import memory
from symm_cp.runtime.lowering import LANES
from symm_cp.runtime.recorder import Mark
from tests.cuda import pools
from tests.cuda.ahead import Ahead
from tests.cuda.graphs import Graph, refuse
from tests.cuda.machine import OPS_TO, Machine, build, machine

__all__ = ["SimulatedDevice", "build", "simulated_device", "simulation"]

#: A variable of the environment: options of `simulation`, as JSON.
SIMULATION = "SYMM_CP_TEST_SIMULATION"


class Recorded:
    """An event behind all work that a stream was given so far."""

    def __init__(self, device: SimulatedDevice, stream: int) -> None:
        self._device, self._driver = device, device.machine.library
        self._event = ctypes.c_void_p()
        with device.current():  # as torch's
            assert self._driver.cuEventCreate(ctypes.byref(self._event), 0) == 0
            assert self._driver.cuEventRecord(self._event, ctypes.c_void_p(stream)) == 0

    def wait(self) -> None:
        """Makes the current stream wait for it."""
        stream = ctypes.c_void_p(self._device.current_stream())
        with self._device.current():
            assert self._driver.cuStreamWaitEvent(stream, self._event, 0) == 0
        self._device.join()

    def query(self) -> bool:
        """Whether that work has ended."""
        return int(self._driver.cuEventQuery(self._event)) == 0

    def __del__(self) -> None:
        self._driver.cuEventDestroy_v2(self._event)


@dataclass(frozen=True)
class Mode:
    """What the machine is like, and how calls are made on it.

    delays_us: the longest delay before a command of a stream
    graph: each call is captured, and replayed at once
    passes: whether the verdict is that streams signal
    driver_version: from 13010 on, no stream writes to a peer's memory; before 12080, there are no
        batched copies; before 12050, streams do not wait for symmetric memory
    one_queue: commands of all streams begin in the order in which they were issued
    lazy_loading: the first launch of a kernel, and some others, wait for all that was issued before
        them, and no other thread may call the driver meanwhile
    multiprocessors: a polling kernel takes all of them, so other kernels and copies within the
        device wait for it
    contexts: threads have no current context until they set one
    deferred: calls return while their streams still run
    patience_ms: a wait that takes longer aborts the process
    plan_at: which call of a kind (from 0 on) is recorded, so that later calls run without Python;
        below 0: none. Only where the mode allows it
    """

    delays_us: int = 100
    graph: bool = False
    passes: bool = True
    driver_version: int = 13010
    one_queue: bool = False
    lazy_loading: bool = False
    multiprocessors: bool = False
    contexts: bool = False
    deferred: bool = False
    patience_ms: int = 30_000
    plan_at: int = 1

    @property
    def plans(self) -> bool:
        """Whether calls may be made by plans."""
        return not self.graph


class SimulatedDevice(cuda.Device):
    """A device whose memory is the CPU's. Its null stream is one stream for all threads."""

    torch_type, dispatch_key = "cpu", "CPU"
    captures = True

    def __init__(self, index: int = 0) -> None:
        super().__init__(torch.device("cpu"))
        self.index = index
        self.machine: Machine = machine()
        self.library = self.machine.library
        self.machine.default_stream(index)
        self._sides: dict[tuple[str, str, int], int] = {}
        self._here = threading.local()  # the graph that a thread captures, and its calls by plans
        self._ops_to = OPS_TO(self._send_ops)
        self.library.simulated_ops(self._ops_to)
        self.graphs: weakref.WeakSet[Graph] = weakref.WeakSet()
        self.mode = self.machine.mode or Mode()
        self._times_in_capture = 0
        self.in_capture = self.mode.graph
        self.driver = build(self.mode.driver_version)
        self._kept: list[Any] | None = None  # functions that a graph of `capture` calls
        self.poisoned = False
        self.tree = False  # whether torch.compile warms up or captures a graph

    @property
    def graph(self) -> Graph | None:
        """The graph that the calling thread captures, if any."""
        return getattr(self._here, "graph", None)

    @graph.setter
    def graph(self, graph: Graph | None) -> None:
        self._here.graph = graph

    # --- streams

    def _side(self, lane: str, user: str) -> int:
        place = lane, *self.user_of_streams(user)
        side = self._sides.get(place)
        if side is None:  # other threads ask, too
            side = self._sides.setdefault(place, self.machine.stream(self.index))
        return side

    def _chosen(self) -> int:
        """The stream of the calling thread; 0: the default one."""
        return self.library.symm_cp_hosted_stream(self.index) or 0

    def current_stream(self) -> int:
        """The stream of the calling thread; never null."""
        return self._chosen() or self.machine.default_stream(self.index)

    @contextlib.contextmanager
    def stream(self, stream: int | None = None) -> Iterator[int]:
        """Inside, the calling thread's work goes to another stream; None: a new one."""
        stream = stream or self.machine.stream(self.index)
        before = self.library.symm_cp_hosted_use(stream)
        try:
            yield stream
        finally:
            self.library.symm_cp_hosted_use(before)

    def using(self, stream: int) -> AbstractContextManager[object]:
        return self.stream(stream)

    def in_graph_tree(self) -> bool:
        return self.tree

    @contextlib.contextmanager
    def warming_up(self) -> Iterator[None]:
        """Inside, this thread allocates from the pool of a graph, as torch.compile's does first."""
        self.tree = True
        try:
            with self.machine.pool():
                yield
        finally:
            self.tree = False

    def streams(self, user: str) -> tuple[int, ...]:
        return self._chosen(), *(self._side(lane, user) for lane in LANES[1:])

    def launch(self, lane: str, user: str, kernel: Callable[[], object]) -> None:
        self.machine.raise_errors()
        stream = self.current_stream() if lane == "compute" else self._side(lane, user)
        with self.stream(stream), self.ahead():
            kernel()

    @contextlib.contextmanager
    def ahead(self) -> Iterator[None]:
        """Inside, torch's ops go to the current stream, once all other modes have seen them."""
        if Ahead.active() is not None:
            yield
            return
        ahead = Ahead(self, None if self.poisoned and not self.capturing() else [])
        modes = [dispatch._pop_mode() for _ in dispatch._get_current_dispatch_mode_stack()]
        for mode in (ahead, *reversed(modes)):
            dispatch._push_mode(mode)
        try:
            yield
        finally:
            for _ in (ahead, *modes):
                dispatch._pop_mode()
            for mode in reversed(modes):
                dispatch._push_mode(mode)
            if ahead.kept:
                self.machine.call(self.current_stream(), ahead.kept.clear)

    def launch_on(self, stream: int, kernel: Callable[[], object]) -> None:
        self.machine.call(stream, kernel, keep=self._kept)

    def capture(self, stream: int, function: Callable[[], object]) -> Callable[[], object]:
        kept: list[Any] = []
        self._kept = kept
        try:
            with self.stream(stream):
                graph = self._captured(function)
        finally:
            self._kept = None

        def replay(_: Any = kept) -> None:
            result = self.machine.library.simulated_replay(graph, stream, 1)
            assert result == 0, f"the replay failed: {result}"

        return replay

    def _open_stream(self) -> int:
        return self.machine.stream(self.index)

    def ended(self, stream: int) -> bool:
        self.machine.raise_errors()
        return super().ended(stream)

    def call(self, stream: int, function: Callable[[], object]) -> None:
        """Has a stream call a function."""
        keep = None if self.graph is None else self.graph.kept
        self.machine.call(stream or self.current_stream(), function, keep=keep)

    def mark(self, lane: str, user: str) -> Mark:
        times: list[int] = []
        stream = self.current_stream() if lane == "compute" else self._side(lane, user)
        self.call(stream, lambda: times.append(time.monotonic_ns()))
        return lambda: times[0]

    def synchronize(self) -> None:
        if self.graph is not None:
            refuse("cudaDeviceSynchronize")
        self.library.simulated_drain_all()

    def join(self) -> None:
        """Waits for the calling thread's stream; raises what a kernel has raised."""
        if not self.mode.deferred and self.graph is None:
            self.library.simulated_drain(self.current_stream())
            self.machine.raise_errors()

    def _send_ops(self, where: int) -> None:
        """Has ops of this thread go to streams while a plan runs; see `HostedOps`."""
        calls = self._here.__dict__.setdefault("calls", list[AbstractContextManager[None]]())
        if where == 0:
            calls.append(self.ahead())
            calls[-1].__enter__()
            return
        calls.pop().__exit__(None, None, None)
        if where == 1 and not self.mode.deferred:
            self.library.simulated_drain(self.current_stream())
        if self.machine.errors:  # as an assertion on a GPU
            traceback.print_exception(self.machine.errors[0])
            os.abort()

    def copies_ended(self, user: str) -> Any:
        return Recorded(self, self._side("copy", user))

    # --- what the runtime asks a Device

    def guard(self) -> AbstractContextManager[object]:
        """As torch's guard: does nothing if this is already the thread's current device."""
        if self.library.simulated_get_device() == self.index:
            return contextlib.nullcontext()
        return self.current()

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Inside, this device and its context are the calling thread's."""
        before = self.library.simulated_get_device()
        self.library.simulated_set_device(self.index, 1)
        try:
            yield
        finally:
            self.library.simulated_set_device(before, 1)

    def attach(self) -> None:
        self.library.simulated_set_device(self.index, 1)

    def capturing(self) -> bool:
        status = ctypes.c_int()
        self.library.cuStreamIsCapturing(
            ctypes.c_void_p(self.current_stream()), ctypes.byref(status)
        )
        return self.in_capture or status.value != 0

    @property
    def in_capture(self) -> bool:
        """Whether each call is captured by itself; together they count as one capture."""
        return self._in_capture

    @in_capture.setter
    def in_capture(self, value: bool) -> None:
        self._in_capture = value
        self._times_in_capture += value

    def graph_pool(self) -> Hashable:
        return -self._times_in_capture if self.graph is None else self.graph.pool

    def graph_pools(self) -> Collection[Hashable]:
        return {-self._times_in_capture, *(graph.pool for graph in self.graphs)}

    def verdict(self, group: memory.Group) -> cuda.Verdict:
        return cuda.Verdict(self.mode.passes)

    def workspace(
        self,
        group: memory.Group,
        channel: str,
        slot_bytes: int,
        *,
        graph: bool,
        verdict: cuda.Verdict,
    ) -> cuda.DeviceWorkspace:
        if self.graph is not None:
            refuse("cuMemCreate")
        made = SymmetricWorkspace(group, self, channel, slot_bytes, graph=graph, verdict=verdict)
        # As torch does before it frees symmetric memory.
        weakref.finalize(made.memory, self.library.simulated_drain_all).atexit = False
        return made

    def is_symmetric(self, tensor: torch.Tensor, group: memory.Group) -> bool:
        return is_symmetric(tensor)

    # --- for tests

    def count(self) -> dict[str, int]:
        """The number of driver calls of each kind since this was last called."""
        kinds = ("copies", "batches", "2d", "mem_op_calls", "mem_ops")
        return {kind: self.library.simulated_count(i) for i, kind in enumerate(kinds)}

    def copied(self) -> dict[str, int]:
        """Copies since the last call: with a peer's memory or local, flagged for overlap or not.

        Each copy of a batch counts.
        """
        kinds = ("local", "peer", "local, overlapping", "peer, overlapping")
        return {kind: self.library.simulated_count(5 + i) for i, kind in enumerate(kinds)}

    def run(self, issue: Callable[[], None], workspace: cuda.DeviceWorkspace) -> None:
        """Issues a call as the mode wants it, and lets its caller see the result."""
        if self.in_capture and self.graph is None:
            graph = self._captured(issue)
            self.machine.library.simulated_replay(graph, self.current_stream(), 1)
            self.machine.library.simulated_graph_destroy(graph)
        else:
            issue()
        try:
            self.join()
        except BaseException:
            workspace.give_up()
            raise

    def _captured(self, issue: Callable[[], object]) -> ctypes.c_void_p:
        graph, stream = ctypes.c_void_p(), self.current_stream()
        assert self.library.simulated_capture_begin(stream) == 0
        try:
            issue()
        finally:
            result = self.library.simulated_capture_end(stream, 1, ctypes.byref(graph))
        assert result == 0, f"the capture failed: {result}"
        return graph

    def poison(self, on: bool) -> None:
        """Switches the allocator that fills free memory with NaN on or off."""
        if on != self.poisoned:
            self.machine.poison.poison_use(int(on))
        self.poisoned = on

    def enter(self, mode: Mode) -> None:
        """Switches to a mode; no stream may have work."""
        self.mode = self.machine.mode = mode
        self.machine.set(
            delays_us=mode.delays_us,
            driver_version=mode.driver_version,
            patience_ms=mode.patience_ms,
            one_queue=mode.one_queue,
            multiprocessors=mode.multiprocessors,
            contexts=mode.contexts,
        )
        self.library.simulated_set_device(self.index, 1)
        self.machine.lazy_loading = mode.lazy_loading
        self.machine.kernels_loaded.clear()
        self.in_capture = mode.graph
        self.driver = build(mode.driver_version)
        native.load().symm_cp_plans_record_at(mode.plan_at if mode.plans else -1)


@cache
def simulated_device() -> SimulatedDevice:
    """The one device of this process."""
    return SimulatedDevice()


@contextlib.contextmanager
def simulation(**options: Any) -> Iterator[SimulatedDevice]:
    """Inside, ops on CPU tensors run on streams, in a `Mode`.

    Options besides the fields of `Mode`:

    poison: memory is NaN until it is written, and again once it is freed; writes to freed memory
        are reported at the end
    offsets: tensors of `symm_mem.empty` lie at another offset of their memory on each rank, as
        tensors of torch's memory pools may
    faults: "write", "wait", "batch" or "peer_copy" to one of `machine.FAULTS`

    Options that are not given come from the environment, if it has any (see `SIMULATION`).
    """
    options = {**json.loads(os.environ.get(SIMULATION, "{}")), **options}
    poison, offsets = options.pop("poison", False), options.pop("offsets", False)
    faults = options.pop("faults", {})
    made = simulated_device()
    before, poisoned = made.mode, made.poisoned
    made.enter(Mode(**options))
    made.machine.set(**faults)
    run = _running(inspect.unwrap(Launch.run))
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(Launch, "run", run))
        stack.enter_context(cuda.replaced(torch.device("cpu"), made))
        if offsets:
            stack.enter_context(mock.patch.object(symm_mem, "empty", pools.empty))
        made.poison(poison)
        try:
            yield made
        finally:
            made.machine.set(write="", wait="", batch="", peer_copy="")  # hung commands go on
            made.synchronize()
            made.machine.errors.clear()
            made.enter(before)
            made.poison(poisoned)
        if poison:
            written = made.machine.written_when_free()
            assert not written, written


@contextlib.contextmanager
def by_python() -> Iterator[None]:
    """Inside, Python makes all calls, for tests that look at Python's part of a call."""
    record_at = native.load().symm_cp_plans_record_at
    record_at(-1)
    try:
        yield
    finally:
        record_at(1)


def _running(original: Callable[..., None]) -> Callable[..., None]:
    """Has calls run as the mode of the simulated device wants it."""

    @functools.wraps(original)
    def run(launch: Launch, workspace: Any, *args: Any, **options: Any) -> None:
        issue = functools.partial(original, launch, workspace, *args, **options)
        if isinstance(workspace.device, SimulatedDevice):
            workspace.device.run(issue, workspace)
        else:
            issue()

    return run


def random_mode(choose: random.Random) -> dict[str, Any]:
    """Options of `simulation` that any op must cope with, a few of them at a time."""
    version = choose.choice([12050, 12080, 13000, 13010])
    mode: dict[str, Any] = {"driver_version": version, "delays_us": choose.choice([0, 100, 1000])}
    mode["plan_at"] = choose.choice([-1, 0, 1])
    switches = ("one_queue", "lazy_loading", "multiprocessors", "contexts", "poison", "offsets")
    return mode | {switch: True for switch in switches if choose.random() < 0.4}
