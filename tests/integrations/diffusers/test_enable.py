"""`enable` and `disable`, and what is refused."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.pool import Ranks


def runs_as_users_do(group: dist.ProcessGroup) -> None:
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
    integration.enable()
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
        for outcome in running.outcomes(timeout=60):
            assert not outcome.failure, outcome.failure
