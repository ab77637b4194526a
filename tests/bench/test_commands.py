"""`symm-cp bench` as a command, on tiny sizes."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from symm_cp.cli import main
from symm_cp.commands.bench import parsers
from symm_cp.commands.bench.jobs import TORCH
from symm_cp.commands.harness.measure import COMMUNICATION, LIMIT, UNFUSED
from symm_cp.parsing import plot_file


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
    ],
)
def test_wrong_arguments(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Refused before any rank is started."""
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


def test_constants_that_help_has_without_torch() -> None:
    assert set(parsers.AGAINST) >= {LIMIT, UNFUSED, COMMUNICATION, TORCH}


def test_a_plot_goes_to_a_file_or_a_folder(tmp_path: Path) -> None:
    assert plot_file(tmp_path / "x.png", "trace") == tmp_path / "x.png"
    assert plot_file(tmp_path / "x.pdf", "a", several=True) == tmp_path / "x-a.pdf"
    assert (
        plot_file(tmp_path / "new" / "plots", "trace") == tmp_path / "new" / "plots" / "trace.png"
    )
    assert (tmp_path / "new" / "plots").is_dir()


def test_a_missing_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["bench", "--device", "cuda"]) == 2
    assert "--device cuda: torch finds no CUDA device" in capsys.readouterr().err


def test_arguments_that_argparse_refuses() -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "--ranks", "0"])
    assert ended.value.code == 2
