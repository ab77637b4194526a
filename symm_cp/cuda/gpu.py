"""CUDA devices: torch's streams, copy engines, and stream signals by the driver."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection, Hashable
from contextlib import AbstractContextManager, nullcontext

import torch

from symm_cp.cuda import registry, selftest
from symm_cp.cuda.base import Device, DeviceWorkspace, Pending, Verdict
from symm_cp.cuda.rendezvous import by_store, check_gpus
from symm_cp.cuda.symmetric import SymmetricWorkspace, is_symmetric
from symm_cp.group.memory import Group
from symm_cp.runtime.lowering import LANES
from symm_cp.runtime.recorder import Mark

# The polling kernels use tensor cores for bfloat16 and asynchronous copies to shared memory.
_POLLING_CAPABILITY = (8, 0)


@registry.register
class CudaDevice(Device):
    """The streams of one GPU."""

    torch_type, dispatch_key = "cuda", "CUDA"
    torch_has_kernels = triton = True
    driver = "libcuda.so.1"
    captures = True

    def __init__(self, torch_device: torch.device) -> None:
        super().__init__(torch_device)
        self._side: dict[tuple[str, int], dict[str, torch.cuda.Stream]] = {}
        self._origin: tuple[torch.cuda.Event, int] | None = None
        self._captured: tuple[int, Hashable] = 0, None  # the last capture, and its pool
        self._lasting: set[Hashable] = set()  # captures that count as pools without an end

    def _side_streams(self, user: str) -> dict[str, torch.cuda.Stream]:
        """The streams of the other lanes: of high priority, so that none waits behind kernels.

        Lane "compute2" has the caller's priority: its kernels take what the caller's leave idle.
        """
        key = self.user_of_streams(user)
        side = self._side.get(key)
        if side is None:
            made = {
                lane: torch.cuda.Stream(self.torch_device, priority=-(lane != "compute2"))
                for lane in LANES[1:]
            }
            side = self._side.setdefault(key, made)  # other threads ask, too
        return side

    def streams(self, user: str) -> tuple[int, ...]:
        """The driver's handles of the streams of `LANES`."""
        current: int = torch._C._cuda_getCurrentRawStream(self.torch_device.index)
        side = self._side_streams(user)
        return current, *(stream.cuda_stream for stream in side.values())

    def launch(self, lane: str, user: str, kernel: Callable[[], object]) -> None:
        """Calls a function whose kernels go to the stream of a lane."""
        if lane == "compute":
            kernel()
        else:
            with torch.cuda.stream(self._side_streams(user)[lane]):
                kernel()

    def using(self, stream: int) -> AbstractContextManager[object]:
        """Makes a stream the current one inside the `with` block, by the driver's handle."""
        return torch.cuda.stream(torch.cuda.ExternalStream(stream, self.torch_device))

    def in_graph_tree(self) -> bool:
        """Whether `torch.compile(mode="reduce-overhead")` is warming up or capturing a graph."""
        trees = sys.modules.get("torch._inductor.cudagraph_trees")
        if trees is None:
            return False
        manager = trees.get_manager(self.torch_device.index, create_if_none_exists=False)
        if manager is None or not (manager.in_warmup or manager.in_recording):
            return False
        # Both stay set until the next call; other work meanwhile runs on another stream.
        with self.guard():
            return bool(torch.cuda.current_stream() == manager.stream)

    def capture(self, stream: int, function: Callable[[], object]) -> Callable[[], object]:
        """Captures the work that a function puts on a stream into a graph; returns its replay."""
        graph = torch.cuda.CUDAGraph()

        def record() -> None:
            # Other threads may use the device meanwhile.
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                function()
            finally:
                graph.capture_end()

        self.launch_on(stream, record)
        return lambda: self.launch_on(stream, graph.replay)

    def graph_pool(self) -> Hashable:
        """Returns the memory pool of the graph that the current stream captures."""
        number = self.capture_id()
        if number == 0 or self._captured[0] != number:
            self._captured = number, self._pool_of(number)
        return self._captured[1]

    def _pool_of(self, capture: int) -> Hashable:
        if torch.cuda.get_allocator_backend() != "native":  # others tell nothing of their pools
            self._lasting.add(capture)
            return capture
        with self.guard():
            address = torch.empty(1, dtype=torch.uint8, device=self.torch_device).data_ptr()
        for segment in torch.cuda.memory_snapshot():
            pool = tuple(segment["segment_pool_id"])
            if any(pool) and 0 <= address - segment["address"] < segment["total_size"]:
                return pool
        raise NotImplementedError(f"{self}: calls can be captured only by torch.cuda.CUDAGraph")

    def graph_pools(self) -> Collection[Hashable]:
        """Returns the memory pools in use; `torch.cuda.graph` frees those of graphs that died."""
        if torch.cuda.get_allocator_backend() != "native":
            return self._lasting
        return {tuple(segment["segment_pool_id"]) for segment in torch.cuda.memory_snapshot()}

    def mark(self, lane: str, user: str) -> Mark:
        """Records the time at which the stream of a lane reaches this point."""
        if lane == "compute":
            stream = torch.cuda.current_stream(self.torch_device)
        else:
            stream = self._side_streams(user)[lane]
        if self._origin is None:
            origin = torch.cuda.Event(enable_timing=True)
            origin.record(stream)
            origin.synchronize()
            self._origin = origin, time.monotonic_ns()
        origin, zero = self._origin
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream)
        return lambda: zero + int(origin.elapsed_time(event) * 1e6)

    def guard(self) -> AbstractContextManager[object]:
        """Makes this device the current one inside the `with` block."""
        if torch.cuda.current_device() == self.torch_device.index:
            return nullcontext()
        return torch.cuda.device(self.torch_device)

    def attach(self) -> None:
        """Makes its context current in a thread that has none yet."""
        torch.zeros(1, device=self.torch_device)  # the first launch of a thread does that

    def capturing(self) -> bool:
        """Whether the current stream of this device is being captured into a graph."""
        with self.guard():
            return torch.cuda.is_current_stream_capturing()

    def synchronize(self) -> None:
        """Returns when all work on the device has ended."""
        torch.cuda.synchronize(self.torch_device)

    def copies_ended(self, user: str) -> Pending:
        """Returns an event that follows the copies issued so far."""
        event = torch.cuda.Event()
        event.record(self._side_streams(user)["copy"])
        return event

    def polls(self) -> bool:
        """Whether the device has kernels that wait for streams, or that streams wait for."""
        return torch.cuda.get_device_capability(self.torch_device) >= _POLLING_CAPABILITY

    def multiprocessors(self) -> int:
        """The number of tiles of a matmul that it computes at a time."""
        count: int = torch.cuda.get_device_properties(self.torch_device).multi_processor_count
        return count

    def check_ranks(self, group: Group) -> None:
        """Raises `RuntimeError` on every rank if ranks share a GPU by mistake. Collective."""
        if by_store(self.torch_device):
            check_gpus(group, self.torch_device)

    def verdict(self, group: Group) -> Verdict:
        """Returns the result of a group's self-test; collective at the first call for the group."""
        return selftest.verdict(group, self)

    def workspace(
        self, group: Group, channel: str, slot_bytes: int, *, graph: bool, verdict: Verdict
    ) -> DeviceWorkspace:
        """Makes a workspace that uses the features that `verdict` allows. Collective."""
        return SymmetricWorkspace(group, self, channel, slot_bytes, graph=graph, verdict=verdict)

    def is_symmetric(self, tensor: torch.Tensor, group: Group) -> bool:
        """Whether a tensor was allocated as symmetric memory."""
        return is_symmetric(tensor)
