"""Experts of transformers fused with dispatch and combine: all forms of `ExpertsInterface`."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from transformers.integrations.moe import use_experts_implementation

from symm_cp import moe
from symm_cp.integrations.transformers.experts import DispatchedExperts, why_not_fused
from symm_cp.tensors.dtypes import wide
from tests.exhaustive import some

HIDDEN, WIDTH, EXPERTS, TOP_K = 8, 6, 8, 2


class Experts(nn.Module):
    """Weights as `ExpertsInterface` names them."""

    def __init__(self, config: Any, *, gate: bool, bias: bool, transposed: bool) -> None:
        super().__init__()
        self.num_experts = EXPERTS
        up = 2 * WIDTH if gate else WIDTH
        shapes = {"gate_up_proj" if gate else "up_proj": (HIDDEN, up), "down_proj": (WIDTH, HIDDEN)}
        for name, (rows, columns) in shapes.items():
            shape = (rows, columns) if transposed else (columns, rows)
            self.register_parameter(name, nn.Parameter(torch.randn(EXPERTS, *shape) / rows**0.5))
            if bias:
                self.register_parameter(f"{name}_bias", nn.Parameter(torch.randn(EXPERTS, columns)))
        self.act_fn = nn.SiLU()

    def forward(self, *_: Any) -> torch.Tensor:
        raise AssertionError("the tests name an implementation")


def made(*, gate: bool, bias: bool, transposed: bool, norm: bool = False) -> Any:
    decorated = use_experts_implementation(
        type("Decorated", (Experts,), {"forward": Experts.forward, "__init__": Experts.__init__}),
        has_gate=gate,
        has_bias=bias,
        is_transposed=transposed,
        has_post_expert_norm=norm,
    )
    config = SimpleNamespace(_experts_implementation="batched_mm")  # of any dtype
    module: Any = decorated(config, gate=gate, bias=bias, transposed=transposed)
    module.post_expert_norm = nn.RMSNorm(HIDDEN)
    return module


def part_of(module: Any, rank: int, ranks: int) -> Any:
    """The module with this rank's experts."""
    part = copy.deepcopy(module)
    part.num_experts = EXPERTS // ranks
    for name, parameter in module.named_parameters(recurse=False):
        part.register_parameter(name, nn.Parameter(parameter.detach().chunk(ranks)[rank].clone()))
    return part


@contextmanager
def only(function: str) -> Iterator[None]:
    """Checks that experts call `function` inside: "dispatch_matmul" if fused, else "dispatch"."""
    other = {"dispatch", "dispatch_matmul"} - {function}
    with (
        mock.patch.object(moe, other.pop(), side_effect=AssertionError("not this one")),
        mock.patch.object(moe, function, wraps=getattr(moe, function)) as called,
    ):
        yield
    assert called.called


def dispatched(module: Any, group: dist.ProcessGroup) -> DispatchedExperts:
    mesh = init_device_mesh("cpu", (group.size(), 1), mesh_dim_names=("ep", "tp"))
    return DispatchedExperts(module, mesh["ep"], mesh["tp"])


def equals_one_process(
    group: dist.ProcessGroup, tokens: int, dtype: torch.dtype, function: str, **form: bool
) -> None:
    """Compares results and the gradients of tokens, router weights and parameters."""
    W, rank = group.size(), group.rank()
    torch.manual_seed(7)
    module = made(**form).to(dtype)
    part = part_of(module, rank, W)
    x = torch.randn(W * tokens, HIDDEN).to(dtype)
    chosen = torch.rand(W * tokens, EXPERTS).topk(TOP_K).indices
    chosen[:, 0] = EXPERTS - 1  # some experts have no tokens on some ranks, the last has many
    chosen[:, 1] = chosen[:, 1] % (EXPERTS - 1)
    weights = torch.rand(W * tokens, TOP_K, dtype=wide(dtype))
    grad = torch.randn(W * tokens, HIDDEN).to(dtype)
    exact, inputs = copy.deepcopy(module).double(), [x.double(), weights.double()]
    for tensor in inputs:
        tensor.requires_grad_()
    expected = exact(inputs[0], chosen, inputs[1])
    expected.backward(grad.double())
    own = [t.detach().chunk(W)[rank].clone().requires_grad_() for t in (x, weights)]
    with only(function):
        out = dispatched(part, group)(own[0], chosen.chunk(W)[rank], own[1])
    out.backward(grad.chunk(W)[rank])
    assert out.dtype == dtype
    # Sums are accumulated in float32 or wider; some ten results between them are rounded.
    terms = 3 * (HIDDEN + 2 * WIDTH) + W * tokens
    bound = 16 * torch.finfo(dtype).eps + terms * torch.finfo(wide(dtype)).eps
    pairs = [(out, expected.chunk(W)[rank])]
    pairs += [(t.grad, want.grad.chunk(W)[rank]) for t, want in zip(own, inputs, strict=True)]
    for name, parameter in part.named_parameters(recurse=False):
        pairs.append((parameter.grad, exact.get_parameter(name).grad.chunk(W)[rank]))
    for found, want in pairs:
        atol = bound * float(1 + want.abs().max())
        torch.testing.assert_close(found.double(), want, rtol=0, atol=atol)


FORMS = [
    {"gate": gate, "bias": bias, "transposed": transposed}
    for gate, bias, transposed in itertools.product((True, False), repeat=3)
]


@pytest.mark.parametrize(
    ("world_size", "dtype"),
    some(
        (2, torch.float32),
        (2, torch.bfloat16),
        of=[
            (size, dtype)
            for size in (1, 2, 4)
            for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64)
        ],
    ),
)
@pytest.mark.ranks
def test_forms_of_the_interface(
    group: dist.ProcessGroup, world_size: int, dtype: torch.dtype
) -> None:
    for form in FORMS:
        equals_one_process(group, 9, dtype, "dispatch_matmul", **form)


@pytest.mark.ranks(2)
def test_forms_that_are_left_alone(group: dist.ProcessGroup) -> None:
    """Experts that are not fused run between dispatch and combine; one warning says why."""
    form = {"gate": True, "bias": False, "transposed": False}
    with pytest.warns(UserWarning, match="Decorated is not fused .* norm after the last matmul"):
        equals_one_process(group, 5, torch.float32, "dispatch", norm=True, **form)
    part = part_of(made(**form), group.rank(), group.size())
    own_forward = part.forward
    part.forward = lambda *given: own_forward(*given)
    run = dispatched(part, group)
    call = (torch.randn(3, HIDDEN), torch.tensor([[0, 7]] * 3), torch.rand(3, 2))
    with only("dispatch"), pytest.warns(UserWarning, match="this instance was replaced"):
        run(*call)
    with only("dispatch"), warnings.catch_warnings():
        warnings.simplefilter("error")
        run(*call)


def test_reasons() -> None:
    tokens = torch.randn(3, HIDDEN)
    form = {"gate": True, "bias": True, "transposed": True}
    module = made(**form)
    assert why_not_fused(module, tokens) is None
    for implementation in ("eager", "batched_mm", None):
        module.config._experts_implementation = implementation
        assert why_not_fused(module, tokens) is None
    module.config._experts_implementation = "sonicmoe"
    assert why_not_fused(module, tokens) == (
        "experts_implementation='sonicmoe' has kernels of its own"
    )
    module = made(**form)
    assert "down_proj is torch.bfloat16, the tokens are torch.float32" in str(
        why_not_fused(mixed(module), tokens)
    )
    with torch.autocast("cpu"):
        assert why_not_fused(module, tokens) is None
    module = made(**form)
    module.down_proj = nn.Parameter(module.down_proj.to(torch.float8_e4m3fn), requires_grad=False)
    assert "down_proj is torch.float8_e4m3fn" in str(why_not_fused(module, tokens))
    module.down_proj = Subclass(module.down_proj.data.float())
    assert "down_proj is a Subclass, not a plain tensor" in str(why_not_fused(module, tokens))
    assert "forward does not use" in str(why_not_fused(nn.Linear(2, 2), tokens))


class Subclass(nn.Parameter):
    """A parameter subclass, like quantisers' weights."""


def mixed(module: Any) -> Any:
    module.down_proj = nn.Parameter(module.down_proj.bfloat16())
    return module
