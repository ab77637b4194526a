"""The Triton kernels as Hopper's machine code, which needs no GPU to be looked at."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from symm_cp.kernels import arrival_attention as arrival

HOPPER = GPUTarget("cuda", 90, 32)
_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


#: The shared memory of a block where it is least (compute capability 8.9): 99 KiB.
SMALL, LEAST = GPUTarget("cuda", 89, 32), 99 << 10


def compiled(
    kernel: Any,
    types: dict[str, str],
    constants: dict[str, Any],
    target: GPUTarget = HOPPER,
    **options: Any,
) -> Any:
    """What a launch compiles whose pointers and strides are multiples of 16."""
    signature = {
        name: "constexpr" if name in constants else types.get(name, "i32")
        for name in kernel.arg_names
    }
    at = {name: (index,) for index, name in enumerate(kernel.arg_names)}
    aligned = {
        at[name]: [["tt.divisibility", 16]]
        for name, kind in signature.items()
        if kind.startswith("*") or re.fullmatch(r"\w_[bhs]|pulled_shard", name)
    }
    values = {at[name]: value for name, value in constants.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=values, attrs=aligned)
    return triton.compile(source, target=target, options=options)


def innermost_loops(binary: bytes, folder: Path) -> list[list[str]]:
    """The loops of a binary that have none inside: the names of their instructions."""
    path = folder / "kernel.cubin"
    path.write_bytes(binary)
    command = [str(_TOOLS / "nvdisasm"), "-c", str(path)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    names: list[str] = []
    labels: dict[str, int] = {}
    loops: list[tuple[int, int]] = []
    for line in text.splitlines():
        if label := re.match(r"(\.L_x_\d+):", line):
            labels[label[1]] = len(names)
        elif found := re.search(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(\w+)", line):
            names.append(found[1])
            target = re.search(r"\bBRA\b.*`\((\.L_x_\d+)\)", line)
            if target and target[1] in labels:
                loops.append((labels[target[1]], len(names)))
    inner = [
        (begin, end)
        for begin, end in loops
        if not any((a, b) != (begin, end) and begin <= a and b <= end for a, b in loops)
    ]
    return [names[begin:end] for begin, end in inner]


def attention(features: int, causal: bool, target: GPUTarget) -> Any:
    tiling = arrival.TILINGS[features]
    tensors = ("query", "key", "value", "pulled_key", "pulled_value", "out")
    types = dict.fromkeys(tensors, "*bf16")
    types |= dict.fromkeys(("q_positions", "chunks", "words"), "*i32")
    types |= {"lse": "*fp32", "scale": "fp32"}
    constants = {
        "CHUNKS": 2, "CAUSAL": causal, "ROWS": tiling.rows, "KEYS": tiling.keys, "E": features
    }  # fmt: skip
    return compiled(
        arrival.arrival_attention_kernel, types, constants, target,
        num_warps=tiling.warps, num_stages=tiling.stages, enable_fp_fusion=True,
    )  # fmt: skip


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("features", arrival.FEATURES)
def test_loops_over_keys_stay_in_registers(features: int, causal: bool, tmp_path: Path) -> None:
    made = attention(features, causal, HOPPER)
    assert made.metadata.shared <= 227 << 10  # what a block may have
    loops = innermost_loops(made.asm["cubin"], tmp_path)
    over_keys = [names for names in loops if "HGMMA" in names]
    # Of the own and of the pulled shards, each without masks and with them.
    assert len(over_keys) == 4
    for names in over_keys:
        assert not {"LDL", "STL"} & set(names), "registers spill in the loop"
        assert "LDGSTS" in names, "the next keys are not loaded in the background"
    plain, masked = sorted(map(len, over_keys))[:2], sorted(map(len, over_keys))[2:]
    assert 1.2 * max(plain) < min(masked), "whole tiles pay for masks"


def test_the_largest_tiles_fit_on_small_gpus() -> None:
    assert attention(128, True, SMALL).metadata.shared <= LEAST
