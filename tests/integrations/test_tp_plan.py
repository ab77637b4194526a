"""`from_pretrained(..., tp_plan="auto")` over groups of this backend: fused, as one process."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.distributed import DistributedConfig

from symm_cp.testing import Ranks
from tests.backend.world import world
from tests.exhaustive import exhaustive, some
from tests.integrations.common import Client, causal_batch, saved
from tests.integrations.decoders import CLIENTS

MODELS = {
    "llama": Client("Llama", {"num_key_value_heads": 4}),
    "qwen2": Client("Qwen2", {"num_key_value_heads": 4}),  # some linears with biases
    "neox": Client("GPTNeoX", {"rotary_pct": 1.0}),  # all of them
    "olmo2": Client("Olmo2", {"num_key_value_heads": 4}),  # gathers what attention is given
    "qwen3-moe": CLIENTS["qwen3-moe"].having(num_key_value_heads=4),
    # The last rank has fewer features of the MLP.
    "uneven": Client("Llama", {"num_key_value_heads": 4, "intermediate_size": 33}),
    # Nothing that is split by features alone.
    "phi3": Client("Phi3", {"num_key_value_heads": 4, "pad_token_id": 0}),
}
SUMS = ("fused_matmul_all_reduce", "_fused_matmuls_all_reduce")


class Counting(TorchDispatchMode):
    """Counts the calls of ops by name."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[op.overloadpacket.__name__] += 1
        return op(*args, **(kwargs or {}))


def whole(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def close(found: torch.Tensor, want: torch.Tensor, tolerance: float, what: str) -> None:
    scale = float(want.abs().max())
    torch.testing.assert_close(
        found, want, rtol=0, atol=tolerance * scale, msg=lambda m: f"{what}: {m}"
    )


def loaded(client: Client, folder: str) -> Any:
    made: Any = type(client.make("eager"))
    return made.from_pretrained(
        folder,
        distributed_config=DistributedConfig(tp_size=dist.get_world_size(), tp_plan="auto"),
        dtype=client.dtype,
        attn_implementation="eager",
        experts_implementation="eager",
    )


def as_in_one_process(group: dist.ProcessGroup, name: str, backend: str, fused: bool) -> None:
    client = MODELS[name]
    model: Any = client.make("eager")
    batch = causal_batch(13, padding="right")
    expected = model(**batch, use_cache=False)
    expected.loss.backward()
    with world(group, backend):
        with saved(model) as folder:
            split = loaded(client, folder)
        with Counting() as counting:
            found = split(**batch, use_cache=False)
            found.loss.backward()
        assert any(counting.calls[name] for name in SUMS) == fused, counting.calls
        close(found.loss, expected.loss, client.tolerance, "loss")
        grads = {key: p.grad for key, p in split.named_parameters()}
        for key, parameter in model.named_parameters():
            if parameter.grad is not None:
                close(whole(grads[key]), parameter.grad, 5 * client.tolerance, key)
        options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
        ids = batch["input_ids"][:1]
        with Counting() as counting:
            tokens = split.generate(ids, **options)
        assert torch.equal(tokens, model.generate(ids, **options))
        assert any(counting.calls[name] for name in SUMS) == fused, counting.calls
        with torch.autocast("cpu", torch.bfloat16):
            logits = [m(input_ids=ids, use_cache=False).logits for m in (split, model)]
        close(logits[0].double(), logits[1].double(), 0.1, "autocast")
        dist.barrier()  # others may still connect


CASES = [(name, size, "symm_cp", name != "phi3") for name in MODELS for size in (2, 4)]
CASES += [("llama", 2, "gloo", False)]


@pytest.mark.parametrize(
    ("name", "world_size", "backend", "fused"), some(("qwen2", 2, "symm_cp", True), of=CASES)
)
def test_losses_gradients_and_tokens_are_those_of_one_process(
    ranks: Ranks, name: str, world_size: int, backend: str, fused: bool
) -> None:
    ranks.run(world_size, as_in_one_process, name, backend, fused)


def compiled(group: dist.ProcessGroup) -> None:
    client = MODELS["llama"]
    model: Any = client.make("eager")
    batch = causal_batch(13)
    model(**batch, use_cache=False).loss.backward()
    with world(group, "symm_cp"):
        with saved(model) as folder:
            split = loaded(client, folder)
        torch.compile(split, backend="aot_eager")(**batch, use_cache=False).loss.backward()
        grads = {key: p.grad for key, p in split.named_parameters()}
        for key, parameter in model.named_parameters():
            close(whole(grads[key]), parameter.grad, 5 * client.tolerance, key)
        dist.barrier()


@exhaustive
def test_compiled(ranks: Ranks) -> None:
    ranks.run(2, compiled)
