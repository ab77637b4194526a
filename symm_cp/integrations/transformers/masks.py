"""Masks of the whole sequence, from the arguments that transformers passes to mask functions.

These tell what a mask is: the padding of this rank's part of the batch (`attention_mask`), the
length of windows or chunks (`local_size`), and whether later keys are hidden. transformers also
looks for documents in `position_ids`, of this rank's part only; here they are found in the whole
sequence, as its flash attention does, in the `position_ids` of the model that runs.

Shapes: B samples, S positions of the whole sequence.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils.import_utils import is_tracing

from symm_cp.context_parallel.region import ParallelRegion
from symm_cp.context_parallel.sequence_mask import SequenceMask, gather_sequence, runs

OP = "transformers' mask"
_NAME = "position_ids"


# --- positions -----------------------------------------------------------------------------------


class _Running(threading.local):
    #: The `position_ids` of the model that runs, or ran last, in this thread.
    positions: torch.Tensor | None = None


_running = _Running()


def note_positions(stack: ExitStack, parts: Sequence[nn.Module]) -> None:
    """Notes the positions that models get, for their masks, until the end of `stack`."""
    for model in parts:
        if isinstance(model, PreTrainedModel):
            hook = model.register_forward_pre_hook(_noting(model.__class__), with_kwargs=True)
            stack.callback(hook.remove)
    stack.callback(setattr, _running, "positions", None)


@functools.cache
def _noting(kind: Any) -> Any:
    """Returns the hook for models of a class."""
    names = tuple(inspect.signature(kind.forward).parameters)[1:]
    index = names.index(_NAME) if _NAME in names else sys.maxsize

    def note(module: nn.Module, args: Any, kwargs: Any) -> None:
        _running.positions = args[index] if index < len(args) else kwargs.get(_NAME)

    return note


def _positions(samples: int) -> torch.Tensor | None:
    """Returns the positions (B, columns of this rank) that documents are found in."""
    positions = _running.positions
    if positions is not None and positions.dim() == 3:  # the first of four rows counts the text
        positions = positions[0] if len(positions) == 4 else None
    return None if positions is None else positions.expand(samples, -1)


# --- masks ---------------------------------------------------------------------------------------


def _traced(tensor: torch.Tensor) -> bool:
    """Whether the host cannot or must not read a tensor; the same test as in transformers."""
    return torch.compiler.is_compiling() or is_tracing(tensor)


def _documents(positions: torch.Tensor) -> torch.Tensor | None:
    """Returns ids (B, S) of documents: as in transformers, a jump in positions begins one."""
    jumps = torch.diff(positions, prepend=positions[:, :1] - 1) != 1
    return jumps.cumsum(-1) if _traced(positions) or bool(jumps.any()) else None


def _chunks(
    size: int,
    length: int,
    key_mask: torch.Tensor | None,
    positions: torch.Tensor | None,
    documents: torch.Tensor | None,
) -> torch.Tensor:
    """Returns the number of each position's chunk, (B or 1, S).

    Chunks are counted from the first token after padding on the left, and in each document.
    """
    counted = torch.arange(length)[None]
    if key_mask is not None:
        left = (key_mask.cumsum(-1) == 0).sum(-1, keepdim=True)
        return (counted.to(left.device) - left) // size
    if positions is None or documents is None:
        return counted // size
    # Without a jump transformers counts from index 0, whatever the first position is.
    one = (documents[:, -1:] == documents[:, :1]).all()
    return torch.where(one, counted.to(positions.device), positions) // size


def _refuse_other_functions(
    function: Any, samples: int, length: int, device: Any, options: dict[str, Any]
) -> None:
    """Refuses masks of which `sequence_mask` does not hear: by functions, or blocks of tokens."""
    found = f"{OP}: or_mask_function or and_mask_function"
    shown = None
    if not options.get("use_vmap") and not options.get("allow_is_causal_skip"):
        found = f"{OP}: block_sequence_ids (of pictures' tokens)"
        batch, q = torch.arange(samples, device=device), torch.arange(length - 1, device=device)
        shown = function(batch[:, None], 0, q, q + 1).any()
    message = (
        f"{found} would see this rank's part of the sequence only. Pass the mask of the whole "
        "sequence as attention_mask: a BlockMask, or bool of (batch, heads, sequence, sequence)"
    )
    if shown is not None and torch.compiler.is_compiling():
        torch._assert_async(~shown, message)
    elif options.get("use_vmap") or (shown is not None and bool(shown)):
        raise NotImplementedError(message)


def sequence_mask(
    region: ParallelRegion,
    function: Any,
    samples: int,
    lengths: tuple[int, int],
    padding: torch.Tensor | None,
    options: dict[str, Any],
) -> SequenceMask:
    """Returns the mask of the whole sequence for the arguments of a mask function. Collective.

    `lengths`: the numbers of this rank's queries and keys. `padding`: its part of the attention
    mask, (B, keys), as transformers gives it. `options`: the further arguments.
    """
    causal = "allow_is_bidirectional_skip" not in options
    size = options.get("local_size")
    if (causal or size is not None) and lengths[0] != lengths[1]:
        given = "" if padding is None else f"attention_mask of shape {list(padding.shape)} gives "
        raise ValueError(
            f"{OP}: {given}{lengths[1]} keys for {lengths[0]} queries; the numbers must be equal: "
            "pass this rank's part of the sequence, which symm_cp.shard_batch cuts"
        )
    positions = _positions(samples) if causal and padding is None else None
    key_mask = documents = None
    if padding is not None:
        key_mask = gather_sequence(OP, "attention_mask", padding, region, lengths)
    if positions is not None:
        own = (lengths[0], lengths[0])
        positions = gather_sequence(OP, _NAME, positions, region, own)
        documents = _documents(positions)
    if causal or options.get("use_vmap"):
        _refuse_other_functions(function, samples, lengths[0], options.get("device"), options)
    left = right = None
    ids = [] if documents is None else [documents]
    if size is not None and getattr(options.get("config"), "sliding_window", None) is None:
        whole = region.whole_length(lengths[0])
        ids.append(_chunks(size, whole, key_mask, positions, documents))
    elif size is not None:
        left, right = (size - 1, None) if causal else (size, size)
    if key_mask is not None and not _traced(key_mask) and bool(key_mask.all()):
        key_mask = None
    return SequenceMask(
        is_causal=causal,
        window_left=left,
        window_right=right,
        document_ids=runs(*ids) if ids else None,
        key_mask=key_mask,
        region=region,
    )
