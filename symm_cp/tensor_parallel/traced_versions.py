"""Notices tensors that are modified in place while `torch.compile` traces a forward.

The traced program cannot read the version of a tensor. The fake tensor behind it has one, which
`comptime` functions can read during tracing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor


def _version(tensor: torch.Tensor) -> tuple[int, ...]:
    return (tensor._version, *(_version(tensor._local_tensor) if _sharded(tensor) else ()))


def _sharded(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, DTensor)


def _fake(ctx: Any) -> tuple[Any, str]:
    return ctx.get_local("tensor").as_fake(), ctx.get_local("tag").as_python_constant()


def _note(ctx: Any) -> None:
    fake, tag = _fake(ctx)
    versions = vars(fake).setdefault("_symm_cp_versions", {})
    versions[tag] = _version(fake)


def _check(ctx: Any) -> None:
    fake, tag = _fake(ctx)
    noted = vars(fake).get("_symm_cp_versions", {}).get(tag)
    if noted is None:
        raise NotImplementedError(
            f"FusedColwiseGroup: torch.compile breaks the graph between the linears {tag}, which "
            "share a gather; use FusedColwiseParallel for each of them, or a newer torch"
        )
    if noted != _version(fake):
        raise NotImplementedError(
            f"FusedColwiseGroup: the input or a parameter of the linears {tag}, which share a "
            "gather, was modified in place between two of them, which torch.compile does not "
            "support; modify a copy, or use FusedColwiseParallel for each of them"
        )


def note_version(tensor: torch.Tensor, tag: str) -> None:
    """Saves the version of a traced tensor for `check_version` with the same tag."""
    from torch._dynamo.comptime import comptime

    comptime(_note)


def check_version(tensor: torch.Tensor, tag: str) -> None:
    """Raises `NotImplementedError` if the tensor was modified since `note_version`."""
    from torch._dynamo.comptime import comptime

    comptime(_check)
