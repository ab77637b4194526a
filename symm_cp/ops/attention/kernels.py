"""torch's attention kernels for one tile, by device, behind two functions.

Shapes: query (B, H, S, E), key and value (B, G, K, E) for a divisor G of H, features contiguous.
`mask` is additive, (S, K) or with leading dimensions; `causal` lets query i see keys 0 to i.

    CPU    torch's flash kernel: every dtype and mask, any number of features; plain matmuls for few
           keys, where the flash kernel loses NaN (in a third of the time of tiles_by_matmuls.py).
           native_tiles.py computes most tiles, though.
    CUDA   torch's choice for the same attention, so that `sdpa_kernel` etc. apply: cuDNN, flash or
           memory-efficient; plain matmuls where none of them applies. Devices of other types
           likewise. Forward and backward passes may use different kernels, as all of them take and
           return the same log-sum-exp.

The schemas of these ops are the same in torch 2.11 to 2.15 (tests/cuda/sdpa_schemas.json).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from symm_cp import cuda
from symm_cp.cuda import kernels
from symm_cp.tensors import dtypes

_aten = torch.ops.aten
_cpu = _aten._scaled_dot_product_flash_attention_for_cpu.default
_cpu_backward = _aten._scaled_dot_product_flash_attention_for_cpu_backward.default
_flash = _aten._scaled_dot_product_flash_attention.default
_flash_backward = _aten._scaled_dot_product_flash_attention_backward.default
_cudnn = _aten._scaled_dot_product_cudnn_attention.default
_cudnn_backward = _aten._scaled_dot_product_cudnn_attention_backward.default
_efficient = _aten._scaled_dot_product_efficient_attention.default
_efficient_backward = _aten._scaled_dot_product_efficient_attention_backward.default

# Keys are torch's numbers for backends (`torch.nn.attention.SDPBackend`).
_KINDS = {1: "flash", 2: "efficient", 3: "cudnn"}
# Below this number of keys, torch's kernel treats a row with NaN scores like one that sees no key.
_CPU_KEYS = 16
# The efficient kernel requires rows of a mask to begin at multiples of 16 elements.
MASK_ALIGN = 16
# cuDNN requires tensors to begin at multiples of these bytes.
_CUDNN_ALIGN = 16
# The first cuDNN whose query gradients are finite on compute capability 9.0, without a causal mask,
# if the number of keys is 64 more than a multiple of 128. torch checks this only from 2.15 on.
_CUDNN_FINITE = 92600


def kind_of(
    query: torch.Tensor,
    key: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    causal: bool,
    value: torch.Tensor | None = None,
    backward: bool = False,
) -> str:
    """Returns the kernel for a tile: "cpu", "cudnn", "flash", "efficient" or "matmul".

    With a mask, `key` and `mask` must have the form that the efficient kernel takes, except on CPU.
    `value` defaults to `key`.
    """
    value = key if value is None else value
    if query.device.type == "cpu":
        return "cpu" if key.shape[2] >= _CPU_KEYS else "matmul"
    shared = query.shape[1] != key.shape[1]
    with torch.set_grad_enabled(backward):
        if backward:  # torch then leaves out kernels without a backward pass
            query = query.detach().requires_grad_()
        choice = torch._fused_sdp_choice(query, key, value, mask, 0.0, causal, enable_gqa=shared)
    kind = _KINDS.get(choice, "matmul")
    if mask is not None:
        # Only the efficient kernel takes a mask and returns a log-sum-exp.
        return kind if kind == "matmul" else "efficient"
    if kind == "cudnn" and backward and not _is_finite(query, key, causal):
        return "flash"
    return kind


def _is_finite(query: torch.Tensor, key: torch.Tensor, causal: bool) -> bool:
    """Whether the backward pass of the installed cuDNN is right for a tile."""
    if causal or key.shape[2] % 128 != 64 or torch.backends.cudnn.version() >= _CUDNN_FINITE:
        return True
    return torch.cuda.get_device_capability(query.device) != (9, 0)


def forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    causal: bool,
    scale: float | None,
    kind: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the output and its log-sum-exp, which is undefined for rows that see no key."""
    key, value, mask = _for_masks(query, key, value, mask)
    kind = kind or kind_of(query, key, mask, causal=causal, value=value)
    if kind == "cpu":
        if causal and scale is not None and scale <= 0:
            # The kernel scales the -inf of a causal mask, too.
            query, scale = (-query, -scale) if scale < 0 else (torch.zeros_like(query), 1.0)
        return _cpu(query, key, value, 0.0, causal, attn_mask=mask, scale=scale)
    if causal:
        # Kernels other than the CPU's align a causal mask at the lower right.
        assert query.shape[2] == key.shape[2]
    if kind == "flash":
        padded = map(_padded, (query, key, value))
        factor = factor_of(query, scale)
        out, lse, *_ = _flash(*padded, 0.0, causal, False, scale=factor)
        return out[..., : query.shape[-1]], lse
    if kind == "cudnn":
        out, lse, *_ = _cudnn(query, key, value, None, True, 0.0, causal, False, scale=scale)
        return out, lse.reshape(query.shape[:3])
    times = query.shape[1] // key.shape[1]
    key, value = _repeated(key, times), _repeated(value, times)
    if kind == "efficient":
        out, lse, *_ = _efficient(query, key, value, mask, True, 0.0, causal, scale=scale)
        return out, lse[:, :, : query.shape[2]]  # its length is rounded up to a multiple of 32
    score = _scores(query, key, mask, causal, scale)
    lse = torch.logsumexp(score, -1)
    return torch.matmul(_weights(score, lse).to(value.dtype), value), lse


def backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    causal: bool,
    scale: float | None,
    kind: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the gradients of query, key and value; `lse` is inf in rows that see no key."""
    times = query.shape[1] // key.shape[1]
    key, value, mask = _for_masks(query, key, value, mask)
    kind = kind or kind_of(query, key, mask, causal=causal, value=value, backward=True)
    if kind == "cpu":
        return _cpu_backward(
            grad_out, query, key, value, out, lse, 0.0, causal, attn_mask=mask, scale=scale
        )
    if kind == "cudnn":
        return _by_cudnn(_Saved(grad_out, query, key, value, out, lse), causal, scale)
    if kind == "flash":
        grads = _by_flash(_Saved(grad_out, query, key, value, out, lse), causal, scale)
        return tuple(grad[..., : query.shape[-1]] for grad in grads)
    repeats = query.shape[1] // key.shape[1]
    key, value = _repeated(key, repeats), _repeated(value, repeats)
    by = _by_efficient if kind == "efficient" else _by_matmuls
    grads = by(_Saved(grad_out, query, key, value, out, lse), mask, causal, scale)
    return grads[0], _summed(grads[1], times), _summed(grads[2], times)


class _Saved(NamedTuple):
    """The tensors that the backward pass of a kernel takes."""

    grad_out: torch.Tensor
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor


def _for_masks(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Returns keys, values and mask as kernels with masks take them; without a mask, unchanged."""
    if mask is None or query.device.type == "cpu":
        return key, value, mask
    times = query.shape[1] // key.shape[1]
    return _repeated(key, times), _repeated(value, times), _aligned(mask, query, key)


def merge(out: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor) -> None:
    """Merges attention over further keys into `out` and `lse`, by log-sum-exp."""
    device = cuda.kind_for(out.device)
    if device is None:
        torch.ops.symm_cp.merge_attention(out, lse, part, part_lse)
    elif device.triton:
        merge = kernels.merge_attention
        cuda.plans.in_python(lambda given: merge(*given), [out, lse, part, part_lse])
    else:
        _merge_by_ops(out, lse, part, part_lse)


def _merge_by_ops(
    out: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor
) -> None:
    """Merges as the kernels do: a part of weight 0 adds nothing, even where it is NaN."""
    top = torch.maximum(lse, part_lse)
    top = top.masked_fill(top == -torch.inf, 0.0)
    weights = torch.exp(lse - top), torch.exp(part_lse - top)
    total = weights[0] + weights[1]
    scale = total.masked_fill(total == 0, 1.0)
    own, other = (
        (tensor * (weight / scale).unsqueeze(-1)).masked_fill((weight == 0).unsqueeze(-1), 0.0)
        for tensor, weight in zip((out, part), weights, strict=True)
    )
    out.copy_(own + other)
    lse.copy_(top + torch.log(total))


def factor_of(query: torch.Tensor, scale: float | None) -> float:
    """Returns the factor of scores."""
    return float(query.shape[-1] ** -0.5) if scale is None else scale


def _padded(tensor: torch.Tensor) -> torch.Tensor:
    """Pads the features to a multiple of 8, which the flash kernel requires."""
    padding = -tensor.shape[-1] % 8
    return F.pad(tensor, (0, padding)) if padding else tensor


def _repeated(tensor: torch.Tensor, times: int) -> torch.Tensor:
    return tensor if times == 1 else tensor.repeat_interleave(times, 1)


def _summed(grad: torch.Tensor, times: int) -> torch.Tensor:
    return grad if times == 1 else grad.unflatten(1, (-1, times)).sum(2)


def _aligned(mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Returns a mask as the efficient kernel takes it: in the query's dtype, expanded, aligned."""
    keys = key.shape[2]
    if mask.dtype != query.dtype or mask.stride(-2) % MASK_ALIGN != 0:
        mask = F.pad(mask.to(query.dtype), (0, -keys % MASK_ALIGN))[..., :keys]
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], keys)


def _alike(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Returns tensors of one shape, aligned and with equal strides; copies them otherwise."""
    strides = {
        tuple(stride for size, stride in zip(t.shape, t.stride(), strict=True) if size > 1)
        for t in tensors
    }
    aligned = all(t.data_ptr() % _CUDNN_ALIGN == 0 for t in tensors)
    if len(strides) == 1 and aligned and not any(0 in known for known in strides):
        return tensors
    return tuple(t.clone(memory_format=torch.contiguous_format) for t in tensors)


def _scores(
    query: torch.Tensor,
    key: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    scale: float | None,
) -> torch.Tensor:
    wide = dtypes.wide(query.dtype)
    factor = factor_of(query, scale)
    score = torch.matmul(query.to(wide) * factor, key.to(wide).transpose(-1, -2))
    if mask is not None:
        score = score + mask
    if causal:
        hidden = torch.ones(score.shape[-2:], dtype=torch.bool, device=query.device).triu(1)
        score = score.masked_fill(hidden, -torch.inf)
    return score


def _weights(score: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    # Rows that see no key have no weights.
    return torch.exp(score - lse.masked_fill(lse == -torch.inf, torch.inf).unsqueeze(-1))


def _by_flash(saved: _Saved, causal: bool, scale: float | None) -> tuple[torch.Tensor, ...]:
    grad_out, query, key, value, out, lse = saved
    none = torch.empty(0, dtype=torch.int64, device=query.device)
    rows, keys, factor = query.shape[2], key.shape[2], factor_of(query, scale)
    padded = map(_padded, (grad_out, query, key, value, out))
    # No cumulative lengths: any tensor, even an empty one, would mean a nested batch. The last two
    # are the random state of dropout.
    return _flash_backward(
        *padded, lse.contiguous(), None, None, rows, keys, 0.0, causal, none, none, scale=factor
    )


def _by_cudnn(
    saved: _Saved, causal: bool, scale: float | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    grad_out, query, key, value, out, lse = saved
    none = torch.empty(0, dtype=torch.int64, device=query.device)
    rows, keys = query.shape[2], key.shape[2]
    # torch caches cuDNN's plans by the strides of query, key and value. A plan depends on the other
    # tensors' strides, too, which must therefore follow from these.
    grad_out, query, out = _alike(grad_out, query, out)
    statistics = lse.contiguous().unsqueeze(-1)
    return _cudnn_backward(
        grad_out, query, key, value, out, statistics, none, none, None, None, None,
        rows, keys, 0.0, causal, scale=scale,
    )  # fmt: skip


def _by_matmuls(
    saved: _Saved, mask: torch.Tensor | None, causal: bool, scale: float | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    grad_out, query, key, value, out, lse = saved
    score = _scores(query, key, mask, causal, scale)
    weight = _weights(score, lse)
    wide = weight.dtype
    factor = factor_of(query, scale)
    grad = grad_out.to(wide)
    grad_value = torch.matmul(weight.transpose(-1, -2), grad)
    inner = (grad * out.to(wide)).sum(-1, keepdim=True)
    grad_score = weight * (torch.matmul(grad, value.to(wide).transpose(-1, -2)) - inner) * factor
    grad_query = torch.matmul(grad_score, key.to(wide))
    grad_key = torch.matmul(grad_score.transpose(-1, -2), query.to(wide))
    return grad_query, grad_key, grad_value


def _by_efficient(
    saved: _Saved, mask: torch.Tensor | None, causal: bool, scale: float | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    grad_out, query, key, value, out, lse = saved
    rows = query.shape[2]
    padded = F.pad(lse, (0, -rows % 32), value=torch.inf).contiguous()
    none = torch.empty(0, dtype=torch.int64, device=query.device)
    grads = _efficient_backward(
        grad_out, query, key, value, mask, out, padded, none, none, 0.0,
        [True, True, True, False], causal, scale=scale,
    )  # fmt: skip
    return grads[0], grads[1], grads[2]
