"""Finds tensors that the kernels for CPU tensors cannot read, and makes the errors for them.

A kernel reads the bytes of a dense tensor. Other kinds have dispatch keys of their own
(unsupported.py); tensors that reach a kernel all the same, and would make it read missing memory,
are refused here. Native kernels raise the same errors (csrc/ops/kernels.cpp).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch._C import FunctionSchema
from torch._subclasses.fake_tensor import FakeTensor

P = ParamSpec("P")
R = TypeVar("R")

_MODES = torch._C._TorchDispatchModeKey
_TRACING = (_MODES.FAKE, _MODES.PROXY, _MODES.FUNCTIONAL)


class _Argument(NamedTuple):
    position: int
    name: str
    is_list: bool
    required: bool


class TensorArguments:
    """The tensors among the arguments of an op, by the names that its schema gives them."""

    def __init__(self, schema: FunctionSchema) -> None:
        self.group_name = next(
            (i for i, each in enumerate(schema.arguments) if each.name == "group_name"), None
        )
        self.places: list[_Argument] = []
        for index, argument in enumerate(schema.arguments):
            kind = str(argument.type)
            if "Tensor" in kind:
                required = "Optional" not in kind
                is_list = kind.startswith("List")
                self.places.append(_Argument(index, argument.name, is_list, required))

    def named(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the tensors and their names, "A" or "Bs[0]"; a required one may be None."""
        for index, name, is_list, required in self.places:
            given = args[index] if index < len(args) else kwargs.get(name)
            if not is_list:
                if given is not None or (required and index < len(args)):
                    yield name, given
                continue
            for place, each in enumerate(given or ()):
                if each is not None or required:
                    yield f"{name}[{place}]", each


def unsupported(tensor: torch.Tensor) -> str:
    """Returns the kind of a tensor without dense memory, and what to use instead; '' for others."""
    if tensor.is_nested:
        return f"nested ({tensor.layout}), must be dense: use its to_padded_tensor(), or a part"
    if tensor.layout is not torch.strided:
        return f"{tensor.layout}, must be dense: use its to_dense()"
    if tensor.is_quantized:
        return f"quantised ({tensor.dtype}), which is not supported: use its dequantize()"
    names = getattr(tensor, "names", ())  # until torch 2.12
    if any(name is not None for name in names):
        return f"named {names}, which is not supported: use its rename(None)"
    return ""


def missing_memory(tensor: torch.Tensor) -> str:
    """Returns how a tensor's storage is too small for it, or ''."""
    shape = tensor.shape
    if 0 in shape:
        return ""
    try:
        size = tensor.untyped_storage().nbytes()
    except (RuntimeError, NotImplementedError):
        return "has no storage: it may have left torch.func.vmap, or wrap another tensor"
    last = tensor.storage_offset()
    for length, stride in zip(shape, tensor.stride(), strict=True):
        last += (length - 1) * stride
    needed = (last + 1) * tensor.element_size()
    if size >= needed:
        return ""
    return (
        f"of shape {list(shape)} needs {needed} bytes of storage, which has {size}: it was freed "
        "or resized"
    )


_KEYS = torch._C.DispatchKey
_DispatchKeys = torch._C.DispatchKeySet
#: Keys of tensors whose values are not in their own memory, or not as stored.
_ELSEWHERE = functools.reduce(
    _DispatchKeys.__or__,
    map(_DispatchKeys, (_KEYS.Python, _KEYS.Negative, _KEYS.ZeroTensor, _KEYS.Functionalize)),
)


def with_memory(op: str, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor with its values in memory, for code that torch's dispatcher does not call.

    Copies negated views, zeros without memory, wrappers and results of functional collectives,
    as the dispatcher makes ops do; a `FakeTensor` stays one. Raises where there are no values.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{op}: {name} is a {type(tensor).__name__}, must be a tensor")
    if isinstance(tensor, FakeTensor):
        return tensor
    if reason := unsupported(tensor):
        raise NotImplementedError(f"{op}: {name} is {reason}")
    if not _is_ordinary(tensor):
        kind, tensor = type(tensor).__name__, tensor.clone()
        if not _is_ordinary(tensor):
            raise TypeError(
                f"{op}: {name} is a {kind} without memory of its own, which is not supported: pass "
                "the tensor that it stands for"
            )
    if missing := missing_memory(tensor):
        raise ValueError(f"{op}: {name} {missing}")
    return tensor


def _is_ordinary(tensor: torch.Tensor) -> bool:
    return (torch._C._dispatch_keys(tensor) & _ELSEWHERE).raw_repr() == 0


def checking_memory(op: str, arguments: TensorArguments, kernel: Callable[P, R]) -> Callable[P, R]:
    """Returns an op's kernel that first refuses tensors with missing memory."""

    def check(args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        for name, tensor in arguments.named(args, kwargs):
            if tensor is None:
                raise TypeError(f"{op}: {name} is None, must be a tensor")
            if missing := missing_memory(tensor):
                raise ValueError(f"{op}: {name} {missing}")

    @functools.wraps(kernel)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        # Contiguous tensors are checked inline: a function call for each takes as long.
        try:
            for index, name, is_list, _ in arguments.places:
                given: Any = args[index] if index < len(args) else kwargs.get(name)
                for x in given if is_list else (given,):
                    end = (x.storage_offset() + x.numel()) * x.element_size()
                    if not x.is_contiguous() or x.untyped_storage().nbytes() < end:
                        raise ValueError
        except (AttributeError, NotImplementedError, RuntimeError, TypeError, ValueError):
            check(args, kwargs)
        return kernel(*args, **kwargs)

    return checked


def concerns_peers(given: Sequence[Any]) -> bool:
    """Whether peers may take part in a call with these arguments, over shared memory.

    False for calls that only infer shapes or are recorded, and for other devices.
    """
    if any(torch._C._get_dispatch_mode(mode) is not None for mode in _TRACING):
        return False
    tensors = [each for each in given if isinstance(each, torch.Tensor)]
    if any(each.device.type not in ("cpu", "meta") for each in tensors):
        return False
    stand_ins = [isinstance(each, FakeTensor) or each.device.type == "meta" for each in tensors]
    return not stand_ins or not all(stand_ins)
