"""The low-contention collectives that write to a tensor of the caller."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as torch_symm_mem

import symm_cp
from tests.device import devices
from tests.exhaustive import some
from tests.ops.calls import OPS, waited
from tests.ops.refusals import Wrong, check_refusals

GATHER = OPS._low_contention_all_gather_out
SCATTER = OPS._low_contention_reduce_scatter_out
LENGTHS = (0, 3, 5_000, 40_000, 300_000)


def place(length: int, dtype: torch.dtype, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Memory for a tensor, symmetric if a group is given."""
    if group is None:
        return torch.empty(length, dtype=dtype)
    tensor = torch_symm_mem.empty(length, dtype=dtype, device="cpu")
    if length > 0:
        symm_cp.read_in_place(tensor, group)
    return tensor


@devices("cpu", "simulated")
@pytest.mark.parametrize(
    ("world_size", "dtype"),
    some(
        (2, torch.float32), (3, torch.bfloat16),
        of=[(W, t) for W in (1, 2, 3, 4) for t in (torch.float32, torch.bfloat16, torch.int16)],
    ),
)  # fmt: skip
@pytest.mark.ranks
def test_values(group: dist.ProcessGroup, world_size: int, dtype: torch.dtype) -> None:
    W, rank, name = group.size(), group.rank(), group.group_name
    for length in LENGTHS:
        for of in (None, group):
            given = torch.randint(-5, 5, (W, length)).to(dtype)
            # The shard outside the output, then at its place in the output.
            shard, out = place(length, dtype, of), place(length * W, dtype, of)
            found = GATHER(shard.copy_(given[rank]), name, out)
            assert found is out
            assert torch.equal(waited(out), given.flatten())
            if of is not None and length > 0:
                symm_cp.read_in_place(out.chunk(W)[rank], group)  # where it is by address
            out.zero_().view(W, length)[rank] = given[rank]
            waited(GATHER(out.view(W, length)[rank], name, out))
            assert torch.equal(out, given.flatten())
            whole, part = place(length * W, dtype, of), torch.empty(length, dtype=dtype)
            SCATTER(whole.copy_(given.flatten() * (rank + 1)), "sum", name, part)
            assert torch.equal(waited(part), given[rank] * (W * (W + 1) // 2))
            dist.barrier(group)  # before memory that peers read is freed


@pytest.mark.parametrize("backend", some("aot_eager", of=("aot_eager", "inductor")))
@pytest.mark.ranks(2)
def test_compiled(group: dist.ProcessGroup, backend: str) -> None:
    W, name = group.size(), group.group_name

    def run(x: torch.Tensor) -> list[torch.Tensor]:
        gathered, part = x.new_empty(len(x) * W, 3), x.new_empty(len(x) // W, 3)
        waited(GATHER(x * 2, name, gathered))
        waited(SCATTER(x + 1, "avg", name, part))
        return [gathered + 1, part * 2]

    torch._dynamo.reset()
    x = torch.randn(2 * W, 3)
    optimized = torch.compile(run, fullgraph=True, backend=backend)
    for found, expected in zip(optimized(x), run(x), strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.ranks(2)
def test_errors(group: dist.ProcessGroup) -> None:
    W, rank, name = group.size(), group.rank(), group.group_name
    x, out, leaf = torch.ones(4), torch.ones(4 * W), torch.ones(4, requires_grad=True)
    spaced = torch.ones(4 * W, 2)[:, 0]
    cases: list[Wrong] = [
        (ValueError, r"all_gather_out: out is torch.float32 \[4\], needs torch.float32 \[8\]",
         lambda: GATHER(x, name, x.clone())),
        (ValueError, r"all_gather_out: out is torch.float64 \[8\], needs torch.float32",
         lambda: GATHER(x, name, out.double())),
        (ValueError, r"all_gather_out: out must be contiguous, has shape \[8\] and strides \[2\]",
         lambda: GATHER(x, name, spaced)),
        (ValueError, rf"tensor must not share memory with out, unless it is part {rank} of it",
         lambda: GATHER(out[2:6], name, out)),
        (ValueError, r"reduce_scatter_out: out is torch.float32 \[8\], needs torch.float32 \[4\]",
         lambda: SCATTER(out, "sum", name, out.clone())),
        (ValueError, r"reduce_scatter_out: tensor must not share memory with out",
         lambda: SCATTER(out, "sum", name, out[:4])),
        (ValueError, r"reduce_op='max' must be 'sum' or 'avg'",
         lambda: SCATTER(out, "max", name, x)),
    ]  # fmt: skip
    check_refusals(group, lambda: waited(GATHER(x, name, out)).clone(), cases)
    for op, call in (
        ("_low_contention_all_gather_out", lambda: GATHER(leaf, name, out)),
        ("_low_contention_reduce_scatter_out", lambda: SCATTER(out, "sum", name, leaf)),
    ):
        with pytest.raises(NotImplementedError, match=f"{op}: has no gradient"):
            call()
