"""Attention by one kernel that polls: real ranks, pulls and flags; the kernel is interpreted."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from symm_cp.testing import Ranks
from tests.exhaustive import some

# Options that the kernel does not support.
UNKNOWN: list[dict[str, Any]] = [
    {"softcap": 2.0},
    {"sinks": True},
    {"bias": True},
    {"dropout_p": 0.1, "dropout_seed": 3},
    {"value_features": 32},
]


def attends(group: dist.ProcessGroup, seed: int) -> None:
    # Triton chooses its interpreter when it is imported.
    from symm_cp.cuda.kernels import arrival_attention as module
    from symm_cp.group import memory
    from symm_cp.ops.attention import arrival as arrival_attention
    from symm_cp.ops.attention.spec import AttentionSpec
    from symm_cp.schedule.layout import head_tail, sequential
    from symm_cp.schedule.mask import Mask
    from tests.cuda import interpreted
    from tests.cuda.simulated import simulation

    interpreted.mend()
    rank, W, choose = group.rank(), group.size(), random.Random(seed)
    torch.manual_seed(seed)
    plain = module.arrival_attention

    def small(*args: Any, **options: Any) -> Any:
        return plain(*args, **options, tiling=module.Tiling(16, 16, 4, 1), programs=2)

    module.arrival_attention = small
    state = memory.resolve(group)
    # The kernel fills the device, and copies within it cannot run beside it.
    mode = {"multiprocessors": True, "patience_ms": 8000}
    with simulation(delays_us=2000, **mode) as made:
        for _ in range(2):
            layout = choose.choice([sequential, head_tail])(16 * 2 * W, W)
            mask = choose.choice([Mask(), Mask(right=0)])
            H, G = choose.choice([(2, 2), (4, 2)])
            q, k, v = (torch.randn(1, n, layout.length, 64) for n in (H, G, G))
            at = torch.tensor(list(layout.positions(rank)))
            mine = [t[:, :, at].half() for t in (q, k, v)]
            spec = AttentionSpec(layout=layout, mask=mask)
            assert arrival_attention.fits(state, mine[0], mine[1], spec)
            for unknown in UNKNOWN:
                other = replace(spec, **unknown)
                assert not arrival_attention.fits(state, mine[0], mine[1], other)
            out, lse = arrival_attention.attend(state, *mine, spec, b"")
            everywhere = torch.arange(layout.length)
            visible = at.unsqueeze(1) >= everywhere if mask else torch.ones(1, 1).bool()
            keys, values = (t.half().double().repeat_interleave(H // G, 1) for t in (k, v))
            score = mine[0].double() @ keys.transpose(-1, -2) * 64**-0.5
            score = score.masked_fill(~visible, -torch.inf)
            torch.testing.assert_close(lse.double(), score.logsumexp(-1), rtol=1e-3, atol=1e-3)
            expected = score.softmax(-1) @ values
            torch.testing.assert_close(out.double(), expected, rtol=2**-8, atol=2**-8)
        assert made.machine.polling_kernels == 2


@pytest.mark.parametrize("world_size", some(3, of=[2, 3]))
@pytest.mark.exhaustive
def test_attention_while_keys_arrive(
    ranks: Ranks, world_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with ranks.own(world_size, attends, random.randrange(1 << 30), forked=False) as running:
        assert [outcome.failure for outcome in running.outcomes(60)] == [""] * world_size
