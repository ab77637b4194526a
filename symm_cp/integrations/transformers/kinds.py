"""The kinds of functions that transformers composes masks from, identified by their code.

All functions of a kind share one code object, also when Dynamo makes them while it traces. The
import checks the meaning of each kind once: another release of transformers may change it.
"""

from __future__ import annotations

import types
from typing import Any

import torch
import transformers
from transformers import masking_utils as made

from symm_cp.context_parallel.sequence_mask import SequenceMask

_NEEDED = (
    "and_masks",
    "or_masks",
    "causal_mask_function",
    "bidirectional_mask_function",
    "sliding_window_overlay",
    "sliding_window_bidirectional_overlay",
    "chunked_overlay",
    "padding_mask_function",
    "packed_sequence_mask_function",
    "remap_positions_for_packed_sequence",
    "blockwise_overlay",
)


def _unknown(what: str) -> ImportError:
    return ImportError(
        f"symm_cp.integrations.transformers: transformers {transformers.__version__} {what}, so "
        "its masks could be misunderstood: use transformers 5.23 or later, or context_parallel "
        "without model="
    )


if missing := [name for name in _NEEDED if not hasattr(made, name)]:
    raise _unknown(f"composes masks without {missing}")


def _code(function: Any) -> types.CodeType:
    code: types.CodeType = function.__code__
    return code


_IDS = torch.zeros(1, 1, dtype=torch.int64, device="cpu")

CAUSAL = _code(made.causal_mask_function)
BIDIRECTIONAL = _code(made.bidirectional_mask_function)
AND = _code(made.and_masks())
OR = _code(made.or_masks())
WINDOW = _code(made.sliding_window_overlay(1))
WINDOW_BOTH = _code(made.sliding_window_bidirectional_overlay(1))
CHUNKS = _code(made.chunked_overlay(1, _IDS[0]))
PADDING = _code(made.padding_mask_function(_IDS))
PACKED = _code(made.packed_sequence_mask_function(_IDS))
REMAPPED = _code(made.remap_positions_for_packed_sequence(made.causal_mask_function, _IDS))
BLOCKS = _code(made.blockwise_overlay(_IDS))

# Bidirectional blocks end with their document since 5.24, but not before.
BLOCKS_END_WITH_DOCUMENTS = not hasattr(made, "packed_sequence_compatibility_function")
# The name that functions which compose masks give the cache; 5.24 changed it.
CACHE = "cache" if BLOCKS_END_WITH_DOCUMENTS else "past_key_values"


def check_meanings() -> None:
    """Raises `ImportError` if a mask function shows other keys than its kind should."""
    length = 6
    positions = torch.arange(length, device="cpu")
    ids = positions[None] // 2
    keys = ids == 1
    one = torch.ones(1, dtype=torch.int64, device="cpu")
    chunks = (positions[None] - 1) // 2
    expected = {
        made.causal_mask_function: SequenceMask(is_causal=True),
        made.bidirectional_mask_function: SequenceMask(),
        made.sliding_window_overlay(3): SequenceMask(window_left=2),
        made.sliding_window_bidirectional_overlay(3): SequenceMask(window_left=3, window_right=3),
        made.chunked_overlay(2, one): SequenceMask(document_ids=chunks),
        made.padding_mask_function(keys): SequenceMask(key_mask=keys),
        made.or_masks(
            made.causal_mask_function, made.blockwise_overlay(-(positions[None] // 3))
        ): SequenceMask(is_causal=True, prefix_lengths=3 * one),
        made.packed_sequence_mask_function(ids): SequenceMask(document_ids=ids),
        made.and_masks(made.sliding_window_overlay(3), made.causal_mask_function): SequenceMask(
            is_causal=True, window_left=2
        ),
        made.and_masks(
            made.packed_sequence_mask_function(ids),
            made.remap_positions_for_packed_sequence(
                made.causal_mask_function, positions[None] % 2
            ),
        ): SequenceMask(is_causal=True, document_ids=ids),
    }
    zero = torch.zeros(1, 1, dtype=torch.int64, device="cpu")
    for function, mask in expected.items():
        indices = (zero, zero, positions[:, None], positions[None])
        shown, meant = (f(*indices).expand(length, length) for f in (function, mask.as_mask_mod()))
        if not torch.equal(shown, meant):
            raise _unknown(f"shows other keys by {function.__qualname__}")


check_meanings()
