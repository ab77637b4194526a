"""Tests of distributed programs, on ranks that are started once: `pytest -p symm_cp.testing`.

    @pytest.mark.ranks(4)
    def test_sum(group):  # runs on four ranks at once
        x = torch.full((3,), float(group.rank()))
        dist.all_reduce(x)
        assert x[0] == 6

Without the marker, `ranks.run(4, function, *args)` calls a function on ranks, and returns each
rank's result. README.md says more.
"""

from symm_cp.testing.compare import Comparison, compare_with_one_process
from symm_cp.testing.gpu_programs import UnmappedError, cuda_on_cpu
from symm_cp.testing.outcomes import SEED_VARIABLE, RankError, RankTimeout
from symm_cp.testing.plugin import (
    group,
    pytest_addoption,
    pytest_collection_modifyitems,
    pytest_configure,
    pytest_configure_node,
    pytest_pyfunc_call,
    pytest_report_header,
    pytest_runtest_makereport,
    pytest_runtest_setup,
    pytest_sessionfinish,
    pytest_unconfigure,
    ranks,
    session_seed,
    uninitialized_ranks,
)
from symm_cp.testing.pool import Outcome, Ranks, Running
from symm_cp.testing.process import Setup, say
from symm_cp.testing.races import RaceError, detect_races
from symm_cp.testing.team import Place

__all__ = [
    "SEED_VARIABLE",
    "Comparison",
    "Outcome",
    "Place",
    "RaceError",
    "RankError",
    "RankTimeout",
    "Ranks",
    "Running",
    "Setup",
    "UnmappedError",
    "compare_with_one_process",
    "cuda_on_cpu",
    "detect_races",
    "group",
    "pytest_addoption",
    "pytest_collection_modifyitems",
    "pytest_configure",
    "pytest_configure_node",
    "pytest_pyfunc_call",
    "pytest_report_header",
    "pytest_runtest_makereport",
    "pytest_runtest_setup",
    "pytest_sessionfinish",
    "pytest_unconfigure",
    "ranks",
    "say",
    "session_seed",
    "uninitialized_ranks",
]
