"""Random numbers within a context, as in dropout, do not depend on the number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module

import symm_cp
from symm_cp.context_parallel.region import active
from symm_cp.context_parallel.sequence_attention import attend_sequence
from symm_cp.context_parallel.sequence_mask import SequenceMask
from symm_cp.testing import Ranks
from tests.context_parallel.common import mesh_of
from tests.exhaustive import exhaustive, some

SAMPLES, LENGTH, FEATURES = 3, 27, 20
LAYOUTS: dict[str, Callable[[int, int], symm_cp.LoadBalancer]] = {
    "HeadTail": symm_cp.HeadTail,
    "Sequential": symm_cp.Sequential,
    "documents": lambda length, ranks: symm_cp.PerDocumentHeadTail([length - 8, 8], ranks),
}

# Functions of this rank's part of the sequence, (SAMPLES, positions, FEATURES).
FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "dropout": lambda x: F.dropout(x, 0.3),
    "module": lambda x: nn.Dropout(0.3)(x),
    "in place": lambda x: F.dropout(x.clone(), 0.3, inplace=True),
    "torch.dropout": lambda x: torch.dropout(x, 0.3, True),
    "native": lambda x: torch.native_dropout(x, 0.3, True)[0],
    "dropout1d, tokens": lambda x: F.dropout1d(x, 0.3),
    "dropout1d, features": lambda x: F.dropout1d(x.mT, 0.3).mT,
    "dropout2d": lambda x: F.dropout2d(x[:, None], 0.3)[:, 0],
    "alpha": lambda x: F.alpha_dropout(x, 0.3, True),
    "feature alpha": lambda x: F.feature_alpha_dropout(x, 0.3, True),
    "flat": lambda x: F.dropout(x.flatten(0, 1), 0.3).view_as(x),
    "heads": lambda x: (
        F.dropout(x.unflatten(2, (4, 5)).transpose(1, 2), 0.3).transpose(1, 2).flatten(2)
    ),
    "sequence first": lambda x: F.dropout(x.transpose(0, 1), 0.3).transpose(0, 1),
    "two dimensions": lambda x: F.dropout(x[..., 0], 0.3)[..., None],
    "rand": lambda x: torch.rand(x.shape, dtype=x.dtype),
    "randn": lambda x: torch.randn(*x.shape, dtype=x.dtype),
    "randint": lambda x: torch.randint(1000, x.shape),
    "rand_like": lambda x: torch.rand_like(x),
    "randn_like": lambda x: torch.randn_like(x, dtype=torch.float32),
    "randint_like": lambda x: torch.randint_like(x, 3, 90),
    "normal": lambda x: torch.normal(0.0, 2.0, x.shape),
    "normal of tensors": lambda x: torch.normal(x, x.abs()),
    "uniform_": lambda x: torch.empty_like(x).uniform_(0.9, 1.1),
    "normal_": lambda x: torch.empty_like(x).normal_(std=2.0),
    "exponential_": lambda x: torch.empty_like(x).exponential_(),
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()),
    "bernoulli_": lambda x: x.new_empty(x.shape).bernoulli_(0.3),
    "gumbel": lambda x: F.gumbel_softmax(x, hard=True),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "attention": lambda x: (
        F.scaled_dot_product_attention(*[x.unflatten(2, (4, 5)).transpose(1, 2)] * 3, dropout_p=0.2)
        .transpose(1, 2)
        .flatten(2)
    ),
}
# Draws that are the same on all ranks: (SAMPLES, FEATURES), a parameter, depths, numbers.
ALIKE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "pooled": lambda x: F.dropout(torch.ones(SAMPLES, FEATURES), 0.3),
    "parameter": lambda x: F.dropout(nn.Parameter(torch.ones(x.shape[1], 5)), 0.3),
    "initialised": lambda x: nn.init.normal_(nn.Parameter(torch.empty(50, 5))),
    "depth": lambda x: x.new_empty(SAMPLES, 1, 1).bernoulli_(0.5),
    "labels": lambda x: torch.rand(SAMPLES),
    "a number": lambda x: torch.rand([]),
    "permutation": lambda x: torch.randperm(50),
    "sampled": lambda x: torch.multinomial(torch.ones(SAMPLES, FEATURES), 4),
}


def sequence(length: int = LENGTH) -> torch.Tensor:
    """The whole sequence, the same on all ranks."""
    generator = torch.Generator().manual_seed(3)
    return torch.randn(SAMPLES, length, FEATURES, dtype=torch.float64, generator=generator)


def within(
    group: dist.ProcessGroup,
    layout: str,
    step: Callable[[torch.Tensor], Any],
    length: int = LENGTH,
) -> Any:
    """Calls a function within a context, with this rank's part of the sequence."""
    mesh = mesh_of(group)
    balancer = LAYOUTS[layout](length, group.size())
    (x,) = symm_cp.context_parallel_shard(mesh, [sequence(length)], [1], balancer)
    with symm_cp.context_parallel(mesh, load_balancer=balancer, on_unfused="ignore"):
        return step(x)


def whole_of(group: dist.ProcessGroup, layout: str, part: torch.Tensor) -> torch.Tensor:
    balancer = LAYOUTS[layout](LENGTH, group.size())
    return symm_cp.context_parallel_unshard(mesh_of(group), [part], [1], balancer)[0]


def draws(group: dist.ProcessGroup, layout: str, seed: int) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}

    def step(x: torch.Tensor) -> None:
        for name, function in FUNCTIONS.items():
            found[name] = function(x)
            found[f"after {name}"] = torch.random.get_rng_state()
        for name, function in ALIKE.items():
            torch.manual_seed(seed)
            if name != "parameter":  # which is as large as this rank's part
                found[name] = function(x)

    torch.manual_seed(seed)
    within(group, layout, step)
    return {
        name: whole_of(group, layout, value) if name in FUNCTIONS else value
        for name, value in found.items()
    }


def test_numbers_are_those_of_one_rank(ranks: Ranks) -> None:
    seed = int(torch.randint(1 << 30, ()))
    (alone,) = ranks.run(1, draws, "HeadTail", seed)
    plain = sequence()
    for name in FUNCTIONS:
        assert not torch.equal(alone[name], plain.to(alone[name].dtype)), f"{name} drew nothing"
    for world_size, layout in ((2, "HeadTail"), (2, "documents"), (3, "Sequential")):
        for spread in ranks.run(world_size, draws, layout, seed):
            for name, expected in alone.items():
                torch.testing.assert_close(spread[name], expected, rtol=1e-9, atol=1e-9, msg=name)


def masks(group: dist.ProcessGroup) -> list[torch.Tensor]:
    def step(x: torch.Tensor) -> list[torch.Tensor]:
        parameter = nn.Parameter(torch.ones(x.shape[1], FEATURES))
        shared = F.dropout(torch.ones(SAMPLES, FEATURES), 0.5), F.dropout(parameter, 0.5)
        return [F.dropout(torch.ones_like(x), 0.5), *(mask.detach() for mask in shared)]

    torch.manual_seed(1)
    return within(group, "Sequential", step, length=48)


def test_tokens_are_dropped_by_themselves_and_parameters_alike(ranks: Ranks) -> None:
    (own, pooled, parameter), (other, as_well, also) = ranks.run(2, masks)
    same = float((own == other).double().mean())
    assert 0.4 < same < 0.6, "ranks drop the same features of different tokens"
    assert torch.equal(pooled, as_well)
    assert torch.equal(parameter, also)


# --- decisions by one number --------------------------------------------------------------------


class Layers(nn.Module):
    """Attention with dropout beside it; layers are left out at random."""

    def __init__(self, count: int = 6) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(4)
        size = (count, FEATURES, FEATURES)
        weights = torch.randn(size, generator=generator, dtype=torch.float64) / FEATURES**0.5
        self.weights = nn.ParameterList(weights.unbind())
        self.options: dict[str, Any] | None = None  # of checkpoints

    def layer(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        heads = F.dropout(x @ weight, 0.2).unflatten(2, (4, 5)).transpose(1, 2)
        out = F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        return x + F.dropout(out.transpose(1, 2).flatten(2), 0.2)

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
    group: dist.ProcessGroup, layout: str, options: dict[str, Any] | None = None
) -> list[torch.Tensor]:
    model = Layers()
    model.options = options

    def step(x: torch.Tensor) -> torch.Tensor:
        out = model(x.requires_grad_())
        out.square().sum().backward()
        return out.detach()

    torch.manual_seed(11)
    out = whole_of(group, layout, within(group, layout, step))
    grads = [weight.grad for weight in model.weights if weight.grad is not None]
    for grad in grads:
        dist.all_reduce(grad, group=group)
    return [out, *grads]


def test_layers_are_left_out_alike_where_parts_are_unequal(ranks: Ranks) -> None:
    (alone,) = ranks.run(1, trains, "Sequential")
    assert 1 < len(alone) < 7
    for world_size, layout, options in (
        (2, "Sequential", None),
        (4, "HeadTail", None),
        (2, "HeadTail", {"use_reentrant": False}),
        (2, "HeadTail", {"use_reentrant": True}),
    ):
        for spread in ranks.run(world_size, trains, layout, options):
            torch.testing.assert_close(spread, alone, rtol=1e-9, atol=1e-9)


def recomputes_with_another_seed(group: dist.ProcessGroup, reentrant: bool) -> None:
    options = {"use_reentrant": reentrant, "preserve_rng_state": False}
    with pytest.raises(RuntimeError, match="leave out preserve_rng_state=False"):
        trains(group, "HeadTail", options)


def test_other_masks_in_a_checkpoint_are_refused(ranks: Ranks) -> None:
    ranks.run(1, recomputes_with_another_seed, False)
    ranks.run(2, recomputes_with_another_seed, True)


def seeded_otherwise(group: dist.ProcessGroup) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, 0.3)

    def attend(x: torch.Tensor) -> torch.Tensor:
        heads = x.view(SAMPLES, -1, 4, 5).transpose(1, 2)
        return F.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.3, is_causal=True)

    def attend_by_tiles(x: torch.Tensor) -> torch.Tensor:
        heads = x.view(SAMPLES, -1, 4, 5).transpose(1, 2)
        mask = SequenceMask(mask_mod=lambda b, h, q, kv: q >= kv)
        region = active()
        assert region is not None
        return attend_sequence(region, heads, heads, heads, mask, dropout_p=0.3)

    for draw in (step, attend, attend_by_tiles):
        torch.manual_seed(group.rank())
        with pytest.raises(ValueError, match=r"ranks \[1, 2\] draw other random .* than rank 0"):
            within(group, "HeadTail", draw)
        torch.manual_seed(1)
        within(group, "HeadTail", draw)


def test_other_seeds_are_refused(ranks: Ranks) -> None:
    ranks.run(3, seeded_otherwise)


# --- tokens that a router picked ---------------------------------------------------------------


def routes(group: dist.ProcessGroup) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Ranks call different numbers of experts, with different numbers of tokens."""
    rank = group.rank()

    def step(x: torch.Tensor) -> list[torch.Tensor]:
        first = F.dropout(x, 0.5)
        experts = [F.dropout(torch.ones(40 + rank, FEATURES), 0.5) for _ in range(2 + rank)]
        return [*experts, F.dropout(first, 0.5)]

    torch.manual_seed(2)
    *experts, last = within(group, "Sequential", step)
    return experts, whole_of(group, "Sequential", last)


def test_experts_leave_the_ranks_in_step(ranks: Ranks) -> None:
    ((_, alone),) = ranks.run(1, routes)
    (one, spread), (other, _) = ranks.run(2, routes)
    assert torch.equal(spread, alone)
    for first, second in ((one[0], one[1]), (one[0], other[0]), (other[1], other[2])):
        same = float((first[:40] == second[:40]).double().mean())
        assert 0.4 < same < 0.6


class Styled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = x.view(SAMPLES, -1, 4, 5).transpose(1, 2)
        out = F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        return F.dropout(out.transpose(1, 2).flatten(2), 0.3)


def drops_in_a_style(group: dist.ProcessGroup, compile: bool) -> torch.Tensor:
    torch._dynamo.reset()
    mesh, balancer = mesh_of(group), symm_cp.HeadTail(LENGTH, group.size())
    (part,) = symm_cp.context_parallel_shard(mesh, [sequence()], [1], balancer)
    style = symm_cp.ContextParallel(load_balancer=balancer)
    module = parallelize_module(Styled(), mesh, style)
    if compile:
        module = torch.compile(module, backend="aot_eager", fullgraph=True)
    torch.manual_seed(3)
    return whole_of(group, "HeadTail", module(part))


@pytest.mark.parametrize("compile", some(False, of=[False, True]))
def test_modules_with_a_style(ranks: Ranks, compile: bool) -> None:
    (alone,) = ranks.run(1, drops_in_a_style, False)
    for spread in ranks.run(2, drops_in_a_style, compile, timeout=300):
        torch.testing.assert_close(spread, alone)


# --- DTensors ----------------------------------------------------------------------------------


def drops_dtensors(group: dist.ProcessGroup) -> list[torch.Tensor]:
    """Dropout of tensors over "tp" that hold this rank's part of the sequence over "cp"."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    balancer = symm_cp.HeadTail(32, 2)
    found = []
    torch.manual_seed(1)
    with symm_cp.context_parallel(mesh["cp"], load_balancer=balancer, on_unfused="ignore"):
        for placement in (Replicate(), Shard(1), Shard(2), Partial()):
            shape = [2, 16, 16]
            if isinstance(placement, Shard):
                shape[placement.dim] //= 2
            local = torch.ones(shape, requires_grad=True)
            dropped = F.dropout(DTensor.from_local(local, mesh["tp"], [placement]), 0.5)
            assert dropped.shape == (2, 16, 16)
            dropped.sum().backward()
            assert torch.equal(local.grad == 0, dropped.to_local() == 0)
            found.append(dropped.to_local().detach())
    return found


def test_dtensors(ranks: Ranks) -> None:
    """Ranks of "tp" with the same data drop the same elements; all others drop their own."""
    drawn = ranks.run(4, drops_dtensors)
    for index in range(4):
        replicated = index in (0, 3)
        for rank, other, alike in ((0, 1, replicated), (2, 3, replicated), (0, 2, False)):
            one, two = drawn[rank][index], drawn[other][index]
            assert torch.equal(one, two) == alike
            assert alike or 0.3 < float((one == two).double().mean()) < 0.7


# --- refused, and left alone -------------------------------------------------------------------


def refuses(group: dist.ProcessGroup) -> None:
    def step(x: torch.Tensor) -> None:
        for call in (
            lambda: torch.multinomial(x[..., 0].exp(), 2),
            lambda: torch.poisson(x.exp()),
            lambda: torch.randperm(x.shape[1]),
        ):
            with pytest.raises(NotImplementedError, match="within context_parallel, of shape"):
                call()
        own = torch.Generator().manual_seed(3)
        expected = torch.rand(x.shape, generator=torch.Generator().manual_seed(3))
        assert torch.equal(torch.rand(x.shape, generator=own), expected)
        for off in (F.dropout(x, 0.0), F.dropout(x, 0.4, False), F.dropout(x, 1.0) + x):
            assert torch.equal(off, x)
        with pytest.raises(ValueError, match="has to be between 0 and 1"):
            F.dropout(x, 1.5)

    within(group, "Sequential", step)


def test_what_no_position_determines_is_refused(ranks: Ranks) -> None:
    ranks.run(2, refuses)


# --- compiled ----------------------------------------------------------------------------------


def noisy(x: torch.Tensor) -> torch.Tensor:
    jitter = torch.empty_like(x).uniform_(0.9, 1.1)
    x = F.dropout(x, 0.3) * jitter + torch.randn_like(x)
    return F.dropout1d(x, 0.2) + F.gumbel_softmax(x)


def compiles(group: dist.ProcessGroup, seed: int) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(noisy, backend="aot_eager", fullgraph=True)

    def step(x: torch.Tensor) -> None:
        x = x.requires_grad_()
        torch.manual_seed(seed)
        expected = noisy(x)
        (grad,) = torch.autograd.grad(expected.sum(), x)
        torch.manual_seed(seed)
        found = compiled(x)
        (as_well,) = torch.autograd.grad(found.sum(), x)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(as_well, grad)

    for layout in ("HeadTail", "Sequential"):
        within(group, layout, step)


@pytest.mark.exhaustive
def test_compiled_functions_draw_the_same(ranks: Ranks) -> None:
    ranks.run(2, compiles, int(torch.randint(1 << 30, ())), timeout=300)


def compiled_by_inductor(group: dist.ProcessGroup, layout: str) -> torch.Tensor:
    torch._dynamo.reset()
    torch.manual_seed(5)
    return whole_of(group, layout, within(group, layout, torch.compile(noisy)))


@exhaustive
def test_inductor(ranks: Ranks) -> None:
    """Inductor's seeds differ from eager code's, but are the same at every world size."""
    (alone,) = ranks.run(1, compiled_by_inductor, "HeadTail", timeout=600)
    for spread in ranks.run(2, compiled_by_inductor, "Sequential", timeout=600):
        torch.testing.assert_close(spread, alone)


def each_sample(group: dist.ProcessGroup, compile: bool) -> torch.Tensor:
    torch._dynamo.reset()
    torch.manual_seed(5)
    W, mesh = group.size(), mesh_of(group)
    balancer = symm_cp.PerDocumentHeadTail([[16, 8], [8, 16], [24]], W)
    x = sequence()[:, :24]
    (part,) = symm_cp.context_parallel_shard(mesh, [x], [1], balancer)
    function = torch.compile(noisy, backend="aot_eager") if compile else noisy
    with symm_cp.context_parallel(mesh, load_balancer=balancer, on_unfused="ignore"):
        out = function(part)
    return symm_cp.context_parallel_unshard(mesh, [out], [1], balancer)[0]


@pytest.mark.parametrize("compile", some(False, of=[False, True]))
def test_a_layout_for_each_sample(ranks: Ranks, compile: bool) -> None:
    (alone,) = ranks.run(1, each_sample, False)
    for spread in ranks.run(2, each_sample, compile, timeout=300):
        torch.testing.assert_close(spread, alone)
