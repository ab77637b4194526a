"""The arguments of `symm-cp demo`, parsed and checked."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from symm_cp.commands.demo.decoding import options as decoding_options
from symm_cp.commands.demo.decoding.options import (
    DTYPES,
    HEAD_DIMS,
    in_units,
    with_defaults,
    world_size,
)
from symm_cp.parsing import add_json
from symm_cp.ranks import add_rendezvous, positive

if TYPE_CHECKING:  # `symm-cp --help` imports neither
    import torch

    from symm_cp.commands.demo.model import ModelConfig

_DEFAULTS = {
    "cp": 1,
    "steps": 12,
    "most_steps": 24,
    "dim": 512,
    "layers": 4,
    "seq": 512,
    "batch": 4,
}
_MIN_HEADS = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the demo's arguments to a parser."""
    add = parser.add_argument
    add("--ranks", type=positive, help="processes that share the model (default: 2)")
    add(
        "--compile",
        action="store_true",
        help="use torch's collectives, and let torch.compile fuse them",
    )
    # Sizes have no default here: training and decoding have different ones.
    add("--dim", type=positive, help="features of the model (512; with --decode 1024)")
    add("--layers", type=positive, help="layers (4; with --decode 8)")
    training = parser.add_argument_group("training")
    add = training.add_argument
    add("--cp", type=positive, help="ranks that share a sequence (1)")
    add("--steps", type=positive, help="training steps of each variant (12)")
    add(
        "--most-steps",
        type=positive,
        help="go on without the one process up to this step, until the times are certain (24)",
    )
    add(
        "--text",
        type=Path,
        help="file to train on (default: the source of Python's standard library)",
    )
    add("--seq", type=positive, help="bytes in a sequence (512)")
    add("--batch", type=positive, help="sequences in a batch (4)")
    decoding_options.add_arguments(parser)
    add = parser.add_argument
    add("--dtype", choices=DTYPES, default="float32", help="(%(default)s)")
    add("--seed", type=int, default=0, help="seed of weights and batches (%(default)s)")
    add_json(parser, "all losses and times")
    add_rendezvous(parser)


@dataclass(frozen=True)
class DemoOptions:
    """Checked arguments."""

    ranks: int
    cp: int
    compile: bool
    steps: int
    most_steps: int
    text: Path | None
    seq: int
    batch: int
    dtype: torch.dtype
    seed: int
    json: Path | None
    rendezvous: Path | None
    model: ModelConfig


def _model_config(dim: int, layers: int, ranks: int) -> ModelConfig:
    from symm_cp.commands.demo.model import ModelConfig

    for head_dim in HEAD_DIMS:
        # Each rank has whole key/value heads, and two query heads share each of these.
        if dim % (2 * ranks * head_dim) == 0 and dim >= _MIN_HEADS * head_dim:
            break
    else:
        smallest = 2 * ranks * HEAD_DIMS[-1]
        raise ValueError(
            f"--dim {dim} cannot be split into heads over {ranks} ranks: must be a multiple of "
            f"{smallest}, at least {max(smallest, _MIN_HEADS * HEAD_DIMS[-1])}"
        )
    heads = dim // head_dim
    kv_heads = heads // 2
    return ModelConfig(dim, layers, heads, kv_heads, in_units(8 * dim / 3, ranks))


def check(
    arguments: argparse.Namespace, environment: Mapping[str, str] | None = None
) -> DemoOptions:
    """Returns checked options; raises `ValueError` for invalid combinations of values."""
    import torch

    from symm_cp.commands.demo.data import read_text

    arguments = with_defaults(arguments, _DEFAULTS)
    for name in decoding_options.ONLY:
        if getattr(arguments, name, None) is not None:
            raise ValueError(f"--{name} requires --decode")
    cp = arguments.cp
    ranks = world_size(arguments.ranks, max(2, cp), environment)
    if ranks % cp != 0:
        raise ValueError(f"--ranks {ranks} is not divisible by --cp {cp}")
    seq = arguments.seq
    # Context parallelism gives each rank two chunks of the sequence.
    parts = ranks if cp == 1 else 2 * ranks
    if seq % parts != 0:
        raise ValueError(
            f"--seq {seq} cannot be split over {ranks} ranks: must be a multiple of {parts}"
        )
    text, name = read_text(arguments.text)
    if len(text) <= seq:
        raise ValueError(f"{name} has {len(text)} bytes: --seq {seq} requires at least {seq + 1}")
    return DemoOptions(
        ranks=ranks,
        cp=cp,
        compile=arguments.compile,
        steps=arguments.steps,
        most_steps=max(arguments.steps, arguments.most_steps),
        text=arguments.text,
        seq=seq,
        batch=arguments.batch,
        dtype=getattr(torch, arguments.dtype),
        seed=arguments.seed,
        json=arguments.json,
        rendezvous=arguments.rendezvous,
        model=_model_config(arguments.dim, arguments.layers, ranks // cp),
    )
