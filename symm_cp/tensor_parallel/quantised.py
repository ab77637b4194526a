"""Splits quantised weights: tensor subclasses such as torchao's.

Such a weight (N, K) must support slices and `F.linear`, and list the plain tensors that it consists
of; nothing else. Its input has a gradient, the weight has none.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from symm_cp.tensor_parallel.features import Features, chunks
from symm_cp.tensors.alignment import contiguous_strides

_PLAIN = (torch.Tensor, torch.nn.Parameter, DTensor)
#: torch's kernel for 8-bit weights reads the weights again for each row or few rows: with more rows
#: it is slower than converting the weight first, as torchao does (AMD EPYC: from about 50 rows on).
_FEW_ROWS = 32
#: The kernel reads beyond the end of a row whose length is not a multiple of its vectors (torch
#: 2.13: 16 with AVX-512), which gives wrong results, or a crash.
_WHOLE_VECTORS = 64


def is_quantised(weight: object) -> bool:
    """Whether a weight consists of other tensors, and is no DTensor."""
    kind = type(weight)
    return kind not in _PLAIN and hasattr(kind, "__tensor_flatten__")


def check(
    style: str, name: str, weight: torch.Tensor, features: Features, sequence_dim: int | None
) -> None:
    """Raises `NotImplementedError` unless a slice of the weight is enough for each rank."""
    kind = type(weight).__name__
    if sequence_dim is not None:
        raise NotImplementedError(
            f"{style}: the weight is quantised ({kind}): only replicated activations are supported "
            "then, sequence_parallel=False, or layouts of Replicate()"
        )
    if not features.as_stored:
        raise NotImplementedError(
            f"{style}: the weight is quantised ({kind}), so {name}={features.length} must divide "
            f"into parts of whole heads, not {list(features.computed.sizes)}: use fewer ranks"
        )
    split = 1 if name.endswith("in_features") else 0
    try:
        for rank, size in enumerate(features.stored.sizes):  # all ranks must raise, or none
            weight.narrow(split, features.stored.start(rank), size)
    except Exception as error:  # of any kind, from code that is not ours
        raise NotImplementedError(
            f"{style}: the weight is quantised ({kind}), and cannot be split along {name}: {error}"
        ) from error


def local_of(parameter: Any) -> Any:
    """Returns this rank's part of a DTensor, like `to_local`, which quantised weights lack."""
    if not isinstance(parameter, DTensor):
        return parameter
    own = parameter._local_tensor
    return own if is_quantised(own) else parameter.to_local()


def distributed(
    weight: torch.Tensor, mesh: DeviceMesh, placement: Placement, source: int | None
) -> DTensor:
    """`distribute_tensor(weight, mesh, [placement], src_data_rank=source)`, quantised or not.

    Parts of quantised weights have their own memory.
    """
    if not is_quantised(weight):
        return distribute_tensor(weight, mesh, [placement], src_data_rank=source)
    if source is not None and not weight.is_meta:
        for tensor in _parts(weight).values():
            whole = tensor.contiguous()
            dist.broadcast(whole, group=mesh.get_group(), group_src=source)
            if whole is not tensor:
                tensor.copy_(whole)
    own = weight
    if isinstance(placement, Shard):
        rank, sizes = mesh.get_local_rank(), chunks(weight.shape[placement.dim], mesh.size())
        own = _copied(weight.narrow(placement.dim, sizes.start(rank), sizes.sizes[rank]))
    meta = TensorMeta(weight.shape, contiguous_strides(weight.shape), weight.dtype)
    # `DTensor.from_local` makes a view, which these tensors do not have.
    return DTensor(own, DTensorSpec(mesh, (placement,), meta), requires_grad=False)


def _parts(weight: Any) -> dict[str, torch.Tensor]:
    """Returns the plain tensors that a weight consists of, by name."""
    names, _ = weight.__tensor_flatten__()
    parts = {name: getattr(weight, name) for name in names}
    return {name: part for name, part in parts.items() if isinstance(part, torch.Tensor)}


def _copied(weight: Any) -> torch.Tensor:
    """Returns a copy of a slice in its own memory."""
    names, context = weight.__tensor_flatten__()
    parts = dict.fromkeys(names)
    parts |= {
        name: part.clone(memory_format=torch.contiguous_format)
        for name, part in _parts(weight).items()
    }
    strides = contiguous_strides(weight.shape)
    copy: torch.Tensor = type(weight).__tensor_unflatten__(parts, context, weight.shape, strides)
    return copy


def linear(x: torch.Tensor, weight: Any, bias: torch.Tensor | None) -> torch.Tensor:
    """`F.linear` with a quantised weight: for few rows by torch's kernel, if there is one."""
    if _has_kernel(x, weight):
        rows = x.reshape(-1, x.shape[-1])
        scale = weight.scale.flatten().to(x.dtype)
        out = torch._weight_int8pack_mm(rows, weight.qdata, scale).view(*x.shape[:-1], -1)
        return out if bias is None else out + bias
    return F.linear(x, weight, bias)


def _has_kernel(x: torch.Tensor, weight: Any) -> bool:
    """Whether torch's CPU kernel applies: few rows, 8-bit weights with a scale for each weight row.

    Inductor uses it for the pattern by which torchao's `Int8Tensor` computes.
    """
    return (
        x.dtype is torch.bfloat16
        and x.device.type == "cpu"
        and type(weight).__name__ == "Int8Tensor"
        and not (torch.compiler.is_compiling() or (torch.is_grad_enabled() and x.requires_grad))
        and 0 < x.numel() <= _FEW_ROWS * x.shape[-1]
        and x.shape[-1] % _WHOLE_VECTORS == 0
        and weight.block_size == [1, weight.shape[1]]
        and weight.act_quant_kwargs is None
        and weight.act_pre_scale is None
        and weight.qdata.is_contiguous()
    )
