"""How a function ended on ranks when not all of them returned a result."""

from __future__ import annotations

import re
import unittest
from collections import defaultdict
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

SEED_VARIABLE = "SYMM_CP_TEST_SEED"

#: Begins the report of a rank that did not end in time; its stacks follow.
STUCK = "was still here:"
_STUCK_AT = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
_LOCAL = re.compile(r"^    \w+ = .*\n", re.MULTILINE)

_UNMAPPED = re.compile(r"^symm_cp\.testing\.cuda_stand_ins\.UnmappedError: (.*)$", re.MULTILINE)
# Matches errors of ranks whose peers may have failed first, and errors whose cause is that a peer
# has left.
_DISTRIBUTED = r"^(?:RuntimeError|torch\.distributed\.Dist\w*Error): .*"
_PEER_FAILED = re.compile(_DISTRIBUTED + r"(\brank \d|\bpeer\b|[Tt]ime)", re.MULTILINE)
_PEER_LEFT = re.compile(
    _DISTRIBUTED
    + r"(\brank \d+ (died|has left)|\bby peer\b|pair closure|[Tt]im(ed |e-?)out|[Cc]onnection)",
    re.MULTILINE,
)


class Skip(NamedTuple):
    """A rank's exit from a test by `pytest.skip`, `pytest.importorskip` or `pytest.xfail`."""

    expected_failure: bool
    reason: str

    def exception(self) -> BaseException:
        """Returns the exception by which pytest reports the test as skipped or as an xfail."""
        if self.expected_failure:
            return pytest.xfail.Exception(self.reason)
        return pytest.skip.Exception(self.reason, _use_item_location=True)


def skip_of(error: BaseException) -> Skip | None:
    """Returns the skip that pytest would report for an error; None if it reports a failure."""
    if isinstance(error, pytest.skip.Exception | unittest.SkipTest):
        return Skip(False, getattr(error, "msg", None) or str(error))
    if isinstance(error, pytest.xfail.Exception):
        return Skip(True, error.msg or "")
    return None


def waited_for_a_skip(report: str) -> bool:
    """Whether a rank failed only because it waited for a rank that skipped the test."""
    if report.startswith(STUCK):
        return "in init_process_group" in report  # its time-out may be longer than the test's
    return bool(_PEER_LEFT.search(report))


def needs_a_gpu(reports: Collection[str]) -> str:
    """Returns the missing GPU feature if all failures come from it or from peers it made fail."""
    reasons = []
    for report in reports:
        if found := _UNMAPPED.search(report):
            reasons.append(found[1])
        elif not (report.startswith(STUCK) or _PEER_FAILED.search(report)):
            return ""
    return reasons[0] if reasons else ""


def _cause(reports: Mapping[int, str], failed: Collection[int]) -> str:
    """Returns the first line of the report of a rank that failed by itself."""
    ranks = [rank for rank in failed if not _PEER_FAILED.search(reports[rank])] or [*failed]
    rank = next(iter(ranks or reports))
    report = reports[rank]
    first = report.partition("\n")[0]
    if report.startswith(STUCK) and (at := _STUCK_AT.search(report)):
        first = f"{STUCK} {Path(at[1]).name}:{at[2]}, in {at[3]}"
    return f"rank {rank}: {first}"


class RankError(AssertionError):
    """Some ranks of a run failed; the message holds every failing rank's traceback."""

    def __init__(
        self,
        what: str,
        reports: Mapping[int, str],
        seed: int,
        skip: Skip | None = None,
        failed: Collection[int] = (),
    ) -> None:
        #: One line: the error of the first rank that failed by itself.
        self.cause = _cause(reports, failed)
        lines = [self.cause, f"{what} (repeat with {SEED_VARIABLE}={seed})"]
        equal: dict[str, list[int]] = defaultdict(list)  # ranks, by their reports without locals
        for rank, report in sorted(reports.items()):
            equal[_LOCAL.sub("", report)].append(rank)
        for ranks in equal.values():
            several = "s" if len(ranks) > 1 else ""
            lines.append(f"--- rank{several} {', '.join(map(str, ranks))} ---")
            cause, traceback, rest = reports[ranks[0]].rstrip().partition("\nTraceback ")
            lines.append((traceback + rest).lstrip() or cause)
        super().__init__("\n".join(lines))
        self.reports = dict(reports)
        #: The skip of the first rank that skipped the function, if no other rank failed.
        self.skip = skip


class RankTimeout(RankError):
    """Some ranks did not end in time; the message says where each of them was."""
