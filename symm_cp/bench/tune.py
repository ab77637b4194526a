"""`symm-cp tune`: measures which way ops should take, for shapes that are used a lot."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

import symm_cp
from symm_cp import launch, native, trusted, tuning
from symm_cp.bench import measure, report, shapes
from symm_cp.bench.command import DTYPES
from symm_cp.bench.jobs import Setting
from symm_cp.bench.measure import duration
from symm_cp.schedule.layout import head_tail_order

HELP = "measure which way fused ops should take here, and remember it"

Run = Callable[[], object]
Runs = Iterator[tuple[str, Run]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `symm-cp tune`."""
    add = parser.add_argument
    kinds = ("matmul", "attention")
    add("kind", nargs="?", choices=kinds, default=kinds[0], help="attention: on CUDA (%(default)s)")
    add("--shapes", help="as for symm-cp bench")
    add("--tokens", type=launch.positive, help="of all ranks, for models (512; CUDA: 8192)")
    add("--ranks", type=launch.positive, default=2, help="(%(default)s)")
    add("--dtype", choices=sorted(DTYPES), default="float32", help="(%(default)s)")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="(%(default)s)")
    add("--seconds", type=float, default=1.0, help="for each op, about (%(default)s)")
    add("--out", type=Path, help="the file (default: where the ops look for it)")
    launch.add_rendezvous(parser)


def _sizes(given: argparse.Namespace) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yields what is to be measured: the kind of op and its sizes."""
    tokens = given.tokens or shapes.TOKENS[given.device]
    for shape in (given.shapes or shapes.DEFAULTS[given.kind]).split(","):
        if given.kind == "attention":
            yield "attention", shapes.attention_sizes(shape, given.ranks, tokens)
        else:
            yield from shapes.products(shape, given.ranks, tokens)


def check(given: argparse.Namespace) -> None:
    """Raises `ValueError` for arguments that do not fit, before anything is started."""
    if given.kind == "attention" and (given.device == "cpu" or given.dtype != "bfloat16"):
        raise ValueError("attention has two ways with --device cuda and --dtype bfloat16 only")
    launch.check_device(given.device)
    list(_sizes(given))


def main(given: argparse.Namespace) -> int:
    """Runs `symm-cp tune`; returns 0 when all was measured and written."""
    if launch.is_rank():
        launch.leave(launch.as_rank(lambda group: _rank(given, group), given.rendezvous))
    try:
        check(given)
        native.load()
        _measured_before(given.out, given.ranks)
    except (ValueError, RuntimeError, OSError) as error:
        print(f"symm-cp tune: {error}", file=sys.stderr)
        return 2
    return launch.run_ranks("tune", given.ranks, given.arguments)


def _matmuls(setting: Setting, kind: str, sizes: tuple[int, ...]) -> Runs:
    """The op of a kind, and the one of its gradient that gathers again."""
    rows, inner, columns = sizes
    ops, name, all_rows = torch.ops.symm_mem, setting.name, setting.ranks * sizes[0]
    what = "x".join(map(str, sizes))
    weight = setting.normal(inner, columns)
    if kind == "all-gather-matmul":
        x, grad = setting.normal(rows, inner), setting.normal(all_rows, columns)
        gather = partial(ops.fused_all_gather_matmul, x, [weight], 0, name, return_A=False)
        yield f"{kind}, {what}", gather
        again = partial(ops._fused_all_gather_weight_grad, x, [grad], 0, name)
        yield f"its weight's gradient, {what}", again
    else:
        x, grad = setting.normal(all_rows, inner), setting.normal(rows, columns)
        scatter = partial(ops.fused_matmul_reduce_scatter, x, weight, "sum", 0, name)
        yield f"{kind}, {what}", scatter
        backward = ops._fused_matmul_reduce_scatter_backward
        again = partial(backward, grad, x, weight, "sum", 0, name, True, True)
        yield f"its gradient, {what}", again


def _attentions(setting: Setting, sizes: tuple[int, ...]) -> Runs:
    """Without a mask, and causal with the chunks of `HeadTail`."""
    tokens, heads, kv_heads, features = sizes
    q = setting.normal(1, heads, tokens, features)
    k, v = (setting.normal(1, kv_heads, tokens, features) for _ in range(2))
    op = partial(torch.ops.symm_mem.fused_all_gather_attention, q, k, v, setting.name)
    what = "x".join(map(str, sizes))
    yield f"attention, {what}", partial(op, enable_gqa=True)
    order = list(head_tail_order(setting.ranks))
    if tokens % 2 == 0:
        causal = partial(op, enable_gqa=True, is_causal=True, chunk_order=order)
        yield f"causal attention, {what}", causal


def _runs(given: argparse.Namespace, setting: Setting) -> Runs:
    for kind, sizes in _sizes(given):
        yield from (
            _attentions(setting, sizes) if kind == "attention" else _matmuls(setting, kind, sizes)
        )


def _measured(
    setting: Setting, run: Run, ways: tuple[str, ...], seconds: float
) -> dict[str, float]:
    def forced(way: str) -> Run:
        def go() -> object:
            with tuning.forced(way):
                return run()

        return go

    case = setting.case("", {way: forced(way) for way in ways})
    row = measure.measure(case, setting.group, seconds)
    return {way: row.median(way) for way in ways}


def _measured_before(out: Path | None, ranks: int) -> dict[str, str]:
    """What is in the file that is going to be written; raises `ValueError` and `OSError`."""
    path = out or tuning.tuned_path(ranks)
    try:
        text = trusted.read(path) if out is None else out.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return {}
    return tuning.parse_tuned(text.decode(errors="replace"), str(path))


def _rank(given: argparse.Namespace, group: dist.ProcessGroup) -> int:
    if given.kind == "attention" and group.size() > torch.cuda.device_count():
        print("symm-cp tune: a kernel that polls needs a GPU for each rank", file=sys.stderr)
        return 1
    setting = Setting(group, DTYPES[given.dtype], given.device)
    found = _measured_before(given.out, setting.ranks) if group.rank() == 0 else {}
    with symm_cp.override_cuda_ops() if setting.cuda else nullcontext():
        for what, run in _runs(given, setting):
            with tuning.listening() as heard:
                run()
            if not heard:
                _say(group, f"{what}: there is one way only")
                continue
            ((key, choice),) = heard.items()
            ways = tuning.ATTENTION_WAYS if given.kind == "attention" else tuning.WAYS
            taken = _measured(setting, run, ways, given.seconds)
            found[key] = min(taken, key=taken.__getitem__)
            cells = ", ".join(f"{way} {duration(taken[way])}" for way in ways)
            _say(group, f"{what}: {cells}: {found[key]}; it was {choice}")
    if group.rank() == 0:
        text = json.dumps(found, indent=1, sort_keys=True) + "\n"
        print(report.keep(given.out, partial(tuning.tuned_path, setting.ranks), text))
    return 0


def _say(group: dist.ProcessGroup, text: str) -> None:
    if group.rank() == 0:
        print(text, flush=True)
