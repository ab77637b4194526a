"""torchtitan's overrides of inner attentions, against one process.

torchtitan 0.3 wants a newer torch than CI has; the stand-ins here have what the overrides see of
it. Where torchtitan can run, so does its own trainer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from symm_cp.testing import Ranks
from tests.context_parallel.common import CLOSE, mesh_of
from tests.exhaustive import some
from tests.integrations import test_torchtitan as pattern
from tests.integrations.engines.stubs import modules

_HAS_TORCHTITAN = importlib.util.find_spec("torchtitan") is not None
needs_torchtitan = pytest.mark.skipif(
    not (_HAS_TORCHTITAN and hasattr(dist, "set_timeout")),
    reason="torchtitan 0.3 and torch 2.15 are not installed",
)


class FlexAttention(pattern.FlexAttention):
    @dataclasses.dataclass
    class Config:
        block_size: int = 128
        sharding_config: Any = None

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.block_size = config.block_size


class VarlenAttention(pattern.VarlenAttention):
    @dataclasses.dataclass
    class Config:
        window_size: tuple[int, int] = (-1, 0)
        sharding_config: Any = None

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.window_size = config.window_size


def _override(target: type, description: str) -> Callable[[Any], Any]:
    def register(factory: Any) -> Any:
        factory.target = target
        return factory

    return register


def _derive(source: Any, target: type, **deltas: Any) -> Any:
    return target(**dataclasses.asdict(source) | deltas)


@contextlib.contextmanager
def overrides() -> Iterator[tuple[ModuleType, ModuleType]]:
    """The overrides, and a model's `parallelize.py` that was loaded before them."""

    def unfused(name: str, *args: Any) -> None:
        raise AssertionError(f"torchtitan's own {name} was called")

    names = ("apply_cp_to_forward", "cp_shard", "prepare_context_parallel_input")
    own = {name: functools.partial(unfused, name) for name in names}
    with modules(
        torchtitan__config={"override": _override},
        torchtitan__config__override={"derive": _derive},
        torchtitan__distributed__context_parallel=own,
        torchtitan__distributed__spmd_types={"current_spmd_mesh": lambda: None},
        torchtitan__distributed__utils={"get_spmd_backend": lambda: "partial_dtensor"},
        torchtitan__models__common__attention={
            "FlexAttention": FlexAttention,
            "VarlenAttention": VarlenAttention,
        },
        torchtitan__models__mine__parallelize=own,
    ):
        torchtitan = sys.modules["torchtitan"]
        torchtitan.config = sys.modules["torchtitan.config"]  # type: ignore[attr-defined]
        distributed = sys.modules["torchtitan.distributed"]
        theirs = sys.modules["torchtitan.distributed.context_parallel"]
        distributed.context_parallel = theirs  # type: ignore[attr-defined]
        loaded = importlib.import_module("symm_cp.integrations.torchtitan.overrides")
        yield loaded, sys.modules["torchtitan.models.mine.parallelize"]


def trains(group: dist.ProcessGroup, kind: str, balancing: str | None) -> None:
    dense = pattern.VarlenAttention if kind == "varlen" else pattern.Dense
    model = pattern.decoder(dense)
    ids, labels, extra = pattern.batch_of(kind)
    whole = model(ids, **extra)
    pattern.loss_of(whole, labels).backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}

    with overrides() as (loaded, parallelize):
        factory = getattr(loaded, f"{kind}_attention")
        config = VarlenAttention.Config((6, 0)) if kind == "varlen" else FlexAttention.Config(16)
        assert isinstance(config, factory.target)
        replaced = factory(config)
        assert dataclasses.asdict(replaced) == dataclasses.asdict(config)
        attention = {"flex": loaded.SymmFlexAttention, "varlen": loaded.SymmVarlenAttention}[kind]
        assert type(replaced) is attention.Config
        original = {"flex": FlexAttention, "varlen": VarlenAttention}[kind]
        assert inspect.signature(attention.forward) == inspect.signature(original.forward)
        split = pattern.decoder(lambda: attention(replaced))  # type: ignore[arg-type]
        alone = split(ids, **extra)  # no mesh is applied: each rank by itself
        torch.testing.assert_close(alone, whole, **CLOSE)
        for _ in range(2):
            mesh = mesh_of(group)
            inner = [layer.inner_attention for layer in split.layers]
            parallelize.apply_cp_to_forward(inner, mesh)  # type: ignore[attr-defined]
            split.zero_grad()
            ids, labels, extra = pattern.batch_of(kind)
            ids, labels, extra = parallelize.prepare_context_parallel_input(  # type: ignore
                ids, labels, extra, mesh, ids.device, balancing
            )
            pattern.loss_of(split(ids, **extra), labels).backward()
            for name, parameter in split.named_parameters():
                dist.all_reduce(parameter.grad, group=group)
                torch.testing.assert_close(parameter.grad, expected[name], **CLOSE, msg=name)
        with pytest.raises(AssertionError, match="torchtitan's own apply_cp_to_forward"):
            parallelize.apply_cp_to_forward([nn.Linear(1, 1)], mesh)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("world_size", "kind", "balancing"),
    some(
        (2, "flex", "headtail"),
        of=[(n, k, b) for n in (2, 3) for k in ("flex", "varlen") for b in ("headtail", None)],
    ),
)
def test_overrides_are_as_in_one_process(
    ranks: Ranks, world_size: int, kind: str, balancing: str | None
) -> None:
    ranks.run(world_size, trains, kind, balancing)
