"""Arguments of the wrong kind for ops on sequences: refused by all ranks, or reported to peers."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import symm_cp
from tests.exhaustive import some
from tests.ops.refusals import Wrong, check_refusals
from tests.ops.test_errors import works


class _Balancer(NamedTuple):
    chunk_order: tuple[int, ...] = (0, 1, 2, 3, 4)
    chunk_lengths: tuple[int, ...] = (1,) * 5


def _recurrence(**changed: Any) -> dict[str, Any]:
    features = torch.randn(3, 1, 4, 2, 3).unbind()
    g, beta = torch.randn(2, 1, 4, 2).unbind()
    names = ("query", "key", "value", "g", "beta")
    return {**dict(zip(names, (*features, g, beta), strict=True)), **changed}


def _linear_attention(*, group: Any, **changed: Any) -> object:
    named = _recurrence(**changed)
    del named["beta"]
    return symm_cp.gated_linear_attention(**named, group=group)


def bad_calls(group: dist.ProcessGroup) -> list[Wrong]:
    """Bad calls and their errors, which name the op, the argument and the requirement."""
    W = group.size()
    x, rows, weight = torch.randn(1, 2 * W, 2 * W, 2), torch.randn(1, 2, 3), torch.randn(3, 4 * W)
    out_weight, to_heads = torch.randn(4 * W, 3), symm_cp.sequence_to_heads

    def project(*weights: torch.Tensor, **options: Any) -> object:
        return symm_cp.ulysses_projection(rows, weights, features=2, group=group, **options)

    def output(weight: torch.Tensor, bias: torch.Tensor) -> object:
        given = torch.randn(1, 2, W, 2)
        return symm_cp.ulysses_output_projection(given, weight, bias=bias, group=group)

    balancer: Any = _Balancer()
    number: Any = 3
    pairs: Any = [(0.0, 2.0)] * W
    return [
        (ValueError, r"sequence_to_heads: .*at least one tensor",
         lambda: to_heads([], group=group)),
        (TypeError, r"sequence_to_heads: x=3 must be a tensor",
         lambda: to_heads(number, group=group)),
        (TypeError, r"sequence_to_heads: x\[1\] is 3, must be",
         lambda: to_heads([x, number], group=group)),
        (TypeError, r"sequence_to_heads: heads=3 must be",
         lambda: to_heads(x, group=group, heads=number)),
        (TypeError, r"heads=\[\(0\.0, 2\.0\).*must be a Split",
         lambda: to_heads(x, group=group, heads=pairs)),
        (ValueError, r"sequence_to_heads: load_balancer: chunk_order has 5 chunks",
         lambda: to_heads(x, group=group, load_balancer=balancer)),
        (TypeError, r"heads_to_sequence: load_balancer=3 must be a LoadBalancer",
         lambda: symm_cp.heads_to_sequence(x, group=group, load_balancer=number)),
        (ValueError, r"ulysses_projection: .*at least one tensor", project),
        (ValueError, r"ulysses_projection: biases have shapes \[\[1\]\], must have one number",
         lambda: project(weight, biases=[torch.randn(1)])),
        (TypeError, r"ulysses_projection: biases\[0\] is torch.float64 on cpu, x torch.float32",
         lambda: project(weight, biases=[torch.randn(4 * W).double()])),
        (ValueError, r"ulysses_projection: weights\[0\] of shape \[4, 2\] needs 3 rows to follow x",
         lambda: project(torch.randn(4, 2))),
        (ValueError, r"ulysses_projection: heads has 2 entries for 1 tensors",
         lambda: project(weight, heads=[(0, 1), (1, 2)])),
        (ValueError, r"ulysses_output_projection: bias has shape \[1\], must be \[3\]",
         lambda: output(out_weight, torch.randn(1))),
        (TypeError, r"ulysses_output_projection: bias is torch.float64 on cpu, x torch.float32",
         lambda: output(out_weight, torch.randn(3).double())),
        (ValueError, r"ulysses_output_projection: weight has shape \[\], must be a matrix",
         lambda: output(torch.randn(()), torch.randn(3))),
        (TypeError, r"gated_delta_rule: g is None, must be a tensor",
         lambda: symm_cp.gated_delta_rule(**_recurrence(g=None), group=group)),
        (TypeError, r"gated_delta_rule: query is torch.int64, must be float64",
         lambda: symm_cp.gated_delta_rule(
             **_recurrence(query=torch.ones(1, 4, 2, 3, dtype=torch.int64)), group=group)),
        (ValueError, r"gated_delta_rule: beta is on meta and query on cpu",
         lambda: symm_cp.gated_delta_rule(
             **_recurrence(beta=torch.ones(1, 4, 2, device="meta")), group=group)),
        (ValueError, r"gated_delta_rule: value .* a multiple of its heads",
         lambda: symm_cp.gated_delta_rule(
             **_recurrence(query=torch.ones(1, 4, 0, 3), key=torch.ones(1, 4, 0, 3)), group=group)),
        (TypeError, r"gated_linear_attention: g is None, must be a tensor",
         lambda: _linear_attention(g=None, group=group)),
        (ValueError, r"gated_linear_attention: g is on meta and query on cpu",
         lambda: _linear_attention(g=torch.ones(1, 4, 2, device="meta"), group=group)),
        (ValueError, r"gated_linear_attention: chunk_size=0 must be at least 1",
         lambda: _linear_attention(chunk_size=0, group=group)),
        (ValueError, r"causal_convolution: weight .* must be \(channels, taps\)",
         lambda: symm_cp.causal_convolution(rows, weight, group=group)),
        (ValueError, r"causal_convolution: cu_seqlens .* must ascend from 0",
         lambda: symm_cp.causal_convolution(
             rows, torch.ones(2, 4), group=group, cu_seqlens=[0, 1])),
        (ValueError, r"exchange_halo: sizes=\[1\] has 1 entries, must have one for each",
         lambda: symm_cp.exchange_halo(rows, 1, group=group, sizes=[1])),
    ]  # fmt: skip


@pytest.mark.parametrize("world_size", some(2, of=[2, 3, 4]))
@pytest.mark.ranks
def test_arguments_of_the_wrong_kind(group: dist.ProcessGroup, world_size: int) -> None:
    x = torch.randn(1, 2 * world_size, 2, 2)
    check_refusals(group, lambda: symm_cp.sequence_to_heads(x, group=group), bad_calls(group))


@pytest.mark.parametrize("world_size", some(2, of=[2, 4]))
@pytest.mark.ranks
def test_meshes_of_the_wrong_dimension(group: dist.ProcessGroup, world_size: int) -> None:
    """Meshes of too many or too few dimensions are refused."""
    mesh = init_device_mesh("cpu", (2, group.size() // 2), mesh_dim_names=("a", "b"))
    x, rows, weight = torch.randn(1, 4, 4, 2), torch.randn(1, 2, 3), torch.randn(3, 8)
    one = "group: a device mesh must have one dimension, this one has 2: pick one"
    for call in (
        lambda: symm_cp.sequence_to_heads(x, group=mesh),
        lambda: symm_cp.heads_to_sequence(x, group=mesh),
        lambda: symm_cp.exchange_halo(x, 1, group=mesh),
        lambda: symm_cp.scan_states(x, decay=x, group=mesh),
        lambda: symm_cp.gated_delta_rule(**_recurrence(), group=mesh),
        lambda: _linear_attention(group=mesh),
        lambda: symm_cp.causal_convolution(rows, torch.ones(2, 4), group=mesh),
        lambda: symm_cp.ulysses_projection(rows, weight, features=2, group=mesh),
        lambda: symm_cp.ulysses_output_projection(x, weight.T, group=mesh),
    ):
        with pytest.raises(ValueError, match=one):
            call()
        works(group)
    mixed: Any
    for on, mixed, message in (
        (mesh, "ulysses", "group has 2 dimensions, method='ulysses' requires one"),
        (mesh["a"], ("ulysses", "allgather"), "requires group to be a DeviceMesh of 2 dimensions"),
        (group, ("ulysses", "allgather"), "requires group to be a DeviceMesh of 2 dimensions"),
        (mesh, ("ulysses", "ulysses"), "must be .'ulysses', 'allgather'. or"),
        (mesh, ("ulysses", 3), "must be .'ulysses', 'allgather'. or"),
        (mesh, ("ulysses",), "must be .'ulysses', 'allgather'. or"),
        (mesh["a"], "ring", "unknown method='ring'; choose one of"),
    ):
        with pytest.raises(ValueError, match=f"all_gather_attention: .*{message}"):
            symm_cp.all_gather_attention(x, x, x, group=on, method=mixed)
        works(group)
    symm_cp.all_gather_attention(x, x, x, group=mesh, method=("ulysses", "allgather"))
