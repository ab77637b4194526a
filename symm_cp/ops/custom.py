"""Ops of users: `symm_cp.op` registers a function of a `Call` as registration.py registers ours."""

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
from symm_cp.ops.call import Call
from symm_cp.ops.common import group_of, in_test_mode, world_size_of
from symm_cp.ops.op import ONE_BY_ONE, Gradient, Kernel, NoGradient, Op
from symm_cp.ops.registration import register_one

_EXAMPLE = "'mine::gather_matmul(Tensor x, Tensor w, str group_name) -> Tensor'"
_MAX_KINDS = 512  # of calls whose results were compared with the fake ones


def op(
    schema: str,
    *,
    unfused: Kernel,
    gradient: Kernel | None = None,
    setup_context: Kernel | None = None,
) -> Callable[[Kernel], torch._ops.OpOverload]:
    """Registers the decorated function as an op, and returns torch's object for it.

    The function takes a `Call`, then the arguments of the schema without `group_name`, and returns
    new tensors. Same result as `unfused`, which takes all arguments and is written with torch's
    functional collectives: results' shapes, strides and dtypes come from it, and it runs in torch's
    test mode and in groups whose ranks share no memory. `gradient` and `setup_context` are the
    `backward` and `setup_context` of `torch.library.register_autograd`. Autocast casts floating
    arguments as for a matmul; `torch.func.vmap` makes one call per element.

    Raises `ValueError` for a wrong schema or a name that is in use, `NotImplementedError` for a
    schema that writes to an argument.
    """
    parsed = _parsed(schema)
    if setup_context is not None and gradient is None:
        raise ValueError(f"symm_cp.op: {parsed.name} has setup_context=, which needs gradient=")
    namespace, _, name = parsed.name.partition("::")
    group_at = [argument.name for argument in parsed.arguments].index("group_name")

    def fake(*args: Any, **kwargs: Any) -> Any:
        world_size_of(args[group_at])  # raises unless the group exists
        return tree_map_only(
            funcol.AsyncCollectiveTensor, lambda tensor: tensor.wait(), unfused(*args, **kwargs)
        )

    def register(run: Kernel) -> torch._ops.OpOverload:
        declaration = Op(
            name=name,
            namespace=namespace,
            schema=str(parsed).removeprefix(parsed.name),
            kernel=_kernel(parsed.name, run, fake, group_at),
            fake=fake,
            gradient=NoGradient("pass gradient= to symm_cp.op")
            if gradient is None
            else Gradient(gradient, setup_context),
            autocast=autocast.cast,
            vmap=ONE_BY_ONE,
        )
        register_one(declaration)
        overload: torch._ops.OpOverload = declaration.overload
        return overload

    return register


def _kernel(op: str, run: Kernel, unfused: Kernel, group_at: int) -> Kernel:
    """Returns the kernel of an op in Python; plans make most calls without it."""
    kinds: set[Hashable] = set()

    def kernel(*args: Any, **kwargs: Any) -> Any:
        group = group_of(args[group_at])
        given = (*args[:group_at], *args[group_at + 1 :])
        leaves = tree_leaves((given, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if not tensors:
            raise ValueError(f"{op}: got no tensor, needs at least one")
        if in_test_mode() or runtime.of(tensors[0].device, group) is runtime.FOR_RANKS_APART:
            return unfused(*args, **kwargs)
        kind = (group.world_size, *(_layout(leaf) for leaf in leaves))
        if kind in kinds or plans.current() is not None:
            return run(Call(op, group), *given, **kwargs)
        # First, since it raises torch's errors for wrong arguments before peers wait for them.
        shapes, named = tree_map_only(torch.Tensor, _on_meta, (args, kwargs))
        expected = unfused(*shapes, **named)
        result = run(Call(op, group), *given, **kwargs)
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
    namespace, _, name = parsed.name.partition("::")
    if not (namespace.isidentifier() and name.isidentifier()) or parsed.overload_name:
        raise ValueError(f"symm_cp.op: {schema!r} must name 'namespace::op', as in {_EXAMPLE}")
    if namespace in ("aten", "prim", "prims", "symm_mem") or namespace.startswith("symm_cp"):
        raise ValueError(f"symm_cp.op: namespace {namespace!r} is not for users: choose your own")
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
    if hasattr(getattr(torch.ops, namespace), name):
        raise ValueError(f"symm_cp.op: {parsed.name} is registered already: choose another name")
    return parsed
