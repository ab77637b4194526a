"""Guards of a region: refuse modules whose attention would be wrong, notice unfused attention.

A model decides from the length that it sees whether it needs a mask. Within a region it sees this
rank's part of the sequence, and may drop a sliding window that the whole sequence needs. The region
gets only the resulting call, `is_causal=True`, so it has to inspect the modules that run in it.

While any region is active, a global forward pre-hook shows each module to the `Watch` of the
innermost region of its thread, which checks the module's configuration and attributes. A forward
hook, which unlike the pre-hook gets keyword arguments, checks the positions of a model. Within
`torch.compile` both run when the model is traced. On one rank nothing is spread or refused.
"""

from __future__ import annotations

import functools
import inspect
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module

from symm_cp.context_parallel import agreement
from symm_cp.context_parallel.load_balancers import LoadBalancer, in_rank_order, positions_on
from symm_cp.context_parallel.model_limits import (
    FLEX_ATTENTION,
    WATCHED,
    Limit,
    attends_with_symm_cp,
    call_limits,
    first_position,
    implementation_of,
    limits_of,
    positions_known,
    uses_transformers,
)
from symm_cp.context_parallel.model_masks import flex_masks
from symm_cp.context_parallel.noise_places import Seen
from symm_cp.context_parallel.refusals import telling_peers
from symm_cp.context_parallel.traced_functions import show_random_functions
from symm_cp.devices.kept import HostReads, capturing
from symm_cp.group.memory import resolve
from symm_cp.ops.common import attention_runs

ON_UNFUSED = ("raise", "warn", "ignore")

_eval_frame = torch._C._dynamo.eval_frame


@dataclass
class Watch:
    """What has happened within a region since it was entered.

    `pending` are limits to compare with the length of the whole sequence once that is known.
    """

    group: str
    world_size: int
    balancers: tuple[LoadBalancer, ...] = ()
    first_module: str | None = None
    called: bool = False
    runs_before: int = 0
    transformers: bool = False
    chosen: str | None = None  # how the last model that has run attends
    has_positions: bool = False
    first_position: int = 0
    pending: list[tuple[nn.Module, Limit]] = field(default_factory=list)
    judged: set[nn.Module] = field(default_factory=set)
    told: str | tuple[str, ...] = ""  # see `telling_peers`
    seeded: bool = False  # whether ranks have compared what they draw
    seeds: dict[int, None] = field(default_factory=dict)  # of dropouts, by forward passes
    seen: Seen | None = None

    @property
    def fused(self) -> bool:
        """Whether a function that the region sees was called, or an attention op has run."""
        if torch.compiler.is_compiling():
            return self.called
        return self.called or attention_runs.total() != self.runs_before

    def ignores(self, module: nn.Module) -> bool:
        """Tells whether a module needs no check, as when it was checked before."""
        return self.world_size == 1 or module in self.judged

    def saw(self, module: nn.Module, *, compiling: bool = False) -> None:
        """Records that a module runs; raises `NotImplementedError` if its result would be wrong."""
        if self.ignores(module):
            return
        self.judged.add(module)
        inner = getattr(module, "_orig_mod", module)  # of torch.compile(module)
        self.first_module = self.first_module or type(inner).__name__
        compiled = inner is not module or module._compiled_call_impl is not None
        for part in inner.modules() if compiled else (inner,):
            self.transformers = self.transformers or uses_transformers(part)
            self.first_position = self.first_position or first_position(part)
            self.chosen = implementation_of(part) or self.chosen
            for limit in limits_of(part, transformers=self.transformers, chosen=self.chosen):
                self._apply(part, limit, compiling or compiled)

    def _apply(self, module: nn.Module, limit: Limit, compiling: bool) -> None:
        if limit.in_order and self.balancers and all(map(in_rank_order, self.balancers)):
            return
        if not limit.needs_length:
            raise limit.error(module)
        for balancer in self.balancers:
            if not limit.fits(balancer.lengths):
                raise limit.error(module, balancer.seq_length)
        if self.balancers:
            return
        if compiling and limit.harmless_up_to is not None:
            # The graph may be used for other lengths without this check.
            raise limit.error(module)
        self.pending.append((module, limit))

    def check_lengths(self, lengths: list[int]) -> None:
        """Raises if a module that ran does not support a sequence spread like this."""
        for module, limit in self.pending:
            if not limit.fits(lengths):
                raise limit.error(module, sum(lengths))

    def check_fused(self, on_unfused: str, where: str = "context_parallel") -> None:
        """Raises `RuntimeError`, or warns, if modules ran and no attention was fused."""
        ran = self.first_module
        if where == "context_parallel":
            ran = ran or _local.compiled
        if self.world_size == 1 or self.fused or ran is None or on_unfused == "ignore":
            return
        message = (
            f"{where}: {ran} ran, but no attention ran context parallel: neither "
            "F.scaled_dot_product_attention nor flex_attention was called, so attention saw only "
            "this rank's part of the sequence. Use an implementation that calls one of them "
            "(transformers: context_parallel(model=...))"
        )
        if where == "context_parallel":
            message += '; if the modules have no attention, pass on_unfused="ignore"'
        if on_unfused == "raise":
            raise RuntimeError(message)
        warnings.warn(message, stacklevel=4)


# --- the watches of a thread -------------------------------------------------------------------

# `_local.compiled` records that compiled modules ran: the graph sets it, not the hook.
_local = threading.local()


def _watches() -> list[Watch]:
    stack: list[Watch] | None = getattr(_local, "watches", None)
    if stack is None:
        stack = _local.watches = []
    return stack


def current() -> Watch | None:
    """Returns the watch of the innermost region of this thread."""
    stack = _watches()
    return stack[-1] if stack else None


def enter(watch: Watch) -> None:
    """Starts watching the modules that this thread runs."""
    _hooks.acquire()
    watch.runs_before = attention_runs.total()
    outer = current()
    if outer is not None:
        outer.first_module = outer.first_module or _local.compiled
    _watches().append(watch)
    _local.compiled = None


def leave() -> None:
    """Ends the innermost watch."""
    _watches().pop()
    _local.compiled = None
    _hooks.release()


def check_length(balancer: LoadBalancer) -> None:
    """Checks a layout that has just become known against the modules that ran."""
    watch = None if torch.compiler.is_compiling() else current()
    if watch is not None and watch.pending:
        watch.check_lengths(balancer.lengths)


# --- positions of transformers' models ---------------------------------------------------------


@functools.cache
def _parameters(kind: Any) -> tuple[str, ...]:
    """The names of the arguments of a module class's forward method."""
    return tuple(inspect.signature(kind.forward).parameters)[1:]


def _argument(module: nn.Module, name: str, args: Any, kwargs: Any) -> Any:
    names = _parameters(module.__class__)
    index = names.index(name) if name in names else len(args)
    return args[index] if index < len(args) else kwargs.get(name)


def _check_call(watch: Watch, module: nn.Module, args: Any, kwargs: Any) -> None:
    """Refuses calls of a model of transformers that take this rank's part for the whole."""
    if watch.world_size == 1 or not hasattr(module, "base_model_prefix"):
        return
    if not uses_transformers(module):
        return
    _check_asked(module, _asked(kwargs))
    _check_cache(module, args, kwargs)
    _check_positions(watch, module, args, kwargs)


def _asked(kwargs: Any) -> tuple[str, ...]:
    """The watched arguments that a call sets, by keyword."""
    return tuple([n for n in WATCHED if kwargs.get(n) is not None and kwargs[n] is not False])


def _check_asked(module: nn.Module, asked: tuple[str, ...]) -> None:
    """Refuses a model that is asked for what depends on more than this rank's part."""
    for limit in call_limits(module, asked):
        raise limit.error(module)


def _check_cache(module: nn.Module, args: Any, kwargs: Any) -> None:
    """Refuses generation: `generate` passes its cache to the model; models make their own else."""
    generates = getattr(module, "can_generate", None)
    if generates is None or not generates():
        return
    for argument in ("cache", "past_key_values"):  # the second is the name before 5.24
        if _argument(module, argument, args, kwargs) is not None:
            raise NotImplementedError(
                f"context_parallel: {type(module).__name__} was called with {argument}, as "
                "generate does: a cache holds the keys of this rank's part only. Generate outside "
                "of the context"
            )


def _check_positions(watch: Watch, module: nn.Module, args: Any, kwargs: Any) -> None:
    """Refuses a language model that counts its positions from 0 on each rank."""
    name, names = type(module).__name__, _parameters(module.__class__)
    if "position_ids" in names:
        positions = _argument(module, "position_ids", args, kwargs)
        if positions is None and positions_known(module):
            return
        if positions is None:
            raise NotImplementedError(
                f"context_parallel: {name} was called without position_ids, so it counted from 0 "
                "on each rank. Pass the position_ids of this rank's part; symm_cp.shard_batch "
                "makes them"
            )
        watch.has_positions = True
        # Documents packed by position_ids are told from the whole sequence then.
        unmasked = not _masks_are_whole(module) and (
            _argument(module, "attention_mask", args, kwargs) is None
        )
        if isinstance(positions, torch.Tensor):
            _check_values(watch, name, positions, unmasked)
    elif "input_ids" in names and not watch.has_positions and not positions_known(module):
        raise NotImplementedError(
            f"context_parallel: {name} takes no position_ids, so it counts from 0 on each rank: "
            "it is not supported (of those that are, pass the model to context_parallel(model=...))"
        )


def _masks_are_whole(module: nn.Module) -> bool:
    """Whether a model's masks are those of the whole sequence, made from the parts of all ranks."""
    flex = implementation_of(module) == FLEX_ATTENTION and flex_masks.whole
    return flex or attends_with_symm_cp(module)


_read_positions: HostReads[list[bool]] = HostReads()


def _check_values(watch: Watch, name: str, positions: torch.Tensor, unmasked: bool) -> None:
    """Refuses positions that the model would misinterpret. `positions`: (B, S)."""
    first = watch.first_position
    if positions.dim() != 2:  # several positions for each token
        return
    if not first and not unmasked:
        return
    if capturing(positions.device):  # the host cannot read them; it did when the call was warmed up
        return
    rank = resolve(watch.group).rank
    held = (b for b in watch.balancers if b.lengths[rank] == positions.shape[1])
    balancer = next(held, None)
    if balancer is None:
        return
    expected = positions_on(positions.device, balancer, rank)

    def read() -> list[bool]:
        each = [(positions == expected + offset).all() for offset in (0, first)]
        return list(torch.stack(each).tolist())

    from_zero, as_counted = _read_positions.get(positions, read, context=(balancer, first))
    if first and from_zero:
        raise NotImplementedError(
            f"context_parallel: {name} was called with position_ids that count from 0, but it "
            f"counts from {first} (padding_idx + 1): add {first} to them"
        )
    # Without an attention_mask transformers treats a jump in positions as the start of a document,
    # but sees no jump between ranks.
    if unmasked and not as_counted:
        raise NotImplementedError(
            f"context_parallel: {name} was called without attention_mask and with position_ids "
            f"that are not those of {balancer}: packed documents require "
            "context_parallel(model=...). For one document pass an attention_mask of ones"
        )


# --- hooks -------------------------------------------------------------------------------------


def _constant_when_traced(function: Any) -> Any:
    """`torch.compiler.assume_constant_result`, which would import the compiler: a second."""
    function._dynamo_marked_constant = True
    return function


# torch.compile calls these two while it traces, and treats the results as constants. They return
# the error message: the traced code raises it, so that callers get an exception of this type.


@_constant_when_traced
def _complaint_before(module: nn.Module) -> str | None:
    watch = current()
    if watch is None:
        return None
    show_random_functions()
    try:
        watch.saw(module, compiling=True)
    except NotImplementedError as error:
        watch.judged.discard(module)  # a caller that catches the error may run it again
        return str(error)
    return None


@_constant_when_traced
def _complaint_after(module: nn.Module, has_positions: bool, asked: dict[str, bool]) -> str | None:
    watch = current()
    try:
        if watch is not None and watch.transformers:
            arguments = dict.fromkeys(asked, True)
            _check_call(watch, module, (), {"position_ids": has_positions or None, **arguments})
    except NotImplementedError as error:
        return str(error)
    return None


def _before(module: nn.Module, args: Any) -> None:
    if torch.compiler.is_compiling():
        if complaint := _complaint_before(module):
            raise NotImplementedError(complaint)
        _local.compiled = "A compiled module"  # whenever the graph runs
        return
    watch = current()
    if watch is not None and not watch.ignores(module):
        _untraced(watch, lambda compiling: _runs(watch, module, compiling))


def _runs(watch: Watch, module: nn.Module, compiling: bool) -> None:
    watch.saw(module, compiling=compiling)
    agreement.compare_running("context_parallel", watch.group, module)


def _after(module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
    if torch.compiler.is_compiling():
        # Models pass positions by keyword; a positional one counts as missing.
        has_positions = kwargs.get("position_ids") is not None
        if complaint := _complaint_after(module, has_positions, _asked(kwargs)):
            raise NotImplementedError(complaint)
        return
    watch = current()
    if watch is not None and watch.transformers:
        _untraced(watch, lambda _: _check_call(watch, module, args, kwargs))


def _untraced(watch: Watch, check: Callable[[bool], None]) -> None:
    """Runs a check that Dynamo must not compile, and tells the peers what it refuses.

    `check` is told whether Dynamo is active. Code that Dynamo gave up on runs as usual, but Dynamo
    tries to compile what is called from there.
    """
    callback = _eval_frame.set_eval_frame(None)
    try:
        telling_peers(watch.told or watch.group, check, callback is not None)
    finally:
        _eval_frame.set_eval_frame(callback)


# Dynamo must leave this function itself alone, too.
_eval_frame.set_code_exec_strategy(
    _untraced.__code__,
    _eval_frame._FrameExecStrategy(_eval_frame._FrameAction.SKIP, _eval_frame._FrameAction.DEFAULT),
)


class _Hooks:
    """Global hooks of modules, registered while they are acquired at least once.

    They keep their ids: torch.compile guards on those, and would recompile for each region.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._before = self._after = -1

    def acquire(self) -> None:
        with self._lock:
            self._users += 1
            if self._users > 1:
                return
            if self._before < 0:
                # A call of a compiled module warns that global hooks run twice. These may.
                warnings.filterwarnings("ignore", "Using `torch.compile.module.` when there are gl")
                self._before = torch_module.register_module_forward_pre_hook(_before).id
                self._after = torch_module.register_module_forward_hook(_after, with_kwargs=True).id
            torch_module._global_forward_pre_hooks[self._before] = _before
            torch_module._global_forward_hooks[self._after] = _after
            torch_module._global_forward_hooks_with_kwargs[self._after] = True

    def release(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0:
                del torch_module._global_forward_pre_hooks[self._before]
                del torch_module._global_forward_hooks[self._after]
                del torch_module._global_forward_hooks_with_kwargs[self._after]


_hooks = _Hooks()
