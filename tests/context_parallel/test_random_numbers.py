"""Random numbers within a context: each rank's own, shared ones, and those drawn again."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module

import symm_cp
from symm_cp.context_parallel.region import active
from symm_cp.context_parallel.sequence_attention import attend_sequence
from symm_cp.context_parallel.sequence_mask import SequenceMask
from symm_cp.testing import Ranks
from tests.context_parallel.common import mesh_of
from tests.exhaustive import exhaustive, some

SAMPLES, LENGTH, FEATURES = 3, 64, 20
# For float64, after up to six layers and their gradients.
CLOSE = {"rtol": 1e-7, "atol": 1e-7}

# Functions of a tensor of ones, whose results are true where a number fell below 0.3.
BELOW: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "dropout": lambda x: F.dropout(x, 0.3) == 0,
    "module": lambda x: nn.Dropout(0.3)(x) == 0,
    "alpha": lambda x: F.alpha_dropout(x, 0.3, True) < 0,
    "rand": lambda x: torch.rand(x.shape) < 0.3,
    "uniform_": lambda x: torch.empty_like(x).uniform_() < 0.3,
    "bernoulli": lambda x: torch.bernoulli(x * 0.3) == 1,
    "multinomial": lambda x: torch.multinomial(torch.tensor([3.0, 7]), x.numel(), True) == 0,
}


def within(
    group: dist.ProcessGroup, step: Callable[[torch.Tensor], Any], length: int = LENGTH
) -> Any:
    """Calls a function within a context, with this rank's part of a sequence."""
    mesh, balancer = mesh_of(group), symm_cp.Sequential(length, group.size())
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(SAMPLES, length, FEATURES, dtype=torch.float64, generator=generator)
    (x,) = symm_cp.context_parallel_shard(mesh, [x], [1], balancer)
    with symm_cp.context_parallel(mesh, load_balancer=balancer, on_unfused="ignore"):
        return step(x)


def whole_of(group: dist.ProcessGroup, part: torch.Tensor, length: int = LENGTH) -> torch.Tensor:
    balancer = symm_cp.Sequential(length, group.size())
    return symm_cp.context_parallel_unshard(mesh_of(group), [part], [1], balancer)[0]


def heads_of(x: torch.Tensor) -> torch.Tensor:
    return x.unflatten(2, (4, 5)).transpose(1, 2)


# --- numbers of each rank ----------------------------------------------------------------------


def draws(group: dist.ProcessGroup, seed: int, backend: str | None) -> dict[str, torch.Tensor]:
    torch._dynamo.reset()
    torch.manual_seed(seed)
    drawn: dict[str, torch.Tensor] = {}

    def step(x: torch.Tensor) -> None:
        for name, function in BELOW.items():
            if backend is not None:
                function = torch.compile(function, backend=backend)
            for time in (1, 2):
                drawn[f"{name} {time}"] = function(torch.ones(128, 64)).flatten()

    within(group, step, length=LENGTH - 1)  # ranks hold different numbers of positions
    drawn["after"] = torch.rand(4)
    return drawn


@pytest.mark.parametrize("backend", some(None, of=[None, "aot_eager", "inductor"]))
def test_masks_are_independent(ranks: Ranks, backend: str | None) -> None:
    """Between ranks and between calls; afterwards all ranks draw the same numbers again."""
    seed, p, count = int(torch.randint(1 << 30, ())), 0.3, 128 * 64
    by_rank = ranks.run(3, draws, seed, backend, timeout=600)
    assert torch.equal(by_rank[0]["after"], by_rank[2]["after"])
    for name in BELOW:
        each = [drawn[f"{name} {time}"] for drawn in by_rank for time in (1, 2)]
        for index, mask in enumerate(each):
            off = abs(float(mask.double().mean()) - p)
            assert off < 6 * math.sqrt(p * (1 - p) / count), (
                f"{name} falls too often, or too rarely"
            )
            for other in each[:index]:
                both = float((mask & other).double().mean())
                assert abs(both - p * p) < 6 * math.sqrt(p * p * (1 - p * p) / count), name


def drops_dtensors(group: dist.ProcessGroup) -> list[torch.Tensor]:
    """Dropout of tensors over "tp" that hold this rank's part of the sequence over "cp"."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    balancer = symm_cp.HeadTail(32, 2)
    drawn = []
    torch.manual_seed(1)
    with symm_cp.context_parallel(mesh["cp"], load_balancer=balancer, on_unfused="ignore"):
        for placement in (Replicate(), Shard(1), Shard(2)):
            shape = [2, 16, 16]
            if isinstance(placement, Shard):
                shape[placement.dim] //= 2
            local = torch.ones(shape, requires_grad=True)
            dropped = F.dropout(DTensor.from_local(local, mesh["tp"], [placement]), 0.5)
            assert dropped.shape == (2, 16, 16)
            dropped.sum().backward()
            assert torch.equal(local.grad == 0, dropped.to_local() == 0)
            drawn.append(dropped.to_local().detach())
    return drawn


def test_dtensors(ranks: Ranks) -> None:
    """Ranks of "tp" with the same data drop the same elements; all others drop their own."""
    drawn = ranks.run(4, drops_dtensors)
    for index in range(3):
        replicated = index == 0
        for rank, other, alike in ((0, 1, replicated), (2, 3, replicated), (0, 2, False)):
            one, two = drawn[rank][index], drawn[other][index]
            assert torch.equal(one, two) == alike
            assert alike or 0.3 < float((one == two).double().mean()) < 0.7


class Styled(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        heads = heads_of(x)
        out = F.scaled_dot_product_attention(heads, heads, heads, is_causal=True, dropout_p=0.3)
        return out.transpose(1, 2).flatten(2), F.dropout(torch.ones(64, 64), 0.5)


def drops_in_a_style(group: dist.ProcessGroup, compile: bool) -> tuple[torch.Tensor, torch.Tensor]:
    torch._dynamo.reset()
    mesh, balancer = mesh_of(group), symm_cp.HeadTail(LENGTH, group.size())
    x = torch.ones(SAMPLES, LENGTH, FEATURES, dtype=torch.float64)
    (part,) = symm_cp.context_parallel_shard(mesh, [x], [1], balancer)
    module: Any = parallelize_module(
        Styled(), mesh, symm_cp.ContextParallel(load_balancer=balancer)
    )
    if compile:
        module = torch.compile(module, backend="aot_eager")
    torch.manual_seed(3)
    out, dropped = module(part)
    return symm_cp.context_parallel_unshard(mesh, [out], [1], balancer)[0], dropped


@pytest.mark.parametrize("compile", some(False, of=[False, True]))
def test_modules_with_a_style(ranks: Ranks, compile: bool) -> None:
    (one, own), (other, others) = ranks.run(2, drops_in_a_style, compile, timeout=300)
    assert torch.equal(one, other)
    assert 0.4 < float((own == others).double().mean()) < 0.6


# --- numbers of all ranks ----------------------------------------------------------------------


def shared(group: dist.ProcessGroup) -> list[Any]:
    def step(x: torch.Tensor) -> list[Any]:
        F.dropout(x, 0.5)
        lazy = nn.LazyLinear(3)
        lazy(x.float())
        return [
            torch.rand([]),
            torch.empty(1).uniform_(),
            torch.randint(1000, (1, 1)),
            nn.Linear(3, 3).weight,
            lazy.weight,
        ]

    torch.manual_seed(1)
    return [each.detach() for each in within(group, step, length=LENGTH - 1)]


def test_single_numbers_and_parameters_are_the_same_on_all_ranks(ranks: Ranks) -> None:
    own, other = ranks.run(2, shared)
    assert all(map(torch.equal, own, other))


class Layers(nn.Module):
    """Attention with dropout, and dropout beside it; layers are left out at random."""

    def __init__(self, hidden: float, options: dict[str, Any] | None) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(4)
        size = (6, FEATURES, FEATURES)
        weights = torch.randn(size, generator=generator, dtype=torch.float64) / FEATURES**0.5
        self.weights = nn.ParameterList(weights.unbind())
        self.hidden, self.options = hidden, options

    def layer(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        heads = heads_of(F.dropout(x @ weight, self.hidden))
        out = F.scaled_dot_product_attention(heads, heads, heads, is_causal=True, dropout_p=0.2)
        return x + F.dropout(out.transpose(1, 2).flatten(2), self.hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            if torch.rand([]) < 0.4:
                continue
            if self.options is None:
                x = self.layer(x, weight)
            else:
                x = torch.utils.checkpoint.checkpoint(self.layer, x, weight, **self.options)
        return x


def trains(
    group: dist.ProcessGroup,
    hidden: float = 0.0,
    options: dict[str, Any] | None = None,
    backend: str | None = None,
    inside: bool = True,
) -> list[torch.Tensor]:
    torch._dynamo.reset()
    model = Layers(hidden, options)
    if backend is not None:
        model.layer = torch.compile(model.layer, backend=backend)  # type: ignore[method-assign]

    def step(x: torch.Tensor) -> torch.Tensor:
        out = model(x.requires_grad_())
        if inside:
            out.square().sum().backward()
        return out

    torch.manual_seed(11)
    out = within(group, step, length=LENGTH - 1)
    if not inside:
        out.square().sum().backward()
    found = [whole_of(group, out.detach(), LENGTH - 1)]
    grads = [weight.grad for weight in model.weights if weight.grad is not None]
    for grad in grads:
        dist.all_reduce(grad, group=group)
    return [*found, *grads, torch.rand(3)]


def test_attention_drops_the_same_weights_at_every_world_size(ranks: Ranks) -> None:
    """Also where parts are unequal, and random numbers decide which layers run."""
    (alone,) = ranks.run(1, trains)
    assert 2 < len(alone) < 8
    for world_size, options in ((2, None), (3, {"use_reentrant": False})):
        for spread in ranks.run(world_size, trains, 0.0, options):
            torch.testing.assert_close(spread, alone, **CLOSE)


@pytest.mark.ranks(3)
def test_other_seeds_are_refused(group: dist.ProcessGroup) -> None:
    def attend(x: torch.Tensor) -> torch.Tensor:
        heads = heads_of(x)
        return F.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.3, is_causal=True)

    def attend_by_tiles(x: torch.Tensor) -> torch.Tensor:
        heads, region = heads_of(x), active()
        mask = SequenceMask(mask_mod=lambda b, h, q, kv: q >= kv)
        assert region is not None
        return attend_sequence("attention", region, heads, heads, heads, mask, dropout_p=0.3)[0]

    for draw in (lambda x: torch.rand([]), attend, attend_by_tiles):
        torch.manual_seed(group.rank())
        with pytest.raises(ValueError, match=r"ranks \[1, 2\] draw other random .* than rank 0"):
            within(group, draw)
        torch.manual_seed(1)
        within(group, draw)


@pytest.mark.ranks(1)
def test_a_seed_within_the_context_is_reported(group: dist.ProcessGroup) -> None:
    def step(x: torch.Tensor) -> None:
        torch.manual_seed(4)
        F.dropout(x, 0.5)

    with pytest.warns(UserWarning, match="Call it before"):
        within(group, step)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        within(group, lambda x: within(group, lambda y: F.dropout(x, 0.5)))


# --- numbers that are drawn again --------------------------------------------------------------


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_draw_the_same_again(ranks: Ranks, reentrant: bool, inside: bool) -> None:
    """All gradients, with dropout in attention and beside it, are those without checkpoints."""
    expected = ranks.run(2, trains, 0.3)
    for preserve in (True, False):
        options = {"use_reentrant": reentrant, "preserve_rng_state": preserve}
        recomputed = ranks.run(2, trains, 0.3, options, None, inside)
        torch.testing.assert_close(recomputed, expected, **CLOSE)


@exhaustive
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_layers(ranks: Ranks, backend: str) -> None:
    """Attention drops the same weights as in eager code, in checkpoints and without."""
    (alone,) = ranks.run(1, trains)
    for options in (None, {"use_reentrant": False}):
        for spread in ranks.run(2, trains, 0.0, options, backend, timeout=600):
            torch.testing.assert_close(spread, alone, **CLOSE)
    expected = ranks.run(2, trains, 0.3, None, backend, timeout=600)
    recomputed = ranks.run(2, trains, 0.3, {"use_reentrant": False}, backend, timeout=600)
    torch.testing.assert_close(recomputed, expected, **CLOSE)


class Recomputing(torch.autograd.Function):
    """A checkpoint of another library, which restores torch's generator only."""

    @staticmethod
    def forward(ctx: Any, body: Callable[..., Any], x: torch.Tensor) -> torch.Tensor:
        ctx.body, ctx.x = body, x
        return body(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return None, ctx.body(ctx.x) * grad


@pytest.mark.ranks(2)
def test_other_checkpoints_are_refused(group: dist.ProcessGroup) -> None:
    def step(x: torch.Tensor) -> None:
        def body(y: torch.Tensor) -> torch.Tensor:
            heads = heads_of(y)
            out = F.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.3)
            return out.transpose(1, 2).flatten(2)

        with pytest.raises(RuntimeError, match=r"use torch\.utils\.checkpoint"):
            Recomputing.apply(body, x.requires_grad_()).sum().backward()

    within(group, step)
