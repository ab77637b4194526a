"""How an op is declared: once, with all of its parts. Every registry iterates over `declared()`.

A file of ops passes an `Op` for each op to `declare`. The registrations with torch
(registration.py) and the tests' lists of ops follow from the declarations.
tests/ops/test_declarations.py names a missing part and its op.

A *prepared call*, which some ops have, is all that is known of a call before it is made: a function
of shapes, dtypes, layout, mask, group size and rank, without tensors and groups. Shapes of results,
fake kernel and run follow from it.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch

from symm_cp.ops.types import Rule, described

F = TypeVar("F", bound=Callable[..., Any])
Kernel: TypeAlias = Callable[..., Any]
#: Takes the arguments of an op and the device; returns the arguments to use under autocast.
Prepare: TypeAlias = Callable[[tuple[Any, ...], str], tuple[Any, ...]]

_NOT_FREE, _FREE_NUMBER = -1, 100  # as in csrc/plan/key.h
#: The schema of an op that torch defines.
TORCHS = "torch's"


class Gradient(NamedTuple):
    """The backward pass, as for `torch.library.register_autograd`.

    Second derivatives exist if it is built of differentiable ops.
    """

    backward: Kernel
    setup_context: Kernel | None = None


class NoGradient(NamedTuple):
    """The backward pass raises `NotImplementedError`, which says what to do instead."""

    instead: str


class GradientByHand(NamedTuple):
    """A kernel for torch's key "Autograd"."""

    kernel: Kernel
    with_keyset: bool = False


class BackwardOp(NamedTuple):
    """The gradient is an op of this name, which native code calls (csrc/ops/backward_ops.cpp).

    `once`: it cannot be differentiated.
    """

    name: str
    once: bool = False


class Composite(enum.Enum):
    """The kernel calls ops that are differentiable: autograd and graphs see those."""

    COMPOSITE = enum.auto()


(COMPOSITE,) = Composite


class Elsewhere(NamedTuple):
    """No gradient is registered from Python: `reason` says where it is, or why there is none."""

    reason: str
    differentiable: bool


NATIVE_GRADIENT = Elsewhere("csrc/ops/gradients.cpp", differentiable=True)


class Vmap(enum.Enum):
    """How `torch.func.vmap` handles an op."""

    ONE_BY_ONE = enum.auto()  # a call for each element of the batch
    LEFT_TO_TORCH = enum.auto()


ONE_BY_ONE, LEFT_TO_TORCH = Vmap


def untouched(args: tuple[Any, ...], device: str) -> tuple[Any, ...]:
    """Says that autocast leaves an op alone; nothing is registered."""
    raise AssertionError("is not registered")


class Caller(NamedTuple):
    """The ingredients of an example call: this rank in its group, and a maker of random tensors.

    `sizes` holds each rank's number of rows, for ops that take uneven parts.
    """

    group_name: str
    rank: int
    world_size: int
    sizes: list[int]
    rand: Callable[..., torch.Tensor] = torch.randn

    @property
    def rows(self) -> int:
        """Returns the rows of this rank."""
        return self.sizes[self.rank]

    @property
    def uneven(self) -> tuple[list[int], int]:
        """Returns the last arguments of an op that takes uneven parts."""
        return self.sizes, self.rank

    def ones(self, *shape: int) -> torch.Tensor:
        """Returns a tensor that is equal on all ranks, of the dtype of `rand`."""
        return torch.ones_like(self.rand(*shape))

    def float8(self, *shape: int) -> torch.Tensor:
        """Returns a random float8 tensor."""
        return self.rand(*shape).to(torch.float8_e4m3fn)


class Arguments(NamedTuple):
    """The arguments of an example call."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def arguments(*args: Any, **kwargs: Any) -> Arguments:
    """Returns the arguments of an example call."""
    return Arguments(args, kwargs)


@dataclass(frozen=True, kw_only=True)
class Op:
    """An op. Parts that are None are missing, unless they are optional."""

    name: str
    #: "symm_mem", which torch defines, or the namespace of a user's op.
    namespace: str = "symm_mem"
    #: Arguments and results, "(Tensor x, str group_name) -> Tensor".
    schema: str | None = None
    #: Runs on all devices, or only for CPU tensors that the native kernel cannot process.
    kernel: Kernel | None = None
    #: Checks the arguments; returns results of the right shapes, strides and dtypes.
    fake: Kernel | None = None
    gradient: Gradient | NoGradient | GradientByHand | BackwardOp | Composite | Elsewhere | None = (
        None
    )
    autocast: Prepare | None = None
    vmap: Vmap | None = None
    #: What it does to the mesh axis of its group. Not needed if it calls ops that have types.
    types: Rule | None = None
    #: A small call, with equal shapes on all ranks unless the op takes unequal ones.
    example: Callable[[Caller], Arguments] | None = None

    #: Optional: arguments that differ from call to call, for which plans on CPU pass on the
    #: caller's: tensors or lists of tensors, with the dimension whose size varies, and numbers,
    #: with None. A kernel may pass them to ops, and these ops' results as they are to others. It
    #: may not depend on strides or values, nor on varying sizes, except whether they are equal, 0
    #: or 1.
    free: Mapping[str, int | None] = field(default_factory=dict, hash=False)
    #: Optional: the pure function from which results and run follow.
    prepare: Kernel | None = None
    #: Optional: waits for the results of an op that returns before they are complete.
    complete: Callable[[torch.Tensor], torch.Tensor] | None = None
    #: Required where the op returns an argument that it writes to: the same op as calls that return
    #: new tensors. torch itself converts ops that write and return nothing.
    functional: Kernel | None = None

    #: The kernel for CPU tensors is native, and calls `kernel` where it cannot run a call.
    native: bool = False
    cpu_only: bool = False
    #: No other rank takes part; the schema names no group.
    one_sided: bool = False
    #: torch has a kernel for some devices: `override_cuda_ops` replaces it.
    replaces_torch: bool = False
    #: torch's fake kernel, for devices where torch's kernel runs, if it takes more than ours.
    torchs_fake: str = ""
    #: The fake kernel takes tensors on several devices.
    mixes_devices: bool = False
    #: Called by other ops, gradients and graphs only, so not in README's table.
    internal: bool = False

    def with_sizes(
        self, name: str, schema: str, example: Callable[[Caller], Arguments], **changed: Any
    ) -> Op:
        """Returns our counterpart of torch's op, which takes sizes of uneven parts and the rank."""
        return replace(
            self,
            name=name,
            schema=schema,
            example=example,
            replaces_torch=False,
            torchs_fake="",
            internal=True,
            **changed,
        )

    @classmethod
    def backward(
        cls, name: str, schema: str, kernel: Kernel, example: Callable[[Caller], Arguments]
    ) -> Op:
        """Returns an op that computes gradients by calling ops that are differentiable."""
        return cls(
            name=name, schema=schema, kernel=kernel, fake=kernel, gradient=COMPOSITE,
            autocast=untouched, vmap=ONE_BY_ONE, example=example, internal=True,
        )  # fmt: skip

    @property
    def differentiable(self) -> bool:
        """Whether gradients go through the op."""
        if isinstance(self.gradient, Elsewhere):
            return self.gradient.differentiable
        return isinstance(self.gradient, Gradient | BackwardOp | Composite) or (
            isinstance(self.gradient, GradientByHand) and not self.internal
        )

    @property
    def full_name(self) -> str:
        """Returns the name with the namespace, as torch spells it."""
        return f"{self.namespace}::{self.name}"

    @property
    def free_places(self) -> list[int]:
        """Returns what native code takes for `free` (csrc/plan/key.h)."""
        kinds = {name: _FREE_NUMBER if dim is None else dim for name, dim in self.free.items()}
        names = [argument.name for argument in self.overload._schema.arguments]
        return [kinds.get(name, _NOT_FREE) for name in names] if kinds else []

    @property
    def name_in_errors(self) -> str:
        """Returns the name, with the namespace if the op is a user's: its name may be any word."""
        return self.name if self.namespace == "symm_mem" else self.full_name

    @property
    def parsed_schema(self) -> torch.FunctionSchema:
        """Returns the schema, which need not be registered."""
        if self.schema in (None, TORCHS):
            found: torch.FunctionSchema = self.overload._schema
            return found
        return torch._C.parse_schema(self.full_name + self.schema)

    @property
    def overload(self) -> Any:
        """Returns torch's object for the op."""
        return getattr(getattr(torch.ops, self.namespace), self.name).default


_REQUIRED = ("schema", "kernel", "fake", "gradient", "autocast", "vmap", "example")
_declared: dict[str, Op] = {}


def declare(*ops: Op) -> None:
    """Adds ops to the declared ones."""
    for op in ops:
        assert op.name not in _declared, op.name
        _declared[op.name] = op


def declared() -> Iterable[Op]:
    """Returns all ops, in the order of their declaration."""
    return _declared.values()


def declared_op(name: str) -> Op:
    """Returns an op by its name."""
    return _declared[name]


def find(name: str) -> Op | None:
    """Returns an op by its name, None if it is not declared."""
    return _declared.get(name)


def shows_types(
    name: str, words: Mapping[str, str] = MappingProxyType({}), **fixed: Any
) -> Callable[[F], F]:
    """Decorates an entry point of an op: adds the op's types, if any, to its docstring.

    `words` are as for `entry_point`; `fixed` are arguments of the op.
    """

    def decorated(function: F) -> F:
        op = find(name)
        if op is not None and op.types is not None and function.__doc__ is not None:
            kinds = {each.name: str(each.type) for each in op.parsed_schema.arguments}
            text = described(op.types, kinds, words, **fixed)
            function.__doc__ += f"\n    Types for `spmd_types` on the group's axis: `{text}`.\n    "
        return function

    return decorated


def missing_parts(op: Op) -> list[str]:
    """Returns the names of the parts that a declaration lacks."""
    missing = [part for part in _REQUIRED if getattr(op, part) is None]
    schema = None if op.schema is None else op.overload._schema
    if op.types is None and not isinstance(op.gradient, Composite):
        missing.append("types")
    if schema is not None and schema.is_mutable and schema.returns and op.functional is None:
        missing.append("functional")
    return missing
