"""Loads a parallel model from safetensors files part by part, and saves it as one.

`state_dict()` needs none of this: `torch.distributed.checkpoint` saves its DTensors, and loads them
at any world size.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from symm_cp.tensor_parallel.adapters import adapted
from symm_cp.tensor_parallel.features import chunks
from symm_cp.tensor_parallel.quantised import is_quantised
from symm_cp.tensor_parallel.stored import Folder, Slices, Stored
from symm_cp.tensor_parallel.whole import Seat, gather

_FILE_BYTES = 4 << 30


def load(model: nn.Module, folder: str | os.PathLike[str]) -> nn.Module:
    """Loads all parameters and buffers from the safetensors files of a folder, in place.

    Same result as::

        for name, parameter in model.named_parameters():  # DTensors
            parameter.copy_(distribute_tensor(stored[name], mesh, parameter.placements))

    but each rank reads only its own part of each tensor, one tensor at a time: a split tensor is
    never whole in memory. Tensors on the meta device become real, on the mesh's kind of device.

    Names are the model's, or as in transformers' files (a base model without prefix, experts
    one by one). Dtypes are the model's; further tensors in the files are ignored. The model's
    `initialize_weights()` computes buffers that no file has, as in transformers. Returns the
    model. Raises `FileNotFoundError` without files, `ValueError` for missing tensors and for other
    shapes, `NotImplementedError` for a model with adapters, before anything is loaded. No
    communication.
    """
    refuse_adapters("load", model)
    files = Folder(Path(folder))
    prefix = getattr(model, "base_model_prefix", "")
    sources: list[tuple[_Slot, Stored]] = []
    missing, wrong = [], []
    for slot in _slots("load", model):
        source = next((found for n in slot.names if (found := files.find(n, prefix))), None)
        if source is None:
            missing.append(slot.names[0])
        elif source.shape != slot.shape:
            wrong.append(f"{slot.names[0]} has shape {source.shape}, must have {slot.shape}")
        else:
            sources.append((slot, source))
    if missing:
        raise ValueError(f"load: the files in {folder} lack {missing}")
    if wrong:
        raise ValueError(f"load: in the files in {folder}, {'; '.join(wrong)}")
    with torch.no_grad():
        for slot, source in sources:
            slot.fill(source)
    _compute_buffers(model)
    return model


@dataclass
class _Slot:
    """A parameter or buffer of a model, and all its names."""

    tensor: torch.Tensor
    owners: list[tuple[nn.Module, str]]
    names: list[str]
    packed: int | None  # the dimension that has two stored halves

    @property
    def shape(self) -> list[int]:
        """The shape of the whole tensor in files."""
        shape = list(self.tensor.shape)
        if self.packed is not None:
            shape[self.packed : self.packed + 2] = [shape[self.packed] * shape[self.packed + 1]]
        return shape

    def regions(self) -> list[Slices]:
        """Returns which parts of the stored tensor this rank has, along one dimension."""
        whole = [slice(0, size) for size in self.shape]
        if not isinstance(self.tensor, DTensor):
            return [tuple(whole)]
        (placement,) = self.tensor.placements
        if not isinstance(placement, Shard):
            return [tuple(whole)]
        dim, mesh = placement.dim, self.tensor.device_mesh
        length = self.tensor.shape[dim]
        stored, rank = chunks(length, mesh.size()), mesh.get_local_rank()
        start, size = stored.start(rank), stored.sizes[rank]
        if self.packed is None:
            return [(*whole[:dim], slice(start, start + size), *whole[dim + 1 :])]
        begins = [half * length + start for half in range(2)]
        parts = [slice(begin, begin + size) for begin in begins]
        return [(*whole[: dim - 1], part, *whole[dim:]) for part in parts]

    def fill(self, source: Stored) -> None:
        """Reads this rank's part; replaces the tensor if it is on the meta device."""
        tensor = self.tensor
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        made = local
        if local.is_meta:
            kind = tensor.device_mesh.device_type if isinstance(tensor, DTensor) else "cpu"
            made = torch.empty_like(local, device=kind)
        parts = [made] if self.packed is None else made.unbind(self.packed)
        for part, region in zip(parts, self.regions(), strict=True):
            part.copy_(source.read(region))
        if made is local:
            return
        new = made
        if isinstance(tensor, DTensor):
            options = {"shape": tensor.shape, "stride": tensor.stride()}
            mesh = tensor.device_mesh
            new = DTensor.from_local(made, mesh, tensor.placements, run_check=False, **options)
        if isinstance(tensor, nn.Parameter):
            new = nn.Parameter(new, requires_grad=tensor.requires_grad)
        for owner, name in self.owners:
            setattr(owner, name, new)


def _slots(op: str, model: nn.Module) -> list[_Slot]:
    """Returns everything that a state dict of the model has.

    Raises `NotImplementedError` for quantised weights.
    """
    slots: dict[int, _Slot] = {}
    for prefix, module in model.named_modules():
        tensors = {**module._parameters, **module._buffers}
        for name, tensor in tensors.items():
            if tensor is None or name in module._non_persistent_buffers_set:
                continue
            if is_quantised(tensor._local_tensor if isinstance(tensor, DTensor) else tensor):
                raise NotImplementedError(
                    f"{op}: {prefix}.{name} is quantised, which is not supported: load the weights "
                    "before apply, and save them before it"
                )
            packed = getattr(module, "packed", {}).get(name)
            slot = slots.setdefault(id(tensor), _Slot(tensor, [], [], packed))
            slot.owners.append((module, name))
            slot.names.append(f"{prefix}.{name}" if prefix else name)
    return list(slots.values())


def _compute_buffers(model: nn.Module) -> None:
    """Makes the model compute buffers that no state dict has, if they are on the meta device."""
    missing = []
    for prefix, module in model.named_modules():
        for name in module._non_persistent_buffers_set:
            buffer = module._buffers[name]
            if buffer is not None and buffer.is_meta:
                missing.append(f"{prefix}.{name}" if prefix else name)
                module._buffers[name] = torch.empty_like(buffer, device=_device_of(model))
    if not missing:
        return
    compute = getattr(model, "initialize_weights", None)
    if compute is None:
        raise ValueError(
            f"load: the buffers {missing} are on the meta device, and {type(model).__name__} has "
            "no initialize_weights() that computes them: build the model with real buffers"
        )
    for tensor in model.state_dict(keep_vars=True).values():
        tensor._is_hf_initialized = True  # transformers' mark of loaded tensors
    compute()


def _device_of(model: nn.Module) -> torch.device:
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def save(
    model: nn.Module, folder: str | os.PathLike[str], *, file_bytes: int = _FILE_BYTES
) -> None:
    """Saves the whole model as safetensors files, which transformers' `from_pretrained` loads.

    Same result as::

        model.save_pretrained(folder)  # of the same model in one process, without the config

    All ranks must call it; they gather one tensor after the other, and rank 0 of the mesh writes a
    file whenever it has `file_bytes` of them. Tied parameters are written once, with the first of
    their names. Raises `ValueError` for tensors on the meta device, `NotImplementedError` for a
    model with adapters.
    """
    refuse_adapters("save", model)
    from safetensors.torch import save_file

    path, names = Path(folder), dict[str, str]()
    with _saving("save", model) as (slots, writes):
        for number, tensors in enumerate(_batches(slots, file_bytes, keep=writes)):
            file = f"model-{number + 1:05d}.safetensors"
            names |= dict.fromkeys(tensors, file)
            if writes:
                path.mkdir(parents=True, exist_ok=True)
                save_file(tensors, path / file, metadata={"format": "pt"})
        if writes:
            total = sum(slot.tensor.numel() * slot.tensor.element_size() for slot in slots)
            index = {"metadata": {"total_size": total}, "weight_map": names}
            (path / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


class SavesWholeModel(nn.Module):
    """A model of transformers whose `save_pretrained` gathers the tensors that `apply` split."""

    def save_pretrained(
        self,
        save_directory: str | os.PathLike[str],
        is_main_process: bool = True,
        state_dict: dict[str, torch.Tensor] | None = None,
        **options: Any,
    ) -> None:
        """Saves the whole model, as in one process. All ranks must call it; rank 0 writes.

        Rank 0 holds all weights in memory meanwhile; `symm_cp.tensor_parallel.save` does not.
        Raises `ValueError` for tensors on the meta device, `NotImplementedError` for
        `distributed_checkpoint`.
        """
        if options.get("distributed_checkpoint"):
            raise NotImplementedError(
                "save_pretrained: distributed_checkpoint=True is for models that transformers has "
                "split: save model.state_dict() by torch.distributed.checkpoint instead"
            )
        save: Any = super().save_pretrained  # type: ignore[misc]
        if state_dict is not None:  # of whole tensors, as for transformers
            save(save_directory, is_main_process, state_dict, **options)
            return
        state_dict = {}
        with _saving("save_pretrained", self) as (slots, is_first):
            writes = is_first and is_main_process
            for tensors in _batches(slots, _FILE_BYTES, keep=writes):
                state_dict |= tensors if writes else {}
            if writes:
                save(save_directory, True, state_dict, **options)

    def init_weights(self) -> None:
        """Raises `NotImplementedError` on several ranks, where parts would not be independent."""
        if any(
            isinstance(parameter, DTensor) and parameter.device_mesh.size() > 1
            for parameter in self.parameters()
        ):
            raise NotImplementedError(
                "init_weights: random numbers of a model that is split over ranks are not those of "
                "one process: with one seed all parts of a weight get the same values, with a seed "
                "for each rank copies differ. Give apply an initialised model (it takes rank 0's "
                "weights), or load a checkpoint"
            )
        super().init_weights()  # type: ignore[misc]

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> Any:
        """Raises `NotImplementedError`, or returns the embeddings if asked for no new size."""
        size = args[0] if args else kwargs.get("new_num_tokens")
        if size is None and kwargs.get("pad_to_multiple_of") is None:
            resize: Any = super().resize_token_embeddings  # type: ignore[misc]
            return resize(*args, **kwargs)
        raise NotImplementedError(
            f"resize_token_embeddings: got new_num_tokens={size} for a model whose vocabulary "
            "tensor_parallel.apply has split: resize before apply"
        )


def refuse_adapters(op: str, model: nn.Module) -> None:
    """Raises `NotImplementedError` for a model with adapters, whose tensors have other names."""
    for name, module in adapted(model):
        remedy = (
            "merge them first (merge_and_unload()), or save the adapters alone by save_pretrained "
            "of the PeftModel"
            if op == "save"
            else "load the weights before adapters are added, by from_pretrained"
        )
        raise NotImplementedError(
            f"{op}: the model has adapters ({name}, {type(module).__name__}), so its tensors do "
            f"not have the names of a checkpoint: {remedy}"
        )


@contextmanager
def whole_state_dict(
    op: str, model: nn.Module, names: Set[str]
) -> Iterator[tuple[dict[str, torch.Tensor], bool]]:
    """Yields the whole tensors of these names (none if it does not write), and whether it writes.

    All ranks must enter it, and leave it once the files are written.
    """
    state_dict: dict[str, torch.Tensor] = {}
    with _saving(op, model) as (slots, writes):
        chosen = [slot for slot in slots if not names.isdisjoint(slot.names)]
        for tensors in _batches(chosen, _FILE_BYTES, keep=writes):
            state_dict |= tensors if writes else {}
        if writes:
            for slot in chosen:
                state_dict |= dict.fromkeys(slot.names[1:], state_dict[slot.names[0]])
        yield state_dict, writes


@contextmanager
def _saving(op: str, model: nn.Module) -> Iterator[tuple[list[_Slot], bool]]:
    """Yields a model's tensors, and whether this rank writes; ends once the files are written."""
    slots = _slots(op, model)
    if meta := [slot.names[0] for slot in slots if slot.tensor.is_meta]:
        raise ValueError(f"{op}: {meta} are on the meta device: load the model first")
    meshes = [slot.tensor.device_mesh for slot in slots if isinstance(slot.tensor, DTensor)]
    yield slots, all(mesh.get_local_rank() == 0 for mesh in meshes)
    for mesh in meshes[:1]:
        dist.barrier(mesh.get_group())


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the whole tensor, which all ranks gather."""
    if not isinstance(tensor, DTensor):
        return tensor
    (placement,) = tensor.placements
    if tensor.device.type != "cpu" or not isinstance(placement, Shard):
        return tensor.full_tensor()
    # Our op raises at once, with a clear error, where a rank calls something else instead.
    mesh, dim = tensor.device_mesh, placement.dim
    return gather(
        tensor.to_local(), dim, Seat.in_mesh(mesh), chunks(tensor.shape[dim], mesh.size()).sizes
    )


def _batches(
    slots: Sequence[_Slot], file_bytes: int, keep: bool
) -> Iterator[dict[str, torch.Tensor]]:
    """Gathers tensors, and yields batches of at least `file_bytes`; drops them unless `keep`."""
    batch: dict[str, torch.Tensor] = {}
    waiting = 0
    for slot in slots:
        whole = _whole(slot.tensor.detach())
        waiting += whole.numel() * whole.element_size()
        kept = whole.reshape(slot.shape).cpu().contiguous() if keep else whole.new_empty(0)
        batch[slot.names[0]] = kept
        if waiting >= file_bytes:
            yield batch
            batch, waiting = {}, 0
    if batch:
        yield batch
