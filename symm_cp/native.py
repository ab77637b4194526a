"""Builds `csrc/` for the installed torch, loads it, and declares its C functions.

The only module that touches the native library. It is compiled by calling the C++ compiler with
the include and library paths of `torch.utils.cpp_extension`; ninja and pybind are not needed.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import difflib
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from types import ModuleType

import torch

from symm_cp import env, trusted, wire

# The sources that include torch's headers, which cost ten times what the sources do: one unit for
# the ops and one for the backend, which compile beside each other. (A precompiled header takes 500
# MB with g++, and more time than it saves.)
TORCH_UNITS = (
    (
        "attention.cpp",
        "attention_tile.cpp",
        "collectives.cpp",
        "dropout_mask.cpp",
        "exchange_heads.cpp",
        "gather_kv.cpp",
        "gradients.cpp",
        "groups.cpp",
        "kernels.cpp",
        "low_contention.cpp",
        "fused_matmuls.cpp",
        "matmul_all_reduce.cpp",
        "pool.cpp",
        "symmetric_memory.cpp",
    ),
    (
        "backend.cpp",
        "backend_collectives.cpp",
        "backend_messages.cpp",
        "backend_sparse.cpp",
        "backend_tensors.cpp",
        "backend_work.cpp",
        "failure_notes.cpp",
        "host_links.cpp",
        "two_level.cpp",
    ),
)
TORCH_SOURCES = tuple(name for unit in TORCH_UNITS for name in unit)
# Arithmetic and what each call runs; -O1 takes two thirds of the time for the others.
_LEVELS = {
    "attention_rows.cpp": "-O3",
    "channel.cpp": "-O3",
    "copy.cpp": "-O3",
    "exchange.cpp": "-O3",
    "group.cpp": "-O2",
    "lane.cpp": "-O2",
    "merge.cpp": "-O3",
    "message_engine.cpp": "-O2",
    "messages.cpp": "-O2",
    "philox.cpp": "-O3",
    "reduce.cpp": "-O3",
}
_FLAGS = ("-std=c++20", "-O1", "-fPIC", "-fvisibility-inlines-hidden", "-march=native")


class BuildError(RuntimeError):
    """The native part could not be built or loaded; the message says what to do about it."""


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """Turns what the machine refuses into a `BuildError` that says what to do."""
    try:
        yield
    except trusted.UntrustedError as error:
        raise BuildError(
            f"the native part of symm_cp is not used, as another user could change it: {error}; "
            "make it yours alone (chown, chmod go-w), or set SYMM_CP_BUILD_DIR to a folder that "
            "only you can write"
        ) from error
    except env.NoHomeError as error:
        raise BuildError(f"the native part of symm_cp has no place: {error}") from error
    except OSError as error:
        raise BuildError(
            f"the native part of symm_cp cannot be read or built: {error}; set SYMM_CP_BUILD_DIR "
            "to a folder that you can write, or have the owner of a shared build open it to you "
            "(chmod -R a+rX)"
        ) from error


def say(text: str) -> None:
    """Prints a line on stderr, where there is one that can be written."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):
            print(f"symm_cp: {text}", file=sys.stderr, flush=True)


def source_dir() -> Path:
    """Returns the folder of the C++ sources: in the installed package, else beside it."""
    package = Path(__file__).resolve().parent
    for candidate in (package / "csrc", package.parent / "csrc"):
        if (candidate / "c_api.cpp").is_file():
            return candidate
    raise BuildError(f"the C++ sources are missing: looked in {package} and beside it")


def find_compiler() -> str:
    """Returns the command of a C++ compiler, or raises `BuildError` saying what to install."""
    names = [chosen] if (chosen := env.compiler()) else ["c++", "g++", "clang++"]
    for name in names:
        try:
            program, *options = shlex.split(name)  # as in CXX="ccache g++"
        except ValueError as error:
            raise BuildError(f"CXX={name!r} is no command: {error}") from error
        if path := shutil.which(program):
            return shlex.join([path, *options])
    raise BuildError(
        "symm_cp needs a C++20 compiler to build its native part; found none of "
        f"{', '.join(names)}. Install one (Debian, Ubuntu: apt install g++; Fedora: "
        "dnf install gcc-c++; conda: conda install gxx), or set CXX to its path, "
        "then run: symm-cp build"
    )


def _processor() -> str:
    # -march=native binds the build to this kind of processor; a home directory may be shared.
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            if line.startswith(("flags", "Features")):
                return line
    return platform.machine()


def cache_key() -> str:
    """Returns the key of the build: sources, torch, Python tag, processor."""
    digest = hashlib.sha256()
    for path in sorted([*source_dir().iterdir(), *(source_dir() / "glue").iterdir()]):
        if path.suffix in {".cpp", ".h"}:
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    parts = (torch.__version__, str(sysconfig.get_config_var("SOABI")), _processor(), str(_FLAGS))
    digest.update("\0".join(parts).encode())
    return digest.hexdigest()[:20]


def library_path() -> Path:
    """Returns where the library for the installed torch is, or will be once it is built."""
    return env.build_dir() / cache_key() / "libsymm_cp.so"


def _glue_path() -> Path:
    return library_path().with_name("libsymm_cp_glue.so")


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", check=False
        )
    except OSError as error:
        raise BuildError(
            f"the C++ compiler does not run: {error}; set CXX to another one, then run: "
            "symm-cp build"
        ) from error
    if done.returncode != 0:
        raise BuildError(
            f"the native part of symm_cp does not compile for torch {torch.__version__}; "
            "symm-cp build shows why:\n"
            f"  {' '.join(command)}\n{done.stderr.strip()}"
        )


def _digest(fd: int) -> str:
    with open(fd, "rb", closefd=False) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest_path(library: Path) -> Path:
    return library.with_suffix(".sha256")


def _built(library: Path) -> bool:
    try:
        for path in (library, _digest_path(library)):
            os.close(trusted.open_to_read(path))
    except FileNotFoundError:
        return False
    return True


def _open_verified(library: Path) -> int:
    """Returns a descriptor of the library as it was built; raises `BuildError` or `OSError`.

    What is loaded runs as the user. Only its owner can change it or put another one in its place
    (see `trusted`); the digest tells a damaged file.
    """
    wanted = trusted.read(_digest_path(library)).decode(errors="replace")
    fd = trusted.open_to_read(library)
    if _digest(fd) != wanted:
        os.close(fd)
        raise BuildError(
            f"{library} is not what was built: delete {library.parent} to build it again"
        )
    return fd


def _torch_unit(names: Sequence[str]) -> list[str]:
    """The arguments that compile sources with torch's headers as one unit."""
    *others, last = (str(source_dir() / name) for name in names)
    included = (part for name in others for part in ("-include", name))
    return [*_torch_flags(), *included, "-c", last]


def _torch_flags() -> list[str]:
    paths = [f"-isystem{path}" for path in _extension().include_paths()]
    return [*paths, f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]


def _extension() -> ModuleType:
    # Imported here, because CUDA builds of torch log a warning on machines without a GPU.
    from torch.utils import cpp_extension

    return cpp_extension


def _torch_libraries(*names: str) -> list[str]:
    paths = _extension().library_paths()
    folders = [flag for path in paths for flag in (f"-L{path}", f"-Wl,-rpath,{path}")]
    return [*folders, *(f"-l{name}" for name in names), *_runtime(), "-pthread"]


def _runtime() -> list[str]:
    """The C++ runtime that torch has loaded here, ahead of the one that the compiler would link.

    Where a machine lacks the file that names it for linkers, compilers link their static one, and
    two runtimes in one process crash at the first exception or stream that passes between them.
    """
    with open("/proc/self/maps") as file:
        mapped = {f[5].strip() for line in file if len(f := line.split(maxsplit=5)) == 6}
    found = [path for path in sorted(mapped) if Path(path).name.startswith("libstdc++.so.6")]
    return [path for path in found if Path(path).is_file()][:1]


def _compile(target: Path) -> None:
    compiler = shlex.split(find_compiler())
    with _scratch(target) as scratch:
        # The slow units first, so that the others compile beside them.
        jobs = [
            [*compiler, *_FLAGS, *_torch_unit(unit), "-o", str(scratch / f"torch{number}.o")]
            for number, unit in enumerate(TORCH_UNITS)
        ]
        for source in sorted(source_dir().glob("*.cpp")):
            if source.name not in TORCH_SOURCES:
                level = [_LEVELS[source.name]] if source.name in _LEVELS else []
                out = str(scratch / f"{source.stem}.o")
                jobs.append([*compiler, *_FLAGS, *level, "-c", str(source), "-o", out])
        with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
            list(pool.map(_run, jobs))
        objects = [job[-1] for job in jobs]
        library = scratch / target.name
        _run(
            [
                *compiler,
                "-shared",
                *objects,
                "-o",
                str(library),
                *_torch_libraries("torch_cpu", "c10"),
            ]
        )
        _keep(library, target)


def check_headers(headers: Path) -> None:
    """Raises `BuildError` if Python's headers are not in their folder."""
    if not (headers / "Python.h").is_file():
        raise BuildError(
            f"the backend of torch.distributed needs Python's headers; {headers / 'Python.h'} is "
            "missing. Install them (Debian, Ubuntu: apt install python3-dev; Fedora: dnf install "
            "python3-devel)"
        )


def _compile_glue(target: Path) -> None:
    headers = Path(sysconfig.get_path("include"))
    check_headers(headers)
    with _scratch(target) as scratch:
        library = scratch / target.name
        flags = [*_FLAGS, *_torch_flags(), f"-isystem{headers}", "-O0", "-fvisibility=hidden"]
        source = str(source_dir() / "glue" / "backend_glue.cpp")
        libraries = _torch_libraries("torch_python", "torch_cpu", "c10")
        _run(
            [
                *shlex.split(find_compiler()),
                *flags,
                "-shared",
                source,
                "-o",
                str(library),
                *libraries,
            ]
        )
        _keep(library, target)


@contextlib.contextmanager
def _scratch(target: Path) -> Iterator[Path]:
    # Not named after the process: a killed build leaves its folder, and containers repeat numbers.
    scratch = Path(tempfile.mkdtemp(prefix="tmp", dir=target.parent))
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _keep(library: Path, target: Path) -> None:
    library.chmod(0o644)  # whatever the umask: a library that a group can write is not loaded
    with library.open("rb") as file:
        trusted.write(_digest_path(target), _digest(file.fileno()).encode())
    library.replace(target)  # atomic: a reader sees the whole library or none


def build(verbose: bool = False) -> Path:
    """Builds the native part for the installed torch unless it is there, and returns its path.

    Many processes may call it at once: one builds, the others wait. Raises `BuildError`.
    """
    return _build(library_path, _compile, "the native part", "10 to 40 seconds", verbose)


def build_glue(verbose: bool = False) -> Path:
    """The same for the library that gives Python the backend of torch.distributed.

    Raises `BuildError`, also where Python's headers are missing.
    """
    what = "the backend of torch.distributed"
    return _build(_glue_path, _compile_glue, what, "5 to 20 seconds", verbose)


def _build(
    path: Callable[[], Path],
    compile_to: Callable[[Path], None],
    what: str,
    span: str,
    verbose: bool,
) -> Path:
    with _explained():
        target = path()
        if _built(target):
            if verbose:
                say(f"already built: {target}")
            return target
        find_compiler()
        with trusted.folder(target.parent, create=True):
            pass
        with trusted.locked(target.parent / "lock"):
            if not _built(target):
                say(f"building {what} for torch {torch.__version__}, once ({span}) ...")
                start = time.perf_counter()
                compile_to(target)
                say(f"built in {time.perf_counter() - start:.0f} s")
    return target


_VOID, _INT, _LONG, _TEXT = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_char_p
_EPOCH, _LAYOUT = ctypes.c_uint32, ctypes.POINTER(wire.WorkspaceLayout)
#: Takes the name of a group; see csrc/groups.h.
FindGroup = ctypes.CFUNCTYPE(_INT, _TEXT)
_SIGNATURES: dict[str, tuple[object, list[object]]] = {
    "symm_cp_error": (_TEXT, []),
    "symm_cp_wire": (_TEXT, []),
    "symm_cp_group_open": (_VOID, [_TEXT, _INT, _INT, _LONG, _LONG]),
    "symm_cp_group_close": (None, [_VOID]),
    "symm_cp_release_groups": (None, []),
    "symm_cp_begin": (_LONG, [_VOID, _LONG, _TEXT]),
    "symm_cp_fail": (None, [_VOID, _TEXT]),
    "symm_cp_refuse": (None, [_VOID, _INT, _TEXT]),
    "symm_cp_reserve": (_LONG, [_VOID, _INT, _LONG]),
    "symm_cp_set_timeout": (None, [_VOID, _LONG]),
    "symm_cp_slot_bytes": (_LONG, [_VOID, _INT]),
    "symm_cp_workspace_bytes": (_LONG, [_VOID, _INT]),
    "symm_cp_epoch": (_LONG, [_VOID, _INT]),
    "symm_cp_skip": (None, [_VOID, _INT, _LONG]),
    "symm_cp_move": (None, [_VOID, _INT, _LONG]),
    "symm_cp_run": (_LONG, [_VOID, _VOID, _INT, _VOID, _VOID]),
    "symm_cp_exchange_boxes": (
        _LONG,
        [_VOID, _TEXT, _VOID, _LONG, _VOID, _LONG, _INT, _VOID, _INT],
    ),
    "symm_cp_set_loop": (
        None,
        [_VOID, _INT, _INT, _INT, _VOID, _INT, _VOID, _INT, _INT, _INT, _INT],
    ),
    "symm_cp_exchange": (
        _LONG,
        [_VOID, *[_INT] * 3, _TEXT, _VOID, _VOID, _INT, _VOID, _VOID, _INT, _INT, _INT],
    ),
    "symm_cp_set_on_one_host": (None, [_VOID, _INT]),
    "symm_cp_lock": (_LONG, [_VOID]),
    "symm_cp_unlock": (None, [_VOID]),
    "symm_cp_explain": (None, [_TEXT]),
    "symm_cp_group_known": (None, [_VOID]),
    "symm_cp_on_unknown_group": (None, [FindGroup]),
    "symm_cp_shard": (_VOID, [_VOID, _INT]),
    "symm_cp_slot": (_VOID, [_VOID]),
    "symm_cp_met_on_this_host": (_INT, [_TEXT]),
    "symm_cp_probe_links": (_VOID, [_TEXT]),
    "symm_cp_link_lost": (_INT, [_VOID, _INT]),
    "symm_cp_links_close": (None, [_VOID]),
    "symm_cp_group_timeout_ms": (_LONG, [_TEXT]),
    "symm_cp_gather_runs": (_LONG, []),
    "symm_cp_was_told": (ctypes.c_int, [ctypes.c_char_p]),
    "symm_cp_serve_cpu": (None, [_INT]),
    "symm_cp_serve_few_rows": (None, [_INT]),
    "symm_cp_keep_results": (None, [_LONG]),
    "symm_cp_empty_cache": (_LONG, []),
    "symm_cp_result_memory": (None, [ctypes.POINTER(_LONG)]),
    "symm_cp_reduce": (_LONG, [_VOID, _VOID, _INT, _LONG, _INT, _INT, _INT]),
    "symm_cp_reducible": (_INT, [_INT, _INT]),
    "symm_cp_copy": (None, [_VOID, _VOID, _LONG, _INT]),
    "symm_cp_slot_stores": (None, [_VOID, _VOID, _LONG, _VOID]),
    "symm_cp_is_symmetric": (_INT, [_VOID, _TEXT]),
    "symm_cp_rendezvous_begun": (_LONG, [_TEXT]),
    "symm_cp_record": (None, [_INT]),
    "symm_cp_recorded": (ctypes.POINTER(wire.TraceEvent), [ctypes.POINTER(_LONG)]),
    "symm_cp_recorded_free": (None, [ctypes.POINTER(wire.TraceEvent)]),
    "symm_cp_probe_begin": (None, [ctypes.c_uint64, _LONG, _LONG]),
    "symm_cp_probe_end": (_LONG, []),
    "symm_cp_probe_step": (None, []),
    "symm_cp_set_pauses": (None, [ctypes.c_uint64, _LONG]),
    "symm_cp_driver": (_LONG, [_TEXT]),
    "symm_cp_driver_version": (_LONG, [_TEXT]),
    "symm_cp_stream_signals_version": (_INT, []),
    "symm_cp_streams_open": (
        _VOID,
        [_TEXT, _VOID, _INT, _INT, _LAYOUT, _INT, _INT, _TEXT, _LONG, _VOID],
    ),
    "symm_cp_streams_close": (None, [_VOID]),
    "symm_cp_streams_run": (_LONG, [_VOID, _VOID, _INT, _VOID, _VOID, _EPOCH, _INT, _TEXT]),
    "symm_cp_streams_expect": (None, [_VOID, _INT, _INT, _EPOCH, _EPOCH, _TEXT]),
    "symm_cp_streams_give_up": (_LONG, [_VOID]),
    "symm_cp_streams_ended": (_LONG, [_VOID]),
    "symm_cp_streams_set_single_copies": (None, [_VOID, _INT]),
    "symm_cp_context": (_VOID, [_TEXT]),
    "symm_cp_set_context": (_LONG, [_TEXT, _VOID]),
    "symm_cp_stream_open": (_VOID, [_TEXT]),
    "symm_cp_stream_ended": (_LONG, [_TEXT, _VOID]),
    "symm_cp_capture_id": (_LONG, [_TEXT, _VOID]),
    "symm_cp_watch_stop": (None, []),
}


_OTHER_VERSION = "csrc/ and symm_cp/ are of different versions: install symm_cp again"


def _compare(library: str) -> None:
    """Raises `BuildError` with the difference when the library has another contract."""
    package = wire.description()
    if library != package:
        lines = difflib.unified_diff(
            library.splitlines(), package.splitlines(), "csrc/wire.h", "symm_cp/wire.py", "", "", 0
        )
        raise BuildError("\n".join([_OTHER_VERSION, *lines]))


@cache
def load() -> ctypes.CDLL:
    """Returns the native library, building it if it was never built; raises `BuildError`.

    The library must be what was built, in folders that only its owner can change. Loading registers
    the CPU backend with torch's symmetric memory.
    """
    library = _open_library(build(), ctypes.CDLL)
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name, None)
        if function is None:
            raise BuildError(f"{_OTHER_VERSION} (the library has no function {name})")
        function.restype = result
        function.argtypes = arguments
    _compare(library.symm_cp_wire().decode())
    try:
        library.symm_cp_keep_results(env.kept_bytes())
    except ValueError as error:  # an import never fails
        say(f"{error}; keeping as much as by default")
    # Its thread calls the CUDA driver, which ends with the process.
    atexit.register(library.symm_cp_watch_stop)
    return library


def _open_library(path: Path, kind: type[ctypes.CDLL]) -> ctypes.CDLL:
    with _explained():
        # Stays open: the loader knows libraries by their names, so that the same number for another
        # file would give this library again.
        fd = _open_verified(path)
    name = f"/proc/self/fd/{fd}"  # what was verified, whatever the path names by now
    try:
        return kind(name)
    except OSError as error:  # a damaged file, or a file system that allows no execution
        os.close(fd)
        raise BuildError(
            f"the native part of symm_cp does not load: {str(error).replace(name, str(path))}; "
            f"delete {path.parent} to build it again, or set SYMM_CP_BUILD_DIR to another folder"
        ) from error


@cache
def load_glue() -> ctypes.CDLL:
    """Returns the library of `build_glue`, building it if need be; raises `BuildError`."""
    load()
    glue = _open_library(build_glue(), ctypes.PyDLL)
    make = glue.symm_cp_backend_object
    make.restype = ctypes.py_object
    make.argtypes = [
        *(_VOID, ctypes.py_object, _TEXT, _INT, _INT, _LONG),
        *(ctypes.py_object, ctypes.py_object, ctypes.POINTER(ctypes.c_int32), _INT),
    ]
    return glue


def address_of(function: object) -> int:
    """Returns the address of a function of a native library."""
    return ctypes.cast(function, _VOID).value or 0  # type: ignore[arg-type]


def error() -> str:
    """Returns the text of the last failure of a native call in this thread."""
    text: bytes = load().symm_cp_error()
    return text.decode(errors="replace")
