"""Inspectors' verdicts on models of all kinds, and on models that change after they have run."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import symm_cp
from symm_cp.context_parallel.inspectors import Verdicts
from tests.context_parallel.common import mesh_of

ROOT = Path(symm_cp.__file__).resolve().parent
VOCABULARY, LENGTH = 97, 64


def llama(layers: int = 2) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config)


def attention(model: LlamaForCausalLM) -> Any:
    return model.model.layers[1].self_attn


def test_modules_of_all_kinds_are_judged() -> None:
    linear = nn.Linear(2, 2)
    linear.config = SimpleNamespace(value=1)
    kinds = [
        torch.jit.script(nn.Linear(2, 2)),
        torch.jit.trace(nn.Linear(2, 2), torch.zeros(2, 2)),  # type: ignore[no-untyped-call]
        torch.compile(nn.Linear(2, 2)),
        nn.Sequential(nn.utils.parametrizations.weight_norm(linear), nn.ModuleList()),
        torch.fx.symbolic_trace(nn.Linear(2, 2)),
    ]
    for module in kinds:
        verdicts = Verdicts(module)
        assert verdicts.parts == list(module.modules())
        assert not verdicts.limits
        assert not verdicts.may_have_others
        assert verdicts.compiles == (module is kinds[2])


# --- models that have run ------------------------------------------------------------------------


def step(group: dist.ProcessGroup, model: nn.Module) -> Callable[[], None]:
    """Returns a function that runs forward and backward on this rank's part of a batch."""
    ids = torch.randint(VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}
    mesh = mesh_of(group)
    local, reduce_loss = symm_cp.shard_batch(mesh, batch)
    labels = local.pop("labels")

    def run() -> None:
        with symm_cp.context_parallel(mesh, model=model, load_balancer=reduce_loss.load_balancer):
            logits = model(**local, use_cache=False).logits
            loss = reduce_loss(F.cross_entropy(logits.flatten(0, 1), labels.flatten()))
            loss.backward()

    return run


@pytest.mark.ranks(2)
def test_changes_are_seen_in_models_that_have_run(group: dist.ProcessGroup) -> None:
    refused: list[tuple[Callable[[LlamaForCausalLM], object], str]] = [
        (lambda m: setattr(m.config, "model_type", "other"), "model_type='other'"),
        (lambda m: setattr(m.config, "output_router_logits", True), "output_router_logits"),
        (
            lambda m: setattr(attention(m), "mix", nn.MultiheadAttention(32, 4)),
            "type torch.nn.MultiheadAttention",
        ),
    ]
    for change, message in refused:
        model = llama()
        for _ in range(2):
            step(group, model)()
        change(model)
        with pytest.raises(NotImplementedError, match=message):
            step(group, model)()
    model = llama()
    for _ in range(2):
        step(group, model)()
    # Other weights on each rank, in a layer that is new.
    torch.manual_seed(group.rank())
    attention(model).q_proj = nn.Linear(32, 32, bias=False)
    with pytest.raises(RuntimeError, match="the parameters of Linear differ"):
        step(group, model)()


# --- floors --------------------------------------------------------------------------------------


def floors() -> dict[str, int]:
    """The floor of each room, as pyproject.toml has them; the highest is 0."""
    text = (ROOT.parent / "pyproject.toml").read_text()
    contracts = tomllib.loads(text)["tool"]["importlinter"]["contracts"]
    (layers,) = (each["layers"] for each in contracts if each["name"] == "Floors")
    rooms = ((n, room.strip(" ()")) for n, layer in enumerate(layers) for room in layer.split("|"))
    return {room: n for n, room in rooms}


def imported_by_name(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not node.args:
            continue
        function = node.func.attr if isinstance(node.func, ast.Attribute) else None
        function = node.func.id if isinstance(node.func, ast.Name) else function
        if function is None or function.strip("_") not in ("import_module", "import"):
            continue
        name = node.args[0]
        if isinstance(name, ast.JoinedStr):
            name = name.values[0]
        if isinstance(name, ast.Constant) and isinstance(name.value, str):
            yield name.value


def test_nobody_imports_a_higher_floor_by_name() -> None:
    """import-linter does not see `importlib`."""
    floor_of = floors()
    for path in ROOT.rglob("*.py"):
        room = path.relative_to(ROOT).parts[0].removesuffix(".py")
        if room not in floor_of:  # the package itself, which has all floors below it
            continue
        for name in imported_by_name(ast.parse(path.read_text())):
            if name.startswith("symm_cp."):
                target = name.split(".")[1]
                assert floor_of[target] >= floor_of[room], f"{path}: imports {name}"


def test_imports_by_name_are_seen() -> None:
    code = 'importlib.import_module("a.b"); _import_module(f"a.{c}"); __import__("d"); f("e")'
    assert list(imported_by_name(ast.parse(code))) == ["a.b", "a.", "d"]
