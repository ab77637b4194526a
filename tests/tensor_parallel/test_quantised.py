"""Quantised weights (torchao's tensor subclasses) under tensor parallelism, against one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode
from torchao.quantization import (
    Int8DynamicActivationInt8WeightConfig,
    Int8WeightOnlyConfig,
    IntxWeightOnlyConfig,
    PerGroup,
    quantize_,
)

from symm_cp.tensor_parallel import FusedColwiseParallel, FusedRowwiseParallel, apply, quantised
from symm_cp.testing import Ranks
from tests.exhaustive import exhaustive
from tests.tensor_parallel.common import mesh_of
from tests.tensor_parallel.models import model_of, tokens_of

CONFIGS: dict[str, Any] = {
    "int8": Int8WeightOnlyConfig(),
    "int8 by groups": Int8WeightOnlyConfig(granularity=PerGroup(4)),
    "int4 in bytes": IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(4)),
    "int8 activations": Int8DynamicActivationInt8WeightConfig(),
}
LINEARS = 2 * 7 + 1  # of two layers, and the head
#: Tolerance for values that are rounded differently, to 8 bits, about ten times.
ROUNDED = 0.05
#: Inputs of row-wise linears are scaled by each rank's features; torchao has no gradients of them.
OF_ACTIVATIONS = "int8 activations"
LIMITS = {"rtol": 1e-4, "atol": 1e-5}


def quantised_model(config: str, dtype: torch.dtype, **changes: Any) -> nn.Module:
    model = model_of("llama", **changes).to(dtype)
    quantize_(model, CONFIGS[config])
    return model


def as_in_one_process(group: dist.ProcessGroup, config: str) -> None:
    dense = quantised_model(config, torch.float32)
    model = copy.deepcopy(dense)
    if group.rank() > 0:  # all take the weights of rank 0
        for parameter in model.parameters():
            for part in _parts(parameter):
                part.data.zero_()
    model = apply(model, mesh_of(group))
    assert all(isinstance(p, DTensor) for p in model.parameters())
    split = [p for p in model.parameters() if _is(p._local_tensor) and p.placements[0].is_shard()]
    assert len(split) == LINEARS
    if group.size() > 1:  # the rest of each weight is freed
        kept = {name: p for name, p in dense.named_parameters() if _is(p)}
        mine = sum(part.untyped_storage().nbytes() for p in split for part in _parts(p))
        assert mine < 0.8 * sum(part.nbytes for p in kept.values() for part in _parts(p))
    tokens = tokens_of(dense)
    outputs = [m(tokens, labels=tokens, use_cache=False) for m in (model, dense)]
    with torch.no_grad():
        outputs_without = [m(tokens) for m in (model, dense)]
    for found, expected in (outputs, outputs_without):
        if config == OF_ACTIVATIONS:
            assert off(found.logits, expected.logits) < ROUNDED
        else:
            torch.testing.assert_close(found.logits, expected.logits, **LIMITS)
    if config != OF_ACTIVATIONS:
        same_gradients(model, dense, outputs)


def off(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).float().norm() / expected.float().norm())


def same_gradients(model: nn.Module, dense: nn.Module, outputs: Any) -> None:
    for output in outputs:
        output.loss.backward()
    others = dict(dense.named_parameters())
    trained = [name for name, p in others.items() if p.grad is not None]
    assert len(trained) >= 2 * 2 + 2  # norms and the embedding
    for name, parameter in model.named_parameters():
        if name in trained:
            found = parameter.grad.full_tensor()
            torch.testing.assert_close(found, others[name].grad, **LIMITS, msg=name)


def _is(parameter: torch.Tensor) -> bool:
    return quantised.is_quantised(parameter)


def _parts(weight: torch.Tensor) -> list[torch.Tensor]:
    own = weight._local_tensor if isinstance(weight, DTensor) else weight
    return list(quantised._parts(own).values()) if _is(own) else [own]


def test_int8(ranks: Ranks) -> None:
    ranks.run(2, as_in_one_process, "int8")


@exhaustive
@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("config", CONFIGS)
def test_each_kind(ranks: Ranks, config: str, world_size: int) -> None:
    ranks.run(world_size, as_in_one_process, config)


class _Kernels(TorchDispatchMode):
    """Counts calls of torch's kernel for 8-bit weights."""

    count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.count += func is torch.ops.aten._weight_int8pack_mm.default
        return func(*args, **(kwargs or {}))


@pytest.mark.ranks(2)
def test_bfloat16(group: dist.ProcessGroup) -> None:
    """In bfloat16, whose few rows torch's kernel multiplies; compiled and eager."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
    dense = quantised_model("int8", torch.bfloat16, **sizes).eval()
    tokens = tokens_of(dense)
    model = apply(copy.deepcopy(dense), mesh_of(group))
    with torch.no_grad():
        with _Kernels() as kernels:
            logits = model(tokens[:, :4]).logits
        assert kernels.count == LINEARS
        assert off(logits, dense(tokens[:, :4]).logits) < ROUNDED
        whole = torch.__version__ >= (2, 13)  # LocalParameters breaks graphs before
        compiled = torch.compile(model, backend="aot_eager", fullgraph=whole)
        found = compiled(tokens, use_cache=False).logits
        assert off(found, dense(tokens).logits) < ROUNDED
    generated = model.generate(tokens, min_new_tokens=4, max_new_tokens=4, do_sample=False)
    assert generated.shape == (tokens.shape[0], tokens.shape[1] + 4)
    gathered = [torch.empty_like(generated) for _ in range(group.size())]
    dist.all_gather(gathered, generated, group=group)
    assert all(torch.equal(generated, other) for other in gathered)


@pytest.mark.ranks(2)
def test_styles(group: dist.ProcessGroup) -> None:
    dense = nn.Sequential(nn.Linear(24, 32), nn.ReLU(), nn.Linear(32, 8))
    quantize_(dense, CONFIGS["int8"])
    plan = {
        "0": FusedColwiseParallel(input_layouts=Replicate()),
        "2": FusedRowwiseParallel(output_layouts=Replicate()),
    }
    model = parallelize_module(copy.deepcopy(dense), mesh_of(group), plan)
    x = torch.randn(3, 5, 24)
    for leaf in (x, x.clone().requires_grad_()):
        torch.testing.assert_close(model(leaf), dense(x))
    mine, other = (x.clone().requires_grad_() for _ in range(2))
    model(mine).square().sum().backward()
    dense(other).square().sum().backward()
    torch.testing.assert_close(mine.grad, other.grad)
    with torch.autocast("cpu", torch.bfloat16):
        assert off(model(x), dense(x)) < ROUNDED


@pytest.mark.ranks(2)
def test_refusals(group: dist.ProcessGroup, tmp_path: Any) -> None:
    folder = str(tmp_path)
    mesh, model = mesh_of(group), quantised_model("int8", torch.float32)
    before = {name: id(parameter) for name, parameter in model.named_parameters()}
    with pytest.raises(NotImplementedError, match=r"q_proj.*quantised.*sequence_parallel=False"):
        apply(model, mesh, sequence_parallel=True)
    uneven = {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3}
    with pytest.raises(NotImplementedError, match=r"q_proj.*quantised.*\[32, 16\]"):
        apply(quantised_model("int8", torch.float32, **uneven), mesh)
    embedding = model_of("llama").float()
    quantize_(embedding, CONFIGS["int8"], filter_fn=lambda m, _: isinstance(m, nn.Embedding))
    with pytest.raises(NotImplementedError, match=r"embed_tokens.*is quantised"):
        apply(embedding, mesh, {"model.embed_tokens": "embedding_rowwise"})
    style = FusedColwiseParallel()
    with pytest.raises(NotImplementedError, match="FusedColwiseParallel: the weight is quantised"):
        parallelize_module(model.model.layers[0].mlp.up_proj, mesh, style)
    weight = model.model.layers[0].mlp.down_proj.weight.requires_grad_()
    with pytest.raises(NotImplementedError, match=r"down_proj.*quantised.*trained.*freeze it"):
        apply(model, mesh)
    weight.requires_grad_(False)
    assert before == {name: id(parameter) for name, parameter in model.named_parameters()}
    apply(model, mesh)
    with pytest.raises(NotImplementedError, match=r"save_pretrained: .* is quantised"):
        model.save_pretrained(folder)
    model(tokens_of(model))
