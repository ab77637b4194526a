"""Derivatives of the ops, and their behaviour under torch's function transforms.

Backward passes are registered here, so that every op refuses in the same words what it cannot
differentiate: forward-mode derivatives (`torch.func.jvp`), whose tangents would be lost, and
`torch.func.grad`, which cannot see a backward pass of this kind. `torch.func.vmap`, and
`torch.autograd.grad` with `is_grads_batched`, call an op once for each element of the batch, one
after the other and in the same order on all ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch._C._functorch import is_legacy_batchedtensor
from torch._library.autograd import Info, make_autograd_impl
from torch.autograd import forward_ad
from torch.utils import _pytree as pytree

from symm_cp.ops.common import libraries
from symm_cp.ops.op import Op

# Results that autograd treats as views cannot be modified in place: kernels run below its key.
_VIEWS = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)


def _tensors(args: Iterable[Any]) -> Iterator[torch.Tensor]:
    for arg in args:
        if isinstance(arg, torch.Tensor):
            yield arg
        elif isinstance(arg, list | tuple):
            yield from _tensors(arg)


def check_transforms(op: str, *args: Any) -> None:
    """Raises `NotImplementedError` where a transform of torch would lose derivatives of `args`."""
    if forward_ad._current_level < 0 and not torch._C._are_functorch_transforms_active():
        return
    for tensor in _tensors(args):
        if torch._C._functorch.is_gradtrackingtensor(tensor) and tensor.requires_grad:
            raise NotImplementedError(
                f"{op}: torch.func.grad, vjp and the transforms built on them are not supported: "
                "use torch.autograd.grad or backward()"
            )
        if forward_ad._current_level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None:
            raise NotImplementedError(
                f"{op}: forward-mode derivatives (torch.func.jvp, torch.autograd.forward_ad) are "
                "not supported: use torch.autograd.grad or backward()"
            )


def register_gradient(
    declaration: Op,
    backward: Callable[..., Any],
    setup_context: Callable[..., Any] | None = None,
    *,
    library: torch.library.Library,
    key: str = "Autograd",
) -> None:
    """Registers the backward pass of an op, as `torch.library.register_autograd` does.

    The backward pass must be built of differentiable ops, which gives second derivatives.
    Transforms that it cannot serve are refused. `library`: the library whose op of this name gets
    the kernel. `key`: the dispatch key of the devices.
    """
    op, name = declaration.overload, declaration.name_in_errors

    def in_forward_dtypes(ctx: Any, *grads: Any) -> Any:
        device = next((grad.device.type for grad in _tensors(grads)), "cpu")
        with torch.autocast(device, enabled=False):
            return backward(ctx, *grads)

    differentiable = make_autograd_impl(op, Info(in_forward_dtypes, setup_context))

    def kernel(keyset: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        # Both are usually -1 and False; the check itself would cost a microsecond.
        if forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active():
            check_transforms(name, *args)
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*args, **kwargs):
            with torch._C._ExcludeDispatchKeyGuard(_VIEWS):
                return differentiable(keyset, *args, **kwargs)
        with torch._C._AutoDispatchBelowADInplaceOrView():
            return op.redispatch(keyset & torch._C._after_autograd_keyset, *args, **kwargs)

    library.impl(declaration.name, kernel, key, with_keyset=True)


def register_no_gradient(op: Op, instead: str, *, library: torch.library.Library, key: str) -> None:
    """Makes the backward pass of an op raise `NotImplementedError`, which says what to do instead.

    `library` and `key` as for `register_gradient`.
    """

    def backward(ctx: Any, *grads: Any) -> Any:
        raise NotImplementedError(f"{op.name_in_errors}: has no gradient: {instead}")

    register_gradient(op, backward, library=library, key=key)


class _NoSecondDerivative(torch.autograd.Function):
    """The identity on `count` gradients; differentiating them by the tensors that follow raises."""

    @staticmethod
    def forward(ctx: Any, op: str, count: int, *tensors: torch.Tensor) -> Any:
        ctx.op = op
        return tuple(grad.detach() for grad in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise NotImplementedError(
            f"{ctx.op}: second derivatives are not supported: gradients that were computed with "
            "create_graph=True must not be differentiated again"
        )


def once_differentiable(op: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Returns a decorator that makes an `autograd.Function`'s `backward` refuse differentiation.

    The decorated function is called as `backward(ctx, ctx.saved_tensors, *grads)`. Its results
    also depend on the saved tensors, so (unlike with torch's decorator of this name) they raise
    when they are differentiated even if the incoming gradient is a constant.
    """

    def decorate(backward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(backward)
        def checked(ctx: Any, *grads: Any) -> Any:
            saved = ctx.saved_tensors  # once: a checkpoint recomputes them each time
            if not torch.is_grad_enabled():
                return backward(ctx, saved, *grads)
            with torch.no_grad():
                results = backward(ctx, saved, *grads)
            depend_on = [t for t in _tensors((*grads, *saved)) if t.requires_grad]
            if not depend_on:
                return results
            tensors = list(_tensors(results))
            marked = iter(_NoSecondDerivative.apply(op, len(tensors), *tensors, *depend_on))
            return tuple(next(marked) if isinstance(r, torch.Tensor) else r for r in results)

        return checked

    return decorate


def _is_batched(arg: Any) -> bool:
    return isinstance(arg, torch.Tensor) and is_legacy_batchedtensor(arg)


def register_vmap(declaration: Op) -> None:
    """Makes `torch.func.vmap` call an op for one element of the batch after the other.

    torch would do the same, but not with lists of tensors, and it would copy the result of a
    low-contention op before `complete` has waited for it.
    """
    op, name = declaration.overload, declaration.name_in_errors
    complete = declaration.complete

    def one_by_one(size: int, in_dims: Any, *args: Any, **kwargs: Any) -> Any:
        flat, arguments = pytree.tree_flatten(args)
        dims = pytree.tree_leaves(in_dims)
        results = []
        for index in range(size):
            taken = [
                arg if dim is None else arg.select(dim, index)
                for arg, dim in zip(flat, dims, strict=True)
            ]
            result = op(*pytree.tree_unflatten(taken, arguments), **kwargs)
            results.append(result if complete is None else complete(result))
        parts = zip(*map(pytree.tree_leaves, results), strict=True)
        stacked = [None if part[0] is None else torch.stack(part) for part in parts]
        out_dims = [None if tensor is None else 0 for tensor in stacked]
        outputs = pytree.tree_structure(results[0])
        return pytree.tree_unflatten(stacked, outputs), pytree.tree_unflatten(out_dims, outputs)

    def grads_batched(*args: Any, **kwargs: Any) -> Any:
        level = torch._C._vmapmode_increment_nesting() - 1
        torch._C._vmapmode_decrement_nesting()
        if level > 1:
            raise NotImplementedError(f"{name}: nested is_grads_batched=True is not supported")
        flat, arguments = pytree.tree_flatten(args)
        dims = [0 if _is_batched(arg) else None for arg in flat]
        for place, dim in enumerate(dims):
            if dim is not None:
                flat[place] = torch._remove_batch_dim(flat[place], level, 1, dim)
                size = len(flat[place])
        outputs, _ = one_by_one(size, dims, *pytree.tree_unflatten(flat, arguments), **kwargs)
        results, structure = pytree.tree_flatten(outputs)
        wrapped = [t if t is None else torch._add_batch_dim(t, 0, level) for t in results]
        return pytree.tree_unflatten(wrapped, structure)

    def mapped(info: Any, in_dims: Any, *args: Any, **kwargs: Any) -> Any:
        return one_by_one(info.batch_size, in_dims, *args, **kwargs)

    library = libraries(declaration.namespace).ops
    torch.library.register_vmap(declaration.full_name, mapped, lib=library)
    # The key of torch's first vmap, used only by `torch.autograd.grad(is_grads_batched=True)`.
    library.impl(declaration.name, grads_batched, "Batched")
