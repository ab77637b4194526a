"""`symm-cp doctor`: reports what works on this machine, and how to make the rest work."""

from __future__ import annotations

import argparse
import os
import platform
import re
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

from symm_cp import __version__, accelerators, cores, cuda, native
from symm_cp.cuda import Device, nvshmem
from symm_cp.cuda.gpu import CudaDevice
from symm_cp.parsing import STDOUT, write_json
from symm_cp.tensors.results import result_memory

_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage")
_VARIABLES = re.compile("(SYMM_CP|CUDA|NCCL|NVSHMEM|OMP|PYTORCH|TORCH|TRITON)_")
# The kernel names memory after the process that owns it (`owned_label` in csrc/memory/segment.h),
# with spaces escaped.
_LABEL = re.compile(r"/memfd:symm_cp:(\d+):(\S*)")
_PAGE, _ON_NODE = re.compile(r" kernelpagesize_kB=(\d+)"), re.compile(r" N(\d+)=(\d+)")


@dataclass(frozen=True)
class Finding:
    """One line of the report; `state` is "ok", "missing" (with advice) or "info"."""

    section: str
    name: str
    state: str
    detail: str
    advice: str = ""


def versions() -> Iterator[Finding]:
    """Lists versions, and the variables that change how symm_cp, torch and CUDA behave."""
    rows = {
        "symm_cp": __version__,
        "torch": f"{torch.__version__}, CUDA {torch.version.cuda}",
        "Python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} on {platform.machine()}",
    }
    rows |= {f"${name}": os.environ[name] for name in sorted(filter(_VARIABLES.match, os.environ))}
    for name, detail in rows.items():
        yield Finding("versions", name, "info", detail)


def _library() -> str:
    native.load()
    return str(native.library_path())


def native_part() -> Iterator[Finding]:
    """Checks the compiler and the library, which is built if there is none yet."""
    for name, find in (("compiler", native.find_compiler), ("library", _library)):
        try:
            yield Finding("native part", name, "ok", find())
        except native.BuildError as error:
            yield Finding("native part", name, "missing", "not found", str(error))


def memory(settings: Path = _HUGE_PAGES) -> Iterator[Finding]:
    """Reports the memory of results that is kept (`symm_cp.empty_cache`), and huge pages."""
    with suppress(native.BuildError):
        detail = f"a process keeps up to {result_memory().limit >> 20} MiB for later results"
        yield Finding("memory", "freed results", "info", detail)
    # Shared memory, which symmetric memory uses, has a setting of its own: off on most systems.
    for name, file in (("results", "enabled"), ("symmetric memory", "shmem_enabled")):
        chosen, state, advice = "unknown", "info", ""
        with suppress(OSError, ValueError):
            text = (settings / file).read_text()
            chosen = text[text.index("[") + 1 : text.index("]")]  # the kernel's mark
            state = "info" if chosen in ("never", "deny") else "ok"
        if (name, chosen) == ("results", "never"):
            state, advice = "missing", f"as root: echo madvise > {settings / file}"
        detail = f"transparent huge pages: {chosen} ({settings / file})"
        yield Finding("memory", f"huge pages, {name}", state, detail, advice)


def numa(system: Path = cores.SYSTEM) -> Finding:
    """Reports which cores of which nodes and sockets this process may use."""
    allowed = os.sched_getaffinity(0)
    nodes, sockets = (cores.units(unit, allowed, system) for unit in cores.UNITS)
    each = "; ".join(f"node {node}: CPUs {cores.ranges(cpus)}" for node, cpus in nodes.items())
    count = len(cores.cores(allowed, system))
    detail = f"cores that this process may use: {count}, of {len(sockets)} socket(s); {each}"
    if len(nodes) > 1:
        detail += "; symm-cp run --numa node gives each rank cores and memory of its own"
    return Finding("processors", "NUMA", "info", detail)


def owned(process: int, numa_maps: str) -> dict[str, Counter[int]]:
    """Returns the bytes that a process owns on each node, by the name that it gave the memory.

    Memory that peers map, too, is counted for its owner alone.
    """
    found: defaultdict[str, Counter[int]] = defaultdict(Counter)
    for line in numa_maps.splitlines():
        label, page = _LABEL.search(line), _PAGE.search(line)
        if label is not None and page is not None and int(label[1]) == process:
            name = label[2].replace(r"\040", " ").removesuffix(" (deleted)")
            for node, pages in _ON_NODE.findall(line):
                found[name.strip()][int(node)] += int(pages) * int(page[1]) << 10
    return dict(found)


def _of_processes(processes: Path) -> Iterator[tuple[int, str, Counter[int]]]:
    for folder in processes.glob("[0-9]*"):
        with suppress(OSError):  # another user's, or ended by now
            # The other file is slow: the kernel counts all pages that a process has mapped.
            own = folder.stat().st_uid == os.getuid()
            if own and "/memfd:symm_cp:" in (folder / "maps").read_text():
                process = int(folder.name)
                memory = owned(process, (folder / "numa_maps").read_text())
                yield from ((process, *each) for each in memory.items())


def memory_of_ranks(
    processes: Path = Path("/proc"), system: Path = cores.SYSTEM
) -> Iterator[Finding]:
    """Reports for each running rank how much of its symmetric memory lies on which node."""
    for process, name, nodes in sorted(_of_processes(processes), key=lambda each: each[:2]):
        sizes = (f"{size / (1 << 20):.1f} MiB on node {n}" for n, size in sorted(nodes.items()))
        near: set[int] = set()
        with suppress(OSError):  # ended by now
            near = set(cores.units("node", os.sched_getaffinity(process), system))
        advice = ""
        if near and set(nodes) - near:
            advice = "its CPUs are of other nodes: start ranks with symm-cp run --numa node"
        name = f"process {process}, {name}"
        state = "missing" if advice else "info"
        yield Finding("memory of running ranks", name, state, ", ".join(sizes), advice)


def _round_trip() -> None:
    """Runs an all-reduce over symmetric memory on CPU, in a group of this process alone."""
    initialize = not dist.is_initialized()
    with tempfile.TemporaryDirectory() as folder:
        if initialize:
            store = f"file://{folder}/store"
            dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
        try:
            group = dist.new_group([dist.get_rank()], use_local_synchronization=True)
            tensor = symm_mem.empty(16, device="cpu").fill_(1.0)
            symm_mem.rendezvous(tensor, group).barrier()
            total = torch.ops.symm_mem.one_shot_all_reduce(tensor, "sum", group.group_name)
            if not torch.equal(total, torch.ones(16)):
                raise RuntimeError(f"an all-reduce over one rank gave {total.tolist()}")
        finally:
            if initialize:
                dist.destroy_process_group()


def cpu() -> Finding:
    """Tries symmetric memory on the CPU."""
    if not (dist.is_available() and dist.is_gloo_available()):
        advice = "install a build of torch with torch.distributed and gloo"
        return Finding("backends", "CPU", "missing", "torch has no gloo", advice)
    try:
        _round_trip()
    except RuntimeError as error:
        advice = "run symm-cp build, then symm-cp doctor again; report the error if it persists"
        return Finding("backends", "CPU", "missing", str(error).splitlines()[0], advice)
    return Finding("backends", "CPU", "ok", "works; to test all ops: symm-cp selftest")


def devices_of(kind: type[Device]) -> Iterator[Finding]:
    """Checks the driver for a kind of device, and lists the devices and their peers."""
    name, is_cuda = kind.torch_type.upper(), kind is CudaDevice
    module = getattr(torch, kind.torch_type, None)
    if module is None or not module.is_available():
        built = module is not None and (not is_cuda or torch.version.cuda is not None)
        detail = "no device found" if built else f"torch is built without {name}"
        advice = f"check the driver of {name}" if built else f"install a {name} build of torch"
        yield Finding("backends", name, "missing", detail, advice)
        return
    with suppress(native.BuildError):  # reported with the native part
        yield _driver(kind)
    if is_cuda:
        yield from cuda_settings(os.environ, symm_mem.get_backend(torch.device("cuda")))
    count = accelerators.count(torch.device(kind.torch_type))
    for index in range(count):
        device = torch.device(kind.torch_type, index)
        others = (peer for peer in range(count) if peer != index)
        peers = [str(peer) for peer in others if accelerators.reaches(device, peer)]
        detail = f"{accelerators.name_of(device)}; reaches {', '.join(peers) or 'no peer'}"
        yield Finding("backends", f"{name} {index}", "ok", detail)


def _driver(kind: type[Device]) -> Finding:
    name, library = f"{kind.torch_type.upper()} driver", native.load()
    if library.symm_cp_driver(kind.driver.encode()) < 0:
        advice = "update the driver; the ops of torch's namespace keep torch's kernels until then"
        return Finding("backends", name, "missing", native.error(), advice)
    if kind is not CudaDevice:
        return Finding("backends", name, "ok", "loads")
    return cuda_driver(library.symm_cp_driver_version(kind.driver.encode()))


def cuda_driver(version: int) -> Finding:
    """Judges the driver's version; 12050 means CUDA 12.5."""
    needed = int(native.load().symm_cp_stream_signals_version())
    has, needs = (f"CUDA {each // 1000}.{each % 1000 // 10}" for each in (version, needed))
    if version >= needed:
        return Finding("backends", "CUDA driver", "ok", f"{has}; streams can signal peers")
    detail, advice = f"{has}; streams cannot signal peers", f"update it: they can from {needs} on"
    return Finding("backends", "CUDA driver", "missing", detail, advice)


def cuda_settings(environment: Mapping[str, str], backend: str | None) -> Iterator[Finding]:
    """Judges variables of CUDA, and torch's backend of symmetric memory on GPUs."""
    if environment.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        detail = "1: all streams share a queue, so copies and kernels overlap less"
        yield Finding("backends", "CUDA_DEVICE_MAX_CONNECTIONS", "info", detail)
    if environment.get("CUDA_MODULE_LOADING") != "EAGER":
        detail = "kernels load at their first launch, which may wait for all streams, so for peers"
        advice = "export CUDA_MODULE_LOADING=EAGER"
        yield Finding("backends", "CUDA_MODULE_LOADING", "missing", detail, advice)
    if environment.get("SYMM_CP_SELFTEST") == "0":
        detail = "0: what does not work between these GPUs may hang"
        advice = "unset it, unless the self-test itself fails"
        yield Finding("backends", "SYMM_CP_SELFTEST", "missing", detail, advice)
    name = "torch's symmetric memory"
    if backend is None:
        advice = "install a build of torch with symmetric memory on CUDA"
        yield Finding("backends", name, "missing", "none on CUDA", advice)
    else:  # torch does not change it after its first use
        detail = f"{backend}; call torch's set_backend() before the first op, also on CPU"
        yield Finding("backends", name, "ok" if backend == "CUDA" else "info", detail)


def nvshmem_works() -> Finding:
    """Checks whether NVSHMEM's package and library load."""
    try:
        core, _ = nvshmem.library()
        core.get_unique_id(empty=True)  # loads the library
    except Exception as error:  # from the import, or from the loader of CUDA's libraries
        detail = str(error.__cause__ or error).splitlines()[0]
        advice = "on a machine with NVIDIA GPUs: pip install 'symm_cp[nvshmem]'"
        return Finding("backends", "NVSHMEM", "missing", detail, advice)
    return Finding("backends", "NVSHMEM", "ok", "nvshmem4py and its library load")


def ops() -> Iterator[Finding]:
    """Lists the public ops of the namespace by the devices that have a kernel."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    by_kernels: defaultdict[str, list[str]] = defaultdict(list)
    schemas = {schema.name for schema in torch._C._jit_get_all_schemas()}
    for name in sorted(name for name in schemas if re.match("symm_mem::[^_]", name)):
        kernels = [
            key for key in ("CPU", *(k.dispatch_key for k in cuda.known())) if has(name, key)
        ]
        kernels += ["gradients"] if has(name, "Autograd") else []
        by_kernels[", ".join(kernels)].append(name.removeprefix("symm_mem::"))
    for which, names in sorted(by_kernels.items()):
        yield Finding("ops", f"for {which or 'no device'}", "info", ", ".join(names))


def examine() -> list[Finding]:
    """Returns all findings; takes a second, plus a build if there is none yet."""
    return [
        *versions(),
        *native_part(),
        *memory(),
        numa(),
        *memory_of_ranks(),
        cpu(),
        *(finding for kind in cuda.known() for finding in devices_of(kind)),
        nvshmem_works(),
        *ops(),
    ]


def _print(findings: list[Finding], line: Callable[[str], None] = print) -> None:
    width = max(len(finding.name) for finding in findings)
    for section, of_section in groupby(findings, lambda finding: finding.section):
        line(f"\n{section}")
        for finding in of_section:
            mark = {"ok": "+", "missing": "-", "info": " "}[finding.state]
            line(f" {mark} {finding.name:<{width}}  {finding.detail}")
            if finding.advice:
                line(f"   {'':<{width}}  -> {' '.join(finding.advice.split())}")


def main(args: argparse.Namespace) -> int:
    """Prints the findings; returns 0 if the CPU backend works, else 1."""
    findings = examine()
    if args.json is not None:
        write_json(args.json, [asdict(finding) for finding in findings])
    if args.json != STDOUT:
        _print(findings)
    return 0 if any(f.name == "CPU" and f.state == "ok" for f in findings) else 1
