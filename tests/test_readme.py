"""The READMEs: examples run, tables and links are true, the main one stays short."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import symm_cp
from benchmarks import readme_figures
from symm_cp import env, native
from tests.ops.newer import MISSING

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "symm_cp"
README = (ROOT / "README.md").read_text()
INDUCTOR = (PACKAGE / "inductor" / "README.md").read_text()
#: How it works, the layers, and the walk.
HOUSE = (PACKAGE / "README.md").read_text()
PAGES = (
    ROOT / "README.md",
    *(ROOT / ".github").glob("*.md"),
    *(page for folder in ("benchmarks", "tests") for page in (ROOT / folder).glob("README.md")),
    *PACKAGE.rglob("README.md"),
)


def blocks(language: str, text: str = README) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def rows(text: str, pattern: str) -> set[str]:
    return {line.strip() for line in text.splitlines() if re.match(pattern, line.strip())}


def floors() -> list[tuple[int, str]]:
    """The rooms in the order of the table of layers, each with its layer."""
    found: list[tuple[int, str]] = []
    for floor, cell in re.findall(r"^\| (\d) \| ([^|]+)\|", HOUSE, re.MULTILINE):
        found += [(int(floor), place) for place in re.findall(r"`([^`]+)`", cell)]
    return found


def layers() -> list[set[str]]:
    """The modules of each layer of the import-linter contract, the lowest layer first."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (contract,) = (
        contract
        for contract in settings["tool"]["importlinter"]["contracts"]
        if contract["type"] == "layers" and contract.get("containers") == ["symm_cp"]
    )
    return [set(re.findall(r"\w+", layer)) for layer in reversed(contract["layers"])]


def test_readme_is_short() -> None:
    lines = README.splitlines()
    assert len(lines) <= 120
    assert [line for line in lines if len(line) > 110 and not line.startswith("|")] == []


def test_the_example_that_needs_gpus_uses_existing_functions() -> None:
    examples = blocks("python", (PACKAGE / "cuda" / "README.md").read_text())
    calls = [name for text in examples for name in re.findall(r"symm_cp\.nvshmem\.(\w+)\(", text)]
    assert calls == ["init", "enable"]
    assert all(callable(getattr(symm_cp.nvshmem, name)) for name in calls)


def test_the_loop_of_attention_is_dense_attention() -> None:
    (loop,) = blocks("python", (PACKAGE / "ops" / "attention" / "README.md").read_text())
    exec(loop, {})  # it compares itself


#: Whole programs, by page and number of the block.
PROGRAMS = {"ops": (README, 0), "training": (README, 1), "compiled": (INDUCTOR, 0)}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_run_as_they_stand(tmp_path: Path, name: str) -> None:
    page, number = PROGRAMS[name]
    script = tmp_path / "example.py"
    script.write_text(blocks("python", page)[number])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*command, "--nproc-per-node", "2", str(script)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    if name == "compiled":
        assert done.stdout.count("4 of 4 collectives fused") == 2, done.stdout


def test_readme_has_no_other_program() -> None:
    assert len(blocks("python")) == 2


def test_environment_variables_are_those_of_the_code() -> None:
    """README.md links to the table in env.py."""
    assert "(symm_cp/env.py)" in README
    documented = rows(env.__doc__ or "", r"\| `")
    code = Path(env.__file__).read_text()
    code += (ROOT / "csrc/memory/segment.cpp").read_text()
    read = set(re.findall(r"(?:environ[^\n]*?|_get\(|_flag\(|getenv\()\"(SYMM_CP_\w+|CXX)\"", code))
    assert read == {re.findall(r"`(\w+)`", row)[0] for row in documented}
    mentioned = {name for page in PAGES for name in re.findall(r"SYMM_CP_\w+", page.read_text())}
    of_tests = {f"SYMM_CP_TEST_{name}" for name in ("SEED", "SIMULATION", "DELAYS")}
    assert mentioned <= {*read, *of_tests}


def test_named_ops_and_entry_points_exist() -> None:
    ops = (PACKAGE / "ops" / "README.md").read_text()
    (table,) = re.findall(r"\| same result as .*?\n\n", ops, re.DOTALL)
    cells = [line.split("|")[2:4] for line in table.strip().splitlines()[2:]]
    names = [[re.findall(r"`(\w+)`", cell) for cell in row] for row in cells]
    entries = {name for entry, _ in names for name in entry}
    ops = {name for _, op in names for name in op}
    assert entries <= set(symm_cp.__all__)
    assert len(ops) >= 11
    for name in ops - MISSING:
        assert hasattr(torch.ops.symm_mem, name), name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_paths_exist(page: Path) -> None:
    text = page.read_text()
    for target in re.findall(r"\]\((?!http)([^)#]+)[^)]*\)", text):
        assert (page.parent / target).exists(), target
    for path in re.findall(r"\b(?:benchmarks|csrc|symm_cp|tests)/[\w./]*\w", text):
        assert (ROOT / path).exists(), path


def test_the_floors_list_every_room() -> None:
    places = [place for _, place in floors()]
    assert places[0] == "csrc/"
    rooms = {
        f"{path.name}/" if path.is_dir() else path.name
        for path in PACKAGE.iterdir()
        if (path.suffix == ".py" and not path.stem.startswith("__"))
        or (path / "__init__.py").exists()
    }
    assert sorted(places[1:]) == sorted(rooms)


def test_the_floors_are_those_that_import_linter_holds() -> None:
    """Each room of the table comes after all rooms that it may import."""
    order = [(floor, place.removesuffix("/").removesuffix(".py")) for floor, place in floors()[1:]]
    assert [floor for floor, _ in order] == sorted(floor for floor, _ in order)
    rooms = [room for _, room in order]
    assert set(rooms) == set().union(*layers())
    lower: set[str] = set()
    for layer in layers():
        for room in layer:
            later = lower & set(rooms[rooms.index(room) :])
            assert not later, f"{room} may import {later}, which the table lists after it"
        lower |= layer


def names_of_the_walk() -> Iterator[str]:
    (walk,) = re.findall(r"## A walk: .*", HOUSE, re.DOTALL)
    assert len(walk.splitlines()) <= 25
    yield from re.findall(r"`([^`]+)`", walk)


def test_the_walk_names_what_exists() -> None:
    native = (path for path in (ROOT / "csrc").rglob("*") if path.is_file())
    sources = [*PACKAGE.rglob("*.py"), *native]
    text = "\n".join(path.read_text() for path in sources)
    for name in names_of_the_walk():
        if "/" in name or name.endswith(".py"):
            assert (ROOT / name).exists() or (PACKAGE / name).exists(), name
        for word in re.findall(r"[A-Za-z]\w{3,}", re.sub(r"\S*/\S*|\w+\.py", "", name)):
            assert re.search(rf"\b{word}\b", text), name


def test_ci_runs_the_documented_command() -> None:
    command = "pip install torch==2.13.0 -e '.[test]' && pytest -n 2"
    assert f"\n{command}\n" in "\n".join(blocks("sh"))
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    assert command in [line.strip() for line in lines]


@pytest.mark.parametrize("page", readme_figures.BLOCKS)
def test_figures_are_those_of_the_results(page: str) -> None:
    """`python benchmarks/readme_figures.py` writes them."""
    text = (ROOT / page).read_text()
    assert readme_figures.replaced(text, readme_figures.BLOCKS[page]()) == text


def test_tables_have_no_empty_columns() -> None:
    for page in readme_figures.BLOCKS:
        text = (ROOT / page).read_text().split(readme_figures.BEGIN)[1]
        for lines in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
            head, _, *rest = (
                [cell.strip() for cell in line.split("|")] for line in lines.split("\n")[:-1]
            )
            for name, *cells in list(zip(head, *rest, strict=True))[2:-1]:
                assert any(cells), (page, name)


def test_ratios_below_the_limit_are_explained() -> None:
    assert readme_figures.below_one(["1.00", "", "1.06"]) == ""
    assert "our output reuses memory" in readme_figures.below_one(["1.00", "0.97"])
    assert "Values below 1: " in readme_figures.head()  # of the results that are there


def test_readme_says_what_a_fresh_debian_needs() -> None:
    with pytest.raises(native.BuildError, match=r"apt install python3-dev") as raised:
        native.check_headers(Path("/nonexistent"))
    assert "/nonexistent/Python.h is missing" in str(raised.value)
    assert "apt install g++ python3-dev" in README
