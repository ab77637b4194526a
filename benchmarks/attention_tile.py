"""Attention of one tile on CPU: torch's flash kernel, and ours with features that torch's lacks.

    python benchmarks/attention_tile.py --ranks 1 --json benchmarks/results/attention_tile.json

"torch" is the kernel without any of it, the limit. What torch's kernel can do as well (a causal
mask, a window as an additive mask) stands beside ours as "torch, ...".
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist

from benchmarks.harness import Case, main
from symm_cp.ops.attention import native_tiles, tiles_by_matmuls
from symm_cp.ops.attention.scoring import Scoring, TileMask
from tests import tile_kernels

BATCH, HEADS, ROWS, FEATURES, WINDOW = 1, 8, 2048, 64, 512
Kinds = dict[str, tuple[Scoring, TileMask]]
Run = Callable[[], object]


def kinds() -> Kinds:
    """Returns the kinds of attention that our kernel computes, by name."""
    scale = FEATURES**-0.5
    bias = torch.randn(HEADS, 2 * ROWS - 1)
    plain, everything = Scoring(scale=scale), TileMask()
    return {
        "plain": (plain, everything),
        "softcap": (Scoring(scale=scale, softcap=50.0), everything),
        "bias": (Scoring(scale=scale, bias=bias, bias_zero=ROWS - 1), everything),
        "dropout": (Scoring(scale=scale, dropout_p=0.1, dropout_seed=1), everything),
        "causal": (plain, TileMask(high=0)),
        "window": (plain, TileMask(low=1 - WINDOW, high=0)),
    }


def torch_masks() -> dict[str, dict[str, object]]:
    """Returns options of torch's kernel for the kinds that it can compute, by name."""
    offset = torch.arange(ROWS) - torch.arange(ROWS).unsqueeze(1)
    hidden = (offset > 0) | (offset <= -WINDOW)
    window = torch.zeros(ROWS, ROWS).masked_fill(hidden, -torch.inf)
    return {
        "torch": {"is_causal": False},
        "torch, causal": {"is_causal": True},
        "torch, window as a mask": {"is_causal": False, "attn_mask": window},
    }


def _check(name: str, found: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> None:
    for tensor, wanted in zip(found, expected, strict=True):
        near = {"rtol": 0.0, "atol": 0.03 * max(1.0, float(wanted.abs().max()))}
        torch.testing.assert_close(
            tensor.float(), wanted.float(), **near, msg=f"{name}: {{}}".format
        )


def cases(group: dist.ProcessGroup) -> Iterator[Case]:
    aten = torch.ops.aten
    flash = aten._scaled_dot_product_flash_attention_for_cpu
    flash_backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
    ours, masks = kinds(), torch_masks()
    for dtype in (torch.float32, torch.bfloat16):
        q, k, v, grad = (
            torch.randn(BATCH, ROWS, HEADS, FEATURES).to(dtype).transpose(1, 2) for _ in range(4)
        )
        forward: dict[str, Run] = {}
        backward: dict[str, Run] = {}
        for name, options in masks.items():
            forward[name] = partial(flash, q, k, v, 0.0, **options)
            causal = options["is_causal"]
            rest = {key: value for key, value in options.items() if key != "is_causal"}
            out = forward[name]()
            backward[name] = partial(flash_backward, grad, q, k, v, *out, 0.0, causal, **rest)
        for name, (scoring, tile_mask) in ours.items():
            given = (scoring, tile_mask)
            forward[name] = partial(tile_kernels.forward, native_tiles, q, k, v, *given)
            out = forward[name]()
            backward[name] = partial(
                tile_kernels.backward, native_tiles, grad, q, k, v, *out, *given
            )

        def check_forward(q=q, k=k, v=v, forward=forward) -> None:  # type: ignore[no-untyped-def]
            for name, given in ours.items():
                _check(name, forward[name](), tiles_by_matmuls.forward(q, k, v, *given))

        def check_backward(  # type: ignore[no-untyped-def]
            tensors=(grad, q, k, v), forward=forward, backward=backward
        ) -> None:
            for name, given in ours.items():
                expected = tile_kernels.backward(
                    tiles_by_matmuls, *tensors, *forward[name](), *given
                )
                _check(name, backward[name]()[:3], expected[:3])

        kind = str(dtype)[6:]
        yield Case(f"forward, {kind}", forward, check_forward)
        yield Case(f"backward, {kind}", backward, check_backward)


if __name__ == "__main__":
    main(cases, __doc__)
