"""The arguments of `symm-cp demo`."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from symm_cp.demo.data import read_text
from symm_cp.demo.model import ModelConfig
from symm_cp.launch import add_rendezvous, positive

_DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}
_HEAD_DIMS = (64, 32, 16, 8)
_MIN_HEADS = 4
_HIDDEN_UNIT = 32  # the hidden features of a rank are a multiple of this


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the demo's arguments to a parser."""
    add = parser.add_argument
    add("--ranks", type=positive, help="processes to spread the model over (default: 2)")
    add("--cp", type=positive, default=1, help="ranks that share a sequence (%(default)s)")
    add(
        "--compile",
        action="store_true",
        help="spread the model with torch's collectives, and let torch.compile fuse them",
    )
    add("--steps", type=positive, default=12, help="training steps of each way (%(default)s)")
    add("--text", type=Path, help="file to learn (default: the source of the standard library)")
    add("--dim", type=positive, default=512, help="features of the model (%(default)s)")
    add("--layers", type=positive, default=4, help="layers (%(default)s)")
    add("--seq", type=positive, default=512, help="bytes in a sequence (%(default)s)")
    add("--batch", type=positive, default=4, help="sequences in a batch (%(default)s)")
    add("--dtype", choices=sorted(_DTYPES), default="float32", help="(%(default)s)")
    add("--seed", type=int, default=0, help="of weights and batches (%(default)s)")
    add("--json", type=Path, metavar="FILE", help="write all losses and times there as well")
    add_rendezvous(parser)


@dataclass(frozen=True)
class Options:
    """Checked arguments."""

    ranks: int
    cp: int
    compile: bool
    steps: int
    text: Path | None
    seq: int
    batch: int
    dtype: torch.dtype
    seed: int
    json: Path | None
    rendezvous: Path | None
    model: ModelConfig


def _model_config(dim: int, layers: int, ranks: int) -> ModelConfig:
    for head_dim in _HEAD_DIMS:
        # Each rank gets whole key/value heads, and each of those serves two query heads.
        if dim % (2 * ranks * head_dim) == 0 and dim >= _MIN_HEADS * head_dim:
            break
    else:
        smallest = 2 * ranks * _HEAD_DIMS[-1]
        raise ValueError(
            f"--dim {dim} does not split into heads over {ranks} ranks: needs a multiple of "
            f"{smallest}, at least {max(smallest, _MIN_HEADS * _HEAD_DIMS[-1])}"
        )
    heads = dim // head_dim
    kv_heads = heads // 2
    unit = _HIDDEN_UNIT * ranks
    hidden = -(-8 * dim // (3 * unit)) * unit
    return ModelConfig(dim, layers, heads, kv_heads, hidden)


def _ranks(given: int | None, cp: int, environment: Mapping[str, str]) -> int:
    if "WORLD_SIZE" not in environment:
        return given or max(2, cp)
    started = int(environment["WORLD_SIZE"])
    if given not in (None, started):
        raise ValueError(f"--ranks {given}, but WORLD_SIZE={started} ranks were started")
    return started


def check(arguments: argparse.Namespace, environment: Mapping[str, str] | None = None) -> Options:
    """Returns checked options; raises `ValueError` saying what was given and what is needed."""
    cp = arguments.cp
    ranks = _ranks(arguments.ranks, cp, os.environ if environment is None else environment)
    if ranks % cp != 0:
        raise ValueError(f"--cp {cp} does not divide {ranks} ranks: --ranks must be a multiple")
    seq = arguments.seq
    # Under context parallelism a rank has two chunks of the sequence.
    parts = ranks if cp == 1 else 2 * ranks
    if seq % parts != 0:
        raise ValueError(
            f"--seq {seq} does not split over {ranks} ranks: use a multiple of {parts}"
        )
    text, name = read_text(arguments.text)
    if len(text) <= seq:
        raise ValueError(f"{name} has {len(text)} bytes: --seq {seq} needs at least {seq + 1}")
    if arguments.json is not None and not arguments.json.parent.is_dir():
        raise ValueError(f"--json {arguments.json}: there is no folder {arguments.json.parent}")
    return Options(
        ranks=ranks,
        cp=cp,
        compile=arguments.compile,
        steps=arguments.steps,
        text=arguments.text,
        seq=seq,
        batch=arguments.batch,
        dtype=_DTYPES[arguments.dtype],
        seed=arguments.seed,
        json=arguments.json,
        rendezvous=arguments.rendezvous,
        model=_model_config(arguments.dim, arguments.layers, ranks // cp),
    )
