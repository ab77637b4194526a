"""Attention on CUDA as one kernel that starts before the peers' keys have arrived."""

from __future__ import annotations

import torch

from symm_cp import runtime
from symm_cp.cuda import kernels_count
from symm_cp.cuda.kept import kept
from symm_cp.group.memory import Group
from symm_cp.ops.attention.pipeline import fake_results
from symm_cp.ops.attention.spec import AttentionSpec
from symm_cp.ops.attention.tiles import dense_features
from symm_cp.schedule.layout import SequenceLayout
from symm_cp.schedule.mask import CAUSAL, NO_MASK
from symm_cp.schedule.patterns import peers
from symm_cp.tensors.dtypes import NARROW, dtype_name

_FEATURES = (64, 128)


def serves(group: Group, query: torch.Tensor, key: torch.Tensor, spec: AttentionSpec) -> bool:
    """Returns whether this kernel may run a call on this device with streams, now."""
    return fits(group, query, key, spec) and kernels_count(group, query.device)


def question(query: torch.Tensor, key: torch.Tensor, spec: AttentionSpec) -> str:
    """Returns the name of a call in the file of measured choices, identical on all ranks.

    The name repeats the number of keys in place of the queries', which may differ between ranks.
    """
    B, H, _, E = query.shape
    sizes = f"{B}x{H}x{key.shape[1]}x{key.shape[2]}x{key.shape[2]}x{E}"
    kind, chunks = "causal" if spec.mask else "full", len(spec.layout.chunks(0))
    return f"all_gather_attention {dtype_name(query.dtype)} {sizes} {kind} {chunks} chunks"


def fits(group: Group, query: torch.Tensor, key: torch.Tensor, spec: AttentionSpec) -> bool:
    """Returns whether the kernel supports a call: 16 bits, equal shards, causal or unmasked.

    All ranks get the same answer, even a rank without queries.
    """
    known = AttentionSpec(layout=spec.layout, mask=spec.mask, scale=spec.scale, method=spec.method)
    return (
        group.world_size > 1
        and query.dtype in NARROW
        and query.shape[3] in _FEATURES
        and len(set(spec.layout.lengths)) == 1
        and spec == known
        and spec.mask in (NO_MASK, CAUSAL)
        and key.shape[2] > 0
        and (spec.scale is None or spec.scale > 0)
    )


@kept(maxsize=64)
def _tables(
    device: torch.device, layout: SequenceLayout, rank: int, rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions of this rank's queries; (begin, length, position) of each shard's chunks."""
    from symm_cp.cuda.kernels.arrival_attention import chunk_table

    shards = [
        [(span.row, span.length, span.start) for span in layout.spans(owner)]
        for owner in (rank, *peers(rank, layout.world_size))
    ]
    positions = torch.tensor(list(layout.positions(rank)), dtype=torch.int32, device="cpu")
    # Without a mask, queries may be of another sequence: positions do not matter then.
    positions = positions if len(positions) == rows else positions.new_zeros(rows)
    return positions.to(device), chunk_table(shards).to(device)


def attend(
    group: Group,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    spec: AttentionSpec,
    call_name: bytes,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the attention over all ranks' keys, and its log-sum-exp. Collective."""
    from symm_cp.cuda.kernels.arrival_attention import Arrivals, arrival_attention

    positions, chunks = _tables(query.device, spec.layout, group.rank, query.shape[2])
    query = dense_features(query)
    key, value = key.contiguous(), value.contiguous()
    results: list[tuple[torch.Tensor, torch.Tensor]] = []

    def kernel(pulled: list[torch.Tensor], words: torch.Tensor, step: int, epoch: int) -> None:
        if query.shape[2] == 0:
            results.append(fake_results(query, value))
            return
        arrivals = Arrivals(pulled[0], pulled[1], words, step, epoch)
        causal = spec.mask == CAUSAL
        results.append(
            arrival_attention(
                query, key, value, arrivals, positions, chunks, causal=causal, scale=spec.scale
            )
        )

    runtime.of(key, group).all_gather_and_poll(group, [key, value], kernel, call_name)
    return results[0]
