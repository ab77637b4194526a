"""The communicator for vLLM on CPU, against results from all ranks' tensors, gathered by gloo.

It derives from vLLM's own base class where vLLM is installed, else from a stub of it.
"""

from __future__ import annotations

import importlib
import logging
import tomllib
from importlib.metadata import EntryPoint
from typing import Any

import pytest
import torch
import torch.distributed as dist

from symm_cp.integrations import vllm as plugin
from symm_cp.testing import Ranks
from tests.backend.common import gathered, shared, small_integers, strided
from tests.backend.test_entry_point import PROJECT
from tests.exhaustive import some
from tests.integrations.engines.stubs import (
    needs_vllm,
    run_in_new_processes,
    vllm_communicator,
    vllm_platform,
)

SIZES = {2: ([3, 3], [4, 1], [0, 3]), 3: ([2, 2, 2], [0, 5, 1]), 4: ([1] * 4, [4, 0, 0, 2])}


def communicator(group: dist.ProcessGroup, name: str = "tp:0") -> Any:
    cpu = torch.device("cpu")
    return vllm_communicator()(group, cpu, shared(group), unique_name=name)


def everybodys(group: dist.ProcessGroup, tensor: torch.Tensor) -> list[torch.Tensor]:
    """Gathers each rank's tensor through gloo."""
    return [x for x in gathered(group, tensor) if isinstance(x, torch.Tensor)]


def drawn(group: dist.ProcessGroup, shape: list[int], dtype: torch.dtype) -> torch.Tensor:
    return small_integers(tuple(shape), dtype, group.rank())  # sums are exact in every dtype


def reduces(group: dist.ProcessGroup) -> None:
    ours = communicator(group)
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int32):
        for shape in ([5, 7], [1], [0, 4], [300, 700]):
            x = drawn(group, shape, dtype)
            before = x.clone()
            total = ours.all_reduce(x)
            assert total.dtype == dtype
            assert torch.equal(total, sum(everybodys(group, before)))
            assert torch.equal(x, before)  # the input is unchanged
    x = strided(drawn(group, [6, 5], torch.float32))
    assert torch.equal(ours.all_reduce(x), sum(everybodys(group, x)))


def gathers_parts(group: dist.ProcessGroup) -> None:
    ours, rank, size = communicator(group), group.rank(), group.size()
    for sizes in SIZES[size]:
        for dim in (0, 1, -1):
            shape = [3, 2, 4]
            shape[dim] = sizes[rank]
            x = drawn(group, shape, torch.bfloat16)
            expected = torch.cat(everybodys(group, x), dim)
            for given in (x, strided(x)):
                assert torch.equal(ours.all_gatherv(given, dim, sizes), expected)
        # As vLLM's dispatch does: hidden states, weights and ids of experts in one call.
        tokens = [
            drawn(group, [sizes[rank], 8], torch.bfloat16),
            drawn(group, [sizes[rank], 2], torch.float32),
            drawn(group, [sizes[rank], 2], torch.int64),
        ]
        for found, x in zip(ours.all_gatherv(tokens, 0, sizes), tokens, strict=True):
            assert torch.equal(found, torch.cat(everybodys(group, x)))
    x = drawn(group, [3, 5], torch.float32)
    assert torch.equal(ours.all_gatherv(x), torch.cat(everybodys(group, x)))
    (found,) = ours.all_gatherv([x])
    assert torch.equal(found, torch.cat(everybodys(group, x)))
    assert ours.all_gatherv([]) == []


def scatters_parts(group: dist.ProcessGroup) -> None:
    ours, rank, size = communicator(group), group.rank(), group.size()
    for sizes in (None, *SIZES[size]):
        for dim in (0, 1, -1):
            shape = [3, 2, 4]
            shape[dim] = 2 * size if sizes is None else sum(sizes)
            x = drawn(group, shape, torch.float32)
            total = sum(everybodys(group, x))
            expected = total.split(2 if sizes is None else sizes, dim)[rank]
            for given in (x, strided(x)):
                assert torch.equal(ours.reduce_scatterv(given, dim, sizes), expected)
            output = torch.empty_like(expected)
            assert ours.reduce_scatterv_into_output(x, output, dim, sizes) is output
            assert torch.equal(output, expected)


def passes_tokens_on(group: dist.ProcessGroup) -> None:
    """The manager dispatches and combines tokens; without one they are returned as they are."""
    ours = communicator(group, "ep:0")
    x, weights, ids = torch.ones(2, 3), torch.ones(2, 1), torch.zeros(2, 1)
    assert ours.dispatch(x, weights, ids) == (x, weights, ids)
    assert ours.combine(x) is x

    class Manager:  # like vLLM's AgRsAll2AllManager, with 1 token on rank 0, 2 on rank 1, ...
        sizes = tuple(1 + rank for rank in range(group.size()))

        def dispatch(self, hidden, weights, ids, is_sequence_parallel, extra_tensors):
            return ours.all_gatherv([hidden, weights, ids, *extra_tensors], 0, self.sizes)

        def combine(self, hidden, is_sequence_parallel=False):
            return ours.reduce_scatterv(hidden, 0, self.sizes)

        def combine_into_output(self, hidden, output, is_sequence_parallel=False):
            return ours.reduce_scatterv_into_output(hidden, output, 0, self.sizes)

    ours.all2all_manager = Manager()
    tokens = drawn(group, [1 + group.rank(), 6], torch.float32)
    all_tokens = ours.dispatch(tokens, tokens, tokens, True, [tokens])
    assert len(all_tokens) == 4
    assert all(torch.equal(x, torch.cat(everybodys(group, tokens))) for x in all_tokens)
    back = ours.combine(all_tokens[0])
    assert torch.equal(back, group.size() * tokens)  # each rank sends the same
    output = torch.empty_like(back)
    assert torch.equal(ours.combine_into_output(all_tokens[0], output), back)


@pytest.mark.parametrize("world_size", some(2, 4, of=[2, 3, 4]))
@pytest.mark.parametrize("check", [reduces, gathers_parts, scatters_parts, passes_tokens_on])
def test_methods(ranks: Ranks, check: Any, world_size: int) -> None:
    ranks.run(world_size, check)


def told(call: Any) -> str:
    with pytest.raises((ValueError, RuntimeError)) as failure:
        call()
    return f"{type(failure.value).__name__}: {failure.value}"


def refuses(group: dist.ProcessGroup) -> dict[str, str]:
    """Passes wrong arguments on the last rank only."""
    ours, size = communicator(group), group.size()
    wrong = group.rank() == size - 1
    part, whole = torch.ones(2, 3), torch.ones(2 * size, 3)
    sizes = [2] * size
    calls = {
        "own length": lambda: ours.all_gatherv(part, 0, [*sizes[:-1], 3] if wrong else sizes),
        "one of a list": lambda: ours.all_gatherv(
            [part, torch.ones(1, 3) if wrong else part], 0, sizes
        ),
        "count": lambda: ours.all_gatherv(part, 0, sizes[1:] if wrong else sizes),
        "dim": lambda: ours.all_gatherv(part, 2 if wrong else 0, sizes),
        "negative": lambda: ours.all_gatherv(part, 0, [-2, *sizes[1:]] if wrong else sizes),
        "sum": lambda: ours.reduce_scatterv(whole, 0, [1] * size if wrong else sizes),
        "indivisible": lambda: ours.reduce_scatterv(
            torch.ones(2 * size + 1, 3) if wrong else whole, 0
        ),
        "output": lambda: ours.reduce_scatterv_into_output(
            whole, torch.ones(1, 3) if wrong else part.clone(), 0, sizes
        ),
    }
    messages = {}
    for name, call in calls.items():
        messages[name] = told(call)
        assert torch.equal(ours.all_gatherv(part), torch.ones(2 * size, 3)), name
    return messages


REASONS = {
    "own length": "all_gatherv: input of shape (2, 3) on rank ",
    "one of a list": "all_gatherv: input of shape (1, 3) on rank ",
    "count": "all_gatherv: sizes=[2",
    "dim": "all_gatherv: dim=2 is out of range for a 2-D input",
    "negative": "all_gatherv: sizes=[-2, ",
    "sum": "reduce_scatterv: sizes=[1, 1",
    "indivisible": "reduce_scatterv: length ",
    "output": "reduce_scatterv_into_output: output of shape (1, 3) and torch.float32 must be",
}


@pytest.mark.parametrize("world_size", some(2, of=[2, 3, 4]))
def test_refusals_name_the_argument_on_all_ranks(ranks: Ranks, world_size: int) -> None:
    *others, wrong = ranks.run(world_size, refuses)
    for name, reason in REASONS.items():
        assert wrong[name].startswith("ValueError")
        for messages in (wrong, *others):
            assert reason in messages[name], (name, messages[name])
        assert all(f"rank {world_size - 1}" in messages[name] for messages in others)


class Platform:
    """Stand-in for vLLM's platform, with the parts that the plug-in uses."""

    dist_backend = "gloo"

    def __init__(self, kind: str = "cpu", communicator: str = plugin._VLLMS) -> None:
        self._kind, self._communicator = kind, communicator

    def is_cpu(self) -> bool:
        return self._kind == "cpu"

    def get_device_communicator_cls(self) -> str:
        return self._communicator


def test_registers_on_cpu() -> None:
    platform = Platform()
    with vllm_platform(platform):
        plugin.register()
        plugin.register()
    assert platform.dist_backend == "symm_cp"
    assert platform.get_device_communicator_cls() == plugin.COMMUNICATOR
    assert Platform.dist_backend == "gloo"  # the class is unchanged
    module, name = plugin.COMMUNICATOR.rsplit(".", 1)
    found = vllm_communicator()
    assert (found.__module__, found.__name__) == (module, name)


@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_the_entry_points(name: str) -> None:
    group = {"vllm": "vllm.general_plugins", "sglang": "sglang.srt.plugins"}[name]
    found = tomllib.loads(PROJECT.read_text())["project"]["entry-points"][group]
    module = importlib.import_module(f"symm_cp.integrations.{name}")
    assert EntryPoint("symm_cp", found["symm_cp"], group).load() is module.register


def test_leaves_other_choices(caplog: pytest.LogCaptureFixture) -> None:
    gpu, others = Platform("cuda"), Platform(communicator="others.Communicator")
    with caplog.at_level(logging.WARNING):
        for platform in (gpu, others):
            with vllm_platform(platform):
                plugin.register()
            assert platform.dist_backend == "gloo"
            assert platform.get_device_communicator_cls() == platform._communicator
    assert "symm_cp is not used" in caplog.text
    assert "others.Communicator" in caplog.text


def uses_vllms_own(world: dist.ProcessGroup) -> None:
    """vLLM loads the plug-in, and its `GroupCoordinator` makes the communicator."""
    from vllm.distributed.parallel_state import GroupCoordinator
    from vllm.platforms import current_platform
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    assert current_platform.dist_backend == "symm_cp"
    rank, size = world.rank(), world.size()
    group = GroupCoordinator(
        [list(range(size))], rank, current_platform.dist_backend, True, group_name="tp"
    )
    assert isinstance(group.device_communicator, vllm_communicator())
    assert dist.get_backend(group.device_group) == "symm_cp"
    x = drawn(world, [2 * size, 6], torch.bfloat16)
    inputs = everybodys(world, x)
    total = sum(inputs)
    assert torch.equal(group.all_reduce(x.clone()), total)
    for dim in (0, 1, -1):
        assert torch.equal(group.all_gather(x, dim), torch.cat(inputs, dim))
        found = group.gather(x, size - 1, dim)
        assert found is None if rank < size - 1 else torch.equal(found, torch.cat(inputs, dim))
    assert torch.equal(group.reduce_scatter(x, 0), total.chunk(size)[rank])
    assert torch.equal(group.broadcast(x.clone(), 1), inputs[1])
    sizes = SIZES[size][1]
    rows = drawn(world, [sizes[rank], 3], torch.float32)
    (found,) = group.all_gatherv([rows], 0, sizes)
    assert torch.equal(found, torch.cat(everybodys(world, rows)))
    assert torch.equal(group.reduce_scatterv(found, 0, sizes), size * rows)
    if rank > 0:
        assert torch.equal(group.recv(x.shape, x.dtype), inputs[rank - 1])
    if rank + 1 < size:
        group.send(x)
    group.barrier()  # a rank must not exit while others still receive from it


@needs_vllm
@pytest.mark.parametrize("world_size", some(2, of=[2, 4]))
def test_vllms_own_classes(ranks: Ranks, world_size: int) -> None:
    run_in_new_processes(ranks, world_size, uses_vllms_own)
