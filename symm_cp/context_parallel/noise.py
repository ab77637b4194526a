"""Random numbers within a region: the same at every world size and in every layout.

Each draw takes one seed from torch's default CPU generator, whatever its shape: the ranks'
generators stay in step though ranks hold different numbers of positions, and all ranks decide
identically by single numbers (whether to skip a layer). Numbers then follow from seed and position
(ops/position_noise.py). Masks of tokens that a router picked do not advance the generator, since
the number of experts that a rank calls depends on its tokens.

In graphs a draw is an op, which finds the place of its numbers when it runs.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch.distributed.distributed_c10d import _resolve_process_group

from symm_cp.context_parallel.guards import Watch, current
from symm_cp.context_parallel.load_balancers import LoadBalancer
from symm_cp.context_parallel.noise_places import Seen, Sequences
from symm_cp.context_parallel.refusals import reporting_to_peers
from symm_cp.context_parallel.region import ParallelRegion
from symm_cp.cuda.kept import capturing
from symm_cp.ops import position_noise
from symm_cp.ops.attention.layouts import decoded, encoded
from symm_cp.ops.position_noise import Place, mixed
from symm_cp.schedule.layout import sequential

_OP = "context_parallel"
_MOST_SEEDS = 1 << 16  # seeds of forward passes that a region records; the oldest are dropped

_library = torch.library.Library("symm_cp", "FRAGMENT")
_WITHIN = "Tensor seed, Tensor layouts, str group_name"
_library.define(
    f"dropout_mask_within(Tensor x, float p, int dims, bool activations, int part, {_WITHIN})"
    " -> Tensor"
)
_library.define(
    "noise_within(SymInt[] shape, ScalarType dtype, Device device, str method, float[] args, "
    f"bool alike, {_WITHIN}) -> Tensor"
)


# --- seeds -------------------------------------------------------------------------------------


class _Apart(threading.local):
    """Seeds for draws that only some ranks may make: they do not advance the generator.

    A seed follows from the generator's state and the number of such draws since it last changed,
    counted separately in backward passes, which recompute with the state of the forward pass.
    """

    def __init__(self) -> None:
        self.state = -1
        self.counts = [0, 0]

    def forget(self) -> None:
        self.state = -1

    def seed(self) -> int:
        before = torch.random.get_rng_state()
        state = int(torch.randint(2**62, (), device="cpu"))
        torch.random.set_rng_state(before)
        if state != self.state:
            self.state, self.counts = state, [0, 0]
        recomputing = int(_recomputing())
        self.counts[recomputing] += 1
        return mixed(state, self.counts[recomputing])


_apart = _Apart()


def drawn_seed() -> torch.Tensor:
    """Draws a seed from torch's default CPU generator, as torch's own dropout does."""
    if not torch.compiler.is_compiling():
        _apart.forget()
    return torch.randint(2**62, (1,), device="cpu")


def seed_of_dropout() -> torch.Tensor:
    """Draws a seed; raises `RuntimeError` if a checkpoint would recompute with another seed."""
    seed = drawn_seed()
    watch = None if torch.compiler.is_compiling() else current()
    if watch is None or type(seed) is not torch.Tensor:
        return seed
    number = int(seed)
    if not _recomputing():
        watch.seeds[number] = None
        if len(watch.seeds) > _MOST_SEEDS:
            del watch.seeds[next(iter(watch.seeds))]
    elif watch.seeds and number not in watch.seeds:
        raise RuntimeError(
            f"{_OP}: a checkpoint recomputes a dropout with a seed that the forward pass did not "
            "draw, so its gradients would belong to other masks: leave out "
            "preserve_rng_state=False"
        )
    return seed


def seed_of_attention(region: ParallelRegion, device: torch.device) -> torch.Tensor:
    """Draws the seed of a dropout in attention; raises `ValueError` if ranks' seeds differ.

    Collective for the first seed that a region draws. Callers report its errors to the peers.
    """
    seed = seed_of_dropout()
    watch = None if torch.compiler.is_compiling() else current()
    if watch is not None and type(seed) is torch.Tensor:
        _check_seed(region, watch, int(seed), device)
    return seed


def _recomputing() -> bool:
    """Whether a backward pass is running."""
    return torch._C._current_graph_task_id() != -1


def _check_seed(region: ParallelRegion, watch: Watch, seed: int, device: torch.device) -> None:
    """Raises `ValueError` on all ranks if their first seeds differ. Collective, once.

    The host waits for the device.
    """
    if watch.seeded or region.world_size == 1 or region.kind is not None:
        return
    if device.type == "meta" or capturing(device):
        return
    watch.seeded = True
    ranks = encoded((sequential(region.world_size, region.world_size),))
    own = torch.tensor([[seed]], dtype=torch.int64, device=device)
    with torch.no_grad():
        seeds = torch.ops.symm_mem._gather_sequence(own, ranks, region.world_size, region.group)
    seeds = seeds.flatten().tolist()
    others = [rank for rank, other in enumerate(seeds) if other != seeds[0]]
    if others:
        raise ValueError(
            f"{_OP}: ranks {others} draw other random numbers than rank 0, so dropout or skipped "
            "layers would differ from rank to rank: give all ranks of the mesh the same seed, "
            "torch.manual_seed(seed), and draw equally many numbers on each before"
        )


# --- draws -------------------------------------------------------------------------------------


def dropout_mask(
    region: ParallelRegion,
    watch: Watch,
    x: torch.Tensor,
    p: float,
    *,
    dims: int = 0,
    part: int = 0,
) -> torch.Tensor:
    """Returns the mask of a dropout of `x`: true for elements kept, with probability 1 - p.

    With `dims`, the mask has only the first `dims` dimensions, to be broadcast to the others.
    `part` numbers this rank's part of a tensor that is also sharded in other ways.
    """
    activations = not isinstance(x, torch.nn.Parameter)
    if torch.compiler.is_compiling():
        layouts = region.layouts
        if layouts is None:
            from symm_cp.context_parallel.noise_trace import outside_graph

            return outside_graph(dropout_mask, region, watch, x, p, dims=dims, part=part)
        return torch.ops.symm_cp.dropout_mask_within(  # type: ignore[no-any-return]
            x.detach(), p, dims, activations, part, drawn_seed(), layouts, region.group
        )
    shape = _shared(x.shape, dims)
    if not activations:
        place = position_noise.without_sequence(shape)
    else:
        place = sequences_of(region, watch).place(x.shape, activations=True, dims=dims)
    if place.part:
        seed = _apart.seed()
    else:
        drawn = seed_of_dropout()
        if type(drawn) is not torch.Tensor:  # a fake tensor: nothing is computed
            return torch.empty(shape, dtype=torch.bool, device=x.device)
        seed = int(drawn)
        reporting_to_peers(region.peers, _check_seed, region, watch, seed, x.device)
    return position_noise.dropout_mask(shape, x.device, p, seed, place.of_part(part))


def noise(
    region: ParallelRegion,
    watch: Watch,
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    method: str,
    args: Sequence[float],
    *,
    alike: bool = False,
) -> torch.Tensor:
    """Returns random numbers like `torch.empty(shape).<method>(*args)`.

    `alike`: all ranks draw the same numbers: no dimension is the sequence, whatever its length.
    """
    if torch.compiler.is_compiling():
        layouts = region.layouts
        if layouts is None:
            from symm_cp.context_parallel.noise_trace import outside_graph

            return outside_graph(
                noise, region, watch, shape, dtype, device, method, args, alike=alike
            )
        return torch.ops.symm_cp.noise_within(  # type: ignore[no-any-return]
            shape, dtype, device, method, args, alike, drawn_seed(), layouts, region.group
        )
    drawn = drawn_seed()
    if type(drawn) is not torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)
    seed = int(drawn)
    reporting_to_peers(region.peers, _check_seed, region, watch, seed, device)
    place = position_noise.without_sequence(shape)
    if not alike:
        place = sequences_of(region, watch).place(shape)
    with torch.no_grad():
        return position_noise.noise(shape, dtype, device, method, args, seed, place)


def saw_queries(query: torch.Tensor) -> None:
    """Records the samples and this rank's length from attention's queries. Not in graphs."""
    watch = None if torch.compiler.is_dynamo_compiling() else current()
    if watch is not None:
        _seen_in(watch).saw_queries(query)


def saw_samples(layouts: torch.Tensor, tokens: int) -> None:
    """Like `saw_queries`, for attention to samples in a row; `layouts` are the op's argument."""
    watch = None if torch.compiler.is_compiling() else current()
    if watch is not None and type(layouts) is torch.Tensor and tokens:
        _seen_in(watch).saw_samples(max(1, -int(layouts[0])), tokens)


def _seen_in(watch: Watch) -> Seen:
    if watch.seen is None:  # made lazily: Dynamo, which traces Watch(), cannot make it
        watch.seen = Seen()
    return watch.seen


def sequences_of(region: ParallelRegion, watch: Watch) -> Sequences:
    """Returns the sequences of a region, outside of graphs."""
    return Sequences(
        region.group,
        region.rank,
        region.world_size,
        region.balancers,
        region.choose,
        _seen_in(watch),
    )


def _shared(shape: Sequence[int], dims: int) -> list[int]:
    return [size if not dims or dim < dims else 1 for dim, size in enumerate(shape)]


# --- ops of graphs -----------------------------------------------------------------------------


def _sequences_in_graph(layouts: torch.Tensor, group_name: str) -> Sequences:
    group = _resolve_process_group(group_name)  # type: ignore[arg-type]
    known = decoded(_OP, layouts, group.size())
    balancers = [LoadBalancer(layout) for layout in known]
    watch = current()
    seen = _seen_in(watch) if watch is not None and watch.group == group_name else None
    return Sequences(group_name, group.rank(), group.size(), balancers, seen=seen)


def _dropout_mask_kernel(
    x: torch.Tensor,
    p: float,
    dims: int,
    activations: bool,
    part: int,
    seed: torch.Tensor,
    layouts: torch.Tensor,
    group_name: str,
) -> torch.Tensor:
    shape = _shared(x.shape, dims)
    place: Place = position_noise.without_sequence(shape)
    if activations:
        found = _sequences_in_graph(layouts, group_name)
        place = found.place(x.shape, activations=True, dims=dims)
    return position_noise.dropout_mask(shape, x.device, p, int(seed), place.of_part(part))


def _noise_kernel(
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    method: str,
    args: Sequence[float],
    alike: bool,
    seed: torch.Tensor,
    layouts: torch.Tensor,
    group_name: str,
) -> torch.Tensor:
    place = position_noise.without_sequence(shape)
    if not alike:
        place = _sequences_in_graph(layouts, group_name).place(shape)
    return position_noise.noise(shape, dtype, device, method, args, int(seed), place)


def _fake_dropout_mask(
    x: torch.Tensor, p: float, dims: int, *_: object, **__: object
) -> torch.Tensor:
    return x.new_empty(_shared(x.shape, dims), dtype=torch.bool)


def _fake_noise(
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    *_: object,
    **__: object,
) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=device)


_library.impl("dropout_mask_within", _dropout_mask_kernel, "CompositeExplicitAutograd")
_library.impl("noise_within", _noise_kernel, "CompositeExplicitAutograd")
torch.library.register_fake("symm_cp::dropout_mask_within", _fake_dropout_mask, lib=_library)
torch.library.register_fake("symm_cp::noise_within", _fake_noise, lib=_library)
