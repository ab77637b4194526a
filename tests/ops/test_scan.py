"""`scan_states`: what each rank begins with, by decays and by matrices, and its gradients."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist

import symm_cp
from symm_cp.testing import Ranks
from tests import device
from tests.exhaustive import exhaustive
from tests.ops.refusals import Wrong, check_disagreements, check_refusals

pytestmark = device.devices(*device.NAMES)

OPS = torch.ops.symm_mem
Tensors = list[torch.Tensor]


def scanned(states: Tensors, factors: Tensors, *, matrices: bool, reverse: bool) -> Tensors:
    """The state that each rank begins with, computed in one process."""
    order = list(range(len(states)))
    begins: dict[int, torch.Tensor] = {}
    begin = states[0] * 0
    for rank in reversed(order) if reverse else order:
        begins[rank] = begin
        carried = factors[rank] @ begin if matrices else factors[rank] * begin
        begin = carried + states[rank]
    return [begins[rank] for rank in order]


def given(
    W: int, shape: list[int], factor: list[int], dtype: torch.dtype
) -> tuple[Tensors, Tensors]:
    """States, and factors that do not make them grow; the same on all ranks."""
    generator = torch.Generator(device.name()).manual_seed(sum(shape) * W)
    wide = torch.complex128 if dtype.is_complex else torch.float64

    def make(shape: list[int], scale: float) -> Tensors:
        made = [scale * torch.randn(shape, generator=generator, dtype=wide) for _ in range(W)]
        return [t.to(dtype).to(wide).requires_grad_() for t in made]

    return make(shape, 1.0), make(factor, factor[-1] ** -0.5)


def mine(tensors: Tensors, rank: int, dtype: torch.dtype) -> torch.Tensor:
    return tensors[rank].detach().to(dtype).requires_grad_()


def scan(
    state: torch.Tensor, factor: torch.Tensor, matrices: bool, **kwargs: object
) -> torch.Tensor:
    chosen = {"transition" if matrices else "decay": factor}
    return symm_cp.scan_states(state, **chosen, **kwargs)  # type: ignore[arg-type]


CASES = [
    ([2, 3, 4, 5], [2, 3, 4, 4], True),
    ([4, 5], [4, 4], True),
    ([2, 3, 4, 5], [2, 3, 1, 1], False),
    ([7], [7], False),
    ([3, 0], [3, 3], True),
    # Several pieces: 3 of one or two heads each, 5 of numbers that no head divides.
    ([5, 64, 150], [5, 64, 64], True),
    ([5, 83, 200], [5, 1, 200], False),
]


def scans(group: dist.ProcessGroup, dtypes: list[torch.dtype]) -> None:
    W, rank = group.size(), group.rank()
    for dtype in dtypes:
        for shape, factor, matrices in CASES:
            for reverse in (False, True):
                states, factors = given(W, shape, factor, dtype)
                wanted = scanned(states, factors, matrices=matrices, reverse=reverse)
                own, own_factor = (mine(t, rank, dtype) for t in (states, factors))
                found = scan(own, own_factor, matrices, group=group, reverse=reverse)
                # Sums of up to 64 products, W of them in a row.
                eps = max(torch.finfo(dtype).eps, 64 * torch.finfo(torch.float32).eps)
                if dtype in (torch.float64, torch.complex128):
                    eps = 64 * torch.finfo(dtype).eps
                close = {"rtol": 4 * eps, "atol": 4 * eps}
                torch.testing.assert_close(found.to(wanted[rank].dtype), wanted[rank], **close)
                weights = [torch.ones_like(w) * (1 + r) for r, w in enumerate(wanted)]
                want = torch.autograd.grad(wanted, [*states, *factors], weights, allow_unused=True)
                got = torch.autograd.grad(found, [own, own_factor], weights[rank].to(dtype))
                scale = 2 * W * (shape[-1] if matrices else max(shape) ** 2)
                for has, needs in zip(got, (want[rank], want[W + rank]), strict=True):
                    needs = torch.zeros_like(has) if needs is None else needs
                    torch.testing.assert_close(
                        has.to(states[0].dtype), needs.to(states[0].dtype),
                        rtol=8 * eps, atol=scale * eps,
                    )  # fmt: skip


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_rank_begins_with_what_comes_before(ranks: Ranks, world_size: int) -> None:
    ranks.run(world_size, scans, [torch.float64])


@exhaustive
def test_every_dtype(ranks: Ranks) -> None:
    kinds = [torch.float32, torch.bfloat16, torch.float16, torch.complex64, torch.complex128]
    ranks.run(3, scans, kinds)


@pytest.mark.ranks(3)
def test_runs_have_the_same_bits(group: dist.ProcessGroup) -> None:
    states, factors = given(group.size(), [5, 64, 150], [5, 64, 64], torch.float32)
    own, factor = (mine(t, group.rank(), torch.float32) for t in (states, factors))
    results = [symm_cp.scan_states(own, transition=factor, group=group) for _ in range(3)]
    assert all(torch.equal(results[0], other) for other in results)


@pytest.mark.ranks(2)
def test_refuses_what_does_not_fit(group: dist.ProcessGroup) -> None:
    state, matrix = torch.zeros(2, 3, 4), torch.zeros(2, 3, 3)

    def scans(state: torch.Tensor = state, **factor: Any) -> torch.Tensor:
        return symm_cp.scan_states(state, **factor or {"transition": matrix}, group=group)

    wrong: list[Wrong] = [
        (ValueError, "exactly one of decay and transition .* neither", {"decay": None}),
        (ValueError, "exactly one .* both", {"decay": state, "transition": matrix}),
        (ValueError, r"transition \[2, 3, 4\] must be \[2, 3, 3\]", {"transition": state}),
        (ValueError, r"decay \[2, 3, 3\] must have the dimensions", {"decay": matrix}),
        (TypeError, r"transition is torch\.float64", {"transition": matrix.double()}),
        (TypeError, r"state is torch\.int64",
         {"state": state.long(), "transition": matrix.long()}),
    ]  # fmt: skip
    check_refusals(group, scans, wrong, "scan_states")
    check_disagreements(scans, [{"decay": state, "reverse": group.rank() == 1}])


@device.devices("cpu")
@pytest.mark.ranks(4)
def test_calls_after_a_failure(group: dist.ProcessGroup) -> None:
    """A rank of a chain fails; later ranks that do not hear from it directly are told, too."""
    from symm_cp.group.memory import resolve
    from symm_cp.runtime.relay import relay

    own, like = resolve(group), torch.zeros(1)
    for failing in range(group.size()):

        def step(piece: int, received: object, passed: object, failing: int = failing) -> None:
            if group.rank() == failing and piece == 1:
                raise ValueError("for a test")

        # Ranks before it in the chain may have finished already.
        needs_it = group.rank() >= failing
        raises = pytest.raises((ValueError, RuntimeError), match="for a test")
        with raises if needs_it else contextlib.suppress(RuntimeError):
            relay(own, step, like, [(1,)] * 3, b"relay")
        state = torch.ones(2)
        found = symm_cp.scan_states(state, decay=state, group=group)
        assert torch.equal(found, state * group.rank())
