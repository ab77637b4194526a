"""Ops in one process whose peers are itself, over the simulated driver; profiles of such calls."""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import kernel_timeline
from benchmarks.kernel_timeline import Profile
from benchmarks.loopback import Row
from benchmarks.loopback_cases import equals, like
from benchmarks.loopback_device import TimedDriver, driver_functions
from benchmarks.loopback_labs import CALLS, Gpu
from symm_cp.schedule.simulate import Event, Timeline
from symm_cp.schedule.steps import Compute, Copy, Region, Signal
from tests.cuda.machine import build

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ("benchmarks/loopback.py", "--seconds", "0")
SIMULATED = ("--driver", "simulated")


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=False,
        timeout=600,
    )  # fmt: skip


def rows(folder: Path, *arguments: str, driver: str = "simulated") -> list[dict[str, Any]]:
    options = ("--driver", driver, "--json", str(folder / "rows.json"))
    done = python(*SCRIPT, *options, *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    found: list[dict[str, Any]] = json.loads((folder / "rows.json").read_text())["rows"]
    return found


def check_rows(found: list[dict[str, Any]], *, graphs: bool) -> None:
    for row in found:
        name, ranks = row["case"], row["ranks"]
        assert row["host_us"] > 0, name
        assert row["device_us"] > 0, name
        # A kernel for each rank's part, or one for all, and one that adds.
        assert row["kernels"] <= 2 * ranks + 1, name
        assert row["copies"] >= 1, name
        assert "torch_us" not in row, name
        driver = row["driver"]
        assert all(calls > 0 and us > 0 for calls, us in driver.values()), name
        assert "cuStreamBatchMemOp_v2" in driver, name
        # Keys and values of a peer are copied as rows, which are not batched.
        by_rows = name == "all-gather of keys and values"
        assert ("cuMemcpy2DAsync_v2" if by_rows else "cuMemcpyBatchAsync_v2") in driver, name
        replayed = graphs and "backward" not in name and "low-contention" not in name
        assert ("replay_us" in row) == replayed, name


def test_a_case_of_each_kind(tmp_path: Path) -> None:
    """Its results are checked, also in graphs; a wait that did not pass would abort the process."""
    traces = tmp_path / "traces"
    options = ("--ranks", "4", "--case", "all-gather-matmul", "--graphs", "--trace", str(traces))
    found = rows(tmp_path, *options)
    assert [(row["case"], row.get("algorithm", ""), row["by_size"]) for row in found] == [
        ("all-gather-matmul", "shards", False),
        ("all-gather-matmul", "whole", True),
        ("all-gather-matmul, with the gathered", "shards", False),
        ("all-gather-matmul, with the gathered", "whole", True),
        ("all-gather-matmul of columns", "", True),
        ("all-gather-matmul, backward", "shards", False),
        ("all-gather-matmul, backward", "whole", True),
        ("scaled all-gather-matmul", "", True),
    ]
    check_rows(found, graphs=True)
    first = found[0]
    assert (first["kernels"], first["ranks"]) == (4, 4)
    assert first["alone_us"] > 0
    files = sorted(path.name for path in traces.iterdir())
    assert len(files) == len(found)
    assert files[0] == "all-gather-matmul-backward-shards-small-4-ranks.steps.json"
    assert json.loads((traces / files[0]).read_text())["traceEvents"]


@pytest.mark.exhaustive
def test_all_cases(tmp_path: Path) -> None:
    found = rows(tmp_path, "--ranks", "2", "4", "8", "16", "--graphs")
    assert len(found) == 4 * 26
    check_rows(found, graphs=True)


@pytest.mark.exhaustive
def test_kernels_that_poll(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    found = rows(tmp_path, "--ranks", "2", "--algorithm", "tiles")
    assert [row["case"] for row in found if row["kernels"]] == [
        "all-gather-matmul",
        "all-gather-matmul, with the gathered",
        "matmul-reduce-scatter",
        "all-gather-matmul, backward",
    ]
    assert sum("tiles alone" in row["case"] for row in found) == 5


@pytest.mark.exhaustive
def test_every_op_is_issued_without_a_gpu(tmp_path: Path) -> None:
    found = rows(tmp_path, "--ranks", "2", "8", driver="idle")
    assert len(found) == 2 * 26
    for row in found:
        name = row["case"]
        assert row["driver_calls"], name
        assert "device_us" not in row, name
        assert row["host_us"] < row["python_us"], name  # C++ makes the call
        theirs = "attention" not in name and not name.startswith(("matmul-all", "all-gather of"))
        theirs &= not any(part in name for part in ("backward", "exchange", "beside"))
        assert ("torch_us" in row, "torch_error" in row) == (theirs, False), name


@pytest.mark.exhaustive
def test_real_peers(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    start = ("-m", "symm_cp", "run", "--nproc-per-node", "2")
    done = python(*start, *SCRIPT, *SIMULATED, "--case", "reduce-scatter", "--json", str(file))
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(json.loads(file.read_text())["rows"]) == 6
    assert done.stdout.count("6 cases, 0 failed") == 1  # rank 0 speaks


@pytest.mark.exhaustive
def test_a_driver_whose_batches_take_nine_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SYMM_CP_TEST_SIMULATION", '{"driver_version": 12080}')
    (row,) = rows(tmp_path, "--ranks", "4", "--case", "all-gather of keys")
    assert row["driver"]["cuMemcpyBatchAsync"][0] > 0


_WITHOUT_ZEROS = """
import sys
from benchmarks import loopback, loopback_device
def spoil(space):
    space.memory[space.header_bytes:].fill_(65)
loopback_device.LoopbackWorkspace.forget_slots = spoil
options = ["--seconds", "0", "--ranks", "2", "--case", "reduce-scatter"]
options += ["--without", "whole"]
sys.argv = ["loopback", "--driver", "simulated", *options]
sys.exit(loopback.main())
"""


@pytest.mark.exhaustive
def test_wrong_results_and_unknown_cases_are_reported() -> None:
    done = python("-c", _WITHOUT_ZEROS)
    assert done.returncode == 1, done.stderr
    failed = [line for line in done.stdout.splitlines() if "FAILED: AssertionError" in line]
    assert [line.split("  ")[0] for line in failed] == [
        "matmul-reduce-scatter",
        "scaled matmul-reduce-scatter",
    ]
    assert "4 cases, 2 failed" in done.stdout
    done = python(*SCRIPT, *SIMULATED, "--case", "nothing", "--ranks", "2")
    assert done.returncode == 2
    assert "no case has that name" in done.stderr


def test_checks_of_results() -> None:
    right = torch.randn(4, 4)
    equals(lambda: (right, right))([right, right + 1e-4])
    like(right)(right)
    for check, wrong in (
        (equals(lambda: right), right + right.abs().max() / 16),
        (equals(lambda: right), right[:2]),
        (equals(lambda: right), torch.full_like(right, torch.nan)),
        (like(right), right[:2]),
        (like(right), right / 0),
    ):
        with pytest.raises(AssertionError, match=r"an error of|shape|finite"):
            check(wrong)


def test_rows_as_text() -> None:
    row = Row("a case", "small", 2, host_us=10.0, error="RuntimeError: no driver")
    assert row.line().endswith("2 ranks  host     10.0 us  FAILED: RuntimeError: no driver")
    row = Row("a case", "small", 2, "whole", host_us=10.0, python_us=50.0, device_us=30.0,
              kernels=2, copies=1, gap_us=1.5, driver={"a": (1, 2.0), "b": (3, 4.0)},
              driver_calls=4, alone_us=20.0, torch_us=70.0, torch_device_us=40.0)  # fmt: skip
    assert " whole*    small " in row.line()
    assert "host     10.0 /    50.0 us  device     30.0 us  1.50 of alone     20.0 us" in row.line()
    assert "torch     70.0 /    40.0 us  driver 4 calls 6.0 us" in row.line()
    assert row.line().endswith("2 kernels 1 copies gap 1.5 us")


class _Event:
    """Stand-in for a GPU's event: records are 5 ms apart."""

    recorded = 0

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        _Event.recorded += 1
        self.at = 5.0 * _Event.recorded

    def synchronize(self) -> None: ...

    def elapsed_time(self, end: _Event) -> float:
        return end.at - self.at


def test_the_clock_and_the_profiler_of_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host is ahead of the device: each block, and each profiled call, begins with a spin."""
    order: list[str] = []

    def call() -> None:
        with torch.profiler.record_function("the call"):
            order.append("call")

    def read(path: Path) -> Profile:
        events = json.loads(path.read_text())["traceEvents"]
        calls = [e for e in events if e.get("name") == "the call" and e.get("ph") == "X"]
        return Profile(len(calls), 0, 0.0, 0.0)

    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: order.append(f"spin {cycles}"))
    monkeypatch.setattr(torch.cuda, "Event", _Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: order.append("synchronize"))
    monkeypatch.setattr(kernel_timeline, "of_trace", read)
    gpu = object.__new__(Gpu)
    assert gpu.device_us(call, 10.0) == 5000 / CALLS
    assert order == ["spin 100000", *["call"] * CALLS]
    order.clear()
    profile = gpu.profile(call, 10.0, tmp_path / "case")
    assert profile is not None
    assert profile.kernels == 3
    assert order == ["spin 125000", "call", "synchronize"] * 3
    assert [path.name for path in tmp_path.iterdir()] == ["case.kineto.json"]
    order.clear()
    gpu.device_us(call, 1e9)
    assert order[0] == "spin 125000000"  # at most 50 ms


def event(name: str, begin: float, end: float, kind: str = "kernel") -> dict[str, Any]:
    return {"name": name, "cat": kind, "ts": begin, "dur": end - begin, "ph": "X"}


def test_a_profile_of_torchs_profiler() -> None:
    """Calls follow a spinning kernel; kernels of several streams overlap."""
    spin = "at::cuda::(anonymous namespace)::spin_kernel(long)"
    events = [
        event("before the first call", 0, 1),
        event(spin, 1, 10),
        event("gemm", 10, 20),
        event("Memcpy DtoD", 11, 40, "gpu_memcpy"),
        event("add", 15, 25),
        event("gemm", 28, 30),
        {"name": "cuLaunchKernel", "cat": "cuda_driver", "ts": 5, "dur": 3, "ph": "X"},
        {"name": "process_name", "ph": "M"},
        event(spin, 50, 60),
        event("gemm", 60, 70),
        event("Memset", 62, 63, "gpu_memset"),
        event("gemm", 71, 80),
        event("gemm", 85, 90),
    ]
    # Means of two calls: gaps of 3 and 5, busy for 17 and 24.
    expected = Profile(3, 1, largest_gap_us=4, busy_us=20.5)
    assert kernel_timeline.of_profiler(reversed(events)) == expected
    with pytest.raises(ValueError, match="no spin_kernel among 1 kernels"):
        kernel_timeline.of_profiler(events[:1])


def test_a_profile_of_a_recording() -> None:
    def step(step: Any, begin: float, end: float) -> Event:
        return Event(0, "compute", 0, step, begin * 1e-6, end * 1e-6)

    copy = Copy(Region(1, "slot"), Region(0, "gathered"))
    timeline = Timeline(
        (
            step(Compute("consume", 1, (), ()), 30, 40),
            step(Compute("consume", 0, (), ()), 0, 10),
            step(Signal(1, "ready"), 0, 100),
            step(copy, 5, 45),
        )
    )
    profile = kernel_timeline.of_recording(timeline)
    assert (profile.kernels, profile.copies) == (2, 1)
    times = profile.largest_gap_us, profile.busy_us
    assert times == pytest.approx((20, 20))


def test_each_call_of_the_driver_is_forwarded_and_timed(tmp_path: Path) -> None:
    driver = TimedDriver(tmp_path, build())
    library, version, context = ctypes.CDLL(driver.path), ctypes.c_int(), ctypes.c_void_p()

    def ask() -> None:
        assert library.cuDriverGetVersion(ctypes.byref(version)) == 0
        assert library.cuCtxGetCurrent(ctypes.byref(context)) == 0

    ask()  # not timed
    assert version.value == 13010

    def ask_twice() -> None:
        ask()
        ask()

    calls = driver.calls_of(ask_twice)
    counts = {name: count for name, (count, _) in calls.items()}
    assert counts == {"cuDriverGetVersion": 2, "cuCtxGetCurrent": 2}
    assert all(us > 0 for _, us in calls.values())
    assert driver.calls_of(lambda: None) == {}
    assert all(hasattr(library, name) for name in driver_functions() if "Batch" not in name)
