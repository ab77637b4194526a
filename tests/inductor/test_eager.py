"""Which collectives of uncompiled code an op could fuse, as `symm-cp explain --eager` says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import chain

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

import symm_cp
from symm_cp.inductor.eager import Watch
from symm_cp.testing import Ranks
from tests.backend.common import all_gather_single, reduce_scatter_single
from tests.context_parallel.common import mesh_of
from tests.context_parallel.test_batch import model_of
from tests.ops.calls import calls, trained


def gathered(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    return funcol.all_gather_tensor_autograd(x, 0, group).clone()


def rearranged(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x.contiguous(), group=group)
    return out.flip(0)


def programs(
    group: dist.ProcessGroup,
) -> dict[str, tuple[Callable[[], object], Sequence[str | None]]]:
    W = group.size()
    x, w = torch.randn(2 * W, 4 * W, requires_grad=True), torch.randn(4 * W, 4 * W)
    plain = x.detach()
    heads = torch.randn(W, 2, 4, 8)
    ends = torch.tensor([4 * W], dtype=torch.int32)

    def trained() -> None:
        full = gathered(x, group).to(torch.float64)
        y = full @ w.double() + full @ w.double()
        part = funcol.reduce_scatter_tensor_autograd(y, "sum", 0, group)
        part.backward(torch.ones_like(part))  # torch 2.11 gathers no gradient that `sum` expands

    def into_outputs() -> None:
        full, part = torch.empty(2 * W * W, 4 * W), torch.empty(2, 4 * W)
        all_gather_single(full, plain, group=group)
        reduce_scatter_single(part, full[: 2 * W] @ w, group=group)

    def ulysses() -> None:
        q, k, v = (rearranged(heads @ torch.eye(8), group) for _ in range(3))
        attended = F.scaled_dot_product_attention(q, k, v)
        rearranged(attended, group) @ torch.eye(8)

    def rotated() -> None:
        q, k, v = (rearranged(heads.exp(), group) for _ in range(3))
        rearranged(F.scaled_dot_product_attention(q, k, v), group).exp()

    def experts() -> None:
        rows = rearranged(torch.randn(4 * W, 16), group)
        weights = torch.randn(1, 16, 16)
        found = torch._grouped_mm(rows.bfloat16(), weights.bfloat16(), offs=ends)
        rearranged(found, group)

    def keys() -> None:
        k, v = (gathered(heads, group) for _ in range(2))
        F.scaled_dot_product_attention(heads.repeat(W, 1, 1, 1), k, v)

    def weight() -> None:
        plain @ gathered(w[:4], group)  # as in FSDP: the right operand
        total = plain @ w
        torch._foreach_mul_([total], 2)  # no longer a product
        dist.all_reduce(total, group=group)
        dist.broadcast(total, group_src=0, group=group)

    return {
        "trained": (
            trained,
            ["all_gather_matmul", "matmul_reduce_scatter"] * 2,  # in both passes
        ),
        "into outputs": (into_outputs, ["all_gather_matmul", "matmul_reduce_scatter"]),
        "ulysses": (ulysses, ["ulysses_projection"] * 3 + ["ulysses_output_projection"]),
        "rotated": (rotated, ["sequence_to_heads"] * 3 + ["heads_to_sequence"]),
        "experts": (experts, ["moe.dispatch_matmul", "moe.matmul_combine"]),
        "keys": (keys, ["all_gather_attention"] * 2),
        "nothing": (weight, [None] * 3),
    }


def watched(group: dist.ProcessGroup) -> None:
    for name, (program, expected) in programs(group).items():
        with Watch() as watch:
            program()
        described = list(watch.described())
        found = [each["could_be"] for each in described for _ in range(each["calls"])]
        assert sorted(map(str, found)) == sorted(map(str, expected)), (name, described)
        for each in described:
            assert each["ranks"] == group.size()
            assert each["bytes"] > 0
            assert bool(each["advice"]) == bool(each["could_be"])


def sharded(group: dist.ProcessGroup, used: bool) -> list[tuple[str, int, str | None]]:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    for module in (model[0], model):
        fully_shard(module, mesh=mesh_of(group))
    if used:
        symm_cp.fsdp.use(model)
    with Watch() as watch:
        model(torch.randn(2, 8)).sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    return [(each["name"], each["calls"], each["could_be"]) for each in watch.described()]


def test_fsdp2(ranks: Ranks) -> None:
    """`fsdp.use` replaces FSDP2's transfers, but not the all-reduce of the gradient norm.

    The root stays gathered after its forward pass.
    """
    norm = ("all_reduce", 1, None)
    (found, _) = ranks.run(2, sharded, False)
    assert sorted(found, key=str) == [
        ("all_gather", 3, "fsdp.use"), norm, ("reduce_scatter", 2, "fsdp.use")
    ]  # fmt: skip
    assert ranks.run(2, sharded, True) == [[norm]] * 2


@pytest.mark.parametrize("world_size", [2, 3])
def test_what_could_be_fused(ranks: Ranks, world_size: int) -> None:
    ranks.run(world_size, watched)


@pytest.mark.ranks(2)
def test_a_watcher_changes_nothing(group: dist.ProcessGroup) -> None:
    """Every op with a gradient, and steps of whole models, give the same bits under a watcher."""
    for name, call in calls(group).items():
        plain = trained(call)
        with Watch():
            watched = trained(call)
        for one, other in zip(chain(*plain), chain(*watched), strict=True):
            assert torch.equal(one, other), name
    ids = torch.arange(8 * group.size())[None] % 29 + 2
    batch = {"input_ids": ids, "labels": ids}
    for name in ("LlamaForCausalLM", "GPT2LMHeadModel"):
        found = []
        for watcher in (nullcontext(), Watch()):
            model = model_of(name)
            with watcher, symm_cp.training_step(model, batch, group) as step:
                step.loss.backward()
            found.append([step.loss, *(p.grad for p in model.parameters())])
        for one, other in zip(*found, strict=True):
            assert one is other is None or torch.equal(one, other), name
