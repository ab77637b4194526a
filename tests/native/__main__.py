"""Runs csrc/ under ThreadSanitizer, AddressSanitizer and UndefinedBehaviorSanitizer.

`python -m tests.native`: once with ranks as threads of a process (`ranks.cpp`), where a sanitizer
sees what ranks do to each other's memory; and once as the library in Python, with its own tests.
Needs the sanitizers' libraries of the C++ compiler.

A run that finds nothing writes a hash of csrc/ and of this folder to `passed.txt`, to be committed.
While the hash is the same, only ranks as threads run, under ThreadSanitizer; `--whole` runs all.
"""

from __future__ import annotations

import hashlib
import os
import random
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from symm_cp import native
from symm_cp.native.sources import Sources, Unit
from symm_cp.native.wire import FLAGS
from tests.native import loops

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PASSED = HERE / "passed.txt"
#: Libraries to load before Python: the sanitizer's runtime, and where that finds exceptions.
SANITIZERS = {
    "thread": ("libtsan.so", "libstdc++.so"),
    "address,undefined": ("libasan.so", "libstdc++.so"),
}
#: With AddressSanitizer, compiling takes three times as long at -O1; some warnings need -O1.
LEVEL = {"thread": ("-O1", "-g"), "address,undefined": ("-O0", "-g1")}
WARNINGS = ("-Wall", "-Wextra", "-Werror")
#: Flags: without waiting for them ranks race.
NEEDED = ("ready", "reduced", "done")
TESTS = ("tests/test_symmetric_memory.py", "tests/ops/test_in_flight.py", "tests/test_trace.py")
#: Tests of one process with one thread, in which nothing can race.
ALONE = ("tests/ops/test_attention_kernels.py", "tests/ops/test_native_tiles.py")
#: ThreadSanitizer does not see how OpenMP's threads synchronise.
THREADED = "tests/ops/test_native_tiles.py::test_bits_do_not_depend_on_threads"
OPTIONS = {
    # gloo was not built with this sanitizer: races within it are ignored.
    "TSAN_OPTIONS": f"suppressions={HERE / 'tsan.supp'}:halt_on_error=0:exitcode=66",
    "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
}
# Python keeps memory until it exits; sanitizers do not see how OpenMP's threads synchronise.
IN_PYTHON = {"ASAN_OPTIONS": "detect_leaks=0"}
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


def _run(
    command: Sequence[str], environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    full = {**os.environ, **OPTIONS, **(environment or {})}
    return subprocess.run(
        command,
        cwd=ROOT,
        env=full,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )


_BEGIN = time.monotonic()


def _say(sanitizer: str, text: str) -> None:
    print(f"{time.monotonic() - _BEGIN:4.0f} s, -fsanitize={sanitizer}: {text}", flush=True)


def _expect(done: subprocess.CompletedProcess[str], holds: bool) -> None:
    if not holds:
        sys.exit(f"{shlex.join(map(str, done.args))}: exit status {done.returncode}\n{done.stdout}")


def why_not(compiler: list[str], sanitizer: str, prefix: list[str], folder: Path) -> str:
    """Returns why a sanitizer cannot be used here: its library is missing, or it may not run."""
    source, program = folder / "empty.cpp", str(folder / "empty")
    source.write_text("int main() {}\n")
    built = _run([*compiler, f"-fsanitize={sanitizer}", str(source), "-o", program])
    return built.stdout if built.returncode != 0 else _run([*prefix, program]).stdout


def _plain_units() -> list[Unit]:
    """The units of csrc/ that need no torch, CUDA or Python."""
    units = Sources(native.source_dir()).plain
    return [unit for unit in units if not unit.name.startswith(("c_api", "cuda_"))]


def _compile_all(command: Sequence[str], arguments: Sequence[Sequence[str]]) -> None:
    def compile_one(each: Sequence[str]) -> None:
        done = _run([*command, *each])
        _expect(done, done.returncode == 0)

    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        list(pool.map(compile_one, arguments))


def check_warnings(compiler: list[str]) -> None:
    """Ends this program unless csrc/ compiles without warnings.

    The library's own flags, which optimise for this processor, give false warnings.
    """
    csrc = native.source_dir()
    command = [*compiler, "-std=c++20", "-O1", *WARNINGS, f"-I{csrc}", "-c", "-o", os.devnull]
    _compile_all(command, [[str(csrc / name)] for unit in _plain_units() for name in unit.sources])
    print(f"{time.monotonic() - _BEGIN:4.0f} s: no warnings", flush=True)


def build_library(compiler: list[str], sanitizer: str, folder: Path) -> dict[str, str]:
    """Builds the library into a folder; returns the environment in which Python finds it.

    Compiling takes most of the time, so arithmetic is optimised little, and all else not at all.
    """
    program = folder / "compiler"
    instrumenting = shlex.join([*compiler, f"-fsanitize={sanitizer}", "-g1"])
    program.write_text(
        '#!/usr/bin/env bash\nset -- "${@/#-O1/-O0}"\n'
        f'exec {instrumenting} "${{@/#-O[23]/-O1}}"\n'
    )
    program.chmod(0o755)
    environment = {"CXX": shlex.quote(str(program)), "SYMM_CP_BUILD_DIR": str(folder)}
    # The library cannot be loaded without the sanitizer's runtime, but it is built.
    done = _run([sys.executable, "-c", "from symm_cp import native; native.build()"], environment)
    _expect(done, len(list(folder.glob("*/*.so"))) == 1)
    return environment


def compile_plain(compiler: list[str], sanitizer: str, folder: Path) -> None:
    """Compiles what `build_ranks` links, where there is no library."""
    (folder / "objects").mkdir()
    flags = ["-std=c++20", *LEVEL[sanitizer], "-fPIC", f"-I{native.source_dir()}"]
    units = [(str(native.source_dir() / unit.sources[0]), unit.name) for unit in _plain_units()]
    _compile_all(
        [*compiler, *flags, f"-fsanitize={sanitizer}"],
        [["-c", source, "-o", str(folder / f"objects/{name}-.o")] for source, name in units],
    )


def build_ranks(compiler: list[str], sanitizer: str, folder: Path) -> str:
    """Links the programs here with the library's objects that need no torch or CUDA."""
    units = _plain_units()
    built = [str(path) for unit in units for path in folder.glob(f"objects/{unit.name}-*.o")]
    assert len(built) == len(units), (built, units)
    sources = [str(path) for path in HERE.glob("*.cpp")]
    flags = ["-std=c++20", *LEVEL[sanitizer], *WARNINGS, f"-I{native.source_dir()}"]
    command = [*compiler, *flags, f"-fsanitize={sanitizer}"]
    objects = {source: str(folder / f"{Path(source).stem}.o") for source in sources}
    _compile_all(command, [["-c", source, "-o", to] for source, to in objects.items()])
    program = str(folder / "ranks")
    wrapped = "-Wl,--wrap=mmap,--wrap=munmap"
    done = _run([*command, wrapped, *objects.values(), *built, "-pthread", "-o", program])
    _expect(done, done.returncode == 0)
    return program


def run_ranks(compiler: list[str], sanitizer: str, prefix: list[str], folder: Path) -> None:
    """Runs exchanges, messages and faults on 1 to 4 ranks; omitted waits must show as races.

    Exchanges also run with several threads in each rank.
    """
    program = [*prefix, build_ranks(compiler, sanitizer, folder)]
    _say(sanitizer, "the ranks' program is built")
    seed = random.randrange(1 << 30)

    def expect_ok(*arguments: str, **variables: int) -> None:
        environment = {name: str(value) for name, value in variables.items()}
        done = _run([*program, *arguments], environment)
        _expect(done, done.returncode == 0 and done.stdout == "ok\n")

    def expect_race(*attempts: Sequence[str]) -> None:
        for arguments in attempts:
            done = _run([*program, *arguments])
            if "ThreadSanitizer: data race" in done.stdout:
                return
        _expect(done, False)

    _say(sanitizer, f"ranks as threads, seed {seed}")
    for world_size in (1, 2, 3, 4):
        path = folder / f"loops {world_size}"
        path.write_bytes(loops.written(world_size))
        expect_ok("exchanges", str(path), str(seed))
        expect_ok("exchanges", str(path), str(seed + 1), RANK_THREADS=3)
    expect_ok("faults")
    expect_ok("messages", str(seed))
    expect_ok("signals")
    if sanitizer != "thread":
        return
    exchanges = "exchanges", str(folder / "loops 3")
    for flag in NEEDED:
        # Only few exchanges of a plan may need the flag, and their order may be right by chance.
        skip = str(FLAGS.index(flag))
        expect_race(*([*exchanges, str(plan), skip] for plan in range(seed, seed + 5)))


def run_library(
    compiler: list[str],
    sanitizer: str,
    prefix: list[str],
    folder: Path,
    environment: Mapping[str, str],
) -> None:
    """The library's own tests, in Python."""
    tests = TESTS if sanitizer == "thread" else (*TESTS, *ALONE)
    _say(sanitizer, f"the library: {' '.join(tests)}")
    runtimes = [
        _run([*compiler, f"-print-file-name={name}"]).stdout.strip()
        for name in SANITIZERS[sanitizer]
    ]
    log = folder / "log"
    options = {name: f"{value}:log_path={log}" for name, value in {**OPTIONS, **IN_PYTHON}.items()}
    pytest = [sys.executable, "-m", "pytest", "-q", "-x", *tests, "--deselect", THREADED]
    command = [*prefix, *pytest]
    done = _run(command, {**environment, **options, **ONE_THREAD, "LD_PRELOAD": ":".join(runtimes)})
    for path in folder.glob("log*"):
        print(path.read_text())
    _expect(done, done.returncode == 0 and not list(folder.glob("log*")))


def _check(compiler: list[str], sanitizer: str, prefix: list[str], *, whole: bool = True) -> bool:
    """Runs everything with one sanitizer, or only ranks as threads; whether it can be used here."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if reason := why_not(compiler, sanitizer, prefix, folder):
            _say(sanitizer, f"it cannot be used here: {reason}")
            return False
        if whole:
            environment = build_library(compiler, sanitizer, folder)
            _say(sanitizer, "the library is built")
            run_ranks(compiler, sanitizer, prefix, folder)
            run_library(compiler, sanitizer, prefix, folder, environment)
        else:
            compile_plain(compiler, sanitizer, folder)
            run_ranks(compiler, sanitizer, prefix, folder)
    _say(sanitizer, "nothing found")
    return True


def fingerprint() -> str:
    """Returns a hash of all that is compiled and run here."""
    files = [*native.source_dir().rglob("*"), *HERE.glob("*")]
    named = {str(path): path for path in files if path.suffix in (".cpp", ".h", ".py", ".supp")}
    contents = b"".join(named[name].read_bytes() for name in sorted(named))
    return hashlib.sha256(contents).hexdigest()


def main(arguments: Sequence[str]) -> None:
    """Runs all sanitizers at the same time: both wait a lot."""
    known = PASSED.read_text().strip() if PASSED.exists() else ""
    compiler = shlex.split(native.find_compiler())
    # ThreadSanitizer needs addresses where it expects them.
    prefix = ["setarch", "-R"]
    if shutil.which("setarch") is None or _run([*prefix, "true"]).returncode != 0:
        prefix = []
    if known == fingerprint() and "--whole" not in arguments:
        print("csrc/ and tests/native/ are as in the last run of all sanitizers", flush=True)
        _check(compiler, "thread", prefix, whole=False)
        return
    check_warnings(compiler)
    with ThreadPoolExecutor() as pool:
        checks = [pool.submit(_check, compiler, sanitizer, prefix) for sanitizer in SANITIZERS]
        ran = [check.result() for check in checks]
    if all(ran):
        PASSED.write_text(fingerprint() + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
