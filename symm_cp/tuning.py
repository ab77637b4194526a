"""Chooses the strategy of an op ("way" in names and settings) if it has several.

A fused matmul runs shard by shard (`shards`) or as one matmul (`whole`).

`shards` multiplies each rank's shard when it arrives: communication hides behind the matmuls, but
each of the W matmuls reads the weight again. `whole` gathers first (matmul-reduce-scatter: scatters
last) and multiplies once, which is better for few rows and a large weight. The choice comes from,
in this order: `SYMM_CP_WAY` or `forced`; measurements of `symm-cp tune`; a simulation of the
machine that `symm-cp calibrate` has described, or of a typical one.

If each rank has its own GPU, all-gather-matmul and matmul-reduce-scatter may also run as one kernel
(`tiles`), which waits for shards, or signals parts, by tiles. The simulator does not predict it: it
runs only where it was measured to be the fastest, or is forced; for calls that it does not support
the choice ignores it.

Attention on CUDA runs as a `pipeline` of kernels, one for each shard when it arrives; or a kernel
attends to this rank's keys while the peers' keys are gathered, and then to these `together`.
`symm-cp tune` measures both; without it the simulation chooses.

Attention with method "auto" runs by keys (`allgather`) or by heads (`ulysses`), whichever is faster
in the simulation, separately for each pass; see schedule/attention_work.py.

All ranks of a group choose identically, from the files that the group's first rank has read.
"""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch

from symm_cp import accelerators, env, native, trusted
from symm_cp.group.hosts import hosts_of
from symm_cp.group.liveness import read, share
from symm_cp.group.memory import Group, StateKey, on_first_use
from symm_cp.measured import machine_key
from symm_cp.schedule.attention_work import AttentionWork
from symm_cp.schedule.machine import MACHINES, TYPICAL_CPU, Machine, from_toml
from symm_cp.schedule.matmul_work import MatmulWork

WAYS = ("shards", "whole")
#: The way of fused matmuls that only GPUs have.
TILES = "tiles"
ATTENTION_WAYS = ("pipeline", "together")
# Cached choices of a group; beyond it, all are dropped and simulated again. Without a bound,
# programs with ever new shapes would leak memory.
_MAX_CHOICES = 4096


@dataclass(frozen=True)
class Choice:
    """The chosen way, its source (forced, measured, simulated, small), and the predicted seconds.

    A device that the simulator does not know is simulated as an H100, and the source says so.
    """

    way: str
    source: str
    predicted: Mapping[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        times = ", ".join(
            f"{way} {seconds * 1e3:.3g} ms" for way, seconds in self.predicted.items()
        )
        return f"{self.way} ({self.source}{f'; simulated: {times}' if times else ''})"


#: The choice of work that runs in one native call, which calls nothing here.
IN_ONE_CALL = Choice("whole", "one native call")


def calibrated(text: str) -> Machine:
    """Returns the machine that the text of a `machine_path` file describes, or a typical one."""
    return from_toml(text, "the calibrated machine") if text else TYPICAL_CPU


class Facts:
    """The facts by which the ranks of a group choose."""

    def __init__(self, reading: int, machine: str, tuned: str) -> None:
        self.reading = reading
        self.machine = calibrated(machine)
        self.tuned = parse_tuned(tuned, "the file of symm-cp tune")
        self.choices: dict[Hashable, Choice] = {}
        #: Whether each rank has its own GPU; None: not known yet.
        self.apart: bool | None = None

    def choice(self, key: Hashable, choose: Callable[[], Choice]) -> Choice:
        """Returns the choice for a key; calls `choose` the first time."""
        known = self.choices.get(key)
        if known is None:
            if len(self.choices) >= _MAX_CHOICES:
                self.choices.clear()
            known = self.choices[key] = choose()
        return known


# The forced way, by the ways to choose from.
_forced: dict[tuple[str, ...], str] = {}
_listening: dict[str, Choice] | None = None


@contextlib.contextmanager
def forced(way: str | None) -> Iterator[None]:
    """Forces a way for all ops in the `with` block that have it; None forces no way.

    Use it on all ranks. Raises `ValueError` for an unknown way.
    """
    named = {name: ways for ways in (WAYS, ATTENTION_WAYS) for name in ways} | {TILES: WAYS}
    if way is not None and way not in named:
        raise ValueError(f"forced: unknown {way=}; must be one of {tuple(named)}")
    before = _forced
    _force({} if way is None else {**_forced, named[way]: way})
    try:
        yield
    finally:
        _force(before)


def _force(ways: dict[tuple[str, ...], str]) -> None:
    global _forced
    _forced = ways
    native.drop_plans()
    with contextlib.suppress(native.BuildError):  # then there is no native kernel either
        # Unless disabled, the native kernels take small work before this module chooses a way.
        library = native.load()
        library.symm_cp_serve_few_rows(WAYS not in ways)
        library.symm_cp_serve_few_tokens(ATTENTION_WAYS not in ways)


def forced_ways() -> dict[tuple[str, ...], str]:
    """Returns the forced ways, by the ways to choose from."""
    return dict(_forced)


def machine_path(ranks: int) -> Path:
    """Returns the path of this machine's description, for a number of ranks."""
    return env.build_dir() / f"machine_{ranks}_{machine_key()}.toml"


def tuned_path(ranks: int) -> Path:
    """Returns the path of this machine's `symm-cp tune` measurements, for a number of ranks."""
    return env.build_dir() / f"tuned_{ranks}_{machine_key()}.json"


def _unkeyed(path: Path, ranks: int) -> Path:
    """Returns the file's former path, whose name did not yet include the machine."""
    return path.with_name(f"{path.name.partition('_')[0]}_{ranks}{path.suffix}")


def parse_tuned(text: str, name: str) -> dict[str, str]:
    """Returns the fastest way by `MatmulWork.key`, from the text of file `name`.

    Raises `ValueError` for a damaged file.
    """
    try:
        ways = json.loads(text or "{}")
    except ValueError as error:
        raise ValueError(f"{name}: {error}: delete it, or run symm-cp tune again") from error
    if not isinstance(ways, dict):
        raise ValueError(f"{name}: it must be a JSON object: delete it, or run symm-cp tune again")
    return ways


def read_file(path: Callable[[int], Path], ranks: int) -> tuple[str, str]:
    """Returns the text of a file, and why it is not used; both are empty if there is no file."""
    try:
        return trusted.read(path(ranks)).decode(), ""
    except env.NoHomeError:
        return "", ""
    except (FileNotFoundError, NotADirectoryError):
        older = _unkeyed(path(ranks), ranks)
        if not older.is_file():
            return "", ""
        return "", (
            f"symm_cp: not used: {older} does not say for which machine it is (an older format): "
            "delete it, and measure again (symm-cp calibrate, symm-cp tune)"
        )
    except (OSError, UnicodeDecodeError) as error:
        return "", f"symm_cp: not used: {error}"


@dataclass
class _Tuning:
    """A rank's view of the files that its group chooses by."""

    #: How often the files were read again.
    reading: int = 0
    facts: Facts | None = None
    #: Why rank 0 does not use files, until it has warned.
    unused: list[str] = field(default_factory=list)


_TUNING = StateKey[_Tuning]("tuning")


def facts_read(group: Group) -> bool:
    """Whether this rank has read the facts by which its group chooses."""
    return group.state(_TUNING, _Tuning).facts is not None


def facts_of(group: Group) -> Facts:
    """Returns the facts by which a group's ranks choose. Collective at the first call for a group.

    Rank 0 warns about files that it does not use.
    """
    tuning = group.state(_TUNING, _Tuning)
    if tuning.facts is None:
        texts = json.loads(read(group, group.store(), [_key(tuning.reading)])[0])
        tuning.facts = Facts(tuning.reading, *texts)
        reasons, tuning.unused = tuning.unused, []
        for reason in reasons:
            # Comes last, since warnings may be errors, on this rank alone.
            warnings.warn(reason, stacklevel=2)
    return tuning.facts


def _key(reading: int) -> str:
    return f"symm_cp/tuning/{reading}"


def _publish(group: Group) -> None:
    """Rank 0 writes the files that the ranks choose by to the store. Not collective."""
    if group.rank != 0:
        return
    tuning = group.state(_TUNING, _Tuning)
    files = [read_file(path, group.world_size) for path in (machine_path, tuned_path)]
    group.store().set(_key(tuning.reading), json.dumps([text for text, _ in files]))
    tuning.unused = [reason for _, reason in files if reason]


on_first_use.append(_publish)


def _machine_of(device: torch.device, measured: Machine) -> tuple[Machine, str]:
    """Returns the machine to simulate, and the source to record for choices by its simulation."""
    if device.type == "cpu":
        return measured, "simulated"
    name = accelerators.name_of(device).lower()
    for known, machine in MACHINES.items():
        if known in name:
            return machine, "simulated"
    return MACHINES["h100"], "simulated as an H100"


def choose(group: Group, device: torch.device, work: MatmulWork, *, tiles: bool = False) -> str:
    """Returns "shards" or "whole"; or "tiles", if `tiles` says that it supports the call.

    All ranks pass the same `tiles`. Collective at the first call for a group, and at the first call
    with `tiles`.
    """
    if group.world_size == 1:
        return "shards"
    way = _forced.get(WAYS) or env.way()
    if way in WAYS or (way == TILES and tiles):
        choice = Choice(way, "forced")
    else:
        facts = facts_of(group)
        # Ranks may choose for different work, so all of them compare GPUs at their first call.
        shared = tiles and TILES in facts.tuned.values() and not _apart(group, device, facts)
        choice = facts.choice(
            (work, tiles), lambda: _choice(group, device, work, facts, tiles, shared)
        )
    if _listening is not None:
        _listening[_on(device, work.key)] = choice
    return choice.way


def choose_attention(
    group: Group,
    device: torch.device,
    key: str,
    ways: tuple[str, ...] = ATTENTION_WAYS,
    work: AttentionWork | None = None,
) -> str:
    """Returns one of `ways`, which support a call of attention on a GPU; `key` names the work.

    Without `work` nothing is simulated. If a forced way is not in `ways`, the first of these is
    returned. Captured calls choose like others: these warm a graph up and make its workspace.
    Collective at the first call for a group.
    """
    way = _forced.get(ATTENTION_WAYS) or env.attention()
    if way is not None:
        served, source = (way, "forced") if way in ways else (ways[0], f"{way} cannot serve it")
        choice = Choice(served, source)
    else:
        choice = _attention_choice(group, device, key, ways, work)
    if _listening is not None:
        _listening[_on(device, key)] = choice
    return choice.way


def choose_method(
    group: Group, device: torch.device, work: AttentionWork
) -> Literal["allgather", "ulysses"]:
    """Returns "allgather" or "ulysses" for attention; "allgather" if both are predicted equal.

    Collective at the first call for a group.
    """
    if group.world_size == 1:
        return "allgather"
    facts = facts_of(group)

    def simulated() -> Choice:
        spread = hosts_of(group, device)
        machine, source = _machine_of(device, facts.machine)
        hosts = 1 if spread is None else len(spread.ranks)
        return _fastest(work.seconds(machine, device=device.type, hosts=hosts), source)

    choice = facts.choice(work, simulated)
    if _listening is not None:
        _listening[_on(device, work.key)] = choice
    return "ulysses" if choice.way == "ulysses" else "allgather"


def _attention_choice(
    group: Group,
    device: torch.device,
    key: str,
    ways: tuple[str, ...],
    work: AttentionWork | None,
) -> Choice:
    facts = facts_of(group)
    way = facts.tuned.get(_on(device, key))
    if way in ways:
        return Choice(way, "measured")
    if work is None:
        return Choice(ways[0], "not measured")

    def simulated() -> Choice:
        machine, source = _machine_of(device, facts.machine)
        return _fastest(work.seconds_on_streams(machine), source)

    return facts.choice(("streams", work), simulated)


def _apart(group: Group, device: torch.device, facts: Facts) -> bool:
    """Whether each rank of a group has its own GPU. Collective at the first call."""
    if facts.apart is None:
        own = accelerators.uuid_of(device)
        facts.apart = len(set(share(group, f"gpu/{facts.reading}", own))) == group.world_size
    return facts.apart


def _on(device: torch.device, key: str) -> str:
    """Returns the key of work on a device in the file of measurements."""
    return key if device.type == "cpu" else f"{accelerators.name_of(device)}: {key}"


@contextlib.contextmanager
def listening() -> Iterator[dict[str, Choice]]:
    """Yields the choices made in the `with` block, by `MatmulWork.key`, in all threads.

    Products small enough for one native call are listed by the name of that call.
    """
    before, choices = _listening, dict[str, Choice]()
    _listen(choices)
    try:
        yield choices
    finally:
        _listen(before)


def _listen(choices: dict[str, Choice] | None) -> None:
    global _listening
    _listening = choices
    native.drop_plans()
    with contextlib.suppress(native.BuildError):  # then there is no native kernel either
        native.load().symm_cp_on_small_matmul(native.NoteCall() if choices is None else _note)


@native.NoteCall
def _note(call_name: bytes) -> None:
    if _listening is not None:
        _listening[call_name.decode()] = IN_ONE_CALL


def _choice(
    group: Group,
    device: torch.device,
    work: MatmulWork,
    facts: Facts,
    tiles: bool,
    shared: bool,
) -> Choice:
    machine, simulated = _machine_of(device, facts.machine)
    predicted = work.seconds(machine, group.world_size, device=device.type)
    measured = facts.tuned.get(_on(device, work.key))
    if measured in WAYS:
        return Choice(measured, "measured", predicted)
    if measured == TILES and tiles and not shared:
        return Choice(measured, "measured", predicted)
    if tiles:
        simulated += f"; tiles: {'ranks share a GPU' if shared else 'not measured'}"
    return _fastest(predicted, simulated)


def _fastest(predicted: Mapping[str, float], source: str) -> Choice:
    return Choice(min(predicted, key=predicted.__getitem__), source, predicted)


def relearn(group: Group) -> None:
    """Makes the group read the files again at its next op. Call it on all ranks."""
    tuning = group.state(_TUNING, _Tuning)
    # A new key even if this rank has not read the last key: a peer may still read that.
    tuning.reading, tuning.facts = tuning.reading + 1, None
    native.drop_plans()
    _publish(group)
