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
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.harness import Case, main
from benchmarks.rivals import NAMES, Call, Rival, TorchRival
from symm_cp.commands.bench import jobs
from symm_cp.commands.bench.jobs import Setting, groups_over
from symm_cp.commands.harness.measure import FUSED, IN_PLACE, LIMIT, unfused_over
from symm_cp.ops.direct import direct

_KIB = 1024
#: KiB of a tensor to sum, of a rank's input to an all-gather, or result of a reduce-scatter.
SIZES = (1, 8, 32, 64, 128, 512, 4096, 32768)

# Registers "fake", a backend that does nothing: it shows the time of torch's wrappers.
_FAKE = importlib.import_module("torch.testing._internal.distributed.fake_pg") and "fake"

_functional = torch.ops._c10d_functional

Rivals = Mapping[str, Rival]


def _size(kib: int) -> str:
    return f"{kib} KiB" if kib < _KIB else f"{kib // _KIB} MiB"


def _without_none(variants: Mapping[str, Call | None]) -> dict[str, Call]:
    return {name: call for name, call in variants.items() if call is not None}


#: The names of the variants of `jobs` in tables: "dist" is the backend through torch.distributed.
_NAMES = {
    LIMIT: "memcpy",
    FUSED: "op, plain input",
    IN_PLACE: "op, symmetric input",
    unfused_over("symm_cp"): "dist, symm_cp",
}


def _case(
    kind: str,
    group: dist.ProcessGroup,
    on: Mapping[str, dist.ProcessGroup],
    rivals: Rivals,
    kib: int,
) -> Case:
    """The variants of a collective, and those of the rivals."""
    setting = Setting(group, {"symm_cp": on["symm_cp"]})
    case = getattr(jobs, kind)(setting, kib * _KIB)
    count, W = kib * _KIB // 4, group.size()
    full, part = torch.zeros(W * count), torch.zeros(count)
    calls: dict[str, Call | None] = {}
    if kind == "all_reduce":
        calls |= _other_all_reduces(group, on, part)
    for name, rival in {**rivals, "dist, fake": TorchRival(on[_FAKE])}.items():
        calls[name] = {
            "all_reduce": lambda rival=rival: rival.all_reduce(part.clone()),
            "all_gather": lambda rival=rival: rival.all_gather(full.clone(), part),
            "reduce_scatter": lambda rival=rival: rival.reduce_scatter(part.clone(), full),
        }[kind]()
    own_check = case.check

    def check() -> None:
        own_check()
        for rival in rivals.values():
            _check(kind, group, rival, count)

    variants = {_NAMES[name]: run for name, run in case.variants.items()} | _without_none(calls)
    return Case(f"{kind} {_size(kib)}", variants, check)


def _other_all_reduces(
    group: dist.ProcessGroup, on: Mapping[str, dist.ProcessGroup], zeros: torch.Tensor
) -> dict[str, Call | None]:
    """The op with a gradient, as vLLM calls it, in place, and functional collectives in place."""
    leaf, plain, in_place = zeros.clone().requires_grad_(), zeros.clone(), zeros.clone()
    one_shot, name = torch.ops.symm_mem.one_shot_all_reduce, group.group_name
    new, into = direct("one_shot_all_reduce"), direct("one_shot_all_reduce_out")
    calls: dict[str, Call | None] = {
        "op, with a gradient": lambda: one_shot(leaf, "sum", name),
        "in vLLM's plug-in": lambda: new(plain, "sum", name),
        "the same, in place": lambda: into(in_place, "sum", name, in_place),
    }
    all_reduce, wait = _functional.all_reduce_.default, _functional.wait_tensor.default
    for backend, of in on.items():
        calls[f"functional in place, {backend}"] = partial(
            lambda tensor, over: wait(all_reduce(tensor, "sum", over)), zeros.clone(), of.group_name
        )
    return calls


def _check(kind: str, group: dist.ProcessGroup, rival: Rival, count: int) -> None:
    """Compares a rival's result with gloo's."""
    W = group.size()
    sent = torch.randn(count if kind != "reduce_scatter" else W * count)
    got = torch.empty(W * count if kind == "all_gather" else count)
    want, gloo = torch.empty_like(got), TorchRival(group)
    for of, out in ((gloo, want), (rival, got)):
        if kind == "all_reduce":
            call = of.all_reduce(out.copy_(sent))
        else:
            call = getattr(of, kind)(out, sent)
        if call is None:
            return
        call()
    torch.testing.assert_close(got, want)


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
    **{kind: partial(_case, kind) for kind in ("all_reduce", "all_gather", "reduce_scatter")},
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
                signal = f"signal {max(row['signal_ns']):.0f} ns"
                lines.append(f"| {size}, {label}, {signal} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main(cases, __doc__, against=True, summary=table)
