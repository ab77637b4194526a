"""Ops made of a function of a `Call`: `symm_cp.op` for users, `own_op` for ops of this package."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
import torch.distributed._functional_collectives as funcol
from torch.utils._pytree import tree_leaves, tree_map_only

from symm_cp import runtime
from symm_cp.cuda import plans
from symm_cp.group.memory import reported
from symm_cp.ops import autocast
from symm_cp.ops.call import Call, UnfusedCall
from symm_cp.ops.common import group_of, in_test_mode, world_size_of
from symm_cp.ops.op import (
    ONE_BY_ONE,
    BackwardOp,
    Gradient,
    Kernel,
    NoGradient,
    Op,
    declare,
)
from symm_cp.ops.registration import register_one

_EXAMPLE = "'mine::gather_matmul(Tensor x, Tensor w, str group_name) -> Tensor'"
_MAX_KINDS = 512  # of calls whose results were compared with the fake ones


def op(
    schema: str,
    *,
    unfused: Kernel | None = None,
    gradient: torch._ops.OpOverload | Kernel | None = None,
    setup_context: Kernel | None = None,
) -> Callable[[Kernel], torch._ops.OpOverload]:
    """Registers the decorated function as an op, and returns torch's object for it.

    The function takes a `Call`, then the arguments of the schema without `group_name`, and returns
    new tensors. Same result as `unfused`, which takes all arguments and is written with torch's
    functional collectives: results' shapes, strides and dtypes come from it, and it runs in torch's
    test mode and in groups whose ranks share no memory. By default it is the function itself, with
    a call that makes torch's collectives. Autocast casts floating arguments as for a matmul;
    `torch.func.vmap` makes one call per element.

    `gradient` is another such op of the namespace. Its arguments are found by name: `grad` or
    `grad_*`, the gradients of the results in order, and arguments and results of this op. Its
    results have the names of the arguments whose gradients they are. Or `gradient` and
    `setup_context` are the `backward` and `setup_context` of `torch.library.register_autograd`.

    Raises `ValueError` for a wrong schema or a name that is in use, `NotImplementedError` for a
    schema that writes to an argument.
    """
    parsed = _parsed(schema)
    namespace, _, name = parsed.name.partition("::")
    _check_name(schema, namespace, name)
    if setup_context is not None and not callable(gradient):
        raise ValueError(f"symm_cp.op: {parsed.name} has setup_context=, which needs gradient=")
    backward: BackwardOp | Gradient | NoGradient = NoGradient("pass gradient= to symm_cp.op")
    if isinstance(gradient, torch._ops.OpOverload):
        backward = _backward_op(parsed, gradient, setup_context)
    elif gradient is not None:
        backward = Gradient(gradient, setup_context)

    def register(run: Kernel) -> torch._ops.OpOverload:
        group_at = _group_at(parsed)
        reference = _waited(unfused or _over_torch(parsed.name, run, group_at), group_at)
        declaration = Op(
            name=name,
            namespace=namespace,
            schema=str(parsed).removeprefix(parsed.name),
            kernel=_kernel(parsed.name, run, reference, group_at),
            fake=reference,
            gradient=backward,
            autocast=autocast.cast,
            vmap=ONE_BY_ONE,
        )
        register_one(declaration)
        overload: torch._ops.OpOverload = declaration.overload
        return overload

    return register


def own_op(
    schema: str, *, check: Kernel, fake: Kernel | None = None, **parts: Any
) -> Callable[[Kernel], Kernel]:
    """Declares the decorated function as an op of `torch.ops.symm_mem`, which has no namespace.

    `check` takes the number of ranks, then what the function takes, and raises for wrong arguments
    before peers wait. `fake` is as `unfused` of `op`; the function itself is the unfused form.
    `parts` are the other parts of an `Op`. Tests compare results with fake ones, not each call with
    new sizes, as for users: decoding has them at each token.
    """
    parsed = _parsed(schema)
    group_at = _group_at(parsed)

    def register(run: Kernel) -> Kernel:
        unfused = _waited(_over_torch(parsed.name, run, group_at), group_at)

        def checked(*args: Any, **kwargs: Any) -> Any:
            ranks = world_size_of(args[group_at])
            check(ranks, *args[:group_at], *args[group_at + 1 :], **kwargs)
            return (fake or unfused)(*args, **kwargs)

        declare(
            Op(
                name=parsed.name,
                schema=str(parsed).removeprefix(parsed.name),
                kernel=_kernel(parsed.name, run, unfused, group_at, check),
                fake=checked,
                **{"autocast": autocast.cast, "vmap": ONE_BY_ONE, **parts},
            )
        )
        return run

    return register


def _group_at(schema: torch.FunctionSchema) -> int:
    return [argument.name for argument in schema.arguments].index("group_name")


def _over_torch(op: str, run: Kernel, group_at: int) -> Kernel:
    """Returns the function of a `Call`, with torch's functional collectives."""

    def unfused(*args: Any, **kwargs: Any) -> Any:
        call = UnfusedCall(op, args[group_at])
        return run(call, *args[:group_at], *args[group_at + 1 :], **kwargs)

    return unfused


def _waited(unfused: Kernel, group_at: int) -> Kernel:
    """Returns the unfused form with its results waited for."""

    def waited(*args: Any, **kwargs: Any) -> Any:
        world_size_of(args[group_at])  # raises unless the group exists
        return tree_map_only(
            funcol.AsyncCollectiveTensor, lambda tensor: tensor.wait(), unfused(*args, **kwargs)
        )

    return waited


def _kernel(
    op: str, run: Kernel, unfused: Kernel, group_at: int, check: Kernel | None = None
) -> Kernel:
    """Returns the kernel of an op in Python; plans make most calls without it.

    Without `check` the first call of a kind compares its results with those of the unfused form.
    """
    kinds: set[Hashable] = set()

    def kernel(*args: Any, **kwargs: Any) -> Any:
        group = group_of(args[group_at])
        given = (*args[:group_at], *args[group_at + 1 :])
        leaves = tree_leaves((given, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if not tensors:
            raise ValueError(f"{op}: got no tensor, needs at least one")
        if check is not None:
            check(group.world_size, *given, **kwargs)
        if in_test_mode() or runtime.of(tensors[0], group) is runtime.FOR_RANKS_APART:
            return unfused(*args, **kwargs)
        call = Call(op, group)
        if check is not None or plans.current() is not None:
            return run(call, *given, **kwargs)
        kind = (group.world_size, *(_layout(leaf) for leaf in leaves))
        if kind in kinds:
            return run(call, *given, **kwargs)
        # First, since it raises torch's errors for wrong arguments before peers wait for them.
        shapes, named = tree_map_only(torch.Tensor, _on_meta, (args, kwargs))
        expected = unfused(*shapes, **named)
        result = run(call, *given, **kwargs)
        try:
            _check_results(op, tensors, tree_leaves(result), tree_leaves(expected))
        except (TypeError, ValueError) as error:
            raise reported(error) from None  # no peer waits: all exchanges are done
        if len(kinds) >= _MAX_KINDS:
            kinds.clear()
        kinds.add(kind)
        return result

    return kernel


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _layout(leaf: Any) -> Hashable:
    """Returns shape, strides and dtype of a tensor, and other arguments as they are."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    strides = [s if size > 1 else 1 for size, s in zip(leaf.shape, leaf.stride(), strict=True)]
    return tuple(leaf.shape), tuple(strides), leaf.dtype


def _check_results(
    op: str, arguments: list[torch.Tensor], results: list[Any], expected: list[Any]
) -> None:
    """Raises unless results are new tensors like those of the unfused form."""
    if not all(isinstance(result, torch.Tensor) for result in results):
        raise TypeError(f"{op}: returned {results}, must return tensors")
    found, wanted = [[_layout(each) for each in some] for some in (results, expected)]
    if found != wanted:
        raise ValueError(
            f"{op}: returned tensors of (shape, strides, dtype) {found}, but its unfused form "
            f"{wanted}: they must agree"
        )
    memory = [argument.untyped_storage()._cdata for argument in arguments]
    if any(result.untyped_storage()._cdata in memory for result in results):
        raise ValueError(f"{op}: returned memory of an argument, must return new tensors: clone it")


def _parsed(schema: str) -> torch.FunctionSchema:
    """Returns a schema that `op` accepts."""
    try:
        parsed = torch._C.parse_schema(schema)
    except RuntimeError as error:
        raise ValueError(
            f"symm_cp.op: {schema!r} is not a schema; must be like {_EXAMPLE}: {error}"
        ) from None
    if parsed.overload_name:
        raise ValueError(f"symm_cp.op: {schema!r} must name 'namespace::op', as in {_EXAMPLE}")
    if parsed.is_mutable or any(each.alias_info for each in (*parsed.arguments, *parsed.returns)):
        raise NotImplementedError(
            f"symm_cp.op: {schema!r} writes to an argument or returns one: not supported, return "
            "new tensors"
        )
    kinds = {argument.name: str(argument.type) for argument in parsed.arguments}
    group = [argument for argument in parsed.arguments if argument.name == "group_name"]
    if (
        not group
        or kinds["group_name"] != "str"
        or group[0].kwarg_only
        or group[0].has_default_value()
    ):
        raise ValueError(
            f"symm_cp.op: {schema!r} must have an argument 'str group_name', neither optional nor "
            f"behind '*', as in {_EXAMPLE}"
        )
    if "Tensor" not in kinds.values() and "List[Tensor]" not in kinds.values():
        raise ValueError(f"symm_cp.op: {schema!r} must have a tensor among its arguments")
    returned = {str(each.type) for each in parsed.returns}
    if not returned or returned - {"Tensor", "List[Tensor]"}:
        raise ValueError(f"symm_cp.op: {schema!r} must return tensors, and nothing else")
    return parsed


def _check_name(schema: str, namespace: str, name: str) -> None:
    """Raises unless an op of a user may have this name."""
    if not (namespace.isidentifier() and name.isidentifier()):
        raise ValueError(f"symm_cp.op: {schema!r} must name 'namespace::op', as in {_EXAMPLE}")
    if namespace in ("aten", "prim", "prims", "symm_mem") or namespace.startswith("symm_cp"):
        raise ValueError(f"symm_cp.op: namespace {namespace!r} is not for users: choose your own")
    if hasattr(getattr(torch.ops, namespace), name):
        raise ValueError(
            f"symm_cp.op: {namespace}::{name} is registered already: choose another name"
        )


def _backward_op(
    schema: torch.FunctionSchema, gradient: torch._ops.OpOverload, setup_context: Kernel | None
) -> BackwardOp:
    """Returns the gradient that is an op; raises `ValueError` if it does not fit."""
    if setup_context is not None:
        raise ValueError(f"symm_cp.op: {schema.name} has setup_context=, but gradient= is an op")
    namespace, _, name = gradient._schema.name.partition("::")
    if namespace != schema.name.partition("::")[0]:
        raise ValueError(
            f"symm_cp.op: the gradient {gradient._schema.name} must be in the namespace of "
            f"{schema.name}"
        )
    named = [each.name for each in gradient._schema.returns]
    arguments = {each.name for each in schema.arguments}
    if not set(named) <= arguments:
        raise ValueError(
            f"symm_cp.op: the results of the gradient {gradient._schema.name} have names {named}, "
            f"must have names of the arguments {sorted(arguments)}, whose gradients they are"
        )
    return BackwardOp(name)
