"""Models of transformers under `context_parallel` against the same models in one process.

A `Client` makes a small model with random weights from a configuration; `check_client` runs it on a
whole batch in one process, with transformers' eager attention (which writes every mask out), and on
shards under `context_parallel`, and compares loss, logits and the gradient of every parameter.
"""

from __future__ import annotations

import functools
import sys
import tempfile
import unittest.mock
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import TorchFunctionMode

import symm_cp
from tests.context_parallel.common import mesh_of

VOCABULARY = 61
BALANCERS: dict[str, Callable[[int, int], symm_cp.LoadBalancer]] = {
    "HeadTail": symm_cp.HeadTail,
    "Sequential": symm_cp.Sequential,
}
IGNORED = -100
Batch = dict[str, torch.Tensor]

# Options that most models' configurations understand; the others ignore them.
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    # Grouped matrix products take no float64.
    "experts_implementation": "eager",
}


@dataclass(frozen=True)
class Client:
    """A transformers model: `name` + `head`, made from `name` + `config` with these options.

    `reference` is the attention implementation of the reference. Tolerances are relative to a
    tensor's largest value: `wide_tolerance` within `WideTensors`, and `tolerance` elsewhere, where
    transformers always computes rotary embeddings, softmax of eager attention and norms in float32,
    and rounds them differently at different lengths.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    head: str = "ForCausalLM"
    config: str = "Config"
    reference: str = "eager"
    dtype: torch.dtype = torch.float64
    tolerance: float = 2e-5
    wide_tolerance: float = 1e-9
    # Keys of SIZES that the configuration does not take.
    without: tuple[str, ...] = ()
    # Passed to each call of the model.
    call: Mapping[str, Any] = field(default_factory=lambda: {"use_cache": False})

    def having(self, **options: Any) -> Client:
        """Returns the client with further options of the configuration."""
        return replace(self, options={**self.options, **options})

    def make(self, implementation: str) -> nn.Module:
        """Returns a model with the weights of `spread_weights`, equal on all ranks."""
        transformers.logging.set_verbosity_error()
        options = {name: size for name, size in SIZES.items() if name not in self.without}
        options |= {**self.options, "attn_implementation": implementation}
        config = getattr(transformers, self.name + self.config)(**options)
        model = getattr(transformers, self.name + self.head)(config).to(self.dtype)
        spread_weights(model)
        return model.eval()


def spread_weights(model: nn.Module, seed: int = 0) -> None:
    """Draws weights so large that each position, head and layer shows in the results.

    transformers' own start values are so small that all keys get nearly the same weight.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            if parameter.dim() > 1:
                parameter.copy_(noise * parameter.shape[-1] ** -0.5)
            else:  # norms, biases, sinks: near their start values, which may be uninitialised
                base = 1.0 if bool((parameter == 1).all()) else 0.0
                parameter.copy_(base + 0.3 * noise)


@contextmanager
def saved(model: Any) -> Iterator[str]:
    """Saves a model on rank 0 and yields the folder on all ranks."""
    with tempfile.TemporaryDirectory() as folder:
        folders = [folder]
        dist.broadcast_object_list(folders, 0)
        model.save_pretrained(folders[0])
        dist.barrier()
        yield folders[0]
        dist.barrier()


def causal_batch(
    length: int,
    *,
    samples: int = 2,
    padding: str | None = None,
    documents: list[int] | None = None,
    masked: bool = True,
) -> Batch:
    """Returns a whole batch for a decoder: ids, labels (not shifted), and a mask or positions.

    Args:
        length: length of each sample.
        samples: number of samples.
        padding: "left" or "right"; each sample has a different number of padded positions.
        documents: lengths of documents packed into each sample: position_ids, and no mask.
        masked: whether there is an attention_mask at all.
    """
    ids = torch.randint(3, VOCABULARY, (samples, length))
    batch = {"input_ids": ids, "labels": ids.clone()}
    if documents is not None:
        assert sum(documents) == length, documents
        positions = torch.cat([torch.arange(n) for n in documents])
        batch["position_ids"] = positions.expand(samples, -1).contiguous()
        begins = torch.tensor([0, *documents[:-1]]).cumsum(0)
        batch["labels"][:, begins] = IGNORED  # not predicted from the document before
        return batch
    if not masked:
        return batch
    mask = batch["attention_mask"] = torch.ones_like(ids)
    if padding is not None:
        for sample in range(samples):
            padded = (sample + 1) * length // (2 * samples + 1)
            rows = slice(0, padded) if padding == "left" else slice(length - padded, length)
            mask[sample, rows] = 0
        ids[mask == 0] = 0
        batch["labels"][mask == 0] = IGNORED
        if padding == "left":
            # As `generate` counts. A row that sees no key would predict the first token.
            batch["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)
            batch["labels"][torch.arange(samples), mask.argmax(-1)] = IGNORED
    return batch


@dataclass(frozen=True)
class Result:
    """Results of a model, to compare one process with several ranks."""

    loss: torch.Tensor
    logits: torch.Tensor  # of the whole sequence
    grads: dict[str, torch.Tensor | None]


def target_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The mean loss over labels that belong to the rows of `logits`."""
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=IGNORED)


_CONVERSIONS = (torch.Tensor.to, torch.Tensor.type)
_WITH_DTYPE = (F.softmax, torch.sum)


class WideTensors(TorchFunctionMode):
    """Leaves float64 tensors as they are where a model would compute in float32.

    In a recurrent layer, the order of float32 sums can change a gradient by 3e-4 of its size. Eager
    attention masks with the lowest float64 number, which is -inf in float32: rows that see no key
    would become NaN.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in (torch.Tensor.float, *_CONVERSIONS, *_WITH_DTYPE):
            return func(*args, **kwargs)
        tensor = args[0]
        narrow = func is torch.Tensor.float or torch.float32 in (*args[1:], kwargs.get("dtype"))
        if narrow and tensor.dtype == torch.float64:
            if func not in _WITH_DTYPE:
                return tensor
            kwargs = {**kwargs, "dtype": None}
        return func(*args, **kwargs)


def recomputing(model: nn.Module, *, reentrant: bool = False) -> None:
    """Makes a model recompute activations, within `WideTensors` unless `reentrant`.

    Modes that are active around the backward call do not apply to the recomputation.
    """
    how: dict[str, Any] = {"use_reentrant": reentrant}
    if not reentrant:
        how["context_fn"] = lambda: (WideTensors(), WideTensors())
    model.gradient_checkpointing_enable(how)  # type: ignore[operator]
    model.train()


@contextmanager
def separating(model: nn.Module, batch: Batch) -> Iterator[None]:
    """Has a model keep documents apart that it joins with attention other than flash attention.

    Some models (GPT-OSS, OPT) make their masks without `position_ids`.
    """
    module = sys.modules[type(model).__module__]
    names = [name for name in vars(module) if name.endswith("causal_mask")]
    with ExitStack() as stack:
        if "attention_mask" not in batch and "position_ids" in batch:
            for name in names:
                make = functools.partial(_with_positions, getattr(module, name), batch)
                stack.enter_context(unittest.mock.patch.object(module, name, make))
        yield


def _with_positions(make: Callable[..., Any], batch: Batch, *args: Any, **kwargs: Any) -> Any:
    return make(*args, **{"position_ids": batch["position_ids"], **kwargs})


def in_one_process(client: Client, batch: Batch, *, shift: bool = True) -> Result:
    """Runs a client on a whole batch without any group."""
    model = client.make(client.reference)
    inputs = dict(batch)
    labels = inputs.pop("labels")
    with WideTensors(), separating(model, batch):
        logits = model(**inputs, **client.call).logits
    if shift:
        labels = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
    loss = target_loss(logits, labels)
    loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    return Result(loss.detach(), logits.detach(), grads)


def under_context_parallel(
    group: dist.ProcessGroup,
    client: Client,
    batch: Batch,
    *,
    balancer: symm_cp.LoadBalancer | Mapping[int, symm_cp.LoadBalancer],
    shift: bool | None = True,
    implementation: str = "eager",
    prepare: Callable[[nn.Module], Any] | None = None,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
    method: Any = None,
    mesh: DeviceMesh | None = None,
) -> Result:
    """Runs a client on this rank's part of a whole batch.

    Args:
        group: group of the ranks.
        client: client to run.
        batch: batch of whole sequences.
        balancer: layout of the sequence over the ranks; or of each length.
        shift: whether each position's label is the next token; None: as the model's class says.
        implementation: attention that the model is made with; the context replaces it.
        prepare: changes the model, or returns a callable to use instead (a compiled model).
        around: context manager for the forward pass, such as autocast.
        method: attention method.
        mesh: mesh over the group, for a two-dimensional method.
    """
    mesh = mesh or mesh_of(group)
    model = client.make(implementation)
    local, reduce_loss = symm_cp.shard_batch(
        mesh,
        batch,
        model=model if shift is None else None,
        load_balancer=balancer,
        shift_labels=shift,
        method=method,
    )
    labels = local.pop("labels")
    by = reduce_loss.load_balancer
    with symm_cp.context_parallel(mesh, model=model, load_balancer=by, method=method):
        call = (prepare(model) if prepare else None) or model
        with around():
            logits = call(**local, **client.call).logits
            loss = reduce_loss(target_loss(logits, labels))
        loss.backward()
    by = by[batch["labels"].shape[1]] if isinstance(by, Mapping) else by
    logits = logits.detach()
    whole = symm_cp.context_parallel_unshard(mesh, [logits], [1], by, method=method)[0]
    return Result(loss.detach(), whole, summed_grads(group, model))


def summed_grads(group: dist.ProcessGroup, model: nn.Module) -> dict[str, torch.Tensor | None]:
    """Gradients summed over ranks; None where no rank has one."""
    summed: dict[str, torch.Tensor | None] = {}
    for name, parameter in model.named_parameters():
        has = torch.tensor(float(parameter.grad is not None))
        dist.all_reduce(has, group=group)
        summed[name] = None
        if has:
            grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
            dist.all_reduce(grad, group=group)
            summed[name] = grad
    return summed


def assert_near(
    name: str, actual: torch.Tensor, expected: torch.Tensor, tolerance: float, largest: float = 0.0
) -> None:
    """Compares by the largest value: of the expected tensor, or `largest` if that is more."""
    assert actual.shape == expected.shape, (name, actual.shape, expected.shape)
    assert actual.isfinite().all(), name
    scale = max(float(expected.abs().max()), largest)
    off = float((actual.double() - expected.double()).abs().max())
    assert off <= tolerance * scale, f"{name}: off by {off:.3g}, largest value {scale:.3g}"


def assert_same(actual: Result, expected: Result, batch: Batch, tolerance: float) -> None:
    """Compares results, except logits at padding, on which nothing depends."""
    mask = batch.get("attention_mask")
    seen = slice(None) if mask is None else mask.bool()
    assert_near("logits", actual.logits[seen], expected.logits[seen], tolerance)
    assert_near("loss", actual.loss, expected.loss, tolerance)
    grads = [grad for grad in expected.grads.values() if grad is not None]
    # A nearly zero gradient (of a key's bias, say) is the rounding error of larger ones.
    floor = 1e-3 * max(float(grad.abs().max()) for grad in grads)
    assert actual.grads.keys() == expected.grads.keys()
    for name, want in expected.grads.items():
        got = actual.grads[name]
        if want is None:
            assert got is None or not got.any(), f"{name} has a gradient"
            continue
        assert got is not None, f"{name} has no gradient"
        assert_near(f"gradient of {name}", got, want, tolerance, floor)


def check_client(
    group: dist.ProcessGroup,
    client: Client,
    batch: Batch,
    *,
    layout: str = "HeadTail",
    tolerance: float | None = None,
    **how: Any,
) -> None:
    """Raises `AssertionError` unless a client computes on shards what it does in one process.

    `how` are arguments of `under_context_parallel`.
    """
    balancer = BALANCERS[layout](batch["labels"].shape[1], group.size())
    with WideTensors():
        expected = in_one_process(client, batch, shift=how.get("shift", True))
        actual = under_context_parallel(group, client, batch, balancer=balancer, **how)
    assert_same(actual, expected, batch, client.wide_tolerance if tolerance is None else tolerance)
