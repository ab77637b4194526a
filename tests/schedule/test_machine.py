"""Curves, machines and their files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from symm_cp.schedule.machine import MACHINES, TYPICAL_CPU, Curve, machine, to_toml

CURVE = Curve((1e3, 1e6, 1e9), (1e-6, 2e-4, 1.0))


def test_a_curve_goes_through_its_points() -> None:
    for size, seconds in zip(CURVE.sizes, CURVE.seconds, strict=True):
        assert CURVE(size) == pytest.approx(seconds)
    assert CURVE(0) == 0.0
    assert CURVE(1) == 1e-6  # the least that a call takes
    assert CURVE(4e9) == pytest.approx(4.0)  # at the last rate
    assert CURVE(1e6 * 1e3**0.5) == pytest.approx((2e-4 * 1.0) ** 0.5)


@given(st.floats(1, 1e10), st.floats(1, 1e10))
def test_a_curve_grows(one: float, other: float) -> None:
    small, large = sorted((one, other))
    assert CURVE(small) <= CURVE(large) * (1 + 1e-12)


@given(st.floats(1e-3, 1e12))
def test_a_curve_of_one_point_is_a_rate(size: float) -> None:
    assert Curve((10.0,), (2.0,))(size) == pytest.approx(max(2.0, size / 5))


@pytest.mark.parametrize(
    ("sizes", "seconds"),
    [((), ()), ((1.0, 1.0), (1.0, 2.0)), ((1.0,), (1.0, 2.0)), ((1.0,), (0.0,)), ((0.0,), (1.0,))],
)
def test_what_is_no_curve(sizes: tuple[float, ...], seconds: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="a curve must have"):
        Curve(sizes, seconds)


def test_figures_of_a_maker() -> None:
    h100 = MACHINES["h100"]
    assert h100.matmul(989e12) == pytest.approx(1 / 0.65)
    assert h100.matmul(1.0, weight=3.35e12) == pytest.approx(1.0)  # the time to read it
    assert h100.attention(989e12) == pytest.approx(1 / 0.65)
    assert h100.copy(3.35e12) == pytest.approx(2.0)  # read and written
    assert h100.transfer(450e9) == pytest.approx(1 / 0.8)
    assert h100.reduce(1e12, 3) == pytest.approx(4 / 3.35)
    assert h100.fresh(1e9) == h100.remote(1e9) == 0.0


def test_products_are_computed_in_waves_of_tiles() -> None:
    h100 = MACHINES["h100"]
    wave, launch = 2.0 * 128 * 256 * 8192 * 132 / (989e12 * 0.65), 4e-6
    assert h100.product(128 * 66, 8192, 256 * 2) == pytest.approx(wave + launch)
    assert h100.product(128 * 66 + 1, 8192, 256 * 2) > 1.2 * wave  # some tiles more
    # Half as many tiles in smaller ones, which are slower; few of the smallest take half a wave.
    assert h100.product(128 * 33, 8192, 256 * 2) == pytest.approx(wave / 2 / 0.8 + launch)
    assert h100.product(64, 8192, 128) == h100.product(64 * 132, 8192, 128)
    assert h100.product(1, 8192, 65536) == pytest.approx(  # the time to read the weight
        launch + (8192 * 65536 + 8192 + 65536) * 2 / 3.35e12
    )
    flops, weight = 2.0 * 3 * 5 * 7, 5 * 7 * 4
    expected = TYPICAL_CPU.matmul(flops, "float32", weight)
    assert TYPICAL_CPU.product(3, 5, 7, "float32", 4) == expected


def test_curves_come_before_figures() -> None:
    curves = dict.fromkeys(("matmul.float32", "weight.float32", "copy", "remote"), CURVE)
    found = replace(TYPICAL_CPU, curves=curves)
    assert found.matmul(1e6, "float32", weight=1e9) == pytest.approx(1.0002)
    assert found.matmul(1e6, "bfloat16") == TYPICAL_CPU.matmul(1e6, "bfloat16")
    assert found.copy(1e6) == found.remote(1e6) == pytest.approx(2e-4)
    assert found.transfer(1e6) == TYPICAL_CPU.transfer(1e6)


def test_a_file_holds_all_of_a_machine(tmp_path: Path) -> None:
    made = replace(TYPICAL_CPU, calls={"an_op": 2e-5}, curves={"copy": CURVE, "matmul.bf": CURVE})
    path = tmp_path / "mine.toml"
    path.write_text(to_toml(made))
    assert machine(str(path)) == made


def test_a_machine_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('name = "mine"\nlike = "h200"\nnetwork = 1e11\n')
    found = machine(str(path))
    assert (found.name, found.network, found.memory) == ("mine", 1e11, 141e9)
    for text, what in (
        ("netwrok = 1e11", "other keys among"),
        ("curves.speed = {sizes = [1], seconds = [1]}", "curves must be among"),
        ("curves.copy = {sizes = [1]}", "seconds"),
        ("curves.copy = {sizes = [2, 1], seconds = [1, 1]}", "a curve must have"),
        ("curves = 3", "mine.toml"),
        ("= 3", "mine.toml"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=what):
            machine(str(path))
    with pytest.raises(ValueError, match="must be one of h100"):
        machine("h300")
