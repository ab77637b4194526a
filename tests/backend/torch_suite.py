"""Runs torch's own suite of torch.distributed, which its wheel carries, over one backend.

    python -m tests.backend.torch_suite symm_cp --cases test_gather test_scatter
    python -m tests.backend.torch_suite symm_cp --part 0/4

Prints a line of JSON for each case: its name, "passed", "skipped" or "failed", and what the ranks
reported. `redirected` uses the name gloo, but makes gloo groups as `symm-cp run` makes them.
Each case runs in processes of its own, forked from this one, which has imported torch.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import json
import multiprocessing
import multiprocessing.connection
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

BACKENDS = ("gloo", "symm_cp", "redirected")
WORLD_SIZE = 3
LIMIT = 240.0  # of one case, in seconds
#: Torch gives its ranks 10 s to meet at the end of a case, less than a busy machine may take.
BARRIER_LIMIT = 60


def load(backend: str, folder: str) -> Any:
    """Imports torch's module, which reads the backend to test when it is imported."""
    os.environ.update(
        BACKEND="gloo" if backend == "redirected" else backend,
        WORLD_SIZE=str(WORLD_SIZE),
        INIT_METHOD=f"file://{folder}/world",  # for the one case that makes its world by itself
        TEMP_DIR=folder,
    )
    from torch.testing._internal.common_distributed import DistTestCases

    for backends in DistTestCases.backend_feature.values():
        if "gloo" in backends:
            backends.add("symm_cp")
    DistTestCases.backend_feature["plugin"].add("symm_cp")
    if backend != "gloo":
        import symm_cp
        from symm_cp import native

        assert symm_cp.__file__ is not None
        native.load_glue()  # once, and not by each rank
    from torch.testing._internal.distributed import distributed_test

    sync = distributed_test.Barrier.sync.__func__
    distributed_test.Barrier.sync = classmethod(functools.partial(sync, timeout=BARRIER_LIMIT))
    for name in ("PROFILING_SUPPORTED_BACKENDS", "SEND_RECV_PROFILING_SUPPORTED_BACKENDS"):
        getattr(distributed_test, name).append("symm_cp")
    if backend == "redirected":
        redirect(distributed_test)
    return distributed_test


def redirect(distributed_test: Any) -> None:
    """Makes gloo groups as `symm-cp run` makes them, and finds their events under gloo's name."""
    from torch.distributed import distributed_c10d

    from symm_cp.commands.run.redirect import make_group

    os.environ["SYMM_CP_BACKEND_FOR"] = "gloo"
    make = distributed_c10d._new_process_group_helper
    distributed_c10d._new_process_group_helper = functools.partial(make_group, make)
    events = distributed_test.get_profiling_event

    def events_of_ours(name: str, *args: object, **kwargs: object) -> Any:
        found = events(name.replace("gloo:", "symm_cp:"), *args, **kwargs)
        for event in found:
            event.name = event.name.replace("symm_cp:", "gloo:")
        return found

    distributed_test.get_profiling_event = events_of_ours


def suite_of(distributed_test: Any) -> type:
    """The class of torch's cases, as torch's own test files make it."""
    bases = (distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase)
    suite = type("Suite", bases, {})
    # Nothing pickles the class, but torch's messages name its module.
    suite.__module__ = __name__
    return suite


def _rank(suite: Any, rank: int, case: str, meeting: str, pipe: Any, log: str) -> None:
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    suite._run(rank, case, meeting, pipe)


def run(distributed_test: Any, suite: type, case: str) -> dict[str, Any]:
    """Runs one case on all ranks, and returns its result."""
    from torch.testing._internal.common_distributed import (
        TEST_SKIPS,
        cleanup_temp_dir,
        initialize_temp_directories,
    )

    if getattr(getattr(suite, case), "__unittest_skip__", False):
        reason = getattr(suite, case).__unittest_skip_why__
        return {"case": case, "outcome": "skipped", "report": reason, "s": 0}
    reasons = {skip.exit_code: skip.message for skip in TEST_SKIPS.values()}
    forked = multiprocessing.get_context("fork")
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        initialize_temp_directories()
        distributed_test.Barrier.init()
        pipes, processes = [], []
        for rank in range(WORLD_SIZE):
            ours, theirs = forked.Pipe()
            process = forked.Process(
                target=_rank,
                args=(suite, rank, case, f"{folder}/store", theirs, f"{folder}/rank {rank}"),
            )
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        reports = dict(_reports(processes, pipes, began + LIMIT))
        codes = [process.exitcode for process in processes]
        for rank in range(WORLD_SIZE):
            if codes[rank] not in (0, *reasons) and rank not in reports:
                with open(f"{folder}/rank {rank}", errors="replace") as log:
                    reports[rank] = f"exit code {codes[rank]}\n{log.read()[-4000:]}"
        cleanup_temp_dir()
    skips = [reasons[code] for code in codes if code in reasons]
    outcome = "failed" if reports else "skipped" if skips else "passed"
    report = "\n".join(f"--- rank {rank} ---\n{text}" for rank, text in sorted(reports.items()))
    seconds = round(time.monotonic() - began, 1)
    return {"case": case, "outcome": outcome, "report": report or "".join(skips[:1]), "s": seconds}


def _reports(processes: list[Any], pipes: list[Any], until: float) -> Iterator[tuple[int, str]]:
    """Yields reports of failing ranks until all have ended; a failure soon ends the others."""
    while running := [process.sentinel for process in processes if process.is_alive()]:
        multiprocessing.connection.wait(running, timeout=0.1)
        for rank, pipe in enumerate(pipes):
            with contextlib.suppress(EOFError, OSError):
                if pipe.poll():
                    yield rank, pipe.recv()
                    until = min(until, time.monotonic() + 20)
        if time.monotonic() > until:
            for rank, process in enumerate(processes):
                if process.is_alive():
                    process.kill()
                    process.join()
                    yield rank, f"did not end within {LIMIT:g} s, or 20 s after another one failed"
    for rank, pipe in enumerate(pipes):
        with contextlib.suppress(EOFError, OSError):
            while pipe.poll():
                yield rank, pipe.recv()


def cases_of(suite: type) -> list[str]:
    return sorted(name for name in dir(suite) if name.startswith("test_"))


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("backend", choices=BACKENDS)
    parser.add_argument("--cases", nargs="+", help="all of them, unless given")
    parser.add_argument("--part", default="0/1", help="of all cases, as 0/4: each fourth")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="symm-cp-torch-suite-") as folder:
        distributed_test = load(options.backend, folder)
        suite = suite_of(distributed_test)
        part, parts = map(int, options.part.split("/"))
        for case in options.cases or cases_of(suite)[part::parts]:
            print(json.dumps(run(distributed_test, suite, case)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
