"""How much memory context-parallel attention takes: peers' keys arrive one after the other."""

from __future__ import annotations

import functools
import math
from unittest import mock

import torch
import torch.distributed as dist

from symm_cp import set_rotate_method, tuning
from symm_cp.group.memory import resolve
from symm_cp.native import wire
from symm_cp.runtime import cpu
from symm_cp.testing import Ranks
from tests.allocations import peak_of
from tests.exhaustive import exhaustive

B, H, S, E = 1, 2, 256, 32


def measure(group: dist.ProcessGroup) -> tuple[dict[str, int], int]:
    group = dist.new_group(list(range(group.size())))  # with a workspace of its own
    q, k, v = (torch.randn(B, H, S, E, requires_grad=True) for _ in range(3))
    name, op = group.group_name, torch.ops.symm_mem.fused_all_gather_attention
    peaks = {}

    def backward() -> None:
        torch.autograd.grad(out.sum(), (q, k, v))

    with tuning.forced("pipeline"), mock.patch.object(cpu, "GATHERED_BYTES", 0):
        for causal in (False, True):
            forward = functools.partial(op, q.detach(), k.detach(), v.detach(), name)
            forward(is_causal=causal)  # makes the workspace
            dist.barrier(group)
            peaks[f"{causal=}"] = peak_of(functools.partial(forward, is_causal=causal))
        set_rotate_method("alltoall")
        try:
            out = op(q, k, v, name)[0]
            backward()
            out = op(q, k, v, name)[0]
            dist.barrier(group)
            peaks["ring"] = peak_of(backward)
        finally:
            set_rotate_method("allgather")
    dist.barrier(group)
    return peaks, resolve(name).workspace("sync").slot_bytes


def test_memory_does_not_depend_on_the_number_of_ranks(ranks: Ranks) -> None:
    # The last rank attends to all others under a causal mask.
    found = {world_size: ranks.run(world_size, measure)[-1] for world_size in (2, 3, 4)}
    peaks, slot = found[2]
    shard = B * H * S * E * 4
    assert slot == 2 * wire.EXCHANGE_PIECE
    for world_size in (3, 4):
        assert found[world_size][1] == slot
        for name, peak in found[world_size][0].items():
            # Three or more parts are merged in a buffer of their own, whatever their number.
            assert peak <= peaks[name] + 2 * shard, (world_size, name, peak, peaks)
    assert found[3][0] == found[4][0]


LONG = 4096  # of the whole sequence


def peak_with_options(group: dist.ProcessGroup) -> tuple[int, int]:
    """Peak bytes of a forward and of a backward pass with all options."""
    W, H, features = group.size(), 2, 16
    q, k = (torch.randn(1, H, LONG // W, features, requires_grad=True) for _ in range(2))
    v = torch.randn(1, H, LONG // W, 2 * features, requires_grad=True)
    sinks, bias = torch.randn(H, requires_grad=True), torch.randn(H, 2 * LONG - 1)
    ids = torch.arange(LONG).view(1, -1) // (LONG // 2)
    options = {
        "softcap": 2.0,
        "dropout_p": 0.1,
        "dropout_seed": torch.tensor(1),
        "document_ids": ids,
        "key_mask": torch.arange(LONG).view(1, -1) % 9 > 0,
        "window_left": LONG // 3,
        "is_causal": True,
    }
    op, inputs = torch.ops.symm_mem.fused_all_gather_attention, (q, k, v, sinks, bias)
    bias.requires_grad_()

    def forward() -> torch.Tensor:
        out: torch.Tensor = op(q, k, v, group.group_name, sinks=sinks, bias=bias, **options)[0]
        return out

    torch.autograd.grad(forward().sum(), inputs)  # makes the workspace
    dist.barrier(group)
    out = forward()
    return peak_of(forward), peak_of(lambda: torch.autograd.grad(out.sum(), inputs))


def test_no_option_takes_memory_for_every_query_and_key(ranks: Ranks) -> None:
    for world_size in (1, 2):
        for peaks in ranks.run(world_size, peak_with_options):
            # A mask of one byte for each pair would take this much for this rank's rows.
            pairs = LONG // world_size * LONG
            assert max(peaks) < pairs / 2, (world_size, peaks, pairs)


# Shards of 2 MiB, which take as much memory as they have bytes: see symm_cp/tensors/results.py.
BY_HEADS = (4, 8, 256, 64)


def method_peaks(group: dist.ProcessGroup, method: str) -> tuple[list[int], int]:
    """Peak bytes of a forward and of a backward pass, and the bytes of a slot."""
    group = dist.new_group(list(range(group.size())))  # with a workspace of its own
    q, k, v = (torch.randn(BY_HEADS, requires_grad=True) for _ in range(3))

    def forward() -> torch.Tensor:
        out: torch.Tensor = torch.ops.symm_mem.fused_all_gather_attention(
            q, k, v, group.group_name, method=method
        )[0]
        return out

    grad = torch.randn(q.shape)

    def backward() -> None:
        torch.autograd.grad(out, (q, k, v), grad)

    out = forward()
    backward()  # makes the workspace
    dist.barrier(group)
    out = forward()
    peaks = [peak_of(forward), peak_of(backward)]
    return peaks, resolve(group.group_name).workspace("sync").slot_bytes


@exhaustive
def test_memory_of_each_method(ranks: Ranks) -> None:
    """Memory in shards (all heads of a rank's part of the sequence), as the README states it."""
    shard = 4 * math.prod(BY_HEADS)
    kernels = 5 * shard // 8  # log-sum-exps, and buffers that do not depend on the sizes
    for world_size in (2, 4):
        for (forward, backward), slot in ranks.run(world_size, method_peaks, "allgather"):
            partials = 2 * world_size  # of the gradients of all ranks' keys and values
            assert forward <= 4 * shard + kernels, (world_size, forward / shard)
            assert backward <= (9 + partials) * shard + kernels, (world_size, backward / shard)
            assert slot == 2 * wire.EXCHANGE_PIECE
        for (forward, backward), slot in ranks.run(world_size, method_peaks, "ulysses"):
            # Queries, keys, values and the output of this rank's heads; or instead the output.
            assert forward <= 4 * shard + kernels, (world_size, forward / shard)
            # The forward pass's tensors, the output's gradient, which the kernel copies, and
            # the other gradients twice: as kernels return them, and as sums.
            assert backward <= 12 * shard + kernels, (world_size, backward / shard)
            assert slot <= 1 << 20, (world_size, slot)  # exchanged in pieces
