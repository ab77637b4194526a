"""Random numbers within a region: each rank draws its own, except where ranks must agree.

While a region is active, torch's default generators have a state of this rank, made from a number
that all ranks draw when they enter, and from the rank. So dropout masks of different positions are
independent, in eager and compiled code. At the end the default generators are restored: all ranks'
advance by one number for each region, however many numbers a region draws.

Ranks draw equal numbers, from a separate state:

    seeds of attention's dropout     its masks follow from seed, head and position
    single numbers                   decisions of all ranks, such as whether to skip a layer
    numbers for parameters           their initial values

The state of both is restored when `torch.utils.checkpoint` recomputes.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from symm_cp.context_parallel.guards import current
from symm_cp.context_parallel.region import ParallelRegion, outside_graph
from symm_cp.cuda.cached import capturing
from symm_cp.modes import ordinary_tensors
from symm_cp.ops.attention.layouts import encoded
from symm_cp.ops.attention.mesh_calls import reporting_to_peers
from symm_cp.schedule.layout import sequential

_OP = "context_parallel"
_SEEDS = 2**62  # the number of seeds, for torch's generators and the keys of attention's dropout
_ODD = 0x9E3779B97F4A7C15
# Numbers from here on are draws of all ranks, or draws for parameters; lower ones are ranks.
_SHARED, _PARAMETERS = 1 << 32, 1 << 33

#: Functions whose results may be single numbers, or go into parameters.
_NUMBERS: tuple[Any, ...] = (
    *(torch.rand, torch.randn, torch.randint, torch.rand_like, torch.randn_like),
    *(torch.randint_like, torch.normal, torch.bernoulli, torch.Tensor.bernoulli),
    *(torch.Tensor.bernoulli_, torch.Tensor.uniform_, torch.Tensor.normal_),
    *(torch.Tensor.exponential_, torch.Tensor.log_normal_, torch.Tensor.cauchy_),
    *(torch.Tensor.geometric_, torch.Tensor.random_),
    *(nn.init.uniform_, nn.init.normal_, nn.init.kaiming_uniform_),
)
#: Dropouts, whose second and third arguments are the probability and whether they are on.
_DROPOUTS: tuple[Any, ...] = (
    *(F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout),
    *(torch.dropout, torch.dropout_, torch.native_dropout, torch.feature_dropout),
    *(torch.feature_dropout_, torch.alpha_dropout, torch.alpha_dropout_),
    *(torch.feature_alpha_dropout, torch.feature_alpha_dropout_),
)
#: Functions that draw random numbers from a default generator.
RANDOM = dict.fromkeys(
    [
        *(*_NUMBERS, *_DROPOUTS, F.gumbel_softmax, F.rrelu, torch.rrelu, torch.multinomial),
        *(torch.Tensor.multinomial, torch.poisson, torch.binomial, torch._standard_gamma),
        *(torch._sample_dirichlet, torch.randperm),
    ]
)


def _mixed(seed: int, number: int) -> int:
    """Returns the seed of one of several draws that share a seed."""
    return (seed ^ (number + 1) * _ODD) % _SEEDS


# --- states ------------------------------------------------------------------------------------

with ordinary_tensors():
    # The seed that all ranks of the innermost region share, and how many numbers were drawn with
    # it, in general and for parameters, which a rank may make alone. The seed is -1 outside of
    # regions. A tensor, so that graphs draw in order.
    _shared = torch.tensor([-1, 0, 0], device="cpu")


@dataclass
class State:
    """The state from which random numbers are drawn: of each default generator, and shared."""

    own: list[torch.Tensor]
    shared: torch.Tensor


def _generators() -> list[torch.Generator]:
    """Returns the default generators whose state may be read and written now."""
    cuda = torch.cuda.default_generators
    if cuda and torch.cuda.is_current_stream_capturing():
        return [torch.default_generator]
    return [torch.default_generator, *cuda]


def state() -> State:
    """Returns the current state."""
    return State([generator.get_state() for generator in _generators()], _shared.clone())


def _restore(saved: State) -> None:
    for generator, own in zip(_generators(), saved.own, strict=False):
        generator.set_state(own)
    _shared.copy_(saved.shared)


class _Thread(threading.local):
    recomputing = 0


_thread = _Thread()
_lock = threading.Lock()
_outer: list[State] = []  # the states to be restored when regions end, of all threads


@contextmanager
def _changed(
    change: Callable[[], None], and_then: Callable[[], None] | None = None
) -> Iterator[None]:
    """Changes the state until the end. Threads may overlap: the last to end restores the first.

    `and_then` is called before the end, unless an exception is raised.
    """
    with _lock, ordinary_tensors():
        before = state()
        _outer.append(before)
        change()
    try:
        yield
        if and_then is not None:
            and_then()
    finally:
        with _lock, ordinary_tensors():
            at = next(n for n, each in enumerate(_outer) if each is before)
            if at + 1 == len(_outer):
                _restore(before)
            else:
                _outer[at + 1].own, _outer[at + 1].shared = before.own, before.shared
            del _outer[at]


def own_numbers(rank: int) -> AbstractContextManager[None]:
    """Has the default generators draw numbers of this rank; all ranks enter together."""
    own = 0

    def change() -> None:
        nonlocal own
        seed = next_seed(_shared)
        if _outer[-1].shared[0] < 0:  # the default generator has drawn the seed
            _outer[-1].own[0] = torch.default_generator.get_state()
        else:
            _outer[-1].shared.copy_(_shared)
        own = _mixed(seed, rank)
        for generator in _generators():
            generator.manual_seed(own)
        _shared.copy_(torch.tensor([seed, 0, 0], device="cpu"))

    def check() -> None:
        # DTensor sends the state of rank 0's GPU to all ranks at its first random op.
        if any(generator.initial_seed() != own for generator in _generators()):
            warnings.warn(
                f"{_OP}: torch.manual_seed, or the first random op of DTensors on a GPU, was "
                "called within the context, so ranks drew the same numbers for different "
                "positions. Call it before the context",
                stacklevel=5,
            )

    return _changed(change, check)


@contextmanager
def recomputing(forward: State) -> Iterator[None]:
    """Draws the numbers again that were drawn from a state on."""
    _thread.recomputing += 1
    try:
        with _changed(lambda: _restore(forward)):
            yield
    finally:
        _thread.recomputing -= 1


# --- draws of all ranks ------------------------------------------------------------------------


def next_seed(shared: torch.Tensor, *, parameters: bool = False) -> int:
    """Draws the next seed of all ranks; outside of regions, from torch's default CPU generator."""
    seed, *counts = shared.tolist()
    if seed < 0:
        return int(torch.randint(_SEEDS, (), device="cpu"))
    if torch._C._current_graph_task_id() != -1 and not _thread.recomputing:
        raise RuntimeError(
            f"{_OP}: a backward pass draws a seed of attention's dropout. If it recomputes the "
            "forward pass, its gradients would belong to other masks: use torch.utils.checkpoint"
        )
    shared[1 + parameters] += 1
    return _mixed(seed, counts[parameters] + (_PARAMETERS if parameters else _SHARED))


_library = torch.library.Library("symm_cp", "FRAGMENT")
_library.define("next_seed(Tensor(a!) shared) -> Tensor")
_library.impl("next_seed", lambda shared: torch.tensor([next_seed(shared)], device="cpu"), "CPU")
torch.library.register_fake("symm_cp::next_seed", lambda shared: shared.new_empty(1), lib=_library)


def seed_of_attention(region: ParallelRegion, device: torch.device) -> torch.Tensor:
    """Draws the seed of a dropout in attention, (1,) on CPU; the same on all ranks.

    Raises `ValueError` on all ranks if their seeds differ. Collective for the first seed of a
    region. Callers report its errors to the peers.
    """
    if torch.compiler.is_compiling():  # the op compares seeds
        return torch.ops.symm_cp.next_seed(_shared)  # type: ignore[no-any-return]
    with ordinary_tensors():
        seed = next_seed(_shared)
        _check_seed(region, seed, device)
    return torch.tensor([seed], device="cpu")


def _check_seed(region: ParallelRegion, seed: int, device: torch.device) -> None:
    """Raises `ValueError` on all ranks if their first seeds differ. Collective, once.

    The host waits for the device.
    """
    watch = current()
    if watch is None or watch.seeded or region.world_size == 1 or region.kind is not None:
        return
    if device.type == "meta" or capturing(device):
        return
    watch.seeded = True
    ranks = encoded((sequential(region.world_size, region.world_size),))
    own = torch.tensor([[seed]], dtype=torch.int64, device=device)
    seeds = torch.ops.symm_mem._gather_sequence(own, ranks, region.world_size, region.group)
    seeds = seeds.flatten().tolist()
    others = [rank for rank, other in enumerate(seeds) if other != seeds[0]]
    if others:
        raise ValueError(
            f"{_OP}: ranks {others} draw other random numbers than rank 0, so dropout or skipped "
            "layers would differ from rank to rank: give all ranks of the mesh the same seed, "
            "torch.manual_seed(seed), and draw equally many numbers on each before"
        )


# --- random functions --------------------------------------------------------------------------


def call(region: ParallelRegion, func: Any, args: Any, kwargs: Any, *, entered: bool) -> Any:
    """Calls a random function within a region.

    `entered`: the default generators draw this rank's numbers. They do not in graphs of modules
    with the style `ContextParallel`.
    """
    if kwargs.get("generator") is not None or (func in _DROPOUTS and _is_off(args, kwargs)):
        return func(*args, **kwargs)
    part = _part_of(args)
    if not entered or part is not None:
        return outside_graph(_draw_alone, region, func, args, kwargs, entered, part)
    result = func(*args, **kwargs)
    first = result[0] if isinstance(result, tuple) else result
    if func in _NUMBERS and isinstance(args[0] if args else kwargs.get("tensor"), nn.Parameter):
        return outside_graph(_draw_for_parameter, func, args, kwargs)
    if func in _NUMBERS and first.numel() == 1:
        return outside_graph(_draw_shared, region, func, args, kwargs)
    if not torch.compiler.is_compiling() and capturing(first.device):
        raise NotImplementedError(
            f"{func.__name__} within {_OP}, captured into a CUDA graph, would draw the same "
            "numbers on all ranks: pass a generator with a different seed on each rank"
        )
    return result


def _is_off(args: Any, kwargs: Any) -> bool:
    """Whether a dropout drops nothing."""
    p = args[1] if len(args) > 1 else kwargs.get("p", 0.5)
    on = args[2] if len(args) > 2 else kwargs.get("training", kwargs.get("train", True))
    return not on or p == 0


def _draw_for_parameter(func: Any, args: Any, kwargs: Any) -> Any:
    """Draws the same numbers on all ranks that draw as many for parameters."""
    with ordinary_tensors():
        seed = next_seed(_shared, parameters=True)
    with _seeded(seed):
        return func(*args, **kwargs)


def _draw_shared(region: ParallelRegion, func: Any, args: Any, kwargs: Any) -> Any:
    """Draws the same numbers on all ranks."""
    device = next((arg.device for arg in args if isinstance(arg, torch.Tensor)), None)
    device = device or torch.empty(0, device=kwargs.get("device")).device
    seed = reporting_to_peers(region.peers, seed_of_attention, region, device)
    with _seeded(int(seed)):
        return func(*args, **kwargs)


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    def change() -> None:
        for generator in _generators():
            generator.manual_seed(seed)

    with _changed(change):
        yield


def _draw_alone(
    region: ParallelRegion, func: Any, args: Any, kwargs: Any, entered: bool, part: int | None
) -> Any:
    """Draws with a new seed of this rank, and of its part of a sharded DTensor."""
    with ordinary_tensors():
        seed = int(torch.randint(_SEEDS, (), device="cpu"))
    seed = seed if entered else _mixed(seed, region.rank)
    with _seeded(_mixed(seed, part or 0)):
        return func(*args, **kwargs)


def _part_of(args: Any) -> int | None:
    """Returns the number of this rank's part of a sharded DTensor on CPU, None for other arguments.

    On CPU torch draws the same numbers for all parts.
    """
    x: Any = args[0] if args else None
    if not hasattr(x, "device_mesh") or x.device_mesh.device_type != "cpu":
        return None
    part = None
    for dim, placement in enumerate(x.placements):
        if placement.is_shard():
            part = (part or 0) * x.device_mesh.size(dim) + x.device_mesh.get_local_rank(dim)
    return part
