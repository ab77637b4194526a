"""Which method a call of attention takes with `method="auto"`, and how it runs on streams."""

from __future__ import annotations

import torch

from symm_cp import tuning
from symm_cp.cuda import has_streams
from symm_cp.group.memory import Group
from symm_cp.ops.attention import together
from symm_cp.ops.attention.methods import Method
from symm_cp.ops.attention.options import ScoreOptions
from symm_cp.ops.attention.spec import AttentionSpec
from symm_cp.schedule.attention_work import AttentionWork
from symm_cp.schedule.layout import SequenceLayout
from symm_cp.schedule.mask import Mask
from symm_cp.tensors.dtypes import dtype_name


def settled(
    op: str,
    group: Group,
    query: torch.Tensor,
    key: torch.Tensor,
    spec: AttentionSpec,
    options: ScoreOptions,
    *,
    queries: SequenceLayout | None = None,
    backward: bool = False,
) -> Method:
    """Returns the method that the options of a call name, or for "auto" the faster one.

    The choice depends only on values that all ranks share: it is the same on each, in every run.
    `queries` is the layout of the queries, by default the spec's, or else that of the keys.
    Collective at the first call for a group.
    """
    method = Method.of(op, options)
    if method.name != "auto":
        return method
    work = _work_of(query, key, spec, queries, backward=backward)
    return Method(tuning.choose_method(group, query.device, work))


def way(
    group: Group,
    query: torch.Tensor,
    key: torch.Tensor,
    spec: AttentionSpec,
    *,
    backward: bool = False,
) -> str:
    """Returns how a pass by keys runs: one of `tuning.ATTENTION_WAYS`.

    All ranks get the same answer. Collective at the first call for a group.
    """
    if not has_streams(query.device):
        return "pipeline"
    ways = ["pipeline"]
    work = None
    # Callers choose a ring of gradients where memory has no room for all of them.
    if together.fits(group, key, spec) and not (backward and spec.method == "alltoall"):
        ways.append("together")
        work = _work_of(query, key, spec, backward=backward)
    if len(ways) == 1:
        return ways[0]
    question = _question(query, key, spec) + (" backward" if backward else "")
    return tuning.choose_attention(group, query.device, question, tuple(ways), work)


def _question(query: torch.Tensor, key: torch.Tensor, spec: AttentionSpec) -> str:
    """Returns the name of a call in the file of measured choices, identical on all ranks.

    The name repeats the number of keys in place of the queries', which may differ between ranks.
    """
    B, H, _, E = query.shape
    sizes = f"{B}x{H}x{key.shape[1]}x{key.shape[2]}x{key.shape[2]}x{E}"
    kind, chunks = "causal" if spec.mask else "full", len(spec.layout.chunks(0))
    return f"all_gather_attention {dtype_name(query.dtype)} {sizes} {kind} {chunks} chunks"


def _work_of(
    query: torch.Tensor,
    key: torch.Tensor,
    spec: AttentionSpec,
    queries: SequenceLayout | None = None,
    *,
    backward: bool = False,
) -> AttentionWork:
    return AttentionWork(
        batch=query.shape[0],
        heads=query.shape[1],
        kv_heads=key.shape[1],
        features=query.shape[3],
        value_features=spec.features(key),
        dtype=dtype_name(query.dtype),
        item=query.dtype.itemsize,
        queries=queries or spec.queries or spec.layout,
        keys=spec.layout,
        masks=(spec.mask,) if isinstance(spec.mask, Mask) else spec.mask,
        backward=backward,
    )
