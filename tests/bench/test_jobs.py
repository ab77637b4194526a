"""Jobs: all variants compute the same result, wrong results are noticed, shapes are parsed."""

from __future__ import annotations

import math
from collections.abc import Callable
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from symm_cp import tuning
from symm_cp.commands.bench import jobs, shapes
from symm_cp.commands.bench.jobs import BACKWARD, BOTH, Setting
from symm_cp.commands.harness.measure import FUSED, LIMIT, unfused_over
from symm_cp.parsing import size_text
from symm_cp.testing import Ranks
from tests.exhaustive import some

SMALL = {"matmul": "6x8x4", "attention": "8x4x8,8x4x8x2", "collectives": "4KiB,1B"}
F32, BF16 = torch.float32, torch.bfloat16


def on_groups(group: dist.ProcessGroup, check: Callable[..., None]) -> None:
    """Calls a check with the groups of unfused variants, which end with the test."""
    unfused = jobs.unfused_groups(group)
    check(group, unfused)
    dist.destroy_process_group(unfused["symm_cp"])


def check_all(group: dist.ProcessGroup, unfused: dict[str, dist.ProcessGroup]) -> None:
    for kind, text in SMALL.items():
        for dtype in (F32, BF16):
            for make in shapes.wanted(kind, text, group.size(), 0):
                case = make(Setting(group, unfused, dtype))
                assert next(iter(case.variants)) == LIMIT
                assert {FUSED, unfused_over("gloo"), unfused_over("symm_cp")} < set(case.variants)
                case.check()
                for run in case.variants.values():
                    run()


@pytest.mark.parametrize("world_size", some(2, of=[1, 2, 3, 4]))
def test_every_variant_computes_the_same(ranks: Ranks, world_size: int) -> None:
    ranks.run(world_size, on_groups, check_all)


@pytest.mark.ranks(2)
def test_gradients_are_compared(group: dist.ProcessGroup) -> None:
    """The fused and the unfused gradients are equal; the limit's have their number."""
    gloo = {"gloo": group}
    for passes in (BACKWARD, BOTH):
        setting = Setting(group, gloo, passes=passes)
        for make in (jobs.gather_matmul, jobs.matmul_scatter, jobs.matmul_all_reduce):
            case = make(setting, 6, 8, 4)
            case.check()
            assert len(case.variants[LIMIT]()) == 2
        for causal in (False, True):
            case = jobs.attention(setting, 8, 4, 2, 8, causal=causal)
            case.check()
            assert len(case.variants[LIMIT]()) == 3


def watch_all(group: dist.ProcessGroup, unfused: dict[str, dist.ProcessGroup]) -> None:
    """Each variant runs over the group that it names."""
    for kind, text in SMALL.items():
        for make in shapes.wanted(kind, text.partition(",")[0], group.size(), 0):
            case = make(Setting(group, unfused))
            for name, over in unfused.items():
                calls: list[str] = []

                def note(*args: object, group: dist.ProcessGroup, calls: list[str] = calls) -> None:
                    calls.append(group.group_name)

                with (
                    mock.patch.object(jobs, "gather_into", note),
                    mock.patch.object(jobs, "scatter_into", note),
                    mock.patch.object(dist, "all_reduce", note),
                ):
                    case.variants[unfused_over(name)]()
                assert set(calls) == {over.group_name}, (case.name, name)


def test_unfused_variants_over_backends_by_name(ranks: Ranks) -> None:
    ranks.run(2, on_groups, watch_all)


@pytest.mark.ranks(2)
def test_a_wrong_result_is_noticed(group: dist.ProcessGroup) -> None:
    case = jobs.gather_matmul(Setting(group, {"gloo": group}), 8, 8, 8)
    multiply = torch.mm
    torch.mm = lambda *args, **kwargs: multiply(*args, **kwargs).mul_(1.01)
    try:
        with (
            tuning.forced("shards"),  # the kernel in Python
            pytest.raises(AssertionError, match="of the largest value"),
        ):
            case.check()
    finally:
        torch.mm = multiply
    case.check()


@pytest.mark.ranks(2)
def test_a_wrong_sum_is_noticed(group: dist.ProcessGroup) -> None:
    """Also of a collective, whose tensors are zeros once it has been checked."""
    case = jobs.all_reduce(Setting(group, {"gloo": group}), 64)
    right = case.variants[FUSED]
    case.variants[FUSED] = lambda: right().mul_(1.01)  # type: ignore[index]
    with pytest.raises(AssertionError, match="of the largest value"):
        case.check()
    case.variants[FUSED] = right  # type: ignore[index]
    case.check()
    for _ in range(2000):  # 2 to the power of 2000 is infinite
        case.variants[unfused_over("gloo")]()
    assert torch.isfinite(case.variants[unfused_over("gloo")]()).all()


@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
@pytest.mark.parametrize("name", sorted(shapes.MODELS))
def test_matmuls_of_a_model_use_all_its_weights(name: str, world_size: int) -> None:
    """Over all ranks, each token is multiplied with all weights of a layer."""
    model = shapes.MODELS[name]
    features = 2 * (model.heads + model.kv_heads) * model.head_dim + 3 * model.feed_forward
    sizes = [job.keywords for job in shapes.wanted("matmul", name, world_size, 512)]
    products = sum(size["rows"] * size["inner"] * size["columns"] for size in sizes)
    # A rank has a part of the features, and of the rows before they are gathered.
    assert products * world_size**2 == 512 * model.hidden * features


def test_sizes_in_bytes() -> None:
    for text in ("1B", "4KiB", "64 MiB", "2GiB"):
        assert size_text(shapes.nbytes(text)).replace(" ", "") == text.replace(" ", "")
    assert shapes.nbytes("3KiB") == 3072
    assert math.log2(shapes.nbytes("256MiB")) == 28


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        ("matmul", "8x8", "'8x8' is not a shape ROWSxINNERxCOLUMNS"),
        ("matmul", "8x0x8", "is not a shape"),
        ("matmul", "llama4", "'llama4' is not a shape"),
        ("matmul", "llama3-8b", "tokens: 100 is not divisible by 3 ranks"),
        ("attention", "8x8", "TOKENSxHEADSxHEAD_DIM"),
        ("attention", "8x8x8x3", "8 heads are not divisible by 3 key heads"),
        ("attention", "8x8x8x2x2", "is not a shape"),
        ("collectives", "4KB", "'4KB' is not a size, such as 4KiB"),
    ],
)
def test_malformed_shapes(kind: str, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        list(shapes.wanted(kind, text, 3, 100))
