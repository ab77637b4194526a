"""`symm-cp doctor`: reports what works on this machine, and how to make the rest work."""

from __future__ import annotations

import argparse
import itertools
import os
import platform
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

from symm_cp import __version__, cores, cuda, env, native
from symm_cp.commands.doctor import accelerated
from symm_cp.commands.doctor.findings import Finding
from symm_cp.commands.doctor.placement import memory_of_ranks
from symm_cp.parsing import STDOUT, write_json
from symm_cp.tensors.results import result_memory

_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
# The setting for shared memory, which the one above does not cover.
_HUGE_SHARED_PAGES = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
_KEYS = (
    "CPU", *(kind.dispatch_key for kind in cuda.known()), "Meta", "Autograd",
    "CompositeExplicitAutograd",
)  # fmt: skip


def _versions() -> list[Finding]:
    rows = {
        "symm_cp": __version__,
        "torch": torch.__version__,
        "Python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} on {platform.machine()}",
    }
    return [Finding("versions", name, "info", detail) for name, detail in rows.items()]


def _compiler() -> Finding:
    try:
        return Finding("native part", "compiler", "ok", native.find_compiler())
    except native.BuildError as error:
        return Finding("native part", "compiler", "missing", "none found", str(error))


def _library() -> Finding:
    try:
        native.load()
    except native.BuildError as error:
        return Finding("native part", "library", "missing", "not built", str(error))
    return Finding("native part", "library", "ok", str(native.library_path()))


def _round_trip() -> None:
    """Runs an all-reduce over symmetric memory on CPU, in a group of this process alone."""
    initialize = not dist.is_initialized()
    with tempfile.TemporaryDirectory() as folder:
        if initialize:
            dist.init_process_group(
                "gloo", init_method=f"file://{folder}/store", rank=0, world_size=1
            )
        try:
            group = dist.new_group([dist.get_rank()], use_local_synchronization=True)
            tensor = symm_mem.empty(16, device="cpu").fill_(1.0)
            symm_mem.rendezvous(tensor, group).barrier()
            name = group.group_name
            total = torch.ops.symm_mem.one_shot_all_reduce(tensor, "sum", name)
            if not torch.equal(total, torch.ones(16)):
                raise RuntimeError(f"an all-reduce over one rank gave {total.tolist()}")
        finally:
            if initialize:
                dist.destroy_process_group()


def _cpu() -> Finding:
    if not (dist.is_available() and dist.is_gloo_available()):
        advice = "install a build of torch with torch.distributed and gloo"
        return Finding("backends", "CPU", "missing", "torch has no gloo", advice)
    try:
        _round_trip()
    except RuntimeError as error:
        advice = "run symm-cp build, then symm-cp doctor again; report the error if it persists"
        return Finding("backends", "CPU", "missing", str(error).splitlines()[0], advice)
    detail = "symmetric memory in anonymous shared memory; to test all ops: symm-cp selftest"
    return Finding("backends", "CPU", "ok", detail)


def _results() -> list[Finding]:
    """Reports the memory of large results (`symm_cp.empty_cache`) in this process."""
    with suppress(native.BuildError):
        in_use, kept, limit = (nbytes / (1 << 20) for nbytes in result_memory())
        bound = f"keeps up to {limit:.0f} MiB in a process"
        if limit == 0:
            bound = "keeps none, by SYMM_CP_KEEP_MIB"
        detail = f"{bound}; here {in_use:.0f} MiB in use, {kept:.0f} MiB kept"
        return [Finding("memory of results", "freed blocks", "ok", detail), huge_pages()]
    return []


def _chosen(setting: Path) -> str | None:
    """Returns the bracketed word, the kernel's mark of the chosen value; None if unreadable."""
    try:
        text = setting.read_text()
        return text[text.index("[") + 1 : text.index("]")]
    except (OSError, ValueError):
        return None


def huge_pages(setting: Path = _HUGE_PAGES) -> Finding:
    """Checks whether the system gives huge pages to memory that asks for them."""
    section, name, chosen = "memory of results", "huge pages", _chosen(setting)
    if chosen is None:
        return Finding(section, name, "info", f"not known: {setting} cannot be read")
    if chosen == "never":
        advice = f"as root: echo madvise > {setting}; the first use of memory is then faster"
        return Finding(section, name, "missing", "transparent huge pages are off", advice)
    return Finding(section, name, "ok", f"transparent huge pages: {chosen}")


def huge_shared_pages(setting: Path = _HUGE_SHARED_PAGES) -> Finding:
    """Checks whether the system gives huge pages to shared memory, which symmetric memory uses."""
    section, name, chosen = "symmetric memory", "huge pages", _chosen(setting)
    if chosen is None:
        return Finding(section, name, "info", f"not known: {setting} cannot be read")
    if chosen in ("never", "deny"):
        detail = f"pages of 4 KiB, as on most systems; as root: echo advise > {setting}"
        return Finding(section, name, "info", detail)
    return Finding(section, name, "ok", f"transparent huge pages: {chosen}")


def reserved_pages(meminfo: Path = Path("/proc/meminfo")) -> list[Finding]:
    """Reports how many huge pages are reserved, and whether symmetric memory uses them."""
    with suppress(OSError):
        fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        total, free = (int(fields.get(f"HugePages_{what}", "0")) for what in ("Total", "Free"))
        if total:
            taken = "are left to others: SYMM_CP_HUGE_PAGES=1 takes them"
            if env.huge_pages():
                taken = "are taken, where enough are free"
            detail = (
                f"{free} of {total} (of {fields['Hugepagesize'].strip()}) are free; they {taken}"
            )
            return [Finding("symmetric memory", "reserved huge pages", "info", detail)]
    return []


def numa(system: Path = cores.SYSTEM) -> Finding:
    """Reports which cores of which nodes and sockets this process may use."""
    allowed = os.sched_getaffinity(0)
    nodes, sockets = (cores.units(unit, allowed, system) for unit in cores.UNITS)
    each = "; ".join(f"node {node}: CPUs {cores.ranges(cpus)}" for node, cpus in nodes.items())
    count = len(cores.cores(allowed, system))
    detail = f"cores that this process may use: {count}, of {len(sockets)} socket(s); {each}"
    if len(nodes) > 1:
        detail += "; symm-cp run --numa node gives each rank cores and memory of its own"
    if (as_if := env.sockets()) is not None:
        detail += f"; ranks sum as if on {as_if} socket(s) (SYMM_CP_SOCKETS)"
    return Finding("processors", "NUMA", "info", detail)


def op_findings() -> list[Finding]:
    """Lists the namespace's ops with their kernels, and ops without kernels on one line."""
    names = sorted(
        {schema.name for schema in torch._C._jit_get_all_schemas() if "symm_mem::" in schema.name}
    )
    findings, others = [], []
    for name in names:
        kernels = [
            key for key in _KEYS if torch._C._dispatch_has_kernel_for_dispatch_key(name, key)
        ]
        short = name.removeprefix("symm_mem::")
        if set(kernels) <= {"Meta"}:
            others.append(short)
        else:
            findings.append(Finding("ops", short, "info", ", ".join(kernels)))
    if others:
        names_of_others = ", ".join(others)
        why = f"no kernel here, as expected, since symm_cp does not need them: {names_of_others}"
        findings.append(Finding("ops", "others", "info", why))
    return findings


def examine() -> list[Finding]:
    """Returns all findings; takes a second, plus a build if there is none yet."""
    return [
        *_versions(),
        _compiler(),
        _library(),
        *_results(),
        huge_shared_pages(),
        *reserved_pages(),
        numa(),
        *memory_of_ranks(),
        _cpu(),
        *itertools.chain.from_iterable(map(accelerated.devices_of, cuda.known())),
        accelerated.nvshmem_works(),
        *op_findings(),
    ]


def _print(findings: list[Finding], line: Callable[[str], None] = print) -> None:
    width = max(len(finding.name) for finding in findings)
    section = ""
    for finding in findings:
        if finding.section != section:
            section = finding.section
            line(f"\n{section}" + (" (dispatch keys with a kernel)" if section == "ops" else ""))
        mark = {"ok": "+", "missing": "-", "info": " "}[finding.state]
        line(f" {mark} {finding.name:<{width}}  {finding.detail}")
        if finding.advice:
            advice = " ".join(finding.advice.split())
            line(f"   {'':<{width}}  -> {advice}")


def main(args: argparse.Namespace) -> int:
    """Prints the findings; returns 0 if the CPU backend works, else 1."""
    findings = examine()
    if args.json is not None:
        write_json(args.json, [asdict(finding) for finding in findings])
    if args.json != STDOUT:
        _print(findings)
    works = any(f.name == "CPU" and f.state == "ok" for f in findings)
    return 0 if works else 1
