"""`symm-cp tune`: measures an op's fastest strategy for frequently used shapes."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

import symm_cp
from symm_cp import trusted, tuning
from symm_cp.commands.bench import shapes
from symm_cp.commands.bench.command import DTYPES
from symm_cp.commands.bench.jobs import Setting
from symm_cp.commands.harness import measure, report
from symm_cp.commands.harness.measure import duration
from symm_cp.commands.harness.start import run_command
from symm_cp.ranks import (
    check_device,
)
from symm_cp.schedule.layout import head_tail_order

Run = Callable[[], object]
Runs = Iterator[tuple[str, Run]]


def _sizes(args: argparse.Namespace) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yields the kind of each op to measure, and its sizes."""
    tokens = args.tokens or shapes.TOKENS[args.device]
    for shape in (args.shapes or shapes.DEFAULTS[args.kind]).split(","):
        if args.kind == "attention":
            yield "attention", shapes.attention_sizes(shape, args.ranks, tokens)
        else:
            yield from shapes.products(shape, args.ranks, tokens)


def check(args: argparse.Namespace) -> None:
    """Raises `ValueError` for invalid arguments, before any rank starts."""
    if args.kind == "attention" and (args.device == "cpu" or args.dtype != "bfloat16"):
        raise ValueError("attention has two ways only with --device cuda and --dtype bfloat16")
    check_device(args.device)
    list(_sizes(args))
    _read_tuned(args.out, args.ranks)


def main(args: argparse.Namespace) -> int:
    """Runs `symm-cp tune`; returns 0 if the file was written."""
    return run_command(args, check, run_rank)


def _matmuls(setting: Setting, kind: str, sizes: tuple[int, ...]) -> Runs:
    """Yields the op of a kind, and its gradient's op that gathers again."""
    rows, inner, columns = sizes
    ops, name, all_rows = torch.ops.symm_mem, setting.name, setting.ranks * sizes[0]
    shape = "x".join(map(str, sizes))
    weight = setting.normal(inner, columns)
    if kind == "all-gather-matmul":
        x, grad = setting.normal(rows, inner), setting.normal(all_rows, columns)
        gather = partial(ops.fused_all_gather_matmul, x, [weight], 0, name, return_A=False)
        yield f"{kind}, {shape}", gather
        again = partial(ops._fused_all_gather_weight_grad, x, [grad], 0, name)
        yield f"weight gradient, {shape}", again
    elif kind == "matmul-all-reduce":
        x = setting.normal(all_rows, inner)
        reduce = partial(ops.fused_matmul_all_reduce, x, weight, None, "sum", name)
        yield f"{kind}, {shape}", reduce
    else:
        x, grad = setting.normal(all_rows, inner), setting.normal(rows, columns)
        scatter = partial(ops.fused_matmul_reduce_scatter, x, weight, "sum", 0, name)
        yield f"{kind}, {shape}", scatter
        backward = ops._fused_matmul_reduce_scatter_backward
        again = partial(backward, grad, x, weight, "sum", 0, name, True, True)
        yield f"gradient, {shape}", again


def _attentions(setting: Setting, sizes: tuple[int, ...]) -> Runs:
    """Yields attention without a mask, and causal attention with the chunks of `HeadTail`."""
    tokens, heads, kv_heads, features = sizes
    q = setting.normal(1, heads, tokens, features)
    k, v = (setting.normal(1, kv_heads, tokens, features) for _ in range(2))
    op = partial(torch.ops.symm_mem.fused_all_gather_attention, q, k, v, setting.name)
    shape = "x".join(map(str, sizes))
    yield f"attention, {shape}", partial(op, enable_gqa=True)
    order = list(head_tail_order(setting.ranks))
    if tokens % 2 == 0:
        causal = partial(op, enable_gqa=True, is_causal=True, chunk_order=order)
        yield f"causal attention, {shape}", causal


def _runs(args: argparse.Namespace, setting: Setting) -> Runs:
    for kind, sizes in _sizes(args):
        yield from (
            _attentions(setting, sizes) if kind == "attention" else _matmuls(setting, kind, sizes)
        )


def _ways(setting: Setting, run: Run) -> tuple[str, ...]:
    """Returns the strategies that support a fused matmul here."""
    if not setting.cuda or setting.ranks > torch.cuda.device_count():
        return tuning.WAYS
    with tuning.forced(tuning.TILES), tuning.listening() as choices:
        run()
    served = any(choice.way == tuning.TILES for choice in choices.values())
    return (*tuning.WAYS, tuning.TILES) if served else tuning.WAYS


def _measured(
    setting: Setting, run: Run, ways: tuple[str, ...], seconds: float
) -> dict[str, float]:
    case = setting.case("", {way: measure.forced(way, run) for way in ways})
    row = measure.measure(case, setting.group, seconds)
    return {way: row.median(way) for way in ways}


def _read_tuned(out: Path | None, ranks: int) -> dict[str, str]:
    """Reads the output file's old content, if any; raises `ValueError` and `OSError`."""
    path = out or tuning.tuned_path(ranks)
    try:
        text = trusted.read(path) if out is None else out.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return {}
    return tuning.parse_tuned(text.decode(errors="replace"), str(path))


def run_rank(args: argparse.Namespace, group: dist.ProcessGroup) -> int:
    """Measures as one of the ranks; rank 0 writes the file."""
    setting = Setting(group, DTYPES[args.dtype], args.device)
    fastest = _read_tuned(args.out, setting.ranks) if group.rank() == 0 else {}
    with symm_cp.override_cuda_ops() if setting.cuda else nullcontext():
        for op, run in _runs(args, setting):
            with tuning.listening() as choices:
                run()
            if not choices:
                _print(group, f"{op}: has only one way")
                continue
            ((key, choice),) = choices.items()
            if choice is tuning.IN_ONE_CALL:
                _print(group, f"{op}: {choice}")
                continue
            ways = tuning.ATTENTION_WAYS if args.kind == "attention" else _ways(setting, run)
            seconds = _measured(setting, run, ways, args.seconds)
            fastest[key] = min(seconds, key=seconds.__getitem__)
            cells = ", ".join(f"{way} {duration(seconds[way])}" for way in ways)
            _print(group, f"{op}: {cells}: {fastest[key]}; before: {choice}")
    if group.rank() == 0:
        text = json.dumps(fastest, indent=1, sort_keys=True) + "\n"
        print(report.keep(args.out, partial(tuning.tuned_path, setting.ranks), text))
    return 0


def _print(group: dist.ProcessGroup, text: str) -> None:
    if group.rank() == 0:
        print(text, flush=True)
