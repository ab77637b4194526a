"""`symm_cp.op`: the example of symm_cp/ops/README.md, all collectives of a `Call`, and refusals."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed._symmetric_memory as torch_symm_mem
import torch.nn.functional as F

import symm_cp
from symm_cp import native, runtime
from symm_cp.cuda.plans import refusals
from symm_cp.ops.call import Call
from tests import device
from tests.exhaustive import exhaustive, some
from tests.hosts.apart import spread_out
from tests.ops.calls import python_calls

ROOT = Path(symm_cp.__file__).parent.parent
PAGE = (ROOT / "symm_cp" / "ops" / "README.md").read_text()
EXAMPLE = re.findall(r"```python\n(.*?)```", PAGE.split("## An op of your own")[1], re.DOTALL)[0]
if not hasattr(funcol, "all_gather_single"):  # before torch 2.13
    EXAMPLE = EXAMPLE.replace("all_gather_single", "all_gather_tensor")
    EXAMPLE = EXAMPLE.replace("reduce_scatter_single", "reduce_scatter_tensor")
# A product of float32 numbers near 1, of inner lengths up to 40, and of sums of them.
NEAR = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 4e-2, torch.float16: 5e-3}
own = ModuleType("own")
exec(compile(EXAMPLE, "symm_cp/ops/README.md", "exec"), own.__dict__)


def gather(tensor: torch.Tensor, dim: int, name: str) -> torch.Tensor:
    return own.funcol.__dict__.get("all_gather_single", funcol.all_gather_tensor)(tensor, dim, name)


def scatter(tensor: torch.Tensor, reduce_op: str, dim: int, name: str) -> torch.Tensor:
    run = own.funcol.__dict__.get("reduce_scatter_single", funcol.reduce_scatter_tensor)
    return run(tensor, reduce_op, dim, name)


def unfused(x: torch.Tensor, w: torch.Tensor, name: str) -> torch.Tensor:
    return F.silu(gather(x, 0, name)) @ w


def inputs(
    group: dist.ProcessGroup, seed: int, dtype: torch.dtype
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """This rank's x, w and gradient, and the output and gradients that a dense computation has."""
    torch.manual_seed(seed)
    size, rank = group.size(), group.rank()
    x, w = torch.randn(size, 3, 8).to(dtype), torch.randn(size, 8, 5).to(dtype)
    grad = torch.randn(size, 3 * size, 5).to(dtype)
    dense_x, dense_w = (t.double().requires_grad_() for t in (x, w))
    y = F.silu(dense_x.flatten(0, 1)) @ dense_w
    grads = torch.autograd.grad(y, (dense_x, dense_w), grad.double())
    return [x[rank], w[rank], grad[rank]], [y[rank].detach(), grads[0][rank], grads[1][rank]]


def trained(run: Callable[..., torch.Tensor], given: list[torch.Tensor], name: str) -> Any:
    x, w = (t.clone().requires_grad_() for t in given[:2])
    y = run(x, w, name)
    return [y.detach(), *torch.autograd.grad(y, (x, w), given[2])]


@device.devices("cpu", "simulated")
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.ranks
def test_results_and_gradients(
    group: dist.ProcessGroup, world_size: int, dtype: torch.dtype
) -> None:
    seed = 7
    name, op = group.group_name, own.gather_silu_matmul
    given, expected = inputs(group, seed, dtype)
    first = trained(op, given, name)
    for got, want in zip(first, expected, strict=True):
        near = 4 * NEAR[dtype]  # SiLU and its derivative round, and sums over ranks
        torch.testing.assert_close(got.double(), want, rtol=near, atol=near)
    for _ in range(3):  # recorded, replayed
        assert all(map(torch.equal, trained(op, given, name), first))
    with torch.no_grad():
        assert torch.equal(op(*given[:2], name), first[0])


@pytest.mark.parametrize("world_size", some(2, of=[1, 2, 3, 4]))
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.ranks
def test_compiled(group: dist.ProcessGroup, world_size: int, dynamic: bool) -> None:
    torch._dynamo.reset()
    name, op = group.group_name, own.gather_silu_matmul
    given, _ = inputs(group, 3, torch.float32)
    run = torch.compile(
        lambda x, w, name: op(x.sin(), w, name).cos(), fullgraph=True, dynamic=dynamic
    )

    def eager(x: torch.Tensor, w: torch.Tensor, name: str) -> torch.Tensor:
        return op(x.sin(), w, name).cos()

    for got, want in zip(trained(run, given, name), trained(eager, given, name), strict=True):
        torch.testing.assert_close(got, want)
    with torch.no_grad():
        longer = torch.cat([given[0]] * 2)
        torch.testing.assert_close(run(longer, given[1], name), eager(longer, given[1], name))
    torch._dynamo.reset()


@pytest.mark.parametrize("world_size", some(2, of=[1, 2, 3]))
@pytest.mark.ranks
def test_modes(group: dist.ProcessGroup, world_size: int) -> None:
    name, op = group.group_name, own.gather_silu_matmul
    (x, w, grad), _ = inputs(group, 5, torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        casted = op(x, w, name)
    assert torch.equal(casted, op(x.bfloat16(), w.bfloat16(), name))
    batch = torch.stack([x, 2 * x, x + 1])
    mapped = torch.func.vmap(lambda x: op(x, w, name))(batch)
    assert torch.equal(mapped, torch.stack([op(each, w, name) for each in batch]))
    leaf = x.clone().requires_grad_()
    y = op(leaf, w, name)
    both = torch.autograd.grad(y, leaf, torch.stack([grad, 2 * grad]), True, is_grads_batched=True)
    for scale in (1, 2):
        (one,) = torch.autograd.grad(y, leaf, scale * grad, retain_graph=True)
        torch.testing.assert_close(both[0][scale - 1], one)
    with torch.inference_mode():
        assert torch.equal(op(x, w, name), y)
    longer, plans_run = torch.cat([x] * 5), native.load().symm_cp_plans_run
    with torch_symm_mem._test_mode():
        torch.testing.assert_close(op(x, w, name), y.detach())
        plans_run()
        for _ in range(3):
            torch.testing.assert_close(op(longer, w, name), unfused(longer, w, name))
    assert plans_run() == 0  # nothing that is recorded then runs in later calls
    fake = op(x.to("meta"), w.to("meta"), name)
    assert (fake.shape, fake.stride()) == (y.shape, y.stride())
    with pytest.raises(NotImplementedError, match=r"gather_silu_matmul: torch\.func\.grad"):
        torch.func.grad(lambda x: op(x, w, name).sum())(x)
    torch.library.opcheck(op, (leaf, w, name), test_utils=("test_schema", "test_faketensor"))


@pytest.mark.ranks(2)
def test_ranks_on_several_hosts(group: dist.ProcessGroup) -> None:
    given, expected = inputs(group, 5, torch.float64)
    with spread_out(group, "01"):
        found = trained(own.gather_silu_matmul, given, group.group_name)
    for got, want in zip(found, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11)


@pytest.mark.ranks(2)
def test_the_third_call_runs_without_python(group: dist.ProcessGroup) -> None:
    name = group.group_name
    (x, w, grad), _ = inputs(group, 5, torch.float32)
    for call in (
        lambda: own.gather_silu_matmul(x, w, name),
        lambda: own.gather_silu_matmul_backward(grad, x, w, name),
    ):
        call()
        call()
        assert python_calls(call) == [], refusals()


# --- the collectives of a call ---------------------------------------------------------------


def _transposed(gathered: torch.Tensor, name: str) -> torch.Tensor:
    """The part with this rank's number of every rank's rows."""
    group = dist.distributed_c10d._resolve_process_group(name)
    by_rank = gathered.unflatten(0, (group.size(), group.size(), -1))[:, group.rank()]
    return by_rank.flatten(0, 1) + 0


def all_unfused(x: torch.Tensor, dim: int, reduce_op: str, group_name: str) -> list[torch.Tensor]:
    return [
        gather(x, dim % x.dim(), group_name),
        scatter(x, reduce_op, dim % x.dim(), group_name),
        funcol.all_reduce(x, reduce_op, group_name),
        gather(x * 2, 0, group_name),
        _transposed(gather(x, 0, group_name), group_name),
    ]


def collectives_of(call: Call, x: torch.Tensor, dim: int, reduce_op: str) -> list[torch.Tensor]:
    doubled = x.new_empty(x.shape[0] * call.world_size, *x.shape[1:])
    call.for_each_shard(x, lambda rows, where: torch.mul(rows, 2, out=doubled[where]))
    return [
        call.all_gather(x, dim),
        call.reduce_scatter(x, dim, reduce_op),
        call.all_reduce(x, reduce_op),
        doubled,
        call.all_to_all(x),
    ]


collectives = symm_cp.op(
    "tests::collectives(Tensor x, int dim, str reduce_op, str group_name) -> Tensor[]",
    unfused=all_unfused,
)(collectives_of)


@symm_cp.op("tests::by_default(Tensor x, int dim, str reduce_op, str group_name) -> Tensor[]")
def by_default(call: Call, x: torch.Tensor, dim: int, reduce_op: str) -> list[torch.Tensor]:
    return collectives_of(call, x, dim, reduce_op)


@device.devices("cpu", "simulated")
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("whole_bytes", [64 << 20, 0], ids=["at_once", "patterns"])
@pytest.mark.ranks
def test_collectives(group: dist.ProcessGroup, world_size: int, whole_bytes: int) -> None:
    torch.manual_seed(group.rank())
    size, name = group.size(), group.group_name
    native.drop_plans()
    with mock.patch.object(runtime, "WHOLE_BYTES", whole_bytes):
        for dtype in (torch.float32, torch.bfloat16, torch.complex64):
            for dim in (0, 1, -1):
                for reduce_op in ("sum", "avg"):
                    x = torch.randn(size, 2 * size, 3 * size).to(dtype)
                    expected = collectives(x.contiguous(), dim, reduce_op, name)
                    with torch_symm_mem._test_mode():
                        unfused = collectives(x, dim, reduce_op, name)
                        default = by_default(x, dim, reduce_op, name)
                    for got, want, same in zip(expected, unfused, default, strict=True):
                        near = 8 * torch.finfo(dtype).eps * size
                        torch.testing.assert_close(got, want, rtol=near, atol=near)
                        assert torch.equal(same, got)  # the bits of ranks with common memory
                    strided = x.mT.contiguous().mT
                    for given in (x, strided, strided, strided):
                        found = collectives(given, dim, reduce_op, name)
                        assert all(map(torch.equal, found, expected)), (dtype, dim, reduce_op)
    native.drop_plans()


# --- refusals --------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", some(2, of=[2, 3]))
@pytest.mark.ranks
def test_errors_reach_the_peers(group: dist.ProcessGroup, world_size: int) -> None:
    name, op = group.group_name, own.gather_silu_matmul
    (x, w, _), _ = inputs(group, 5, torch.float32)
    good = op(x, w, name)
    wrong = torch.randn(7, 5) if group.rank() == 1 else w
    with pytest.raises(RuntimeError, match=r"gather_silu_matmul: .*(reduction dim|multiplied)"):
        op(x, wrong, name)
    assert torch.equal(op(x, w, name), good)
    longer = torch.cat([x, x]) if group.rank() == 1 else x
    with pytest.raises(RuntimeError, match=r"mine::gather_silu_matmul float32.*all_gather 1"):
        op(longer, w, name)
    assert torch.equal(op(x, w, name), good)
    with pytest.raises(ValueError, match="no process group named 'nobody'"):
        op(x, w, "nobody")
    with pytest.raises(NotImplementedError, match=r"gather_silu_matmul: x is .*dense"):
        op(x.to_sparse(), w, name)
    with pytest.raises(NotImplementedError, match="gather_silu_matmul_backward: has no gradient"):
        own.gather_silu_matmul_backward(good, x.requires_grad_(), w, name)[0].sum().backward()


WRONG: dict[str, Callable[[Call, torch.Tensor], Any]] = {
    "shape": lambda call, x: x[1:] + 0,
    "dtype": lambda call, x: x.double(),
    "strides": lambda call, x: x.t().contiguous().t(),
    "memory of an argument": lambda call, x: x.view(x.shape),
    "must return tensors": lambda call, x: None,
}


@pytest.mark.ranks(2)
def test_results_unlike_the_fake_ones_are_refused(group: dist.ProcessGroup) -> None:
    for index, (what, run) in enumerate(WRONG.items()):
        schema = f"tests::wrong_{index}(Tensor x, str group_name) -> Tensor"
        if not hasattr(torch.ops.tests, f"wrong_{index}"):
            symm_cp.op(schema, unfused=lambda x, group_name: x + 0)(run)
        text = what if " " in what else "returned tensors of .* but its unfused form "
        with pytest.raises((TypeError, ValueError), match=f"tests::wrong_{index}: .*{text}"):
            getattr(torch.ops.tests, f"wrong_{index}")(torch.ones(3, 2), group.group_name)


@pytest.mark.parametrize(
    ("schema", "error", "text"),
    [
        ("mine::f(Tensor x, str group_name", ValueError, "is not a schema; must be like"),
        ("f(Tensor x, str group_name) -> Tensor", ValueError, "must name 'namespace::op'"),
        ("mine::f.out(Tensor x, str group_name) -> Tensor", ValueError, "must name"),
        ("symm_mem::f(Tensor x, str group_name) -> Tensor", ValueError, "not for users"),
        ("mine::f(Tensor(a!) x, str group_name) -> ()", NotImplementedError, "writes to an"),
        ("mine::f(Tensor(a) x, str group_name) -> Tensor(a)", NotImplementedError, "returns one"),
        ("mine::f(Tensor x) -> Tensor", ValueError, "must have an argument 'str group_name'"),
        ("mine::f(Tensor x, *, str group_name) -> Tensor", ValueError, "'str group_name'"),
        ("mine::f(Tensor x, int group_name) -> Tensor", ValueError, "'str group_name'"),
        ("mine::f(int n, str group_name) -> Tensor", ValueError, "must have a tensor among"),
        ("mine::f(Tensor x, str group_name) -> int", ValueError, "must return tensors"),
        (
            "mine::gather_silu_matmul(Tensor x, str group_name) -> Tensor",
            ValueError,
            "mine::gather_silu_matmul is registered already",
        ),
    ],
)
def test_schemas_that_are_refused(schema: str, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=re.escape(text)):
        symm_cp.op(schema, unfused=lambda *_: None)


@symm_cp.op("tests::agreed(Tensor x, int number, str group_name) -> Tensor")
def agreed(call: Call, x: torch.Tensor, number: int) -> torch.Tensor:
    call.agree((number,))
    return call.all_reduce(call.all_reduce(x))


@pytest.mark.ranks(2)
def test_values_that_ranks_compare(group: dist.ProcessGroup) -> None:
    name, x, W = group.group_name, torch.ones(2, 3), group.size()
    for _ in range(4):  # in Python, recorded, by a plan
        assert torch.equal(agreed(x, 5, name), x * W * W)
        with pytest.raises(RuntimeError, match=r"ranks disagree.*all_reduce 1 sum \(1,\)"):
            agreed(x, group.rank(), name)


def gradient_op(schema: str) -> Any:
    return symm_cp.op(schema)(lambda call, grad, x: grad * x)


def test_gradients_that_do_not_fit() -> None:
    op = "tests::f(Tensor x, str group_name) -> Tensor"
    unnamed = gradient_op("tests::g1(Tensor grad, Tensor x, str group_name) -> Tensor")
    with pytest.raises(ValueError, match=r"tests::g1 have names \[''\], must have names of the"):
        symm_cp.op(op, gradient=unnamed)
    far = gradient_op("other::g(Tensor grad, Tensor x, str group_name) -> (Tensor x)")
    with pytest.raises(ValueError, match="other::g must be in the namespace of tests::f"):
        symm_cp.op(op, gradient=far)
    with pytest.raises(ValueError, match="has setup_context=, but gradient= is an op"):
        symm_cp.op(op, gradient=far, setup_context=lambda *_: None)
    with pytest.raises(ValueError, match="has setup_context=, which needs gradient="):
        symm_cp.op(op, setup_context=lambda *_: None)


@exhaustive
def test_the_example_runs_under_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "own_op.py"
    script.write_text(EXAMPLE)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*command, "--nproc-per-node", "2", str(script)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
