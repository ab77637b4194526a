"""Measures as the ranks of `symm-cp tune`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial

import torch
import torch.distributed as dist

import symm_cp
from symm_cp import trusted, tuning
from symm_cp.commands.harness import measure
from symm_cp.commands.harness.start import run_command
from symm_cp.ranks import check_device
from symm_cp.schedule.layout import head_tail_order

Calls = Iterator[tuple[str, Callable[[], object]]]


def _sizes(args: argparse.Namespace) -> list[tuple[int, ...]]:
    if args.shapes:
        return args.shapes
    tokens, W = 8192 // args.ranks, args.ranks
    if args.kind == "attention":
        return [(tokens, 32, 8, 128)]
    gathers = [(tokens, 4096, 6144 // W), (tokens, 4096, 28672 // W)]
    return [*gathers, (tokens, 4096 // W, 4096), (tokens, 14336 // W, 4096)]


def check(args: argparse.Namespace) -> None:
    """Raises `ValueError` for invalid arguments, before any rank starts."""
    if args.kind == "attention" and args.device == "cpu":
        raise ValueError("attention has several algorithms only with --device cuda")
    count = 4 if args.kind == "attention" else 3
    if wrong := [sizes for sizes in _sizes(args) if len(sizes) != count]:
        raise ValueError(f"--shapes {'x'.join(map(str, wrong[0]))}: must be {count} numbers")
    check_device(args.device)
    _read(args.ranks)


def main(args: argparse.Namespace) -> int:
    """Runs `symm-cp tune`; returns 0 if the file was written."""
    return run_command(args, check, run_rank)


def _read(ranks: int) -> dict[str, str]:
    """Reads the table, if there is one; raises `ValueError` and `OSError`."""
    path = tuning.tuned_path(ranks)
    try:
        text = trusted.read(path).decode(errors="replace")
    except (FileNotFoundError, NotADirectoryError):
        return {}
    return tuning.parse_tuned(text, str(path))


def _matmuls(
    new: Callable[..., torch.Tensor], ranks: int, name: str, sizes: tuple[int, ...]
) -> Calls:
    """Yields the fused matmuls of a shape, and their gradients' ops."""
    rows, inner, columns = sizes
    ops, weight = torch.ops.symm_mem, new(inner, columns)
    shard, all_grads = new(rows, inner), new(ranks * rows, columns)
    gather = partial(ops.fused_all_gather_matmul, shard, [weight], 0, name, return_A=False)
    yield "all-gather-matmul", gather
    again = partial(ops._fused_all_gather_weight_grad, shard, [all_grads], 0, name)
    yield "weight gradient", again
    x, grad = new(ranks * rows, inner), new(rows, columns)
    scatter = partial(ops.fused_matmul_reduce_scatter, x, weight, "sum", 0, name)
    yield "matmul-reduce-scatter", scatter
    backward = ops._fused_matmul_reduce_scatter_backward
    yield "its gradient", partial(backward, grad, x, weight, "sum", 0, name, True, True)
    yield "matmul-all-reduce", partial(ops.fused_matmul_all_reduce, x, weight, None, "sum", name)


def _attentions(
    new: Callable[..., torch.Tensor], ranks: int, name: str, sizes: tuple[int, ...]
) -> Calls:
    """Yields attention without a mask, and causal attention with the chunks of `HeadTail`."""
    tokens, heads, kv_heads, features = sizes
    q = new(1, heads, tokens, features)
    k, v = (new(1, kv_heads, tokens, features) for _ in range(2))
    op = partial(torch.ops.symm_mem.fused_all_gather_attention, q, k, v, name, enable_gqa=True)
    yield "attention", op
    order = list(head_tail_order(ranks))
    if tokens % 2 == 0:
        yield "causal attention", partial(op, is_causal=True, chunk_order=order)


def run_rank(args: argparse.Namespace, group: dist.ProcessGroup) -> int:
    """Measures as one of the ranks; rank 0 writes the file."""
    ranks, cuda = group.size(), args.device == "cuda"
    dtype = getattr(torch, args.dtype)
    fastest = _read(ranks) if group.rank() == 0 else {}

    def new(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=args.device).to(dtype)

    calls = _attentions if args.kind == "attention" else _matmuls
    with symm_cp.override_cuda_ops() if cuda else nullcontext():
        for sizes in _sizes(args):
            for op, run in calls(new, ranks, str(group.group_name), sizes):
                text = f"{op}, {'x'.join(map(str, sizes))}: {_tuned(args, group, run, fastest)}"
                if group.rank() == 0:
                    print(text, flush=True)
    if group.rank() == 0:
        path = tuning.tuned_path(ranks)
        trusted.write(path, (json.dumps(fastest, indent=1, sort_keys=True) + "\n").encode())
        print(path)
    return 0


def _tuned(
    args: argparse.Namespace,
    group: dist.ProcessGroup,
    run: Callable[[], object],
    fastest: dict[str, str],
) -> str:
    """Measures an op's algorithms, notes the fastest; returns the line to print."""
    with tuning.listening() as choices:
        run()
    if not choices:
        return "only one algorithm"
    ((key, before),) = choices.items()
    of_matmuls = (*tuning.ALGORITHMS, tuning.LANES)
    known = tuning.ATTENTION_ALGORITHMS if args.kind == "attention" else of_matmuls
    algorithms = [
        algorithm
        for algorithm in known
        if before is not tuning.IN_ONE_CALL and _serves(algorithm, run, key)
    ]
    if len(algorithms) < 2:
        return str(before)
    wait = torch.cuda.synchronize if args.device == "cuda" else lambda: None
    variants = {algorithm: partial(_as_forced, algorithm, run) for algorithm in algorithms}
    row = measure.measure(measure.Case("", variants, synchronize=wait), group, args.seconds)
    fastest[key] = min(algorithms, key=row.median)
    cells = ", ".join(
        f"{algorithm} {measure.duration(row.median(algorithm))}" for algorithm in algorithms
    )
    return f"{cells}: {fastest[key]}; before: {before}"


def _as_forced(algorithm: str, run: Callable[[], object]) -> None:
    with tuning.forced(algorithm):
        run()


def _serves(algorithm: str, run: Callable[[], object], key: str) -> bool:
    with tuning.forced(algorithm), tuning.listening() as choices:
        run()
    return choices[key].algorithm == algorithm
