"""Torch's ops on streams of the simulated device: the host issues them, and is ahead of them.

A result has its shape and its memory at once, and garbage in it until the stream gets there. Shapes
come from torch's meta kernels, and for our own ops from a run on zeros.
"""

from __future__ import annotations

import random
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from symm_cp.cuda.plans import _consists_of_others
from symm_cp.ops.op import declared

if TYPE_CHECKING:
    from tests.cuda.simulated import SimulatedDevice

GARBAGE = 0xFF  # in every byte: NaN in all floating types

#: Ops that need the values of tensors on the host.
_SYNCHRONIZING = ("_local_scalar_dense", "item", "is_nonzero", "nonzero", "equal", "_to_cpu")
_ALLOCATING = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided",
               "new_result")  # fmt: skip

#: Ops whose results on meta tensors may have other strides than on CPU.
_LAID_OUT = ("pow",)


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

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, func.overloadpacket.__name__
        if (func.namespace, name) in _calls():
            with self:
                return func._op_dk(torch._C.DispatchKey.CPU, *args, **kwargs)
        if _consists_of_others(func):
            with self:
                return func.decompose(*args, **kwargs)
        if name in _SYNCHRONIZING:
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

    def _issue(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        device, kept, schema = self.device, self.kept, func._schema
        name, called = func.overloadpacket.__name__, str(func)
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
            on = "meta" if func.namespace == "aten" and name not in _LAID_OUT else "cpu"
            given, named = _without_values((args, kwargs), on)
            shapes = fresh(func(*given, **named))
        made = pytree.tree_map_only(torch.Tensor, self._new, shapes)
        if not written and not _tensors(made):
            return func(*args, **kwargs)
        used = args, kwargs, _tensors(made)
        if kept is None:
            used = pytree.tree_map_only(torch.Tensor, _borrowed, used)
        else:
            kept.append(used)

        def run() -> None:
            args, kwargs, targets = used
            found = fresh(func(*args, **kwargs))
            for target, value in zip(targets, _tensors(found), strict=True):
                assert target.stride() == value.stride(), func  # the meta kernel is right
                target.copy_(value)

        if not device.capturing():
            device.machine.load(called, anyway=random.random() < 1 / 8)
        machine_keeps = kept if device.graph is not None else None
        device.machine.call(device.current_stream(), run, kind=1, name=called, keep=machine_keeps)
        results = [values[each] if each else made.pop(0) for each in into]
        return results[0] if len(results) == 1 else tuple(results) if results else None

    def _new(self, shape: torch.Tensor) -> torch.Tensor:
        return self._garbage(torch.empty_strided(shape.shape, shape.stride(), dtype=shape.dtype))


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
