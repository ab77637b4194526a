"""torchtitan's overrides of inner attentions, against one process.

torchtitan 0.3 needs a newer torch than CI has, so stand-ins have the parts that the overrides use.
Where torchtitan can run, its own trainer is tested as well.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import inspect
import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from symm_cp.testing import Ranks
from tests.context_parallel.common import CLOSE, mesh_of
from tests.exhaustive import exhaustive, some
from tests.integrations import test_torchtitan as pattern
from tests.integrations.engines.stubs import modules

_HAS_TORCHTITAN = importlib.util.find_spec("torchtitan") is not None
needs_torchtitan = pytest.mark.skipif(
    not (_HAS_TORCHTITAN and hasattr(dist, "set_timeout")),
    reason="torchtitan 0.3 and torch 2.15 are not installed",
)


class FlexAttention(pattern.FlexAttention):
    @dataclasses.dataclass
    class Config:
        block_size: int = 128
        sharding_config: Any = None

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.block_size = config.block_size


class VarlenAttention(pattern.VarlenAttention):
    @dataclasses.dataclass
    class Config:
        window_size: tuple[int, int] = (-1, 0)
        sharding_config: Any = None

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.window_size = config.window_size


def _override(target: type, description: str, exact: bool = False) -> Callable[[Any], Any]:
    def register(factory: Any) -> Any:
        factory.target, factory.exact = target, exact
        return factory

    return register


def _derive(source: Any, target: type, **deltas: Any) -> Any:
    return target(**dataclasses.asdict(source) | deltas)


@contextlib.contextmanager
def overrides() -> Iterator[tuple[ModuleType, ModuleType]]:
    """Yields the overrides, and a model's `parallelize.py` that was loaded before them."""

    def unfused(name: str, *args: Any) -> None:
        raise AssertionError(f"torchtitan's own {name} was called")

    names = ("apply_cp_to_forward", "cp_shard", "prepare_context_parallel_input")
    own = {name: functools.partial(unfused, name) for name in names}
    with modules(
        torchtitan__config={"override": _override},
        torchtitan__config__override={"derive": _derive},
        torchtitan__distributed__context_parallel=own,
        torchtitan__distributed__spmd_types={"current_spmd_mesh": lambda: None},
        torchtitan__distributed__utils={"get_spmd_backend": lambda: "partial_dtensor"},
        torchtitan__models__common__attention={
            "FlexAttention": FlexAttention,
            "VarlenAttention": VarlenAttention,
        },
        torchtitan__models__mine__parallelize=own,
    ):
        loaded = importlib.import_module("symm_cp.integrations.torchtitan.overrides")
        yield loaded, sys.modules["torchtitan.models.mine.parallelize"]


@pytest.mark.parametrize(
    ("world_size", "kind", "balancing"),
    some(
        (2, "flex", "headtail"),
        of=[(n, k, b) for n in (2, 3) for k in ("flex", "varlen") for b in ("headtail", None)],
    ),
)
@pytest.mark.ranks
def test_overrides_are_as_in_one_process(
    group: dist.ProcessGroup, world_size: int, kind: str, balancing: str | None
) -> None:
    dense = pattern.VarlenAttention if kind == "varlen" else pattern.Dense
    model = pattern.decoder(dense)
    ids, labels, extra = pattern.batch_of(kind)
    whole = model(ids, **extra)
    pattern.loss_of(whole, labels).backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}

    with overrides() as (loaded, parallelize):
        factory = getattr(loaded, f"{kind}_attention")
        config = VarlenAttention.Config((6, 0)) if kind == "varlen" else FlexAttention.Config(16)
        assert isinstance(config, factory.target)
        replaced = factory(config)
        assert dataclasses.asdict(replaced) == dataclasses.asdict(config)
        attention = {"flex": loaded.SymmFlexAttention, "varlen": loaded.SymmVarlenAttention}[kind]
        assert type(replaced) is attention.Config
        original = {"flex": FlexAttention, "varlen": VarlenAttention}[kind]
        assert inspect.signature(attention.forward) == inspect.signature(original.forward)
        split = pattern.decoder(lambda: attention(replaced))  # type: ignore[arg-type]
        alone = split(ids, **extra)  # no mesh is applied: each rank by itself
        torch.testing.assert_close(alone, whole, **CLOSE)
        for _ in range(2):
            mesh = mesh_of(group)
            inner = [layer.inner_attention for layer in split.layers]
            parallelize.apply_cp_to_forward(inner, mesh)  # type: ignore[attr-defined]
            split.zero_grad()
            ids, labels, extra = pattern.batch_of(kind)
            ids, labels, extra = parallelize.prepare_context_parallel_input(  # type: ignore
                ids, labels, extra, mesh, ids.device, balancing
            )
            pattern.loss_of(split(ids, **extra), labels).backward()
            for name, parameter in split.named_parameters():
                dist.all_reduce(parameter.grad, group=group)
                torch.testing.assert_close(parameter.grad, expected[name], **CLOSE, msg=name)
        with pytest.raises(AssertionError, match="torchtitan's own apply_cp_to_forward"):
            parallelize.apply_cp_to_forward([nn.Linear(1, 1)], mesh)  # type: ignore[attr-defined]


# --- experts ---


class AllToAllTokenDispatcher:
    """Stand-in for torchtitan's dispatcher, as it works without a mesh "ep"."""

    @dataclasses.dataclass
    class Config:
        num_experts: int
        top_k: int

    def __init__(self, config: Config) -> None:
        self.num_experts, self.top_k, self.ep_mesh = config.num_experts, config.top_k, None

    def wire_meshes(self, *, ep_mesh: Any) -> None:
        self.ep_mesh = ep_mesh

    def dispatch(self, x: Any, scores: Any, chosen: Any, counts: Any) -> Any:
        order = chosen.flatten().argsort(stable=True)
        return x[order // self.top_k], counts, (order // self.top_k, scores.flatten()[order])

    def combine(self, rows: Any, metadata: Any, x: Any) -> Any:
        places, scores = metadata
        rows = rows * scores[:, None]
        return torch.zeros_like(x).index_add(0, places, rows)


class Experts(nn.Module):
    """A router, experts of two matrices each, and a dispatcher, called as torchtitan calls them."""

    EXPERTS, TOP_K, WIDTH = 12, 3, 8

    def __init__(self, dispatcher: Any) -> None:
        super().__init__()
        self.router = nn.Linear(self.WIDTH, self.EXPERTS)
        self.up = nn.Parameter(torch.randn(self.EXPERTS, self.WIDTH, 6))
        self.down = nn.Parameter(torch.randn(self.EXPERTS, 6, self.WIDTH))
        self.dispatcher = dispatcher

    def forward(self, x: torch.Tensor, held: slice = slice(None)) -> torch.Tensor:
        scores, chosen = self.router(x).sigmoid().topk(self.TOP_K)
        counts = torch.bincount(chosen.flatten(), minlength=self.EXPERTS)
        rows, counts, metadata = self.dispatcher.dispatch(x, scores, chosen, counts)
        parts = rows.split(counts.tolist())
        weights = zip(parts, self.up[held], self.down[held], strict=True)
        rows = torch.cat([torch.tanh(part @ up) @ down for part, up, down in weights])
        return self.dispatcher.combine(rows, metadata, x)


@contextlib.contextmanager
def expert_override(checking: bool = False) -> Iterator[ModuleType]:
    with modules(
        spmd_types={"is_type_checking": lambda: checking},
        torchtitan__config={"override": _override},
        torchtitan__config__override={"derive": _derive},
        torchtitan__models__common__token_dispatcher={
            "AllToAllTokenDispatcher": AllToAllTokenDispatcher
        },
    ):
        yield importlib.import_module("symm_cp.integrations.torchtitan.experts")


def spreads_experts(group: dist.ProcessGroup, sizes: list[int], dtype: torch.dtype) -> None:
    rank, sums = group.rank(), {"rtol": 0.0, "atol": 100 * torch.finfo(dtype).eps}
    config = AllToAllTokenDispatcher.Config(Experts.EXPERTS, Experts.TOP_K)
    dense = Experts(AllToAllTokenDispatcher(config)).to(dtype)
    whole = torch.randn(sum(sizes), Experts.WIDTH, dtype=dtype, requires_grad=True)
    weights = torch.randn_like(whole)
    want = dense(whole)
    loss = (want * weights).sum()
    leaves = [whole, *dense.parameters()]
    wanted, *of_parameters = torch.autograd.grad(loss, leaves)
    with expert_override() as loaded:
        factory = loaded.token_dispatcher
        assert (factory.target, factory.exact) == (AllToAllTokenDispatcher.Config, True)
        replaced = factory(config)
        assert dataclasses.asdict(replaced) == dataclasses.asdict(config)
        alone = Experts(loaded.SymmTokenDispatcher(replaced)).to(dtype)
        alone.load_state_dict(dense.state_dict())
        assert torch.equal(alone(whole), want)  # no mesh is wired
        alone.dispatcher.wire_meshes(ep_mesh=mesh_of(group))
        each = Experts.EXPERTS // group.size()
        held = slice(rank * each, (rank + 1) * each)
        mine = whole.detach().split(sizes)[rank].requires_grad_()
        out = alone(mine, held)
        torch.testing.assert_close(out, want.split(sizes)[rank], **sums)
        own_loss = (out * weights.split(sizes)[rank]).sum()
        grad, *own = torch.autograd.grad(own_loss, [mine, *alone.parameters()])
        total = own_loss.detach().clone()
        dist.all_reduce(total, group=group)
    torch.testing.assert_close(total, loss, rtol=0, atol=len(whole) * sums["atol"])
    torch.testing.assert_close(grad, wanted.split(sizes)[rank], **sums)
    for part, needed in zip(own, of_parameters, strict=True):
        dist.all_reduce(part, group=group)
        torch.testing.assert_close(part, needed, rtol=0, atol=len(whole) * sums["atol"])


@pytest.mark.parametrize(
    ("sizes", "dtype"),
    some(
        ([7, 5], torch.float32),
        of=[
            ([9], torch.float32),
            ([7, 5], torch.float32),
            ([7, 0, 4], torch.float64),
            ([6, 1, 0, 6], torch.float32),
        ],
    ),
)
def test_experts_are_as_in_one_process(ranks: Ranks, sizes: list[int], dtype: torch.dtype) -> None:
    ranks.run(len(sizes), spreads_experts, sizes, dtype)


@pytest.mark.ranks(2)
def test_type_checking_is_refused(group: dist.ProcessGroup) -> None:
    with expert_override(checking=True) as loaded:
        config = loaded.SymmTokenDispatcher.Config(Experts.EXPERTS, Experts.TOP_K)
        layer = Experts(loaded.SymmTokenDispatcher(config))
        layer.dispatcher.wire_meshes(ep_mesh=mesh_of(group))
        with pytest.raises(NotImplementedError, match="no rules for spmd_types: turn its type"):
            layer(torch.randn(3, Experts.WIDTH))


# --- its own trainer ---

_CONFIG = """
from torchtitan.models import llama3, qwen3
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.models.qwen3.config_registry import qwen3_moe_debug


def shortened(config):
    config.activation_checkpoint = None
    config.training.mixed_precision_param = "float32"
    config.training.disable_cuda_graphs = True
    config.training.local_batch_size, config.training.global_batch_size = 2, 2
    config.training.seq_len, config.training.steps = 64, 2
    return config


def small(**options):
    config = shortened(llama3_debugmodel())
    config.model_spec = llama3.model_registry("debugmodel", attn_backend="flex", **options)
    return config


def experts():
    config = shortened(qwen3_moe_debug())
    del config.model_spec.model.layers[2:]  # of 38 million parameters each
    return config


def asynchronous():  # torchtitan's linears on torch.ops.symm_mem.fused_*
    config = small(tp_gemm_backend="dist_gemm")
    config.parallelism.spmd_backend = "spmd_types"
    return config
"""


def _assets(folder: Path) -> None:
    """Writes a tokenizer and texts to where torchtitan's debug models look for them."""
    import tokenizers

    words = [f"w{i}" for i in range(200)]
    special = ["<unk>", "<|begin_of_text|>", "<|end_of_text|>"]
    vocabulary = {word: i for i, word in enumerate([*special, *words])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(special[1:])
    where = folder / "tests" / "assets"
    for name in ("tokenizer", "c4_test"):
        (where / name).mkdir(parents=True)
    tokenizer.save(str(where / "tokenizer" / "tokenizer.json"))
    names = {"bos_token": special[1], "eos_token": special[2]}
    (where / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(names))
    shuffle = random.Random(0)
    texts = [" ".join(shuffle.choices(words, k=shuffle.randint(10, 100))) for _ in range(200)]
    lines = [json.dumps({"text": text, "url": "", "timestamp": ""}) for text in texts]
    (where / "c4_test" / "data.json").write_text("\n".join(lines))
    (folder / "small.py").write_text(_CONFIG)


def _losses(
    folder: Path, ranks: int, config: str, *options: str, dispatched: bool = False
) -> list[float]:
    """Returns the losses that torchtitan's own trainer logs."""
    command = [sys.executable, "-m", "symm_cp", "run", "--cuda-on-cpu", str(ranks)]
    command += ["--nproc-per-node", str(ranks), "-m", "torchtitan.train", "--module", "small"]
    modules = "overrides.flex_attention", *(("experts.token_dispatcher",) if dispatched else ())
    override = ",".join(f"symm_cp.integrations.torchtitan.{name}" for name in modules)
    command += ["--config", config, "--override.imports", override, "--checkpoint.enable", *options]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, **offline, "PYTHONPATH": path, "HF_HOME": str(folder / "hf")}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    plain = re.sub(r"\x1b\[[\d;]*m", "", output)
    return [float(loss) for loss in re.findall(r"step: +\d+ +loss: +([\d.]+)", plain)]


def _in_one_process(folder: Path, config: str) -> tuple[list[float], list[str]]:
    """Returns the losses, and options with which other runs start from the same weights."""
    _assets(folder)
    seed = ["--dump_folder", "seed", "--checkpoint.create_seed_checkpoint"]
    _losses(folder, 1, config, *seed)
    load = ["--checkpoint.no-initial_load_model_only", "--checkpoint.initial_load_path"]
    load.append(str(folder / "seed" / "checkpoint" / "step-0"))
    expected = _losses(folder, 1, config, *load, "--dump_folder", "one")
    assert len(expected) == 2
    return expected, load


@exhaustive
@needs_torchtitan
def test_its_own_trainer(tmp_path: Path) -> None:
    expected, load = _in_one_process(tmp_path, "small")
    cp, tp = (f"--parallelism.{kind}_parallel_degree" for kind in ("context", "tensor"))
    backend = "--parallelism.spmd_backend"
    for number, (config, *options) in enumerate(
        (
            ("small", backend, "partial_dtensor", cp, "2"),
            ("small", backend, "spmd_types", cp, "2"),
            ("small", cp, "2", "--parallelism.context_parallel_load_balancer", "None"),
            ("small", backend, "partial_dtensor", tp, "2"),
            ("asynchronous", tp, "2"),
        )
    ):
        found = _losses(tmp_path, 2, config, *load, "--dump_folder", str(number), *options)
        assert sorted(set(found)) == pytest.approx(sorted(expected), abs=2e-5), options


@exhaustive
@needs_torchtitan
def test_its_own_trainer_with_experts_on_all_ranks(tmp_path: Path) -> None:
    expected, load = _in_one_process(tmp_path, "experts")
    cp, tp, ep = (
        f"--parallelism.{kind}_parallel_degree" for kind in ("context", "tensor", "expert")
    )
    for number, (ranks, *options) in enumerate(
        (
            (2, cp, "2", ep, "2"),
            (2, tp, "2", ep, "2"),
            (4, cp, "4", ep, "4"),
            (4, cp, "2", tp, "2", ep, "4"),
        )
    ):
        into = ["--dump_folder", str(number)]
        found = _losses(tmp_path, ranks, "experts", *load, *into, *options, dispatched=True)
        # torchtitan multiplies with experts in bfloat16.
        assert sorted(set(found)) == pytest.approx(sorted(expected), abs=2e-4), options
