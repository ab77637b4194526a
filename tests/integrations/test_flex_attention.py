"""transformers' own flex attention in a context that is not given the model: masks of the whole."""

from __future__ import annotations

import threading
import unittest.mock
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.attention.flex_attention import BlockMask
from transformers import AttentionMaskInterface, LlamaConfig, masking_utils

import symm_cp
from symm_cp.context_parallel import flex
from symm_cp.integrations.transformers import flex_masks
from symm_cp.testing import Ranks
from tests.context_parallel.common import mesh_of
from tests.exhaustive import pairs, some
from tests.integrations.common import (
    BALANCERS,
    Client,
    assert_near,
    causal_batch,
    check_client,
    in_one_process,
)
from tests.integrations.test_compiled import at_most, layers_compiled

FLEX = "flex_attention"
LAYERS = {"num_hidden_layers": 1}  # compiled in each test
CLIENTS = {
    "Llama": Client("Llama", LAYERS),
    "Mistral": Client("Mistral", {"sliding_window": 5, **LAYERS}),
}


def compiled(model: nn.Module) -> None:
    model.compile(fullgraph=True, backend="aot_eager")


PREPARED: dict[str, Callable[[nn.Module], None] | None] = {
    "eager": None,
    "layers": layers_compiled(backend="aot_eager"),
    "whole": compiled,
}
KINDS: dict[str, tuple[int, dict[str, Any]]] = {
    "packed": (24, {"documents": [9, 15]}),
    # With Sequential, documents end where ranks do, so no rank sees a boundary.
    "packed at ranks": (24, {"documents": [12, 12]}),
    "uneven": (29, {"documents": [7, 2, 20]}),
    "left": (24, {"padding": "left"}),
    "right": (29, {"padding": "right"}),
}


def flex_client(
    group: dist.ProcessGroup, prepared: str, layout: str, kind: str, name: str, method: Any
) -> None:
    torch._dynamo.reset()
    length, options = KINDS[kind]
    check_client(
        group,
        CLIENTS[name],
        causal_batch(length, **options),
        layout=layout,
        implementation=FLEX,
        passed=False,
        prepare=PREPARED[prepared],
        method=method,
    )


CASES = [(2, "eager", "Sequential", "packed at ranks", "Mistral", None)]
LARGER = [
    *CASES,
    (4, "eager", "Sequential", "packed at ranks", "Llama", None),
    (4, "eager", "HeadTail", "uneven", "Mistral", None),
]
COMPILED = [
    (2, "whole", "HeadTail", "packed", "Llama", None),
    (4, "whole", "Sequential", "packed at ranks", "Mistral", None),
    (2, "layers", "HeadTail", "packed", "Mistral", "ulysses"),
    (2, "whole", "HeadTail", "uneven", "Mistral", "ulysses"),
    (2, "layers", "Sequential", "left", "Llama", None),
    (2, "whole", "HeadTail", "right", "Llama", None),
]


@pytest.mark.parametrize(
    ("world_size", "prepared", "layout", "kind", "name", "method"),
    some(
        *CASES,
        of=[
            *pairs((2, 4), ["eager"], BALANCERS, KINDS, CLIENTS, (None, "ulysses"), also=LARGER),
            *COMPILED,
        ],
    ),
)
def test_flex_attention_is_that_of_one_process(
    ranks: Ranks,
    world_size: int,
    prepared: str,
    layout: str,
    kind: str,
    name: str,
    method: str | None,
) -> None:
    ranks.run(world_size, flex_client, prepared, layout, kind, name, method, timeout=300)


def many_calls(group: dist.ProcessGroup) -> None:
    torch._dynamo.reset()
    mesh, client = mesh_of(group), CLIENTS["Mistral"]
    model = client.make(FLEX)
    compiled(model)

    def check(documents: list[int]) -> None:
        batch = causal_batch(sum(documents), documents=documents)
        expected = in_one_process(client, batch)
        balancer = symm_cp.HeadTail(sum(documents), group.size())
        local, _ = symm_cp.shard_batch(mesh, batch, load_balancer=balancer)
        local.pop("labels")
        with torch.no_grad(), symm_cp.context_parallel(mesh, load_balancer=balancer):
            logits = model(**local, **client.call).logits
        whole = symm_cp.context_parallel_unshard(mesh, [logits], [1], balancer)[0]
        assert_near("logits", whole, expected.logits, client.tolerance)

    for documents in ([20, 12, 16], [40, 24]):
        check(documents)
    with at_most(0), torch._dynamo.config.patch(error_on_recompile=True):
        for documents in ([30, 34], [1, 60, 3], [50, 30, 10, 6]):
            check(documents)


@pytest.mark.exhaustive
def test_one_graph_serves_all_lengths_and_documents(ranks: Ranks) -> None:
    ranks.run(2, many_calls, timeout=300)


def through_torch(group: dist.ProcessGroup) -> None:
    """Attends to gathered keys with torch's kernels, as on GPUs.

    On the CPU these kernels have no gradients and do not take float64.
    """
    torch._dynamo.reset()
    mesh, client = mesh_of(group), replace(CLIENTS["Mistral"], dtype=torch.float32)
    batch = causal_batch(32, documents=[9, 23])
    expected = in_one_process(client, batch)
    batch.pop("labels")
    balancer = symm_cp.HeadTail(32, group.size())
    local, _ = symm_cp.shard_batch(mesh, batch, load_balancer=balancer)
    create = flex_masks.create_block_mask

    def uncompiled(*args: Any, _compile: bool, **kwargs: Any) -> BlockMask:
        return create(*args, **kwargs)

    with (
        torch.no_grad(),
        unittest.mock.patch.object(flex_masks, "create_block_mask", uncompiled),
        unittest.mock.patch.object(flex, "in_tiles", return_value=False),
        symm_cp.context_parallel(mesh, load_balancer=balancer),
    ):
        logits = client.make(FLEX)(**local, **client.call).logits
    whole = symm_cp.context_parallel_unshard(mesh, [logits], [1], balancer)[0]
    assert_near("logits", whole, expected.logits, client.tolerance)


@pytest.mark.exhaustive
def test_flex_attention_by_torchs_kernels(ranks: Ranks) -> None:
    ranks.run(2, through_torch, timeout=300)


# --- transformers' registry ----------------------------------------------------------------------


def made() -> Any:
    """Returns the mask that a model with flex attention makes for 12 positions."""
    config = LlamaConfig(attn_implementation=FLEX)
    config._attn_implementation_internal = FLEX
    return masking_utils.create_causal_mask(config, torch.empty(1, 12, 8), None, None)


def registered() -> Any:
    return AttentionMaskInterface._global_mapping[FLEX]


def replaces_only_within(group: dist.ProcessGroup) -> None:
    own, masks = masking_utils.flex_attention_mask, []
    quick = unittest.mock.patch.object(
        masking_utils, "create_block_mask", return_value=BlockMask.__new__(BlockMask)
    )
    mesh, balancer = mesh_of(group), symm_cp.HeadTail(12 * group.size(), group.size())
    assert registered() is own
    with symm_cp.context_parallel(mesh, load_balancer=balancer), quick as transformers_own:
        assert registered() is not own
        with symm_cp.context_parallel(mesh, load_balancer=balancer):
            assert tuple(made().seq_lengths) == (12 * group.size(),) * 2
        assert registered() is not own
        transformers_own.assert_not_called()
        elsewhere = threading.Thread(target=lambda: masks.append(made()))
        elsewhere.start()
        elsewhere.join()
        assert masks == [transformers_own.return_value]
    assert registered() is own

    def users(*args: Any, **kwargs: Any) -> str:
        return "theirs"

    AttentionMaskInterface.register(FLEX, users)
    try:
        with symm_cp.context_parallel(mesh):
            assert made() == "theirs"
        assert registered() is users
    finally:
        AttentionMaskInterface.register(FLEX, own)


def test_only_threads_within_a_context_get_masks_of_the_whole(ranks: Ranks) -> None:
    ranks.run(2, replaces_only_within)
