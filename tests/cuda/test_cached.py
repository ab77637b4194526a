"""What attention keeps from call to call on devices: masks and the edges of documents."""

from __future__ import annotations

import random
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import symm_cp
from symm_cp import cuda
from symm_cp.cuda.cached import HostReads
from symm_cp.group import memory
from symm_cp.ops.attention import tiles
from symm_cp.ops.attention.masks import _host_edges
from symm_cp.ops.attention.tiles import _band
from tests.cuda.graphs import graphed
from tests.cuda.simulated import simulation

CPU = torch.device("cpu")
BAND = (CPU, 40, 60, -3, 5, torch.float32)


def test_each_stream_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams are unordered: a mask made on one may be incomplete when another reads it."""
    _band.forget()
    with simulation() as made:
        _, *side = made.streams("sync")
        kept = {}
        for stream in (1, 2):
            monkeypatch.setattr(made, "streams", lambda channel, stream=stream: (stream, *side))
            kept[stream] = _band(*BAND)
            assert _band(*BAND)[0] is kept[stream][0]
        assert kept[1][0] is not kept[2][0]


def test_what_a_host_read_depends_on_its_context() -> None:
    reads: HostReads[int] = HostReads()
    tensor, count = OnGpu([0, 8]), iter(range(10))
    seen = [reads.get(tensor, lambda: next(count), context=context) for context in "aabba"]
    assert seen == [0, 0, 1, 1, 2]


@pytest.mark.ranks(2)
def test_windows_in_captures_and_outside_of_them(group: dist.ProcessGroup) -> None:
    seed = random.randrange(1 << 30)
    W, rank = group.size(), group.rank()
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, 2, 40 * W, 8, generator=generator) for _ in "qkv")
    rows = torch.arange(40 * W).chunk(W)[rank]
    offset = torch.arange(40 * W) - rows.unsqueeze(1)
    mask = (offset >= -13) & (offset <= 5)
    expected = F.scaled_dot_product_attention(q[:, :, rows], k, v, mask)
    mine = [t[:, :, rows] for t in (q, k, v)]

    _band.forget()  # the capture is the first to make the mask

    def call() -> torch.Tensor:
        out = symm_cp.all_gather_attention(*mine, group=group, window_left=13, window_right=5)
        assert isinstance(out, torch.Tensor)
        return out

    as_on_gpus = mock.patch.object(tiles, "_own", lambda scored, *_, **__: scored)
    with simulation() as made, as_on_gpus:
        cuda.reserve_on(memory.resolve(group), made, 1 << 16)
        graph, captured = graphed(made, call)
        for _ in range(2):
            # The mask made in the capture is not filled yet, and belongs to the graph.
            torch.testing.assert_close(call(), expected, rtol=1e-5, atol=1e-5)
            graph.replay()
            torch.testing.assert_close(captured, expected, rtol=1e-5, atol=1e-5)
            captured.fill_(torch.nan)


class OnGpu(torch.Tensor):
    """A tensor that claims to be on a GPU, and counts how often the host reads it."""

    @staticmethod
    def __new__(cls, values: list[int]) -> OnGpu:
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined,no-any-return]
            cls, (len(values),), dtype=torch.int32, device="cuda:0"
        )

    def __init__(self, values: list[int]) -> None:
        self.values, self.reads = values, 0

    def tolist(self) -> list[int]:
        self.reads += 1
        return list(self.values)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0]


def test_edges_on_a_gpu_are_read_once_for_each_version() -> None:
    tensor, other = OnGpu([0, 3, 8]), OnGpu([0, 5, 8])
    for _ in range(3):
        assert _host_edges("op", tensor, CPU) == [0, 3, 8]
        assert _host_edges("op", other, CPU) == [0, 5, 8]
    assert (tensor.reads, other.reads) == (1, 1)
    tensor.values = [0, 4, 8]
    tensor.add_(1)  # a write that torch sees
    for _ in range(2):
        assert _host_edges("op", tensor, CPU) == [0, 4, 8]
    assert tensor.reads == 2


def test_edges_on_a_gpu_are_not_read_in_a_capture() -> None:
    tensor = OnGpu([0, 3, 8])
    _host_edges("op", tensor, CPU)
    with (
        simulation(graph=True),
        pytest.raises(
            RuntimeError, match=r"op: cu_seqlens is on cuda:0.*a sequence of ints or a CP"
        ),
    ):
        _host_edges("op", tensor, CPU)
    assert tensor.reads == 1


def test_edges_on_the_host_are_read_in_a_capture_and_anew_each_time() -> None:
    edges = torch.tensor([0, 3, 8])
    with simulation(graph=True):
        assert _host_edges("op", edges, CPU) == [0, 3, 8]
        edges.numpy()[1] = 5  # torch does not see this
        assert _host_edges("op", edges, CPU) == [0, 5, 8]
