"""`pytest -p symm_cp.testing`, as another project uses it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.exhaustive import exhaustive

_SAMPLES = Path(__file__).parent / "samples"


def outcomes(folder: Path, *options: str) -> tuple[dict[str, str], str]:
    """What became of each sample by name, and the output."""
    for name in ("gpu", "others"):
        (folder / f"test_{name}.py").write_text((_SAMPLES / f"{name}.txt").read_text())
    command = [sys.executable, "-m", "pytest", "-p", "symm_cp.testing", "-v", "-rs", *options]
    variables = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST")}
    done = subprocess.run(
        [*command, "--rootdir", str(folder)],
        capture_output=True,
        text=True,
        cwd=folder,
        env=variables,
        check=False,
    )
    found = re.findall(r"::(test_\w+)(?:\[\w+\])? (PASSED|FAILED|SKIPPED|ERROR)", done.stdout)
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
    found, output = outcomes(tmp_path, "--ranks-delays", "100", "--ranks-races")
    assert found == {
        "test_tensor_parallelism": "SKIPPED",
        "test_symmetric_memory": "SKIPPED",
        "test_a_graph": "SKIPPED",
        "test_a_graph_of_one_rank": "SKIPPED",
        "test_a_graph_and_a_mistake": "SKIPPED",
        "test_sum": "PASSED",
        "test_sizes": "PASSED",
        "test_one_fails": "FAILED",
        "test_one_hangs": "FAILED",
        "test_without_a_number": "FAILED",
        "test_makes_its_group": "PASSED",
        "test_makes_another": "PASSED",
        "test_a_function": "PASSED",
        "test_forgets_a_barrier": "FAILED",
    }, output
    assert "test_one_fails, 2 ranks: failed on ranks [1]" in output
    assert "mine = 41" in output  # the locals
    assert re.search(r"--- rank 1 ---\s+was still here:(.|\n)*in test_one_hangs", output)
    assert "test_one_hangs, 2 ranks: ranks [0, 1] did not end within 8 s" in output
    assert re.search("RaceError: rank [01] writes bytes 0 to 16 of rank [01]'s buffer", output)
    assert "the marker ranks needs a number of ranks" in output
    assert "repeat these inputs with SYMM_CP_TEST_SEED=" in output


@exhaustive
def test_tests_of_torch_kind_run_on_cpu(tmp_path: Path) -> None:
    """Ranks that torch's own classes for tests start, by `symm-cp exec`."""
    program = tmp_path / "program.py"
    program.write_text((_SAMPLES / "torchs.txt").read_text())
    command = [sys.executable, "-m", "symm_cp", "exec", "--cuda-on-cpu", "2", "--", sys.executable]
    # Where CI is set, torch's `run_tests` writes XML by a package that is not required here.
    env = {key: value for key, value in os.environ.items() if key != "CI"}
    done = subprocess.run(
        [*command, str(program)], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"Ran 2 tests in .*\n\nOK\n", done.stderr), done.stderr
