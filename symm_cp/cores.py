"""The cores that each rank of a host gets (`symm-cp run --numa`), as Linux's sysfs describes them.

Python runs this before the program that it starts: neither torch nor symm_cp is imported.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

T = TypeVar("T")
UNITS = ("node", "socket")
#: Read by started ranks: "node" or "socket", plus ":threads" if ranks set their thread counts.
VARIABLE = "SYMM_CP_NUMA"
SYSTEM = Path("/sys/devices/system")


class Share(NamedTuple):
    """A rank's share: whole cores, each of which may be several CPUs (hyper-threads)."""

    places: tuple[str, ...]
    cpus: frozenset[int]
    threads: int

    def __str__(self) -> str:
        return f"{', '.join(self.places)}: CPUs {ranges(self.cpus)}"


def numbers(text: str) -> frozenset[int]:
    """Returns the numbers in a list of ranges such as "0-3,8"."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


def ranges(cpus: Iterable[int]) -> str:
    """The inverse of `numbers`."""
    parts: list[list[int]] = []
    for cpu in sorted(cpus):
        if parts and cpu == parts[-1][1] + 1:
            parts[-1][1] = cpu
        else:
            parts.append([cpu, cpu])
    return ",".join(f"{a}-{b}" if b > a else str(a) for a, b in parts)


def _read(path: Path, default: str) -> str:
    try:
        return path.read_text()
    except OSError:
        return default


def units(unit: str, allowed: Collection[int], system: Path = SYSTEM) -> dict[int, frozenset[int]]:
    """Returns the allowed CPUs of each node or socket that has any; without sysfs, one unit."""
    found: dict[int, frozenset[int]] = {}
    if unit == "node":
        for folder in system.glob("node/node[0-9]*"):
            cpus = numbers(_read(folder / "cpulist", ""))
            found[int(folder.name.removeprefix("node"))] = cpus & frozenset(allowed)
    else:
        for cpu in allowed:
            package = _read(system / f"cpu/cpu{cpu}/topology/physical_package_id", "0")
            number = max(0, int(package))  # -1: not known
            found[number] = found.get(number, frozenset()) | {cpu}
    found = {number: cpus for number, cpus in sorted(found.items()) if cpus}
    return found or {0: frozenset(allowed)}


def cores(cpus: Collection[int], system: Path = SYSTEM) -> list[frozenset[int]]:
    """Returns the CPUs of each core."""
    found: dict[frozenset[int], None] = {}
    for cpu in sorted(cpus):
        siblings = _read(system / f"cpu/cpu{cpu}/topology/thread_siblings_list", str(cpu))
        found[numbers(siblings) & frozenset(cpus)] = None
    return list(found)


def shares(unit: str, ranks: int, allowed: Collection[int], system: Path = SYSTEM) -> list[Share]:
    """Returns each rank's share of the CPUs that this process may use.

    Ranks are divided among the nodes (or sockets) in turn, and the ranks of a node share its cores
    equally; with fewer ranks than nodes, each rank gets several nodes. Raises `ValueError` for more
    ranks than cores.
    """
    of_unit = units(unit, allowed, system)
    owned = [tuple(_own(list(of_unit), rank, ranks)) for rank in range(ranks)]
    cpus_of = {mine: frozenset[int]().union(*(of_unit[n] for n in mine)) for mine in owned}
    cores_of = {mine: cores(cpus, system) for mine, cpus in cpus_of.items()}
    found = []
    for rank, mine in enumerate(owned):
        first, sharing = owned.index(mine), owned.count(mine)
        if len(cores_of[mine]) < sharing:
            raise ValueError(
                f"{unit} {mine[0]} has fewer cores that this process may use (CPUs "
                f"{ranges(cpus_of[mine])}) than ranks ({sharing}): start fewer, or leave them "
                "unbound"
            )
        own = _own(cores_of[mine], rank - first, sharing)
        places = tuple(f"{unit} {number}" for number in mine)
        found.append(Share(places, frozenset[int]().union(*own), len(own)))
    return found


def _own(items: Sequence[T], rank: int, ranks: int) -> list[T]:
    """Returns a rank's items; if there are fewer items than ranks, the one item that it shares."""
    if ranks > len(items):
        return [items[rank * len(items) // ranks]]
    return [*items][rank * len(items) // ranks : (rank + 1) * len(items) // ranks]


def bind(environment: Mapping[str, str] = os.environ) -> Share | None:
    """Binds this process if it is a rank to be bound; returns its share, else None.

    Child processes inherit the binding, so it happens once. Raises `ValueError` as `shares` does.
    """
    unit, _, threads = environment.get(VARIABLE, "").partition(":")
    if not unit or "LOCAL_RANK" not in environment or "LOCAL_WORLD_SIZE" not in environment:
        return None
    rank, ranks = int(environment["LOCAL_RANK"]), int(environment["LOCAL_WORLD_SIZE"])
    share = shares(unit, ranks, os.sched_getaffinity(0))[rank]
    os.sched_setaffinity(0, share.cpus)
    os.environ.pop(VARIABLE)
    if threads:
        os.environ["OMP_NUM_THREADS"] = str(share.threads)
    return share
