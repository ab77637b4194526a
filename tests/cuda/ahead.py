"""Torch's ops on streams of the simulated device: the host issues them, and is ahead of them.

A result has its shape and its memory at once, and garbage in it until the stream gets there. Shapes
come from torch's meta kernels, and for our own ops from a run on zeros.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _python_dispatch as dispatch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from symm_cp.cuda.plans import _READERS, _consists_of_others
from symm_cp.ops.op import declared

if TYPE_CHECKING:
    from tests.cuda.simulated import SimulatedDevice

_chance = random.Random()  # ranks' ops differ in number, and tests draw the same on all ranks
GARBAGE = 0xFF  # in every byte: NaN in all floating types

#: Tags of ops that need the values of tensors on the host.
_SYNCHRONIZING = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_ALLOCATING = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided",
               "new_result")  # fmt: skip


@cache
def _calls() -> set[tuple[str, str]]:
    """Our ops whose kernels call ops; others compute something themselves."""
    return {(op.namespace, op.name) for op in declared()}


def _without_values(tree: Any, device: str) -> Any:
    """An op's arguments, without values on device "meta", or zeros on another."""

    def zeros(leaf: Any) -> Any:
        if isinstance(leaf, torch.device):
            return torch.device(device)
        if isinstance(leaf, torch.Tensor):
            stride, dtype = leaf.stride(), leaf.dtype
            return torch.empty_strided(leaf.shape, stride, dtype=dtype, device=device).zero_()
        return leaf

    return pytree.tree_map(zeros, tree)


def _borrowed(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, which may be freed while this tensor lives."""
    storage = tensor.untyped_storage()
    if storage.nbytes() == 0:
        return tensor
    memory = torch._C._construct_storage_from_data_pointer(
        storage.data_ptr(), tensor.device, storage.nbytes()
    )
    made = torch.empty(0, dtype=tensor.dtype)
    return made.set_(memory, tensor.storage_offset(), tensor.shape, tensor.stride())


class Ahead(TorchDispatchMode):
    """Inside, ops go to the current stream of the thread.

    kept: a list that takes all memory that streams will use; None: memory belongs to the stream
        that allocated it, as on a GPU (what the host frees is poisoned when that stream gets there)
    """

    def __init__(self, device: SimulatedDevice, kept: list[Any] | None) -> None:
        super().__init__()
        self.device, self.kept = device, kept

    @staticmethod
    def active() -> Ahead | None:
        """Returns the one that this thread is inside, if any."""
        modes = dispatch._get_current_dispatch_mode_stack()
        return next((mode for mode in modes if isinstance(mode, Ahead)), None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, func.overloadpacket.__name__
        if func.namespace == "fsdp" or (func.namespace, name) in _calls():
            with self:
                return func._op_dk(torch._C.DispatchKey.CPU, *args, **kwargs)
        if _consists_of_others(func):
            with self:
                return func.decompose(*args, **kwargs)
        reads = func in _READERS and self.device.graph is None
        if reads or name == "is_nonzero" or not _SYNCHRONIZING.isdisjoint(func.tags):
            self.synchronize(str(func))
            return func(*args, **kwargs)
        if name in _ALLOCATING:
            return self._garbage(func(*args, **kwargs))
        views = func.is_view or func.namespace == "_c10d_functional"
        if views or any(tensor.is_meta for tensor in _tensors((args, kwargs))):
            return func(*args, **kwargs)
        return self._issue(func, args, kwargs)

    def synchronize(self, why: str) -> None:
        """Waits for the values that the host needs."""
        self.device.library.simulated_drain(self.device.current_stream())
        self.device.machine.raise_errors()

    def _garbage(self, made: torch.Tensor) -> torch.Tensor:
        """A new tensor; streams may still use its memory unless that is kept."""
        if self.kept is not None and not made.is_meta:
            self.kept.append(made)
            torch.empty(0, dtype=torch.uint8).set_(made.untyped_storage()).fill_(GARBAGE)
        return made

    def issue(self, name: str, run: Callable[..., None], *used: Any, kind: int = 1) -> None:
        """Has the current stream call a function with tensors; `kind` as for `Machine.call`."""
        device, kept = self.device, self.kept
        if kept is None:
            used = pytree.tree_map_only(torch.Tensor, _borrowed, used)
        else:
            kept.append(used)
        if not device.capturing():
            device.machine.load(name, anyway=_chance.random() < 1 / 8)
        machine_keeps = kept if device.graph is not None else None
        stream = device.current_stream()
        device.machine.call(stream, partial(run, *used), kind=kind, name=name, keep=machine_keeps)

    def _issue(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        schema = func._schema
        values = {**{a.name: v for a, v in zip(schema.arguments, args, strict=False)}, **kwargs}
        written = [(a.alias_info.before_set, a.name) for a in schema.arguments if a.alias_info]
        # By result: the name of the argument that it is, or "".
        sets = [r.alias_info.before_set if r.alias_info else None for r in schema.returns]
        into = [
            next((argument for names, argument in written if names == each), "") for each in sets
        ]

        def fresh(results: Any) -> list[Any]:
            each = (results,) if len(into) == 1 else results or ()
            return [value for value, given in zip(each, into, strict=True) if not given]

        shapes = []
        if not all(into):
            on = "meta" if func.namespace == "aten" else "cpu"
            given, named = _without_values((args, kwargs), on)
            shapes = fresh(func(*given, **named))
        made = pytree.tree_map_only(torch.Tensor, self._new, shapes)
        if not written and not _tensors(made):
            return func(*args, **kwargs)

        def run(args: Any, kwargs: Any, targets: list[torch.Tensor]) -> None:
            found = fresh(func(*args, **kwargs))
            for target, value in zip(targets, _tensors(found), strict=True):
                target.copy_(value)  # some meta kernels give other strides than CPU's

        self.issue(str(func), run, args, kwargs, _tensors(made))
        results = [values[each] if each else made.pop(0) for each in into]
        return results[0] if len(results) == 1 else tuple(results) if results else None

    def _new(self, shape: torch.Tensor) -> torch.Tensor:
        return self._garbage(torch.empty_strided(shape.shape, shape.stride(), dtype=shape.dtype))


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
