"""Importing symm_cp loads only the modules that it needs, and never fails."""

from __future__ import annotations

import importlib
import inspect
import os
import pkgutil
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import symm_cp
from tests.exhaustive import some

#: They take from half a second to several.
SLOW = ("torch.distributed.tensor", "torch._inductor", "torch._dynamo", "triton", "matplotlib")


@pytest.mark.exhaustive
def test_import_leaves_out_what_is_slow() -> None:
    code = f"import symm_cp, sys; print([name for name in {SLOW} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]", done.stderr


def test_all_names_are_there() -> None:
    for name in symm_cp.__all__:
        assert getattr(symm_cp, name) is not None
    with pytest.raises(AttributeError, match="'symm_cp' has no attribute 'nothing'"):
        _ = symm_cp.nothing


def test_dir_lists_public_names() -> None:
    assert dir(symm_cp) == sorted(symm_cp.__all__)


@pytest.mark.parametrize("module", ["", "context_parallel", "moe", "tensor_parallel", "schedule"])
def test_public_functions_say_what_they_return(module: str) -> None:
    public = importlib.import_module(f"symm_cp.{module}" if module else "symm_cp")
    for name in public.__all__:
        function = getattr(public, name)
        if inspect.isfunction(function):
            text = str(inspect.signature(function).return_annotation)
            # Batches may hold anything.
            assert not re.search(r"\b(Any|_empty)\b", text.replace("dict[str, Any]", "")), name


#: A public function of the package `symm_cp.schedule` has the name of its module.
SHADOWED = ("symm_cp.schedule.check",)


def test_every_module_can_be_imported_by_its_name() -> None:
    """`import a.b.c as d` takes attribute after attribute: none may be a function of that name."""
    for info in pkgutil.walk_packages(symm_cp.__path__, "symm_cp."):
        optional = (
            *("symm_cp.__main__", "symm_cp.cuda.kernels", "symm_cp.commands.run.startup"),
            "symm_cp.integrations.vllm.communicator",
            "symm_cp.integrations.torchtitan.overrides",
            "symm_cp.integrations.torchtitan.experts",
        )
        if info.name.startswith(optional) or info.name in SHADOWED:
            continue
        names: dict[str, ModuleType] = {}
        exec(f"import {info.name} as module", names)
        assert names["module"] is importlib.import_module(info.name), info.name


def test_a_package_that_is_also_a_function() -> None:
    from symm_cp.context_parallel import context_parallel

    assert isinstance(symm_cp.context_parallel, ModuleType)
    assert inspect.signature(symm_cp.context_parallel) == inspect.signature(context_parallel)
    with (
        pytest.raises(TypeError, match="group must be a ProcessGroup"),
        symm_cp.context_parallel(3),
    ):
        pass


@pytest.mark.exhaustive
def test_without_process_groups_it_says_what_to_call() -> None:
    code = """
import torch, symm_cp
import torch.distributed as dist

x, world = torch.ones(2, 2), dist.group.WORLD
for call in (
    lambda: symm_cp.all_gather_matmul(x, x, group=world),
    lambda: symm_cp.context_parallel(world).__enter__(),
    lambda: symm_cp.tensor_parallel.apply(torch.nn.Linear(2, 2), world, {"": "colwise"}),
):
    try:
        call()
    except TypeError as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.count("call torch.distributed.init_process_group first") == 3


# Code that causes trouble before the import; and a pattern that the one line must match.
_ODD = {
    "no home": (
        "import pwd; del os.environ['HOME'], os.environ['SYMM_CP_BUILD_DIR']\n"
        "os.environ.pop('XDG_CACHE_HOME', None)\n"
        "def unknown(uid): raise KeyError(uid)\n"
        "pwd.getpwuid = unknown",
        "has no home folder .HOME.: set SYMM_CP_BUILD_DIR",
    ),
    "another user's cache": (
        "os.mkdir(cache); real = os.lstat\n"
        "def lstat(path, **options):\n"
        "    about = real(path, **options)\n"
        "    mine = about.st_ino == os.stat(cache).st_ino\n"
        "    return os.stat_result((*about[:4], 54321, *about[5:])) if mine else about\n"
        "os.lstat = lstat",
        "built: it belongs to user 54321, .*SYMM_CP_BUILD_DIR",
    ),
    "a stderr that is closed": ("os.environ['CXX'] = 'none'; sys.stderr.close()", ""),
    "a compiler that fails": ("os.environ['CXX'] = 'false'", "symm-cp build shows why"),
}


@pytest.mark.parametrize("odd", some("no home", of=_ODD))
@pytest.mark.exhaustive
def test_an_import_never_fails(odd: str, tmp_path: Path) -> None:
    """One line names the problem; loading the native part raises an error with the same text."""
    before, message = _ODD[odd]
    cache = str(tmp_path / "b\udcff" / "built")  # no UTF-8
    os.mkdir(os.path.dirname(cache))
    code = f"""
import os, sys
cache = {cache!r}
os.environ.setdefault("HOME", "/")
os.environ["SYMM_CP_BUILD_DIR"] = cache
{before}
import symm_cp
from symm_cp import native
try:
    native.load()
except native.BuildError as error:
    print(ascii(str(error)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    out, err = done.stdout, done.stderr
    assert re.search(message, out), out + err
    if message:
        said = [line for line in err.splitlines() if line.startswith("symm_cp: ")]
        (line,) = (line for line in said if "building the native part" not in line)
        assert re.search(message, line)
        assert "Traceback" not in err


def test_unknown_variables_are_named() -> None:
    given = {"SYMM_CP_WAY": "shards", "SYMM_CP_PLAN": "0", "SYMM_CP_PLANS": "1"}
    run = [sys.executable, "-c", "import symm_cp"]
    done = subprocess.run(run, env={**os.environ, **given}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    warned = re.findall(r"(SYMM_CP_\w+) is set but has no meaning(.*)", done.stderr)
    assert sorted(warned) == [
        ("SYMM_CP_PLAN", "; did you mean SYMM_CP_PLANS?"),
        ("SYMM_CP_WAY", "; did you mean SYMM_CP_ALGORITHM?"),
    ]
