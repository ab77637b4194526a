"""What the pictures of `symm-cp bench --plot` show."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from symm_cp.commands.bench import plots
from symm_cp.commands.harness.measure import Row

pytest.importorskip("matplotlib")

HEAD = {"machine": "a processor, 2 cores", "torch": "2.13.0", "date": "2026-07-01"}
NAMES = ("limit", "unfused (symm_cp)", "unfused (gloo)", "fused")


def measured(size: int, dtype: str, ranks: int = 2, noise: float = 0.0) -> dict[str, Any]:
    times = [(factor * (1 + noise * (i % 3))) for i in range(9) for factor in (1.0, 1.5, 3.0, 1.1)]
    seconds = {name: tuple(times[at::4]) for at, name in enumerate(NAMES)}
    if noise:  # the limit is steady, so ratios are noisy, too
        seconds["limit"] = (1.0,) * 9
    notes = {"kind": "matmul", "size": size, "unit": "rows", "ranks": ranks, "dtype": dtype}
    return Row("case", seconds, notes).as_dict()


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The figures by name, while they are open."""
    figures: dict[str, Any] = {}

    def inspect(figure: Any, path: Path) -> None:
        figures[path.stem] = [(ax, ax.get_lines(), ax.get_yscale()) for ax in figure.axes]
        figures[f"{path.stem} foot"] = figure.get_supxlabel()

    monkeypatch.setattr(plots, "save_figure", inspect)
    return figures


def test_each_dtype_is_a_series_and_the_machine_is_named(
    drawn: dict[str, Any], tmp_path: Path
) -> None:
    dtypes = ("float32", "bfloat16")
    plots.draw(tmp_path / "x.png", [measured(n, d) for d in dtypes for n in (8, 16)], HEAD)
    (times, lines, _), (ratios, _, scale), (overlap, shares, _) = drawn["x"]
    assert [line.get_label() for line in lines] == [f"{n}, {d}" for n in NAMES for d in dtypes]
    assert all(list(line.get_xdata()) == [8, 16] for line in lines)  # each dtype by itself
    assert scale == "linear"
    assert times.get_legend() is not None
    assert 1.1 < ratios.get_ylim()[1] < 3.0  # fused ratios are visible, gloo's leaves the axis
    assert "unfused (symm_cp)" in overlap.get_title()
    assert [line.get_label() for line in shares] == [*dtypes]
    assert list(shares[0].get_ydata()) == pytest.approx([0.8, 0.8])
    for text in HEAD.values():
        assert text in drawn["x foot"]


def test_noisy_values_are_not_claimed(drawn: dict[str, Any], tmp_path: Path) -> None:
    rows = [measured(8, "float32"), measured(16, "float32", noise=0.5)]
    plots.draw(tmp_path / "x.png", rows, HEAD)
    _, (_, ratios, _), (_, shares, _) = drawn["x"]
    by_label = {line.get_label(): list(line.get_xdata()) for line in ratios}
    assert by_label["fused, float32"] == [8]
    assert [list(line.get_xdata()) for line in shares] == [[8]]


def test_scaling_is_on_a_linear_axis(drawn: dict[str, Any], tmp_path: Path) -> None:
    plots.draw(tmp_path, [measured(8, "float32", ranks) for ranks in (1, 2, 4)], HEAD)
    ((_, lines, scale),) = drawn["scaling"]
    assert scale == "linear"
    assert list(lines[0].get_xdata()) == [1, 2, 4]
