"""Checks the models of this folder with spin: `python -m tests.model [more]`.

Needs `spin` (https://spinroot.com) and a C compiler. `more` searches further, for minutes.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
#: How many cases are searched at once; each may take 8 GB.
SEARCHES = 2


@dataclass(frozen=True)
class Case:
    """A model with its options, and whether spin must find it right."""

    model: str
    options: str = ""
    right: bool = True


CASES = [
    Case("protocol", "-DRANKS=2 -DCALLS=7"),
    Case("protocol", "-DRANKS=2 -DCALLS=4 -DDEATHS"),
    Case("protocol", "-DRANKS=3 -DCALLS=4"),
    Case("protocol", "-DRANKS=3 -DCALLS=2 -DDEATHS"),
    Case("protocol", "-DRANKS=2 -DCALLS=7 -DWRAP", right=False),
    Case("protocol", "-DRANKS=2 -DCALLS=20 -DWRAP -DDENSE"),
    Case("protocol", "-DRANKS=2 -DHASTY", right=False),
    Case("protocol", "-DRANKS=2 -DSINGLE", right=False),
    Case("failures", "-DRANKS=2 -DCALLS=4 -DQUITS=2"),
    Case("failures", "-DRANKS=3 -DCALLS=2"),
    Case("failures", "-DRANKS=2 -DNO_MARK", right=False),
    Case("failures", "-DRANKS=2 -DNO_DEBT", right=False),
    Case("failures", "-DRANKS=2 -DNO_VERIFY", right=False),
    Case("failures", "-DRANKS=3 -DCALLS=2 -DEARLY_LOOK", right=False),
    Case("failures", "-DRANKS=2 -DCALLS=3 -DPIECES=2"),
    Case("failures", "-DRANKS=3 -DCALLS=2 -DPIECES=2 -DQUITS=0"),
    Case("failures", "-DRANKS=2 -DPIECES=3 -DONE_HALF", right=False),
    Case("failures", "-DRANKS=2 -DPIECES=3 -DNO_MARK", right=False),
    Case("failures", "-DRANKS=2 -DPIECES=3 -DNO_DEBT", right=False),
    Case("failures", "-DRANKS=2 -DPIECES=3 -DSHORT_MARK", right=False),
    Case("agreement", "-DRANKS=2 -DMISSED=3 -DLAST=9"),
    Case("agreement", "-DRANKS=3 -DLAST=6"),
    Case("agreement", "-DRANKS=2 -DNO_STANDING", right=False),
    Case("agreement", "-DRANKS=2 -DALL_WAIT", right=False),
    Case("agreement", "-DRANKS=2 -DLAST=5 -DMISSED=0 -DMISTAKES=2"),
    Case("agreement", "-DRANKS=3 -DLAST=4 -DMISSED=0 -DMISTAKES=2"),
    Case("agreement", "-DRANKS=2 -DLAST=4 -DMISSED=0 -DMISTAKES=2 -DONE_IS_ENOUGH", right=False),
    Case("mesh", "-DRANKS=2 -DCALLS=3 -DQUITS=3"),
    Case("mesh", "-DRANKS=3 -DCALLS=1 -DQUITS=1"),
    Case("mesh", "-DRANKS=2 -DNO_NOTE", right=False),
    Case("mesh", "-DRANKS=2 -DNO_MESSAGE", right=False),
    Case("mesh", "-DRANKS=2 -DNO_LAST_LOOK", right=False),
    Case("mesh", "-DRANKS=3 -DCLOSE", right=False),
    Case("sleep", "-DRANKS=3"),
    Case("sleep", "-DEARLY", right=False),
    Case("sleep", "-DLATE", right=False),
    Case("messages"),
    Case("messages", "-DDEATHS"),
    Case("messages", "-DEARLY_TAIL", right=False),
    Case("messages", "-DEARLY_HEAD", right=False),
    Case("messages", "-DSILENT", right=False),
    Case("messages", "-DNO_LOOK", right=False),
    Case("messages", "-DLATE", right=False),
]
MORE = [
    Case("protocol", "-DRANKS=2 -DCALLS=9"),
    Case("protocol", "-DRANKS=2 -DCALLS=7 -DDEATHS"),
    Case("protocol", "-DRANKS=3 -DCALLS=6"),
    Case("protocol", "-DRANKS=3 -DCALLS=3 -DDEATHS"),
    Case("failures", "-DRANKS=2 -DCALLS=6 -DQUITS=3"),
    Case("failures", "-DRANKS=3 -DCALLS=3"),
    Case("failures", "-DRANKS=2 -DCALLS=3 -DPIECES=3"),
    Case("failures", "-DRANKS=3 -DCALLS=2 -DPIECES=2"),
    Case("mesh", "-DRANKS=3 -DCALLS=2 -DQUITS=1"),
]


def search(case: Case) -> tuple[int, int]:
    """Returns how many errors spin found, and how many states it has seen."""

    def run(*command: str) -> str:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            sys.exit(f"{' '.join(command)}:\n{done.stdout}{done.stderr}")
        return done.stdout

    with tempfile.TemporaryDirectory() as folder:
        run("spin", *case.options.split(), "-a", str(HERE / f"{case.model}.pml"))
        # -O2 takes twice as long for each of forty programs, and only few of them search for long.
        run("cc", "-w", "-O1", "-DSAFETY", "-DCOLLAPSE", "-DMEMLIM=8000", "pan.c", "-o", "pan")
        said = run("./pan", "-m1000000")
    if "Search not completed" in said and "errors: 0" in said:
        sys.exit(f"{case}: not all was searched:\n{said}")
    errors = re.search(r"errors: (\d+)", said)
    states = re.search(r"([\d.e+]+) states, stored", said)
    assert errors is not None, said
    assert states is not None, said
    return int(errors[1]), int(float(states[1]))


def main() -> None:
    """Checks all cases."""
    if shutil.which("spin") is None:
        sys.exit("spin is not installed: see https://spinroot.com")
    wrong = 0
    cases = CASES + (MORE if "more" in sys.argv[1:] else [])
    found = ThreadPoolExecutor(SEARCHES).map(search, cases)
    for case, (errors, states) in zip(cases, found, strict=True):
        as_it_should = (errors == 0) == case.right
        wrong += not as_it_should
        result = "right" if errors == 0 else "an error found"
        note = "" if as_it_should else "  <-- must be otherwise"
        print(f"{case.model:9} {case.options:32} {states:>11,} states  {result}{note}", flush=True)
    sys.exit(wrong)


if __name__ == "__main__":
    main()
