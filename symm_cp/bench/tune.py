"""`symm-cp tune`: measures which way fused matmuls should take, for shapes that are used a lot."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from symm_cp import launch, native, tuning
from symm_cp.bench import measure, shapes
from symm_cp.bench.command import DTYPES
from symm_cp.bench.measure import Case, duration

HELP = "measure which way fused matmuls should take here, and remember it"

Runs = Iterator["tuple[str, Callable[[], object]]"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `symm-cp tune`."""
    add = parser.add_argument
    add("--shapes", default=shapes.DEFAULTS["matmul"], help="as for symm-cp bench matmul")
    add("--tokens", type=launch.positive, default=512, help="of all ranks, for models (512)")
    add("--ranks", type=launch.positive, default=2, help="(%(default)s)")
    add("--dtype", choices=sorted(DTYPES), default="float32", help="(%(default)s)")
    add("--seconds", type=float, default=1.0, help="for each op, about (%(default)s)")
    add("--out", type=Path, help="the file (default: where the ops look for it)")
    launch.add_rendezvous(parser)


def main(given: argparse.Namespace) -> int:
    """Runs `symm-cp tune`; returns 0 when all was measured and written."""
    if launch.is_rank():
        launch.leave(launch.as_rank(lambda group: _rank(given, group), given.rendezvous))
    try:
        list(shapes.products(given.shapes, given.ranks, given.tokens))
        native.load()
    except (ValueError, native.BuildError) as error:
        print(f"symm-cp tune: {error}", file=sys.stderr)
        return 2
    return launch.run_ranks("tune", given.ranks, given.arguments)


def _runs(kind: str, sizes: tuple[int, int, int], dtype: torch.dtype, name: str) -> Runs:
    """The op of a kind, and the one of its gradient that gathers again."""
    rows, inner, columns = sizes
    ops = torch.ops.symm_mem
    ranks = dist.get_world_size()
    weight = torch.randn(inner, columns).to(dtype)
    if kind == "all-gather-matmul":
        x, grad = torch.randn(rows, inner).to(dtype), torch.randn(ranks * rows, columns).to(dtype)
        gather = partial(ops.fused_all_gather_matmul, x, [weight], 0, name, return_A=False)
        yield kind, gather
        yield (
            "its weight's gradient",
            partial(ops._fused_all_gather_weight_grad, x, [grad], 0, name),
        )
    else:
        x, grad = torch.randn(ranks * rows, inner).to(dtype), torch.randn(rows, columns).to(dtype)
        yield kind, partial(ops.fused_matmul_reduce_scatter, x, weight, "sum", 0, name)
        backward = ops._fused_matmul_reduce_scatter_backward
        yield "its gradient", partial(backward, grad, x, weight, "sum", 0, name, True, True)


def _measured(
    run: Callable[[], object], group: dist.ProcessGroup, seconds: float
) -> dict[str, float]:
    def forced(way: str) -> Callable[[], object]:
        def go() -> object:
            with tuning.forced(way):
                return run()

        return go

    row = measure.measure(Case("", {way: forced(way) for way in tuning.WAYS}), group, seconds)
    return {way: row.median(way) for way in tuning.WAYS}


def _rank(given: argparse.Namespace, group: dist.ProcessGroup) -> int:
    ranks, rank = group.size(), group.rank()
    path: Path = given.out or tuning.tuned_path(ranks)
    found: dict[str, str] = json.loads(path.read_text()) if path.is_file() else {}
    name = str(group.group_name)
    for kind, sizes in shapes.products(given.shapes, given.ranks, given.tokens):
        for op, run in _runs(kind, sizes, DTYPES[given.dtype], name):
            with tuning.listening() as heard:
                run()
            ((key, choice),) = heard.items()
            taken = _measured(run, group, given.seconds)
            found[key] = min(taken, key=taken.__getitem__)
            if rank == 0:
                cells = ", ".join(f"{way} {duration(taken[way])}" for way in tuning.WAYS)
                what = f"{op}, {'x'.join(map(str, sizes))}"
                print(f"{what}: {cells}: {found[key]}; it was {choice}", flush=True)
    if rank == 0:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        scratch = path.with_suffix(".new")
        scratch.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
        scratch.replace(path)
        print(path)
    return 0
