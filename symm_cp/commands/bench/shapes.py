"""Parses the jobs of a command line: models by name, explicit shapes, or sizes in bytes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from symm_cp.commands.bench import jobs
from symm_cp.commands.bench.jobs import Job, Setting
from symm_cp.commands.bench.models import MODELS
from symm_cp.commands.bench.parsers import DEFAULTS, KINDS

__all__ = ["DEFAULTS", "KINDS", "TOKENS", "Wanted", "nbytes", "products", "wanted"]

#: The default of `--tokens`, the tokens of all ranks together.
TOKENS = {"cpu": 512, "cuda": 8192}

_UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


@dataclass(frozen=True)
class Wanted:
    """A job that `make` makes; `size`, in `unit`, is for the axis of plots."""

    kind: str
    size: float
    unit: str
    make: Callable[[Setting], Job]


def nbytes(text: str) -> int:
    """Returns the number of bytes in "64 MiB" or "64MiB"; raises `ValueError` for other texts."""
    match = re.fullmatch(r"(\d+)\s*(B|KiB|MiB|GiB)", text)
    if match is None:
        raise ValueError(f"{text!r} is not a size, such as 4KiB or 64MiB")
    return int(match[1]) * _UNITS[match[2]]


def _numbers(text: str, names: str, max_count: int | None = None) -> list[int]:
    parts = text.split("x")
    count = len(names.split("x"))
    right_count = count <= len(parts) <= (max_count or count)
    if not (right_count and all(part.isdigit() and int(part) > 0 for part in parts)):
        raise ValueError(f"{text!r} is not a shape {names}, such as 512x1024x512")
    return [int(part) for part in parts]


def wanted(kind: str, shapes: str, ranks: int, tokens: int) -> Iterator[Wanted]:
    """Yields the jobs of a kind. `tokens` is the number on all ranks, for models by name.

    Raises `ValueError` for malformed shapes, and for sizes not divisible by the number of ranks.
    """
    for shape in shapes.split(","):
        if kind == "matmul":
            yield from _matmuls(shape, ranks, tokens)
        elif kind == "attention":
            yield from _attention(shape, ranks, tokens)
        elif kind == "collectives":
            size = nbytes(shape)
            make = partial(jobs.all_gather, nbytes=size)
            yield Wanted("all-gather", size, "bytes a rank", make)
            make = partial(jobs.reduce_scatter, nbytes=size)
            yield Wanted("reduce-scatter", size, "bytes a rank", make)
        else:
            dim, layers, length = _numbers(shape, "FEATURESxLAYERSxTOKENS")
            jobs.train_options(ranks, dim, layers, length)
            make_case = partial(jobs.train, dim=dim, layers=layers, tokens=length)
            yield Wanted("train", 12 * dim * dim * layers * length, "operations", make_case)


def _split(name: str, size: int, ranks: int) -> int:
    if size % ranks:
        raise ValueError(f"{name}: {size} is not divisible by {ranks} ranks")
    return size // ranks


def products(
    wanted_shapes: str, ranks: int, tokens: int
) -> Iterator[tuple[str, tuple[int, int, int]]]:
    """Yields the fused matmuls of shapes as kind, (rows of a rank, inner dimension, columns).

    Raises `ValueError` as `wanted` does.
    """
    gather, scatter, reduce = "all-gather-matmul", "matmul-reduce-scatter", "matmul-all-reduce"
    for shape in wanted_shapes.split(","):
        model = MODELS.get(shape)
        if model is None:
            rows, inner, columns = _numbers(shape, "ROWSxINNERxCOLUMNS")
            yield gather, (rows, inner, columns)
            yield scatter, (rows, inner, columns)
            yield reduce, (rows, inner, columns)
            continue
        rows = _split("tokens", tokens, ranks)
        query = _split(f"{shape}, query features", model.query, ranks)
        shared = _split(f"{shape}, key features", model.shared, ranks)
        feed = _split(f"{shape}, feed-forward features", model.feed_forward, ranks)
        yield gather, (rows, model.hidden, query + 2 * shared)
        yield scatter, (rows, query, model.hidden)
        yield gather, (rows, model.hidden, 2 * feed)
        yield scatter, (rows, feed, model.hidden)


def _matmuls(shape: str, ranks: int, tokens: int) -> Iterator[Wanted]:
    makers = {
        "all-gather-matmul": jobs.gather_matmul,
        "matmul-reduce-scatter": jobs.matmul_scatter,
        "matmul-all-reduce": jobs.matmul_all_reduce,
    }
    for kind, (rows, inner, columns) in products(shape, ranks, tokens):
        make = partial(makers[kind], rows=rows, inner=inner, columns=columns)
        yield Wanted(kind, 2.0 * ranks * rows * inner * columns, "operations", make)


def attention_sizes(shape: str, ranks: int, tokens: int) -> tuple[int, int, int, int]:
    """Returns the tokens of a rank, query heads, key heads, and features of a head.

    Raises `ValueError` as `wanted` does.
    """
    model = MODELS.get(shape)
    if model is not None:
        length = _split("tokens", tokens, ranks)
        return length, model.heads, model.kv_heads, model.head_dim
    length, heads, head_dim, *rest = _numbers(shape, "TOKENSxHEADSxHEAD_DIM", 4)
    kv_heads = rest[0] if rest else heads
    if heads % kv_heads:
        raise ValueError(f"{shape}: {heads} heads are not divisible by {kv_heads} key heads")
    return length, heads, kv_heads, head_dim


def _attention(shape: str, ranks: int, tokens: int) -> Iterator[Wanted]:
    length, heads, kv_heads, head_dim = attention_sizes(shape, ranks, tokens)
    operations = 4.0 * heads * ranks * length * length * head_dim
    for kind, make, times in (
        ("attention", jobs.attention, 1.0),
        ("attention-backward", jobs.attention_backward, 2.5),
    ):
        wanted_job = partial(make, tokens=length, heads=heads, kv_heads=kv_heads, head_dim=head_dim)
        yield Wanted(kind, times * operations, "operations", wanted_job)
