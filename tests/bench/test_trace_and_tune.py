"""`symm-cp trace` and `symm-cp tune` as commands, on tiny sizes."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from symm_cp import native, tuning
from symm_cp.cli import main
from symm_cp.commands import trace
from symm_cp.commands.trace import run as tracing
from symm_cp.schedule.simulate import Event, Timeline
from symm_cp.schedule.steps import Compute, Copy, Region, Step


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("op", "shape"),
    [
        ("all-gather-matmul", "64x64x64"),
        ("matmul-reduce-scatter", "8x8x8"),
        ("attention", "16x2x8"),
        ("all-gather", "1000"),
        ("reduce-scatter", "1000"),
    ],
)
def test_trace(op: str, shape: str, tmp_path: Path, run: Callable[..., str]) -> None:
    out, plot = tmp_path / "trace.json", tmp_path / "trace.png"
    shown = run("trace", op, "--shapes", shape, "--out", out, "--plot", plot)
    assert f"{op}, {shape}, float32, 2 ranks; one of 3 calls; untraced" in shown
    rows = json.loads(out.read_text())["traceEvents"]
    names = [row["args"]["name"] for row in rows if row["name"] == "process_name"]
    assert names == [f"rank {rank}, measured" for rank in range(2)]
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.exhaustive
def test_tune(tmp_path: Path, run: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Measures what has several algorithms, keeps other rows, and the ops follow it."""
    (tmp_path / native.cache_key()).symlink_to(native.library_path().parent)
    monkeypatch.setenv("SYMM_CP_BUILD_DIR", str(tmp_path))
    table = tuning.tuned_path(2)
    table.write_text('{"kept": "whole"}')
    table.chmod(0o644)
    shapes = ("--shapes", "8x8x8,2200000x8x8")  # one exchange serves the first
    shown = run("tune", *shapes, "--seconds", "0.01")
    assert shown.count(": whole (by size)") == shown.count("before: shards (by size)") == 5
    assert shown.splitlines()[-1] == str(table)
    choices = json.loads(table.read_text())
    assert set(choices) == {
        "kept",
        "all_gather_matmul float32 2200000x8x8",
        "matmul_all_reduce float32 2200000x8x8",
        "matmul_reduce_scatter float32 2200000x8x8",
        "matmul_reduce_scatter_backward float32 2200000x8x8,8x2200000x8",
        "weight_grad float32 8x2200000x8",
    }
    assert set(choices.values()) <= {"shards", "whole"}
    again = run("tune", "--shapes", "2200000x8x8", "--seconds", "0.01")
    assert again.count("before: shards (measured)") + again.count("before: whole (measured)") == 5


def test_a_table_that_another_user_could_change_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(native, "load", lambda: None)
    monkeypatch.setenv("SYMM_CP_BUILD_DIR", str(tmp_path))
    table = tuning.tuned_path(2)
    table.write_text("")
    table.chmod(0o666)
    assert main(["tune", "--shapes", "8x8x8"]) == 2
    assert f"{table.name}: others can write it (mode 666)" in capsys.readouterr().err


def test_a_missing_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["tune", "--device", "cuda"]) == 2
    assert "--device cuda: torch finds no CUDA device" in capsys.readouterr().err


def test_constants_that_help_has_without_torch() -> None:
    assert trace.ALGORITHMS == tuning.ALGORITHMS


def test_the_older_spelling_of_shapes(capsys: pytest.CaptureFixture[str]) -> None:
    """`--shape` works, warns once, and is not in the help."""
    for _ in range(2):
        assert main(["trace", "attention", "--shape", "8x8x8,9x8x8"]) == 2
    error = capsys.readouterr().err
    assert error.count("symm-cp trace: --shape is deprecated: use --shapes") == 1
    assert error.count("must be a single shape") == 2
    with pytest.raises(SystemExit):
        main(["trace", "--help"])
    assert "--shape " not in capsys.readouterr().out


def test_on_cpu_nothing_is_hidden_by_construction() -> None:
    def event(lane: str, step: Step) -> Event:
        return Event(0, lane, 0, step, 0.0, 1.0)

    kernel, copy = Compute("consume", 0, (), ()), Copy(Region(0, "input"), Region(0, "slot"))
    alone = Timeline((event("compute", copy), event("compute", kernel)))
    beside = Timeline((event("copy", copy), event("compute", kernel)))
    assert (tracing.can_hide(alone), tracing.can_hide(beside)) == (False, True)
    assert not tracing.can_hide(Timeline((event("copy", copy),)))


def test_trace_leaves_out_what_cannot_be_hidden(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    event = Event(0, "compute", 0, Compute("consume", 0, (), ()), 0.0, 1.0)
    args = argparse.Namespace(
        op="all-gather", shapes=None, dtype="float32", ranks=2, calls=1, plot=None,
        out=tmp_path / "trace.json",
    )  # fmt: skip
    tracing._show(args, Timeline((event,)), 1.0)
    shown = capsys.readouterr().out
    assert "hidden" not in shown
    assert "peers' shards are read where they lie" in shown
