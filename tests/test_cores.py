"""Which cores ranks get, on machines that a folder describes as sysfs does, and on this one."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from symm_cp import cores, native
from symm_cp.commands import doctor
from tests.test_run import symm_cp_in


def machine(root: Path, nodes: dict[int, str], siblings: int = 0, per_socket: int = 1) -> Path:
    """A machine of these nodes and their CPUs; CPU n + `siblings` is on the core of CPU n."""
    for node, text in nodes.items():
        folder = root / f"node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(text + "\n")
        for cpu in cores.numbers(text):
            topology = root / f"cpu/cpu{cpu}/topology"
            topology.mkdir(parents=True)
            (topology / "physical_package_id").write_text(f"{node // per_socket}\n")
            first = cpu % siblings if siblings else cpu
            pair = f"{first},{first + siblings}" if siblings else str(cpu)
            (topology / "thread_siblings_list").write_text(pair + "\n")
    return root


def given(*args: object) -> list[tuple[str, str, int]]:
    return [
        (" ".join(share.places), cores.ranges(share.cpus), share.threads)
        for share in cores.shares(*args)  # type: ignore[arg-type]
    ]


def test_two_sockets_with_hyper_threads(tmp_path: Path) -> None:
    system = machine(tmp_path, {0: "0-3,8-11", 1: "4-7,12-15"}, siblings=8)
    every = range(16)
    for unit in cores.UNITS:
        assert given(unit, 2, every, system) == [
            (f"{unit} 0", "0-3,8-11", 4),
            (f"{unit} 1", "4-7,12-15", 4),
        ]
    assert given("node", 1, every, system) == [("node 0 node 1", "0-15", 8)]
    assert given("node", 4, every, system) == [
        ("node 0", "0-1,8-9", 2),
        ("node 0", "2-3,10-11", 2),
        ("node 1", "4-5,12-13", 2),
        ("node 1", "6-7,14-15", 2),
    ]
    assert [threads for _, _, threads in given("node", 3, every, system)] == [2, 2, 4]
    with pytest.raises(ValueError, match=r"node 0 has fewer cores .*\(CPUs 0-3,8-11\) than ranks"):
        cores.shares("node", 9, every, system)


def test_several_nodes_in_a_socket(tmp_path: Path) -> None:
    system = machine(tmp_path, {0: "0-1", 1: "2-3", 2: "4-5", 3: "6-7"}, per_socket=2)
    assert given("socket", 2, range(8), system) == [("socket 0", "0-3", 4), ("socket 1", "4-7", 4)]
    assert given("node", 2, range(8), system) == [
        ("node 0 node 1", "0-3", 4),
        ("node 2 node 3", "4-7", 4),
    ]


def test_a_part_of_a_machine(tmp_path: Path) -> None:
    """The allowed CPUs are a part of the machine, as in a container or under taskset."""
    system = machine(tmp_path, {0: "0-3,8-11", 1: "4-7,12-15"}, siblings=8)
    assert given("node", 2, [2, 3, 10, 13], system) == [
        ("node 0", "2-3,10", 2),
        ("node 1", "13", 1),
    ]
    assert given("node", 2, [1, 2, 3], system) == [("node 0", "1", 1), ("node 0", "2-3", 2)]


def test_no_sysfs(tmp_path: Path) -> None:
    assert given("node", 2, range(4), tmp_path) == [("node 0", "0-1", 2), ("node 0", "2-3", 2)]
    assert given("socket", 1, range(4), tmp_path) == [("socket 0", "0-3", 4)]


def test_doctor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    system = machine(tmp_path, {0: "0-3,8-11", 1: "4-7,12-15"}, siblings=8)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(2, 16)))
    finding = doctor.numa(system)
    assert finding.detail.startswith("cores that this process may use: 8, of 2 socket(s); node 0: ")
    assert "node 0: CPUs 2-3,8-11; node 1: CPUs 4-7,12-15; symm-cp run --numa" in finding.detail


@pytest.mark.parametrize("text", ["0-3,8", "5", "0,2-3,9-12"])
def test_ranges(text: str) -> None:
    assert cores.ranges(cores.numbers(text)) == text


PROGRAM = """
    import os, subprocess, sys
    rank = os.environ["LOCAL_RANK"]
    child = "import os; print(*sorted(os.sched_getaffinity(0)))"
    started = subprocess.run([sys.executable, "-c", child], capture_output=True, text=True).stdout
    with open(os.path.join(sys.argv[1], rank), "w") as out:
        out.write(f"{sorted(os.sched_getaffinity(0))} {os.environ['OMP_NUM_THREADS']} {started}")
"""


@pytest.mark.parametrize("threads", ["", "3"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_are_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int, threads: str
) -> None:
    """Processes that ranks start are bound as well, though they inherit the ranks' variables."""
    allowed = sorted(os.sched_getaffinity(0))
    ranks = min(ranks, len(cores.cores(allowed)))
    (tmp_path / "train.py").write_text(textwrap.dedent(PROGRAM))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if threads:
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
    command = [sys.executable, "-m", "symm_cp", "run", "--nproc-per-node", str(ranks)]
    command += [
        "--numa",
        "node",
        "--backend-for",
        "none",
        str(tmp_path / "train.py"),
        str(tmp_path),
    ]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    for rank, share in enumerate(cores.shares("node", ranks, allowed)):
        cpus, own = sorted(share.cpus), threads or share.threads
        expected = f"{cpus} {own} {' '.join(map(str, cpus))}"
        assert (tmp_path / str(rank)).read_text().strip() == expected
        assert f"local rank {rank} on {share}, {own} threads" in ended.stderr


def test_more_ranks_than_cores(tmp_path: Path) -> None:
    many = str(len(os.sched_getaffinity(0)) * 2 + 1)
    run = symm_cp_in(tmp_path, "run", "--nproc-per-node", many, "--numa", "node", "x.py")
    assert run.returncode == 2
    assert "symm-cp run: --numa node: node" in run.stderr
    assert "fewer cores" in run.stderr
    started = symm_cp_in(
        tmp_path,
        *("exec", "--numa", "socket", "--", sys.executable, "-c", "print('ran')"),
        LOCAL_RANK="0",
        LOCAL_WORLD_SIZE=many,
    )
    assert started.returncode == 2
    assert "symm-cp: --numa: socket" in started.stderr
    assert "Traceback" not in started.stderr
    assert "ran" not in started.stdout


REFUSED = """
#include <errno.h>
#include <stddef.h>
int sched_setaffinity(int pid, size_t size, const void* mask) {
  errno = EPERM;
  return -1;
}
"""


def test_a_system_that_refuses_to_bind(tmp_path: Path) -> None:
    """The program does not run on other cores than it was given."""
    source, stub = tmp_path / "refused.c", tmp_path / "refused.so"
    source.write_text(REFUSED)
    compiler = shlex.split(native.find_compiler())
    subprocess.run([*compiler, "-xc", "-shared", "-fPIC", "-o", stub, source], check=True)
    command = ("exec", "--numa", "node", "--", sys.executable, "-c", "print('ran')")
    rank = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    started = symm_cp_in(tmp_path, *command, **rank, LD_PRELOAD=str(stub))
    assert started.returncode == 2
    assert "symm-cp: --numa: [Errno 1] Operation not permitted" in started.stderr
    assert "Traceback" not in started.stderr
    assert "ran" not in started.stdout
    bound = symm_cp_in(tmp_path, *command, **rank)
    assert (bound.returncode, bound.stdout) == (0, "ran\n"), bound.stderr
