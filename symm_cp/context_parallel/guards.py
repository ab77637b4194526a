"""Guards of a region: refuse modules whose attention would be wrong, detect unfused attention.

Within a region a model's input is this rank's part of the sequence. A model that was not made for
that takes it for the whole: it counts positions from 0, or drops a window that only the whole
sequence needs. The region sees calls of attention only, so it must inspect the running modules.

While any region is active, a global forward pre-hook passes each module to the `Watch` of the
innermost region of its thread, which has the inspector judge it. A forward hook, which unlike the
pre-hook gets keyword arguments, passes calls to the inspector. Within `torch.compile` both run when
the model is traced. On one rank nothing is spread or refused.

The first module of a model that runs has all modules judged that are registered in it. While a
model of transformers runs whose modules have all passed, the hooks are removed, unless it keeps
other modules in plain lists: these are judged when they run.
"""

from __future__ import annotations

import ctypes
import threading
import warnings
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.utils.hooks import RemovableHandle

from symm_cp.context_parallel import agreement, inspectors
from symm_cp.context_parallel.inspectors import Limit, Verdicts
from symm_cp.context_parallel.load_balancers import LoadBalancer
from symm_cp.ops.attention.mesh_calls import reporting_to_peers
from symm_cp.ops.common import attention_runs

ON_UNFUSED = ("raise", "warn", "ignore")
# The arguments whose presence the inspector checks in traced code, where there are no values.
_SHOWN = (
    *("position_ids", "output_router_logits", "start_positions"),
    *("labels", "shift_labels", "attention_mask", "decoder_input_ids", "decoder_inputs_embeds"),
)

_eval_frame = torch._C._dynamo.eval_frame


@dataclass
class Watch:
    """Records the events within a region since it was entered."""

    group: str
    world_size: int
    balancers: tuple[LoadBalancer, ...] = ()
    first_module: str | None = None
    called: bool = False
    runs_before: int = 0
    recurred_without_documents: bool = False  # whether the last recurrent layer got none
    judged: set[nn.Module] = field(default_factory=set)
    limits: dict[nn.Module, tuple[Limit, ...]] = field(default_factory=dict)  # of other parts
    verdicts: dict[nn.Module, Verdicts] = field(default_factory=dict)  # on models to run
    calls: set[nn.Module] = field(default_factory=set)  # modules with checked calls
    peers: str | tuple[str, ...] = ""  # see `reporting_to_peers`
    seeded: bool = False  # whether ranks have compared their seeds
    handles: list[RemovableHandle] = field(default_factory=list)  # of hooks of single modules

    @property
    def fused(self) -> bool:
        """Whether a function that the region sees was called, or an attention op has run."""
        if torch.compiler.is_compiling():
            return self.called
        return self.called or attention_runs.total() != self.runs_before

    def saw(self, module: nn.Module) -> Verdicts | None:
        """Records that a module runs; raises `NotImplementedError` if its result would be wrong.

        The first module of a model has all parts judged. Then returns the verdicts, else None.
        """
        if self.world_size == 1 or module in self.judged:
            return None
        if module in self.limits:  # a part of a model that ran before
            raise self.limits[module][0].error(module)
        inner = getattr(module, "_orig_mod", module)  # of torch.compile(module)
        verdicts = self.verdicts.pop(inner, None) or Verdicts(inner)
        self.first_module = self.first_module or type(inner).__name__
        compiled = inner is not module or module._compiled_call_impl is not None
        self.calls.update(verdicts.checks_calls)
        for part, limits in verdicts.limits.items():
            if part is inner or compiled:
                raise limits[0].error(part)
        self.limits.update(verdicts.limits)
        self.judged.update(set(verdicts.parts).difference(verdicts.limits))
        self.judged.add(module)  # not before: a caller that catches an error may run it again
        return verdicts

    def expects(self, model: nn.Module, inside: Collection[nn.Module]) -> None:
        """Judges a model that will run; raises `NotImplementedError` for its parts `inside`."""
        if self.world_size > 1:
            verdicts = self.verdicts[model] = Verdicts(model)
            for part, limits in verdicts.limits.items():
                if part in inside:
                    raise limits[0].error(part)

    def check_fused(self, on_unfused: str, where: str = "context_parallel") -> None:
        """Raises `RuntimeError`, or warns, if modules ran and no attention was fused."""
        ran = self.first_module
        if where == "context_parallel":
            ran = ran or _local.compiled
        if self.world_size == 1 or self.fused or ran is None or on_unfused == "ignore":
            return
        message = (
            f"{where}: {ran} ran, but no attention ran context parallel: none of "
            "F.scaled_dot_product_attention, flex_attention and varlen_attn was called, so "
            "attention saw only this rank's part of the sequence. Use a model that calls one of "
            "them (transformers: context_parallel(model=...))"
        )
        if where == "context_parallel":
            message += '; if the modules have no attention, pass on_unfused="ignore"'
        if on_unfused == "raise":
            raise RuntimeError(message)
        warnings.warn(message, stacklevel=4)


# --- the watches of a thread -------------------------------------------------------------------

# `_local.compiled` records that compiled modules ran: the graph sets it, not the hook.
_local = threading.local()


class _Thread(threading.local):
    def __init__(self) -> None:
        self.watches: list[Watch] = []


_thread = _Thread()


def current() -> Watch | None:
    """Returns the watch of the innermost region of this thread."""
    return _thread.watches[-1] if _thread.watches else None


def enter(watch: Watch, *, again: bool = False) -> None:
    """Starts watching the modules that this thread runs.

    `again`: the watch was entered before, and attention may have run since then.
    """
    _hooks.acquire()
    if not again:
        watch.runs_before = attention_runs.total()
    outer = current()
    if outer is not None:
        outer.first_module = outer.first_module or _local.compiled
    _thread.watches.append(watch)
    _local.compiled = None


def leave() -> None:
    """Ends the innermost watch."""
    watch = _thread.watches.pop()
    while watch.handles:
        watch.handles.pop().remove()
    _local.compiled = None
    _hooks.release()


# --- hooks -------------------------------------------------------------------------------------


def constant_when_traced(function: Any) -> Any:
    """Like `torch.compiler.assume_constant_result`, which imports the compiler (a second)."""
    function._dynamo_marked_constant = True
    return function


# torch.compile calls the next two `_complaint` functions while it traces, and treats the results as
# constants. They return the error message for the traced code to raise, so that callers get an
# exception of this type.

#: torch 2.11 passes only constants to such functions: there they take a module's `id`, on which
#: Dynamo guards. Dynamo has no `id` for a module that the traced code makes, such as `ACT2FN`'s.
_BY_ID = torch.__version__ < (2, 12)


def _module(shown: nn.Module | int) -> nn.Module:
    """Returns a module from its `id`; it is being called, so it is alive."""
    if isinstance(shown, nn.Module):
        return shown
    module: nn.Module = ctypes.cast(shown, ctypes.py_object).value
    return module


@constant_when_traced
def _complaint_before(called: nn.Module | int) -> str | None:
    watch = current()
    if watch is None:
        return None
    module = _module(called)
    try:
        watch.saw(module)
    except NotImplementedError as error:
        return str(error)
    return None


@constant_when_traced
def _complaint_after(called: nn.Module | int, shown: tuple[str, ...]) -> str | None:
    watch, module = current(), _module(called)
    try:
        if watch is not None and module in watch.calls:
            inspectors.current().check_call(watch, module, (), dict.fromkeys(shown, True))
    except NotImplementedError as error:
        return str(error)
    return None


def _before(module: nn.Module, args: Any) -> None:
    # torch.compiler.is_compiling(), inlined to one call: this runs for each module.
    if torch.compiler.is_dynamo_compiling() or torch.compiler._is_compiling_flag:
        if complaint := _complaint_before(id(module) if _BY_ID else module):
            raise NotImplementedError(complaint)
        _local.compiled = "A compiled module"  # whenever the graph runs
        return
    watches = _thread.watches
    if watches and watches[-1].world_size > 1 and module not in watches[-1].judged:
        watch = watches[-1]
        untraced(watch, lambda compiling: _runs(watch, module, compiling))


def _runs(watch: Watch, module: nn.Module, compiling: bool) -> None:
    verdicts = watch.saw(module)
    agreement.compare_running("context_parallel", watch.group, module)
    if verdicts is not None and not compiling and not verdicts.compiles:  # hooks skip its parts
        agreement.compare_parts("context_parallel", watch.group, verdicts.parts)
        if module in watch.calls and not verdicts.limits and not verdicts.may_have_others:
            _hooks.rest(watch, module, verdicts)


def _after(module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
    if torch.compiler.is_dynamo_compiling() or torch.compiler._is_compiling_flag:
        # Models pass positions by keyword; a positional one counts as missing.
        shown = [n for n in _SHOWN if kwargs.get(n) is not None and kwargs[n] is not False]
        if complaint := _complaint_after(id(module) if _BY_ID else module, tuple(shown)):
            raise NotImplementedError(complaint)
        return
    watches = _thread.watches
    if watches and module in watches[-1].calls:
        watch = watches[-1]
        check = inspectors.current().check_call
        untraced(watch, lambda _: check(watch, module, args, kwargs))


def untraced(watch: Watch, check: Callable[[bool], None]) -> None:
    """Runs a check that Dynamo must not compile; reports its error to the peers.

    `check` gets whether Dynamo is active. Code that Dynamo could not trace runs as usual, but
    Dynamo tries to compile the functions that it calls.
    """
    callback = _eval_frame.set_eval_frame(None)
    try:
        reporting_to_peers(watch.peers or watch.group, check, callback is not None)
    finally:
        _eval_frame.set_eval_frame(callback)


# Dynamo must not compile this function either.
_eval_frame.set_code_exec_strategy(
    untraced.__code__,
    _eval_frame._FrameExecStrategy(_eval_frame._FrameAction.SKIP, _eval_frame._FrameAction.DEFAULT),
)


class _Hooks:
    """Global hooks of modules, registered while they are acquired at least once.

    They keep their ids: torch.compile guards on the ids, and would recompile for each region.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._before = self._after = -1

    def acquire(self) -> None:
        with self._lock:
            self._users += 1
            if self._before < 0:
                # Calling a compiled module warns that global hooks run twice: harmless here.
                warnings.filterwarnings("ignore", "Using `torch.compile.module.` when there are gl")
                self._before = torch_module.register_module_forward_pre_hook(_before).id
                self._after = torch_module.register_module_forward_hook(_after, with_kwargs=True).id
            self._install()

    def release(self) -> None:
        with self._lock:
            self._users -= 1
            self._install()

    def _install(self, *, resting: bool = False) -> None:
        """Installs the hooks, or removes them if no region needs them."""
        torch_module._global_forward_pre_hooks.pop(self._before, None)
        torch_module._global_forward_hooks.pop(self._after, None)
        torch_module._global_forward_hooks_with_kwargs.pop(self._after, None)
        if self._users and not resting:
            torch_module._global_forward_pre_hooks[self._before] = _before
            torch_module._global_forward_hooks[self._after] = _after
            torch_module._global_forward_hooks_with_kwargs[self._after] = True

    def rest(self, watch: Watch, model: nn.Module, verdicts: Verdicts) -> None:
        """Removes the hooks until the end of a running model whose parts need no judgement.

        They would be called for each of its parts. Until the region ends, the parts whose calls are
        checked have hooks of their own. Does nothing if other threads have regions.
        """

        def resume(*_: Any) -> None:
            with self._lock:
                self._install()

        with self._lock:
            if self._users != len(_thread.watches):
                return
            self._install(resting=True)
        for part in verdicts.checks_calls:
            watch.handles.append(part.register_forward_hook(_after, with_kwargs=True))
        watch.handles.append(model.register_forward_hook(resume, always_call=True))


_hooks = _Hooks()
