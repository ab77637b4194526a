"""`symm-cp demo` as a command, and its verdict on wrong results."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from symm_cp.cli import main
from symm_cp.commands import demo
from symm_cp.commands.harness.measure import Row
from symm_cp.schedule.simulate import Event, Timeline
from symm_cp.schedule.steps import Compute, Step, Wait
from tests.exhaustive import exhaustive, some

ONE, OURS = "one process", "2 ranks, symm_cp"


@pytest.mark.parametrize(
    ("ranks", "options"),
    some(
        (2, ("--cp", "2")),
        of=[
            (1, ()),
            (2, ()),
            (2, ("--cp", "2")),
            (4, ("--cp", "2")),
            (2, ("--compile",)),
            (2, ("--compile", "--cp", "2")),
        ],
    ),
)
def test_losses_agree(
    ranks: int, options: tuple[str, ...], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new" / "out.json"
    command = ["demo", "--steps", "3", "--ranks", str(ranks), *options, "--json", str(out)]
    assert main(command) == 0
    printed = capfd.readouterr().out
    assert "losses agree" in printed
    report = json.loads(out.read_text())
    assert report["agree"]
    one = next(iter(report["losses"]))
    others = [name for name in report["losses"] if not name.startswith(ONE)]
    by_torch = [] if "--cp" in options else [f"{ranks} ranks, torch"]
    assert one == "one process, 1 thread"
    assert others == [*by_torch, f"{ranks} ranks, symm_cp"]
    assert report["losses"][one][0] == pytest.approx(5.7, abs=0.3)  # log(256), and untrained
    assert {len(own) for own in (*report["losses"].values(), *report["seconds"].values())} == {3}
    drawn = re.findall(r"^rank (\d+) \|(.{72})\|$", printed, re.MULTILINE)
    assert [int(rank) for rank, _ in drawn] == list(range(ranks))
    assert ranks == 1 or all("#" in row for _, row in drawn)  # one rank exchanges nothing


@exhaustive
def test_under_torchrun() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*command, "--nproc-per-node", "2", "-m", "symm_cp", "demo", "--steps", "2", "--json"],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["agree"]  # and nothing else is printed


def shown(fused: list[float], seconds: list[float], capsys: pytest.CaptureFixture[str]) -> str:
    losses = {ONE: [5.5, 5.0], OURS: fused}
    row = Row("", {ONE: tuple([2.0] * len(seconds)), OURS: tuple(seconds)})
    step: Step = Compute("consume", 0, (), ())
    demo.show(losses, row, Timeline((Event(0, "compute", 0, step, 0.0, 1.0),)))
    return capsys.readouterr().out


def test_no_claim_is_made_where_the_machine_is_too_noisy(
    capsys: pytest.CaptureFixture[str],
) -> None:
    quiet = shown([5.5, 5.0], [1.8] * 10, capsys)
    assert "losses agree" in quiet
    assert re.search(r"^2 ranks, symm_cp .* 1.8 s   0.90 \(0.90 to 0.90\)$", quiet, re.MULTILINE)
    loud = shown([5.5, 5.0], [1.0, 3.0] * 5, capsys)
    assert re.search(r"too noisy to compare \(\d.\d\d to \d.\d\d\)$", loud, re.MULTILINE)
    assert "1.00" not in loud
    assert "too few repetitions to compare\n" in shown([5.5, 5.0], [1.8] * 4, capsys)


@pytest.mark.parametrize("fused", [[5.5, 5.01], [5.5, float("nan")], [5.49, 5.0]])
def test_losses_that_differ_are_noticed(
    fused: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    assert "losses DIFFER" in shown(fused, [1.8] * 10, capsys)


def test_the_picture_shows_what_each_rank_did() -> None:
    kernel, wait = Compute("consume", 0, (), ()), Wait("ready", 1)
    events = [(0, kernel, 0.0, 36.0), (0, wait, 54.0, 72.0), (1, kernel, 18.0, 36.0)]
    timeline = Timeline(
        tuple(Event(rank, "compute", 0, step, start, end) for rank, step, start, end in events)
    )
    first = "#" * 36 + " " * 18 + "." * 18
    second = " " * 18 + "#" * 18 + " " * 36
    assert demo.picture(timeline) == [f"rank 0 |{first}|", f"rank 1 |{second}|"]


@pytest.mark.exhaustive
def test_a_fused_op_that_is_wrong_fails_the_demo(tmp_path: Path) -> None:
    """A kernel whose result is wrong by one percent suffices, even in a model this small."""
    (tmp_path / "sitecustomize.py").write_text(
        "import torch\n"
        "def wrong(a, b, *, out):  # only fused ops write products to memory that is there\n"
        "    return out.copy_((a @ b).mul_(1.01))\n"
        "library = torch.library.Library('aten', 'IMPL')\n"
        "library.impl('mm.out', wrong, 'CPU', allow_override=True)\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.getcwd()])}
    done = subprocess.run(
        [sys.executable, "-m", "symm_cp", "demo", "--steps", "3"],
        capture_output=True, text=True, timeout=120, check=False, env=env,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    assert "losses DIFFER" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cp", "2", "--ranks", "3"], "--ranks 3 is not divisible by --cp 2"),
        (["--compile", "--cp", "2", "--ranks", "4"], "--compile --cp 2 requires --ranks 2, not 4"),
        (["--ranks", "3"], "8 attention heads are not divisible by 3 ranks"),
        (["--cp", "3"], "512 positions cannot be split into 6 equal chunks"),
        (["--steps", "0"], "must be a whole number of at least 1"),
        (["--decode"], "unrecognized arguments: --decode"),
    ],
)
def test_wrong_arguments(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main(["demo", *arguments])
    except SystemExit as ended:  # raised by argparse
        code = int(ended.code or 0)
    assert code == 2
    assert message in capsys.readouterr().err


def test_batches_are_windows_of_the_text() -> None:
    first, second = demo.batches(2)
    assert first["input_ids"].shape == (demo.BATCH, demo.SEQUENCE)
    assert torch.equal(first["labels"][:, :-1], first["input_ids"][:, 1:])
    assert not torch.equal(first["input_ids"], second["input_ids"])
    assert torch.equal(demo.batches(2)[1]["input_ids"], second["input_ids"])
