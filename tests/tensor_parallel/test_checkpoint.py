"""Loading and saving of parallel models: from transformers' files, and at other world sizes."""

from __future__ import annotations

import copy
import io
import json
import resource
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from symm_cp.tensor_parallel import apply, load, save, stored
from symm_cp.testing import Ranks
from tests.exhaustive import exhaustive, in_turns, some
from tests.tensor_parallel import models
from tests.tensor_parallel.common import mesh_of, whole


def on_meta(family: str, **changes: Any) -> nn.Module:
    with torch.device("meta"):
        return models.built(family, **changes)


def same_logits(model: nn.Module, dense: nn.Module) -> None:
    tokens = models.tokens_of(dense)
    with torch.no_grad():
        logits = [m(tokens, use_cache=False).logits for m in (model, dense)]
    # Norms and rotary embeddings of transformers compute in float32.
    torch.testing.assert_close(*logits, rtol=1e-5, atol=1e-6)


# --- files of transformers -------------------------------------------------------------------


class Reads:
    """Counts the elements that are read of each tensor."""

    def __init__(self) -> None:
        self.sizes: dict[str, int] = {}

    def note(self, read: Any) -> Any:
        def noting(single: stored.Single, region: stored.Slices) -> torch.Tensor:
            part: torch.Tensor = read(single, region)
            self.sizes[single.name] = self.sizes.get(single.name, 0) + part.numel()
            return part

        return noting


@pytest.mark.parametrize(
    ("family", "world_size"),
    some(
        ("llama", 2),
        ("mixtral", 2),
        of=[*in_turns(models.FAMILIES, (2, 4)), ("mixtral", 2), ("llama", 1), ("mixtral", 1)],
    ),
)
@pytest.mark.ranks
def test_loads_what_transformers_saved(
    group: dist.ProcessGroup, tmp_path: Path, world_size: int, family: str
) -> None:
    folder = str(tmp_path)
    dense = models.model_of(family)
    if group.rank() == 0:
        dense.save_pretrained(folder, max_shard_size="40KB")  # several files
    dist.barrier(group)
    reads = Reads()
    with mock.patch.object(stored.Single, "read", reads.note(stored.Single.read)):
        model = apply(on_meta(family), mesh_of(group), checkpoint=folder)
    # Only this rank's elements were read.
    assert sum(reads.sizes.values()) == sum(p.to_local().numel() for p in model.parameters())
    assert not any(t.is_meta for t in (*model.parameters(), *model.buffers()))
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in dense.named_parameters()]
    same_logits(model, dense)


@pytest.mark.parametrize("world_size", some(1, 2, of=(1, 2, 3)))
@pytest.mark.ranks
def test_initialises(group: dist.ProcessGroup, world_size: int) -> None:
    """`init_weights` gives one rank the values of one process; several ranks refuse it."""
    model = apply(on_meta("llama"), mesh_of(group)).to_empty(device="cpu")
    assert model.model.embed_tokens.padding_idx == 0  # as in one process, on all ranks
    if group.size() > 1:
        with pytest.raises(NotImplementedError, match="init_weights: random numbers of a model"):
            model.init_weights()
        return
    dense = on_meta("llama").to_empty(device="cpu")
    for each in (model, dense):
        torch.manual_seed(7)
        each.init_weights()
    same_logits(model, dense)


@pytest.mark.ranks(2)
def test_loads_into_a_real_model_from_a_base_model(
    group: dist.ProcessGroup, tmp_path: Path
) -> None:
    folder = str(tmp_path)
    dense = models.model_of("tied llama")
    if group.rank() == 0:
        dense.model.save_pretrained(folder)  # the base model: names have no prefix
    dist.barrier(group)
    model = apply(models.model_of("tied llama"), mesh_of(group))
    kept = {id(p) for p in model.parameters()}
    load(model, folder)
    assert {id(p) for p in model.parameters()} == kept
    assert model.lm_head.weight is model.model.embed_tokens.weight
    same_logits(model, dense)


@pytest.mark.parametrize(
    ("family", "world_size"),
    some(("mixtral", 2), of=in_turns(models.FAMILIES, (4, 2))),
)
@pytest.mark.ranks
def test_transformers_loads_what_was_saved(
    group: dist.ProcessGroup, tmp_path: Path, world_size: int, family: str
) -> None:
    folder = str(tmp_path)
    from transformers import AutoModelForCausalLM

    dense = models.model_of(family)
    model = apply(copy.deepcopy(dense), mesh_of(group))
    save(model, folder, file_bytes=30_000)
    index = json.loads(Path(folder, "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    if group.rank() == 0:
        dense.config.save_pretrained(folder)
        loaded = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
        expected = dict(dense.named_parameters())
        assert dict(loaded.named_parameters()).keys() == expected.keys()
        for name, parameter in loaded.named_parameters():
            assert torch.equal(parameter, expected[name]), name


@pytest.mark.parametrize(
    ("family", "world_size"),
    some(("mixtral", 2), ("tied llama", 2), of=[(family, 2) for family in models.FAMILIES]),
)
@pytest.mark.ranks
def test_save_pretrained(
    group: dist.ProcessGroup, tmp_path: Path, world_size: int, family: str
) -> None:
    """Saves all of a model that was split over a group, or its name, instead of a mesh."""
    folder = str(tmp_path)
    from transformers import AutoModelForCausalLM

    dense = models.model_of(family)
    for place, where in enumerate((group, group.group_name)):
        model = apply(copy.deepcopy(dense), where)
        assert type(model).__name__ == type(dense).__name__
        path = Path(folder, str(place))
        model.save_pretrained(path)
        loaded = AutoModelForCausalLM.from_pretrained(path, dtype="auto")
        expected = dict(dense.named_parameters())
        assert dict(loaded.named_parameters()).keys() == expected.keys()
        for name, parameter in loaded.named_parameters():
            assert torch.equal(parameter, expected[name]), name
        same_logits(model, dense)
    with pytest.raises(NotImplementedError, match="distributed_checkpoint=True is for models"):
        model.save_pretrained(folder, distributed_checkpoint=True)
    with pytest.raises(ValueError, match=r"save_pretrained: \['.*'\] are on the meta device"):
        apply(on_meta(family), group).save_pretrained(folder)


@pytest.mark.ranks(2)
def test_pickle_and_new_sizes_are_refused(group: dist.ProcessGroup) -> None:
    """Calls that would need the whole model raise and name alternatives; copies work."""
    model: Any = apply(models.model_of("llama"), mesh_of(group))
    with pytest.raises(TypeError, match=r"torch\.save\(model\).*tensor_parallel\.save\(model, fol"):
        torch.save(model, io.BytesIO())
    with pytest.raises(NotImplementedError, match=r"new_num_tokens=90.* resize before apply"):
        model.resize_token_embeddings(90)
    assert model.resize_token_embeddings() is model.get_input_embeddings()
    same_logits(copy.deepcopy(model), copy.copy(model))


def saves_on_one_rank(group: dist.ProcessGroup, folder: str) -> None:
    model = apply(models.model_of("llama"), group)
    if group.rank() == 0:
        with pytest.raises(RuntimeError, match="ranks disagree"):
            model.save_pretrained(folder)
    else:
        with pytest.raises(RuntimeError, match="the model was called on rank 1 only"):
            model(models.tokens_of(model))


@pytest.mark.exhaustive
def test_save_pretrained_on_one_rank_is_noticed(ranks: Ranks, tmp_path: Path) -> None:
    # In new processes: in the pool's, after other tests, rank 0 learned of it only at its time-out.
    with ranks.own(2, saves_on_one_rank, str(tmp_path)) as running:
        assert all(not outcome.failure for outcome in running.outcomes())


def peak_memory(group: dist.ProcessGroup, folder: str) -> int:
    """Returns the growth of peak resident memory by loading, in bytes."""
    with torch.device("meta"):
        model = nn.ModuleDict({"a": nn.Linear(4096, 8192, bias=False)})
    apply(model, mesh_of(group), {"a": "colwise"})
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    load(model, folder)
    return 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)


@exhaustive
def test_no_rank_holds_a_whole_tensor(ranks: Ranks, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    whole_bytes = 4 * 4096 * 8192
    save_file({"a.weight": torch.zeros(8192, 4096)}, tmp_path / "model.safetensors")
    with ranks.own(4, peak_memory, str(tmp_path)) as running:
        for outcome in running.outcomes():
            # A quarter of the weights, and as much in pages of the file.
            assert whole_bytes / 4 <= outcome.result < 0.75 * whole_bytes, outcome


@pytest.mark.ranks(2)
def test_errors(group: dist.ProcessGroup, tmp_path: Path) -> None:
    folder = str(tmp_path)
    from safetensors.torch import save_file

    mesh, path = mesh_of(group), Path(folder) / str(group.rank())
    model = apply(nn.ModuleDict({"a": nn.Linear(4, 8)}), mesh, {"a": "colwise"})
    before = [p.to_local().clone() for p in model.parameters()]
    with pytest.raises(FileNotFoundError, match="no safetensors files in"):
        load(model, path)
    path.mkdir()
    save_file({"a.weight": torch.zeros(8, 4)}, path / "x.safetensors")
    with pytest.raises(ValueError, match=r"lack \['a.bias'\]"):
        load(model, path)
    save_file({"a.bias": torch.zeros(7)}, path / "y.safetensors")
    with pytest.raises(ValueError, match=r"a.bias has shape \[7\], must have \[8\]"):
        load(model, path)
    for parameter, old in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter.to_local(), old)  # nothing was loaded
    with torch.device("meta"):
        model = nn.ModuleDict({"a": nn.Linear(4, 8)})
    with pytest.raises(ValueError, match=r"\['a.weight', 'a.bias'\] are on the meta device"):
        save(apply(model, mesh, {"a": "colwise"}), folder)


# --- torch.distributed.checkpoint ------------------------------------------------------------


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    # The large eps keeps the rounding of small gradients (norms compute in float32) small.
    return torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: torch.Tensor) -> None:
    for _ in range(2):
        optimizer.zero_grad()
        model(tokens, labels=tokens, use_cache=False).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()


def states(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    names = ("model", "optimizer")
    return dict(zip(names, get_state_dict(model, optimizer), strict=True))


#: With 3 ranks, a rank does not compute the same heads that it stores.
SIZES = {"hidden_size": 40, "num_attention_heads": 10, "num_key_value_heads": 5}


def trains_and_saves(group: dist.ProcessGroup, family: str, folder: str) -> None:
    dense = models.model_of(family, **SIZES)
    model = apply(copy.deepcopy(dense), mesh_of(group))
    tokens = models.tokens_of(dense)
    optimizer, other = optimizer_of(model), optimizer_of(dense)
    steps(model, optimizer, tokens)
    steps(dense, other, tokens)
    dcp.save(states(model, optimizer), checkpoint_id=folder, process_group=group)
    if group.rank() == 0:
        steps(dense, other, tokens)  # the expected state of the loaded model
        torch.save((tokens, dense.state_dict()), f"{folder}/expected")
    dist.barrier(group)


def loads_and_trains(group: dist.ProcessGroup, family: str, folder: str) -> None:
    tokens, expected = torch.load(f"{folder}/expected")
    model = apply(models.model_of(family, **SIZES), mesh_of(group))
    optimizer = optimizer_of(model)
    loaded = states(model, optimizer)
    dcp.load(loaded, checkpoint_id=folder, process_group=group)
    set_state_dict(
        model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"]
    )
    steps(model, optimizer, tokens)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(
            whole(value).view_as(expected[name]), expected[name], rtol=1e-5, atol=1e-6
        )


@pytest.mark.parametrize(
    ("family", "world_size"),
    some(
        ("llama", 3),
        of=[
            *(("llama", world_size) for world_size in (1, 2, 3, 4)),
            *(("tied llama", 3), ("qwen3", 4), ("gemma2", 2), ("mixtral", 1), ("mixtral", 4)),
        ],
    ),
)
def test_goes_on_at_another_world_size(
    ranks: Ranks, family: str, world_size: int, tmp_path: Path
) -> None:
    ranks.run(2, trains_and_saves, family, str(tmp_path))
    ranks.run(world_size, loads_and_trains, family, str(tmp_path))
