"""The program of a rank process: it joins the other ranks, then runs calls until it is ended.

team.py starts rank processes; functions that run in them call `say`.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import faulthandler
import gc
import importlib
import os
import pickle
import random
import reprlib
import signal
import sys
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from symm_cp import env, native, tuning
from symm_cp.ranks import die_with
from symm_cp.testing import delays
from symm_cp.testing.accesses import Log, noting_accesses
from symm_cp.testing.gpu_programs import cuda_on_cpu
from symm_cp.testing.outcomes import skip_of
from symm_cp.testing.state import restored

_CLONE_NEWNET = 0x40000000
_FIRST_GROUP = 1000
_GROUPS_OF_A_RUN = 1000
_PLUMBING = str(Path(__file__).parent)
# Folders of code whose local variables do not help a test's author.
_LIBRARIES = (str(Path(native.__file__).parent.parent), str(Path(os.__file__).parent))


@dataclass(frozen=True)
class Setup:
    """The settings of all ranks of a pool."""

    #: Backend of the default group; with "", functions call `init_process_group()` themselves.
    backend: str = "symm_cp"
    #: How long collectives of the default group wait for a peer.
    timeout: datetime.timedelta = datetime.timedelta(seconds=60)
    #: Modules that are imported once, by the process that ranks are forked from.
    preload: tuple[str, ...] = ()
    #: "module:function" of a context manager around every function that runs; it is called with
    #: the group (None without a backend), the seed and the options of the call by name.
    around: str = ""
    #: Ranks 0..W-1 of one set of processes form a group for every W, instead of the default group.
    subgroups: bool = False
    #: Whether to set the environment variables that torchrun sets.
    launched: bool = True
    #: Whether functions that ask for "cuda" get the CPU: see gpu_programs.py.
    cuda_on_cpu: bool = False
    #: Whether to record accesses to symmetric memory and to report races as errors: see races.py.
    races: bool = False
    #: Threads of torch in each rank. With one, sums have the same order everywhere.
    threads: int = 1


@dataclass(frozen=True)
class Member:
    """One of the rank processes that are started together."""

    rank: int
    world_size: int
    store: int | str  # the port of a TCPStore, or the path of a FileStore
    setup: Setup
    log: str  # the file that takes stdout and stderr
    environment: Mapping[str, str]
    namespace: str  # the name of a network namespace in `ip netns`


@dataclass(frozen=True)
class RankTask:
    """A function to run on some ranks."""

    world_size: int
    seed: int
    number: int  # the number of runs so far
    path: list[str]
    function: bytes  # pickled, with its arguments: `path` has to be set before it is unpickled
    options: Mapping[str, Any] = field(default_factory=dict)  # for `Setup.around`


def collect_garbage_seldom() -> None:
    """Makes Python look for garbage less often, and never among the objects so far.

    With its usual threshold, 700 new objects, compilers spend up to a fifth of their time on it.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


_pipe: Connection | None = None


def say(value: object) -> None:
    """Sends a value to the test, which can `hear` it before the function returns."""
    assert _pipe is not None, "only a rank process can say something"
    _pipe.send_bytes(pickle.dumps(("said", value)))


class _Locals(reprlib.Repr):
    """Shows a local variable in one line: the kind of a tensor, not its elements."""

    def repr1(self, x: Any, level: int) -> str:
        if isinstance(x, torch.Tensor | np.ndarray):
            return f"<{type(x).__name__} {str(x.dtype).removeprefix('torch.')}{list(x.shape)}>"
        return " ".join(super().repr1(x, level).split())


_locals = _Locals()
_locals.maxstring = _locals.maxother = 200


def _trim(summary: traceback.TracebackException | None, error: BaseException | None) -> None:
    """Drops frames that lead to the test, and adds the local variables of its own frames."""
    if summary is None or error is None:
        return
    frames = []
    for shown, (frame, _) in zip(
        summary.stack, traceback.walk_tb(error.__traceback__), strict=False
    ):
        if shown.filename.startswith(_PLUMBING) or frame.f_locals.get("__tracebackhide__"):
            continue
        if not shown.filename.startswith(_LIBRARIES) and "site-packages" not in shown.filename:
            shown.locals = {name: _locals.repr(value) for name, value in frame.f_locals.items()}
        frames.append(shown)
    summary.stack[:] = frames
    _trim(summary.__cause__, error.__cause__)
    _trim(summary.__context__, error.__context__)


def describe(error: BaseException) -> str:
    """Formats an error: a line with its cause, then its traceback with local variables."""
    summary = traceback.TracebackException.from_exception(error)
    _trim(summary, error)
    cause = next(summary.format_exception_only()).partition("\n")[0]
    if cause == "AssertionError" and summary.stack:
        cause = f"AssertionError: {summary.stack[-1].line}"
    return "".join([cause, "\n", *summary.format()])


def _settle(member: Member) -> None:
    """Sets up this process: output, environment, network."""
    log = os.open(member.log, os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.close(log)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    faulthandler.enable()  # for crashes
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    os.environ.clear()
    os.environ.update(member.environment)
    _forget_the_machine(Path(member.log).parent)
    if member.namespace:
        libc = ctypes.CDLL(None, use_errno=True)
        with Path("/run/netns", member.namespace).open() as network:
            if libc.setns(network.fileno(), _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"setns: {member.namespace}")


def _forget_the_machine(folder: Path) -> None:
    """Ignores the user's table of `symm-cp tune`, which would change what ops choose."""
    users, usual = env.build_dir(), tuning.tuned_path

    def elsewhere(ranks: int) -> Path:
        path = usual(ranks)
        return folder / path.name if path.parent == users else path

    tuning.tuned_path = elsewhere


def _join(member: Member) -> dict[int, dist.ProcessGroup | None]:
    """Returns the groups of ranks 0..W-1 that this rank is in, by W."""
    setup = member.setup
    if not setup.backend:
        return {member.world_size: None}
    store: dist.Store
    if isinstance(member.store, int):
        store = dist.TCPStore("127.0.0.1", member.store, is_master=False, timeout=setup.timeout)
    else:
        store = dist.FileStore(member.store, member.world_size)
    dist.init_process_group(
        setup.backend,
        store=store,
        rank=member.rank,
        world_size=member.world_size,
        timeout=setup.timeout,
    )
    assert dist.group.WORLD is not None
    groups: dict[int, dist.ProcessGroup | None] = {member.world_size: dist.group.WORLD}
    for world_size in range(1, member.world_size) if setup.subgroups else ():
        # Collective over all processes, also those outside the group.
        group = dist.new_group(list(range(world_size)), timeout=setup.timeout)
        if member.rank < world_size:
            groups[world_size] = group
    return groups


def _as_launched(member: Member, number: int) -> None:
    """Sets the variables that torchrun sets for processes; each call gets its own store keys."""
    variables = {"RANK": member.rank, "LOCAL_RANK": member.rank}
    variables |= {"WORLD_SIZE": member.world_size, "LOCAL_WORLD_SIZE": member.world_size}
    if isinstance(member.store, int):
        variables |= {"MASTER_PORT": member.store, "TORCHELASTIC_RESTART_COUNT": number}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    os.environ |= {name: str(value) for name, value in variables.items()}


@contextlib.contextmanager
def _surroundings(
    member: Member, call: RankTask, group: dist.ProcessGroup | None
) -> Iterator[None]:
    """The context that a function runs in."""
    with contextlib.ExitStack() as stack:
        if member.setup.around:
            module, _, name = member.setup.around.partition(":")
            around = getattr(importlib.import_module(module), name)
            stack.enter_context(around(group=group, seed=call.seed, **call.options))
        try:
            yield
        finally:
            if not member.setup.backend and dist.is_initialized():
                dist.destroy_process_group()


def _usable(groups: Mapping[int, dist.ProcessGroup | None]) -> bool:
    """Whether all groups from `_join` still exist: programs may destroy them at their end."""
    made = [group for group in groups.values() if group is not None]
    there = dist.distributed_c10d._world.pg_map
    default = groups[max(groups)]
    return default is dist.group.WORLD and all(group in there for group in made)


def _answer(
    member: Member, call: RankTask, groups: Mapping[int, dist.ProcessGroup | None]
) -> bytes:
    """Runs one call and returns the pickled reply."""
    try:
        # torch names groups by a counter in each process. After a run on fewer ranks that makes
        # groups, the counters would differ, and so would the names of the next groups.
        dist.distributed_c10d._world.group_count = _FIRST_GROUP + _GROUPS_OF_A_RUN * call.number
        sys.path[:] = call.path
        if member.setup.launched:
            _as_launched(member, call.number)
        function, args, kwargs = pickle.loads(call.function)
        random.seed(call.seed)
        np.random.seed(call.seed)
        torch.manual_seed(call.seed)
        group = groups[call.world_size]
        delays.begin(call.seed + member.rank)
        log: Log = []
        with restored(), _surroundings(member, call, group), contextlib.ExitStack() as stack:
            if member.setup.races:
                log = stack.enter_context(noting_accesses())
            result = function(group, *args, **kwargs)
        return pickle.dumps(("result", (result, log, _usable(groups))))
    except BaseException as error:  # pytest's own outcomes are no Exceptions
        if skip := skip_of(error):
            return pickle.dumps(("skip", (skip, describe(error), _usable(groups))))
        return pickle.dumps(("failure", describe(error)))


def main(pipe: Connection, member: Member) -> None:
    """Sends a "result" when it is ready; then answers calls until the other end closes the pipe."""
    global _pipe
    _pipe = pipe
    die_with(os.getppid())
    try:
        _settle(member)
        torch.set_num_threads(member.setup.threads)
        native.load()  # raises the reason if it cannot be built
        groups = _join(member)
        pipe.send_bytes(pickle.dumps(("result", (None, [], True))))
        mapped = cuda_on_cpu(member.world_size, member.rank)
        with mapped if member.setup.cuda_on_cpu else contextlib.nullcontext():
            while message := pipe.recv_bytes():
                pipe.send_bytes(_answer(member, pickle.loads(message), groups))
    except (EOFError, ConnectionError):
        os._exit(0)  # no clean-up that could wait for peers
    except BaseException as error:
        pipe.send_bytes(pickle.dumps(("failure", describe(error))))
        os._exit(1)
    os._exit(0)
