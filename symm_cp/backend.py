"""A backend of torch.distributed: collectives of CPU tensors over the shared memory of a host.

    import symm_cp
    torch.distributed.init_process_group("symm_cp")              # or "cpu:symm_cp,cuda:nccl"

If the package is installed, the name is enough (entry points "torch.backends", and from torch
2.14 on "torch.distributed.backends"); importing symm_cp registers it, too. Nothing of torch is
changed, and gloo stays the default for CPU tensors. `new_group`, `init_device_mesh`, DDP, FSDP2,
DTensor and functional collectives use it like any other backend, and the ops of this package share
its memory. It has every collective: reductions for integer, floating, bool and complex dtypes, all
others for any dtype. Synchronous calls run in the calling thread; with `async_op=True` they run in
the background, and their works and futures complete whether or not the program waits.

Making a group is collective: it finds the other ranks. From then on a call raises
`torch.distributed.DistBackendError` within a second when a rank it needs has died. A group whose
ranks are on several hosts is a gloo group.

`torch.distributed.monitored_barrier` accepts gloo only; `group.monitored_barrier(...)` works.

torch's profiler shows each call as "symm_cp:all_reduce" and so on, until it has been waited for.
`all_reduce` also sums sparse COO tensors, such as gradients of `nn.Embedding(sparse=True)`.
"""

from __future__ import annotations

import datetime
import logging

import torch.distributed as dist

from symm_cp import native
from symm_cp.group.liveness import host_identity
from symm_cp.group.stores import StoreLostError, TimedStore

NAME = "symm_cp"


def register() -> None:
    """Registers the backend with torch.distributed."""
    if dist.is_available() and NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, create_from, extended_api=True, devices=["cpu"])


def register_or_warn(logger: logging.Logger) -> bool:
    """Registers the backend for an engine's plug-in; warns and returns False if it cannot load."""
    try:
        native.load()
    except native.BuildError as error:
        logger.warning("symm_cp is not used: %s", error)
        return False
    register()
    return True


def create_from(
    options: dist.distributed_c10d._DistributedBackendOptions, _: object
) -> dist.Backend:
    """Makes the backend of a process group, as torch asks for it. Collective."""
    return _create(
        options.store, options.group_id, options.group_rank, options.group_size, options.timeout
    )


def _create(
    store: dist.Store, name: str, rank: int, size: int, timeout: datetime.timedelta
) -> dist.Backend:
    """Makes the backend of one process group. Collective.

    Where the ranks are on several hosts this is gloo's backend, and rank 0 says so.
    """
    hosts = set(hosts_of_ranks(store, name, rank, size, timeout)) if size > 1 else {""}
    if len(hosts) == 1:
        return native_backend(store, name, rank, size, timeout)
    if rank == 0:
        native.say(f"group {name!r} uses gloo: its ranks are on {len(hosts)} hosts")
    return dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, timeout)


def native_backend(
    store: dist.Store, name: str, rank: int, size: int, timeout: datetime.timedelta
) -> dist.Backend:
    """Makes a backend for ranks that are all on this host. Collective."""
    glue, library = native.load_glue(), native.load()
    open_backend = native.address_of(library["symm_cp_backend_open"])
    milliseconds = int(timeout.total_seconds() * 1000)
    try:
        return glue.symm_cp_backend_object(
            open_backend, store, name.encode(), rank, size, milliseconds
        )
    except RuntimeError as error:
        raise dist.DistBackendError(str(error)) from None


def hosts_of_ranks(
    store: dist.Store, name: str, rank: int, size: int, timeout: datetime.timedelta
) -> list[str]:
    """Returns the host of each rank of a group that is being made. Collective.

    Raises `torch.distributed.DistBackendError` naming the ranks that do not arrive in time.
    """
    keys = [f"symm_cp/host/{peer}" for peer in range(size)]
    timed = TimedStore(store, timeout)
    try:
        timed.set(keys[rank], host_identity())
        timed.wait(keys, timeout)
    except StoreLostError as error:
        raise dist.DistBackendError(f"making group {name!r}: {error}") from error
    except RuntimeError as error:
        late = [str(peer) for peer, key in enumerate(keys) if not timed.check([key])]
        raise dist.DistBackendError(
            f"making group {name!r}: rank {', '.join(late)} did not come within "
            f"{timeout.total_seconds():g} s (rank {rank} waited)"
        ) from error
    return [timed.get(key).decode() for key in keys]
