"""`pytest -p symm_cp.testing`, as another project uses it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.exhaustive import exhaustive, some

_SAMPLES = Path(__file__).parent / "samples"


def outcomes(
    folder: Path, *options: str, samples: tuple[str, ...] = ("gpu", "others")
) -> tuple[dict[str, str], str]:
    """Runs pytest on samples; returns the outcome of each test by name, and the output."""
    for name in samples:
        (folder / f"test_{name}.py").write_text((_SAMPLES / f"{name}.txt").read_text())
    command = [sys.executable, "-m", "pytest", "-p", "symm_cp.testing", "-v", "-rsfE", *options]
    variables = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST")}
    done = subprocess.run(
        [*command, "--rootdir", str(folder)],
        capture_output=True,
        text=True,
        cwd=folder,
        env=variables,
        check=False,
    )
    found = re.findall(r"::(test_\w+)(?:\[\w+\])? (PASSED|FAILED|SKIPPED|XFAIL|ERROR)", done.stdout)
    return dict(found), done.stdout + done.stderr


@exhaustive
def test_programs_for_gpus_run_on_cpu(tmp_path: Path) -> None:
    found, output = outcomes(tmp_path, "--cuda-on-cpu", "test_gpu.py")
    assert found == {
        "test_tensor_parallelism": "PASSED",
        "test_symmetric_memory": "PASSED",
        "test_a_graph": "SKIPPED",
        "test_a_graph_of_one_rank": "SKIPPED",
        "test_a_graph_and_a_mistake": "FAILED",
    }, output
    assert "needs a GPU: torch.cuda.CUDAGraph" in output


@exhaustive
def test_what_another_project_sees(tmp_path: Path) -> None:
    options = ("--ranks-delays", "100", "--ranks-races", "--ranks-threads", "3")
    found, output = outcomes(tmp_path, *options)
    assert found == {
        "test_tensor_parallelism": "SKIPPED",
        "test_symmetric_memory": "SKIPPED",
        "test_a_graph": "SKIPPED",
        "test_a_graph_of_one_rank": "SKIPPED",
        "test_a_graph_and_a_mistake": "SKIPPED",
        "test_sum": "PASSED",
        "test_threads": "PASSED",
        "test_sizes": "PASSED",
        "test_one_fails": "FAILED",
        "test_one_hangs": "FAILED",
        "test_without_a_number": "FAILED",
        "test_makes_its_group": "PASSED",
        "test_makes_another": "PASSED",
        "test_a_function": "PASSED",
        "test_forgets_a_barrier": "FAILED",
        "test_without_the_marker": "ERROR",
        "test_without_a_default_group": "ERROR",
        "test_a_fixture_with_a_group": "ERROR",
    }, output
    assert "test_one_fails, 2 ranks: failed on ranks [1]" in output
    assert "mine = 41" in output  # the locals
    assert "- rank 1: AssertionError: " in output  # pytest's summary
    assert "symm_cp/testing/process.py" not in output
    assert "the fixture 'group' exists on ranks only: mark the test with" in output
    assert "the fixture 'group' exists on ranks only: without init=False, use" in output
    assert "group.size: the group exists on ranks only" in output
    assert re.search(r"--- rank 1 ---\s+was still here:(.|\n)*in test_one_hangs", output)
    assert "test_one_hangs, 2 ranks: ranks [1] did not end within 8 s" in output
    assert re.search("RaceError: rank [01] writes bytes 0 to 16 of rank [01]'s buffer", output)
    assert "the marker ranks needs a number of ranks" in output
    repeat = output.splitlines()[-1]
    assert re.match(r"repeat: SYMM_CP_TEST_SEED=\d+ pytest .*--ranks-races", repeat)
    assert "test_others.py::test_one_fails" in repeat


@exhaustive
def test_outcomes_are_those_of_pytest(tmp_path: Path) -> None:
    found, output = outcomes(tmp_path, samples=("outcomes",))
    assert found == {
        "test_all_skip": "SKIPPED",
        "test_imports": "SKIPPED",
        "test_skips_as_unittest_does": "SKIPPED",
        "test_all_xfail": "XFAIL",
        "test_one_skips_and_others_wait": "SKIPPED",
        "test_one_skips_and_another_passes": "SKIPPED",
        "test_one_xfails_and_another_waits": "XFAIL",
        "test_one_skips_and_another_fails_late": "FAILED",
        "test_one_fails_and_another_skips_late": "FAILED",
        "test_one_skips_and_another_hangs": "FAILED",
        "test_one_skips_before_there_is_a_group": "SKIPPED",
        "test_a_function_skips": "SKIPPED",
        "test_async": "FAILED",
        "test_async_generator": "FAILED",
        "test_returns_a_coroutine": "FAILED",
        "test_returns_a_generator": "FAILED",
        "test_is_awaited": "PASSED",
        "test_by_name": "PASSED",
        "test_a_fixture_that_cannot_be_sent": "FAILED",
        "test_a_parameter_that_cannot_be_sent": "FAILED",
        "test_an_instance_that_cannot_be_sent": "FAILED",
        "test_the_groups_limit": "FAILED",
    }, output
    assert re.search(r"SKIPPED \[1\] test_outcomes\.py:\d+: needs 8 heads", output)
    assert "ValueError: late" in output
    assert "test_one_skips_and_another_hangs, 2 ranks: ranks [0] did not end within 8 s" in output
    assert "async def functions are not supported on ranks" in output
    assert "the test returned a coroutine, which nothing runs" in output
    assert "was never awaited" not in output
    assert "the fixture 'function' cannot be pickled (AttributeError: Can't pickle" in output
    assert "the fixture 'request' cannot be pickled (" in output
    assert "the fixture 'tmp_path'" not in output
    assert "the parameter 'parameter' cannot be pickled" in output
    assert "the test cannot be pickled (AttributeError: Can't pickle" in output
    assert "rank 1 did not come within the timeout of 6000 ms" in output


@exhaustive
def test_xfail_can_be_run(tmp_path: Path) -> None:
    found, output = outcomes(tmp_path, "--runxfail", "-k", "all_xfail", samples=("outcomes",))
    assert found == {"test_all_xfail": "PASSED"}, output


@exhaustive
def test_nothing_is_left_to_the_next_test(tmp_path: Path) -> None:
    found, output = outcomes(tmp_path, samples=("state",))
    assert found.pop("test_8_destroys_on_one_rank") == "SKIPPED"
    assert len(found) == 8, output
    assert set(found.values()) == {"PASSED"}, output


@pytest.mark.parametrize("workers", some(0, of=[0, 1]))
def test_markers_are_checked(tmp_path: Path, workers: int) -> None:
    found, output = outcomes(tmp_path, f"-n{workers}", samples=("refused",))
    assert "PASSED" not in found.values(), output
    for test, message in {
        "test_misspelt": "got an unexpected keyword argument 'tiemout'; it is ranks(world_size=",
        "test_too_many": "too many positional arguments",
        "test_text": "world_size='2' must be an int",
        "test_no_ranks": "world_size=0 must be positive",
        "test_no_time": "timeout=-1 must be positive",
        "test_no_flag": "init='gloo' must be True or False",
    }.items():
        assert f"test_refused.py::{test}: the marker ranks: {message}" in output
    assert "TestCases::test_method: the marker ranks is not supported in unittest" in output


@exhaustive
def test_tests_of_torch_kind_run_on_cpu(tmp_path: Path) -> None:
    """torch's own test classes start their ranks under `symm-cp exec`."""
    program = tmp_path / "program.py"
    program.write_text((_SAMPLES / "torchs.txt").read_text())
    command = [sys.executable, "-m", "symm_cp", "exec", "--cuda-on-cpu", "2", "--", sys.executable]
    # Where CI is set, torch's `run_tests` writes XML by a package that is not required here.
    env = {key: value for key, value in os.environ.items() if key != "CI"}
    done = subprocess.run(
        [*command, str(program)], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"Ran 6 tests in .*\n\nOK \(skipped=1\)\n", done.stderr), done.stderr
