"""`compare_with_one_process`: programs that are right, and programs broken in the usual ways."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import symm_cp
from symm_cp.testing import Ranks, compare_with_one_process
from symm_cp.testing.compare import compared
from symm_cp.testing.steps import Step
from tests.exhaustive import exhaustive
from tests.patience import patient

WORDS, WIDTH = 32, 16


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Model(nn.Module):
    """Causal attention and a feed-forward layer, over words."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.layer = nn.Embedding(WORDS, WIDTH), Layer()
        self.qkv, self.head = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        heads = self.qkv(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(*heads, is_causal=True)
        return self.head(self.layer(x + attended.transpose(1, 2).flatten(2)))


def batch(number: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    ids = torch.randint(0, WORDS, (4, 17), generator=generator)
    labels = ids[:, 1:].clone()
    labels[0, 5:] = -100  # padding
    return {"input_ids": ids[:, :-1], "labels": labels}


def plain(mesh: DeviceMesh) -> nn.Module:
    return Model()


def loss_of(logits: torch.Tensor, labels: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction=reduction)


def own(batch: dict[str, torch.Tensor], mesh: DeviceMesh, dim: int = 0) -> list[torch.Tensor]:
    return [batch[n].chunk(mesh.size(), dim)[mesh.get_rank()] for n in ("input_ids", "labels")]


def summed(model: nn.Module, mesh: DeviceMesh) -> None:
    for parameter in model.parameters():
        if not isinstance(parameter, DTensor):
            dist.all_reduce(parameter.grad, group=mesh.get_group())


def share(batch: dict[str, torch.Tensor], loss: torch.Tensor) -> torch.Tensor:
    return loss / (batch["labels"] != -100).sum()


# --- programs that are right --------------------------------------------------------------------


def by_data(model: nn.Module, batch: Any, mesh: DeviceMesh) -> None:
    ids, labels = own(batch, mesh)
    share(batch, loss_of(model(ids), labels, "sum")).backward()
    summed(model, mesh)
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)


def in_shards(mesh: DeviceMesh) -> nn.Module:
    model = Model()
    fully_shard(model.layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def of_shards(model: nn.Module, batch: Any, mesh: DeviceMesh) -> None:
    ids, labels = own(batch, mesh)
    (mesh.size() * share(batch, loss_of(model(ids), labels, "sum"))).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)


def by_features(mesh: DeviceMesh) -> nn.Module:
    plan = {"layer.up": ColwiseParallel(), "layer.down": RowwiseParallel()}
    return parallelize_module(Model(), mesh, plan)


def whole(model: nn.Module, batch: Any, mesh: DeviceMesh) -> None:
    loss_of(model(batch["input_ids"]), batch["labels"]).backward()


def by_context(model: nn.Module, batch: Any, mesh: DeviceMesh) -> None:
    def loss(logits: torch.Tensor, local: Any) -> torch.Tensor:
        return loss_of(logits, local["labels"])

    with symm_cp.training_step(Words(model), batch, mesh, loss_function=loss) as step:
        step.loss.backward()


class Words(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, **_: object) -> torch.Tensor:
        logits: torch.Tensor = self.model(input_ids)
        return logits


class Rows(nn.Module):
    """An embedding and a head; each rank has some of the head's rows, in plain tensors."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.words, head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.head = nn.Parameter(head.weight.detach().chunk(mesh.size())[mesh.get_rank()].clone())
        self.group = mesh.get_group()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return functional.all_gather_tensor_autograd(
            (self.words(ids) @ self.head.T).contiguous(), 2, self.group
        )


def of_rows(model: nn.Module, batch: Any, mesh: DeviceMesh) -> None:
    (loss_of(model(batch["input_ids"]), batch["labels"]) / mesh.size()).backward()
    dist.all_reduce(model.get_parameter("words.weight").grad, group=mesh.get_group())


RIGHT: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "data parallel": (plain, by_data),
    "FSDP2": (in_shards, of_shards),
    "tensor parallel": (by_features, whole),
    "context parallel": (plain, by_context),
    "shards of plain tensors": (Rows, of_rows),
}


def is_right(ranks: Ranks, name: str, size: int) -> None:
    model, step = RIGHT[name]
    found = compare_with_one_process(model, batch, step, mesh={"ranks": size}, ranks=ranks)
    assert found.equal, str(found)
    assert "3 steps of" in str(found)


@pytest.mark.parametrize("name", RIGHT)
def test_right_programs_are_equal(ranks: Ranks, name: str) -> None:
    is_right(ranks, name, 2)


@exhaustive
@pytest.mark.parametrize("name", RIGHT)
@pytest.mark.parametrize("size", [1, 4])
def test_right_programs_are_equal_on_other_numbers_of_ranks(
    ranks: Ranks, name: str, size: int
) -> None:
    is_right(ranks, name, size)


# --- programs that are broken on purpose --------------------------------------------------------


def added(model: nn.Module, batch: Any, mesh: DeviceMesh) -> None:
    loss_of(model(batch["input_ids"]), batch["labels"]).backward()
    summed(model, mesh)


def not_reduced(model: nn.Module, batch: Any, mesh: DeviceMesh) -> None:
    ids, labels = own(batch, mesh)
    share(batch, loss_of(model(ids), labels, "sum")).backward()


def shifted(model: nn.Module, batch: Any, mesh: DeviceMesh) -> None:
    ids, labels = (t.clone() for t in own(batch, mesh, 1))
    if mesh.get_rank() < mesh.size() - 1:
        labels[:, -1] = -100
    share({"labels": labels}, mesh.size() * loss_of(model(ids), labels, "sum")).backward()
    summed(model, mesh)


def unweighted(model: nn.Module, batch: Any, mesh: DeviceMesh) -> None:
    ids, labels = own(batch, mesh)
    (loss_of(model(ids), labels) / mesh.size()).backward()
    summed(model, mesh)


def padded(model: nn.Module, batch: Any, mesh: DeviceMesh) -> None:
    ids, labels = own(batch, mesh)
    labels = labels if mesh.size() == 1 else labels.clamp(min=0)
    (loss_of(model(ids), labels) / mesh.size()).backward()
    summed(model, mesh)


def one_twice(model: nn.Module, batch: Any, mesh: DeviceMesh) -> None:
    whole(model, batch, mesh)
    dist.all_reduce(model.get_parameter("head.bias").grad, group=mesh.get_group())


def other_weights(mesh: DeviceMesh) -> nn.Module:
    torch.manual_seed(mesh.size() + mesh.get_rank())
    return Model()


def with_dropout(mesh: DeviceMesh) -> nn.Module:
    model = Model()
    model.layer = nn.Sequential(model.layer, nn.Dropout(0.25))
    return model


BROKEN: dict[str, tuple[Callable[..., Any], Callable[..., Any], str]] = {
    "counted W times": (plain, added, "counted 2 times: gradients are added over the ranks"),
    "no all-reduce": (plain, not_reduced, "whose sum is right: an all-reduce .* is missing"),
    "shifted labels": (plain, shifted, "labels are shifted within each rank's part"),
    "unequal labels": (plain, unweighted, "a mean of their means weighs them equally"),
    "padding": (plain, padded, "padding is counted"),
    "one parameter": (plain, one_twice, "gradient of head.bias is counted 2 times"),
    "weights": (other_weights, by_data, "ranks begin with other weights"),
    "dropout": (with_dropout, by_data, "dropout of 0.25 draws other numbers"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_programs_are_told_why(ranks: Ranks, name: str) -> None:
    model, step, cause = BROKEN[name]
    found = compare_with_one_process(model, batch, step, mesh={"ranks": 2}, ranks=ranks)
    assert not found.equal
    assert found.difference is not None
    assert found.difference.startswith("step 1: ")
    assert found.causes, str(found)
    assert re.search(cause, found.causes[0]), str(found)


def step_of(norm: float, factor: float) -> Step:
    weights = {"a": torch.ones(2), "b": torch.ones(3)}
    grads = {name: factor * tensor for name, tensor in weights.items()}
    return Step(norms=[norm], grads=dict(grads), before=weights)


@pytest.mark.parametrize(
    ("factor", "cause"),
    [(2.0, "each rank took the norm of its part"), (1.0, "divided by 2 once too often")],
)
def test_norms_of_clipped_gradients_are_compared(factor: float, cause: str) -> None:
    found = compared([step_of(2.0, 1.0)], [[step_of(1.0, factor)]] * 2)
    assert found.difference == "step 1: norm of gradients: [1.0], in one process [2.0]"
    assert cause in found.causes[0]


@pytest.mark.parametrize(("losses", "noted"), [([2.0, 2.0], 0), ([1.0, 1.0], 0), ([1.0, 2.0], 1)])
def test_losses_that_make_up_no_whole_are_noted(losses: list[float], noted: int) -> None:
    found = compared([Step(losses=[2.0])], [[Step(losses=[each])] for each in losses])
    assert found.equal
    assert len(found.notes) == 1 + noted


def test_losses_of_microbatches_make_up_a_mean() -> None:
    """The last stage of a pipeline has them all."""
    found = compared([Step(losses=[2.0])], [[Step()], [Step(losses=[1.5, 2.5])]])
    assert found.equal
    assert len(found.notes) == 1


@pytest.mark.parametrize(("cut", "padding"), [(4, 0), (5, 1), (6, 0)])
def test_parts_of_flat_parameters(cut: int, padding: int) -> None:
    """FSDP1 cuts them anywhere; the last part is padded."""
    whole = torch.arange(6.0)
    parts = [whole[:cut], torch.cat([whole[cut:], torch.full((padding,), 7.0)])]
    one = [Step(grads={"weight": whole.view(2, 3)})]
    assert compared(one, [[Step(grads={"weight": part})] for part in parts]).equal
    wrong = [parts[0], parts[1] + 1] if cut < 6 else [parts[0] + 1, parts[1]]
    found = compared(one, [[Step(grads={"weight": part})] for part in wrong])
    assert found.difference is not None
    assert "gradient of weight: differs by" in found.difference


def test_fewer_steps_are_a_difference() -> None:
    assert "one process made 1 optimizer steps, ranks [0, 1]" in str(
        compared([Step()], [[Step()], []])
    )


# --- whole scripts ------------------------------------------------------------------------------

SCRIPT = """
import sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(5):
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(step))
    model(x.chunk(dist.get_world_size())[dist.get_rank()]).square().mean().backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size() if sys.argv[1] == "mean" else 1
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
"""


@exhaustive
@pytest.mark.parametrize(
    ("how", "code", "text"),
    [
        ("mean", 0, "1 and 2 ranks, float64, gradients, norms"),
        ("sum", 1, "is 2 times that of one process"),
        ("", 1, "the script ended with exit code"),
    ],
)
def test_scripts(tmp_path: Path, how: str, code: int, text: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "symm_cp", "compare", "--", str(script), *filter(None, [how])]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=patient(120))
    assert ended.returncode == code, ended.stderr
    assert text in ended.stdout + ended.stderr
