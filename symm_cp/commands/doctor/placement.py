"""Reports where the symmetric memory of running ranks lies, by NUMA node and page size.

The data is read from numa_maps and smaps in /proc/PID of this user's processes. The name of a
rank's memory contains its process id (`owned_label` in csrc/memory/segment.h), so memory that peers
also map is counted once.
"""

from __future__ import annotations

import mmap
import os
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from symm_cp import cores
from symm_cp.commands.doctor.findings import Finding

_PROCESSES = Path("/proc")
_BEGIN = re.compile(r"[0-9a-f]+-[0-9a-f]+ ")
_LABEL = re.compile(r"/memfd:symm_cp:(\d+):(.*)")
_ON_NODE = re.compile(r" N(\d+)=(\d+)")
_PAGE = re.compile(r" kernelpagesize_kB=(\d+)")
_OCTAL = re.compile(r"\\(\d{3})")


@dataclass
class Owned:
    """Symmetric memory that a process owns: bytes on each node, and bytes in huge pages."""

    nodes: Counter[int] = field(default_factory=Counter)
    huge: int = 0


def owned(process: int, numa_maps: str, smaps: str) -> dict[str, Owned]:
    """Returns the memory that a process owns, by the name that the process gave it."""
    found: dict[str, Owned] = {}
    for line in numa_maps.splitlines():
        # Spaces in a name are escaped.
        label = next(filter(None, map(_LABEL.search, line.split())), None)
        page = _PAGE.search(line)
        if label is None or page is None or int(label[1]) != process:
            continue
        each = found.setdefault(_name(label[2]), Owned())
        size = int(page[1]) << 10
        for node, pages in _ON_NODE.findall(line):
            each.nodes[int(node)] += int(pages) * size
            each.huge += int(pages) * size if size > mmap.PAGESIZE else 0
    label = None
    for line in smaps.splitlines():
        if _BEGIN.match(line):
            label = _LABEL.search(line)
        elif label is not None and int(label[1]) == process and line.startswith("ShmemPmdMapped:"):
            found.setdefault(_name(label[2]), Owned()).huge += int(line.split()[1]) << 10
    return found


def _name(text: str) -> str:
    plain = _OCTAL.sub(lambda code: chr(int(code[1], 8)), text)
    return plain.strip().removesuffix(" (deleted)")


def _of_processes(processes: Path) -> Iterator[tuple[int, str, Owned]]:
    for folder in processes.glob("[0-9]*"):
        with suppress(OSError):  # another user's, or ended by now
            if folder.stat().st_uid != os.getuid():
                continue
            # The other files are slow: the kernel counts all pages that a process has mapped.
            if "/memfd:symm_cp:" not in (folder / "maps").read_text():
                continue
            texts = ((folder / name).read_text() for name in ("numa_maps", "smaps"))
            process = int(folder.name)
            yield from ((process, *each) for each in owned(process, *texts).items())


def _mib(nbytes: int) -> str:
    return f"{nbytes / (1 << 20):.1f} MiB"


def _nodes_of(process: int, system: Path) -> set[int]:
    """Returns the nodes whose CPUs a process may use; none if it has ended."""
    with suppress(OSError):
        return set(cores.units("node", os.sched_getaffinity(process), system))
    return set()


def memory_of_ranks(processes: Path = _PROCESSES, system: Path = cores.SYSTEM) -> list[Finding]:
    """Reports for each running rank how much of its memory lies on which node, in which pages."""
    findings = []
    for process, name, memory in sorted(_of_processes(processes), key=lambda each: each[:2]):
        detail = ", ".join(f"{_mib(size)} on node {n}" for n, size in sorted(memory.nodes.items()))
        if memory.huge:
            detail += f", {_mib(memory.huge)} of it in huge pages"
        near = _nodes_of(process, system)
        far = bool(near and set(memory.nodes) - near)
        advice = "its CPUs are of other nodes: start ranks with symm-cp run --numa node"
        findings.append(
            Finding(
                "memory of running ranks",
                f"process {process}, {name}",
                "missing" if far else "info",
                detail,
                advice if far else "",
            )
        )
    return findings
