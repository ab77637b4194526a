"""Schedules refuse steps that make no sense."""

import pytest

from symm_cp.schedule import Compute, Copy, Region, Schedule, Signal, Step, Wait


@pytest.mark.parametrize(
    "step",
    [
        Signal(2, "ready"),
        Wait(2, "ready"),
        Copy(Region(0, "input"), Region(2, "slot")),
        Compute("consume", 0, (Region(2, "slot"),), ()),
        Compute("consume", 0, (), (), (("arrived0", Region(2, "slot")),)),
    ],
    ids=str,
)
def test_steps_that_name_a_rank_out_of_range_are_refused(step: Step) -> None:
    message = r"odd: step 0 of lane 'compute', .* names rank 2, which must be in 0\.\.1"
    with pytest.raises(ValueError, match=message):
        Schedule("odd", 0, 2, {"compute": (step,)}, 2)


def test_negative_lag_is_refused() -> None:
    with pytest.raises(ValueError, match=r"lag=-1 must be >= 0"):
        Schedule("odd", 0, 2, {"compute": (Wait(1, "ready", lag=-1),)}, 2)
