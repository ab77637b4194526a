"""The arguments of `symm-cp demo --decode`, parsed and checked, and checks that both demos use."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from symm_cp.ranks import is_rank, positive

if TYPE_CHECKING:  # `symm-cp --help` does not import it
    import torch

HEAD_DIMS = (64, 32, 16, 8)
_HIDDEN_UNIT = 32  # the hidden features of a rank are a multiple of this
DTYPES = ("bfloat16", "float32", "float64")
#: Arguments only for --decode, and arguments only for training.
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


def in_units(features: float, ranks: int) -> int:
    """Returns a number of features, rounded up so that each rank has a multiple of 32."""
    unit = _HIDDEN_UNIT * ranks
    return math.ceil(features / unit) * unit


def with_defaults(arguments: argparse.Namespace, defaults: Mapping[str, Any]) -> argparse.Namespace:
    """Returns the arguments, with defaults for missing ones."""
    given = {name: value for name, value in vars(arguments).items() if value is not None}
    return argparse.Namespace(**{**vars(arguments), **defaults, **given})


def world_size(ranks: int | None, default: int, environment: Mapping[str, str] | None) -> int:
    """Returns the number of ranks; under torchrun, the number of running ranks."""
    environment = os.environ if environment is None else environment
    if not is_rank(environment):
        return ranks or default
    started = int(environment["WORLD_SIZE"])
    if ranks not in (None, started):
        raise ValueError(f"--ranks {ranks} must equal WORLD_SIZE={started}, the running ranks")
    return started


def check(
    arguments: argparse.Namespace, environment: Mapping[str, str] | None = None
) -> DecodeOptions:
    """Returns checked options; raises `ValueError` for invalid combinations of values."""
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


def config_of(options: DecodeOptions) -> Any:
    """Returns the model's configuration, an object of transformers.

    Raises `ValueError` without transformers, for a file without a configuration, and for sizes that
    are not divisible by the number of ranks.
    """
    from symm_cp.commands.harness import llama

    transformers = llama.load_transformers()
    if options.config is None:
        config = _llama_config(transformers, options)
    else:
        try:
            config = transformers.AutoConfig.from_pretrained(str(options.config))
        except (OSError, ValueError) as error:
            raise ValueError(f"--config {options.config}: {error}") from error
    if not getattr(config, "base_model_tp_plan", None):
        raise ValueError(
            f"--config {options.config}: transformers has no tensor-parallel plan for "
            f"{config.model_type!r}"
        )
    llama.check_styles(set(config.base_model_tp_plan.values()))
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size"):
        if getattr(config, name) % options.ranks != 0:
            raise ValueError(
                f"{name}={getattr(config, name)} is not divisible by --ranks {options.ranks}"
            )
    return config


def _llama_config(transformers: Any, options: DecodeOptions) -> Any:
    dim, ranks = options.dim, options.ranks
    for head_dim in HEAD_DIMS:
        if dim % (ranks * head_dim) == 0:
            break
    else:
        raise ValueError(
            f"--dim {dim} cannot be split into heads over {ranks} ranks: must be a multiple of "
            f"{ranks * HEAD_DIMS[-1]}"
        )
    heads = dim // head_dim
    return transformers.LlamaConfig(
        hidden_size=dim,
        num_hidden_layers=options.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2 if heads % (2 * ranks) == 0 else heads,
        intermediate_size=in_units(8 * dim / 3, ranks),
        vocab_size=in_units(32000, ranks),
    )
