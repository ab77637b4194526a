"""Whether a parallel program trains as one process does, and if not, where and why.

`compare_with_one_process` runs steps of a model in one process and on ranks; `symm-cp compare` runs
a whole script (commands/compare.py). Both compare, for each optimizer step: gradients by the names
of parameters, norms and weights; losses are noted if they differ. Programs need no op of this
package.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from symm_cp.testing.pool import Ranks
from symm_cp.testing.steps import Recorder, Step

#: The steps of each rank.
OfRanks: TypeAlias = Sequence[Sequence[Step]]

# The largest difference that counts as rounding, as a share of the largest number of a tensor.
_ROUNDING = {torch.float64: 1e-8, torch.float32: 2e-4}
_OF_16_BITS = 4e-2


@dataclass(frozen=True)
class Comparison:
    """The result of a comparison; `str` is the report."""

    #: The first difference; None: equal to one process.
    difference: str | None
    #: What explains it, most likely first.
    causes: tuple[str, ...]
    #: What was compared, or could not be.
    notes: tuple[str, ...]

    @property
    def equal(self) -> bool:
        """Whether the program trains as in one process."""
        return self.difference is None

    def __str__(self) -> str:
        if self.difference is None:
            return "\n".join(["equal to one process", *self.notes])
        causes = [f"likely cause: {cause}" for cause in self.causes]
        return "\n".join([f"differs: {self.difference}", *causes, *self.notes])


def compare_with_one_process(
    make_model: Callable[[DeviceMesh], torch.nn.Module],
    make_batch: Callable[[int], Any],
    step: Callable[[torch.nn.Module, Any, DeviceMesh], object],
    *,
    mesh: Mapping[str, int],
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
    options: Mapping[str, Any] | None = None,
    steps: int = 3,
    dtype: torch.dtype = torch.float64,
    timeout: float = 120.0,
    ranks: Ranks | None = None,
) -> Comparison:
    """Trains in one process and on the ranks of a CPU mesh, and compares each step.

    Args:
        make_model: returns the model for a mesh, whose dimensions all have size 1 in one process.
            The seed of random numbers is equal on all ranks, `dtype` the default.
        make_batch: returns the whole batch of a step, from its number.
        step: runs forward and backward for the whole batch, and whatever sums gradients.
        mesh: names and sizes of dimensions, as in `{"dp": 2, "tp": 2}`.
        optimizer: made with the model's parameters and `options` (a learning rate of 0.1).
        steps: how many optimizer steps to compare.
        dtype: torch's default dtype.
        timeout: of each of the two runs, in seconds.
        ranks: a pool that runs already, as the fixture `ranks` of `pytest -p symm_cp.testing`.

    Functions must be at the top level of their modules. Returns the comparison: gradients
    (DTensors, and shards of plain tensors, are put together), norms that `clip_grad_norm_` returned
    and weights. Raises `RankError` if a run fails.
    """
    pool = Ranks(0) if ranks is None else ranks
    arguments = make_model, make_batch, step, optimizer, dict(options or {"lr": 0.1}), steps, dtype
    try:
        sizes = dict.fromkeys(mesh, 1), dict(mesh)
        one, many = (
            pool.run(math.prod(size.values()), _trains, size, *arguments, timeout=timeout, seed=0)
            for size in sizes
        )
    finally:
        if ranks is None:
            pool.close()
    return compared(one[0], many)


def _trains(
    _: dist.ProcessGroup,
    mesh_sizes: dict[str, int],
    make_model: Callable[[DeviceMesh], torch.nn.Module],
    make_batch: Callable[[int], Any],
    step: Callable[[torch.nn.Module, Any, DeviceMesh], object],
    optimizer: Callable[..., torch.optim.Optimizer],
    options: dict[str, Any],
    steps: int,
    dtype: torch.dtype,
) -> list[Step]:
    torch.set_default_dtype(dtype)
    names = tuple(mesh_sizes)
    mesh = init_device_mesh("cpu", tuple(mesh_sizes.values()), mesh_dim_names=names)
    model = make_model(mesh)
    updates = optimizer(model.parameters(), **options)
    recorder = Recorder(steps)
    with recorder.recording():
        for number in range(steps):
            step(model, make_batch(number), mesh)
            updates.step()
            updates.zero_grad()
    return recorder.steps


def compared(one: Sequence[Step], ranks: OfRanks) -> Comparison:
    """Compares the steps of one process with those of several ranks."""
    counts = {len(steps) for steps in ranks}
    if not one or counts != {len(one)}:
        return Comparison(
            f"one process made {len(one)} optimizer steps, ranks {sorted(counts)}", (), ()
        )
    for number, expected in enumerate(one, 1):
        found = [steps[number - 1] for steps in ranks]
        difference = _differs(expected, found, first=number == 1)
        if difference is not None:
            causes = tuple(_causes(expected, found))
            return Comparison(f"step {number}: {difference}", causes, _losses(expected, found))
    names = {name for step in ranks for name in step[0].grads}
    note = (
        f"{len(one)} steps of {len(ranks)} ranks: gradients and weights of {len(names)} parameters"
    )
    return Comparison(None, (), (note, *_losses(one[0], [steps[0] for steps in ranks])))


@dataclass(frozen=True)
class _Found:
    """A tensor of one process, and what ranks have of it."""

    expected: torch.Tensor
    #: The tensors of the ranks that have any of it.
    parts: list[torch.Tensor]
    #: Put together; None: their shapes do not fit.
    whole: torch.Tensor | None
    #: The largest difference that counts as rounding.
    rounding: float

    @property
    def agreed(self) -> bool:
        """Whether ranks have equal tensors, or parts of one."""
        same = [part for part in self.parts if part.shape == self.expected.shape]
        return all(self._equal(part, same[0]) for part in same)

    @property
    def right(self) -> bool:
        """Whether ranks have the tensor of one process."""
        return self.agreed and self.is_right(self.whole)

    def is_right(self, tensor: torch.Tensor | None) -> bool:
        """Whether a tensor is that of one process."""
        return tensor is not None and self._equal(tensor, self.expected)

    @property
    def factor(self) -> float | None:
        """The factor between the tensors of the ranks and of one process; None: there is none."""
        if self.whole is None or not self.agreed:
            return None
        found, expected = (t.double().flatten() for t in (self.whole, self.expected))
        factor = float(found @ expected / (expected @ expected)) if expected.any() else 1.0
        return factor if self._equal(found, factor * expected) else None

    def _equal(self, one: torch.Tensor, other: torch.Tensor) -> bool:
        return one.numel() == 0 or bool((one - other).abs().max() <= self.rounding)

    def described(self) -> str:
        """Returns what differs."""
        if self.whole is None:
            shapes = [list(part.shape) for part in self.parts]
            return f"ranks have shapes {shapes} of {list(self.expected.shape)}"
        if not self.agreed:
            return "ranks disagree"
        if (factor := self.factor) is not None:
            return f"is {factor:.4g} times that of one process"
        largest = self.expected.abs().max()
        return f"differs by {float((self.whole - self.expected).abs().max() / largest):.1e} of it"


def _found(
    expected: Mapping[str, torch.Tensor | None], of_ranks: Sequence[Mapping[str, Any]]
) -> dict[str, _Found]:
    """Returns what ranks have of each tensor, by its name."""
    found = {}
    sizes = {n: float(t.abs().max()) for n, t in expected.items() if t is not None and t.numel()}
    for name, tensor in expected.items():
        parts = [each[name] for each in of_ranks if each.get(name) is not None]
        if tensor is None and not parts:
            continue
        if tensor is None:
            tensor = torch.zeros_like(parts[0])
        parts = parts or [torch.zeros_like(tensor)]
        # Gradients that are zero but for rounding are compared with the largest of all.
        largest = max(sizes.get(name, 0.0), 1e-4 * max(sizes.values(), default=0.0))
        rounding = largest * _ROUNDING.get(tensor.dtype, _OF_16_BITS)
        found[name] = _Found(tensor, parts, _joined(tensor, parts), rounding)
    return found


def _joined(expected: torch.Tensor, parts: list[torch.Tensor]) -> torch.Tensor | None:
    """Returns the tensor that parts add up to: the first one, or shards along a dimension."""
    if parts[0].shape == expected.shape:
        return parts[0]
    for dim in range(expected.dim()):
        for count in range(2, len(parts) + 1):
            shards = parts[:count]
            others = {s.shape[:dim] + s.shape[dim + 1 :] for s in shards if s.dim() > dim}
            lengths = sum(s.shape[dim] for s in shards if s.dim() > dim)
            if others == {expected.shape[:dim] + expected.shape[dim + 1 :]} and (
                lengths == expected.shape[dim]
            ):
                return torch.cat(shards, dim)
    if all(part.dim() == 1 for part in parts):  # FSDP1 cuts flat parameters, and pads the last
        flat = torch.cat(parts)
        if 0 <= flat.numel() - expected.numel() < len(parts):
            return flat[: expected.numel()].view(expected.shape)
    return None


def _losses(expected: Step, found: Sequence[Step]) -> tuple[str, ...]:
    """Returns a note if the ranks' losses are not the loss of one process, nor add up to it."""
    one, of_ranks = sum(expected.losses), [sum(step.losses) for step in found if step.losses]
    if not of_ranks:
        return ()
    total, count = sum(of_ranks), sum(len(step.losses) for step in found)
    means = total / len(of_ranks), total / count  # of ranks, and of parts of a batch
    if any(math.isclose(each, one, rel_tol=1e-3) for each in (total, *means)):
        return ()
    shown = ", ".join(f"{each:.4g}" for each in of_ranks)
    return (f"losses: {shown} on ranks, {one:.4g} in one process",)


def _differs(expected: Step, found: Sequence[Step], *, first: bool) -> str | None:
    """Returns the first difference of a step."""
    kinds = [("weights before the step", "before")] if first else []
    for title, kind in (*kinds, ("gradient", "grads"), ("weights after the step", "after")):
        of_ranks = [getattr(step, kind) for step in found]
        tensors = _found(getattr(expected, kind), of_ranks)
        wrong = [name for name, each in tensors.items() if not each.right]
        if kind == "grads" and (norms := _norms(expected, found)):
            return norms
        if wrong:
            others = f"; so do {len(wrong) - 1} of {len(tensors) - 1} others" * (len(wrong) > 1)
            return f"{title} of {wrong[0]}: {tensors[wrong[0]].described()}{others}"
    return None


def _norms(expected: Step, found: Sequence[Step]) -> str | None:
    for step in found:
        pair = torch.tensor(step.norms), torch.tensor(expected.norms)
        if pair[0].shape == pair[1].shape and not torch.allclose(*pair, rtol=1e-3):
            return f"norm of gradients: {step.norms}, in one process {expected.norms}"
    return None


def _causes(expected: Step, found: Sequence[Step]) -> list[str]:
    """Returns the known causes that fit a step that differs, most likely first."""
    weights = _found(expected.before, [step.before for step in found])
    if not all(each.right for each in weights.values()):
        return ["ranks begin with other weights: set a seed before the model is made, or load them"]
    causes = []
    if chance := max(expected.dropout, *(step.dropout for step in found)):
        causes.append(f"dropout of {chance:g} draws other numbers: set it to 0 to compare")
    labels = sum(expected.labels), [sum(step.labels) for step in found]
    causes += [*_labels_counted(*labels), *_gradients_counted(expected, found)]
    return causes or list(_means_of_means(*labels))


def _gradients_counted(expected: Step, found: Sequence[Step]) -> Iterator[str]:
    """Yields what was not added or divided as in one process."""
    ranks = len(found)
    grads = _found(expected.grads, [step.grads for step in found])
    factors = {name: each.factor for name, each in grads.items() if each.expected.any()}
    common = next(iter(factors.values()), None)
    if common is not None and all(
        factor is not None and math.isclose(factor, common, rel_tol=1e-3)
        for factor in factors.values()
    ):
        yield from _of_all(common, ranks, expected, found)
        return
    for how, reduce in (("sum", torch.Tensor.sum), ("mean", torch.Tensor.mean)):
        apart = [
            name
            for name, each in grads.items()
            if not each.agreed and each.is_right(reduce(torch.stack(each.parts), 0))
        ]
        if apart:
            yield (
                f"ranks have gradients of their own of {_listed(apart)}, whose {how} is right: an "
                "all-reduce over the ranks is missing"
            )
    for times in range(2, ranks + 1):
        several = [n for n, factor in factors.items() if factor and math.isclose(factor, times)]
        parts = [n for n, factor in factors.items() if factor and math.isclose(factor, 1 / times)]
        if several:
            yield f"the gradient of {_listed(several)} is counted {times} times"
        if parts:
            yield f"the gradient of {_listed(parts)} is divided by {times}"


def _of_all(factor: float, ranks: int, expected: Step, found: Sequence[Step]) -> Iterator[str]:
    """Yields why all gradients are `factor` times those of one process."""
    if (norms := _norms(expected, found)) and math.isclose(factor, 1, rel_tol=1e-3):
        factor = found[0].norms[0] / expected.norms[0]  # before they were clipped
    elif norms:
        yield f"clipped by another {norms}: each rank took the norm of its part"
        return
    if math.isclose(factor, ranks, rel_tol=1e-3):
        yield (
            f"counted {ranks} times: gradients are added over the ranks, and each loss is a mean "
            "of the whole batch already: average them, or divide the loss by the number of ranks"
        )
    elif math.isclose(factor * ranks, 1, rel_tol=1e-3):
        yield (
            f"divided by {ranks} once too often: gradients are averaged over the ranks, and each "
            "loss is a part of the sum of the whole batch already"
        )
    elif not math.isclose(factor, 1, rel_tol=1e-3):
        yield f"all gradients are scaled by {factor:.4g}: losses are divided by another number"


def _labels_counted(whole: int, of_ranks: list[int]) -> Iterator[str]:
    """Yields what is wrong with the number of labels that count."""
    counted = sum(of_ranks)
    if not whole or counted % whole == 0:
        return
    told = f"ranks count {counted} labels, one process {whole}"
    if counted < whole:
        yield f"{told}: labels are shifted within each rank's part, which loses one at each cut"
    else:
        yield f"{told}: padding is counted, or labels at cuts twice"


def _means_of_means(whole: int, of_ranks: list[int]) -> Iterator[str]:
    if 0 < sum(of_ranks) == whole and len(set(of_ranks)) > 1:
        yield (
            f"ranks have {of_ranks} labels that count, and a mean of their means weighs them "
            "equally: divide each rank's sum by the number on all ranks"
        )


def _listed(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} others" if len(names) > 3 else "")
