"""`symm-cp selftest`: what its ranks check, over a simulated driver, and that it always ends."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from symm_cp import cli
from symm_cp.commands import first_run
from symm_cp.commands.first_run import Item, Part, checks
from symm_cp.commands.first_run.checks import Check
from symm_cp.ranks import run_limited
from symm_cp.testing import Ranks
from tests.cuda.simulated import simulation

CPU = torch.device("cpu")


def examined(group: dist.ProcessGroup, broken: bool) -> dict[str, Any]:
    """Returns the results that a rank reports, and the function's exit code."""
    said: dict[str, Any] = {}

    def say(name: str, known: Mapping[str, Any]) -> None:
        said[name] = dict(known)

    with simulation():
        if broken and group.rank() == 1:
            with mock.patch.object(Check, "wrong", return_value="an error"):
                code = first_run.examine(group, CPU, say)
        else:
            code = first_run.examine(group, CPU, say)
    return {"code": code, "said": said}


def test_all_ops_are_checked(ranks: Ranks) -> None:
    results = ranks.run(2, examined, False)
    assert [result["code"] for result in results] == [0, 0]
    items = first_run.merged([result["said"] for result in results])
    assert {item.state for item in items} == {"ok"}, items
    assert len(items) >= 10
    assert all(item.milliseconds is not None for item in items)


def test_what_one_rank_finds_wrong_is_reported(ranks: Ranks) -> None:
    results = ranks.run(2, examined, True)
    assert [result["code"] for result in results] == [0, 1]
    items = first_run.merged([result["said"] for result in results])
    assert {(i.state, i.detail) for i in items[1:]} == {("failed", "rank 1: an error")}


def test_ranks_that_hang_are_killed(tmp_path: Path) -> None:
    """Ranks that ignore SIGTERM are killed, too."""
    program = (
        "import os, pathlib, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "pathlib.Path(sys.argv[1], os.environ['RANK']).write_text(str(os.getpid()))\n"
        "time.sleep(0 if os.environ['RANK'] == os.environ['ENDS'] else 60)\n"
    )
    began = time.monotonic()
    line = ["-c", program, str(tmp_path)]
    assert run_limited(line, 2, seconds=1.0, variables={"ENDS": "1"}) == [None, 0]
    assert time.monotonic() - began < 30
    for path in tmp_path.iterdir():
        assert not Path("/proc", path.read_text()).exists()


def part_of(code: int | None, *lines: str) -> Part:
    """A part whose only rank wrote these lines."""

    def run(arguments: list[str], *_: Any, **__: Any) -> list[int | None]:
        folder = arguments[arguments.index("--results") + 1]
        Path(folder, "0.jsonl").write_text("\n".join(lines))
        return [code]

    with mock.patch.object(first_run, "run_limited", run):
        return first_run.run_part([], "a part", 1, 9.0, {})


def test_what_hung_is_named() -> None:
    begun, ended = '{"name": "a", "state": "hung"}', '{"name": "a", "state": "ok"}'
    part = part_of(None, begun, ended, '{"name": "b", "state": "hung"}', '{"name": "c')
    assert part.outcome == "killed after 9 s"
    assert [(item.name, item.state) for item in part.items] == [("a", "ok"), ("b", "hung")]
    assert [item.detail for item in part.failed] == ["rank 0: did not end"]


def test_a_part_that_says_nothing_has_failed() -> None:
    assert part_of(1).failed == [Item("processes", "failed", "exit codes [1]")]
    assert part_of(None).failed == [Item("processes", "failed", "killed after 9 s")]
    assert part_of(0).failed == []


def command(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    cli.selftest(parser)
    args = parser.parse_args(arguments)
    args.arguments = list(arguments)
    return args


def started(
    gpus: int, results: dict[str, list[Item]], *arguments: str
) -> tuple[int, list[tuple[str, int]]]:
    """The exit code, and each started part with its number of ranks."""
    parts: list[tuple[str, int]] = []

    def run(_: Any, part: str, ranks: int, seconds: float, variables: Mapping[str, str]) -> Part:
        parts.append((part, ranks))
        assert seconds <= 50  # two parts end within two minutes
        return Part(part, results.get(part, []), "ended")

    with (
        mock.patch.object(first_run, "run_part", run),
        mock.patch.object(torch.cuda, "device_count", return_value=gpus),
    ):
        return first_run.main(command(*arguments)), parts


def test_what_hangs_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    results = {"GPUs": [Item("causal attention", "hung", "rank 1: did not end")]}
    assert started(4, results, "--device", "cuda") == (1, [("GPUs", 4)])
    shown = capsys.readouterr().out
    assert "! causal attention  hung     rank 1: did not end\n" in shown
    assert "\n1 failed: please report it" in shown
    assert started(1, results, "--json") == (1, [("CPU", 2), ("GPUs", 2)])
    report = json.loads(capsys.readouterr().out)
    assert report["ranks"] == 2
    assert report["parts"][-1]["items"][0]["state"] == "hung"


def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    """No line says "ok" about what was not tested."""
    assert started(0, {}, "--device", "cuda") == (2, [])
    shown, error = capsys.readouterr()
    assert "nothing was tested: torch finds no CUDA device" in error
    assert shown == ""
    assert started(0, {}, "--ranks", "3") == (0, [("CPU", 3)])
    shown = capsys.readouterr().out
    assert shown.endswith("All works: CPU.\nGPUs were not tested: torch finds no CUDA device.\n")


def cpu_checked(group: dist.ProcessGroup) -> list[str]:
    names = []
    for check in checks.cpu_checks(group):
        results = check.run()
        assert check.wrong(results) == "", check.name
        # One element that is wrong by a twentieth of the largest is noticed in each result.
        for result in results:
            wrong = result.detach().clone(memory_format=torch.contiguous_format)
            wrong.view(-1)[0] += max(0.05, 0.05 * float(result.abs().max()))
            assert check.wrong([wrong if r is result else r for r in results])
        names.append(check.name)
    return names


def test_each_op_is_checked_on_the_cpu(ranks: Ranks) -> None:
    names = ranks.run(2, cpu_checked)[0]
    for op in ("signals", "collectives", "all-gather-matmul", "matmul-reduce-scatter",
               "matmul-all-reduce", "attention", "ulysses", "heads", "halos", "scan", "delta rule",
               "float8"):  # fmt: skip
        assert any(op in name for name in names), op


@pytest.mark.exhaustive
def test_the_command_on_the_cpu(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    line = [sys.executable, "-m", "symm_cp", "selftest", "--device", "cpu", "--json", str(report)]
    done = subprocess.run(line, capture_output=True, text=True, check=False, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "All works: CPU." in done.stdout
    items = {i["name"]: i for i in json.loads(report.read_text())["parts"][0]["items"]}
    assert {item["state"] for item in items.values()} == {"ok"}
    assert items["a lost peer is noticed"]["detail"].startswith("after ")


@pytest.mark.gpu
def test_the_command() -> None:
    line = [sys.executable, "-m", "symm_cp", "selftest", "--json"]
    done = subprocess.run(line, capture_output=True, text=True, check=False, timeout=130)
    assert done.returncode == 0, done.stdout + done.stderr
