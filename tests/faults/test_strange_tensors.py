"""Kinds of tensors that ops seldom see: each call is right or refused at once, and the next works.

Sparse, quantised and nested tensors, freed storage, wrappers and more (strange_kinds.py), in each
place of each op, on all ranks and on one, which has to tell the others.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from symm_cp.testing import Ranks
from tests.backend.common import shared
from tests.exhaustive import exhaustive
from tests.faults import strange, strange_kinds
from tests.faults.calls_as_data import wide

AT_ONCE = 3.0  # seconds, even on a busy machine; well below the time-out
TIMEOUT_MS = 10_000
WORLD_SIZE = 2
KINDS = list(strange_kinds.MAKE)
NO_VALUES = (*strange_kinds.WITHOUT_STORAGE, *strange_kinds.STAND_INS, "enormous", "overflowing")
OPS = sorted((*strange.RAW, *strange.ENTRY_POINTS))


class Given(NamedTuple):
    """A call: the strange tensor is the argument `position`, on all ranks or on rank 0 alone."""

    op: str
    kind: str
    position: int
    alone: bool


class Outcome(NamedTuple):
    """The outcome of a call on a rank: "right", "wrong" or the type of an error."""

    what: str
    text: str = ""
    seconds: float = 0.0
    after: str = ""  # the fault of the good call after it, if any


def _difference(found: Any, expected: list[torch.Tensor]) -> str:
    values = strange.values(found)
    if [x.shape for x in values] != [x.shape for x in expected]:
        return f"shapes {[x.shape for x in values]}, not {[x.shape for x in expected]}"
    for one, other in zip(values, expected, strict=True):
        one, other = strange_kinds.dense(one), strange_kinds.dense(other)
        if strange_kinds.is_shell(one):
            continue
        if hasattr(one, "rename"):  # before 2.13 torch has named tensors, which it does not compare
            one, other = one.detach().rename(None), other.detach().rename(None)
        one, other = wide(one), wide(other)
        if one.dtype != other.dtype or not torch.allclose(one, other, 1e-4, 1e-5, equal_nan=True):
            return f"{one}, not {other}"
    return ""


def _attempt(
    case: Given, plain: strange.Tensors, good: strange.Tensors, group: dist.ProcessGroup
) -> Outcome | None:
    """The outcome of a call that returns `good` for ordinary tensors; None if it cannot be made."""
    op, mine = strange.ALL[case.op], group.rank() == 0 or not case.alone
    tensors, same = [x.clone() for x in plain], [x.clone() for x in plain]
    expected: Any = None
    try:
        made = strange_kinds.MAKE[case.kind](tensors[case.position].clone())
    except Exception:
        return None
    ordinary = None
    if case.kind not in NO_VALUES:
        with contextlib.suppress(Exception):
            ordinary = strange_kinds.dense(made)
    if ordinary is not None:
        if mine:
            same[case.position] = ordinary
        expected = strange.called(op, same, group)
    if mine:
        tensors[case.position] = made
    begin = time.monotonic()
    found = strange.called(op, tensors, group)
    seconds = time.monotonic() - begin
    if isinstance(found, Exception):
        return Outcome(type(found).__name__, str(found), seconds)
    if case.kind in strange_kinds.STAND_INS or any(x.is_meta for x in found):
        return Outcome("right", seconds=seconds)
    if not mine and not isinstance(expected, list):
        expected = good  # what rank 0 gave came before it failed
    if not isinstance(expected, list):
        return Outcome("wrong", f"was not refused, as {expected!r}", seconds)
    wrong = _difference(found, expected)
    return Outcome("wrong" if wrong else "right", wrong, seconds)


def _group_for(op: str, group: dist.ProcessGroup) -> dist.ProcessGroup:
    os.environ["SYMM_CP_TIMEOUT_MS"] = str(TIMEOUT_MS)
    try:
        if op in strange.COLLECTIVES:
            return shared(group)
        own = dist.new_group(list(range(group.size())))
        torch.ops.symm_mem.one_shot_all_reduce(torch.ones(1), "sum", own.group_name)
        return own
    finally:
        del os.environ["SYMM_CP_TIMEOUT_MS"]


def attempts(
    group: dist.ProcessGroup, op: str, kinds: list[str], several: int
) -> list[tuple[Given, Outcome]]:
    """Makes calls of an op, each followed by a good one; stops at the first good call that fails.

    `several`: how many arguments each kind replaces in turn; each kind starts at another argument.
    """
    own, outcomes = _group_for(op, group), []
    plain = strange.ALL[op].tensors(group.size())
    good = strange.values(strange.ALL[op].call([x.clone() for x in plain], own))
    good = [x.clone() for x in good]
    for number, kind in enumerate(kinds):
        for place in range(min(several, len(plain))):
            for alone in (False, True):
                case = Given(op, kind, (number + place) % len(plain), alone)
                # In gather and scatter only the root has the list.
                if (alone or op in ("gather", "scatter")) and not _is_told(case):
                    continue
                if kind in NOT_STRANGE and _is_accepted(case):
                    continue
                outcome = _attempt(case, plain, good, own)
                if outcome is None:
                    continue
                again = strange.called(strange.ALL[op], [x.clone() for x in plain], own)
                wrong = repr(again) if isinstance(again, Exception) else _difference(again, good)
                outcomes.append((case, outcome._replace(after=wrong)))
                if wrong:
                    return outcomes
    return outcomes


#: Kinds that some arguments take: several weights, no bias; elements that are written twice; sparse
#: tensors to be summed (tests/backend/test_sparse.py).
NOT_STRANGE = ("none", "list", "overlapping", "enormous", "sparse", "sparse_hybrid")


_RECURRENT = ("_delta_rule_states", "_delta_rule_grads")


def _is_accepted(case: Given) -> bool:
    """Whether a kind is an ordinary argument there, or gives what torch leaves undefined."""
    if case.kind == "overlapping":
        return case.op in strange.COLLECTIVES or strange.ALL[case.op].writes is not None
    if case.kind.startswith("sparse"):
        return case.op in ("all_reduce", "all_reduce in the background")
    if case.kind == "enormous":
        return case.op == "_fused_all_gather_weight_grad"  # an empty result of no rows
    if case.kind == "none" and case.op in ("combine_from_experts", *_RECURRENT):
        return True  # weights of 1; nothing is erased
    if case.kind == "list" and case.op in ("sequence_to_heads", "heads_to_sequence"):
        return True
    return case.position > 0 and ("matmul" in case.op or "projection" in case.op)


def _is_told(case: Given) -> bool:
    """Whether peers can hear of a refusal: torch refuses some calls before anybody is asked."""
    if case.kind in strange_kinds.STAND_INS:
        return False  # nothing is refused
    if case.op in strange.COLLECTIVES:
        return case.kind in BY_THE_BACKEND
    if _is_refused_by_varlen(case):
        return False
    by_schema = ("scaled_dot_product_attention", "ulysses_output_projection")
    if case.op not in strange.RAW and case.op not in by_schema:
        return True
    if case.kind in ("none", "list", "uninitialised"):  # the schema, __torch_function__
        return False
    # Ops for the compiler alone have no kernel for autograd.
    without_autograd = case.op in ("_all_reduce", "_one_shot_all_reduce", "_reduce_scatter")
    # A tensor that has left torch.func.vmap is refused by torch where an op has no rule for that.
    return case.kind != "leaked_batch" and not (
        without_autograd and case.kind in ("refusing", "named")
    )


def _is_refused_by_varlen(case: Given) -> bool:
    """torch's `varlen_attn` looks at the shapes of queries and keys before it calls its op."""
    kinds = ("nested", "jagged", "no_dims", "overflowing", "uninitialised", "list", "none")
    return case.op == "varlen_attn" and case.kind in kinds


#: Kinds that torch's collectives pass on to the backend, which has kernels for those without dense
#: memory (csrc/backend/without_memory.cpp). Torch refuses lists of several dtypes. For any backend
#: it copies a tensor with a conjugate or negative bit, and writes the result to the copy.
BY_THE_BACKEND = (
    "deleted", "shrunk", "lazy_clone", "inference", "expanded", "overlapping", "spread",
    "nested", "sparse", "sparse_hybrid", "csr", "csc", "bsr", "mkldnn",
)  # fmt: skip


BITS = ("conj", "negative")


def fault(case: Given, outcomes: list[Outcome]) -> str:
    """Describes the fault in all ranks' outcomes of a call; empty if there is none."""
    first = outcomes[0]
    if any(outcome.after for outcome in outcomes):
        return "the next call does not work"
    if any(outcome.what == "wrong" for outcome in outcomes):
        return "a wrong result"
    right = {outcome.what == "right" for outcome in outcomes}
    if len(right) > 1 and not (case.alone and first.what != "right"):
        return "refused on some ranks only"
    if max(outcome.seconds for outcome in outcomes) > AT_ONCE:
        return "not at once"
    if first.what == "right":
        kinds = strange_kinds.WITHOUT_DENSE_MEMORY + strange_kinds.WITHOUT_STORAGE
        return "was not refused" if case.kind in kinds else ""
    if case.op in (*strange.COLLECTIVES, "_all_reduce", "_one_shot_all_reduce", "_reduce_scatter"):
        return ""
    # Torch refuses them before or after the op, as it does functorch's leaked wrappers.
    by_torch = "no rule for aten" in first.text or "INTERNAL ASSERT" in first.text
    by_torch = by_torch or "Tensor subclass Careless" in first.text
    # This function adds its bias after the op.
    by_torch = by_torch or case.op == "ulysses_output_projection" or _is_refused_by_varlen(case)
    if not by_torch and not any(name in first.text for name in ("symm_mem", *OPS)):
        return "the error does not name the op"
    named = re.search(r": \w+(\[\d\])? (of shape .* bytes of storage|is |has )", first.text)
    if case.kind in strange_kinds.WITHOUT_STORAGE and case.op in strange.RAW and named is None:
        return "the error does not name the argument"
    return ""


def _faults(ranks: Ranks, ops: list[str], kinds: list[str], several: int) -> list[str]:
    faults = []
    for op in ops:
        of_ranks = ranks.run(WORLD_SIZE, attempts, op, kinds, several, timeout=300)
        for cases in zip(*of_ranks, strict=False):
            case, outcomes = cases[0][0], [outcome for _, outcome in cases]
            if wrong := fault(case, outcomes):
                faults.append(f"{wrong}: {case}: {outcomes}")
    return faults


#: For plain runs: kinds that crashed ranks or left them out of step, and some valid kinds.
FEW_KINDS = [
    "nested", "sparse", "csr", "mkldnn", "quantised", "deleted", "shrunk", "named", "refusing",
    "unwrapping", "fake", "conj", "negative", "expanded", "enormous", "view_of_leaf",
]  # fmt: skip


@pytest.mark.exhaustive
def test_each_kind_is_refused_or_right(ranks: Ranks) -> None:
    assert not (faults := _faults(ranks, OPS, FEW_KINDS, 1)), "\n".join(faults[:20])


@exhaustive
@pytest.mark.parametrize("op", OPS)
def test_each_kind_in_each_place(ranks: Ranks, op: str) -> None:
    assert not (faults := _faults(ranks, [op], KINDS, 9)), "\n".join(faults[:20])


def test_collectives(ranks: Ranks) -> None:
    ops = list(strange.COLLECTIVES)
    kinds = [kind for kind in FEW_KINDS if kind not in BITS]
    assert not (faults := _faults(ranks, ops, kinds, 1)), "\n".join(faults[:20])


@exhaustive
@pytest.mark.parametrize("op", list(strange.COLLECTIVES))
def test_collectives_in_each_place(ranks: Ranks, op: str) -> None:
    kinds = [kind for kind in KINDS if kind not in BITS]
    assert not (faults := _faults(ranks, [op], kinds, 9)), "\n".join(faults[:20])
