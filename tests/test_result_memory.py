"""Memory of large results: it is used again, within a bound, by tensors like all others."""

from __future__ import annotations

import copy
import gc
import io
import os
import random
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from queue import Queue

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing  # teaches ForkingPickler tensors
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import symm_cp
from symm_cp import env, native
from symm_cp.commands import doctor
from symm_cp.tensors.results import contiguous, new_result, result_memory
from symm_cp.testing import Ranks
from tests.exhaustive import some

OPS = torch.ops.symm_mem
MIB = 1 << 20
BLOCK = 2 * MIB
LIKE = torch.empty(0)


def result(mib: float) -> torch.Tensor:
    return new_result(LIKE, (int(mib * MIB) // 4,))


def pooled(tensor: torch.Tensor) -> bool:
    """Whether a tensor is in a block: torch's own memory never lies at a multiple of 2 MiB."""
    return tensor.untyped_storage().data_ptr() % BLOCK == 0


@pytest.fixture(scope="module", autouse=True)
def _quick_collections() -> Iterator[None]:
    """Collections in these tests do not search objects that existed before."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def limit() -> Iterator[Callable[[int], None]]:
    """Nothing is kept before a test; sets how many MiB may be kept."""
    gc.collect()
    symm_cp.empty_cache()
    keep = native.load().symm_cp_keep_results
    yield lambda mib: keep(mib * MIB)
    keep(-1)
    symm_cp.empty_cache()


def in_use() -> int:
    return result_memory().in_use


def test_memory_is_used_again() -> None:
    before, first = in_use(), result(32)
    address = first.data_ptr()
    assert in_use() - before == 32 * MIB
    first.fill_(3.0)
    del first
    assert result_memory()[:2] == (before, 32 * MIB)
    again = result(31)
    assert again.data_ptr() == address
    assert again[0] == 3.0  # nothing has cleared it
    assert result(31).data_ptr() != address
    del again
    assert result(24).data_ptr() != address  # would leave a quarter of the block unused
    assert result(32).data_ptr() == address


def test_small_results_and_other_devices_take_no_block() -> None:
    before = in_use()
    small = result(0.99)
    meta = new_result(torch.empty(0, device="meta"), (BLOCK,))
    assert (small.numel(), meta.device.type, in_use()) == (MIB * 99 // 400, "meta", before)
    assert pooled(result(1.0))


def test_new_results_are_as_asked_for() -> None:
    for dtype in (torch.bool, torch.uint8, torch.bfloat16, torch.complex128, torch.float8_e4m3fn):
        tensor = new_result(LIKE, (3, 1024, 1024), dtype)
        assert (tensor.dtype, tensor.shape, tensor.is_contiguous()) == (
            dtype,
            (3, 1024, 1024),
            True,
        )
        assert pooled(tensor)
        assert not tensor.requires_grad
    like = torch.empty(3, requires_grad=True)
    assert not new_result(like, (MIB,)).requires_grad
    turned = torch.arange(MIB).view(1024, 1024).t()
    assert torch.equal(contiguous(turned), turned)
    assert contiguous(turned).is_contiguous()
    assert contiguous(like) is like
    with pytest.raises(RuntimeError, match="negative dimension"):
        torch.ops.symm_cp.new_result(LIKE, (-MIB, -MIB), torch.float32)


def test_no_more_is_kept_than_the_bound(limit: Callable[[int], None]) -> None:
    limit(16)
    blocks = [result(6) for _ in range(4)]
    addresses = [block.data_ptr() for block in blocks]
    while blocks:
        del blocks[0]
        assert result_memory().kept <= 16 * MIB
    assert result_memory().kept == 12 * MIB
    again = [result(6).data_ptr(), result(6).data_ptr()]
    assert again == [addresses[3]] * 2  # the last that was freed, each time
    del again
    large = result(17)  # more than the bound: kept blocks stay
    del large
    assert result_memory().kept == 12 * MIB
    limit(6)
    assert result_memory()[1:] == (6 * MIB, 6 * MIB)
    limit(0)
    assert result_memory().kept == 0
    assert not pooled(result(6))


def test_the_bound_is_a_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SYMM_CP_KEEP_MIB", "12")
    assert env.kept_bytes() == 12 * MIB
    monkeypatch.delenv("SYMM_CP_KEEP_MIB")
    assert env.kept_bytes() == -1
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < result_memory().limit <= min(1 << 30, memory // 32)
    monkeypatch.setenv("SYMM_CP_KEEP_MIB", "1.5")
    with pytest.raises(ValueError, match=r"SYMM_CP_KEEP_MIB='1.5' must be a number of MiB"):
        env.kept_bytes()


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_empty_cache_returns_memory_to_the_system() -> None:
    before, kept = resident(), [result(8), result(32)]
    assert resident() - before > 39 * MIB  # without a write
    del kept
    assert resident() - before > 39 * MIB
    used = result(8)
    assert symm_cp.empty_cache() == 32 * MIB  # `used` has the other block
    assert resident() - before < 12 * MIB
    used.fill_(1)
    assert symm_cp.empty_cache() == 0


def test_memory_does_not_grow() -> None:
    draw, held = random.Random(torch.initial_seed()), []
    before, used = resident(), in_use()
    for _ in range(1000):
        held.append(result(draw.choice([1, 1.5, 2, 3, 5, 8])))
        held[-1][::4096] = 1.0
        if len(held) > 8:
            del held[draw.randrange(len(held))]
    assert resident() - before < 9 * 8 * MIB + result_memory().kept + 8 * MIB
    held.clear()
    assert in_use() == used
    assert symm_cp.empty_cache() <= 9 * 8 * MIB * 2
    assert resident() - before < 8 * MIB


def test_views_keep_a_block() -> None:
    whole = result(4).fill_(1.0)
    address, part = whole.data_ptr(), whole.view(1024, -1)[1:, 3]
    array = whole.numpy()
    del whole
    assert result(4).data_ptr() != address
    del part
    assert result(4).data_ptr() != address
    assert array.min() == array.max() == 1.0
    del array
    assert result(4).data_ptr() == address


# --- as other tensors ----------------------------------------------------------------------------


def saved(tensor: torch.Tensor) -> torch.Tensor:
    file = io.BytesIO()
    torch.save(tensor, file)
    file.seek(0)
    return torch.load(file)


def resized(tensor: torch.Tensor) -> torch.Tensor:
    count = tensor.numel()
    address = tensor.data_ptr()
    tensor.resize_(count - 5)
    assert tensor.data_ptr() == address
    tensor.resize_(3 * count)
    assert pooled(tensor)
    assert tensor.data_ptr() != address
    return tensor.resize_(count)


def resized_storage(tensor: torch.Tensor) -> torch.Tensor:
    """Frees the memory and takes it again, as FSDP2 does with gathered parameters."""
    storage, values, before = tensor.untyped_storage(), tensor.clone(), in_use()
    size = storage.nbytes()
    storage.resize_(0)
    assert (before - in_use(), storage.nbytes()) == (4 * MIB, 0)
    storage.resize_(size)
    assert before == in_use()
    return tensor.copy_(values)


def shared(tensor: torch.Tensor) -> torch.Tensor:
    before = in_use()
    assert not tensor.is_shared()
    tensor.share_memory_()
    assert tensor.is_shared()
    assert before - in_use() == 4 * MIB
    return tensor


_USES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "deepcopy": copy.deepcopy,
    "lazy copy": lambda tensor: torch._lazy_clone(tensor).add_(0.0),
    "pickled to a process": lambda tensor: ForkingPickler.loads(ForkingPickler.dumps(tensor)),
    "resize_": resized,
    "resize_ of the storage": resized_storage,
    "save": saved,
    "set_": lambda tensor: torch.empty(0).set_(tensor),
    "share_memory_": shared,
}


@pytest.mark.parametrize("use", some("save", "set_", of=_USES))
def test_results_are_as_other_tensors(use: str) -> None:
    before = in_use()
    values = torch.rand(4 * MIB // 4)
    assert torch.equal(_USES[use](result(4).copy_(values)), values)
    gc.collect()
    assert in_use() == before


def test_results_in_the_callers_modes() -> None:
    with torch.inference_mode():
        tensor = result(2)
        assert tensor.is_inference()
    assert pooled(tensor)
    assert not result(2).is_inference()
    before = in_use()
    with FakeTensorMode() as mode:
        fake = new_result(mode.from_tensor(LIKE), (MIB,))
        assert isinstance(fake, FakeTensor)
    assert in_use() == before


def test_deterministic_mode_fills_results() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        assert result(2).isnan().all()
        torch.utils.deterministic.fill_uninitialized_memory = False
        assert pooled(result(2))
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = True
        torch.use_deterministic_algorithms(False)


def test_the_profiler_sees_results() -> None:
    with torch.profiler.profile(profile_memory=True) as profile:
        tensor = result(8)
        del tensor
    used = [e.self_cpu_memory_usage for e in profile.key_averages()]
    assert max(used) == 8 * MIB
    assert sum(used) == 0


# --- threads, forks, the end ---------------------------------------------------------------------


def test_threads_share_blocks() -> None:
    before, tensors = in_use(), Queue[torch.Tensor](maxsize=4)
    wrong: list[float] = []

    def make(number: int) -> None:
        for _ in range(100):
            tensor = result(1 + number)
            tensor[::1024] = number
            tensors.put(tensor)

    def check() -> None:
        for _ in range(100):
            part = tensors.get()[::1024]
            if part.min() != part.max():
                wrong.append(part.max().item())

    threads = [threading.Thread(target=make, args=(n,)) for n in range(3)]
    threads += [threading.Thread(target=check) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    del thread
    assert not wrong
    assert in_use() == before


def forked(child: Callable[[], bool]) -> bool:
    """Whether `child` returns true in a forked process, within 20 seconds."""
    process = os.fork()
    if process == 0:
        done = False
        try:
            done = child()
        finally:
            os._exit(0 if done else 1)
    for _ in range(2000):
        ended, status = os.waitpid(process, os.WNOHANG)
        if ended:
            return status == 0
        time.sleep(0.01)
    os.kill(process, 9)
    os.waitpid(process, 0)
    return False


@pytest.mark.exhaustive
def test_forked_processes() -> None:
    """Another thread uses blocks meanwhile, so some forks happen within its calls."""
    held, kept = result(4), result(6)
    held[0], address = 7.0, kept.data_ptr()
    del kept
    stop = threading.Event()

    def use() -> None:
        while not stop.is_set():
            result(2)

    def child() -> bool:
        nonlocal held
        assert result_memory().kept == 0
        right = bool(held[0] == 7.0)
        held[1] = 1.0
        del held
        right &= result_memory().kept == 0  # its pages are the parent's, too
        new = result(6)
        new[0] = new[-1] = 2.0
        return right and bool(new[0] == 2.0) and symm_cp.empty_cache() == 0

    thread = threading.Thread(target=use)
    thread.start()
    try:
        for _ in range(20):
            assert forked(child)
    finally:
        stop.set()
        thread.join()
    assert result(6).data_ptr() == address  # kept all the time
    before = result_memory().kept
    del held  # forks have shared it
    assert result_memory().kept == before


_AT_EXIT = """
import atexit, sys
import torch, symm_cp
from symm_cp.tensors.results import new_result, result_memory
like = torch.empty(0)
held = [new_result(like, (1 << 20,)) for _ in range(3)]
cycle = [held]
cycle.append(cycle)
sys.held = new_result(like, (1 << 20,))
torch.held = sys.held.view(-1)
atexit.register(lambda: print(new_result(like, (1 << 20,)).fill_(3).sum().item()))
atexit.register(symm_cp.empty_cache)
"""

_LITTLE_MEMORY = """
import resource
import torch, symm_cp
from symm_cp.tensors.results import new_result, result_memory
like = torch.empty(0)
size = 64 << 20
new_result(like, (size,), torch.uint8)
assert result_memory().kept == size
taken = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (taken + (16 << 20),) * 2)
larger = new_result(like, (size + (2 << 20),), torch.uint8)  # in the place of what was kept
assert (result_memory().in_use, result_memory().kept) == (72 << 20, 0), result_memory()
try:
    new_result(like, (size,), torch.uint8)
except RuntimeError as error:
    print("alloc" in str(error))
"""


@pytest.mark.parametrize(
    ("code", "said"),
    [
        pytest.param(_AT_EXIT, f"{3.0 * MIB}\n", id="exit"),
        pytest.param(_LITTLE_MEMORY, "True\n", id="oom", marks=pytest.mark.exhaustive),
    ],
)
@pytest.mark.exhaustive
def test_in_a_process_of_its_own(code: str, said: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True, text=True, timeout=100, check=False,
        env={**os.environ, "SYMM_CP_KEEP_MIB": "1.5" if code == _AT_EXIT else "100"},
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, said), done.stderr
    # An import never fails.
    assert ("SYMM_CP_KEEP_MIB='1.5' must be" in done.stderr) == (code == _AT_EXIT)


# --- the ops -------------------------------------------------------------------------------------


def results_of_ops(group: dist.ProcessGroup) -> dict[str, list[torch.Tensor]]:
    """Large results of every family."""
    name, W = group.group_name, group.size()
    x, weight, tall = torch.randn(1024, 1024), torch.randn(1024, 512), torch.randn(1024 * W, 256)
    q, k, v = (torch.randn(1, 8, 1024, 64) for _ in range(3))
    wait = torch.ops._c10d_functional.wait_tensor
    gathered, (product,) = OPS.fused_all_gather_matmul(x, [weight], 0, name)
    columns, _ = OPS.fused_all_gather_matmul(x, [torch.randn(1024 * W, 512)], 1, name)
    out, lse = OPS.fused_all_gather_attention(q, k, v, name)
    backward = OPS.fused_all_gather_attention_backward
    grads = backward(torch.ones_like(out), q, k, v, out, lse, name)[:3]
    bfloat16 = backward(*(t.bfloat16() for t in (torch.ones_like(out), q, k, v, out)), lse, name)
    return {
        "all_gather_matmul": [gathered, product, columns],
        "matmul_reduce_scatter": [
            OPS.fused_matmul_reduce_scatter(tall, torch.randn(256, 512 * W), "sum", dim, name)
            for dim in (0, 1)
        ],
        "weight gradient": OPS._fused_all_gather_weight_grad(
            x, [torch.randn(1024 * W, 512)], 0, name
        ),
        "gradients": list(
            OPS._fused_matmul_reduce_scatter_backward(
                torch.randn(1024, 512),
                torch.randn(1024 * W, 1024),
                weight,
                "sum",
                0,
                name,
                True,
                True,
            )
        ),
        "all_gather_kv": [
            *OPS.all_gather_kv(k, v, 2, name),
            *OPS._all_gather_kv_backward(torch.cat([k] * W, 2), torch.cat([v] * W, 2), 2, name),
        ],
        "attention": [*grads, *bfloat16[:3]],
        "one_shot_all_reduce": [OPS.one_shot_all_reduce(x, "sum", name)],
        "reduce_scatter": [OPS._reduce_scatter(torch.randn(1024 * W, 512), name, False)],
        "low contention": [
            wait(OPS._low_contention_all_gather(x, name)),
            wait(OPS._low_contention_reduce_scatter(torch.randn(1024 * W, 512), "sum", name)),
        ],
    }


def not_pooled(group: dist.ProcessGroup) -> list[str]:
    gc.collect()  # leftovers of earlier functions
    before = in_use()
    found = results_of_ops(group)
    wrong = [
        f"{name}[{index}] {list(tensor.shape)} {tensor.dtype}"
        for name, tensors in found.items()
        for index, tensor in enumerate(tensors)
        if not pooled(tensor)
    ]
    del found
    gc.collect()
    if in_use() != before:
        wrong.append(f"{in_use() - before} bytes stay in use")
    return wrong


@pytest.mark.parametrize("world_size", some(2, of=[1, 2, 3, 4]))
def test_results_of_ops_are_in_blocks(ranks: Ranks, world_size: int) -> None:
    assert ranks.run(world_size, not_pooled) == [[]] * world_size


# --- doctor --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "chosen", "states"),
    [
        ("always [madvise] never", "madvise", ("ok", "ok")),
        ("always madvise [never] deny", "never", ("missing", "info")),
        (None, "unknown", ("info", "info")),
    ],
)
def test_doctor_looks_for_huge_pages(
    tmp_path: Path, text: str | None, chosen: str, states: tuple[str, str]
) -> None:
    """Shared memory has a setting of its own, which is off on most systems."""
    if text is not None:
        for file in ("enabled", "shmem_enabled"):
            (tmp_path / file).write_text(f"{text}\n")
    kept, *found = doctor.memory(tmp_path)
    assert re.search(r"keeps up to \d+ MiB", kept.detail)
    assert tuple(finding.state for finding in found) == states
    for finding, file in zip(found, ("enabled", "shmem_enabled"), strict=True):
        assert finding.detail == f"transparent huge pages: {chosen} ({tmp_path / file})"
        assert bool(finding.advice) == (finding.state == "missing")


def results_are_dropped(group: dist.ProcessGroup) -> list[int]:
    """Results of transfers that nothing waits for: their memory is free once they have ended."""
    whole, shard = torch.ones(1 << 20), torch.ones(1 << 18)
    small, before = torch.ones(64), torch._C._distributed_c10d._get_work_registry_size()
    for _ in range(20):
        symm_cp.low_contention_all_gather(shard, group=group)
        symm_cp.low_contention_reduce_scatter(whole, group=group)
        symm_cp.low_contention_all_gather(small, group=group)
    last = symm_cp.low_contention_all_gather(shard, group=group)
    assert (last == 1).all()  # its transfer is the last, so all others have ended
    del last
    symm_cp.empty_cache()
    left = torch._C._distributed_c10d._get_work_registry_size() - before
    return [result_memory().in_use, left]


def test_results_that_are_dropped(ranks: Ranks) -> None:
    for in_use, works in ranks.run(2, results_are_dropped):
        assert works == 0
        assert in_use == 0
