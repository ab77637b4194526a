"""Each switch of the simulated device does what it says, shown directly or by a faulty program.

Ops in these modes are tested where they run on the device.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.cuda.graphs import graphed
from tests.cuda.machine import Machine, build, machine
from tests.cuda.simulated import SimulatedDevice, simulation

REFUSED, NO_CONTEXT, WRONG_HANDLE = 801, 201, 400
UNSUPPORTED, INVALIDATED, UNJOINED, ISOLATED = 900, 901, 904, 905
WRITE, WAIT = 2, 1


class Driver:
    """The driver's functions, on CPU memory, as tests call them."""

    def __init__(self, of: Machine) -> None:
        self.library = of.library
        self.words: list[Any] = []

    def word(self, value: int = 0) -> int:
        """The address of a new number."""
        self.words.append(ctypes.c_uint32(value))
        return ctypes.addressof(self.words[-1])

    def stream(self) -> int:
        made = ctypes.c_void_p()
        assert self.library.cuStreamCreate(ctypes.byref(made), 1) == 0
        return made.value or 0

    def event(self) -> ctypes.c_void_p:
        made = ctypes.c_void_p()
        assert self.library.cuEventCreate(ctypes.byref(made), 2) == 0
        return made

    def value(self, kind: int, stream: int, address: int, value: int = 1) -> int:
        """Writes a number to a word, or waits for it."""
        op = (ctypes.c_uint64 * 6)(kind, address, value)
        result: int = self.library.cuStreamBatchMemOp_v2(ctypes.c_void_p(stream), 1, op, 0)
        return result

    def copy(self, stream: int, to: int, source: int, nbytes: int = 4) -> int:
        call = self.library.cuMemcpyAsync
        sized = ctypes.c_uint64(to), ctypes.c_uint64(source), ctypes.c_size_t(nbytes)
        result: int = call(*sized, ctypes.c_void_p(stream))
        return result

    def batch(self, stream: int, to: int, source: int) -> int:
        eight = ctypes.c_uint64 * 1
        attributes = (ctypes.c_int * 6)(1, 0, 0, 0, 0, 0)
        result: int = self.library.simulated_batch(
            eight(to), eight(source), eight(4), ctypes.c_size_t(1), attributes, eight(0),
            ctypes.c_size_t(1), ctypes.c_void_p(stream),
        )  # fmt: skip
        return result

    def record(self, stream: int, event: ctypes.c_void_p) -> int:
        result: int = self.library.cuEventRecord(event, ctypes.c_void_p(stream))
        return result

    def wait(self, stream: int, event: ctypes.c_void_p) -> int:
        result: int = self.library.cuStreamWaitEvent(ctypes.c_void_p(stream), event, 0)
        return result

    def deadlocks(self) -> int:
        """The number of waits that have not ended once all streams are idle."""
        self.library.simulated_drain_all()
        count: int = self.library.simulated_deadlocks()
        return count


@pytest.fixture
def driver() -> Iterator[Driver]:
    machine().set(counts_deadlocks=True, delays_us=0, patience_ms=100)
    machine().library.simulated_set_device(0, 1)
    machine().default_stream(0)
    yield Driver(machine())
    machine().library.simulated_drain_all()
    machine().set(counts_deadlocks=False, driver_version=13010, patience_ms=30_000, one_queue=False,
                  multiprocessors=False, contexts=False, write="", wait="",
                  batch="", peer_copy="")  # fmt: skip
    machine().library.simulated_set_device(0, 1)


@pytest.fixture
def symmetric() -> Iterator[Callable[[bool], int]]:
    """Makes memory that looks like the rank's own, or like a peer's that is mapped here."""
    libc, made = ctypes.CDLL(None), []
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]

    def make(own: bool) -> int:
        fd = os.memfd_create("symm_cp")
        os.ftruncate(fd, mmap.PAGESIZE)
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        at = libc.mmap(None, mmap.PAGESIZE, protection, mmap.MAP_SHARED, fd, 0)
        made.append((at, fd if own else None))
        if not own:
            os.close(fd)
        return int(at)

    yield make
    machine().library.simulated_drain_all()
    for at, fd in made:
        libc.munmap(ctypes.c_void_p(at), ctypes.c_size_t(mmap.PAGESIZE))
        if fd is not None:
            os.close(fd)


def exports(version: int, name: str) -> bool:
    return hasattr(ctypes.CDLL(build(version)), name)


def test_each_version_has_its_batched_copies() -> None:
    names = "cuMemcpyBatchAsync", "cuMemcpyBatchAsync_v2"
    has = {v: [exports(v, name) for name in names] for v in (12050, 12080, 13000, 13010)}
    assert has == {12050: [False, False], 12080: [True, False], 13000: [False, True],
                   13010: [False, True]}  # fmt: skip
    assert exports(12050, "cuMemcpyAsync")


def test_streams_write_to_peers_before_13010_only(
    driver: Driver, symmetric: Callable[[bool], int]
) -> None:
    stream, own, peer = driver.stream(), symmetric(True), symmetric(False)
    for version, refused in ((13000, 0), (13010, REFUSED)):
        machine().set(driver_version=version)
        assert driver.value(WRITE, stream, own) == 0
        assert driver.value(WRITE, stream, peer) == refused


def test_streams_wait_for_symmetric_memory_from_12050_on(
    driver: Driver, symmetric: Callable[[bool], int]
) -> None:
    stream, own = driver.stream(), symmetric(True)
    ctypes.c_uint32.from_address(own).value = 1
    for version, refused in ((12040, REFUSED), (12050, 0)):
        machine().set(driver_version=version)
        assert driver.value(WAIT, stream, own) == refused
        assert driver.value(WAIT, stream, driver.word(1)) == 0


@pytest.mark.parametrize("one_queue", [False, True])
def test_a_wait_at_the_head_of_one_queue_holds_up_all_streams(
    driver: Driver, one_queue: bool
) -> None:
    machine().set(one_queue=one_queue)
    first, second, word = driver.stream(), driver.stream(), driver.word()
    driver.value(WAIT, first, word)
    driver.value(WRITE, second, word)  # would end the wait
    assert (driver.deadlocks() > 0) is one_queue


@pytest.mark.parametrize("version", [13000, 13010])
def test_a_polling_kernel_starves_copies_within_the_device(driver: Driver, version: int) -> None:
    machine().set(multiprocessors=True, driver_version=version)
    word, one = driver.word(), driver.word(1)
    running, polls = threading.Event(), machine().stream(0)

    def poll() -> None:
        running.set()
        end = time.monotonic() + 10  # the copy is made when its wait has counted as a deadlock
        while not ctypes.c_uint32.from_address(word).value and time.monotonic() < end:
            time.sleep(1e-3)

    machine().call(polls, poll, kind=2)
    assert running.wait(10)
    driver.copy(driver.stream(), word, one)
    assert driver.deadlocks() > 0


def test_loading_a_kernel_waits_for_all_streams_and_locks_the_context(driver: Driver) -> None:
    machine().set(patience_ms=30_000)
    stream, other, word = driver.stream(), driver.stream(), driver.word()
    driver.value(WAIT, stream, word)
    loads = threading.Thread(target=machine().library.simulated_load)
    loads.start()
    asked = threading.Event()

    def ask() -> None:
        driver.library.cuStreamQuery(ctypes.c_void_p(other))
        asked.set()

    end = time.monotonic() + 10
    while True:  # until the thread that loads has the lock
        asked.clear()
        threading.Thread(target=ask).start()
        if not asked.wait(0.1):
            break
        assert time.monotonic() < end
    assert loads.is_alive()
    ctypes.c_uint32.from_address(word).value = 1
    assert asked.wait(10)
    loads.join(10)


def test_threads_begin_without_a_context(driver: Driver) -> None:
    machine().set(contexts=True)
    stream, seen = driver.stream(), []

    def call() -> None:
        context = ctypes.c_void_p(1)
        driver.library.cuCtxGetCurrent(ctypes.byref(context))
        seen.append(context.value)
        seen.append(driver.copy(stream, driver.word(), driver.word()))
        driver.library.cuCtxSetCurrent(ctypes.c_void_p(1))
        seen.append(driver.copy(stream, driver.word(), driver.word()))

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert seen == [None, NO_CONTEXT, 0]


def test_a_stream_belongs_to_its_device(driver: Driver) -> None:
    third = machine().stream(3)
    assert driver.copy(third, driver.word(), driver.word()) == WRONG_HANDLE
    with SimulatedDevice(3).guard():
        assert driver.copy(third, driver.word(), driver.word()) == 0
    assert driver.copy(third, driver.word(), driver.word()) == WRONG_HANDLE


def test_memory_of_a_stream_that_has_ended_is_freed_at_once(driver: Driver) -> None:
    """Nothing waits for that stream, as such a wait would never end."""
    stream, freed = ctypes.c_void_p(driver.stream()), []
    driver.library.simulated_destroy(stream)
    free = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(freed.append)

    def passed() -> bool:
        driver.library.simulated_when_passed(stream, free, ctypes.c_void_p(len(freed) + 1))
        drained = threading.Thread(target=driver.library.simulated_drain, args=(stream,))
        drained.start()
        drained.join(10)
        return not drained.is_alive()

    for _ in range(20):
        assert passed()
        time.sleep(0.002)
    assert freed == list(range(1, 21))


@pytest.mark.parametrize(("fault", "seen"), [("", 1), ("ignore", 0)])
def test_a_write_may_be_lost(driver: Driver, fault: str, seen: int) -> None:
    machine().set(write=fault)
    word = driver.word()
    assert driver.value(WRITE, driver.stream(), word) == 0
    driver.library.simulated_drain_all()
    assert ctypes.c_uint32.from_address(word).value == seen


def test_a_wait_may_hang_for_as_long_as_the_test_wants(driver: Driver) -> None:
    machine().set(wait="hang")
    stream, word = driver.stream(), driver.word(1)
    assert driver.value(WAIT, stream, word) == 0
    time.sleep(0.2)  # longer than a deadlock takes
    assert driver.library.cuStreamQuery(ctypes.c_void_p(stream)) == 600
    machine().set(wait="")
    assert driver.deadlocks() == 0


# --- captures, by the driver


def end_capture(driver: Driver, stream: int) -> tuple[int, ctypes.c_void_p]:
    graph = ctypes.c_void_p()
    return driver.library.simulated_capture_end(stream, 0, ctypes.byref(graph)), graph


def test_a_capture_refuses_batches_waits_of_the_host_and_streams_left_behind(
    driver: Driver,
) -> None:
    stream, other = driver.stream(), driver.stream()
    handle, outside = ctypes.c_void_p(stream), driver.event()
    driver.record(other, outside)

    def capture(act: Callable[[], int]) -> tuple[int, int]:
        assert driver.library.simulated_capture_begin(handle) == 0
        return act(), end_capture(driver, stream)[0]

    def leave_behind() -> int:
        driver.record(stream, outside)
        driver.wait(other, outside)
        return driver.copy(other, driver.word(), driver.word())

    batched = capture(lambda: driver.batch(stream, driver.word(), driver.word()))
    assert batched == (UNSUPPORTED, INVALIDATED)
    waited = capture(lambda: int(driver.library.cuStreamSynchronize(handle)))
    assert waited == (UNSUPPORTED, INVALIDATED)
    assert capture(lambda: driver.wait(stream, outside)) == (ISOLATED, ISOLATED)
    assert capture(leave_behind) == (0, UNJOINED)
    assert capture(lambda: driver.copy(stream, driver.word(), driver.word())) == (0, 0)


# --- above the driver


def test_the_host_is_ahead_of_the_device() -> None:
    with simulation(delays_us=0) as made:
        may_end, ended, total = threading.Event(), [], torch.zeros(())
        made.call(0, lambda: ended.append(may_end.wait(10)))
        made.launch("compute", "sync", lambda: total.add_(1))
        assert not ended
        assert total == 0
        may_end.set()
        made.join()
        assert ended == [True]
        assert total == 1


def test_a_graph_computes_when_it_is_replayed() -> None:
    x, total = torch.ones(4), torch.zeros(4)

    def step() -> torch.Tensor:
        total.add_(x)
        return total * 2

    with simulation(delays_us=0) as made:
        graph, out = graphed(made, step)
        assert total.tolist() == [0] * 4
        assert out.isnan().all()  # of the graph's own memory, which nothing has written to
        for turn in (1, 2):
            x.fill_(turn)
            with made.stream():
                graph.replay()
            assert out.tolist() == [2.0 if turn == 1 else 6.0] * 4


@pytest.mark.parametrize(
    "read", [lambda t: t.item(), lambda t: t.tolist(), bool], ids=["item", "tolist", "bool"]
)
def test_a_capture_refuses_that_the_host_reads(read: Callable[[torch.Tensor], object]) -> None:
    one = torch.ones(())
    with (
        simulation(delays_us=0) as made,
        pytest.raises(RuntimeError, match="not permitted when stream is capturing"),
    ):
        graphed(made, lambda: read(one))


def test_a_copy_to_memory_that_was_freed_is_found() -> None:
    def copy_to_freed() -> None:
        with simulation(delays_us=0, poison=True) as made:
            target, source = torch.ones(64), torch.full((64,), 3.0)
            assert torch.empty(8).isnan().all()
            side, may_go_on = made.streams("sync")[1], threading.Event()
            made.call(side, lambda: may_go_on.wait(10))
            Driver(made.machine).copy(side, target.data_ptr(), source.data_ptr(), 256)
            if kept:
                held = [target]
                made.call(side, held.clear)
            del target
            # The caller's stream may use the memory again, unless it has to wait for the copy.
            if kept:
                time.sleep(0.05)
            else:
                made.library.simulated_drain(made.current_stream())
            may_go_on.set()

    kept = False
    with pytest.raises(AssertionError, match=r"byte 0 of a block of 256 .* by cuMemcpyAsync"):
        copy_to_freed()
    kept = True
    copy_to_freed()


def test_either_allocator_frees_what_the_other_has_allocated() -> None:
    """oneDNN's tensors are freed by the allocator that is in use then."""
    for _ in range(20):
        before = torch.randn(64, 64).to_mkldnn()
        with simulation(poison=True):
            del before
            during = [torch.randn(size, 64).to_mkldnn() for size in (1, 30, 200)]
        after = torch.randn(64, 64).to_mkldnn()
        del during
        with simulation(poison=True):
            del after
