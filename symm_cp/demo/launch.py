"""Starts the demo's ranks, unless torchrun did; and ends them all when one fails."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from symm_cp import native
from symm_cp.demo import options as demo_options

_POLL_SECONDS = 0.05
_GRACE_SECONDS = 5.0


def main(given: argparse.Namespace) -> int:
    """Runs `symm-cp demo` and returns the exit code: 0 when all losses agree."""
    try:
        options = demo_options.check(given)
        native.load()  # built once, before the ranks start
    except (ValueError, native.BuildError) as error:
        print(f"symm-cp demo: {error}", file=sys.stderr)
        return 2
    if "RANK" in os.environ:
        from symm_cp.demo.train import run_rank

        code = run_rank(options)
        # Not by way of the interpreter's end: threads of gloo that still hold tensors then abort
        # the process now and again.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    with tempfile.TemporaryDirectory(prefix="symm-cp-demo-") as folder:
        return _run_ranks(options.ranks, Path(folder))


def _start(rank: int, ranks: int, folder: Path) -> subprocess.Popen[bytes]:
    # The same command line again: argparse takes the last of two --rendezvous.
    command = [sys.executable, "-m", "symm_cp", *sys.argv[1:], "--rendezvous", str(folder)]
    package = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
    env = {
        **os.environ,
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": path,
    }
    return subprocess.Popen(command, env=env)


def _run_ranks(ranks: int, folder: Path) -> int:
    started: list[subprocess.Popen[bytes]] = []
    try:
        started += [_start(rank, ranks, folder) for rank in range(ranks)]
        while any(process.poll() is None for process in started):
            if any(process.poll() for process in started):
                # Peers of a dead rank fail by themselves, with an error that names it.
                _wait(started, _GRACE_SECONDS)
                break
            time.sleep(_POLL_SECONDS)
    finally:
        for process in started:
            if process.poll() is None:
                process.kill()
            process.wait()
    codes = [process.returncode for process in started]
    failed = {rank: code for rank, code in enumerate(codes) if code not in (0, 1)}
    for rank, code in failed.items():
        reason = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        print(f"symm-cp demo: rank {rank} {reason}", file=sys.stderr)
    return 2 if failed else max(codes)


def _wait(processes: list[subprocess.Popen[bytes]], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and any(p.poll() is None for p in processes):
        time.sleep(_POLL_SECONDS)
