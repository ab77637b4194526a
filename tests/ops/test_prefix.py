"""Prefix-LM masks: all queries see the first keys, the limits of the mask hold for the others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import symm_cp
from symm_cp.schedule import Mask, head_tail, sequential
from symm_cp.schedule.tiles import seen_by_peers


@pytest.mark.ranks(2)
def test_what_is_refused(group: dist.ProcessGroup) -> None:
    q = torch.randn(1, 2, 6, 4)
    options: dict[str, Any] = {"group": group, "is_causal": True}
    with pytest.raises(TypeError, match="prefix_lengths must be a tensor or an int, is 2"):
        symm_cp.all_gather_attention(q, q, q, prefix_lengths=2.5, **options)
    with pytest.raises(ValueError, match=r"prefix_lengths=\[-1\] must be between 0 and"):
        symm_cp.all_gather_attention(q, q, q, prefix_lengths=-1, **options)
    edges = [0, 4, 6 * group.size()]
    with pytest.raises(ValueError, match="prefix_lengths and document_edges are both given"):
        symm_cp.all_gather_attention(q, q, q, prefix_lengths=2, cu_seqlens=edges, **options)
    assert symm_cp.all_gather_attention(q, q, q, prefix_lengths=2, **options).isfinite().all()


def test_peers_are_sent_the_prefix_and_no_more() -> None:
    window = Mask(left=2, right=0, prefix=6)
    # Rank 1's queries see the prefix and the two keys before them: rows 0 to 16 hold both.
    assert seen_by_peers(sequential(32, 2), (window,)) == ((0, 16), (0, 0))
    assert seen_by_peers(sequential(32, 4), (window,)) == ((0, 8), (6, 8), (6, 8), (0, 0))
    assert seen_by_peers(head_tail(32, 2), (Mask(right=0, prefix=6),)) == ((0, 8), (0, 16))
