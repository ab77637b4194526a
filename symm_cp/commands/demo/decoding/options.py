"""The arguments of `symm-cp demo --decode`, parsed and checked; what both demos check alike."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from symm_cp.ranks import is_rank, positive

if TYPE_CHECKING:  # `symm-cp --help` does without
    import torch

DTYPES = ("bfloat16", "float32", "float64")
#: The arguments that only --decode has, and those that only training has.
ONLY = ("prompt", "tokens", "config")
_NEVER = ("cp", "steps", "most_steps", "text", "seq", "batch")
_DEFAULTS = {"dim": 1024, "layers": 8, "prompt": 32, "tokens": 64}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of --decode to the demo's parser."""
    group = parser.add_argument_group("generating text with a model of transformers")
    add = group.add_argument
    add(
        "--decode",
        action="store_true",
        help="generate with a Llama of random weights, instead of training",
    )
    add("--prompt", type=positive, help="tokens of the prompt (32)")
    add("--tokens", type=positive, help="tokens to generate (64)")
    add(
        "--config",
        type=Path,
        metavar="FILE",
        help="config.json of another model of transformers, instead of --dim and --layers",
    )


@dataclass(frozen=True)
class DecodeOptions:
    """Checked arguments of --decode."""

    ranks: int
    compile: bool
    prompt: int
    tokens: int
    dim: int
    layers: int
    config: Path | None
    dtype: torch.dtype
    seed: int
    json: Path | None
    rendezvous: Path | None


def with_defaults(arguments: argparse.Namespace, defaults: Mapping[str, Any]) -> argparse.Namespace:
    """Returns the arguments, with defaults for those that were not given."""
    given = {name: value for name, value in vars(arguments).items() if value is not None}
    return argparse.Namespace(**{**vars(arguments), **defaults, **given})


def world_size(ranks: int | None, default: int, environment: Mapping[str, str] | None) -> int:
    """Returns the number of ranks; under torchrun, that of the ranks that are running."""
    environment = os.environ if environment is None else environment
    if not is_rank(environment):
        return ranks or default
    started = int(environment["WORLD_SIZE"])
    if ranks not in (None, started):
        raise ValueError(f"--ranks {ranks} must be WORLD_SIZE={started}, as the ranks are running")
    return started


def check_json(path: Path | None) -> None:
    """Raises `ValueError` if the folder of a file to write does not exist."""
    if path is not None and not path.parent.is_dir():
        raise ValueError(f"--json {path}: folder {path.parent} does not exist")


def check(
    arguments: argparse.Namespace, environment: Mapping[str, str] | None = None
) -> DecodeOptions:
    """Returns checked options; raises `ValueError` for values that do not go together."""
    import torch

    for name in _NEVER:
        if getattr(arguments, name) is not None:
            raise ValueError(f"--{name.replace('_', '-')} cannot be combined with --decode")
    if arguments.config is not None:
        for name in ("dim", "layers"):
            if getattr(arguments, name) is not None:
                raise ValueError(f"--{name} cannot be combined with --config, which describes it")
        if not arguments.config.is_file():
            raise ValueError(f"--config {arguments.config}: no such file")
    arguments = with_defaults(arguments, _DEFAULTS)
    ranks = world_size(arguments.ranks, 2, environment)
    check_json(arguments.json)
    return DecodeOptions(
        ranks=ranks,
        compile=arguments.compile,
        prompt=arguments.prompt,
        tokens=arguments.tokens,
        dim=arguments.dim,
        layers=arguments.layers,
        config=arguments.config,
        dtype=getattr(torch, arguments.dtype),
        seed=arguments.seed,
        json=arguments.json,
        rendezvous=arguments.rendezvous,
    )
