"""Makes ops of a function of a `Call`: for users (custom.py), and by `own_op` for this package."""

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
from symm_cp.ops.call import Call, ShapesCall
from symm_cp.ops.common import group_of, world_size_of
from symm_cp.ops.op import ONE_BY_ONE, Kernel, Op, declare

EXAMPLE = "'mine::gather_matmul(Tensor x, Tensor w, str group_name) -> Tensor'"
_MAX_KINDS = 512  # of calls whose results were compared with the fake ones


def own_op(
    schema: str, *, check: Kernel, fake: Kernel | None = None, **parts: Any
) -> Callable[[Kernel], Kernel]:
    """Declares the decorated function as an op of `torch.ops.symm_mem`, which has no namespace.

    `check` takes the number of ranks, then what the function takes, and raises for wrong arguments
    before peers wait. `fake` takes all arguments; by default it is the function itself.
    `parts` are the other parts of an `Op`. Tests compare results with fake ones, not each call with
    new sizes, as for users: decoding has them at each token.
    """
    made = parsed(schema)
    at = group_at(made)

    def register(run: Kernel) -> Kernel:
        shapes = shapes_of(made.name, run, at)

        def checked(*args: Any, **kwargs: Any) -> Any:
            check(world_size_of(args[at]), *args[:at], *args[at + 1 :], **kwargs)
            return (fake or shapes)(*args, **kwargs)

        declare(
            Op(
                name=made.name,
                schema=str(made).removeprefix(made.name),
                kernel=kernel_of(made.name, run, shapes, at, check=check),
                fake=checked,
                **{"autocast": autocast.cast, "vmap": ONE_BY_ONE, **parts},
            )
        )
        return run

    return register


def group_at(schema: torch.FunctionSchema) -> int:
    """Returns the position of the argument `group_name`; functions take the others without it."""
    return [argument.name for argument in schema.arguments].index("group_name")


def shapes_of(op: str, run: Kernel, at: int) -> Kernel:
    """Returns the function of a `Call` for tensors without values, which exchanges nothing."""

    def shapes(*args: Any, **kwargs: Any) -> Any:
        return run(ShapesCall(op, args[at]), *args[:at], *args[at + 1 :], **kwargs)

    return shapes


def waited_for(unfused: Kernel, at: int) -> Kernel:
    """Returns the unfused form with its results waited for."""

    def waited(*args: Any, **kwargs: Any) -> Any:
        world_size_of(args[at])  # raises unless the group exists
        return tree_map_only(
            funcol.AsyncCollectiveTensor, lambda tensor: tensor.wait(), unfused(*args, **kwargs)
        )

    return waited


def kernel_of(
    op: str,
    run: Kernel,
    shapes: Kernel,
    at: int,
    *,
    check: Kernel | None = None,
    unfused: Kernel | None = None,
) -> Kernel:
    """Returns the kernel of an op in Python; plans make most calls without it.

    Without `check` the first call of a kind compares its results with those of `shapes`. `unfused`,
    if given, runs where ranks work apart.
    """
    kinds: set[Hashable] = set()

    def kernel(*args: Any, **kwargs: Any) -> Any:
        group = group_of(args[at])
        given = (*args[:at], *args[at + 1 :])
        leaves = tree_leaves((given, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if not tensors:
            raise ValueError(f"{op}: got no tensor, needs at least one")
        if check is not None:
            check(group.world_size, *given, **kwargs)
        apart = runtime.of(tensors[0].device, group) is runtime.FOR_RANKS_APART
        if unfused is not None and apart:
            return unfused(*args, **kwargs)
        call = Call(op, group)
        if check is not None or plans.current() is not None:
            return run(call, *given, **kwargs)
        kind = (group.world_size, *(_layout(leaf) for leaf in leaves))
        if kind in kinds:
            return run(call, *given, **kwargs)
        # First, since it raises torch's errors for wrong arguments before peers wait for them.
        on_meta, named = tree_map_only(torch.Tensor, _on_meta, (args, kwargs))
        expected = shapes(*on_meta, **named)
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


def parsed(schema: str) -> torch.FunctionSchema:
    """Returns a schema that `symm_cp.op` accepts; raises `ValueError` for others."""
    try:
        made = torch._C.parse_schema(schema)
    except RuntimeError as error:
        raise ValueError(
            f"symm_cp.op: {schema!r} is not a schema; must be like {EXAMPLE}: {error}"
        ) from None
    if made.overload_name:
        raise ValueError(f"symm_cp.op: {schema!r} must name 'namespace::op', as in {EXAMPLE}")
    if made.is_mutable or any(each.alias_info for each in (*made.arguments, *made.returns)):
        raise NotImplementedError(
            f"symm_cp.op: {schema!r} writes to an argument or returns one: not supported, return "
            "new tensors"
        )
    kinds = {argument.name: str(argument.type) for argument in made.arguments}
    group = [argument for argument in made.arguments if argument.name == "group_name"]
    if (
        not group
        or kinds["group_name"] != "str"
        or group[0].kwarg_only
        or group[0].has_default_value()
    ):
        raise ValueError(
            f"symm_cp.op: {schema!r} must have an argument 'str group_name', neither optional nor "
            f"behind '*', as in {EXAMPLE}"
        )
    if "Tensor" not in kinds.values() and "List[Tensor]" not in kinds.values():
        raise ValueError(f"symm_cp.op: {schema!r} must have a tensor among its arguments")
    returned = {str(each.type) for each in made.returns}
    if not returned or returned - {"Tensor", "List[Tensor]"}:
        raise ValueError(f"symm_cp.op: {schema!r} must return tensors, and nothing else")
    return made
