"""`symm-cp bench` as a command, on tiny sizes; wrong arguments of it, `trace` and `tune`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from symm_cp.cli import main
from symm_cp.parsing import plot_file
from tests.exhaustive import exhaustive


@pytest.mark.exhaustive
def test_bench(tmp_path: Path, run: Callable[..., str]) -> None:
    out, plots = tmp_path / "new" / "b.json", tmp_path / "plots"
    shown = run("bench", "matmul", "--shapes", "8x8x8,16x8x8", "--ranks", "1,2",
                "--seconds", "0.01", "--json", out, "--plot", plots)  # fmt: skip
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
    assert {path.name for path in plots.iterdir()} == {
        "all-gather-matmul.png", "matmul-reduce-scatter.png", "matmul-all-reduce.png",
        "scaling.png",
    }  # fmt: skip


@exhaustive
@pytest.mark.parametrize(
    ("kind", "shapes", "kinds"),
    [
        ("attention", "8x4x8x2", ["attention", "attention-backward"]),
        ("collectives", "4KiB", ["all-reduce", "all-gather", "reduce-scatter"]),
    ],
)
def test_json_is_printed_alone(
    kind: str, shapes: str, kinds: list[str], run: Callable[..., str]
) -> None:
    shown = run("bench", kind, "--shapes", shapes, "--seconds", "0.01", "--json")
    assert [row["kind"] for row in json.loads(shown)["rows"]] == kinds


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bench", "matmul", "--shapes", "8x8"], "symm-cp bench: '8x8' is not a shape"),
        (["bench", "--shapes", "8x8x8"], "--shapes needs a kind"),
        (["bench", "--dtype", "float31"], "--dtype float31: must be one or more of"),
        (["trace", "attention", "--shapes", "8x8x8,9x8x8"], "must be a single shape TOKENS"),
        (["trace", "all-gather", "--shapes", "8x8"], "must be a single shape ELEMENTS"),
        (["tune", "--shapes", "8x8"], "--shapes 8x8: must be 3 numbers"),
        (["tune", "attention"], "attention has several algorithms only with --device cuda"),
    ],
)
def test_wrong_arguments(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Refused before any rank is started."""
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


def test_a_plot_goes_to_a_file_or_a_folder(tmp_path: Path) -> None:
    assert plot_file(tmp_path / "x.png", "trace") == tmp_path / "x.png"
    assert plot_file(tmp_path / "x.pdf", "a", several=True) == tmp_path / "x-a.pdf"
    assert (
        plot_file(tmp_path / "new" / "plots", "trace") == tmp_path / "new" / "plots" / "trace.png"
    )
    assert (tmp_path / "new" / "plots").is_dir()


@pytest.mark.parametrize(
    "arguments",
    [
        "bench --ranks 0", "bench train", "bench --csv x", "trace", "trace gather",
        "tune --shapes 8x0x8", "tune llama",
    ],
)  # fmt: skip
def test_arguments_that_argparse_refuses(arguments: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments.split())
    assert ended.value.code == 2
