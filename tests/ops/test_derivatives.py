"""Second derivatives against the dense computation; derivatives that would be lost are refused."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.autograd import forward_ad

from symm_cp.ops.attention.spread_cache import SCATTERED
from tests.ops.calls import ATTENTION, OPS, Call, calls, leaves, trained


@pytest.mark.ranks(2)
def test_attention_has_no_second_derivative(group: dist.ProcessGroup) -> None:
    for name in ATTENTION:
        call = calls(group)[name]
        given = leaves(call.inputs)
        first = torch.autograd.grad(call.run(*given)[0].sum(), given, create_graph=True)
        exact = torch.autograd.grad(call.run(*given)[0].sum(), given)
        torch.testing.assert_close(first, exact)
        with pytest.raises(NotImplementedError, match=f"{name}: second derivatives"):
            torch.autograd.grad(sum(g.square().sum() for g in first), given)
        trained(call)
    q, k, v = leaves(call.inputs)
    out, lse = OPS.fused_all_gather_attention(q, k, v, group.group_name)
    with pytest.raises(NotImplementedError, match="attention_backward: has no gradient"):
        OPS.fused_all_gather_attention_backward(out, q, k, v, out, lse, group.group_name)


@pytest.mark.ranks(2)
def test_refuses_transforms(group: dist.ProcessGroup) -> None:
    for name, call in calls(group).items():
        tangents = tuple(torch.ones_like(t) for t in call.inputs)
        with pytest.raises(NotImplementedError, match=f"{name}: forward-mode derivatives"):
            torch.func.jvp(lambda *t, call=call: call.run(*t)[0], tuple(call.inputs), tangents)
        with forward_ad.dual_level():
            dual = [forward_ad.make_dual(t, d) for t, d in zip(call.inputs, tangents, strict=True)]
            with pytest.raises(NotImplementedError, match=f"{name}: forward-mode derivatives"):
                call.run(*dual)
            call.run(*call.inputs)  # no derivative could be lost
        with pytest.raises(NotImplementedError, match=rf"{name}: torch\.func\.grad"):
            torch.func.grad(lambda *t, call=call: call.run(*t)[0].sum())(*call.inputs)
        with pytest.raises(NotImplementedError, match=rf"{name}: torch\.func\.grad"):
            torch.func.vjp(lambda *t, call=call: call.run(*t)[0].sum(), *call.inputs)
        trained(call)


def refuses_batched(call: Call) -> None:
    given = leaves(call.inputs)
    outputs = call.run(*given)
    seeds = [torch.stack([out.detach()] * 2) for out in outputs]
    with pytest.raises(ValueError, match="grad_out has no storage"):
        torch.autograd.grad(outputs, given, seeds, is_grads_batched=True)


@pytest.mark.ranks(2)
def test_vmap(group: dist.ProcessGroup) -> None:
    for name, call in calls(group).items():
        if name == "flex_all_gather_attention":
            refuses_batched(call)
            continue
        for dim in (0, 1):
            batch = [torch.stack([t, 2 * t, t + 1], dim) for t in call.inputs]
            found = torch.func.vmap(call.run, in_dims=dim)(*batch)
            each = [call.run(*(t.select(dim, i) for t in batch)) for i in range(3)]
            for got, want in zip(found, zip(*each, strict=True), strict=True):
                assert torch.equal(got, torch.stack(want)), name
        given = leaves(call.inputs)
        outputs = call.run(*given)
        seeds = [torch.stack([out.detach(), out.detach().sin()]) for out in outputs]
        at_once = torch.autograd.grad(
            outputs, given, seeds, is_grads_batched=True, retain_graph=True
        )
        mapped = torch.func.vmap(
            lambda *s, o=outputs, g=given: torch.autograd.grad(o, g, s, retain_graph=True)
        )(*seeds)
        for i in range(2):
            want = torch.autograd.grad(outputs, given, [s[i] for s in seeds], retain_graph=True)
            for found in (at_once, mapped):
                torch.testing.assert_close([g[i] for g in found], list(want))


@pytest.mark.ranks(2)
def test_ops_without_gradient(group: dist.ProcessGroup) -> None:
    W, name = group.size(), group.group_name
    x, out, part = torch.randn(2 * W, 3), torch.empty(2 * W, 3), torch.empty(2, 3)
    for tensors in ((x.clone().requires_grad_(), out), (x, out.clone().requires_grad_())):
        with pytest.raises(NotImplementedError, match="one_shot_all_reduce_out: has no gradient"):
            OPS.one_shot_all_reduce_out(tensors[0], "sum", name, tensors[1])
        with torch.no_grad():
            OPS.one_shot_all_reduce_out(tensors[0], "sum", name, tensors[1])
    with pytest.raises(NotImplementedError, match=r"reduce_scatter_out: .* input requires grad"):
        OPS.reduce_scatter_out(x.clone().requires_grad_(), name, False, part)
    with pytest.raises(RuntimeError, match="two_shot_all_reduce_: input is a leaf"):
        OPS.two_shot_all_reduce_(x.clone().requires_grad_(), "sum", name)
    with pytest.raises(NotImplementedError, match="forward-mode"), forward_ad.dual_level():
        OPS.one_shot_all_reduce_out(forward_ad.make_dual(x, x), "sum", name, out)
    symmetric = torch.distributed._symmetric_memory.empty(4, device="cpu").requires_grad_()
    tensors = OPS.get_remote_tensors(symmetric, name)
    with pytest.raises(NotImplementedError, match="get_remote_tensors: has no gradient"):
        sum(t.sum() for t in tensors).backward()


@pytest.mark.ranks(2)
def test_scaled_matmuls_have_no_gradient(group: dist.ProcessGroup) -> None:
    W, name, one = group.size(), group.group_name, torch.tensor(1.0)
    a = torch.randn(4 * W, 16).to(torch.float8_e4m3fn)
    b = torch.randn(16, 16).to(torch.float8_e4m3fn).t()
    bias = torch.randn(16, requires_grad=True)
    _, (out,) = OPS.fused_all_gather_scaled_matmul(
        a, [b], one, [one], 0, name, [bias], [None], [torch.float32], [False]
    )
    with pytest.raises(NotImplementedError, match="all_gather_scaled_matmul: has no gradient"):
        out.sum().backward()
    out = OPS.fused_scaled_matmul_reduce_scatter(
        a, b, one, one, "sum", 0, 0, name, [4 * W, 16], bias, None, torch.float32
    )
    with pytest.raises(NotImplementedError, match="scaled_matmul_reduce_scatter: has no gradient"):
        out.sum().backward()


@pytest.mark.ranks(2)
def test_counts_modifications(group: dist.ProcessGroup) -> None:
    """Autograd notices when an op overwrites a saved tensor."""
    W, name = group.size(), group.group_name
    x = torch.randn(2 * W, 3, requires_grad=True)
    writes = (
        lambda y: OPS.two_shot_all_reduce_(y, "sum", name),
        lambda y: OPS.one_shot_all_reduce_out(x.detach(), "sum", name, y.detach()),
        lambda y: OPS.reduce_scatter_out(x.detach(), name, False, y.detach()[:2]),
    )
    for write in writes:
        saved = x.exp()
        write(saved)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            saved.sum().backward()
    kept = x.exp()  # an input that is only read
    OPS.reduce_scatter_out(kept.detach(), name, False, torch.empty(2, 3))
    kept.sum().backward()


@pytest.mark.ranks(2)
def test_results_may_be_modified_in_place(group: dist.ProcessGroup) -> None:
    W, cases = group.size(), calls(group)
    cases["exchange_heads, the way back"] = Call(
        lambda x, y: OPS.exchange_heads([x, y], False, group.group_name),
        [torch.randn(1, 1, 3 * W, 4), torch.randn(1, 1, 3 * W, 2)],
    )
    factor = torch.tensor(2.0, requires_grad=True)
    for name, call in cases.items():
        with torch.no_grad():
            outputs = call.run(*call.inputs)
        if not name.startswith(("_low_contention", "flex")):
            for out in outputs:
                out.mul_(factor)
        # Their backward passes read the result; torch's wait_tensor returns a view.
        reads = (*ATTENTION, "scan_states", "fused_dispatch_grouped_matmul", SCATTERED)
        if name in reads or name.startswith("_low_contention"):
            continue
        inputs = leaves(call.inputs)
        whole = [4 * out.square().sum() for out in call.run(*inputs)]
        expected = torch.autograd.grad(whole, inputs)
        outputs = call.run(*inputs)
        for out in outputs:
            out.mul_(2)
        found = torch.autograd.grad([out.square().sum() for out in outputs], inputs)
        for got, want in zip(found, expected, strict=True):
            torch.testing.assert_close(got, want, msg=name)
