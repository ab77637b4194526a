"""Building and loading the native part: the cache's key, the lock, what failures say.

No test here compiles: a script that stands in for the compiler counts its calls.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from symm_cp import native, trusted
from symm_cp.native import building, declared, library, prebuilt, wire
from symm_cp.native.compiler import link_flags, processor
from symm_cp.native.declared import Enumeration
from symm_cp.native.sources import Sources
from tests.exhaustive import some

ROOT = Path(__file__).resolve().parent.parent
SOURCES = Sources(native.source_dir())
# Those with torch's headers are compiled several at a time.
UNITS = len(SOURCES.plain) + len(SOURCES.torch)
COMPILED = sorted(name for unit in (*SOURCES.plain, *SOURCES.torch) for name in unit.sources)

# Writes down its arguments, then makes the file that -o names. (A build runs dozens of them, and
# Python would take longer to start than the rest of a test.)
_STAND_IN = """#!/bin/sh
[ "$1" = --version ] && echo stand-in 1.0 && exit
echo "$*" >> {log}
{then}
while [ "$1" != -o ]; do shift; done
: > "$2"
"""
_FAILS = "echo csrc/oops.cpp:1: error: no luck >&2; exit 1"


class Compiler:
    """A stand-in for the compiler, and an empty folder to build in."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "compiler"
        self.log = folder / "log"
        self.build_dir = folder / "built"

    def write(self, *, seconds: float = 0.0, fails: bool = False, then: str = "") -> None:
        then = _FAILS if fails else f"sleep {seconds}" if seconds else then
        self.path.write_text(_STAND_IN.format(log=shlex.quote(str(self.log)), then=then))
        self.path.chmod(0o755)

    def calls(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []

    def environment(self) -> dict[str, str]:
        return {"CXX": str(self.path), "SYMM_CP_BUILD_DIR": str(self.build_dir)}

    def leftovers(self) -> list[Path]:
        return list(self.build_dir.glob("*/*.tmp"))


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compiler:
    made = Compiler(tmp_path)
    made.write()
    monkeypatch.setattr(prebuilt, "FOLDER", tmp_path / "none")
    for name, value in made.environment().items():
        monkeypatch.setenv(name, value)
    return made


# The package is imported with the library that is there; the stand-in's comes after.
_BUILD_LATER = """
import os, sys
from symm_cp import native
os.environ.update({environment!r})
print("ready", flush=True)
sys.stdin.readline()
print(native.build())
"""


def python(code: str, **options: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,  # type: ignore[call-overload]
    )


def test_build_compiles_each_source_once(compiler: Compiler) -> None:
    target = native.build()
    assert target == native.library_path()
    assert target.is_file()
    assert target.is_relative_to(compiler.build_dir)
    calls = compiler.calls()
    assert len(calls) == UNITS + 1
    for name in COMPILED:
        assert sum(f" {name} " in call for call in calls) == 1
    assert "-shared" in calls[-1]
    assert native.build() == target
    assert len(compiler.calls()) == len(calls)
    assert not compiler.leftovers()


def test_build_says_once_what_it_does(
    compiler: Compiler, capsys: pytest.CaptureFixture[str]
) -> None:
    native.build()
    lines = capsys.readouterr().err.splitlines()
    assert re.search(r"building .* torch .* once", lines[0]), lines
    assert len(lines) == 2
    native.build()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("terminal", [False, True])
def test_build_shows_progress(
    terminal: bool,
    compiler: Compiler,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    monkeypatch.setattr(building, "_QUIET", -1.0)
    native.build()
    _, *shown, _ = re.split(r"[\r\n]+", capsys.readouterr().err.rstrip())
    files = len(COMPILED)
    numbers = [int(done) for done in re.findall(rf"compiled (\d+) of {files} files", str(shown))]
    assert numbers[-1] == files
    assert len(numbers) == UNITS
    assert numbers == sorted(numbers)


@pytest.mark.exhaustive
def test_processes_that_build_at_once_build_once(compiler: Compiler) -> None:
    compiler.write(seconds=0.2)
    code = _BUILD_LATER.format(environment=compiler.environment())
    processes = [python(code) for _ in range(2)]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    outputs = [process.communicate("go\n") for process in processes]
    assert {out.strip() for out, _ in outputs} == {str(native.library_path())}
    assert len(compiler.calls()) == UNITS + 1
    assert sum("building" in err for _, err in outputs) == 1


@pytest.mark.exhaustive
def test_a_killed_build_blocks_nobody(compiler: Compiler) -> None:
    compiler.write(seconds=30)
    code = _BUILD_LATER.format(environment=compiler.environment())
    process = python(code, start_new_session=True)
    assert process.stdin is not None
    process.stdin.write("go\n")
    process.stdin.flush()
    deadline = time.monotonic() + 60
    while not compiler.calls():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)  # its compilers too
    process.communicate()
    assert not native.library_path().exists()
    assert not list(compiler.build_dir.glob("[0-9a-f]*"))  # no folder of a library
    compiler.write()
    assert native.build().is_file()
    assert not compiler.leftovers()


def test_a_failed_compilation_says_why(compiler: Compiler) -> None:
    compiler.write(fails=True)
    with pytest.raises(native.BuildError) as caught:
        native.build()
    message = str(caught.value)
    for part in (torch.__version__, "error: no luck", str(compiler.path)):
        assert part in message
    assert not native.library_path().exists()
    assert not compiler.leftovers()
    compiler.write()
    assert native.build().is_file()  # nothing of the failure is kept


def test_a_folder_that_cannot_be_written(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("SYMM_CP_BUILD_DIR", str(tmp_path / "file" / "below"))
    with pytest.raises(native.BuildError, match="set SYMM_CP_BUILD_DIR"):
        native.build()


@pytest.mark.parametrize("call", ["open", "mkdir", "chmod"])
def test_whatever_the_system_refuses_is_explained(
    call: str, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise PermissionError(13, "Permission denied", "here")

    monkeypatch.setattr(os, call, refuse)
    with pytest.raises(native.BuildError, match=r"Permission denied: .*SYMM_CP_BUILD_DIR"):
        native.load.__wrapped__()


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ("'unfinished", 'CXX="\'unfinished" is no command'),
        ("{folder}/log -O0", "does not run: .*Permission denied|found none of"),
        ("{folder}/script", "does not run: .*Exec format error"),
    ],
)
def test_a_compiler_that_is_none(
    chosen: str,
    message: str,
    compiler: Compiler,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    (tmp_path / "script").write_bytes(b"\x00\xff no program")
    (tmp_path / "script").chmod(0o755)
    monkeypatch.setenv("CXX", chosen.format(folder=tmp_path))
    with pytest.raises(native.BuildError, match=message):
        native.build()


def test_the_cpp_runtime_is_that_of_torch(tmp_path: Path) -> None:
    """Even with a compiler that would link its own, as some toolchains for servers do."""
    source, library = tmp_path / "text.cpp", tmp_path / "libtext.so"
    source.write_text('#include <iostream>\nvoid text() { std::cout << "text"; }\n')
    compiler = [*shlex.split(native.find_compiler()), "-static-libstdc++", "-shared", "-fPIC"]
    line = [*compiler, str(source), "-o", str(library), *link_flags("c10")]
    subprocess.run(line, check=True)
    assert b"libstdc++.so.6\0" in library.read_bytes()  # among the libraries that it needs


def test_what_the_compiler_says_may_be_no_text(compiler: Compiler) -> None:
    compiler.path.write_text("#!/bin/sh\nprintf 'no \\377 luck' >&2\nexit 1\n")
    with pytest.raises(native.BuildError, match="no \ufffd luck"):
        native.build()


@pytest.mark.parametrize("home", [None, "", "relative"])
def test_without_a_home(home: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.setattr("pwd.getpwuid", unknown)
    for name in ("SYMM_CP_BUILD_DIR", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    if home is not None:
        monkeypatch.setenv("HOME", home)
    with pytest.raises(
        native.BuildError, match=rf"user {os.getuid()} has no home .* set SYMM_CP_B"
    ):
        native.load.__wrapped__()


def test_a_processor_that_does_not_say_what_it_is(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = Path.read_text

    def refused(path: Path, **options: str) -> str:
        if path == Path("/proc/cpuinfo"):
            raise PermissionError(13, "Permission denied", str(path))
        return read(path, **options)

    monkeypatch.setattr(Path, "read_text", refused)
    assert processor() == platform.machine()
    native.build()


def test_a_damaged_library(compiler: Compiler) -> None:
    native.build()  # an empty file
    with pytest.raises(native.BuildError, match=r"does not load: .*; delete "):
        native.load.__wrapped__()


@pytest.mark.parametrize("mode", [0o777, 0o702])
def test_a_folder_that_others_can_write_is_not_trusted(compiler: Compiler, mode: int) -> None:
    folder = native.build().parent
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(mode)
    with pytest.raises(native.BuildError, match=rf"others can write .*mode {mode:o}"):
        native.load.__wrapped__()


def test_a_file_that_others_can_write_is_not_trusted(compiler: Compiler) -> None:
    library = native.build()
    library.parent.chmod(0o755)
    library.chmod(0o666)
    for use in (native.build, native.load.__wrapped__):
        with pytest.raises(native.BuildError, match=r"symm_cp.so: others can write .*mode 666"):
            use()


@pytest.mark.parametrize("umask", [0, 0o002])
def test_a_library_is_the_users_own_whatever_the_umask(compiler: Compiler, umask: int) -> None:
    before = os.umask(umask)
    try:
        folder = native.build().parent
    finally:
        os.umask(before)
    cached = folder.with_name("objects")
    paths = (folder, *folder.iterdir(), cached, *cached.iterdir())
    assert not any(path.stat().st_mode & 0o022 for path in paths)


def test_a_parent_that_others_can_write_is_not_trusted(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    monkeypatch.setenv("SYMM_CP_BUILD_DIR", str(shared / "symm_cp"))
    with pytest.raises(native.BuildError, match=r"shared: others can write .*SYMM_CP_BUILD_DIR"):
        native.build()
    assert not list(shared.iterdir())
    assert not compiler.calls()
    shared.chmod(0o1777)
    native.build()
    shared.chmod(0o777)  # after the build: somebody can put another folder there
    with pytest.raises(native.BuildError, match=r"shared: others can write"):
        native.load.__wrapped__()


def test_a_link_instead_of_the_lock_empties_nothing(compiler: Compiler, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    compiler.build_dir.mkdir()
    (compiler.build_dir / "lock").symlink_to(victim)
    with pytest.raises(native.BuildError, match=r"lock: it is a symbolic link"):
        native.build()
    assert victim.read_text() == "precious"
    assert not compiler.calls()


def test_what_is_loaded_is_what_was_verified(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another file that takes the library's name after the check is not loaded."""
    path = native.build()
    verified = path.stat().st_ino
    loaded = []

    def load(name: str) -> None:
        other = path.with_name("other")
        other.write_bytes(b"")
        other.replace(path)
        loaded.append(os.stat(name).st_ino)
        raise OSError(f"{name}: is no library")

    monkeypatch.setattr(library, "_Library", load)
    with pytest.raises(native.BuildError, match=re.escape(f"does not load: {path}: is no")):
        native.load.__wrapped__()
    assert loaded == [verified]
    assert path.stat().st_ino != verified


def test_a_shared_build_that_is_read_only(compiler: Compiler) -> None:
    """Built by root or the package's owner, opened to all; nothing in it is written again."""
    library = native.build()
    for path in (library.parent, *library.parent.iterdir()):
        path.chmod(0o555 if path.is_dir() else 0o444)
    before = {path: path.stat().st_mtime_ns for path in library.parent.iterdir()}
    assert native.build() == library
    os.close(trusted.open_to_read(library))
    assert {path: path.stat().st_mtime_ns for path in library.parent.iterdir()} == before
    library.parent.chmod(0o700)


@pytest.fixture
def checkout(compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Sources that may be changed, once built."""
    copy = tmp_path / "csrc"
    shutil.copytree(native.source_dir(), copy)
    monkeypatch.setattr(building, "source_dir", lambda: copy)
    native.build()
    return copy


def change(path: Path) -> None:
    with path.open("a") as file:
        file.write("// changed\n")


def built_again(compiler: Compiler) -> set[str]:
    """Builds; returns the sources that were compiled."""
    before = len(compiler.calls())
    native.build()
    *calls, link = compiler.calls()[before:]
    assert "-shared" in link
    return {word for call in calls for word in call.split() if word.endswith(".cpp")}


def test_a_change_of_a_source_compiles_that_source(compiler: Compiler, checkout: Path) -> None:
    change(checkout / "exchange" / "reduce.cpp")
    assert built_again(compiler) == {"exchange/reduce.cpp"}


def test_a_change_of_a_header_compiles_what_includes_it(compiler: Compiler, checkout: Path) -> None:
    change(checkout / "exchange" / "float16.h")
    compiled = built_again(compiler)
    # At any depth: attention/tile.cpp, which needs torch, by passes.h, products.h, rows.h and more.
    assert {"exchange/reduce.cpp", "attention/rows.cpp", "attention/tile.cpp"} <= compiled
    assert "memory/segment.cpp" not in compiled
    assert not any(name.startswith("backend/") for name in compiled)


def test_a_change_of_a_source_with_torch_compiles_its_unit(
    compiler: Compiler, checkout: Path
) -> None:
    change(checkout / "ops" / "gradients.cpp")
    (unit,) = (unit for unit in SOURCES.torch if "ops/gradients.cpp" in unit.sources)
    assert built_again(compiler) == set(unit.sources)


def test_sources_that_were_built_before_are_not_compiled_again(
    compiler: Compiler, checkout: Path
) -> None:
    source = checkout / "exchange" / "reduce.cpp"
    text = source.read_text()
    change(source)
    built_again(compiler)
    shutil.rmtree(compiler.build_dir / native.cache_key())
    source.write_text(text)
    for path in compiler.build_dir.glob("*/libsymm_cp.so"):
        path.unlink()
    assert built_again(compiler) == set()


@pytest.mark.parametrize("place", ["torch.__version__", "symm_cp.native.compiler.FLAGS"])
def test_objects_are_those_of_the_same_torch_and_flags(
    place: str, compiler: Compiler, checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(place, "2.13.1" if "torch" in place else ("-O0",))
    if "FLAGS" in place:
        monkeypatch.setattr(building, "FLAGS", ("-O0",))
    assert built_again(compiler) == set(COMPILED)


def test_objects_are_those_of_the_same_compiler(compiler: Compiler, checkout: Path) -> None:
    change(checkout / "exchange" / "reduce.cpp")
    compiler.path.write_text(compiler.path.read_text().replace("stand-in 1.0", "stand-in 1.1"))
    assert built_again(compiler) == set(COMPILED)


def test_an_object_that_others_can_write_is_not_linked(compiler: Compiler, checkout: Path) -> None:
    change(checkout / "exchange" / "reduce.cpp")
    for path in (compiler.build_dir / "objects").glob("c_api-*.o"):
        path.chmod(0o666)
    with pytest.raises(native.BuildError, match=r"c_api-.*: others can write"):
        native.build()


def test_a_source_that_changes_during_a_build_is_not_mistaken(
    compiler: Compiler, checkout: Path
) -> None:
    source = checkout / "exchange" / "reduce.cpp"
    change(source)
    text = source.read_text()
    compiler.write(then=f"echo >> {source}")
    with pytest.raises(native.BuildError, match=r"reduce.cpp changed while"):
        native.build()
    compiler.write()
    source.write_text(text)
    assert built_again(compiler) == {"exchange/reduce.cpp"}


def test_what_was_built_long_ago_is_removed(
    compiler: Compiler, checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = native.library_path()
    folder = compiler.build_dir / "objects"
    monkeypatch.setattr(building, "_MAX_OBJECTS", UNITS)
    monkeypatch.setattr(building, "_MAX_LIBRARIES", 2)
    for path in (*folder.iterdir(), old.parent):
        os.utime(path, (0, 0))
    unused = next(folder.glob("exchange_reduce-*.o"))
    change(checkout / "exchange" / "reduce.cpp")
    second = native.build()
    assert (len(list(folder.iterdir())), unused.exists(), old.exists()) == (UNITS, False, True)
    os.utime(second.parent, (0, 0))
    building.mark_used(old)
    change(checkout / "exchange" / "reduce.cpp")
    third = native.build()
    assert [path.exists() for path in (old, second, third)] == [True, False, True]


def test_a_killed_build_leaves_its_objects_and_nothing_else(
    compiler: Compiler, checkout: Path
) -> None:
    change(checkout / "exchange" / "reduce.cpp")
    scratch = compiler.build_dir / "objects" / "exchange_reduce-0.tmp"
    scratch.touch()
    assert built_again(compiler) == {"exchange/reduce.cpp"}
    assert compiler.leftovers() == [scratch]  # until it is removed as one of the oldest files


def test_every_include_names_a_file_from_the_folder_of_the_sources() -> None:
    for name, text in SOURCES.contents.items():
        for quoted in re.findall(rb'#include "([^"]+)"', text):
            assert quoted.decode() in SOURCES.contents, (name, quoted)


def test_what_needs_torch_is_known_by_its_includes() -> None:
    assert not SOURCES.needs_torch("exchange/reduce.cpp")
    assert SOURCES.needs_torch("ops/vdev.cpp")  # by kernels.h
    glue = {name for unit in SOURCES.glue for name in unit.sources}
    assert {"backend/glue.cpp", "ops/glue.cpp"} < glue
    assert glue.isdisjoint(COMPILED)


def test_structs_lie_as_the_compiler_lays_them_out(tmp_path: Path) -> None:
    structs = [kind for kind in vars(wire).values() if isinstance(kind, type(ctypes.Structure))]
    assert wire.Command in structs
    claims = [
        claim
        for struct in structs
        for claim in (
            f"sizeof({struct.__name__}) == {ctypes.sizeof(struct)}",
            *(
                f"offsetof({struct.__name__}, {name}) == {getattr(struct, name).offset}"
                for name, *_ in struct._fields_
            ),
        )
    ]
    claims += [
        f"int({enum.__name__}::k{member.name.title().replace('_', '')}) == {member}"
        for enum in Enumeration.__subclasses__()
        for member in enum
    ]
    source = tmp_path / "claims.cpp"
    lines = [f"static_assert({claim});" for claim in claims]
    source.write_text("\n".join(['#include "channel/wire.h"', "using namespace symm_cp;", *lines]))
    compiler = [*shlex.split(native.find_compiler()), "-std=c++20", "-fsyntax-only"]
    done = subprocess.run(
        [*compiler, f"-I{SOURCES.folder}", str(source)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_every_c_function_that_python_calls_is_declared() -> None:
    called = {
        name
        for folder in ("symm_cp", "tests", "benchmarks")
        for path in (ROOT / folder).rglob("*.py")
        for name in re.findall(r"\.(symm_cp_(?!hosted_)\w+)\(", path.read_text())
    }
    assert len(called) > 80
    assert called <= declared.functions().keys()
    with pytest.raises(AttributeError, match="csrc/ defines no C function symm_cp_none"):
        _ = native.load().symm_cp_none


def test_declarations_that_are_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """They raise, instead of a wrong offset or value."""
    text = declared._header()
    monkeypatch.setattr(declared, "_header", lambda: text.replace("int64_t rows;", "size_t rows;"))
    with pytest.raises(KeyError, match="size_t"):
        declared.fields("Box")
    monkeypatch.setattr(declared, "_header", lambda: text.replace("int64_t rows;", "int64_t r{};"))
    with pytest.raises(ValueError, match="struct Box: unknown form"):
        declared.fields("Box")
    with pytest.raises(AttributeError, match=r"wire.h: enum class Kind has no NOTHING"):
        _ = wire.Kind.NOTHING


def change_source(folder: Path) -> None:
    with (folder / "exchange" / "reduce.cpp").open("a") as file:
        file.write("// changed\n")


def add_header(folder: Path) -> None:
    (folder / "ops" / "new.h").write_text("")


def rename(folder: Path) -> None:
    (folder / "exchange" / "reduce.cpp").rename(folder / "exchange" / "renamed.cpp")


@pytest.mark.parametrize("change", [change_source, add_header, rename])
def test_key_follows_the_sources(
    change: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = native.cache_key()
    copy = tmp_path / "csrc"
    shutil.copytree(native.source_dir(), copy)
    monkeypatch.setattr(building, "source_dir", lambda: copy)
    assert native.cache_key() == original  # wherever the sources lie
    (copy / "notes.txt").write_text("no source")
    assert native.cache_key() == original
    change(copy)
    assert native.cache_key() != original


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("torch.__version__", "2.13.1"),
        ("symm_cp.native.building.FLAGS", ("-O0",)),
        ("symm_cp.native.building.processor", lambda: "another"),
        ("sysconfig.get_config_var", lambda name: "cpython-399"),
    ],
)
def test_key_follows_torch_python_flags_and_processor(
    place: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = native.cache_key()
    monkeypatch.setattr(place, value)
    assert native.cache_key() != original


_WITHOUT_COMPILER = """
import torch
import torch.distributed as dist
import symm_cp
print("imported")
from symm_cp import native
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
for use in (
    native.load,
    lambda: symm_cp.all_gather_matmul(torch.ones(2, 2), torch.ones(2, 2), group=dist.group.WORLD),
    lambda: torch.ops.symm_mem.fused_matmul_reduce_scatter(
        torch.ones(2, 2), torch.ones(2, 2), "sum", 0, dist.group.WORLD.group_name
    ),
):
    try:
        use()
    except native.BuildError as error:
        print(error)
    else:
        raise SystemExit("no error")
"""


@pytest.mark.parametrize("chosen", some(None, of=[None, "/nonexistent/c++"]))
@pytest.mark.exhaustive
def test_without_a_compiler(chosen: str | None, tmp_path: Path) -> None:
    """The import succeeds and says what to install; so does the error of the native part."""
    environment = {
        **os.environ,
        "PATH": str(tmp_path),
        "SYMM_CP_BUILD_DIR": str(tmp_path / "built"),
    }
    environment.pop("CXX", None)
    if chosen is not None:
        environment["CXX"] = chosen
    process = python(_WITHOUT_COMPILER, env=environment)
    out, err = process.communicate()
    assert process.returncode == 0, err
    assert out.startswith("imported")
    for text in (out, err):
        assert "C++20 compiler" in text
        assert "apt install g++" in text
        assert "symm-cp build" in text
        assert (chosen or "clang++") in text
    assert not (tmp_path / "built").exists()
