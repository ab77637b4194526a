"""Schedules: who copies what, who signals whom, and when a kernel runs, as plain data.

``patterns`` declares all that may run, each pattern with its direct and its staged form; ``check``
proves schedules free of races and deadlocks; ``check_issue_order`` proves that all ranks finish in
the order in which the host hands steps out, and ``check_graph`` that they finish captured graphs.
README.md explains the proof. Pure Python, no torch.
"""

from symm_cp.schedule import patterns
from symm_cp.schedule.check import CheckReport, Deadlock, Race, check
from symm_cp.schedule.graphs import GraphCall, GraphOrder, check_graph, graph_order
from symm_cp.schedule.issue_order import IssuedCall, check_issue_order
from symm_cp.schedule.layout import SequenceLayout, head_tail, head_tail_order, sequential
from symm_cp.schedule.mask import CAUSAL, NO_MASK, Mask
from symm_cp.schedule.patterns import Pattern, Variant, peers
from symm_cp.schedule.steps import Compute, Copy, Region, Schedule, Signal, Step, Wait, accesses

__all__ = [
    "CAUSAL",
    "IssuedCall",
    "CheckReport",
    "Compute",
    "Copy",
    "Deadlock",
    "GraphCall",
    "GraphOrder",
    "Mask",
    "NO_MASK",
    "Pattern",
    "Race",
    "Region",
    "Schedule",
    "SequenceLayout",
    "Signal",
    "Step",
    "Variant",
    "Wait",
    "accesses",
    "check",
    "check_graph",
    "check_issue_order",
    "graph_order",
    "head_tail",
    "head_tail_order",
    "patterns",
    "peers",
    "sequential",
]
