"""Jobs: all variants compute the same result, wrong results are noticed, shapes are parsed."""

from __future__ import annotations

import math
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from symm_cp import tuning
from symm_cp.commands.bench import jobs, shapes
from symm_cp.commands.bench.jobs import Setting
from symm_cp.commands.bench.models import MODELS
from symm_cp.commands.harness.measure import UNFUSED
from symm_cp.parsing import size_text
from symm_cp.testing import Ranks
from tests.exhaustive import some

SMALL = {
    "matmul": "6x8x4",
    "attention": "8x4x8,8x4x8x2",
    "collectives": "4KiB,1B",
    "train": "64x1x48",
}
F32, BF16 = torch.float32, torch.bfloat16


def checked(group: dist.ProcessGroup) -> None:
    for kind, text in SMALL.items():
        for dtype in (F32, BF16):
            if kind == "train" and (dtype == BF16 or group.size() == 3):
                continue
            for wanted in shapes.wanted(kind, text, group.size(), 0):
                case = wanted.make(Setting(group, dtype)).case
                case.check()
                for run in case.variants.values():
                    run()


@pytest.mark.parametrize("world_size", some(2, of=[1, 2, 3, 4]))
def test_every_variant_computes_the_same(ranks: Ranks, world_size: int) -> None:
    ranks.run(world_size, checked)


def over_backends(group: dist.ProcessGroup) -> list[set[str]]:
    """Each variant runs over the group that it names."""
    members = list(range(group.size()))
    rivals = tuple(
        (f"over {name}", dist.new_group(members, backend=name)) for name in ("gloo", "symm_cp")
    )
    found = []
    for kind, text in SMALL.items():
        if kind == "train":
            continue
        for wanted in shapes.wanted(kind, text.partition(",")[0], group.size(), 0):
            setting = Setting(group, rivals=rivals)
            case = wanted.make(setting).case
            calls: list[str] = []
            resolve = jobs.unfused_all_gather, jobs.unfused_reduce_scatter, jobs.unfused_all_reduce
            for rival, other in rivals:
                with (
                    mock.patch.object(jobs, "unfused_all_gather", noting(resolve[0], calls)),
                    mock.patch.object(jobs, "unfused_reduce_scatter", noting(resolve[1], calls)),
                    mock.patch.object(jobs, "unfused_all_reduce", noting(resolve[2], calls)),
                ):
                    case.variants[rival]()
                assert calls
                assert set(calls) == {other.group_name}, (wanted.kind, rival)
                calls.clear()
            found.append(set(case.variants))
    for _, other in rivals:
        dist.destroy_process_group(other)
    return found


def noting(collective: Any, calls: list[str]) -> Any:
    def noted(*args: Any) -> Any:
        calls.append(next(name for name in reversed(args) if isinstance(name, str)))
        return collective(*args)

    return noted


def test_unfused_variants_over_backends_by_name(ranks: Ranks) -> None:
    for names in ranks.run(2, over_backends)[0]:
        assert names >= {"over gloo", "over symm_cp"}
        assert UNFUSED not in names


def wrong_result(group: dist.ProcessGroup) -> None:
    job = jobs.gather_matmul(Setting(group), 8, 8, 8)
    multiply = torch.mm
    torch.mm = lambda *args, **kwargs: multiply(*args, **kwargs).mul_(1.01)
    try:
        with (
            tuning.forced("shards"),  # the kernel in Python
            pytest.raises(AssertionError, match="of the largest value"),
        ):
            job.case.check()
    finally:
        torch.mm = multiply
    job.case.check()


def test_a_wrong_result_is_noticed(ranks: Ranks) -> None:
    ranks.run(2, wrong_result)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("name", sorted(MODELS))
def test_matmuls_of_a_model_use_all_its_weights(name: str, ranks: int) -> None:
    """Over all ranks, each token is multiplied with all weights of a layer."""
    model = MODELS[name]
    jobs_of_layer = list(shapes.wanted("matmul", name, ranks, 512))
    assert [job.kind for job in jobs_of_layer] == [
        "all-gather-matmul",
        "matmul-reduce-scatter",
    ] * 2
    operations = sum(job.size for job in jobs_of_layer) * ranks
    assert operations == 2 * 512 * model.layer_parameters
    (forward, backward) = shapes.wanted("attention", name, ranks, 512)
    assert forward.size * ranks == 4 * 512 * 512 * model.query
    assert backward.size == 2.5 * forward.size


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
        ("train", "64x2", "FEATURESxLAYERSxTOKENS"),
    ],
)
def test_malformed_shapes(kind: str, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        list(shapes.wanted(kind, text, 3, 100))
