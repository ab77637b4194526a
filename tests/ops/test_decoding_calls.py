"""Linears (csrc/ops/decoding_glue.cpp) and comparisons of inputs for each token that is decoded."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.profiler import profile

from symm_cp.group.memory import group_name
from symm_cp.ops import equal_inputs
from symm_cp.ops.direct import decoding_linear
from symm_cp.tensor_parallel import replicated
from symm_cp.testing import Ranks
from tests.exhaustive import some
from tests.ops.calls import CountedOps


class Subclass(torch.Tensor):
    pass


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
def test_linears(dtype: torch.dtype, bias: bool) -> None:
    linear, module = decoding_linear(), nn.Linear(24, 10, bias=bias, dtype=dtype)
    with torch.no_grad():
        sequences = torch.randn(2, 3, 24, dtype=dtype)
        for x in (sequences[0], sequences, sequences[:, -1:], sequences[:1, -1:]):
            expected = module(x.clone(memory_format=torch.contiguous_format))
            assert torch.equal(linear(module._parameters, x, 24, None), expected)
        with torch.inference_mode():
            assert linear(module._parameters, x, 24, None).is_inference()


@pytest.mark.parametrize("sequences", [1, 2])
def test_the_last_token_is_multiplied_without_a_copy_of_the_weight(sequences: int) -> None:
    """As torch multiplies a slice whose weight requires no gradient."""
    weight = torch.randn(10, 24)
    last = torch.randn(sequences, 3, 24)[:, -1:]
    with torch.no_grad(), profile() as profiled:
        native = decoding_linear()({"weight": weight, "bias": None}, last, 24, None)
        eager = replicated.linear(last, weight, None)
    torch.testing.assert_close(native, F.linear(last, weight))
    assert torch.equal(native, eager)
    ops = [event.key for event in profiled.key_averages()]
    assert "aten::mm" in ops
    assert "aten::bmm" not in ops


def test_linears_that_are_left_to_python() -> None:
    linear, parameters = decoding_linear(), nn.Linear(24, 10)._parameters
    x = torch.randn(4, 24)
    assert linear(parameters, x, 24, None) is None  # with gradients
    with torch.no_grad():
        for other in (x[0], x.as_subclass(Subclass), x.to("meta")):
            assert linear(parameters, other, 24, None) is None
        assert linear(parameters, x, 23, None) is None
        assert linear({}, x, 24, None) is None  # as of a parametrized weight
        for mode in (torch.autocast("cpu"), CountedOps(), torch.device("cpu")):
            with mode:
                assert linear(parameters, x, 24, None) is None
        assert linear(parameters, x, 24, None) is not None


def sums_linears(group: dist.ProcessGroup) -> None:
    linear, name = decoding_linear(), group_name(group)
    torch.manual_seed(0)
    W, rank = group.size(), group.rank()
    x, weight, bias = torch.randn(2, 3, 4 * W), torch.randn(5, 4 * W), torch.randn(5)
    own = {"weight": weight.chunk(W, 1)[rank], "bias": bias}
    with torch.no_grad():
        got = linear(own, x.chunk(W, -1)[rank], 4, name)
    torch.testing.assert_close(got, F.linear(x, weight, bias))


def agrees(group: dist.ProcessGroup) -> None:
    name, W, odd = group_name(group), group.size(), group.rank() == group.size() - 1

    def agree(input: torch.Tensor, *further: Any) -> bool:
        return equal_inputs._agree(name, input, further)

    ids = torch.arange(6).view(2, 3)
    for same in (ids, ids[:, :1], ids.t(), ids.bool(), ids[:0], ids[0, 0]):
        assert agree(same)
    changed = ids.clone()
    changed[1, 1] += 1
    for other in (changed, ids.view(3, 2), ids.int(), ids[:1], ids.view(-1), ids.float()):
        assert agree(other if odd else ids) is (W == 1)
    assert agree(ids, *(["LoRA"] if odd else [])) is (W == 1)
    with torch.inference_mode():
        assert agree(ids + 0)
    for unknown in (ids.float(), torch.zeros(1025, dtype=torch.int32), ids.as_subclass(Subclass)):
        assert agree(unknown) is (W == 1)


CHECKS = [sums_linears, agrees]


@pytest.mark.parametrize("world_size", some(2, of=[1, 2, 3, 4]))
@pytest.mark.parametrize("check", CHECKS)
def test_with_peers(ranks: Ranks, check: Any, world_size: int) -> None:
    ranks.run(world_size, check)


@pytest.mark.parametrize("world_size", some(2, of=[2, 3]))
@pytest.mark.ranks
def test_ranks_that_compare_otherwise(group: dist.ProcessGroup, world_size: int) -> None:
    """If one rank falls back to Python, all ranks compare all their values."""
    odd, ids, name = group.rank() == group.size() - 1, torch.arange(4)[None], group_name(group)
    compared = mock.Mock(wraps=equal_inputs.compare)
    given = ids.as_subclass(Subclass) if odd else ids
    with mock.patch.object(equal_inputs, "compare", compared):
        equal_inputs.same_on_all_ranks(given, "op", "ids", "remedy", name)
        with pytest.raises(RuntimeError, match="differ between"):
            equal_inputs.same_on_all_ranks(given + odd, "op", "ids", "remedy", name)
    assert compared.call_count == 2
