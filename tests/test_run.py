"""`symm-cp run`: programs that ask for gloo get this package's backend, and notice nothing else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from symm_cp import cli
from symm_cp.commands.run.redirect import replaced
from tests.exhaustive import exhaustive

SAID = "symm_cp: process groups of"

#: Takes a folder, to which it writes its observations, and arguments of init_process_group.
PROGRAM = """
    import json, os, sys
    sys_path, imported = sys.path[0], [name for name in sys.modules if name.startswith("torch")]
    import torch
    import torch.distributed as dist
    from torch.distributed import init_process_group, new_group
    from torch.distributed.device_mesh import init_device_mesh

    def backend_of(group):
        return group._get_backend(torch.device("cpu")).name()

    def main(folder, *backend):
        init_process_group(*backend)
        rank = dist.get_rank()
        total = torch.ones(3)
        dist.all_reduce(total)
        pair = new_group([0, 1])
        named = new_group([0, 1], backend="gloo")
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))
        groups = [dist.group.WORLD, pair, named, mesh["a"].get_group(), mesh["b"].get_group()]
        names = [backend_of(group) for group in groups]
        if dist.get_backend() == "gloo":
            dist.monitored_barrier()
        seen = dict(
            total=total.tolist(), backends=names, get_backend=dist.get_backend(),
            config=dist.get_backend_config(), argv=sys.argv, path=sys_path, imported=imported,
            file=__file__, main=sys.modules["__main__"].__dict__ is globals(),
        )
        with open(os.path.join(folder, f"{rank}.json"), "w") as out:
            json.dump(seen, out)
        dist.destroy_process_group()

    if __name__ == "__main__":
        main(*sys.argv[1:])
"""


def start(
    folder: Path, *arguments: str, source: str = PROGRAM, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Runs `symm-cp run` from `folder/elsewhere`; the program is `folder/program/train.py`."""
    program = folder / "program" / "train.py"
    program.parent.mkdir(exist_ok=True)
    program.write_text(textwrap.dedent(source))
    (folder / "elsewhere").mkdir(exist_ok=True)
    return symm_cp_in(folder / "elsewhere", "run", *arguments, **environment)


def symm_cp_in(
    folder: Path, *arguments: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Runs the command `symm-cp` in a folder."""
    root = str(Path(cli.__file__).resolve().parent.parent)
    path = os.pathsep.join([root, environment.pop("PYTHONPATH", "")]).rstrip(os.pathsep)
    return subprocess.run(
        [sys.executable, "-m", "symm_cp", *arguments],
        capture_output=True, text=True, timeout=120, check=False, cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **environment},
    )  # fmt: skip


def seen_by(folder: Path, ranks: int = 2) -> list[dict[str, Any]]:
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]


@exhaustive
@pytest.mark.parametrize("backend", [[], ["gloo"]])
def test_a_program_gets_the_backend_and_sees_no_other_difference(
    tmp_path: Path, backend: Sequence[str]
) -> None:
    script = str(tmp_path / "program" / "train.py")
    done = start(tmp_path, "--nproc-per-node", "2", script, str(tmp_path), *backend)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(SAID) == 1, done.stderr
    devices = "cpu:gloo,cuda:gloo" if backend == ["gloo"] else "cpu:gloo"
    for seen in seen_by(tmp_path):
        assert seen == {
            "total": [2.0] * 3,
            "backends": ["symm_cp"] * 5,
            "get_backend": backend[0] if backend else "undefined",
            "config": devices,
            "argv": [script, str(tmp_path), *backend],
            "path": str(tmp_path / "program"),
            "imported": [],
            "file": script,
            "main": True,
        }


@exhaustive
def test_modules_and_other_sitecustomize(tmp_path: Path) -> None:
    others = tmp_path / "others"
    others.mkdir()
    (others / "sitecustomize.py").write_text("import sys; sys.stdout.write('other site\\n')")
    path = os.pathsep.join([str(others), str(tmp_path / "program")])
    arguments = ["--nproc-per-node", "2", "-m", "train", str(tmp_path), "gloo"]
    done = start(tmp_path, *arguments, PYTHONPATH=path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("other site") == 3  # ours, and two ranks
    for seen in seen_by(tmp_path):
        assert seen["backends"] == ["symm_cp"] * 5
        assert seen["path"] == str(tmp_path / "elsewhere")
        assert seen["argv"][0] == str(tmp_path / "program" / "train.py")


@exhaustive
def test_none_leaves_gloo_in_place(tmp_path: Path) -> None:
    script = str(tmp_path / "program" / "train.py")
    arguments = ["--nproc-per-node", "2", "--backend-for", "none", script, str(tmp_path), "gloo"]
    done = start(tmp_path, *arguments)
    assert done.returncode == 0, done.stderr
    assert SAID not in done.stderr
    assert seen_by(tmp_path)[1]["backends"] == ["gloo"] * 5


SPAWNS = """
    import sys
    import torch.multiprocessing
    import train_ranks

    if __name__ == "__main__":
        torch.multiprocessing.spawn(train_ranks.run, (sys.argv[1],), nprocs=2)
"""
SPAWNED = """
    def run(rank, folder):
        import torch, torch.distributed as dist
        dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=2)
        dist.barrier()
        assert dist.group.WORLD._get_backend(torch.device("cpu")).name() == "symm_cp"
        dist.destroy_process_group()
"""


@exhaustive
def test_programs_that_start_their_own_ranks(tmp_path: Path) -> None:
    (tmp_path / "program").mkdir()
    (tmp_path / "program" / "train_ranks.py").write_text(textwrap.dedent(SPAWNED))
    done = start(tmp_path, str(tmp_path / "program" / "train.py"), str(tmp_path), source=SPAWNS)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(SAID) == 1


FAILS = """
    import os, sys
    import torch.distributed as dist

    dist.init_process_group("gloo")
    dist.barrier()
    if os.environ["RANK"] == "1":
        if "exit" in sys.argv:
            sys.exit(7)
        raise KeyError("no such weight")
    dist.destroy_process_group()
"""


@exhaustive
@pytest.mark.parametrize("way", ["raise", "exit"])
def test_failures_are_reported_as_by_torchrun(tmp_path: Path, way: str) -> None:
    script = str(tmp_path / "program" / "train.py")
    done = start(tmp_path, "--nproc-per-node", "2", script, way, source=FAILS)
    assert done.returncode == 1
    assert f"{script} FAILED" in done.stderr
    assert f"exitcode  : {7 if way == 'exit' else 1}" in done.stderr
    frames = [line for line in done.stderr.splitlines() if "  File " in line]
    assert len(frames) == (way == "raise"), done.stderr  # the program's own, alone
    assert all(script in frame for frame in frames)


@pytest.mark.parametrize(
    ("requested", "made"),
    [
        ("gloo", "symm_cp"),
        ("GLOO", "symm_cp"),
        ("cpu:gloo", "symm_cp"),
        ("cpu:gloo,cuda:nccl", "cpu:symm_cp,cuda:nccl"),
        ("cuda:gloo", None),
        ("nccl", None),
        ("fake", None),
        ("symm_cp", None),
        ("cpu:symm_cp", None),
    ],
)
@pytest.mark.parametrize("devices", [0, 2])
def test_what_replaces_what(
    requested: str, made: str | None, devices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A build of torch for CUDA, on machines without and with GPUs.
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    if devices > 0 and requested.lower() == "gloo":
        made = "cpu:symm_cp,cuda:gloo"
    assert replaced(requested, ["gloo"]) == made
    assert replaced(requested, []) is None


def test_other_backends_may_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(dist.Backend.backend_capability, "other", ["cpu"])
    monkeypatch.setattr(dist.Backend, "backend_list", [*dist.Backend.backend_list, "other"])
    assert replaced("other", ["gloo"]) is None
    assert replaced("other", ["gloo", "other"]) == "symm_cp"


@pytest.mark.parametrize(
    ("names", "message"), [("mpi", "mpi cannot be replaced"), ("gloo,", "must be names")]
)
def test_names_are_checked(names: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["run", "--backend-for", names, "train.py"])
    assert end.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.exhaustive
def test_without_a_native_part_it_says_how_to_go_on(tmp_path: Path) -> None:
    done = start(tmp_path, "train.py", SYMM_CP_BUILD_DIR=str(tmp_path), CXX="no-such-compiler")
    assert done.returncode == 2
    assert "apt install g++" in done.stderr
    assert "--backend-for none leaves gloo in place" in done.stderr
    assert "Traceback" not in done.stderr


# --- symm-cp exec ----------------------------------------------------------------------------


def execute(folder: Path, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs `symm-cp exec -- COMMAND` in a folder."""
    return symm_cp_in(folder, "exec", "--", *command, **environment)


#: Starts two ranks by itself, as servers do.
SERVER = """
    import os, subprocess, sys
    import torch
    import torch.distributed as dist

    def rank(number, folder):
        store = f"file://{folder}/store"
        dist.init_process_group("gloo", init_method=store, rank=number, world_size=2)
        total = torch.ones(2)
        dist.all_reduce(total)
        name = dist.group.WORLD._get_backend(torch.device("cpu")).name()
        with open(f"{folder}/{number}.txt", "w") as out:
            out.write(f"{name} {total.tolist()}")
        dist.destroy_process_group()

    if __name__ == "__main__":
        if len(sys.argv) > 2:
            rank(int(sys.argv[1]), sys.argv[2])
        else:
            ranks = [subprocess.Popen([sys.executable, __file__, str(n), sys.argv[1]])
                     for n in range(2)]
            sys.exit(max(process.wait() for process in ranks))
"""


@pytest.mark.exhaustive
def test_a_program_that_starts_ranks_by_itself(tmp_path: Path) -> None:
    (tmp_path / "serve.py").write_text(textwrap.dedent(SERVER))
    others = tmp_path / "others"
    others.mkdir()
    (others / "sitecustomize.py").write_text("print('other site')")
    done = execute(tmp_path, sys.executable, "serve.py", str(tmp_path), PYTHONPATH=str(others))
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(SAID) == 1
    assert done.stdout.count("other site") == 4  # symm-cp, the program, two ranks
    for rank in range(2):
        assert (tmp_path / f"{rank}.txt").read_text() == "symm_cp [2.0, 2.0]"


def test_commands_that_fail(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(tmp_path, sys.executable, "-c", "raise SystemExit(7)").returncode == 7
    assert cli.main(["exec", "--", "no-such-command"]) == 127
    assert capsys.readouterr().err == "symm-cp exec: no-such-command: no such command\n"
    assert cli.main(["exec", "--"]) == 2
    assert "COMMAND is missing" in capsys.readouterr().err


@pytest.mark.exhaustive
def test_isolated_programs_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Python would silently ignore the environment that redirects its groups."""
    for flag in ("-I", "-E", "-sI"):
        assert cli.main(["exec", "--", sys.executable, flag, "-c", "print(1)"]) == 2
        told = capsys.readouterr()
        assert told.out == ""
        assert f"runs Python with {flag}, by which it ignores the environment" in told.err
    script = tmp_path / "tool"
    script.write_text(f"#!{sys.executable} -I\nprint(1)\n")
    script.chmod(0o755)
    assert cli.main(["exec", "--", str(script)]) == 2
    assert "runs Python with -I" in capsys.readouterr().err
    # Options of programs are not Python's.
    assert execute(tmp_path, sys.executable, "-c", "print(1)", "-I").stdout == "1\n"
    done = symm_cp_in(tmp_path, "exec", "--backend-for", "none", "--", str(script))
    assert done.stdout == "1\n"
