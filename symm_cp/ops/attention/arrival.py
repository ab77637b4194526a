"""Attention on CUDA by one kernel that begins before the peers' keys have come."""

from __future__ import annotations

from functools import lru_cache

import torch

from symm_cp import runtime, tuning
from symm_cp.devices import device_of
from symm_cp.hosts import hosts_of
from symm_cp.memory import Group
from symm_cp.modes import ordinary_tensors
from symm_cp.schedule.layout import SequenceLayout
from symm_cp.schedule.patterns import peers
from symm_cp.schedule.tiles import Mask

_DTYPES = (torch.bfloat16, torch.float16)
_FEATURES = (64, 128)
_CAPABILITY = (8, 0)  # tensor cores for bfloat16, copies to shared memory in the background


def takes(
    group: Group,
    query: torch.Tensor,
    key: torch.Tensor,
    layout: SequenceLayout,
    mask: Mask,
    scale: float | None,
) -> bool:
    """Tells whether a call is for this kernel: it can do it, and it is the way to take."""
    if query.device.type != "cuda" or not fits(group, query, key, layout, mask, scale):
        return False
    if torch.cuda.get_device_capability(query.device) < _CAPABILITY:
        return False
    device = device_of(query.device)
    # Kernels that signal might find no multiprocessor free beside one that polls on all of them.
    spread = hosts_of(group, query.device)
    if spread is not None or device.capturing() or not device.signals_by_stream():
        return False
    chosen = tuning.choose_attention(group, query.device, question(query, key, layout, mask))
    return chosen == "arrival"


def question(query: torch.Tensor, key: torch.Tensor, layout: SequenceLayout, mask: Mask) -> str:
    """Names a call in the file of what was measured."""
    B, H, S, E = query.shape
    sizes = f"{B}x{H}x{key.shape[1]}x{S}x{key.shape[2]}x{E}"
    kind, chunks = "causal" if mask else "full", len(layout.chunks(0))
    return f"all_gather_attention {str(query.dtype)[6:]} {sizes} {kind} {chunks} chunks"


def fits(
    group: Group,
    query: torch.Tensor,
    key: torch.Tensor,
    layout: SequenceLayout,
    mask: Mask,
    scale: float | None = None,
) -> bool:
    """Tells whether the kernel can do a call: 16 bits, equal shards, no mask but a causal one."""
    return (
        group.world_size > 1
        and query.dtype in _DTYPES
        and query.shape[3] in _FEATURES
        and len(set(layout.lengths)) == 1
        and mask in (Mask(), Mask(right=0))
        and min(query.shape[2], key.shape[2]) > 0
        and (scale is None or scale > 0)
    )


@lru_cache(maxsize=64)
def _tables(
    layout: SequenceLayout, rank: int, rows: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions of this rank's queries; of each shard's chunks (begin, length, position)."""
    from symm_cp.kernels.arrival_attention import chunk_table

    shards = [
        [(span.row, span.length, span.start) for span in layout.spans(owner)]
        for owner in (rank, *peers(rank, layout.world_size))
    ]
    with ordinary_tensors():
        at = torch.tensor(list(layout.positions(rank)), dtype=torch.int32)
        # Without a mask, queries may be of another sequence: positions do not matter then.
        at = at if len(at) == rows else at.new_zeros(rows)
        return at.to(device), chunk_table(shards).to(device)


def attend(
    group: Group,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layout: SequenceLayout,
    mask: Mask,
    scale: float | None,
    what: bytes,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the attention over all ranks' keys, and its log-sum-exp."""
    from symm_cp.kernels.arrival_attention import Arrivals, arrival_attention

    at, chunks = _tables(layout, group.rank, query.shape[2], query.device)
    query = query if query.stride(-1) == 1 else query.contiguous()
    key, value = key.contiguous(), value.contiguous()
    found: list[tuple[torch.Tensor, torch.Tensor]] = []

    def kernel(pulled: list[torch.Tensor], words: torch.Tensor, step: int, epoch: int) -> None:
        arrivals = Arrivals(pulled[0], pulled[1], words, step, epoch)
        causal = bool(mask)
        found.append(
            arrival_attention(query, key, value, arrivals, at, chunks, causal=causal, scale=scale)
        )

    runtime.of(key, group).all_gather_and_poll(group, [key, value], kernel, what)
    return found[0]
