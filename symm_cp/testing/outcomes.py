"""How a function ended on ranks when not all of them returned a result."""

from __future__ import annotations

import re
import unittest
from collections.abc import Collection, Mapping
from typing import NamedTuple

import pytest

SEED_VARIABLE = "SYMM_CP_TEST_SEED"

_UNMAPPED = re.compile(r"^symm_cp\.testing\.cuda_stand_ins\.UnmappedError: (.*)$", re.MULTILINE)
# Errors of ranks whose peers may have failed before them, and of ranks whose peers must have.
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
        """Returns the exception by which pytest reports the test so."""
        if self.expected_failure:
            return pytest.xfail.Exception(self.reason)
        return pytest.skip.Exception(self.reason, _use_item_location=True)


def skip_of(error: BaseException) -> Skip | None:
    """Returns the skip that an error means to pytest; None if it reports a failure."""
    if isinstance(error, pytest.skip.Exception | unittest.SkipTest):
        return Skip(False, getattr(error, "msg", None) or str(error))
    if isinstance(error, pytest.xfail.Exception):
        return Skip(True, error.msg or "")
    return None


def waited_for_a_skip(report: str) -> bool:
    """Whether a rank did not pass only because it waited for a rank that skipped the test."""
    if report.startswith("was still here"):
        return "in init_process_group" in report  # whose time-out may be longer than the test's
    return bool(_PEER_LEFT.search(report))


def needs_a_gpu(reports: Collection[str]) -> str:
    """Returns the missing feature of GPUs if it, or peers that failed for it, made ranks fail."""
    reasons = []
    for report in reports:
        if found := _UNMAPPED.search(report):
            reasons.append(found[1])
        elif not (report.startswith("was still here") or _PEER_FAILED.search(report)):
            return ""
    return reasons[0] if reasons else ""


class RankError(AssertionError):
    """Some ranks of a run failed; the message holds every failing rank's traceback."""

    def __init__(
        self, what: str, reports: Mapping[int, str], seed: int, skip: Skip | None = None
    ) -> None:
        lines = [f"{what} (repeat with {SEED_VARIABLE}={seed})"]
        for rank, report in sorted(reports.items()):
            lines += [f"--- rank {rank} ---", report.rstrip()]
        super().__init__("\n".join(lines))
        self.reports = dict(reports)
        #: The skip of the first rank that skipped the function, if no other rank failed.
        self.skip = skip


class RankTimeout(RankError):
    """Some ranks did not end in time; the message says where each of them was."""
