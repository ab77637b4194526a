"""Schedules: who copies what, who signals whom, and when a kernel runs, as plain data.

``builders`` writes them (one function per pattern; ``staged`` for machines with copy engines),
``check`` proves them free of races and deadlocks, ``channels`` lists which patterns share a
workspace. Pure Python: no torch here.
"""

from symm_cp.schedule import patterns
from symm_cp.schedule.builders import (
    all_gather,
    all_gather_and_consume,
    all_ranks,
    all_to_all,
    consume_and_reduce_scatter,
    one_shot_all_reduce,
    peers,
    produce_and_reduce_scatter,
    reduce_scatter,
    two_shot_all_reduce,
)
from symm_cp.schedule.channels import CHANNELS, Pattern, staged_channels
from symm_cp.schedule.check import Report, check, check_builder
from symm_cp.schedule.steps import Compute, Copy, Region, Schedule, Signal, Step, Wait, accesses

__all__ = [
    "CHANNELS",
    "Compute",
    "Copy",
    "Pattern",
    "Region",
    "Report",
    "Schedule",
    "Signal",
    "Step",
    "Wait",
    "accesses",
    "all_gather",
    "all_gather_and_consume",
    "all_ranks",
    "all_to_all",
    "check",
    "check_builder",
    "consume_and_reduce_scatter",
    "one_shot_all_reduce",
    "patterns",
    "peers",
    "produce_and_reduce_scatter",
    "reduce_scatter",
    "staged_channels",
    "two_shot_all_reduce",
]
