"""Collectives under `torch.compile` on CPU, including those that write to an argument."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as torch_symm_mem

import symm_cp
from tests.exhaustive import some
from tests.ops.calls import OPS


def symmetric(like: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    tensor = torch_symm_mem.empty(*like.shape, dtype=like.dtype, device="cpu")
    torch_symm_mem.rendezvous(tensor, group.group_name)
    return tensor.copy_(like)


def all_of_them(group: dist.ProcessGroup) -> Callable[..., list[torch.Tensor]]:
    W, name = group.size(), group.group_name

    def run(x: torch.Tensor, changed: torch.Tensor) -> list[torch.Tensor]:
        total = OPS.one_shot_all_reduce(x, "avg", name)
        computed = OPS.one_shot_all_reduce(x * 2 + 1, "sum", name)
        out, part, columns = (
            torch.empty_like(x),
            x.new_empty(x.shape[0] // W, x.shape[1]),
            x.new_empty(x.shape[0], x.shape[1] // W),
        )
        OPS.one_shot_all_reduce_out(x, "sum", name, out)
        copied, second, third = (torch.empty_like(x) for _ in range(3))
        total = total + OPS.one_shot_all_reduce_copy(copied, x, "avg", name)
        OPS.one_shot_all_reduce_copy_out(copied, x + 1, "sum", name, second)
        OPS.two_shot_all_reduce_out(x, "sum", name, third)
        out = out + second * third
        OPS.reduce_scatter_out(x, name, False, part)
        returned = OPS.reduce_scatter_out(x, name, True, columns)
        own = x + 1
        again = OPS.two_shot_all_reduce_(own, "sum", name)
        OPS.two_shot_all_reduce_(changed, "avg", name)
        return [total + computed, out * 2, part + 1, columns + 1, returned, own * again, changed]

    return run


# Inductor compiles some twenty kernels here; each run has the usual ones in `test_gradients`.
@pytest.mark.parametrize(
    ("backend", "world_size"), some(("aot_eager", 3), of=[("aot_eager", 3), ("inductor", 2)])
)
@pytest.mark.ranks
def test_collectives(group: dist.ProcessGroup, world_size: int, backend: str) -> None:
    run = all_of_them(group)
    torch._dynamo.reset()
    compiled = torch.compile(run, backend=backend, fullgraph=True, dynamic=backend == "inductor")
    for place in (torch.clone, lambda t: symmetric(t, group)):
        x = torch.randn(4 * group.size(), 2 * group.size())
        inputs = [[place(x), place(x)] for _ in range(2)]
        expected, found = run(*inputs[0]), compiled(*inputs[1])
        for got, want in zip(found, expected, strict=True):
            torch.testing.assert_close(got, want)
        assert torch.equal(inputs[0][1], inputs[1][1])
        dist.barrier(group)  # before memory that peers read is freed


@pytest.mark.ranks(1)
def test_refuses_another_shape(group: dist.ProcessGroup) -> None:
    name, x = group.group_name, torch.ones(4, 2)

    def write(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return OPS.one_shot_all_reduce_out(x, "sum", name, out)

    compiled = torch.compile(write, backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match=r"out is torch\.float32 \[4, 1\], needs .* \[4, 2\]"):
        compiled(x, torch.empty(4, 1))


@pytest.mark.exhaustive
@pytest.mark.ranks(2)
def test_remote_tensors_are_not_written_to(group: dist.ProcessGroup) -> None:
    """Peers' memory is only read: the compiler never reuses it for its own results."""
    W, rank, name = group.size(), group.rank(), group.group_name
    own = symmetric(torch.full((4, 4), rank + 1.0), group)
    handle = torch_symm_mem.rendezvous(own, name)
    dist.barrier(group)

    def by_op(x: torch.Tensor) -> list[torch.Tensor]:
        return [(t * 2 + 1).sin() for t in OPS.get_remote_tensors(x, name)]

    def by_handle(x: torch.Tensor) -> list[torch.Tensor]:
        return [(handle.get_buffer(r, (4, 4), x.dtype) * 2 + 1).sin() for r in range(W)]

    for function in (by_op, by_handle):
        expected = function(own)
        found = torch.compile(function)(own)
        torch.testing.assert_close(found, expected)
        dist.barrier(group)
        assert (own == rank + 1.0).all()
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"symm_mem\.get_remote_tensors"):
        torch.compile(by_op, fullgraph=True)(own)


ALIKE = ["all_gather_matmul", "one_shot_all_reduce"]


@pytest.mark.parametrize(
    "op", some("all_gather_matmul", of=["all_gather_matmul", "one_shot_all_reduce"])
)
@pytest.mark.exhaustive
@pytest.mark.ranks(2)
def test_calls_keep_their_order_whatever_the_shapes(group: dist.ProcessGroup, op: str) -> None:
    """Inductor would swap these calls to save memory, if not for rank 1's larger product."""
    rank, W, name = group.rank(), group.size(), group.group_name
    w = torch.eye(256)

    def call(x: torch.Tensor) -> torch.Tensor:
        if op == "one_shot_all_reduce":
            return OPS.one_shot_all_reduce(x, "sum", name)
        return symm_cp.all_gather_matmul(x, w, gather_dim=0, group=group)

    def run(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        largest = (y @ w @ w).amax()
        return call(x), call(x * 2), largest

    x, y = torch.randn(64, 256), torch.randn(2048 if rank == 1 else 4, 256)
    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=True, dynamic=False)
    # A graph from the cache would show what an earlier version did.
    with torch._inductor.config.patch(force_disable_caches=True):
        first, second, _ = compiled(x, y)
    shards = [torch.empty_like(x) for _ in range(W)]
    dist.all_gather(shards, x, group)
    whole = sum(shards) if op == "one_shot_all_reduce" else torch.cat(shards)
    torch.testing.assert_close(first, whole)
    torch.testing.assert_close(second, 2 * whole)
