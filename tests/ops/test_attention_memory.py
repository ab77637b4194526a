"""How much memory context-parallel attention takes: peers' keys are read where they lie."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from symm_cp.memory import resolve
from symm_cp.ops.attention import set_rotate_method
from tests.pool import Ranks

B, H, S, E = 1, 2, 256, 32


def peak_of(run: Callable[[], Any]) -> int:
    """The most bytes that torch's tensors took at a time while `run` ran."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    events = [e for e in profiler.events() if e.name == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda e: e.time_range.start):
        now += event.cpu_memory_usage
        most = max(most, now)
    assert events
    return most


def measure(group: dist.ProcessGroup) -> tuple[dict[str, int], dict[str, int]]:
    group = dist.new_group(list(range(group.size())))  # with a workspace of its own
    q, k, v = (torch.randn(B, H, S, E) for _ in range(3))
    name, op = group.group_name, torch.ops.symm_mem.fused_all_gather_attention
    peaks = {}
    for causal in (False, True):
        op(q, k, v, name, is_causal=causal)  # makes the workspace
        dist.barrier(group)
        peaks[f"{causal=}"] = peak_of(lambda causal=causal: op(q, k, v, name, is_causal=causal))
    workspace = resolve(name).workspace("sync")
    slots = {"forward": workspace.slot_bytes}
    leaves = [t.requires_grad_() for t in (q, k, v)]
    set_rotate_method("alltoall")
    try:
        torch.autograd.grad(op(*leaves, name)[0].sum(), leaves)
    finally:
        set_rotate_method("allgather")
    slots["ring"] = workspace.slot_bytes
    dist.barrier(group)
    return peaks, slots


def test_memory_does_not_depend_on_the_number_of_ranks(ranks: Ranks) -> None:
    # The last rank attends to all others under a causal mask.
    found = {world_size: ranks.run(world_size, measure)[-1] for world_size in (2, 3, 4)}
    peaks, slots = found[2]
    shard = B * H * S * E * 4
    assert slots["forward"] == 2 * shard  # keys and values
    assert slots["ring"] == 2 * shard + 2 * 2 * shard  # and two partial sums of their gradients
    for world_size in (3, 4):
        assert found[world_size][1] == slots
        for name, peak in found[world_size][0].items():
            # From three parts on they are merged in a buffer of their own, whatever their number.
            assert peak <= peaks[name] + 2 * shard, (world_size, name, peak, peaks)
    assert found[3][0] == found[4][0]
