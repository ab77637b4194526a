"""Ranks compare inputs that must be equal on all ranks: batches, prompts, initial weights.

Each rank makes a *record* of a fixed size, whatever its tensors are, gathers all ranks' records,
and compares them. All ranks see the same records, so all ranks raise, or none.

- Integers and bools count exactly: a hash of values and places.
- Floating-point tensors may differ by rounding, as the outputs of an encoder that every rank runs
  by itself do: a few values of each are compared, with a tolerance.
- Names, shapes and dtypes count exactly.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from symm_cp import env, runtime
from symm_cp.cuda import has_streams
from symm_cp.cuda.cached import cached, capturing
from symm_cp.group.hosts import apart_of
from symm_cp.group.memory import GroupLike, reported, resolve
from symm_cp.modes import ordinary_tensors
from symm_cp.ops.direct import direct
from symm_cp.ops.error_reports import reports_to_peers
from symm_cp.ops.op import LEFT_TO_TORCH, NoGradient, Op, arguments, declare, untouched
from symm_cp.runtime.calls import GatherCall
from symm_cp.tensors.dtypes import as_bytes, dtype_name

#: The text in errors that says how to turn the comparison off.
OFF = "SYMM_CP_COMPARE_INPUTS=0 turns this check off"

# Words of a record for exact comparison, which further items share.
_SLOTS, _SLOTS_OF_WEIGHTS = 16, 1024
_FEW_BYTES, _28_BITS = 4096, 2**28 - 1  # of ids that are compared by a hash
_FLOATS, _VALUES = 4, 8  # floating-point tensors of a record, and values of each
# Relative to the largest value. Other data differ by about 1, results in bfloat16 by about 0.01.
TOLERANCE = 0.1
_MOST_HASHED = 1 << 22  # elements, a few milliseconds; larger tensors are sampled evenly
_MIX = (0x9E3779B97F4A7C15 - (1 << 64), 0x2545F4914F6CDD1D)

#: An input that must be equal: a name, and a tensor or anything that its `repr` identifies.
Item = tuple[str, Any]
Record = Sequence[int]


def enabled(*tensors: torch.Tensor) -> bool:
    """Whether ranks compare inputs now: not while code is traced or a graph is captured."""
    if not env.compare_inputs() or torch.compiler.is_compiling():
        return False
    for t in tensors:
        if isinstance(t, FakeTensor) or t.is_meta or capturing(t.device):
            return False
        if torch._C._functorch.is_functorch_wrapped_tensor(t):
            return False
    return True


def compare(
    group: GroupLike,
    op: str,
    items: Sequence[Item],
    *,
    subject: str,
    remedy: str,
    notes: Sequence[int] = (),
    exact: bool = False,
) -> list[list[int]]:
    """Raises `RuntimeError` on all ranks unless the items are equal on all ranks. Collective.

    `subject` says in the error what the items are ("the batches that ranks cut"). `notes` are
    numbers that the ranks exchange and that may differ: returns all ranks' notes. Returns
    an empty list at once on one rank, and where the comparison is turned off. `exact`: all bytes
    of all items count, and whether they require gradients: for weights.
    """
    tensors = [value for _, value in items if isinstance(value, torch.Tensor)]
    state = resolve(group)
    if state.world_size == 1 or not enabled(*tensors):
        return []
    slots = _SLOTS_OF_WEIGHTS if exact else _SLOTS
    floats = [] if exact else [t for t in tensors if t.is_floating_point() or t.is_complex()]
    floats = floats[:_FLOATS]
    with ordinary_tensors():
        device = tensors[0].device if tensors else torch.device("cpu")
        parts = [_hashes(items, slots, device, exact=exact)]
        for tensor in floats:
            parts.append(spread_values(tensor, _VALUES).to(device).view(torch.int64))
        missing = 0 if exact else (_FLOATS - len(floats)) * _VALUES
        parts.append(parts[0].new_tensor([*[0] * missing, *notes]))
        told = gather_records(group, f"{subject} by {op}", torch.cat(parts))
    records = [row[: len(row) - len(notes)] for row in told]
    columns = list(zip(*records, strict=True))
    differing = [k for k in range(slots) if columns[k].count(columns[k][0]) < len(records)]
    unequal = [item for k in differing if k for item in items[k - 1 :: slots - 1]]
    for number, tensor in enumerate([] if differing else floats):
        begin = slots + number * _VALUES
        first, *others = (as_floats(record[begin : begin + _VALUES]) for record in records)
        if any(far_apart(first, other) for other in others):
            unequal += [item for item in items if item[1] is tensor]
    names = [name if exact else _described(name, value) for name, value in unequal]
    if 0 in differing:
        names.insert(0, f"the set of tensors (here {_listed([name for name, _ in items])})")
    if names:
        sides = _sides([row[:slots] if differing else row for row in records])
        shown = f"{subject} differ between {sides} in {_listed(names)}"
        raise reported(RuntimeError(f"{op}: {shown}: {remedy} ({OFF})"))
    return [row[len(row) - len(notes) :] for row in told]


def _described(name: str, value: Any) -> str:
    is_tensor = isinstance(value, torch.Tensor)
    text = f"{dtype_name(value.dtype)}{list(value.shape)}" if is_tensor else str(value)
    return f"{name} (here {text if len(text) <= 60 else f'{text[:57]}...'})"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _sides(records: Sequence[Record]) -> str:
    """Names the ranks that have equal records, and the ranks that differ."""
    alike: dict[tuple[int, ...], list[int]] = {}
    for rank, record in enumerate(records):
        alike.setdefault(tuple(record), []).append(rank)
    each = [f"rank {r[0]}" if len(r) == 1 else f"ranks {r}" for r in alike.values()]
    return " and ".join(each)


def gather_records(group: GroupLike, op: str, record: torch.Tensor) -> list[list[int]]:
    """Returns the records of all ranks, in rank order. Collective.

    `record` is 1-D, of int64, of the same length on all ranks. Uses the channel of attention,
    where a peer reports a refused next call.
    """
    state = resolve(group)
    by_rank = record.new_empty(state.world_size, len(record))

    def consume(records: list[torch.Tensor], owner: int) -> None:
        by_rank[owner].copy_(records[0])

    name = f"comparison of inputs by {op}, {len(record)} words".encode()
    runtime.run(GatherCall(state, [record], consume, name))
    rows: list[list[int]] = by_rank.tolist()
    return rows


def _hashes(
    items: Sequence[Item], slots: int, device: torch.device, *, exact: bool
) -> torch.Tensor:
    """Returns the words of a record for which any difference counts."""
    fixed, places, hashes = [0] * slots, list[int](), list[torch.Tensor]()
    fixed[0] = text_hash([name for name, _ in items])
    for number, (name, value) in enumerate(items):
        slot, kind = 1 + number % (slots - 1), value  # the first word stands for all names
        if isinstance(value, torch.Tensor):
            kind = value.dtype, tuple(value.shape), exact and value.requires_grad
            if exact or not (value.is_floating_point() or value.is_complex()):
                places.append(slot)
                content = content_hash(value) if exact else hashed(value)
                hashes.append(content.to(device) * (2 * number + 1))
        fixed[slot] = text_hash((fixed[slot], name, kind))
    record = torch.tensor(fixed, device=device)
    if hashes:
        record.index_add_(0, torch.tensor(places, device=device), torch.stack(hashes))
    return record


def text_hash(value: Any) -> int:
    """Returns a number below 2 ** 56 that follows from `repr(value)` in every process."""
    return int.from_bytes(hashlib.blake2b(repr(value).encode(), digest_size=7).digest())


@cached(maxsize=16)
def _weights(device: torch.device, count: int) -> torch.Tensor:
    """Returns odd factors that mix bits: three neighbours form no arithmetic progression."""
    numbers = torch.arange(1, count + 1, device=device) * _MIX[0]
    return ((numbers ^ (numbers >> 29)) * _MIX[1]) | 1


def hashed(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a hash of integers or bools and their places, an int64 on the tensor's device."""
    flat = tensor.detach().reshape(-1)
    if len(flat) > _MOST_HASHED:
        flat = flat[:: math.ceil(len(flat) / _MOST_HASHED)]
    return (flat.to(torch.int64) * _weights(flat.device, len(flat))).sum()


def content_hash(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a hash of all bytes of a tensor, read once: an int64.

    Adds up all words, which ignores their order, and a hash of some words that depends on it.
    """
    flat = tensor.detach().contiguous().view(-1)
    if flat.numel() == 0:
        return torch.zeros((), dtype=torch.int64, device=flat.device)
    if flat.storage_offset() * flat.element_size() % 8:
        flat = flat.clone()
    flat = as_bytes(flat)
    whole = len(flat) // 8 * 8
    words = flat[:whole].view(torch.int64)
    ends = torch.cat([words[:: max(1, len(words) // 4096)], flat[whole:].to(torch.int64)])
    return words.sum() + hashed(ends)


def spread_values(tensor: torch.Tensor, count: int) -> torch.Tensor:
    """Returns `count` evenly spaced values of a tensor in float64, zeros for missing ones."""
    flat = tensor.detach()
    flat = torch.view_as_real(flat.resolve_conj()) if flat.is_complex() else flat
    if flat.numel() == 0:
        return torch.zeros(count, dtype=torch.float64, device=tensor.device)
    places = torch.linspace(0, flat.numel() - 1, count, dtype=torch.float64, device="cpu").long()
    index = torch.unravel_index(places.to(flat.device), flat.shape) if flat.dim() else ()
    values = flat[index].to(torch.float64) if index else flat.to(torch.float64).expand(count)
    return values.contiguous()


def as_floats(words: Record) -> list[float]:
    """Returns the float64 numbers whose bits are these words."""
    bits = torch.tensor(words, dtype=torch.int64, device="cpu")
    numbers: list[float] = bits.view(torch.float64).tolist()
    return numbers


def far_apart(one: Sequence[float], other: Sequence[float], tolerance: float = TOLERANCE) -> bool:
    """Whether values differ by more than rounding; infinities and NaN are not judged."""
    pairs = zip(one, other, strict=True)
    finite = [(a, b) for a, b in pairs if math.isfinite(a) and math.isfinite(b)]
    largest = max((max(abs(a), abs(b)) for a, b in finite), default=0.0)
    return any(abs(a - b) > tolerance * largest for a, b in finite)


# --- inputs of a module, eager and compiled ----------------------------------------------------

_SAME = "_same_on_all_ranks"


def _compare_input(
    input: torch.Tensor, op: str, name: str, remedy: str, group: str, *further: Item
) -> None:
    """Like `compare` for one tensor, in a quarter of its time if all ranks' are equal."""
    if not enabled(input) or _agree(group, input, further):
        return
    items = [(name, input), *further]
    compare(group, op, items, subject="the inputs of ranks", remedy=remedy)


def _agree(group: str, input: torch.Tensor, further: Sequence[Item]) -> bool:
    """Whether a few ids on CPU are surely equal on all ranks, by one all-reduce of a hash.

    If hashes differ, their sum is not `world_size` times any of them (except with probability
    2 ** -56), so all ranks get the same answer.
    """
    state = resolve(group)
    if state.world_size == 1:
        return True
    if input.device.type != "cpu" or has_streams(input.device):
        return False
    if apart_of(state, input.device) is not None:  # it is an op on peers' memory
        return False
    numbers = _numbers_of(input, further)
    # A rank without numbers joins, so that all ranks compare everything.
    own = torch.tensor(numbers or [0, 0], dtype=torch.int64, device="cpu")
    sums = direct("_one_shot_all_reduce")(own, "sum", group).tolist()
    return numbers is not None and sums == [number * state.world_size for number in numbers]


def _numbers_of(input: torch.Tensor, further: Sequence[Item]) -> list[int] | None:
    """Returns a hash of few ids and of further items, in two numbers; None for other inputs.

    They have 28 bits each: sums over the ranks do not overflow.
    """
    counts = not input.is_floating_point() and not input.is_complex()
    if type(input) is not torch.Tensor or not counts or input.nbytes > _FEW_BYTES:
        return None
    text = f"{input.dtype} {list(input.shape)} {list(further)}".encode()
    digest = hashlib.blake2b(text + input.numpy().tobytes(), digest_size=7).digest()
    return [int.from_bytes(digest[:4], "big") >> 4, int.from_bytes(digest[3:], "big") & _28_BITS]


def _same_kernel(
    input: torch.Tensor, op: str, name: str, remedy: str, group_name: str
) -> torch.Tensor:
    _compare_input(input, op, name, remedy, group_name)
    return input.clone()


def _same_fake(
    input: torch.Tensor, op: str, name: str, remedy: str, group_name: str
) -> torch.Tensor:
    return torch.empty_like(input)


_reporting: Callable[..., None] = reports_to_peers(_compare_input)


def same_on_all_ranks(
    input: torch.Tensor, op: str, name: str, remedy: str, group: str, *further: Item
) -> torch.Tensor:
    """Returns the input; raises `RuntimeError` unless it is equal on all ranks. Collective.

    Graphs of torch.compile compare integers and bools whenever they run; only eager code compares
    floating-point inputs and `further` items (by their `repr`).
    """
    if not env.compare_inputs():
        return input
    if torch.compiler.is_compiling():
        if input.is_floating_point() or input.is_complex():
            return input
        same: torch.Tensor = torch.ops.symm_mem._same_on_all_ranks(input, op, name, remedy, group)
        return same
    _reporting(input, op, name, remedy, group, *further)
    return input


declare(
    Op(
        name=_SAME,
        types=lambda t, input, **_: t.local("{}", "...->...", input),
        schema="(Tensor input, str op, str name, str remedy, str group_name) -> Tensor",
        kernel=_same_kernel,
        fake=_same_fake,
        gradient=NoGradient("graphs compare integers and bools"),
        autocast=untouched,
        vmap=LEFT_TO_TORCH,
        example=lambda on: arguments(torch.ones(4, 6), "op", "input", "", on.group_name),
        mixes_devices=True,
        internal=True,
    )
)
