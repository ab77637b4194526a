"""Findings about GPUs and other accelerators, and about CUDA settings."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch
import torch.distributed._symmetric_memory as symm_mem

from symm_cp import accelerators, native
from symm_cp.commands.doctor.findings import Finding
from symm_cp.cuda import Device, nvshmem
from symm_cp.cuda.gpu import CudaDevice

_SELF_TEST = Finding(
    "backends",
    "CUDA self-test",
    "info",
    "copies, signals and graphs between GPUs are tested at the first use of each group; to test "
    "all ops: symm-cp selftest --device cuda",
)


def _driver(kind: type[Device], name: str) -> Finding:
    """Checks whether the driver meets the requirements of the runtime for streams."""
    name += " driver"
    try:
        level = native.load().symm_cp_driver(kind.driver.encode())
    except native.BuildError as error:
        advice = "first make the native part work, see above"
        return Finding("backends", name, "missing", str(error).splitlines()[0], advice)
    if level < 0:
        advice = "update the driver; the ops of torch's namespace keep torch's kernels until then"
        return Finding("backends", name, "missing", native.error(), advice)
    copies = "batched copies" if level == 2 else "single copies"
    if kind is not CudaDevice:
        return Finding("backends", name, "ok", copies)
    if level < 2:
        copies += " (batches require CUDA 12.8)"
    return cuda_driver(native.load().symm_cp_driver_version(kind.driver.encode()), copies)


def devices_of(kind: type[Device]) -> list[Finding]:
    """Checks the driver for a kind of device, and lists the devices."""
    name = kind.torch_type.upper()
    module = getattr(torch, kind.torch_type, None)
    if module is None or not module.is_available():
        detail, advice = _why_none(kind)
        return [Finding("backends", name, "missing", detail, advice)]
    findings = [_driver(kind, name)]
    if kind is CudaDevice:
        backend = symm_mem.get_backend(torch.device("cuda"))
        findings += [*cuda_settings(os.environ), symmetric_memory(backend), _SELF_TEST]
    count = accelerators.count(torch.device(kind.torch_type))
    for index in range(count):
        device = torch.device(kind.torch_type, index)
        peers = [
            str(peer)
            for peer in range(count)
            if peer != index and accelerators.reaches(device, peer)
        ]
        detail = f"{accelerators.name_of(device)}; reaches {', '.join(peers) or 'no peer'}"
        if kind is CudaDevice:
            detail += f"; {_cuda_details(device)}"
        findings.append(Finding("backends", f"{name} {index}", "ok", detail))
    return findings


def _why_none(kind: type[Device]) -> tuple[str, str]:
    """Returns why there is no device of a kind, and a remedy."""
    name = kind.torch_type.upper()
    if kind is CudaDevice and torch.version.cuda is not None:
        return "no device found", "check the driver with nvidia-smi"
    if kind is CudaDevice or not hasattr(torch, kind.torch_type):
        return f"torch is built without {name}", f"install a {name} build of torch"
    return "no device found", f"check the driver of {name}"


def _cuda_details(device: torch.device) -> str:
    multicast = symm_mem._SymmetricMemory.has_multicast_support(
        torch._C._autograd.DeviceType.CUDA, device.index
    )
    engines = getattr(accelerators.properties_of(device), "async_engine_count", None)
    return (
        f"{'has' if multicast else 'no'} multicast; "
        f"copy engines: {engines if engines is not None else 'unknown to torch'}"
    )


def cuda_driver(version: int, copies: str) -> Finding:
    """Judges the driver's version; 12050 means CUDA 12.5."""
    name, needed = "CUDA driver", int(native.load().symm_cp_stream_signals_version())
    detail = f"CUDA {_release(version)}; {copies}"
    if version >= needed:
        return Finding("backends", name, "ok", f"{detail}; streams can signal")
    detail += "; streams cannot signal, so ranks exchange data through the process group"
    advice = f"update the driver: streams signal from CUDA {_release(needed)} on"
    return Finding("backends", name, "missing", detail, advice)


def _release(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"


def cuda_settings(environment: Mapping[str, str]) -> list[Finding]:
    """Judges the variables that control how CUDA streams run."""
    section, findings = "backends", []
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    queues = environment.get(name, "")
    if queues == "1":
        detail = "1: all streams share a queue, so copies and kernels overlap less; ops go on"
    else:
        detail = queues or "not set: 8 queues"
    findings.append(Finding(section, name, "info", detail))
    name = "CUDA_MODULE_LOADING"
    if environment.get(name) == "EAGER":
        findings.append(Finding(section, name, "ok", "EAGER"))
    else:
        detail = f"{environment.get(name) or 'not set'}: kernels are loaded at their first launch"
        advice = f"export {name}=EAGER; a first launch may wait for all streams, and so for peers"
        findings.append(Finding(section, name, "missing", detail, advice))
    if environment.get("SYMM_CP_SELFTEST") == "0":
        advice = "unset it, unless the self-test itself fails"
        detail = "0: what does not work between these GPUs may hang"
        findings.append(Finding(section, "SYMM_CP_SELFTEST", "missing", detail, advice))
    return findings


def symmetric_memory(backend: str | None) -> Finding:
    """Reports which of torch's backends allocates symmetric memory on GPUs."""
    name = "torch's symmetric memory"
    if backend is None:
        advice = "install a build of torch with symmetric memory on CUDA (torch 2.11 or later)"
        return Finding("backends", name, "missing", "no backend for CUDA", advice)
    # The first allocation on any device makes torch record that "a backend" is in use.
    detail = (
        f"{backend}; call torch's set_backend() before the first op of symm_cp, also on CPU: "
        "afterwards torch says that the backend cannot be changed after use"
    )
    return Finding("backends", name, "ok" if backend == "CUDA" else "info", detail)


def nvshmem_works() -> Finding:
    """Checks whether NVSHMEM's package and library load."""
    try:
        core, _ = nvshmem.library()
    except RuntimeError as error:
        advice = "pip install 'symm_cp[nvshmem]' on a machine with NVIDIA GPUs"
        return Finding("backends", "NVSHMEM", "missing", str(error.__cause__), advice)
    try:
        core.get_unique_id(empty=True)  # loads the library
    except Exception as error:  # from the loader of CUDA's libraries
        advice = "nvshmem4py needs libnvshmem_host.so.3: install nvidia-nvshmem-cu13 (or -cu12)"
        return Finding("backends", "NVSHMEM", "missing", str(error).splitlines()[0], advice)
    return Finding("backends", "NVSHMEM", "ok", "nvshmem4py and its library load")
