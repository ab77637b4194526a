"""Ops of users: `symm_cp.op` registers a function of a `Call` as an op."""

from __future__ import annotations

from collections.abc import Callable

import torch

from symm_cp.ops import autocast
from symm_cp.ops.op import ONE_BY_ONE, BackwardOp, Gradient, Kernel, NoGradient, Op
from symm_cp.ops.recipe import EXAMPLE, group_at, kernel_of, parsed, shapes_of, waited_for
from symm_cp.ops.registration import register_one


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
    a call that uses the process group there. Autocast casts floating arguments as for a matmul;
    `torch.func.vmap` makes one call per element.

    `gradient` is another such op of the namespace. Its arguments are found by name: `grad` or
    `grad_*`, the gradients of the results in order, and arguments and results of this op. Its
    results have the names of the arguments whose gradients they are. Or `gradient` and
    `setup_context` are the `backward` and `setup_context` of `torch.library.register_autograd`.

    Raises `ValueError` for a wrong schema or a name that is in use, `NotImplementedError` for a
    schema that writes to an argument.
    """
    made = parsed(schema)
    namespace, _, name = made.name.partition("::")
    _check_name(schema, namespace, name)
    if setup_context is not None and not callable(gradient):
        raise ValueError(f"symm_cp.op: {made.name} has setup_context=, which needs gradient=")
    backward: BackwardOp | Gradient | NoGradient = NoGradient("pass gradient= to symm_cp.op")
    if isinstance(gradient, torch._ops.OpOverload):
        backward = _backward_op(made, gradient, setup_context)
    elif gradient is not None:
        backward = Gradient(gradient, setup_context)

    def register(run: Kernel) -> torch._ops.OpOverload:
        at = group_at(made)
        reference = None if unfused is None else waited_for(unfused, at)
        shapes = reference or shapes_of(made.name, run, at)
        declaration = Op(
            name=name,
            namespace=namespace,
            schema=str(made).removeprefix(made.name),
            kernel=kernel_of(made.name, run, shapes, at, unfused=reference),
            fake=shapes,
            gradient=backward,
            autocast=autocast.cast,
            vmap=ONE_BY_ONE,
        )
        register_one(declaration)
        overload: torch._ops.OpOverload = declaration.overload
        return overload

    return register


def _check_name(schema: str, namespace: str, name: str) -> None:
    """Raises unless an op of a user may have this name."""
    if not (namespace.isidentifier() and name.isidentifier()):
        raise ValueError(f"symm_cp.op: {schema!r} must name 'namespace::op', as in {EXAMPLE}")
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
