"""`symm-cp bench`, `trace`, `calibrate` and `tune` as commands, on tiny sizes."""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from symm_cp import measured, native, trusted, tuning
from symm_cp.cli import main
from symm_cp.commands.bench import divisions, parsers, timeline
from symm_cp.commands.bench.jobs import TORCH
from symm_cp.commands.harness import report
from symm_cp.commands.harness.measure import COMMUNICATION, LIMIT, UNFUSED
from symm_cp.parsing import plot_file
from symm_cp.schedule.machine import CURVES, machine
from symm_cp.schedule.simulate import Event, Timeline
from symm_cp.schedule.steps import Compute, Copy, Region, Step
from tests.exhaustive import exhaustive


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs a command, with ranks as processes, and returns its output."""

    def go(*arguments: object) -> str:
        code = main([str(argument) for argument in arguments])
        out, err = capfd.readouterr()
        assert code == 0, out + err
        return out

    return go


@pytest.mark.exhaustive
def test_bench(tmp_path: Path, run: Callable[..., str]) -> None:
    out, table, plots = tmp_path / "b.json", tmp_path / "sub" / "b.csv", tmp_path / "plots"
    files = ("--json", out, "--csv", table, "--plot", plots)
    shown = run("bench", "matmul", "--shapes", "8x8x8,16x8x8", "--ranks", "1,2",
                "--seconds", "0.01", "--against", "limit,gloo,symm_cp", *files)  # fmt: skip
    written = json.loads(out.read_text())
    assert {"command", "date", "machine", "torch", "rows"} == written.keys()
    rows = written["rows"]
    assert [row["ranks"] for row in rows] == [1] * 6 + [2] * 6
    assert [row["size"] for row in rows if row["kind"] == "all-gather-matmul"] == [
        1024, 2048, 2048, 4096
    ]  # fmt: skip
    for row in rows:
        variants = {"limit", "unfused (gloo)", "unfused (symm_cp)", "fused"}
        if row["kind"] == "all-gather-matmul":
            variants.add("fused, in place")
        assert row["ms"].keys() == row["ratio"].keys() == row["ratio_95"].keys() == variants
        assert row["case"] in shown
        low, high = row["overlap"]["interval"]
        assert low <= high
    with table.open() as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == sum(len(row["ms"]) for row in rows)
    assert float(lines[0]["ms"]) == rows[0]["ms"]["limit"]
    assert {path.name for path in plots.iterdir()} == {
        "all-gather-matmul.png", "matmul-reduce-scatter.png", "matmul-all-reduce.png",
        "scaling.png",
    }  # fmt: skip


@pytest.mark.exhaustive
def test_calibrate_trace_and_tune(tmp_path: Path, run: Callable[..., str]) -> None:
    """One test, because each command uses the results of the previous one."""
    here = tmp_path / "machine.toml"
    shown = run("calibrate", "--force", "--out", here, "--seconds", "0.01", "--threads", "2")
    divided = tomllib.loads((tmp_path / measured.divided_path(2).name).read_text())["divided_from"]
    assert f"2 threads of a rank divide from {divided >> 10} KiB on: {tmp_path}" in shown
    assert divided in (*divisions.SIZES, 2 * divisions.SIZES[-1])
    calibrated = machine(str(here))
    assert calibrated.name == report.processor()
    assert {kind.split(".")[0] for kind in calibrated.curves} == set(CURVES)
    assert 1e7 < calibrated.flops < 1e14
    for nbytes in (1e4, 1e7):
        assert nbytes / 1e13 < calibrated.copy(nbytes) < nbytes / 1e5
    for curve in calibrated.curves.values():
        assert all(before <= after for before, after in itertools.pairwise(curve.seconds))
    assert calibrated.matmul(2e9, "float32") > calibrated.matmul(1e6, "float32") > 0
    assert all(0 < seconds < 1 for seconds in calibrated.calls.values())

    out, plot = tmp_path / "trace.json", tmp_path / "trace.png"
    files = ("--machine", here, "--out", out, "--plot", plot)
    shown = run("trace", "all-gather-matmul", "--shapes", "64x64x64", *files)
    for word in ("measured", "simulated", "simulated / untraced", "the op chooses by itself"):
        assert word in shown
    rows = json.loads(out.read_text())["traceEvents"]
    names = [row["args"]["name"] for row in rows if row["name"] == "process_name"]
    assert names == [f"rank {r}, {kind}" for kind in ("measured", "simulated") for r in range(2)]
    # The recording and the simulation have the same steps.
    kinds = [
        [row["cat"] for row in rows if row["ph"] == "X" and row["pid"] == 1 + 2 * which]
        for which in range(2)
    ]
    assert kinds[0] == kinds[1]
    assert plot.read_bytes().startswith(b"\x89PNG")

    tuned = tmp_path / "tuned.json"
    tuned.write_text('{"kept": "whole"}')
    shapes = ("--shapes", "8x8x8,2200000x8x8")  # the first have one way only: native
    shown = run("tune", *shapes, "--seconds", "0.01", "--out", tuned)
    assert shown.count(": whole (one native call)") == 6  # all-reduces of any size
    choices = json.loads(tuned.read_text())
    assert set(choices) == {
        "kept",
        "all_gather_matmul float32 2200000x8x8",
        "matmul_reduce_scatter float32 2200000x8x8",
        "matmul_reduce_scatter_backward float32 2200000x8x8,8x2200000x8",
        "weight_grad float32 8x2200000x8",
    }
    assert set(choices.values()) <= {"shards", "whole"}
    assert shown.count("simulated:") == 4


@exhaustive
def test_trace_on_a_machine_that_was_never_calibrated(
    tmp_path: Path, run: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`trace` measures briefly, says so, and saves nothing that ops would use."""
    (tmp_path / "cache").mkdir(mode=0o755)
    (tmp_path / "cache" / native.cache_key()).symlink_to(native.library_path().parent)
    monkeypatch.setenv("SYMM_CP_BUILD_DIR", str(tmp_path / "cache"))
    shown = run("trace", "all-gather-matmul", "--shapes", "8x8x8", "--out", tmp_path / "trace.json")
    assert "not calibrated for 2 ranks: measured briefly, for this command only" in shown
    assert "symm-cp calibrate --ranks 2" in shown
    assert "simulated / untraced" in shown
    assert not list((tmp_path / "cache").glob("machine*"))


def test_files_that_another_user_could_change_are_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(native, "load", lambda: None)
    monkeypatch.setenv("SYMM_CP_BUILD_DIR", str(tmp_path))
    for name, command in (
        (tuning.machine_path(2).name, ["trace", "attention"]),
        (tuning.tuned_path(2).name, ["tune", "--shapes", "8x8x8"]),
    ):
        (tmp_path / name).write_text("")
        (tmp_path / name).chmod(0o666)
        assert main(command) == 2
        assert f"{name}: others can write it (mode 666)" in capsys.readouterr().err


@pytest.mark.parametrize("out", ["machine", "tuned"])
def test_saved_files_replace_links_in_the_cache(
    out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    victim, place = tmp_path / "victim", tmp_path / "cache" / out
    victim.write_text("precious")
    place.parent.mkdir(mode=0o755)
    place.symlink_to(victim)
    assert report.keep(None, lambda: place, "text") == place
    assert (victim.read_text(), place.read_text(), place.is_symlink()) == (
        "precious",
        "text",
        False,
    )
    place.parent.chmod(0o777)
    with pytest.raises(trusted.UntrustedError, match="others can write"):
        report.keep(None, lambda: place, "other")
    assert report.keep(place, lambda: victim, "named") == place  # as the user says
    assert place.read_text() == "named"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bench", "matmul", "--shapes", "8x8"], "symm-cp bench: '8x8' is not a shape"),
        (["bench", "--shapes", "8x8x8"], "--shapes needs a kind"),
        (["bench", "--dtype", "float31"], "--dtype float31: must be one or more of"),
        (["bench", "--against", "mpi"], "--against mpi: must be one or more of limit"),
        (["bench", "--against", "nccl"], "--against nccl: --device cpu communicates by gloo or"),
        (
            ["bench", "--against", "limit,unfused,gloo"],
            "--against unfused,gloo: these are the same",
        ),
        (["bench", "--against", "torch"], "torch has no kernels for these ops on CPU"),
        (["bench", "train", "--shapes", "64x1x7"], "--seq 7 cannot be split over 2 ranks"),
        (["trace", "attention", "--machine", "h300"], "--machine 'h300' must be one of"),
        (["trace", "attention", "--shapes", "8x8x8,9x8x8"], "must be a single shape"),
        (["tune", "--shapes", "llama3-8b", "--ranks", "3"], "tokens: 512 is not divisible by 3"),
        (
            ["tune", "attention"],
            "attention has two ways only with --device cuda and --dtype bfloat16",
        ),
    ],
)
def test_wrong_arguments(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Refused before any rank is started."""
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


def test_constants_that_help_has_without_torch() -> None:
    assert parsers.WAYS == tuning.WAYS
    assert set(parsers.AGAINST) >= {LIMIT, UNFUSED, COMMUNICATION, TORCH}


def test_the_older_spelling_of_shapes(capsys: pytest.CaptureFixture[str]) -> None:
    """`--shape` works, warns once, and is not in the help."""
    for _ in range(2):
        assert main(["trace", "attention", "--shape", "8x8x8,9x8x8"]) == 2
    error = capsys.readouterr().err
    assert error.count("symm-cp trace: --shape is deprecated: use --shapes") == 1
    assert error.count("--shapes 8x8x8,9x8x8: must be a single shape") == 2
    with pytest.raises(SystemExit):
        main(["trace", "--help"])
    assert "--shape " not in capsys.readouterr().out


def test_a_plot_goes_to_a_file_or_a_folder(tmp_path: Path) -> None:
    assert plot_file(tmp_path / "x.png", "trace") == tmp_path / "x.png"
    assert plot_file(tmp_path / "x.pdf", "a", several=True) == tmp_path / "x-a.pdf"
    assert (
        plot_file(tmp_path / "new" / "plots", "trace") == tmp_path / "new" / "plots" / "trace.png"
    )
    assert (tmp_path / "new" / "plots").is_dir()


def test_on_cpu_nothing_is_hidden_by_construction() -> None:
    def event(lane: str, step: Step) -> Event:
        return Event(0, lane, 0, step, 0.0, 1.0)

    kernel, copy = Compute("consume", 0, (), ()), Copy(Region(0, "input"), Region(0, "slot"))
    alone = Timeline((event("compute", copy), event("compute", kernel)))
    beside = Timeline((event("copy", copy), event("compute", kernel)))
    assert (timeline.can_hide(alone), timeline.can_hide(beside)) == (False, True)
    assert not timeline.can_hide(Timeline((event("copy", copy),)))


def test_trace_leaves_out_what_cannot_be_hidden(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    events = Event(0, "compute", 0, Compute("consume", 0, (), ()), 0.0, 1.0)
    args = argparse.Namespace(ranks=2, calls=1, out=tmp_path / "trace.json", plot=None)
    timeline._show(args, "an op", Timeline((events,)), Timeline((events,)), 1.0)
    shown = capsys.readouterr().out
    assert "copying hidden" not in shown
    assert "peers' shards are read where they lie" in shown


@pytest.mark.parametrize("command", ["bench", "tune"])
def test_a_missing_gpu(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main([command, "--device", "cuda"]) == 2
    assert "--device cuda: torch finds no CUDA device" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["bench", "--ranks", "0"], ["trace"], ["trace", "gather"]])
def test_arguments_that_argparse_refuses(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
