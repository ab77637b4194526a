"""How a function ended on ranks, where not all of them returned a result."""

from __future__ import annotations

from collections.abc import Mapping

SEED_VARIABLE = "SYMM_CP_TEST_SEED"


class RankError(AssertionError):
    """Some ranks of a run failed; the message holds every failing rank's traceback."""

    def __init__(self, what: str, reports: Mapping[int, str], seed: int) -> None:
        lines = [f"{what} (repeat with {SEED_VARIABLE}={seed})"]
        for rank, report in sorted(reports.items()):
            lines += [f"--- rank {rank} ---", report.rstrip()]
        super().__init__("\n".join(lines))
        self.reports = dict(reports)


class RankTimeout(RankError):
    """Some ranks did not end in time; the message says where each of them was."""
