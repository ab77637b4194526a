"""The simulated machine of this process: its driver's library, streams, and kernels in Python."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import shlex
import subprocess
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch

from symm_cp import native

_FOLDER = Path(__file__).parent
_SOURCES = ("driver.cpp", "driver_streams.cpp", "driver_capture.cpp", "driver_memory.cpp")
_BATCHES = {0: 0, 12080: 9, 13000: 8}  # arguments of a batched copy, by first driver version
_TORCH = Path(torch.__file__).parent
_FLAGS = ("-std=c++20", "-O1", "-fPIC", "-pthread", f"-I{native.source_dir()}")

#: The order of `simulated_set`.
SETTINGS = ("delays_us", "driver_version", "patience_ms", "one_queue", "multiprocessors",
            "contexts", "counts_deadlocks",
            "write", "wait", "batch", "peer_copy")  # fmt: skip
#: Values of the last four settings: how such commands misbehave; "reorder" is for waits only.
FAULTS = ("", "refuse", "hang", "ignore", "reorder")

#: A function that a stream calls.
CALL = ctypes.CFUNCTYPE(None)
#: A function that says where torch's ops go, see `HostedOps` in csrc/cuda/driver.h.
OPS_TO = ctypes.CFUNCTYPE(None, ctypes.c_int)


def _compile(target: Path, *arguments: str) -> None:
    if target.exists():
        return
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / target.name
        command = shlex.split(native.find_compiler())
        subprocess.run([*command, *_FLAGS, *arguments, "-o", str(made)], check=True)
        scratch = target.with_name(f"{target.name}.{Path(folder).name}")
        scratch.write_bytes(made.read_bytes())
        scratch.replace(target)


@cache
def _folder() -> Path:
    """Where the libraries are, for this version of the sources and the compiler."""
    digest = hashlib.sha256(f"{native.find_compiler()} {torch.__version__}".encode())
    for name in (
        *_SOURCES,
        "driver_batch.cpp",
        "driver_poison.cpp",
        "driver_model.h",
        "../../csrc/cuda/driver.h",
    ):
        digest.update((_FOLDER / name).read_bytes())
    made = Path(tempfile.gettempdir()) / f"symm_cp_simulated_driver_{digest.hexdigest()[:16]}"
    made.mkdir(exist_ok=True)
    return made


@cache
def _core() -> Path:
    path = _folder() / "core.so"
    if not path.exists():
        objects = [path.with_suffix(f".{Path(name).stem}.o") for name in _SOURCES]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            sources = (str(_FOLDER / name) for name in _SOURCES)
            list(pool.map(lambda made, source: _compile(made, "-c", source), objects, sources))
        _compile(path, "-shared", *map(str, objects))
    return path


@cache
def build(version: int = 13010) -> str:
    """Compiles the driver of a version, unless it was before; returns the library's path."""
    arguments = next(count for since, count in reversed(_BATCHES.items()) if version >= since)
    path = _folder() / f"driver_{arguments}.so"
    source = str(_FOLDER / "driver_batch.cpp")
    core = _core()
    _compile(path, "-shared", f"-DBATCH={arguments}", source, "-Wl,--no-as-needed", str(core),
             f"-Wl,-rpath,{core.parent}")  # fmt: skip
    return str(path)


@cache
def build_poison() -> str:
    """Compiles the allocator, unless it was before; returns the library's path."""
    path, core = _folder() / "poison.so", _core()
    source = str(_FOLDER / "driver_poison.cpp")
    _compile(path, "-shared", source, f"-I{_TORCH}/include", f"-L{_TORCH}/lib", "-lc10", str(core),
             f"-Wl,-rpath,{core.parent}")  # fmt: skip
    return str(path)


class Machine:
    """The driver's library and the streams that torch would have made."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL(str(_core()))
        for name in ("stream", "replay"):
            getattr(self.library, f"simulated_{name}").restype = ctypes.c_void_p
        pointer, number = ctypes.c_void_p, ctypes.c_int
        for name, types in {
            "serve": [pointer], "drain": [pointer], "destroy": [pointer],
            "default_stream": [number, pointer],
            "call": [pointer, CALL, number, ctypes.c_char_p],
            "capture_begin": [pointer], "capture_end": [pointer, number, ctypes.POINTER(pointer)],
            "replay": [pointer, pointer, number], "graph_destroy": [pointer],
            "ops": [OPS_TO],
        }.items():  # fmt: skip
            with contextlib.suppress(AttributeError):
                getattr(self.library, f"simulated_{name}").argtypes = types
        self.library.simulated_replay.restype = number
        for name in ("stream", "use"):
            getattr(self.library, f"symm_cp_hosted_{name}").restype = pointer
        self.library.symm_cp_hosted_use.argtypes = [pointer]
        self.names: dict[str, bytes] = {}
        self.kernels_loaded: set[str] = set()
        self.lazy_loading = False
        self.polling_kernels = 0  # how many were launched
        self.mode: Any = None  # of the devices
        self.errors: list[BaseException] = []
        self._calls: deque[tuple[Any, list[bool]]] = deque()
        self._defaults: dict[int, int] = {}

    def stream(self, device: int) -> int:
        """Makes a stream with a Python thread that runs its commands: its kernels are in Python."""
        made: int = self.library.simulated_stream(device, 0)

        def serve() -> None:
            # Autograd and modes of torch have seen the ops, when the host issued them.
            with torch.inference_mode(), torch._C._AutoDispatchBelowADInplaceOrView():
                self.library.simulated_serve(made)

        threading.Thread(target=serve, daemon=True).start()
        return made

    def default_stream(self, device: int) -> int:
        """The stream that handle 0 stands for."""
        if device not in self._defaults:
            self._defaults[device] = self.stream(device)
            self.library.simulated_default_stream(device, self._defaults[device])
        return self._defaults[device]

    def call(self, stream: int, function: Callable[[], object], *, kind: int = 0,
             name: str = "a kernel", keep: list[Any] | None = None) -> None:  # fmt: skip
        """Has a stream call a function; kind 1: a kernel, 2: a polling one.

        If it raises, functions that streams are yet to call are skipped. `keep`: a list that lives
        as long as the stream may call the function; without it, the function is called once.
        """
        held, ended = [function], list[bool]()
        once = keep is None  # `run` must not hold `keep`, which holds it
        del function

        def run() -> None:
            try:
                if not self.errors:
                    # Objects that only the function holds are freed when it returns.
                    (held.pop() if once else held[0])()
            except BaseException as error:
                self.errors.append(error)
            held[:] = () if once else held
            ended.append(True)

        # The stream calls it later; until then it must not be freed, nor while it returns.
        while len(self._calls) > 1000 and self._calls[0][1]:
            self._calls.popleft()
        wrapped = CALL(run)
        if keep is None:
            self._calls.append((wrapped, ended))
        else:
            keep.append(wrapped)
        self.polling_kernels += kind == 2
        encoded = self.names.setdefault(name, name.encode())
        self.library.simulated_call(stream, wrapped, kind, encoded)

    def set(self, **settings: int | str) -> None:
        """Changes settings of the driver, by the names of `SETTINGS`."""
        for name, value in settings.items():
            number = FAULTS.index(value) if isinstance(value, str) else int(value)
            self.library.simulated_set(SETTINGS.index(name), number)

    def raise_errors(self) -> None:
        """Raises the first error that kernels have raised since the last time, if any."""
        if self.errors:
            error = self.errors[0]
            self.errors.clear()
            raise error

    @cached_property
    def poison(self) -> ctypes.CDLL:
        """The allocator that fills freed memory with NaN, and finds writes to it."""
        return ctypes.CDLL(build_poison())

    def written_when_free(self) -> str:
        """Describes the writes to freed memory since the last call."""
        text = ctypes.create_string_buffer(1 << 14)
        self.poison.poison_check(text, ctypes.c_size_t(len(text)))
        return text.value.decode()

    @contextlib.contextmanager
    def pool(self) -> Iterator[None]:
        """Inside, this thread's allocations are counted; memory must be poisoned."""
        before = self.poison.poison_pool(1)
        try:
            yield
        finally:
            self.poison.poison_pool(before)

    def pooled(self) -> int:
        """The number of counted blocks that are still allocated."""
        self.poison.poison_pooled.restype = ctypes.c_int64
        return int(self.poison.poison_pooled())

    def most(self) -> int:
        """The most bytes allocated at a time since the last call; memory must be poisoned."""
        self.poison.poison_most.restype = ctypes.c_int64
        return int(self.poison.poison_most())

    def load(self, kernel: str, *, anyway: bool) -> None:
        """Loads a kernel when it is first launched, as drivers do by default."""
        if self.lazy_loading and (anyway or kernel not in self.kernels_loaded):
            self.kernels_loaded.add(kernel)
            self.library.simulated_load()


@cache
def machine() -> Machine:
    """The machine of this process."""
    return Machine()
