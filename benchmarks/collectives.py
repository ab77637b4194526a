"""Collectives of this package against gloo, Intel MPI and vLLM's shared-memory kernel.

    python benchmarks/collectives.py --against gloo,mpi,vllm --rivals rivals \\
        --json benchmarks/results/collectives.json

`benchmarks/rivals.py` says how to get them. All variants run in the same processes and in turn,
each timing starts at a barrier, and its time is that of the slowest rank.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.harness import Case, main
from benchmarks.matmul import symmetric
from benchmarks.rivals import NAMES, Call, Rival, TorchRival, groups_over

_KIB = 1024
#: KiB of a tensor to sum, of a rank's input to an all-gather, or result of a reduce-scatter.
SIZES = (1, 8, 64, 512, 4096, 32768)

# Registers "fake", a backend that does nothing: it shows the time of torch's wrappers.
_FAKE = importlib.import_module("torch.testing._internal.distributed.fake_pg") and "fake"

_ops = torch.ops.symm_mem
_functional = torch.ops._c10d_functional

Rivals = Mapping[str, Rival]


def _size(kib: int) -> str:
    return f"{kib} KiB" if kib < _KIB else f"{kib // _KIB} MiB"


def _without_none(variants: Mapping[str, Call | None]) -> dict[str, Call]:
    return {name: call for name, call in variants.items() if call is not None}


def _in_place(tensor: torch.Tensor, group: dist.ProcessGroup) -> Call:
    all_reduce, wait = _functional.all_reduce_.default, _functional.wait_tensor.default
    name = group.group_name
    return lambda: wait(all_reduce(tensor, "sum", name))


def _all_reduce_case(
    group: dist.ProcessGroup, on: Mapping[str, dist.ProcessGroup], rivals: Rivals, kib: int
) -> Case:
    name, count = group.group_name, kib * _KIB // 4
    # Zeros, which stay zeros however often they are summed in place.
    plain, copy = torch.zeros(count), torch.zeros(count)
    shared = symmetric(plain, group)
    leaf = torch.zeros(count, requires_grad=True)
    one_shot = _ops.one_shot_all_reduce

    def check() -> None:
        sent = torch.randn(count)
        want = sent.clone()
        dist.all_reduce(want, group=group)
        torch.testing.assert_close(one_shot(sent, "sum", name), want)
        torch.testing.assert_close(one_shot(shared.copy_(sent), "sum", name), want)
        shared.zero_()
        calls = {name: rival.all_reduce for name, rival in rivals.items()}
        if "symm_cp" in on:
            calls["symm_cp"] = TorchRival(on["symm_cp"]).all_reduce
            calls["in place"] = lambda tensor: _in_place(tensor, on["symm_cp"])
        for make in calls.values():
            got = sent.clone()
            if (call := make(got)) is not None:
                call()
                torch.testing.assert_close(got, want)

    variants: dict[str, Call | None] = {
        "memcpy": lambda: copy.copy_(plain),
        "op, plain input": lambda: one_shot.default(plain, "sum", name),
        "op, symmetric input": lambda: one_shot.default(shared, "sum", name),
        "op, with a gradient": lambda: one_shot(leaf, "sum", name),
    }
    for backend, of in on.items():
        variants[f"dist, {backend}"] = TorchRival(of).all_reduce(torch.zeros(count))
        variants[f"functional in place, {backend}"] = _in_place(torch.zeros(count), of)
    for rival, its in rivals.items():
        variants[rival] = its.all_reduce(torch.zeros(count))
    return Case(f"all_reduce {_size(kib)}", _without_none(variants), check)


def _all_gather_case(
    group: dist.ProcessGroup, on: Mapping[str, dist.ProcessGroup], rivals: Rivals, kib: int
) -> Case:
    gather, wait = _ops._low_contention_all_gather.default, _functional.wait_tensor.default
    name, count = group.group_name, kib * _KIB // 4
    shard, copy = torch.randn(count), torch.zeros(group.size() * count)
    shared = symmetric(shard, group)
    full = torch.zeros_like(copy)
    theirs = {rival: its.all_gather(torch.zeros_like(copy), shard) for rival, its in rivals.items()}

    def check() -> None:
        dist.all_gather_into_tensor(full, shard, group=group)
        for tensor in (shard, shared):
            assert torch.equal(wait(gather(tensor, name)), full)
        checked = [*rivals.values(), *(TorchRival(on[key]) for key in on if key != _FAKE)]
        for rival in checked:
            out = torch.zeros_like(full)
            if (call := rival.all_gather(out, shard)) is not None:
                call()
                assert torch.equal(out, full)

    variants: dict[str, Call | None] = {
        "memcpy": lambda: copy.copy_(full),
        "op, plain input": lambda: wait(gather(shard, name)),
        "op, symmetric input": lambda: wait(gather(shared, name)),
    }
    for backend, of in on.items():
        variants[f"dist, {backend}"] = TorchRival(of).all_gather(torch.zeros_like(copy), shard)
    return Case(f"all_gather {_size(kib)}", _without_none({**variants, **theirs}), check)


def _reduce_scatter_case(
    group: dist.ProcessGroup, on: Mapping[str, dist.ProcessGroup], rivals: Rivals, kib: int
) -> Case:
    scatter = _ops.reduce_scatter_out.default
    name, count = group.group_name, kib * _KIB // 4
    full = torch.randn(group.size() * count)
    shared = symmetric(full, group)
    out, copy = torch.zeros(count), torch.zeros(count)
    theirs = {rival: its.reduce_scatter(torch.zeros(count), full) for rival, its in rivals.items()}

    def check() -> None:
        want = torch.zeros(count)
        dist.reduce_scatter_tensor(want, full, group=group)
        for tensor in (full, shared):
            torch.testing.assert_close(scatter(tensor, name, False, out), want)
        checked = [*rivals.values(), *(TorchRival(on[key]) for key in on if key != _FAKE)]
        for rival in checked:
            got = torch.zeros(count)
            if (call := rival.reduce_scatter(got, full)) is not None:
                call()
                torch.testing.assert_close(got, want)

    variants: dict[str, Call | None] = {
        "memcpy": lambda: copy.copy_(out),
        "op, plain input": lambda: scatter(full, name, False, out),
        "op, symmetric input": lambda: scatter(shared, name, False, out),
    }
    for backend, of in on.items():
        variants[f"dist, {backend}"] = TorchRival(of).reduce_scatter(torch.zeros(count), full)
    return Case(f"reduce_scatter {_size(kib)}", _without_none({**variants, **theirs}), check)


def _message_case(
    group: dist.ProcessGroup, on: Mapping[str, dist.ProcessGroup], rivals: Rivals, kib: int
) -> Case:
    """A message from rank 0 to rank 1, and back."""
    count = kib * _KIB // 4
    sent, copy, back = torch.randn(count), torch.zeros(count), torch.zeros(count)
    theirs = {rival: its.message(torch.zeros(count), sent) for rival, its in rivals.items()}

    def check() -> None:
        expected = torch.zeros(count)
        dist.broadcast(expected.copy_(sent), 0, group=group)
        checked = [*rivals.values(), TorchRival(on["symm_cp"])]
        for rival in checked:
            got = torch.zeros(count)
            if (call := rival.message(got, sent)) is not None:
                call()
                assert group.rank() > 1 or torch.equal(got, expected)

    def two_copies() -> None:
        copy.copy_(sent)
        back.copy_(copy)

    variants: dict[str, Call | None] = {"memcpy, twice": two_copies}
    variants["dist, symm_cp"] = TorchRival(on["symm_cp"]).message(torch.zeros(count), sent)
    return Case(f"message and back {_size(kib)}", _without_none({**variants, **theirs}), check)


_KINDS: dict[str, Callable[..., Case]] = {
    "all_reduce": _all_reduce_case,
    "all_gather": _all_gather_case,
    "reduce_scatter": _reduce_scatter_case,
    "message": _message_case,
}


def cases(group: dist.ProcessGroup, rivals: Rivals) -> Iterator[Case]:
    """Yields all cases."""
    handle = symm_mem.rendezvous(symm_mem.empty(1, device="cpu"), group)
    yield Case("barrier", {"handle": handle.barrier}, inner=2000)
    on = groups_over(group, "symm_cp", _FAKE)
    for make in _KINDS.values():
        for kib in SIZES:
            case = make(group, on, rivals, kib)
            case.inner, case.most = 0, 400
            yield case


def _cell(row: Mapping[str, Any], name: str, statistic: str) -> str:
    """Returns microseconds and, for our variants, the ratio to the best rival."""
    if name not in row[statistic]:
        return ""
    took = row[statistic][name]
    best = min((row[statistic][rival] for rival in NAMES if rival in row[statistic]), default=0.0)
    ratio = f" ({took / best:.2f})" if best and name not in (*NAMES, "memcpy") else ""
    return f"{took * 1e3:.4g}{ratio}"


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns medians and minima in microseconds, with the ratios to the best rival."""
    lines = []
    for kind in _KINDS:
        of_kind = [row for row in rows if row["case"].startswith(f"{kind} ")]
        if not of_kind:  # --case leaves it out
            continue
        names = list(of_kind[0]["ms"])
        lines += ["", f"| {kind}, us (ratio to the best rival) | {' | '.join(names)} |"]
        lines.append("| --- " * (len(names) + 1) + "|")
        for row in of_kind:
            for statistic, label in (("ms", "median"), ("ms_min", "minimum")):
                cells = [_cell(row, name, statistic) for name in names]
                size = row["case"].removeprefix(f"{kind} ")
                lines.append(f"| {size}, {label} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main(cases, __doc__, against=True, summary=table)
