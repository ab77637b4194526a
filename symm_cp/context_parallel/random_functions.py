"""torch's random functions within a region, by name: dropouts, noise, and refused functions.

`RegionMode` (hooks.py) calls these instead of torch's; Dynamo traces them. Each takes the arguments
of torch's function, and returns `NotImplemented` to have torch's called: for single numbers, which
all ranks draw identically anyway, and for DTensors except in dropout. Calls with a `generator` or
`out` go to torch directly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from symm_cp.context_parallel import noise
from symm_cp.context_parallel.guards import Watch
from symm_cp.context_parallel.region import ParallelRegion

_ALPHA = 1.7580993408473766  # SELU's alpha times its scale
_OWN = ("generator", "out", "names")


class Draw:
    """Draws for the random functions that are called within a region."""

    def __init__(self, region: ParallelRegion, watch: Watch) -> None:
        self.region = region
        self.watch = watch

    def mask(self, x: torch.Tensor, p: float, dims: int = 0) -> torch.Tensor:
        """Returns the mask of a dropout of `x`, or of its first dimensions."""
        return noise.dropout_mask(self.region, self.watch, x, p, dims=dims)

    def like(self, x: torch.Tensor, method: str, *args: float) -> torch.Tensor:
        """Returns numbers of the shape of `x`; for parameters, the same on all ranks."""
        alike = isinstance(x, torch.nn.Parameter)
        return self.numbers(x.shape, x.dtype, x.device, method, args, alike=alike)

    def numbers(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        method: str,
        args: Sequence[float],
        *,
        alike: bool = False,
    ) -> torch.Tensor:
        """Returns numbers as a tensor method draws them."""
        return noise.noise(self.region, self.watch, shape, dtype, device, method, args, alike=alike)


def _is_plain(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and not hasattr(x, "to_local")


# --- dropout -----------------------------------------------------------------------------------


def _drops(p: float, training: Any) -> bool:
    """Whether torch would draw; for other probabilities it draws nothing, or raises."""
    return bool(training) and 0 < p < 1


def _apply(x: torch.Tensor, mask: torch.Tensor, p: float, inplace: bool) -> torch.Tensor:
    scale = 1 / (1 - p)
    return x.mul_(mask).mul_(scale) if inplace else x * mask * scale


def _dropped(draw: Draw, x: torch.Tensor, p: float, dims: int = 0, *, inplace: bool = False) -> Any:
    if not _is_plain(x):
        return _dropped_dtensor(draw, x, p, inplace)
    return _apply(x, draw.mask(x, p, dims), p, inplace)


def _dropped_dtensor(draw: Draw, x: Any, p: float, inplace: bool) -> Any:
    """Drops elements of a DTensor: each rank of its mesh draws for its own part."""
    from torch.distributed.tensor import DTensor

    if any(placement.is_partial() for placement in x.placements):
        if inplace:
            return NotImplemented
        x = x.redistribute(placements=[_whole(placement) for placement in x.placements])
    mesh, local = x.device_mesh, x.to_local()
    held = 0
    for dim, placement in enumerate(x.placements):
        if placement.is_shard():
            held = held * mesh.size(dim) + mesh.get_local_rank(dim)
    mask = noise.dropout_mask(draw.region, draw.watch, local, p, part=held)
    out = _apply(local, mask, p, inplace)
    if inplace:
        return x
    return DTensor.from_local(
        out, mesh, x.placements, run_check=False, shape=x.shape, stride=x.stride()
    )


def _whole(placement: Any) -> Any:
    from torch.distributed.tensor import Replicate

    return Replicate() if placement.is_partial() else placement


def _dropout(draw: Draw, x: Any, p: float, training: Any, inplace: bool) -> Any:
    return _dropped(draw, x, p, inplace=inplace) if _drops(p, training) else NotImplemented


def _native_dropout(draw: Draw, input: torch.Tensor, p: float, train: bool | None) -> Any:
    if not _drops(p, train) or not _is_plain(input):
        return NotImplemented
    mask = draw.mask(input, p)
    return _apply(input, mask, p, False), mask


def _features(unbatched: int) -> Callable[..., Any]:
    """Returns a dropout of channels; inputs of `unbatched` dimensions have channels first."""

    def dropout(draw: Draw, x: torch.Tensor, p: float, training: Any, inplace: bool) -> Any:
        if not _drops(p, training) or not _is_plain(x) or x.dim() < 2:
            return NotImplemented
        return _dropped(draw, x, p, 1 if x.dim() == unbatched else 2, inplace=inplace)

    return dropout


def _alpha(dims: int) -> Callable[..., Any]:
    """Returns alpha dropout; with `dims` 2, of channels."""

    def dropout(draw: Draw, x: torch.Tensor, p: float, training: Any, inplace: bool) -> Any:
        if not _drops(p, training) or not _is_plain(x) or x.dim() < dims:
            return NotImplemented
        mask = draw.mask(x, p, dims)
        a = 1 / math.sqrt((_ALPHA * _ALPHA * p + 1) * (1 - p))
        shift = (mask.to(x.dtype) - 1) * (_ALPHA * a) + _ALPHA * a * p
        if inplace:
            return x.mul_(mask).mul_(a).add_(shift)
        return x * mask * a + shift

    return dropout


def _of_f(dropout: Callable[..., Any], default: bool = True) -> Callable[..., Any]:
    """Returns a dropout with the arguments of functions of `F`."""

    def call(
        draw: Draw,
        input: torch.Tensor,
        p: float = 0.5,
        training: bool = default,
        inplace: bool = False,
    ) -> Any:
        return dropout(draw, input, p, training, inplace)

    return call


def _of_torch(dropout: Callable[..., Any], inplace: bool = False) -> Callable[..., Any]:
    """Returns a dropout with the arguments of torch's functions that functions of `F` call."""

    def call(draw: Draw, input: torch.Tensor, p: float, train: bool) -> Any:
        return dropout(draw, input, p, train, inplace)

    return call


# --- noise -------------------------------------------------------------------------------------


def _in_place(method: str, names: tuple[str, ...], defaults: tuple[Any, ...]) -> Callable[..., Any]:
    """Returns a tensor method that draws in place; its numbers have these names and defaults."""

    def drawn(draw: Draw, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not _is_plain(x) or x.numel() == 1:
            return NotImplemented
        given = [*args, *defaults[len(args) :]]
        for index, name in enumerate(names):
            if name in kwargs:
                given[index] = kwargs[name]
        numbers = [number for number in given if number is not None]
        x.copy_(draw.like(x, method, *numbers))
        return x

    return drawn


def _below(draw: Draw, p: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Returns a bool tensor that is true with probability `p`."""
    wide = torch.float64 if p.dtype == torch.float64 else torch.float32
    alike = isinstance(like, torch.nn.Parameter)
    return draw.numbers(like.shape, wide, like.device, "uniform_", (0.0, 1.0), alike=alike) < p


def _bernoulli_(draw: Draw, x: torch.Tensor, p: Any = 0.5) -> Any:
    if not _is_plain(x) or x.numel() == 1:
        return NotImplemented
    if isinstance(p, torch.Tensor):
        return x.copy_(_below(draw, p.expand_as(x), x))
    return x.copy_(draw.like(x, "bernoulli_", p))


def _bernoulli(draw: Draw, input: torch.Tensor, p: Any = None) -> Any:
    if not _is_plain(input) or input.numel() == 1:
        return NotImplemented
    if p is None:
        return _below(draw, input, input).to(input.dtype)
    return draw.like(input, "bernoulli_", p)


def _size(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, ...]:
    size = kwargs.get("size", args)
    if len(size) == 1 and not isinstance(size[0], int | torch.SymInt):
        size = size[0]
    return tuple(size)


def _finished(numbers: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor:
    if kwargs.get("pin_memory"):
        numbers = numbers.pin_memory()
    return numbers.requires_grad_() if kwargs.get("requires_grad") else numbers


def _made(
    draw: Draw,
    size: Sequence[int],
    default: torch.dtype,
    kwargs: dict[str, Any],
    method: str,
    args: Sequence[float],
) -> Any:
    if math.prod(size) == 1 or kwargs.get("layout") not in (None, torch.strided):
        return NotImplemented
    dtype = kwargs.get("dtype") or default
    device = torch.empty(0, device=kwargs.get("device")).device
    return _finished(draw.numbers(size, dtype, device, method, args), kwargs)


def _factory(method: str, *numbers: float) -> Callable[..., Any]:
    def made(draw: Draw, *args: Any, **kwargs: Any) -> Any:
        size = _size(args, kwargs)
        return _made(draw, size, torch.get_default_dtype(), kwargs, method, numbers)

    return made


def _randint(draw: Draw, *args: Any, **kwargs: Any) -> Any:
    given = list(args)
    size = kwargs["size"] if "size" in kwargs else given.pop()
    high = kwargs["high"] if "high" in kwargs else given.pop()
    low = kwargs.get("low", given.pop() if given else 0)
    return _made(draw, tuple(size), torch.int64, kwargs, "random_", (low, high))


def _like(draw: Draw, x: torch.Tensor, kwargs: dict[str, Any], method: str, *args: float) -> Any:
    if not _is_plain(x):
        return NotImplemented
    given = {**kwargs, "device": kwargs.get("device") or x.device}
    return _made(draw, x.shape, x.dtype, given, method, args)


def _rand_like(draw: Draw, input: torch.Tensor, **kwargs: Any) -> Any:
    return _like(draw, input, kwargs, "uniform_", 0.0, 1.0)


def _randn_like(draw: Draw, input: torch.Tensor, **kwargs: Any) -> Any:
    return _like(draw, input, kwargs, "normal_", 0.0, 1.0)


def _randint_like(draw: Draw, input: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    given = list(args)
    high = kwargs["high"] if "high" in kwargs else given.pop()
    low = kwargs.get("low", given.pop() if given else 0)
    return _like(draw, input, kwargs, "random_", low, high)


def _normal(draw: Draw, mean: Any, std: Any = 1.0, size: Any = None, **kwargs: Any) -> Any:
    if size is not None:
        default = torch.get_default_dtype()
        return _made(draw, tuple(size), default, kwargs, "normal_", (mean, std))
    like = mean if isinstance(mean, torch.Tensor) else std
    if isinstance(mean, torch.Tensor) and isinstance(std, torch.Tensor):
        like = (mean + std).detach()
    if not _is_plain(like) or like.numel() == 1:
        return NotImplemented
    return draw.like(like, "normal_", 0.0, 1.0) * std + mean


def _gumbel_softmax(
    draw: Draw,
    logits: torch.Tensor,
    tau: float = 1,
    hard: bool = False,
    eps: float = 1e-10,
    dim: int = -1,
) -> Any:
    if not _is_plain(logits):
        return NotImplemented
    gumbels = -draw.like(logits.detach(), "exponential_", 1.0).log()
    soft = ((logits + gumbels) / tau).softmax(dim)
    if not hard:
        return soft
    index = soft.max(dim, keepdim=True)[1]
    one_hot = torch.zeros_like(logits).scatter_(dim, index, 1.0)
    return one_hot - soft.detach() + soft


def _rrelu(
    draw: Draw,
    input: torch.Tensor,
    lower: float = 1.0 / 8,
    upper: float = 1.0 / 3,
    training: bool = False,
    inplace: bool = False,
) -> Any:
    if not training or not _is_plain(input):
        return NotImplemented
    slope = draw.like(input.detach(), "uniform_", lower, upper)
    return (
        input.mul_(slope.where(input < 0, 1.0))
        if inplace
        else input.where(input >= 0, input * slope)
    )


_NUMBERS: dict[str, tuple[tuple[str, ...], tuple[Any, ...]]] = {
    "uniform_": (("from", "to"), (0.0, 1.0)),
    "normal_": (("mean", "std"), (0.0, 1.0)),
    "exponential_": (("lambd",), (1.0,)),
    "log_normal_": (("mean", "std"), (1.0, 2.0)),
    "cauchy_": (("median", "sigma"), (0.0, 1.0)),
    "geometric_": (("p",), (None,)),
    "random_": (("from", "to"), (None, None)),
}

_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    F.dropout: _of_f(_dropout),
    torch.dropout: _of_torch(_dropout),
    torch.dropout_: _of_torch(_dropout, inplace=True),
    torch.native_dropout: _native_dropout,
    F.dropout1d: _of_f(_features(2)),
    F.dropout2d: _of_f(_features(0)),
    F.dropout3d: _of_f(_features(4)),
    torch.feature_dropout: _of_torch(_features(0)),
    torch.feature_dropout_: _of_torch(_features(0), inplace=True),
    F.alpha_dropout: _of_f(_alpha(0), default=False),
    torch.alpha_dropout: _of_torch(_alpha(0)),
    torch.alpha_dropout_: _of_torch(_alpha(0), inplace=True),
    F.feature_alpha_dropout: _of_f(_alpha(2), default=False),
    torch.feature_alpha_dropout: _of_torch(_alpha(2)),
    torch.feature_alpha_dropout_: _of_torch(_alpha(2), inplace=True),
    torch.rand: _factory("uniform_", 0.0, 1.0),
    torch.randn: _factory("normal_", 0.0, 1.0),
    torch.randint: _randint,
    torch.rand_like: _rand_like,
    torch.randn_like: _randn_like,
    torch.randint_like: _randint_like,
    torch.normal: _normal,
    torch.bernoulli: _bernoulli,
    torch.Tensor.bernoulli: _bernoulli,
    torch.Tensor.bernoulli_: _bernoulli_,
    F.gumbel_softmax: _gumbel_softmax,
    F.rrelu: _rrelu,
    torch.rrelu: _rrelu,
    **{
        getattr(torch.Tensor, method): _in_place(method, names, defaults)
        for method, (names, defaults) in _NUMBERS.items()
    },
}

# Functions whose draws are not computed from positions.
_REFUSED: tuple[Any, ...] = (
    torch.multinomial,
    torch.Tensor.multinomial,
    torch.poisson,
    torch.binomial,
    torch._standard_gamma,
    torch._sample_dirichlet,
    torch.randperm,
)
#: All functions that draw random numbers.
RANDOM = dict.fromkeys([*_FUNCTIONS, *_REFUSED])


def call(region: ParallelRegion, watch: Watch, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Calls a random function within a region."""
    for name in _OWN:
        if kwargs.get(name) is not None:
            return func(*args, **kwargs)
    given = {name: value for name, value in kwargs.items() if name not in _OWN}
    if func in _REFUSED:
        if torch.compiler.is_compiling():
            from symm_cp.context_parallel.noise_trace import outside_graph

            return outside_graph(apart, region, watch, func, args, given)
        return apart(region, watch, func, args, given)
    result = _FUNCTIONS[func](Draw(region, watch), *args, **given)
    return func(*args, **kwargs) if result is NotImplemented else result


def apart(
    region: ParallelRegion, watch: Watch, func: Any, args: Any, kwargs: dict[str, Any]
) -> Any:
    """Draws identically on all ranks for tensors without the sequence; refuses parts of it."""
    sequences = noise.sequences_of(region, watch)
    shapes = [arg.shape for arg in args if isinstance(arg, torch.Tensor)]
    if func is torch.randperm:
        shapes = [(args[0] if args else kwargs["n"],)]
    if region.world_size > 1:
        for shape in shapes:
            if sequences.place(shape).positions is not None:
                raise NotImplementedError(
                    f"{func.__name__} within context_parallel, of shape {list(shape)}, would draw "
                    "the same numbers for each rank's part of the sequence, since ranks share a "
                    "seed: pass a generator with a different seed on each rank, or draw outside of "
                    "the context"
                )
    device = next((arg.device for arg in args if isinstance(arg, torch.Tensor)), None)
    device = device or torch.empty(0, device=kwargs.get("device")).device
    generator = torch.Generator(device).manual_seed(int(noise.drawn_seed()))
    return func(*args, **kwargs, generator=generator)
