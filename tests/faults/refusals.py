"""Random programs in which calls are refused on all ranks, on some, and before the first memory."""

from __future__ import annotations

import contextlib
import random
import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed import _symmetric_memory as symm_mem
from torch.distributed._functional_collectives import wait_tensor

import symm_cp
from symm_cp import tuning
from symm_cp.testing.delays import probing

OPS = torch.ops.symm_mem


@dataclass(frozen=True)
class Step:
    """A call: which op, how many rows a rank has, and which ranks give it wrong arguments."""

    op: str
    rows: int
    refused_by: frozenset[int]


@dataclass(frozen=True)
class Program:
    """Calls on a new group, and the delays of each rank between their steps."""

    steps: tuple[Step, ...]
    delay_us: int
    seed: int


def _gather(group: dist.ProcessGroup, x: torch.Tensor, bad: bool) -> torch.Tensor:
    """All-gather in steps between which Python runs."""
    with tuning.forced("shards"):
        gathered: torch.Tensor = symm_cp.all_gather_matmul(
            x, torch.eye(x.shape[1] + bad, x.shape[1], dtype=x.dtype), group=group
        )
    return gathered


def _gather_in_place(group: dist.ProcessGroup, x: torch.Tensor, bad: bool) -> torch.Tensor:
    shared = symm_mem.empty(x.shape, dtype=x.dtype, device="cpu").copy_(x)
    symm_mem.rendezvous(shared, group)
    return _gather(group, shared, bad)


def _all_reduce(group: dist.ProcessGroup, x: torch.Tensor, bad: bool) -> torch.Tensor:
    """All-reduce by one native call."""
    total: torch.Tensor = OPS.one_shot_all_reduce(x, "nothing" if bad else "sum", group.group_name)
    return total


def _in_background(group: dist.ProcessGroup, x: torch.Tensor, bad: bool) -> torch.Tensor:
    """Reduce-scatter in the background, on the other channel."""
    op = "nothing" if bad else "sum"
    whole = x.repeat(group.size(), 1)
    pending = OPS._low_contention_reduce_scatter(whole, op, group.group_name)
    return wait_tensor(pending)


def _by_heads(group: dist.ProcessGroup, x: torch.Tensor, bad: bool) -> torch.Tensor:
    """Ulysses attention, with several exchanges per call."""
    heads = group.size() - 1 if bad else group.size()
    query = x[:, :1].expand(1, heads, *x[:, :1].shape).contiguous()
    out: torch.Tensor = symm_cp.all_gather_attention(
        query, query, query, group=group, method="ulysses"
    )
    return out


def _on_mesh_of_keys(group: dist.ProcessGroup, x: torch.Tensor, bad: bool) -> torch.Tensor:
    query = x[None, None]
    key = query[..., :-1] if bad else query
    out: torch.Tensor = symm_cp.all_gather_attention(query, key, query, group=group)
    return out


CALLS: dict[str, Callable[[dist.ProcessGroup, torch.Tensor, bool], torch.Tensor]] = {
    "gather": _gather,
    "gather_in_place": _gather_in_place,
    "all_reduce": _all_reduce,
    "in_background": _in_background,
    "by_heads": _by_heads,
    "by_keys": _on_mesh_of_keys,
}
_COLUMNS = 4


def _expected(step: Step, ranks: list[torch.Tensor], rank: int) -> torch.Tensor:
    if step.op.startswith("gather"):
        return torch.cat(ranks)
    if step.op in ("all_reduce", "in_background"):
        return torch.stack(ranks).sum(0)
    x = torch.cat(ranks)
    q = ranks[rank]
    if step.op == "by_heads":
        x, q = x[:, :1], q[:, :1]
    out = (q @ x.T * q.shape[1] ** -0.5).softmax(1) @ x
    return out.expand(1, len(ranks) if step.op == "by_heads" else 1, *out.shape)


def drawn(world_size: int, count: int) -> list[Program]:
    """Programs in which many calls come right after a refused one."""
    programs = []
    for _ in range(count):
        steps = []
        for _ in range(random.randint(3, 7)):
            some = frozenset(random.sample(range(world_size), random.randint(1, world_size)))
            every = frozenset(range(world_size))
            refused_by = random.choice((frozenset(), frozenset(), some, every))
            rows = random.choice((1, 3, 3, 500, 20_000))
            op = random.choice(list(CALLS))
            rows = min(rows, 60) if op.startswith("by_") else rows
            steps.append(Step(op, rows, refused_by))
        delay = random.choice((0, 300, 300, 160_000))
        programs.append(Program(tuple(steps), delay, random.randrange(1 << 30)))
    return programs


def _run_step(group: dist.ProcessGroup, step: Step, number: int) -> None:
    rank, W = group.rank(), group.size()
    # Each call has different data, so that data of another call cannot pass for it.
    row = torch.linspace(0, 1, _COLUMNS, dtype=torch.float64)
    ranks = [row.repeat(step.rows, 1) + number + 10 * r for r in range(W)]
    bad = rank in step.refused_by
    if not step.refused_by:
        found = CALLS[step.op](group, ranks[rank], False)
        torch.testing.assert_close(found, _expected(step, ranks, rank))
        return
    error = _error_of(lambda: CALLS[step.op](group, ranks[rank], bad))
    told = re.search(r"(?:Value|Type|Runtime)Error on rank (\d+)", str(error))
    if isinstance(error, (ValueError, TypeError)) or (told is None and "nothing" in str(error)):
        assert bad, error
        return
    assert isinstance(error, RuntimeError), f"rank {rank} heard {error}"
    assert told is not None, error
    assert not bad or step.refused_by != {rank}, error
    assert int(told[1]) in step.refused_by, error


def _error_of(call: Callable[[], object]) -> Exception | None:
    try:
        call()
    except Exception as error:
        return error
    return None


def run(group: dist.ProcessGroup, programs: list[Program]) -> None:
    """Each call is right, or fails on all ranks with the error of one that refused it."""
    for program in programs:
        own = dist.new_group(list(range(group.size())))
        delays = (
            probing(seed=program.seed + own.rank(), delay_us=program.delay_us)
            if program.delay_us
            else contextlib.nullcontext()
        )
        with delays:
            for number, step in enumerate(program.steps):
                try:
                    _run_step(own, step, number)
                except BaseException as error:
                    raise AssertionError(f"step {number} of {program}: {error}") from error
        dist.barrier(group)
        dist.destroy_process_group(own)
