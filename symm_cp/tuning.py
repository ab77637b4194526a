"""Chooses the algorithm of an op if it has several.

A fused matmul runs shard by shard (`shards`), as one matmul (`whole`), or on CUDA shard by shard on
two streams in turn (`lanes`), or as one kernel that waits for shards or signals parts by tiles
(`tiles`). Attention on CUDA runs as a `pipeline` of kernels, one for each shard when it arrives; or
a kernel attends to this rank's keys while the peers' keys are gathered, and then to these
`together`.

It comes from, in this order: `SYMM_CP_ALGORITHM` and `SYMM_CP_ATTENTION`, or `forced`; the table of
`symm-cp tune`; a threshold beside the op (ops/matmul/algorithms.py, ops/attention/choice.py).
`tiles` runs only where it is forced: no GPU has shown that its kernels keep up with `torch.mm`.

All ranks of a group choose identically, from the table that the group's first rank has read.
"""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from symm_cp import accelerators, env, native, trusted
from symm_cp.group.liveness import read
from symm_cp.group.memory import Group, StateKey, is_fake, on_first_use
from symm_cp.measured import machine_key

ALGORITHMS = ("shards", "whole")
#: The algorithms of fused matmuls that only devices with streams have.
LANES, TILES = "lanes", "tiles"
ATTENTION_ALGORITHMS = ("pipeline", "together")


@dataclass(frozen=True)
class Choice:
    """The algorithm, and where the choice comes from: forced, measured, by size, and so on."""

    algorithm: str
    source: str

    def __str__(self) -> str:
        return f"{self.algorithm} ({self.source})"


#: The choice of work that one exchange serves: no table is read for it.
IN_ONE_CALL = Choice("whole", "by size")

# --- forced ----------------------------------------------------------------------------------

# The forced algorithm, by the algorithms to choose from.
_forced: dict[tuple[str, ...], str] = {}
_listening: dict[str, Choice] | None = None


@contextlib.contextmanager
def forced(algorithm: str | None) -> Iterator[None]:
    """Forces an algorithm for all ops in the `with` block that have it; None forces no algorithm.

    Use it on all ranks. Raises `ValueError` for an unknown algorithm.
    """
    named = {
        name: algorithms for algorithms in (ALGORITHMS, ATTENTION_ALGORITHMS) for name in algorithms
    } | dict.fromkeys((LANES, TILES), ALGORITHMS)
    if algorithm is not None and algorithm not in named:
        raise ValueError(f"forced: unknown {algorithm=}; must be one of {tuple(named)}")
    before = _forced
    _force({} if algorithm is None else {**_forced, named[algorithm]: algorithm})
    try:
        yield
    finally:
        _force(before)


def _force(algorithms: dict[tuple[str, ...], str]) -> None:
    global _forced
    _forced = algorithms
    native.drop_plans()


def forced_algorithm(algorithms: tuple[str, ...]) -> str | None:
    """Returns the algorithm that is forced, here or by the environment, for calls with these."""
    if algorithms[0] in ATTENTION_ALGORITHMS:
        return _forced.get(ATTENTION_ALGORITHMS) or env.attention()
    return _forced.get(ALGORITHMS) or env.algorithm()


# --- the table of `symm-cp tune` -------------------------------------------------------------


def tuned_path(ranks: int) -> Path:
    """Returns the path of this machine's table for a number of ranks."""
    return env.build_dir() / f"tuned_{ranks}_{machine_key()}.json"


def parse_tuned(text: str, name: str) -> dict[str, str]:
    """Returns the fastest algorithm by the name of the work, from the text of file `name`.

    Raises `ValueError` for a damaged file.
    """
    try:
        algorithms = json.loads(text or "{}")
    except ValueError as error:
        raise ValueError(f"{name}: {error}: delete it, or run symm-cp tune again") from error
    if not isinstance(algorithms, dict):
        raise ValueError(f"{name}: it must be a JSON object: delete it, or run symm-cp tune again")
    return algorithms


def read_tuned(ranks: int) -> tuple[str, str]:
    """Returns the text of the table, and why it is not used; both are empty without a table."""
    try:
        return trusted.read(tuned_path(ranks)).decode(), ""
    except (env.NoHomeError, FileNotFoundError, NotADirectoryError):
        return "", ""
    except (OSError, UnicodeDecodeError) as error:
        return "", f"symm_cp: not used: {error}"


@dataclass
class _Table:
    """The table by which a group chooses, as this rank knows it."""

    #: How often the file was read again.
    reading: int = 0
    #: The fastest algorithm by the name of the work; None: not read yet.
    algorithms: dict[str, str] | None = None
    #: Why rank 0 does not use the file, until it has warned.
    unused: str = ""


_TABLE = StateKey[_Table]("tuning")


def tuned(group: Group) -> dict[str, str]:
    """Returns the group's table. Collective at the first call for a group.

    Rank 0 warns about a file that it does not use.
    """
    table = group.state(_TABLE, _Table)
    if table.algorithms is None:
        text = "" if is_fake(group.name) else read(group, group.store(), [_key(table.reading)])[0]
        table.algorithms = parse_tuned(text, "the file of symm-cp tune")
        reason, table.unused = table.unused, ""
        if reason:
            # Comes last, since warnings may be errors, on this rank alone.
            warnings.warn(reason, stacklevel=2)
    return table.algorithms


def _key(reading: int) -> str:
    return f"symm_cp/tuning/{reading}"


def _publish(group: Group) -> None:
    """Rank 0 writes the table to the store. Not collective."""
    if group.rank != 0:
        return
    table = group.state(_TABLE, _Table)
    text, table.unused = read_tuned(group.world_size)
    group.store().set(_key(table.reading), text)


on_first_use.append(_publish)


def relearn(group: Group) -> None:
    """Makes the group read the table again at its next op. Call it on all ranks."""
    table = group.state(_TABLE, _Table)
    # A new key even if this rank has not read the last key: a peer may still read that.
    table.reading, table.algorithms = table.reading + 1, None
    native.drop_plans()
    _publish(group)


# --- choices ---------------------------------------------------------------------------------


def by_size(algorithm: str) -> Choice:
    """Returns the choice of an op's threshold."""
    return Choice(algorithm, "by size")


def choose(
    group: Group, device: torch.device, key: str, algorithms: tuple[str, ...], default: Choice
) -> str:
    """Returns one of `algorithms`, which support a call; `key` names its work in the table.

    `default` is the choice by the op's threshold. All ranks pass the same `algorithms` and
    `default`. Captured calls choose like others: these warm a graph up and make its workspace.
    Collective at the first call for a group.
    """
    if group.world_size == 1:
        return algorithms[0]
    algorithm = forced_algorithm(algorithms)
    if algorithm in algorithms:
        choice = Choice(algorithm, "forced")
    elif algorithm is not None:
        choice = Choice(default.algorithm, f"{algorithm} cannot serve it")
    else:
        table = tuned(group)
        measured = table.get(_on(device, key), "") if table else ""
        choice = Choice(measured, "measured") if measured in algorithms else default
    if _listening is not None:
        note(device, key, choice)
    return choice.algorithm


def _on(device: torch.device, key: str) -> str:
    """Returns the key of work on a device in the table."""
    return key if device.type == "cpu" else f"{accelerators.name_of(device)}: {key}"


def note(device: torch.device, key: str, choice: Choice) -> None:
    """Tells `listening` of a choice."""
    if _listening is not None:
        _listening[_on(device, key)] = choice


@contextlib.contextmanager
def listening() -> Iterator[dict[str, Choice]]:
    """Yields the choices made in the `with` block, by the name of the work, in all threads.

    Inside, Python makes all calls, without plans.
    """
    before, choices = _listening, dict[str, Choice]()
    native.load().symm_cp_plans_pause()
    _listen(choices)
    try:
        yield choices
    finally:
        _listen(before)
        native.load().symm_cp_plans_resume()


def _listen(choices: dict[str, Choice] | None) -> None:
    global _listening
    _listening = choices
    native.drop_plans()
