"""Plans: calls on streams that are recorded once and then made without Python."""

from __future__ import annotations

import os
import sys
import unittest.mock
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as torch_symm_mem
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import checkpoint

import symm_cp
from symm_cp import native, tuning
from symm_cp.cuda.plans import refusals
from symm_cp.group import memory
from symm_cp.ops.matmul import gather
from symm_cp.ops.op import COMPOSITE, Op, declared
from symm_cp.testing import Ranks
from tests.cuda.simulated import simulation
from tests.exhaustive import exhaustive, some
from tests.ops.calls import caller, completed

ATTENTION = torch.ops.symm_mem.fused_all_gather_attention

#: Ops whose examples stay in Python: the host reads numbers from their tensors.
IN_PYTHON = {
    "_gather_sequence",
    "_same_on_all_ranks",
    "_route_to_experts",
    "dispatch_to_experts",
    "combine_from_experts",
    "fused_dispatch_grouped_matmul",
    "fused_grouped_matmul_combine",
    "_fused_dispatch_grouped_matmul_backward",
    "_fused_grouped_matmul_combine_backward",
}


def runs() -> int:
    """The number of calls made by plans since this was last called."""
    return int(native.load().symm_cp_plans_run())


def refusal() -> str:
    """Why the last call that could not be recorded was not."""
    return ["", *refusals().values()][-1]


def planned_ops() -> list[Op]:
    return [op for op in declared() if not op.cpu_only]


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether tensors of any dtype are equal; NaN equals NaN."""
    return bool(np.array_equal(one.float().numpy(), other.float().numpy(), equal_nan=True))


def every_op(group: dist.ProcessGroup) -> dict[str, tuple[int, str]]:
    """Compares each op by plans with Python, bit by bit; returns planned calls and refusals."""
    made = {}
    for op in planned_ops():
        assert op.example is not None
        given = []
        for turn in range(4):
            torch.manual_seed(100 * turn + group.rank())
            given.append(op.example(caller(group, sizes=[3] * group.size())))
        results: list[list[torch.Tensor]] = []
        for plan_at in (-1, 0):
            with simulation(plan_at=plan_at, poison=plan_at == 0):
                runs()
                found = []
                for args, kwargs in given:
                    # Arguments are compared, too: an op may write its results to them.
                    args, kwargs = tree_map_only(torch.Tensor, torch.clone, (args, kwargs))
                    result = completed(op, op.overload(*args, **kwargs))
                    leaves = tree_leaves((result, args, kwargs))
                    found += [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
                results.append(found)
        for by_python, by_plan in zip(*results, strict=True):
            assert by_python.stride() == by_plan.stride(), op.name
            assert same_bits(by_python, by_plan), op.name
        made[op.name] = runs(), refusal()
    return made


@pytest.mark.parametrize("world_size", [1, 2, pytest.param(3, marks=exhaustive), 4])
def test_every_op_is_the_same_by_a_plan(ranks: Ranks, world_size: int) -> None:
    for made in ranks.run(world_size, every_op):
        in_python = {name for name, (count, _) in made.items() if count == 0}
        alone = {"_same_on_all_ranks"} if world_size == 1 else set()  # compares nothing
        assert in_python == IN_PYTHON - alone, in_python ^ IN_PYTHON
        # The calls that a composite makes have plans of their own, perhaps from the next call on.
        for op in planned_ops():
            count, _ = made[op.name]
            assert count in ((3, 5, 6, 9) if op.gradient is COMPOSITE else (0, 3)), op.name


def training(group: dist.ProcessGroup) -> int:
    """Losses, gradients and second derivatives of steps that are made by plans, under modes."""
    rank, W = group.rank(), group.size()
    results = []

    def step(turn: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(turn)
        whole, w = (
            torch.randn(4 * W, 6, generator=generator),
            torch.randn(6, 5, generator=generator),
        )
        x = whole.chunk(W)[rank].clone().requires_grad_()
        w.requires_grad_()
        q = torch.randn(1, 2, 4 * W, 8, generator=generator).chunk(W, 2)[rank].requires_grad_()

        def layer(x: torch.Tensor, w: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
            h = symm_cp.all_gather_matmul(x, w, group=group)
            out = symm_cp.matmul_reduce_scatter(h.relu(), w.t(), group=group)
            attended = symm_cp.all_gather_attention(q, q, q, group=group, is_causal=True)
            return out.square().sum() + attended.square().sum()

        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=turn % 2 == 1):
            loss = checkpoint(layer, x, w, q, use_reentrant=False)
        grads = torch.autograd.grad(loss, (x, w, q), create_graph=turn == 4)
        found = [loss.detach(), *(grad.detach() for grad in grads)]
        if turn == 4:
            found += torch.autograd.grad(sum(grad.square().sum() for grad in grads[:2]), (x, w))
        with torch.inference_mode():
            found.append(layer(x.detach(), w.detach(), q.detach()).clone())
        return found

    for plan_at in (-1, 1):
        with simulation(plan_at=plan_at):
            runs()
            results.append([step(turn) for turn in range(8)])
    for by_python, by_plan in zip(*results, strict=True):
        for one, other in zip(by_python, by_plan, strict=True):
            assert torch.equal(one, other)
    return runs()


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=exhaustive)])
def test_training_is_the_same_by_plans(ranks: Ranks, world_size: int) -> None:
    assert min(ranks.run(world_size, training)) > 20


@pytest.mark.parametrize("world_size", some(2, of=[1, 2, 3, 4]))
@pytest.mark.ranks
def test_transfers_in_the_background(group: dist.ProcessGroup, world_size: int) -> None:
    """Transfers in flight at once, awaited in another order; their inputs are overwritten."""
    rank, W, name = group.rank(), group.size(), group.group_name
    wait, ops = torch.ops._c10d_functional.wait_tensor, torch.ops.symm_mem
    gathered = torch.cat([torch.full((2, 600), float(r)) for r in range(W)])
    with simulation(plan_at=0, delays_us=1000, poison=True):
        for turn in range(4):
            runs()
            x, whole = torch.full((2, 600), float(rank)), gathered * 2
            outs = torch.zeros(2 * W, 600), torch.zeros(2, 600)
            results = [
                ops._low_contention_all_gather(x, name),
                ops._low_contention_reduce_scatter(whole, "avg", name),
                ops._low_contention_all_gather_out(x, name, outs[0]),
                ops._low_contention_reduce_scatter_out(whole, "sum", name, outs[1]),
            ]
            x.zero_(), whole.zero_()
            scattered = [wait(result) for result in reversed(results)]
            # Before, workspaces are made, which drops plans, and calls are recorded.
            assert turn < 2 or runs() == 4, refusals()
            assert results[2] is outs[0]
            assert results[3] is outs[1]
            assert torch.equal(scattered[3], gathered)
            assert torch.equal(scattered[1], gathered)
            assert torch.equal(scattered[2], torch.full((2, 600), 2.0 * rank))
            assert torch.equal(scattered[0], torch.full((2, 600), 2.0 * rank * W))


@pytest.mark.parametrize("world_size", some(2, of=[1, 2, 3, 4]))
@pytest.mark.ranks
def test_a_plan_frees_no_memory_that_another_stream_reads(
    group: dist.ProcessGroup, world_size: int
) -> None:
    """Memory that the op allocates and frees itself, while the second compute stream reads it."""
    gather_rows, W = gather.gather_rows, group.size()

    def doubled(at: Any, call: Any, x: torch.Tensor, weights: Any, *more: Any, **how: Any) -> None:
        gather_rows(at, call, x, [weight * 2 for weight in weights], *more, **how)

    with (
        unittest.mock.patch.object(gather, "gather_rows", doubled),
        simulation(plan_at=0, delays_us=2000, poison=True),
        tuning.forced("lanes"),
    ):
        runs()
        for turn in range(6):
            generator = torch.Generator().manual_seed(turn)
            x, w = torch.randn(8 * W, 6, generator=generator), torch.eye(6)
            found = symm_cp.all_gather_matmul(x.chunk(W)[group.rank()], w, group=group)
            assert torch.equal(found, x * 2), turn
        assert runs() >= 4, refusal()


@pytest.mark.ranks(3)
def test_calls_that_differ_have_plans_of_their_own(group: dist.ProcessGroup) -> None:
    """Calls that differ in strides, alignment, shared memory or settings do not share plans."""
    rank, W, name = group.rank(), group.size(), group.group_name
    w = torch.randn(6, 5, dtype=torch.float64)
    dist.broadcast(w, 0, group=group)

    def check(x: torch.Tensor, w: torch.Tensor) -> None:
        shards = [torch.empty_like(x.contiguous()) for _ in range(W)]
        dist.all_gather(shards, x.contiguous(), group=group)
        found = symm_cp.all_gather_matmul(x, w, group=group)
        torch.testing.assert_close(found, torch.cat(shards) @ w)

    with simulation(plan_at=0):
        memory = torch.randn(200, dtype=torch.float64)
        for begin in (0, 1, 3, 8, 0, 1, 3, 8):
            check(memory[begin : begin + 12].view(2, 6), w)
            check(memory[begin : begin + 12].view(6, 2).t(), w)
            check(memory.as_strided((2, 6), (8, 1), begin), w)
        # One tensor is part of the other, in two places.
        for begin in (0, 16, 0, 16, 8):
            both = torch.randn(60, dtype=torch.float64)
            check(both[begin : begin + 12].view(2, 6), both[:30].view(6, 5))
        assert runs() > 10
        # A number of rows that differs from rank to rank, and from call to call.
        for turn in range(6):
            sizes = [(r + turn) % 3 + 1 for r in range(W)]
            x = torch.randn(sizes[rank], 6, dtype=torch.float64)
            found = symm_cp.all_gather_matmul(x, w, group=group, sizes=sizes)
            assert found.shape == (sum(sizes), 5)
        runs()
        q = torch.randn(1, 2, 4, 8)
        for number in range(4):  # calls differ in options of the op
            scale = 0.3 + number % 2
            out = ATTENTION(q, q, q, name, scale=scale)[0]
            again = ATTENTION(q, q, q, name, scale=scale)[0]
            assert torch.equal(out, again)
        assert runs() > 0


def memory_of_calls(group: dist.ProcessGroup) -> list[list[int]]:
    """The peak memory of each call over all threads, by Python and by plans."""
    W, name = group.size(), group.group_name
    x, q = torch.randn(64, 64).bfloat16(), torch.randn(1, 4, 64, 32).bfloat16()
    weight, whole = torch.randn(64 * W, 64).bfloat16(), torch.randn(64 * W, 64).bfloat16()
    out, lse = ATTENTION(q, q, q, name)
    calls: list[Callable[[], object]] = [
        lambda: symm_cp.all_gather_matmul(x, weight, gather_dim=1, group=group),
        lambda: symm_cp.matmul_reduce_scatter(whole, x, group=group),
        lambda: ATTENTION(q, q, q, name),
        lambda: torch.ops.symm_mem.fused_all_gather_attention_backward(q, q, q, q, out, lse, name),
    ]
    most: list[list[int]] = []
    for plan_at in (-1, 0):
        with simulation(plan_at=plan_at, poison=True, delays_us=0) as made:
            most.append([])
            for call in calls:
                for _ in range(3):
                    runs(), made.machine.most()
                    call()
                most[-1].append(made.machine.most())
                assert runs() == (plan_at == 0)
    return most


def test_a_plan_takes_no_more_memory(ranks: Ranks) -> None:
    for found in ranks.run(4, memory_of_calls):
        for by_python, by_plan in zip(*found, strict=True):
            assert 0 < by_plan <= by_python, found


#: The simulator, and how torch calls a `TorchDispatchMode`.
BY_SIMULATOR = ("simulated.py", "ahead.py", "_compile.py", "simple_registry.py")


def by_simulator(frame: FrameType | None) -> bool:
    """Whether a function runs on behalf of the simulated device."""
    while frame is not None and frame.f_code.co_filename != __file__:
        if Path(frame.f_code.co_filename).name in BY_SIMULATOR:
            return True
        frame = frame.f_back
    return False


def changes(group: dist.ProcessGroup) -> None:
    """Plans are dropped when settings, the workspace or tensors read in place change."""
    x, w = torch.randn(2, 6), torch.ones(6, 5)

    def call() -> int:
        symm_cp.all_gather_matmul(x, w, group=group)
        return runs()

    with simulation(plan_at=0):
        runs()
        # The first call makes the workspace.
        assert [call() for _ in range(4)] == [0, 0, 1, 1]
        calls: list[FrameType] = []

        def note(frame: FrameType, event: str, _: object) -> None:
            if event == "call" and not by_simulator(frame):
                calls.append(frame)

        sys.setprofile(note)
        symm_cp.all_gather_matmul(x, w, group=group)
        sys.setprofile(None)
        assert runs() == 1
        assert len(calls) <= 12, calls
        with tuning.forced("whole"):
            assert [call() for _ in range(3)] == [0, 1, 1]
        assert [call() for _ in range(2)] == [0, 1]
        symm_cp.set_rotate_method("alltoall")
        assert [call() for _ in range(3)] == [0, 1, 1]
        symm_cp.set_rotate_method("allgather")
        assert [call() for _ in range(2)] == [0, 1]
        with symm_cp.trace() as recording:
            assert [call() for _ in range(2)] == [0, 0]
        assert len(recording.timeline.events) > 2
        with tuning.listening() as choices:
            assert call() == 0
        assert choices
        assert [call() for _ in range(2)] == [0, 1]
        # A larger call replaces the workspace.
        symm_cp.all_gather_matmul(torch.ones(2000, 6), w, group=group)
        assert [call() for _ in range(2)] == [0, 1]
        # A symmetric input may be read in place.
        shared = symm_mem_empty(x)
        symm_cp.read_in_place(shared, group)
        assert [call() for _ in range(2)] == [0, 0]
        assert refusal() == "the group reads tensors in place"


def symm_mem_empty(like: torch.Tensor) -> torch.Tensor:
    tensor = torch_symm_mem.empty(like.shape, dtype=like.dtype, device="cpu")
    tensor.copy_(like)
    return tensor


def test_plans_are_dropped_when_something_changes(ranks: Ranks) -> None:
    with ranks.own(2, changes) as running:
        for outcome in running.outcomes(timeout=60):
            assert not outcome.failure, outcome.failure


def in_python(group: dist.ProcessGroup) -> None:
    """Calls that are never recorded, and settings under which no call is."""
    name = group.group_name
    q = torch.randn(1, 2, 4, 8)
    with simulation(plan_at=0):
        runs()
        for _ in range(3):
            ATTENTION(q, q, q, name, dropout_p=0.5, dropout_seed=torch.tensor(1))
        for _ in range(3):
            ATTENTION(q, q, q, name, cu_seqlens=torch.tensor([0, 3, 8]))
        with unittest.mock.patch.dict(os.environ, {"SYMM_CP_DEBUG": "1"}):
            for _ in range(3):
                ATTENTION(q, q, q, name)
        with torch_symm_mem._test_mode():
            for _ in range(3):
                symm_cp.all_gather_matmul(q[0, 0], q[0, 0].t(), group=group)
        assert runs() == 0


def test_what_stays_in_python(ranks: Ranks) -> None:
    ranks.run(2, in_python)


#: Kernels that read values, or sizes that depend on values, on the host: all sum up 2-D tensors.
READERS: dict[str, Callable[[torch.Tensor], torch.Tensor | float]] = {
    "item": lambda x: x.sum().item(),
    "float": lambda x: float(x.sum()),
    "bool": lambda x: x.sum() if x.sum() > 0 else x.sum() * 1,
    "is_nonzero": lambda x: x.sum() if torch.is_nonzero(x.sum()) else 0.0,
    "tolist": lambda x: sum(sum(row) for row in x.tolist()),
    "numpy": lambda x: float(x.numpy().sum(dtype="float64")),
    "asarray": lambda x: float(np.asarray(x).sum(dtype="float64")),
    "equal": lambda x: x.sum() if torch.equal(x, x.abs()) else x.sum() * 1,
    "allclose": lambda x: x.sum() if torch.allclose(x, x.abs()) else x.sum() * 1,
    "nonzero": lambda x: x.flatten()[x.flatten().nonzero()].sum(),
    "where": lambda x: x[torch.where(x != 0)].sum(),
    "mask": lambda x: x[x > 0].sum() + x[x <= 0].sum(),
    "masked_select": lambda x: torch.masked_select(x, x != 0).sum(),
    "unique": lambda x: torch.unique(x).sum(),
    "one_hot": lambda x: x.sum() + 0 * torch.nn.functional.one_hot(x.abs().long()).sum(),
    "repeat_interleave": lambda x: (
        x[0].repeat_interleave(x[0].abs().long() + 1).sum() * 0 + x.sum()
    ),
    "tensor_split": lambda x: sum(
        part.sum() for part in torch.tensor_split(x, torch.argmax(x[:, 0])[None])
    ),
    "normal_": lambda x: x.sum() + 0 * torch.empty(3).normal_().sum(),
    "exponential_": lambda x: x.sum() + 0 * torch.empty(3).exponential_().sum(),
    "randperm": lambda x: x[torch.randperm(len(x))].sum(),
    "multinomial": lambda x: x.sum() + 0 * torch.multinomial(torch.ones(3), 1).sum(),
    "dropout": lambda x: x.sum() + 0 * torch.dropout(x, 0.5, True).sum(),
}


def readers(group: dist.ProcessGroup) -> dict[str, str]:
    """Multiplies by a number that the kernel reads; returns why each call was not recorded."""
    mm, reasons = torch.mm, {}
    others: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "clamp": lambda x: x.clamp(min=x.min()).reshape(-1).sum(),
        "index_select": lambda x: x.index_select(0, torch.arange(len(x))).sum(),
    }
    with simulation(plan_at=0), tuning.forced("shards"):
        runs()  # those of earlier tests
        for number, (kind, read) in enumerate({**READERS, **others}.items()):

            def multiply(x: torch.Tensor, w: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
                total: torch.Tensor = mm(x * read(x), w, out=out)  # noqa: B023
                return total

            for turn in range(3):
                generator = torch.Generator().manual_seed(turn)
                shards = torch.randn(group.size(), 2 + number, 6, generator=generator)
                w = torch.randn(6, 5, generator=generator)
                expected = [shard * shard.sum() @ w for shard in shards]
                with unittest.mock.patch.object(torch, "mm", multiply):
                    found = symm_cp.all_gather_matmul(shards[group.rank()], w, group=group)
                torch.testing.assert_close(found, torch.cat(expected), rtol=1e-4, atol=1e-4)
            made = runs()
            assert made == (0 if kind in READERS else 2), (kind, made, refusal())
            reasons[kind] = refusal() if kind in READERS else ""
    return reasons


def test_kernels_whose_host_reads_values_stay_in_python(ranks: Ranks) -> None:
    for reasons in ranks.run(2, readers):
        for kind in READERS:
            assert "reads values" in reasons[kind] or "draws random numbers" in reasons[kind], kind


def failing(group: dist.ProcessGroup) -> None:
    """A failing call gives up its workspace; later calls work."""
    x, w = torch.randn(2, 6), torch.randn(6, 5)
    with simulation(plan_at=0) as made:
        state = memory.resolve(group)
        expected = symm_cp.all_gather_matmul(x, w, group=group)
        for _ in range(2):
            assert torch.equal(expected, symm_cp.all_gather_matmul(x, w, group=group))
        assert runs() == 1
        made.library.simulated_refuse(1)
        with pytest.raises(RuntimeError, match="cuMemcpyBatchAsync failed: CUDA_ERROR_OUT_OF_MEM"):
            symm_cp.all_gather_matmul(x, w, group=group)
        made.library.simulated_refuse(0)
        assert state is memory.resolve(group)
        dist.barrier(group)
        for _ in range(3):
            assert torch.equal(expected, symm_cp.all_gather_matmul(x, w, group=group))
        assert runs() > 0


def test_a_call_that_fails_is_told_to_the_peers(ranks: Ranks) -> None:
    with ranks.own(2, failing) as running:
        for outcome in running.outcomes(timeout=60):
            assert not outcome.failure, outcome.failure
