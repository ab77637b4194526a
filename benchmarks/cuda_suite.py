"""All measurements that need a GPU, in one command.

    python benchmarks/cuda_suite.py --ranks 2 --json benchmarks/results/cuda_suite.json

Ranks may share one GPU; they then share its time, so only ratios are meaningful. Each case is
checked against a reference before it is timed. The first variant is the limit.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
# Read by torch when it allocates symmetric memory.
os.environ.setdefault("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
import torch.nn.functional as F

import symm_cp
from benchmarks.harness import Case, main
from symm_cp.cuda.kernels import tile_matmul
from symm_cp.ops.common import device_kernels

DEVICE = "cuda"
# SYMM_CP_SUITE_SCALE divides every size, to try the suite out.
SCALE = int(os.environ.get("SYMM_CP_SUITE_SCALE", "1"))
DTYPE = torch.bfloat16
#: (name, hidden size, feed-forward size) of models; a rank has 8192 / W rows.
MODELS = (("Llama-3 8B", 4096, 14336), ("Llama-3 70B", 8192, 28672))
#: Other tilings of the matmuls by tiles.
PRODUCT_TILINGS = (
    tile_matmul.Tiling(128, 256, 64, 8, 3),
    tile_matmul.Tiling(128, 128, 64, 8, 3),
    tile_matmul.Tiling(128, 128, 64, 4, 3),
    tile_matmul.Tiling(128, 128, 32, 8, 4),
)

gather_matmul = device_kernels["fused_all_gather_matmul"]
matmul_scatter = device_kernels["fused_matmul_reduce_scatter"]
low_gather = device_kernels["_low_contention_all_gather"]
low_scatter = device_kernels["_low_contention_reduce_scatter"]
wait = torch.ops._c10d_functional.wait_tensor


def synchronize() -> None:
    torch.cuda.synchronize()


def case(name: str, variants: dict[str, Callable[[], object]], **options: Any) -> Case:
    return Case(name, variants, synchronize=synchronize, **options)


def normal(*shape: int, dtype: torch.dtype = DTYPE) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=dtype)


def gathered(shard: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Gathers through the host: for references only."""
    parts = [torch.empty_like(shard, device="cpu") for _ in range(group.size())]
    dist.all_gather(parts, shard.cpu(), group=group)
    return torch.cat(parts).to(DEVICE)


def close(actual: torch.Tensor, expected: torch.Tensor, name: str) -> None:
    error = (actual.double() - expected.double()).abs().max() / expected.double().abs().max()
    assert error < 2**-6, f"{name}: wrong by {error:.2e} of the largest value"


def matmuls(group: dist.ProcessGroup) -> Iterator[Case]:
    """Fused against unfused and against torch's own fused ops."""
    W, name = group.size(), group.group_name
    for model, hidden, feed in MODELS:
        rows, hidden, feed = 8192 // SCALE // W, hidden // SCALE, feed // SCALE
        x, up, down = normal(rows, hidden), normal(hidden, feed // W), normal(feed // W, hidden)
        full, wide = gathered(x, group), normal(rows * W, feed // W)
        out = torch.empty(rows * W, feed // W, device=DEVICE, dtype=DTYPE)

        def check_gather(x: Any = x, up: Any = up, full: Any = full, model: str = model) -> None:
            for algorithm in ("shards", "tiles"):
                with symm_cp.tuning.forced(algorithm):
                    product = gather_matmul(x, [up], 0, name)[1][0]
                close(product, full @ up, f"all-gather-matmul {model}, {algorithm}")

        yield case(
            f"all-gather-matmul, {model} up",
            {
                "matmul alone": lambda full=full, up=up, out=out: torch.mm(full, up, out=out),
                "fused": lambda x=x, up=up: gather_matmul(x, [up], 0, name, return_A=False),
                "torch's": lambda x=x, up=up: symm_mem._fused_all_gather_matmul(
                    x, [up], 0, name, return_A=False
                ),
                "fused, tiles": lambda x=x, up=up: by_tiles(
                    lambda: gather_matmul(x, [up], 0, name, return_A=False)
                ),
                "unfused": lambda x=x, up=up: wait(low_gather(x, name)) @ up,
            },
            check=check_gather,
        )
        product = normal(rows * W, hidden)

        def check_scatter(wide: Any = wide, down: Any = down, model: str = model) -> None:
            total = (wide @ down).float().cpu()
            dist.all_reduce(total, group=group)
            own = total.chunk(W)[group.rank()].to(DEVICE)
            for algorithm in ("shards", "tiles"):
                with symm_cp.tuning.forced(algorithm):
                    part = matmul_scatter(wide, down, "sum", 0, name)
                close(part, own, f"matmul-reduce-scatter {model}, {algorithm}")

        yield case(
            f"matmul-reduce-scatter, {model} down",
            {
                "matmul alone": lambda wide=wide, down=down, out=product: torch.mm(
                    wide, down, out=out
                ),
                "fused": lambda wide=wide, down=down: matmul_scatter(wide, down, "sum", 0, name),
                "torch's": lambda wide=wide, down=down: symm_mem._fused_matmul_reduce_scatter(
                    wide, down, "sum", 0, name
                ),
                "fused, tiles": lambda wide=wide, down=down: by_tiles(
                    lambda: matmul_scatter(wide, down, "sum", 0, name)
                ),
                "unfused": lambda wide=wide, down=down: wait(low_scatter(wide @ down, "sum", name)),
            },
            check=check_scatter,
        )


def by_tiles(run: Callable[[], object]) -> object:
    with symm_cp.tuning.forced("tiles"):
        return run()


def tiles(group: dist.ProcessGroup) -> Iterator[Case]:
    """The kernels by tiles alone, with shards that have arrived, and in other tilings."""
    W = 4
    words = torch.ones(W * 16, device=DEVICE, dtype=torch.int32)
    marks = tile_matmul.Words(words, 16, 1)
    for model, hidden, feed in MODELS:
        rows, inner, columns = 8192 // SCALE // W, hidden // SCALE, feed // SCALE // W
        x, weight = normal(rows * W, inner), normal(inner, columns)
        out = torch.empty(rows * W, columns, device=DEVICE, dtype=DTYPE)
        parts = out.view(W, rows, columns)

        def gather(tiling: Any, x: Any = x, w: Any = weight, out: Any = out) -> None:
            shards = x.view(W, -1, x.shape[1])
            tile_matmul.arrival_matmul(shards[0], shards, 1, w, out, 0, marks, tiling=tiling)

        def count(tiling: Any, x: Any = x, w: Any = weight, parts: Any = parts) -> None:
            tile_matmul.counted_matmul(x, w, parts, parts[0], 0, marks, tiling=tiling)

        def check(x: Any = x, weight: Any = weight, out: Any = out) -> None:
            for kernel in (gather, count):
                for tiling in (None, *PRODUCT_TILINGS):
                    out.fill_(torch.nan)
                    kernel(tiling)
                    close(out, x @ weight, f"a matmul by tiles, {tiling}")

        variants: dict[str, Callable[[], object]] = {
            "torch.mm": lambda x=x, weight=weight, out=out: torch.mm(x, weight, out=out),
            "polling": lambda gather=gather: gather(None),
            "counting": lambda count=count: count(None),
        }
        for tiling in PRODUCT_TILINGS:
            label = f"polling, {tiling.rows}x{tiling.columns}x{tiling.inner}, {tiling.stages}"
            variants[label] = lambda gather=gather, tiling=tiling: gather(tiling)
        yield case(f"matmuls by tiles, {model} up, {W} shards there", variants, check=check)


def launches(group: dist.ProcessGroup) -> Iterator[Case]:
    """How long the host takes to enqueue one op."""
    name, W = group.group_name, group.size()
    x, weight = normal(128, 128), normal(128, 128)
    many = {"host": True, "inner": 20, "repetitions": 25}
    yield case(
        "host time of an all-gather-matmul",
        {
            "torch's": lambda: symm_mem._fused_all_gather_matmul(
                x, [weight], 0, name, return_A=False
            ),
            "ours": lambda: gather_matmul(x, [weight], 0, name, return_A=False),
        },
        **many,
    )
    wide = normal(128 * W, 128)
    yield case(
        "host time of a matmul-reduce-scatter",
        {
            "torch's": lambda: symm_mem._fused_matmul_reduce_scatter(wide, weight, "sum", 0, name),
            "ours": lambda: matmul_scatter(wide, weight, "sum", 0, name),
        },
        **many,
    )
    yield case(
        "host time of a low-contention all-gather",
        {
            "torch's": lambda: wait(symm_mem._low_contention_all_gather(x, name)),
            "ours": lambda: wait(low_gather(x, name)),
        },
        **many,
    )


def latencies(group: dist.ProcessGroup) -> Iterator[Case]:
    """A signal to and from a peer: a barrier of torch's against stream operations."""
    name = group.group_name
    shared = symm_mem.empty(1024, device=DEVICE, dtype=torch.uint8)
    handle = symm_mem.rendezvous(shared, name)
    tiny = symm_mem.empty(16, device=DEVICE, dtype=torch.uint8)
    symm_cp.read_in_place(tiny, name)
    yield case(
        "a barrier; an all-gather of 16 bytes, which has two",
        {
            "barrier (torch's kernel)": lambda: handle.barrier(),
            "all-gather, symmetric input": lambda: wait(low_gather(tiny, name)),
        },
        inner=50,
    )


def sm_copies(shard: torch.Tensor, group: dist.ProcessGroup) -> Callable[[], torch.Tensor]:
    """An all-gather whose bytes are moved by kernels, on a separate stream."""
    handle = symm_mem.rendezvous(shard, group.group_name)
    output = shard.new_empty((group.size() * shard.shape[0], *shard.shape[1:]))
    side = torch.cuda.Stream()
    parts = output.chunk(group.size())
    peers = [handle.get_buffer(p, shard.shape, shard.dtype) for p in range(group.size())]

    def run() -> torch.Tensor:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            handle.barrier(channel=1)
            for part, peer in zip(parts, peers, strict=True):
                torch.add(peer, 0, out=part)  # an element-wise kernel
            handle.barrier(channel=2)
        return output

    return run


def kernels_of(run: Callable[[], object]) -> list[str]:
    """Returns the kernels that a function launches, according to the profiler, except copies."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        synchronize()
    on_gpu = [e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    return [name for name in on_gpu if not name.startswith(("Memcpy", "Memset"))]


def contention(group: dist.ProcessGroup) -> Iterator[Case]:
    """How much a concurrent all-gather slows a large matmul down."""
    n = 8192 // SCALE
    a, b, out = normal(n, n), normal(n, n), normal(n, n)
    shard = symm_mem.empty(n * n // 2, device=DEVICE, dtype=DTYPE).normal_()
    symm_cp.read_in_place(shard, group)
    by_kernels = sm_copies(shard, group)

    def check() -> None:
        full = gathered(shard, group)
        assert torch.equal(wait(low_gather(shard, group.group_name)), full)
        moved = by_kernels()
        synchronize()  # it has a stream of its own
        assert torch.equal(moved, full)
        ran = kernels_of(lambda: wait(low_gather(shard, group.group_name)))
        assert not ran, f"a low-contention all-gather of symmetric memory launched {ran}"

    def beside(start: Callable[[], torch.Tensor], finish: Any) -> Callable[[], object]:
        def run() -> object:
            moving = start()
            torch.mm(a, b, out=out)
            return finish(moving)

        return run

    def join(moved: torch.Tensor) -> torch.Tensor:
        synchronize()
        return moved

    yield case(
        f"a matmul of {n} cubed beside an all-gather of {shard.nbytes >> 20} MiB a rank",
        {
            "matmul alone": lambda: torch.mm(a, b, out=out),
            "beside low-contention all-gather": beside(
                lambda: low_gather(shard, group.group_name), wait
            ),
            "beside all-gather by kernels": beside(by_kernels, join),
            "low-contention all-gather alone": lambda: wait(low_gather(shard, group.group_name)),
        },
        check=check,
    )


def attentions(group: dist.ProcessGroup) -> Iterator[Case]:
    """Attention over shards against one call over gathered keys."""
    W, rank = group.size(), group.rank()
    for length, features in ((8192, 128), (32768, 128), (8192, 64)):
        local = length // SCALE // W
        q, k, v = (normal(1, 32, local, features) for _ in range(3))
        key, value = (
            gathered(t.movedim(2, 0).contiguous(), group).movedim(0, 2).contiguous() for t in (k, v)
        )
        grad = torch.randn_like(q)
        leaves = [t.clone().requires_grad_() for t in (q, k, v)]
        full = [t.clone().requires_grad_() for t in (q, key, value)]

        def train(function: Callable[..., Any], tensors: list[Any], grad: Any = grad) -> None:
            torch.autograd.grad(function(*tensors), tensors, grad)

        def fused(q: Any, k: Any, v: Any, algorithm: str = "pipeline") -> torch.Tensor:
            with symm_cp.tuning.forced(algorithm):
                return symm_cp.all_gather_attention(q, k, v, group=group)

        def check(q: Any = q, k: Any = k, v: Any = v, key: Any = key, value: Any = value) -> None:
            expected = F.scaled_dot_product_attention(q, key, value)
            for algorithm in symm_cp.tuning.ATTENTION_ALGORITHMS:
                close(fused(q, k, v, algorithm), expected, f"attention, {algorithm}, rank {rank}")

        sizes = f"{length // SCALE} tokens, 32 heads of {features}"
        yield case(
            f"attention forward, {sizes}",
            {
                "one call on gathered keys": lambda q=q, key=key, value=value: (
                    F.scaled_dot_product_attention(q, key, value)
                ),
                "fused, pipeline": lambda q=q, k=k, v=v: fused(q, k, v),
                "fused, together": lambda q=q, k=k, v=v: fused(q, k, v, "together"),
            },
            check=check,
        )
        yield case(
            f"attention forward and backward, {sizes}",
            {
                "one call on gathered keys": lambda full=full, train=train: train(
                    F.scaled_dot_product_attention, full
                ),
                "fused": lambda leaves=leaves, train=train: train(fused, leaves),
            },
        )


def graphs(group: dist.ProcessGroup) -> Iterator[Case]:
    """An op captured once and replayed, with inputs that change."""
    name = group.group_name
    x, weight = normal(1024 // SCALE, 1024), normal(1024, 1024)
    symm_cp.reserve(group, x.nbytes, device=DEVICE)
    gather_matmul(x, [weight], 0, name)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _, (product,) = gather_matmul(x, [weight], 0, name, return_A=False)

    def check() -> None:
        for _ in range(20):
            x.normal_()
            graph.replay()
            close(product, gathered(x, group) @ weight, "a replayed all-gather-matmul")

    yield case(
        "an all-gather-matmul of 1024 rows a rank",
        {
            "eager": lambda: gather_matmul(x, [weight], 0, name, return_A=False),
            "replayed": lambda: graph.replay(),
        },
        check=check,
        inner=10,
    )


def cases(group: dist.ProcessGroup) -> Iterator[Case]:
    torch.cuda.set_device(group.rank() % torch.cuda.device_count())
    for part in (latencies, launches, matmuls, tiles, contention, attentions, graphs):
        yield from part(group)


if __name__ == "__main__":
    if not torch.cuda.is_available():
        sys.exit("cuda_suite: needs a CUDA device, and this machine has none")
    main(
        cases,
        "Correctness and speed on CUDA.",
        backend="cpu:gloo,cuda:gloo",
        device="cuda",
    )
