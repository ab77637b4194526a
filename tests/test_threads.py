"""Several threads in each rank: work is divided, and no bit of a result changes."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import symm_cp
from symm_cp import env, native
from symm_cp.testing import Ranks
from tests.exhaustive import exhaustive, some
from tests.ops.calls import symmetric
from tests.test_run import symm_cp_in

OPS = torch.ops.symm_mem
#: Numbered as in csrc/base/team.h.
ONE, WHERE_CORES_SUFFICE, ALL = 0, 1, 2
DTYPES = (
    *(torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64),
    *(torch.uint8, torch.int16, torch.int64),
)
MIB = 1 << 20
Tensors = dict[str, torch.Tensor]


@contextmanager
def threads(count: int, choice: int = ALL, background: int = 1) -> Iterator[Callable[[], int]]:
    """Has ranks divide work among `count` threads; yields a function that counts divisions."""
    library, before = native.load(), torch.get_num_threads()
    torch.set_num_threads(count)
    library.symm_cp_set_threads(choice, background)
    start = library.symm_cp_divisions()
    try:
        yield lambda: library.symm_cp_divisions() - start
    finally:
        library.symm_cp_set_threads(env.threads(), env.background_threads())
        torch.set_num_threads(before)


def numbers(length: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(length, dtype=dtype, generator=generator)
    return torch.randint(0, 100, (length,), generator=generator).to(dtype)


def ops(group: dist.ProcessGroup, x: torch.Tensor, in_place: torch.Tensor) -> Tensors:
    """Ops on symmetric memory, with plain and symmetric inputs."""
    name, W = group.group_name, group.size()
    found = {
        "one_shot": OPS.one_shot_all_reduce(x, "sum", name),
        "one_shot, in place": OPS.one_shot_all_reduce(in_place, "sum", name),
        "two_shot": OPS.two_shot_all_reduce_(x.clone(), "sum", name),
    }
    rows = x[: len(x) // W * W].view(W, -1)
    gathered = OPS._low_contention_all_gather(rows, name)
    found["gather"] = torch.ops._c10d_functional.wait_tensor(gathered)
    if x.dtype.is_floating_point:
        scattered = OPS._low_contention_reduce_scatter(rows, "avg", name)
        found["scatter"] = torch.ops._c10d_functional.wait_tensor(scattered)
        heads = x[: len(x) // (8 * W) * 8 * W].view(1, -1, 2 * W, 4).transpose(1, 2)
        found["heads"] = symm_cp.sequence_to_heads(heads, group=group)
        found["back"] = symm_cp.heads_to_sequence(found["heads"], group=group)
    return found


def products(group: dist.ProcessGroup, x: torch.Tensor) -> Tensors:
    """A matmul of few terms, whose bits do not depend on threads, with a bias."""
    a, b = x[:1024].reshape(512, 2), x[1024:2048].reshape(2, 512)
    product = OPS.fused_matmul_all_reduce(a, b, x[:512], "sum", group.group_name)
    return {"matmul": product}


def collectives(group: dist.ProcessGroup, x: torch.Tensor, asynchronous: bool) -> Tensors:
    """torch.distributed over this package's backend."""
    W = group.size()
    total, whole = x.clone(), x.new_empty(W * len(x))
    cut = x[: len(x) // W * W].clone()
    part, turned, sent = cut.new_empty(len(cut) // W), torch.empty_like(cut), x.clone()
    calls = [
        dist.all_reduce(total, group=group, async_op=asynchronous),
        dist.all_gather_into_tensor(whole, x, group=group, async_op=asynchronous),
        dist.reduce_scatter_tensor(part, cut, group=group, async_op=asynchronous),
        dist.all_to_all_single(turned, cut, group=group, async_op=asynchronous),
        dist.broadcast(sent, group_src=0, group=group, async_op=asynchronous),
    ]
    for call in calls if asynchronous else ():
        call.wait()
    found = {"total": total, "whole": whole, "part": part, "turned": turned, "sent": sent}
    return {f"{name}, {asynchronous=}": tensor for name, tensor in found.items()}


def same_bits(
    group: dist.ProcessGroup, dtype: torch.dtype, nbytes: int, counts: tuple[int, ...]
) -> None:
    over = dist.new_group(list(range(group.size())), backend="symm_cp")
    seed = random.randrange(1 << 30)
    x = numbers(nbytes // dtype.itemsize + 3, dtype, seed + group.rank())
    in_place = symmetric(x, group)

    def run() -> Tensors:
        found = ops(group, x, in_place)
        if dtype == torch.float32:
            found |= products(group, x)
        return found | collectives(over, x, False) | collectives(over, x, True)

    with threads(1) as divisions:
        want = run()
        assert divisions() == 0
    for count in counts:
        with threads(count, background=count) as divisions:
            found = run()
            assert divisions() > 0, "nothing was divided"
        for name, tensor in found.items():
            bits = tensor.contiguous().view(torch.uint8)
            assert torch.equal(bits, want[name].contiguous().view(torch.uint8)), (name, count)
    dist.destroy_process_group(over)


@pytest.mark.parametrize("dtype", some(torch.float32, of=DTYPES), ids=str)
@pytest.mark.parametrize("world_size", some(2, of=[1, 2, 3, 4]))
def test_bits_do_not_depend_on_threads(ranks: Ranks, world_size: int, dtype: torch.dtype) -> None:
    ranks.run(world_size, same_bits, dtype, 400_000, (2,))


@exhaustive
def test_more_threads_than_cores_and_several_pieces(ranks: Ranks) -> None:
    ranks.run(2, same_bits, torch.bfloat16, 4_000_000, (5, 2))


OF_THE_ENVIRONMENT = """
import torch, torch.distributed as dist
from symm_cp import native
dist.init_process_group()
rank, W = dist.get_rank(), dist.get_world_size()
assert torch.get_num_threads() == 2
x = torch.arange(300_003, dtype=torch.float64)
parts = [x * (r + 1) for r in range(W)]
total, whole, part = parts[rank].clone(), x.new_empty(W * len(x)), x.new_empty(len(x) // 3)
own = torch.cat(parts)[: W * len(part)]
dist.all_reduce(total)
dist.all_gather_into_tensor(whole, parts[rank])
dist.reduce_scatter_tensor(part, own)
turned = torch.empty_like(own)
dist.all_to_all_single(turned, own)
sent = parts[rank].clone()
dist.broadcast(sent, 0)
mine = own.view(W, -1)[rank]
assert torch.equal(total, sum(parts)) and torch.equal(whole, torch.cat(parts))
assert torch.equal(part, W * mine) and torch.equal(turned, mine.repeat(W))
assert torch.equal(sent, x)
assert native.load().symm_cp_divisions() > 0
print("right")
dist.destroy_process_group()
"""


def test_collectives_of_a_program_with_two_threads_by_the_environment(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(OF_THE_ENVIRONMENT)
    run = symm_cp_in(
        tmp_path,
        *("run", "--nproc-per-node", "2", "train.py"),
        OMP_NUM_THREADS="2",
        SYMM_CP_THREADS="all",
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("right") == 2


@pytest.mark.parametrize("world_size", some(3, of=[2, 3, 4]))
@pytest.mark.ranks
def test_ranks_with_different_numbers_of_threads(group: dist.ProcessGroup, world_size: int) -> None:
    with threads(1 + group.rank()):
        for length in (100_000, 700_001):
            x = numbers(length, torch.float32, group.rank())
            total = OPS.one_shot_all_reduce(x, "sum", group.group_name)
            want = sum(numbers(length, torch.float32, rank) for rank in range(group.size()))
            assert torch.equal(total, want)
            torch.set_num_threads(3 - group.rank() % 2)


def divides(group: dist.ProcessGroup, count: int, cores: list[int], choice: int) -> int:
    """Returns how often a rank on these cores divides in its later calls."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    mine = dist.new_group(list(range(group.size())))  # a group that no earlier test has used
    x = torch.ones(1 << 18)
    with threads(count, choice) as divisions:
        for _ in range(2):  # ranks learn of each other's cores
            OPS.one_shot_all_reduce(x, "sum", mine.group_name)
            dist.barrier(group)
        earlier = divisions()
        OPS.one_shot_all_reduce(x, "sum", mine.group_name)
        later = divisions() - earlier
    os.sched_setaffinity(0, before)
    return later


def test_work_is_divided_where_the_ranks_have_cores_for_it(ranks: Ranks) -> None:
    """Uses new processes, as threads of a pool keep the cores of the thread that started it."""
    cores = sorted(os.sched_getaffinity(0))
    for world_size, count, choice, divided in [
        (1, len(cores), WHERE_CORES_SUFFICE, len(cores) > 1),
        (1, len(cores) + 1, WHERE_CORES_SUFFICE, False),
        (2, len(cores), WHERE_CORES_SUFFICE, False),
        (2, 2, WHERE_CORES_SUFFICE, len(cores) >= 4),
        (2, 2, ONE, False),
        (2, 2, ALL, True),
    ]:
        with ranks.own(world_size, divides, count, cores, choice) as running:
            for outcome in running.outcomes():
                assert outcome.result is not None, outcome
                assert (outcome.result > 0) == divided, (world_size, count, choice)


def forks(group: dist.ProcessGroup) -> int:
    """A forked process has none of its parent's threads, and waits for none."""
    x = torch.ones(1 << 20)
    with threads(2) as divisions:
        OPS.one_shot_all_reduce(x, "sum", group.group_name)
        assert divisions() > 0
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            to = torch.empty(0).new_empty(1 << 20)
            library = native.load()
            start = library.symm_cp_divisions()
            library.symm_cp_copy(to.data_ptr(), x.data_ptr(), x.nbytes, False)
            os._exit(library.symm_cp_divisions() - start)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_forked_processes_work_alone(ranks: Ranks) -> None:
    with ranks.own(1, forks) as running:
        (outcome,) = running.outcomes()
    assert outcome.result == 0, outcome


@pytest.mark.ranks(2)
def test_planes_of_other_sizes(group: dist.ProcessGroup) -> None:
    """Rows and planes of heads that do not divide by the threads."""
    for heads, length, features in ((2, 6, 50_000), (6, 1_000, 33), (2, 4_001, 64), (30, 80, 100)):
        x = torch.randn(1, length, heads, features)
        for layout in (x.transpose(1, 2), x.transpose(1, 2).contiguous()):
            found = []
            for count in (1, 2, 3):
                with threads(count):
                    to_heads = symm_cp.sequence_to_heads(layout, group=group)
                    back = symm_cp.heads_to_sequence(to_heads, group=group)
                    found.append((to_heads, back))
            assert torch.equal(found[0][1], layout)
            for other in found[1:]:
                assert all(torch.equal(a, b) for a, b in zip(other, found[0], strict=True))


def copies(divisions: Callable[[], int], nbytes: int) -> bool:
    """Copies to an address within a page; returns whether the work was divided."""
    before, start = divisions(), random.randrange(1, 4096)
    x = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
    out = torch.zeros(nbytes + 4096, dtype=torch.uint8)
    native.load().symm_cp_copy(out.data_ptr() + start, x.data_ptr(), nbytes, False)
    assert torch.equal(out[start : start + nbytes], x)
    assert not out[:start].any()
    assert not out[start + nbytes :].any()
    return divisions() > before


@pytest.mark.ranks(1)
def test_threads_share_work_of_128_kib_and_more(group: dist.ProcessGroup) -> None:
    for count in (2, 3):
        with threads(count) as divisions:
            assert not copies(divisions, (128 << 10) - 1)
            assert copies(divisions, 128 << 10)


@exhaustive
def test_suites_of_collectives_with_two_threads_a_rank() -> None:
    suites = ("backend/test_collectives", "test_reduce", "ops/test_in_flight")
    suites += (
        "ops/test_collectives",
        "ops/test_matmul_all_reduce_cpu",
        "ops/test_matmul_all_reduce",
    )
    root = Path(__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--ranks-threads=2", *(f"tests/{s}.py" for s in suites)],
        capture_output=True,
        text=True,
        cwd=root,
        env={k: v for k, v in os.environ.items() if not k.startswith("PYTEST")}
        | {"SYMM_CP_THREADS": "all"},
        check=False,
    )
    assert done.returncode == 0, done.stdout


def test_settings_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (env.threads(), env.background_threads()) == (WHERE_CORES_SUFFICE, 1)
    monkeypatch.setenv("SYMM_CP_THREADS", "one")
    assert env.threads() == ONE
    monkeypatch.setenv("SYMM_CP_THREADS", "2")
    with pytest.raises(ValueError, match=r"SYMM_CP_THREADS='2' must be 'one' or 'all'"):
        env.threads()
    monkeypatch.setenv("SYMM_CP_BACKGROUND_THREADS", "0")
    with pytest.raises(ValueError, match=r"SYMM_CP_BACKGROUND_THREADS='0' must be a number"):
        env.background_threads()
