"""Parses the jobs of a command line: models by name, explicit shapes, or sizes in bytes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

from symm_cp.commands.bench import jobs
from symm_cp.commands.bench.jobs import Setting
from symm_cp.commands.harness.measure import Case

#: Makes a case.
Job: TypeAlias = Callable[[Setting], Case]


@dataclass(frozen=True)
class Model:
    """The sizes of a decoder with grouped-query attention and a gated feed-forward layer."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    feed_forward: int


#: Sources: the models' configurations as published by Meta (Llama 3) and Alibaba (Qwen 3).
MODELS = {
    "llama3-8b": Model(4096, 32, 8, 128, 14336),
    "llama3-70b": Model(8192, 64, 8, 128, 28672),
    "qwen3-32b": Model(5120, 64, 8, 128, 25600),
}
_UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


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


def wanted(kind: str, shapes: str, ranks: int, tokens: int) -> Iterator[Job]:
    """Yields the jobs of a kind. `tokens` is the number on all ranks, for models by name.

    Raises `ValueError` for malformed shapes, and for sizes not divisible by the number of ranks.
    """
    for shape in shapes.split(","):
        if kind == "matmul":
            yield from _matmuls(shape, ranks, tokens)
        elif kind == "attention":
            yield from _attention(shape, ranks, tokens)
        else:
            size = nbytes(shape)
            for make in (jobs.all_reduce, jobs.all_gather, jobs.reduce_scatter):
                yield partial(make, nbytes=size)


def _split(name: str, size: int, ranks: int) -> int:
    if size % ranks:
        raise ValueError(f"{name}: {size} is not divisible by {ranks} ranks")
    return size // ranks


def _matmuls(shape: str, ranks: int, tokens: int) -> Iterator[Job]:
    model = MODELS.get(shape)
    if model is None:
        rows, inner, columns = _numbers(shape, "ROWSxINNERxCOLUMNS")
        for make in (jobs.gather_matmul, jobs.matmul_scatter, jobs.matmul_all_reduce):
            yield partial(make, rows=rows, inner=inner, columns=columns)
        return
    rows = _split("tokens", tokens, ranks)
    query = _split(f"{shape}, query features", model.heads * model.head_dim, ranks)
    shared = _split(f"{shape}, key features", model.kv_heads * model.head_dim, ranks)
    feed = _split(f"{shape}, feed-forward features", model.feed_forward, ranks)
    for make, inner, columns in (
        (jobs.gather_matmul, model.hidden, query + 2 * shared),
        (jobs.matmul_scatter, query, model.hidden),
        (jobs.gather_matmul, model.hidden, 2 * feed),
        (jobs.matmul_scatter, feed, model.hidden),
    ):
        yield partial(make, rows=rows, inner=inner, columns=columns)


def _attention(shape: str, ranks: int, tokens: int) -> Iterator[Job]:
    model = MODELS.get(shape)
    if model is not None:
        length = _split("tokens", tokens, ranks)
        heads, kv_heads, head_dim = model.heads, model.kv_heads, model.head_dim
    else:
        length, heads, head_dim, *rest = _numbers(shape, "TOKENSxHEADSxHEAD_DIM", 4)
        kv_heads = rest[0] if rest else heads
        if heads % kv_heads:
            raise ValueError(f"{shape}: {heads} heads are not divisible by {kv_heads} key heads")
    make = partial(jobs.attention, tokens=length, heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    yield make
    yield lambda setting: make(replace(setting, passes=jobs.BACKWARD))
