"""`context_parallel` in which no attention was seen: an error, a warning, or nothing."""

from __future__ import annotations

import threading
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint

import symm_cp
from symm_cp.testing import Ranks
from tests.context_parallel.common import mesh_of

UNFUSED = "no attention ran context parallel"


class Attention(nn.Module):
    """Attention of one head, by torch's function, by hand, or by an op of this project."""

    def __init__(self, how: str, group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(8, 8)
        self.how, self.group = how, group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.linear(x)[:, None]
        if self.how == "by hand":
            return (q @ q.mT).softmax(-1) @ q
        if self.how == "direct":
            return symm_cp.all_gather_attention(q, q, q, group=self.group)
        return F.scaled_dot_product_attention(q, q, q)


def in_context(group: dist.ProcessGroup, call: Any, **options: Any) -> Any:
    with symm_cp.context_parallel(mesh_of(group), **options):
        return call(torch.ones(1, 8, 8))


def says_so(group: dist.ProcessGroup) -> None:
    local = Attention("by hand")
    message = f"Attention ran, but {UNFUSED}.*model=.*on_unfused"
    with pytest.raises(RuntimeError, match=message):
        in_context(group, local)
    with pytest.warns(UserWarning, match=message):
        in_context(group, local, on_unfused="warn")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        in_context(group, local, on_unfused="ignore")
        for how in ("function", "direct"):
            in_context(group, Attention(how, group))
        # No module ran: the program only cuts buffers, or computes without modules.
        x = torch.zeros(16)
        with symm_cp.context_parallel(mesh_of(group), buffers=[x], buffer_seq_dims=[0]):
            assert x.sin().shape == (8,)
        # A backward pass alone runs no module.
        attention = Attention("function")
        with symm_cp.context_parallel(mesh_of(group)):
            loss = attention(torch.ones(1, 8, 8)).sum()
        with symm_cp.context_parallel(mesh_of(group)):
            loss.backward()
    # The error of the body is not replaced.
    with pytest.raises(KeyError, match="inside"):
        in_context(group, lambda x: {}[local(x) is None or "inside"])
    with (
        pytest.raises(ValueError, match="on_unfused='never' must be one of"),
        symm_cp.context_parallel(mesh_of(group), on_unfused="never"),  # type: ignore[arg-type]
    ):
        raise AssertionError("never entered")


def test_a_context_without_attention_is_an_error(ranks: Ranks) -> None:
    ranks.run(2, says_so)


def restores(group: dist.ProcessGroup) -> None:
    x = torch.arange(16.0)
    with (
        pytest.raises(RuntimeError, match=UNFUSED),
        symm_cp.context_parallel(mesh_of(group), buffers=[x], buffer_seq_dims=[0]),
    ):
        Attention("by hand")(torch.ones(1, 8, 8))
    assert torch.equal(x, torch.arange(16.0))


def test_buffers_come_back_before_the_error(ranks: Ranks) -> None:
    ranks.run(2, restores)


def elsewhere(group: dist.ProcessGroup) -> None:
    mesh, x, fused, local = (
        mesh_of(group),
        torch.ones(1, 8, 8),
        Attention("function"),
        Attention("by hand"),
    )
    with symm_cp.context_parallel(mesh):  # nested: attention of the inner one is in both
        nn.Linear(8, 8)(x)
        with symm_cp.context_parallel(mesh):
            fused(x)

    def empty_inside(x: torch.Tensor) -> None:
        local(x)
        with symm_cp.context_parallel(mesh):
            pass

    with pytest.raises(RuntimeError, match=UNFUSED):
        in_context(group, empty_inside)
    # Recomputed in the backward pass.
    with symm_cp.context_parallel(mesh):
        loss = checkpoint(fused, x, use_reentrant=False).sum()
    with symm_cp.context_parallel(mesh):
        loss.backward()
    # Another thread's modules are not in this context.
    with symm_cp.context_parallel(mesh):
        thread = threading.Thread(target=local, args=(x,))
        thread.start()
        thread.join()
    styled = parallelize_module(Attention("by hand"), mesh, symm_cp.ContextParallel())
    with pytest.raises(RuntimeError, match=f"ContextParallel: Attention ran, but {UNFUSED}"):
        styled(x)
    # A module with the style in a context is seen by both.
    styled = parallelize_module(Attention("function"), mesh, symm_cp.ContextParallel())
    with symm_cp.context_parallel(mesh):
        nn.Sequential(styled)(x)


def test_nested_contexts_checkpoints_threads_and_the_style(ranks: Ranks) -> None:
    ranks.run(2, elsewhere)


def compiled(group: dist.ProcessGroup) -> None:
    for how in ("function", "by hand"):
        wrapped = torch.compile(Attention(how), backend="eager")
        own = Attention(how)
        own.compile(backend="eager")
        module = Attention(how)
        function = torch.compile(lambda x, m=module: m(x), backend="eager", fullgraph=True)
        for call in (wrapped, own, function):
            for _ in range(2):  # the second time nothing is traced
                if how == "function":
                    in_context(group, call)
                else:
                    with pytest.raises(RuntimeError, match=UNFUSED):
                        in_context(group, call)


@pytest.mark.exhaustive
def test_compiled_modules_count(ranks: Ranks) -> None:
    ranks.run(2, compiled, timeout=300)


def one_rank(group: dist.ProcessGroup) -> None:
    in_context(group, Attention("by hand"))


def test_on_one_rank_all_attention_is_whole(ranks: Ranks) -> None:
    ranks.run(1, one_rank)
