"""Which way an op takes, where there are two.

A fused matmul goes shard by shard, or it is one matmul of the whole.

`shards` multiplies each rank's shard as it comes: communication hides behind the matmuls, but each
of the W matmuls reads the weight again. `whole` brings the shards together first (a
matmul-reduce-scatter: scatters last) and multiplies once: better when there are few rows for a
large weight. Both are simulated on the machine that `symm-cp calibrate` has described, else on a
typical one, and the faster is taken; what `symm-cp tune` has measured comes before the simulation;
and `SYMM_CP_WAY`, or `forced`, before both.

Attention on CUDA is a `pipeline` of kernels, one for each shard as it comes, or one kernel that
polls for their `arrival`. Nothing predicts the speed of that kernel: it is taken where `symm-cp
tune` found it to be faster, and where `SYMM_CP_ATTENTION`, or `forced`, says so. Ranks that share a
GPU take it only when forced: it keeps multiprocessors from the rank that it waits for.

All ranks of a group take one way: they go by the files that the group's first rank has read.
"""

from __future__ import annotations

import json
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import torch

from symm_cp import env, trusted
from symm_cp.memory import Group, on_first_use
from symm_cp.schedule import builders, staged
from symm_cp.schedule.machine import MACHINES, TYPICAL_CPU, Machine, from_toml
from symm_cp.schedule.steps import Schedule
from symm_cp.schedule.work import Work

WAYS = ("shards", "whole")
ATTENTION_WAYS = ("pipeline", "arrival")
_MAX_CHOICES = 4096

#: A matmul as (rows of the result, inner dimension, columns of the result).
Product: TypeAlias = "tuple[int, int, int]"


@dataclass(frozen=True)
class Choice:
    """A way, why it was taken (forced, measured, simulated), and predicted seconds by way."""

    way: str
    source: str
    predicted: Mapping[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        times = ", ".join(
            f"{way} {seconds * 1e3:.3g} ms" for way, seconds in self.predicted.items()
        )
        return f"{self.way} ({self.source}{f'; simulated: {times}' if times else ''})"


@dataclass(frozen=True)
class Question:
    """What an op has to do: `products` for one rank's shard, on `dtype`.

    A rank gives `shard` bytes to each peer to be read, or makes partial sums of `partial` bytes;
    `accumulated` are bytes of results that each shard's product is added to.
    """

    op: str
    dtype: torch.dtype
    products: tuple[Product, ...]
    shard: int = 0
    partial: int = 0
    accumulated: int = 0

    @property
    def key(self) -> str:
        """Names the question in the file of what was measured."""
        shapes = ",".join("x".join(map(str, product)) for product in self.products)
        return f"{self.op} {str(self.dtype)[6:]} {shapes}"

    def seconds(self, machine: Machine, ranks: int, *, device: str = "cpu") -> dict[str, float]:
        """Returns what each way should take."""
        one, all_at_once = (self._kernels(machine, times) for times in (1, ranks))
        gather, scatter = _BUILDERS[device]
        if self.partial:
            copy = machine.copy(self.partial)
            by_shards = Work(self.op, scatter, lambda _: one, partial=self.partial)
            whole = Work(self.op, scatter, lambda _: copy, partial=self.partial)
        else:
            by_shards = Work(self.op, gather, lambda _: one, shard=self.shard)
            options = {"gather": True} if device == "cpu" else {"keep": True}
            whole = Work(
                self.op, gather, _nothing, self.shard, fresh=ranks * self.shard, options=options
            )
        return {
            "shards": by_shards.predict(machine, ranks).total,
            "whole": whole.predict(machine, ranks).total + all_at_once,
        }

    def _kernels(self, machine: Machine, shards: int) -> float:
        dtype, item = str(self.dtype)[6:], self.dtype.itemsize
        total = 0.0
        for rows, inner, columns in self.products:
            # The dimension that grows with the shards: rows, or what is summed over.
            weight = inner * columns * item * (shards if self.accumulated else 1)
            total += machine.matmul(2.0 * shards * rows * inner * columns, dtype, weight)
        if self.accumulated and shards == 1:
            # The result is read again to be added to. In 16 bits, moreover, every product is
            # rounded aside, then added to a float32 sum, in all five times the bytes of the
            # result (a copy has two), and the sum's memory is new in each call.
            total += machine.copy(self.accumulated * (2.5 if item == 2 else 0.5))
            total += machine.fresh(self.accumulated) if item == 2 else 0.0
        return total


_BUILDERS: dict[str, tuple[Callable[..., Schedule], Callable[..., Schedule]]] = {
    "cpu": (builders.all_gather_and_consume, builders.produce_and_reduce_scatter),
    "cuda": (staged.gather_and_consume, staged.produce_and_scatter),
}


def _nothing(machine: Machine) -> float:
    return 0.0


class _Facts:
    """What the ranks of a group go by."""

    def __init__(self, reading: int, machine: str, tuned: str) -> None:
        self.reading = reading
        self.machine = from_toml(machine, "the calibrated machine") if machine else TYPICAL_CPU
        self.tuned = parse_tuned(tuned, "what symm-cp tune has written")
        self.choices: dict[Question, Choice] = {}
        #: Whether each rank has a GPU of its own; None: not looked at yet.
        self.apart: bool | None = None


# By the ways that there are.
_forced: dict[tuple[str, ...], str] = {}
_listening: dict[str, Choice] | None = None


@contextmanager
def forced(way: str | None) -> Iterator[None]:
    """Takes one way in all ops inside that have it, on all ranks alike; None: as usual.

    Raises `ValueError` for a way that there is none of.
    """
    global _forced
    kinds = [ways for ways in (WAYS, ATTENTION_WAYS) if way in ways]
    if way is not None and not kinds:
        raise ValueError(f"forced: {way=} must be one of {WAYS + ATTENTION_WAYS}")
    before = _forced
    _forced = {} if way is None else {**_forced, kinds[0]: way}
    try:
        yield
    finally:
        _forced = before


def machine_path(ranks: int) -> Path:
    """Returns where the description of this machine is kept, for so many ranks."""
    return env.build_dir() / f"machine_{ranks}.toml"


def tuned_path(ranks: int) -> Path:
    """Returns where `symm-cp tune` keeps what it has measured, for so many ranks."""
    return env.build_dir() / f"tuned_{ranks}.json"


def parse_tuned(text: str, name: str) -> dict[str, str]:
    """Returns the ways by what ops have to do, from a file of that name; raises `ValueError`."""
    try:
        found = json.loads(text or "{}")
    except ValueError as error:
        raise ValueError(f"{name}: {error}: delete it, or run symm-cp tune again") from error
    if not isinstance(found, dict):
        raise ValueError(f"{name}: it must be a JSON object: delete it, or run symm-cp tune again")
    return found


def _read(path: Callable[[int], Path], ranks: int) -> tuple[str, str]:
    """Returns what is in a file, or why it is not read; nothing of either where there is none."""
    try:
        return trusted.read(path(ranks)).decode(), ""
    except (FileNotFoundError, NotADirectoryError, env.NoHomeError):
        return "", ""
    except (OSError, UnicodeDecodeError) as error:
        return "", f"symm_cp: not used: {error}"


def _facts(group: Group) -> _Facts:
    """Collective at the first call for a group."""
    known = group.tuning
    if isinstance(known, _Facts):
        return known
    reading = known or 0
    texts = json.loads(group.read(group.store(), [_key(reading)])[0])
    facts = group.tuning = _Facts(reading, *texts)
    for reason in _left_out.pop(group, []):
        warnings.warn(reason, stacklevel=2)  # last: it may be an error, on this rank alone
    return facts


# Why rank 0 left files out, until it has said so.
_left_out: weakref.WeakKeyDictionary[Group, list[str]] = weakref.WeakKeyDictionary()


def _key(reading: int) -> str:
    return f"symm_cp/tuning/{reading}"


def _publish(group: Group) -> None:
    """Rank 0 says what the ranks choose by. Not collective."""
    if group.rank != 0:
        return
    found = [_read(path, group.world_size) for path in (machine_path, tuned_path)]
    group.store().set(_key(group.tuning or 0), json.dumps([text for text, _ in found]))
    _left_out[group] = [reason for _, reason in found if reason]


on_first_use.append(_publish)


def _of_device(device: torch.device, measured: Machine) -> Machine:
    if device.type == "cpu":
        return measured
    name = torch.cuda.get_device_name(device).lower()
    return next((m for known, m in MACHINES.items() if known in name), MACHINES["h100"])


def choose(group: Group, device: torch.device, question: Question) -> str:
    """Returns the way to take, "shards" or "whole". Collective at the first call for a group."""
    if group.world_size == 1:
        return "shards"
    way = _forced.get(WAYS) or env.way()
    choice = Choice(way, "forced") if way is not None else _known(group, device, question)
    if _listening is not None:
        _listening[_on(device, question.key)] = choice
    return choice.way


def choose_attention(group: Group, device: torch.device, key: str) -> str:
    """Returns "pipeline" or "arrival" for attention on a GPU; `key` names what is to be done.

    Collective at the first call for a group.
    """
    way = _forced.get(ATTENTION_WAYS) or env.attention()
    choice = Choice(way, "forced") if way is not None else _measured_attention(group, device, key)
    if _listening is not None:
        _listening[_on(device, key)] = choice
    return choice.way


def _measured_attention(group: Group, device: torch.device, key: str) -> Choice:
    facts = _facts(group)
    found = facts.tuned.get(_on(device, key))
    if found not in ATTENTION_WAYS:
        return Choice(ATTENTION_WAYS[0], "not measured")
    if found == "arrival" and not _apart(group, device, facts):
        return Choice(ATTENTION_WAYS[0], "ranks share a GPU")
    return Choice(found, "measured")


def _apart(group: Group, device: torch.device, facts: _Facts) -> bool:
    """Whether each rank of a group has a GPU of its own. Collective at the first call."""
    if facts.apart is None:
        own = str(torch.cuda.get_device_properties(device).uuid)
        facts.apart = len(set(group.share(f"gpu/{facts.reading}", own))) == group.world_size
    return facts.apart


def _on(device: torch.device, key: str) -> str:
    """What a question is called in the file of what was measured."""
    return key if device.type == "cpu" else f"{torch.cuda.get_device_name(device)}: {key}"


@contextmanager
def listening() -> Iterator[dict[str, Choice]]:
    """Gives what is chosen inside, by what the ops had to do; on all threads of this process."""
    global _listening
    before, _listening = _listening, {}
    try:
        yield _listening
    finally:
        _listening = before


def _known(group: Group, device: torch.device, question: Question) -> Choice:
    facts = _facts(group)
    known = facts.choices.get(question)
    if known is None:
        if len(facts.choices) >= _MAX_CHOICES:
            facts.choices.clear()
        known = facts.choices[question] = _choice(group, device, question, facts)
    return known


def _choice(group: Group, device: torch.device, question: Question, facts: _Facts) -> Choice:
    predicted = question.seconds(
        _of_device(device, facts.machine), group.world_size, device=device.type
    )
    measured = facts.tuned.get(_on(device, question.key))
    if measured in WAYS:
        return Choice(measured, "measured", predicted)
    return Choice(min(predicted, key=predicted.__getitem__), "simulated", predicted)


def relearn(group: Group) -> None:
    """Lets the group read the files again at its next op. Call it on all ranks alike."""
    known = group.tuning
    reading = known.reading if isinstance(known, _Facts) else known or 0
    # Under another key, even if nobody has read the last one: a peer could still read it now.
    group.tuning = reading + 1
    _publish(group)
