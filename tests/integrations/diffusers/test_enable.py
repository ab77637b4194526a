"""`enable` and `disable`, and refused calls."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from symm_cp.testing import Ranks
from tests.exhaustive import exhaustive
from tests.test_accelerators import cuda_without_gpu


def runs_as_users_do(group: dist.ProcessGroup) -> None:
    from diffusers.models.modeling_utils import ModelMixin

    import symm_cp.integrations.diffusers as integration
    from tests.integrations.diffusers.common import (
        CLIENTS,
        assert_same,
        attention_dispatch,
        over_ranks,
        parallel,
        ring_of,
        run_model,
    )

    torch.manual_seed(5)
    client = CLIENTS["flux"]
    inputs = client.inputs(4, 10)
    expected = run_model(client.make(), inputs)
    theirs = vars(attention_dispatch).copy()
    backends = attention_dispatch._AttentionBackendRegistry._backends.copy()

    with pytest.raises(ZeroDivisionError):  # what diffusers does on CPU
        parallel(client, ring_of(group))
    integration.enable()
    with mock.patch.object(torch.accelerator, "current_accelerator", cuda_without_gpu):
        model = parallel(client, ring_of(group))
    assert_same(over_ranks(run_model(model, inputs), group), expected, client.tolerance)
    ours = vars(attention_dispatch).copy(), vars(ModelMixin).copy()
    integration.enable()
    assert (vars(attention_dispatch), vars(ModelMixin)) == ours
    model = parallel(client, ring_of(group))
    assert_same(over_ranks(run_model(model, inputs), group), expected, client.tolerance)

    integration.disable()
    integration.disable()
    assert vars(attention_dispatch) == theirs
    assert attention_dispatch._AttentionBackendRegistry._backends == backends
    with pytest.raises(ZeroDivisionError):
        parallel(client, ring_of(group))
    with pytest.raises(ValueError, match="does not support return_lse"):
        run_model(model, inputs)

    integration.enable()
    model.zero_grad()
    assert_same(over_ranks(run_model(model, inputs), group), expected, client.tolerance)


def test_on_and_off(ranks: Ranks) -> None:
    with ranks.own(2, runs_as_users_do) as running:
        for outcome in running.outcomes(timeout=120):
            assert not outcome.failure, outcome.failure


@exhaustive
@pytest.mark.ranks(4)
def test_refusals(group: dist.ProcessGroup) -> None:
    import diffusers
    from diffusers.models.attention_dispatch import attention_backend, dispatch_attention_fn

    import symm_cp.integrations.diffusers as integration
    from tests.integrations.diffusers.common import CLIENTS, parallel, ring_of

    client = CLIENTS["flux"]
    inputs = client.inputs(8, 16)
    integration.enable()
    try:
        model = parallel(client, ring_of(group))
        config = model._parallel_config
        q = torch.randn(2, 6, 4, 8)

        def refused(match: str, mask: torch.Tensor | None = None, **options: Any) -> None:
            with pytest.raises(NotImplementedError, match=match):
                dispatch_attention_fn(q, q, q, mask, parallel_config=config, **options)

        refused("is_causal=True is not supported", is_causal=True)
        refused(r"dropout_p=0.5 is not supported", dropout_p=0.5)
        for shape in ((2, 1, 6, 6), (2, 1, 1, 24), (3, 1, 1, 6), (2, 2, 1, 6)):
            refused(r"must be \(2 or 1, 4 or 1, 1, 6\)", torch.ones(shape, dtype=torch.bool))
        whole = torch.ones(2, 1, 1, 6, dtype=torch.bool)
        refused(r"scale=-1.0 with attn_mask, must be positive", whole, scale=-1.0)
        refused("backend 'flex' would attend to this rank's part", backend="flex")
        ignoring = pytest.raises(NotImplementedError, match="'_native_math' would attend")
        with attention_backend("_native_math"), ignoring:
            model(**inputs, return_dict=False)

        # Its processors call torch's attention themselves.
        other = diffusers.SD3Transformer2DModel(
            sample_size=8, num_layers=1, num_attention_heads=2, attention_head_dim=4,
            joint_attention_dim=8, caption_projection_dim=8, pooled_projection_dim=8,
        )  # fmt: skip
        with pytest.raises(NotImplementedError, match=r"blocks\.0\.attn attends by"):
            other.enable_parallelism(config=ring_of(group), cp_plan={})
        assert other._parallel_config is None

        # If one rank refuses a call, its peers get an error.
        if group.rank() == 0:
            refused("is_causal=True", is_causal=True)
        else:
            with pytest.raises(RuntimeError, match=r"rank 0.*is_causal=True is not supported"):
                dispatch_attention_fn(q, q, q, parallel_config=config)
    finally:
        integration.disable()


@exhaustive
@pytest.mark.ranks(1)
def test_another_diffusers(group: dist.ProcessGroup) -> None:
    from diffusers.hooks import context_parallel as hooks

    import symm_cp.integrations.diffusers as integration
    from tests.integrations.diffusers.common import attention_dispatch

    before = attention_dispatch._templated_context_parallel_attention
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(hooks.EquipartitionSharder, "unshard", lambda tensor, mesh: tensor)
        with pytest.raises(NotImplementedError, match=r"takes \(tensor mesh\), must take"):
            integration.enable()
        patched.delattr(hooks.EquipartitionSharder, "unshard")
        with pytest.raises(NotImplementedError, match=r"unshard of diffusers .* is missing"):
            integration.enable()
    assert attention_dispatch._templated_context_parallel_attention is before


@exhaustive
@pytest.mark.parametrize(
    "degrees",
    [{"ring_degree": 4}, {"ulysses_degree": 4}, {"ring_degree": 2, "ulysses_degree": 2}],
)
@pytest.mark.ranks(4)
def test_masks(group: dist.ProcessGroup, degrees: dict[str, Any]) -> None:
    """Per-head masks, additive masks with gradients, fewer key heads, and the log-sum-exp."""
    import diffusers
    from torch.nn.functional import scaled_dot_product_attention as attention

    import symm_cp.integrations.diffusers as integration
    from tests.integrations.diffusers.common import CLIENTS, attention_dispatch, noise

    rank, W = group.rank(), group.size()
    integration.enable()
    try:
        model = CLIENTS["flux"].make()
        model.enable_parallelism(config=diffusers.ContextParallelConfig(**degrees))
        attend = attention_dispatch._templated_context_parallel_attention
        kernels = {
            "forward_op": attention_dispatch._native_attention_forward_op,
            "backward_op": None,
            "_parallel_config": model._parallel_config,
        }
        for heads, kv_heads in ((4, 4), (8, 4)):
            q, g = noise(2, 3 * W, heads, 8), noise(2, 3 * W, heads, 8)
            k, v = noise(2, 2 * W, kv_heads, 8), noise(2, 2 * W, kv_heads, 8)
            added = noise(1, kv_heads, 1, 2 * W)
            of_heads = torch.rand(2, kv_heads, 1, 2 * W) < 0.7
            of_heads[..., 0] = True
            hidden = noise(2, 1, 1, 2 * W).masked_fill(~of_heads[:, :1], -torch.inf)
            for mask in (added, of_heads, hidden):
                learned = mask is added
                whole = [t.clone().requires_grad_() for t in (q, k, v)]
                parts = [t.chunk(W, 1)[rank].clone().requires_grad_() for t in (q, k, v)]
                local = mask.chunk(W, -1)[rank].clone().requires_grad_(learned)
                mask = mask.clone().requires_grad_(learned)
                repeated = mask
                if mask.shape[1] > 1:
                    repeated = mask.repeat_interleave(heads // kv_heads, 1)
                want = attention(
                    *(t.transpose(1, 2) for t in whole), repeated, scale=0.5, enable_gqa=True
                ).transpose(1, 2)
                out, lse = attend(
                    *parts, local, scale=0.5, enable_gqa=True, return_lse=True, **kernels
                )
                close = {"rtol": 1e-9, "atol": 1e-9}
                torch.testing.assert_close(out, want.chunk(W, 1)[rank], **close)
                assert lse.shape == out.shape[:3]
                want.backward(g)
                out.backward(g.chunk(W, 1)[rank])
                for part, t in zip(parts, whole, strict=True):
                    torch.testing.assert_close(part.grad, t.grad.chunk(W, 1)[rank], **close)
                if learned:
                    torch.testing.assert_close(local.grad, mask.grad.chunk(W, -1)[rank], **close)
    finally:
        integration.disable()
