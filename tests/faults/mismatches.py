"""Ranks that make different calls."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch.distributed._functional_collectives import wait_tensor

import symm_cp

OPS = torch.ops.symm_mem
Call = Callable[[dist.ProcessGroup], Any]


def _tensor(rows: int, columns: int, dtype: str) -> torch.Tensor:
    return torch.ones(rows, columns, dtype=getattr(torch, dtype))


def _symmetric(group: dist.ProcessGroup, like: torch.Tensor) -> torch.Tensor:
    """Memory of all ranks, made before the calls: a rendezvous is a call, too."""
    key = (group.group_name, like.shape, like.dtype)
    if key not in _shared:
        _shared[key] = symm_mem.empty(like.shape, dtype=like.dtype, device="cpu")
        symm_mem.rendezvous(_shared[key], group)
    return _shared[key].copy_(like)


_shared: dict[Any, torch.Tensor] = {}


def call_of(spec: tuple[Any, ...]) -> Call:
    """The call that `spec` describes."""
    op, rows, columns, dtype, in_place = spec

    def run(group: dist.ProcessGroup) -> Any:
        x, name = _tensor(rows, columns, dtype), group.group_name
        if in_place:
            x = _shared[name, x.shape, x.dtype].copy_(x)
        w = _tensor(columns, 3, dtype)
        return {
            "all_reduce": lambda: OPS.one_shot_all_reduce(x, "sum", name),
            "two_shot": lambda: OPS.two_shot_all_reduce_(x, "sum", name),
            "gather": lambda: symm_cp.all_gather_matmul(x, w, group=group),
            "scatter": lambda: symm_cp.matmul_reduce_scatter(x, w, group=group),
            "background": lambda: wait_tensor(OPS._low_contention_all_gather(x, name)),
            "wrong": lambda: symm_cp.all_gather_matmul(x, w[1:], group=group),
        }[op]()

    return run


#: Ops that ranks may call at the same time; each has its own flags.
OPS_OF_RANKS = ("all_reduce", "two_shot", "gather", "scatter", "background")


def random_pair(random_: random.Random) -> list[tuple[Any, ...]]:
    """Two descriptions that differ in something."""
    ops = (*OPS_OF_RANKS, "wrong")

    def one() -> tuple[Any, ...]:
        op = random_.choice(ops)
        in_place = random_.random() < 0.3 and op in ("all_reduce", "two_shot", "gather")
        rows, columns = random_.choice((2, 4, 600)), random_.choice((4, 8, 50))
        return op, rows, columns, random_.choice(("float32", "float64")), in_place

    first, second = one(), one()
    if random_.random() < 0.5:  # change one field only
        place = random_.randrange(5)
        second = (*first[:place], second[place], *first[place + 1 :])
    plain = ("scatter", "background", "wrong")
    first, second = ((*s[:4], s[4] and s[0] not in plain) for s in (first, second))
    same_error = first[0] == second[0] == "wrong"
    # Products whose inner dimensions differ can be summed.
    same_sum = first[0] == second[0] == "scatter" and first[1::2] == second[1::2]
    again = first == second or same_error or same_sum
    return random_pair(random_) if again else [first, second]


SAME = call_of(("all_reduce", 2, 4, "float32", False))


def attempt(call: Call, group: dist.ProcessGroup) -> dict[str, Any]:
    """Makes a call; returns its error, if any, and its duration."""
    begin, said = time.monotonic(), ""
    try:
        call(group)
    except (RuntimeError, ValueError) as error:
        said = f"{type(error).__name__}: {error}"
    return {"said": said, "seconds": time.monotonic() - begin}


def unequal(group: dist.ProcessGroup, pair: list[tuple[Any, ...]], warm: bool) -> list[Any]:
    """Outcomes of a mismatched pair of calls, then of equal ones; `warm`: after a first call."""
    for _, rows, columns, dtype, in_place in pair:
        if in_place:
            _symmetric(group, _tensor(rows, columns, dtype))
    found = [attempt(SAME, group)] if warm else []
    found += [attempt(call_of(pair[group.rank()]), group), attempt(SAME, group)]
    dist.barrier(group)  # no rank leaves before its peer has an answer
    return found[-2:]
