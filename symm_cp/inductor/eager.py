"""Notes collectives that `symm_cp` could fuse, in processes of `symm-cp explain --eager`.

A `TorchDispatchMode` sees the ops that the program calls, in both passes. It records for each
tensor the collective or product it comes from, as long as ops only move or cast the elements.
"""

from __future__ import annotations

import atexit
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from symm_cp.inductor import notes
from symm_cp.inductor.decisions import Decision
from symm_cp.inductor.neighbours import ATTENTION, GROUPED, MATMULS, MOVES
from symm_cp.inductor.nodes import LIBRARIES

#: For each collective: the op that fuses it, by the kinds of calls before and after ("": any).
#: The first matching row counts; the op of the same shape computes the gradients.
_FUSED = {
    "all_gather": {
        ("", "matmul"): "all_gather_matmul",
        ("", "attention"): "all_gather_attention",
    },
    "reduce_scatter": {
        ("matmul", ""): "matmul_reduce_scatter",
        ("attention", ""): "all_gather_attention",
    },
    "all_reduce": {("matmul", ""): "matmul_all_reduce"},
    "all_to_all": {
        ("", "grouped matmul"): "moe.dispatch_matmul",
        ("grouped matmul", ""): "moe.matmul_combine",
        ("matmul", "attention"): "ulysses_projection",
        ("attention", "matmul"): "ulysses_output_projection",
        ("", "attention"): "sequence_to_heads",
        ("attention", ""): "heads_to_sequence",
    },
    "broadcast": {}, "gather": {}, "scatter": {}, "reduce": {},
}  # fmt: skip
_ADVICE = (
    "call the op that is named, or compile the program: the passes of symm_cp.inductor fuse these"
)
_NONE = torch._C._disabled_torch_dispatch_impl  # what types without dispatch of their own have
_FSDP = "fsdp.use"
_GATHER_MATMUL = "all_gather_matmul"
_NORMS = {"native_layer_norm", "_fused_rms_norm"}
_REDUCTIONS = {"mean", "sum", "var", "var_mean", "amax"}
_FSDP_ADVICE = "call symm_cp.fsdp.use(model) after fully_shard"


@dataclass(eq=False)
class NotedCall:
    """A call whose results are followed: a collective, a matmul or an attention."""

    kind: str
    name: str
    group: str = ""
    nbytes: int = 0
    ranks: int = 1
    where: str = ""  # file and line of the program
    by_fsdp: bool = False  # `fsdp.use` replaces it
    columns: int = 0  # the length of the last dimension of a matrix that is gathered
    #: Names of ops whose results it takes, and of ops that take its results, by kind.
    before: dict[str, str] = field(default_factory=dict)
    after: dict[str, str] = field(default_factory=dict)
    #: Names of ops that work on each row by itself, between a gather and a matmul.
    through: str = ""

    def replacement(self) -> tuple[str, str]:
        """Returns the op of `symm_cp` that could run here (empty if there is none), and why."""
        if self.by_fsdp:
            return _FSDP, f"FSDP2 calls it: symm_cp.{_FSDP} could run it in the background"
        for (before, after), op in _FUSED[self.kind].items():
            names = [self.before.get(before, ""), self.after.get(after, "")]
            if all(names) or (any(names) and not (before and after)):
                others = " and ".join(filter(None, names))
                return op, f"it is next to {others}: symm_cp.{op} could run here"
        if self.through:
            return _GATHER_MATMUL, (
                f"it feeds a matmul through {self.through}, which works on each row by itself: "
                f"apply it to the shard, before the collective, then symm_cp.{_GATHER_MATMUL} "
                "could run here, with the same result"
            )
        return "", "no fused op exists for what is next to it"


#: The origin of tensors that depend on several rows of a gathered one.
_SEVERAL_ROWS = NotedCall("", "")


class Watch(TorchDispatchMode):
    """Notes the collectives that are called while it is active, and the calls next to them."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.rank = 0
        self._collectives: list[NotedCall] = []
        # Keyed by the storage's address, which no other storage gets while a weak reference exists.
        # The last item names the ops that have worked on each row since.
        self._origins: dict[int, tuple[StorageWeakRef, NotedCall, str]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Iterable[Any], args: Any = (), kwargs: Any = None
    ) -> Any:
        """Calls the op; subclasses, such as DTensor, first call ops on their plain tensors."""
        fake = any(issubclass(each, FakeTensor) for each in types)
        # Ops that save tensors for backward give the type of plain ones, too.
        if not fake and any(each.__torch_dispatch__ is not _NONE for each in types):
            return NotImplemented
        results = func(*args, **(kwargs or {}))
        name = getattr(getattr(func, "overloadpacket", func), "__name__", str(func))
        if not fake and name not in ("wait_tensor", "wait_tensors"):
            self._note(func, name, _named(func, args, kwargs or {}), results)
        return results

    def described(self) -> Iterator[dict[str, Any]]:
        """Yields the collectives as `explain` lists them: equal collectives once, with a count."""
        counted = Counter(
            (call.kind, call.group, call.nbytes, call.ranks, call.where, *call.replacement())
            for call in self._collectives
        )
        for (kind, group, nbytes, ranks, where, op, reason), calls in counted.items():
            advice = {"": "", _FSDP: _FSDP_ADVICE}.get(op, _ADVICE)
            decision = Decision(kind, group, None, reason, bool(op), advice=advice, where=where)
            described = notes.described(decision, nbytes, ranks, calls)
            yield {**described, "could_be": op or None}

    def _note(self, func: Any, name: str, given: dict[str, Any], results: Any) -> None:
        inputs = _tensors(given)
        call = self._collective(func, name, given) or _computation(name)
        through = ""
        if call is None:
            origins = {self._origin(t) for t in inputs if t.is_floating_point()}  # no indices
            moved = name in MOVES and len(origins) == 1
            products = origins and all(each and each.kind == "matmul" for each in origins)
            if by_rows := not moved and self._works_on_rows(func, name, given, inputs):
                origins.discard(None)
            if moved or by_rows or (name in ("add", "add_") and products):
                call = origins.pop()
            elif any(each and (each.columns or each is _SEVERAL_ROWS) for each in origins):
                call = _SEVERAL_ROWS
            passed = {self._through(t) for t in inputs} - {""} | ({name} if by_rows else set())
            through = ", ".join(sorted(passed))
        elif call.group:
            self._feed(call, _tensors(given, "input", "tensors"))
        elif call.kind == "attention":
            self._feed(call, inputs)
        else:  # a weight, the right operand, is gathered for other reasons
            self._feed(call, inputs[(left := int("add" in name)) : left + 1])
        written = inputs if getattr(getattr(func, "_schema", None), "is_mutable", False) else []
        outputs = _tensors(given, "output", "tensors") if call and call.group else written
        for tensor in (*outputs, *_tensors({"": results})):
            storage = tensor.untyped_storage()
            if call is None:
                self._origins.pop(storage._cdata, None)
            else:
                self._origins[storage._cdata] = StorageWeakRef(storage), call, through

    def _collective(self, func: Any, name: str, given: dict[str, Any]) -> NotedCall | None:
        plain = name.replace("_", "")
        kind = next((kind for kind in _FUSED if kind.replace("_", "") in plain), None)
        if kind is None or getattr(func, "namespace", "") not in ("c10d", "_c10d_functional"):
            return None
        if "process_group" in given:
            group = dist.ProcessGroup.unbox(given["process_group"])
        else:
            group = _resolve_process_group(given["group_name"])
        self.rank = dist.get_rank()
        # Only the root has tensors to scatter; the output's size is the same on all ranks.
        own = _tensors(given, "output" if kind == "scatter" else "input", "tensors")
        nbytes = sum(t.numel() * t.element_size() for t in own)
        where, by_fsdp = _caller()
        by_fsdp &= kind in ("all_gather", "reduce_scatter")
        columns = own[0].shape[-1] if kind == "all_gather" and own and own[0].dim() > 1 else 0
        call = NotedCall(
            kind, name, group.group_name, nbytes, group.size(), where, by_fsdp, columns
        )
        self._collectives.append(call)
        self._origins = {
            address: origin for address, origin in self._origins.items() if not origin[0].expired()
        }
        return call

    def _origin(self, tensor: torch.Tensor) -> NotedCall | None:
        found = self._origins.get(tensor.untyped_storage()._cdata)
        return None if found is None else found[1]

    def _through(self, tensor: torch.Tensor) -> str:
        found = self._origins.get(tensor.untyped_storage()._cdata)
        return "" if found is None else found[2]

    def _works_on_rows(
        self, func: Any, name: str, given: dict[str, Any], inputs: list[torch.Tensor]
    ) -> bool:
        """Whether an op works on each row of one gathered matrix by itself, as norms do."""
        gathered = [t for t in inputs if self._origin(t) is not None]
        others = [t for t in inputs if self._origin(t) is None]
        origins = {self._origin(t) for t in gathered}
        if len(origins) != 1 or any(t.dim() > 1 for t in others):
            return False
        (call,) = origins
        if (
            not call
            or not call.columns
            or any(t.shape[-1] not in (1, call.columns) for t in inputs)
        ):
            return False
        if name in _REDUCTIONS:
            dims = given.get("dim")
            last = dims in (-1, [-1], [gathered[0].dim() - 1])
            return last and bool(given.get("keepdim"))
        return name in _NORMS or torch.Tag.pointwise in getattr(func, "tags", ())

    def _feed(self, call: NotedCall, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            origin, through = self._origin(tensor), self._through(tensor)
            if origin is None or origin is _SEVERAL_ROWS:
                continue
            if not through:
                call.before.setdefault(origin.kind, origin.name)
                origin.after.setdefault(call.kind, call.name)
            elif call.kind == "matmul":
                origin.through = through


def _named(func: Any, args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments by name; by number for higher-order ops, which have no schema."""
    schema = getattr(func, "_schema", None)
    names = [each.name for each in schema.arguments] if schema else map(str, range(len(args)))
    return dict(zip(names, args, strict=False)) | kwargs


def _tensors(given: dict[str, Any], *beginnings: str) -> list[torch.Tensor]:
    """Returns the dense tensors of the arguments whose names begin so (default: of all)."""
    chosen = [value for name, value in given.items() if name.startswith(beginnings or "")]
    leaves = (each for each in tree_leaves(chosen) if isinstance(each, torch.Tensor))
    return [each for each in leaves if each.layout is torch.strided]


def _caller() -> tuple[str, bool]:
    """Returns file and line of the program that runs now, and whether FSDP2 is below it."""
    frame: FrameType | None = sys._getframe()
    where, by_fsdp = "", False
    while frame is not None:
        path = frame.f_code.co_filename
        if not where and not path.startswith((*LIBRARIES, "<")):
            where = f"{path}:{frame.f_lineno}"
        module = str(frame.f_globals.get("__name__"))
        by_fsdp = by_fsdp or module.startswith("torch.distributed.fsdp._fully_shard")
        frame = frame.f_back
    return where, by_fsdp


def _computation(name: str) -> NotedCall | None:
    if name in MATMULS:
        return NotedCall("grouped matmul" if name in GROUPED else "matmul", name)
    return NotedCall("attention", name) if any(part in name for part in ATTENTION) else None


def begin(folder: str) -> None:
    """Notes what this thread and its backward passes call, until the process ends."""
    watch = Watch()
    watch.__enter__()

    def note() -> None:
        if found := list(watch.described()):
            notes.write(folder, watch.rank, eager=True, collectives=found)
        notes.write_at_exit(folder, watch.rank)

    atexit.register(note)
