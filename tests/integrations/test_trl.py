"""TRL's supervised fine-tuning under context parallelism: losses and weights of one process."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers

from symm_cp.integrations.transformers.trainer import ContextParallelMixin
from symm_cp.testing import Ranks
from tests.context_parallel.common import mesh_of
from tests.exhaustive import exhaustive
from tests.integrations.test_trainer import launched, model_of, results

pytest.importorskip("trl")


def texts(vocabulary: int) -> list[dict[str, list[int]]]:
    """Documents whose first tokens are a prompt."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(5, 20, (24,), generator=generator).tolist()
    return [
        {
            "input_ids": torch.randint(3, vocabulary, (n,), generator=generator).tolist(),
            "completion_mask": [0] * 3 + [1] * (n - 3),
        }
        for n in lengths
    ]


def tuned(packing: bool, parallel: bool, **cp: Any) -> tuple[list[float], list[torch.Tensor]]:
    import datasets
    import tokenizers
    import trl

    class Parallel(ContextParallelMixin, trl.SFTTrainer):
        pass

    model = model_of("LlamaForCausalLM")
    vocabulary = model.config.vocab_size
    words = {f"w{i}": i for i in range(vocabulary)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    with tempfile.TemporaryDirectory() as folder:
        args = trl.SFTConfig(
            output_dir=folder,
            packing=packing,
            max_length=32,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            max_steps=2,
            logging_steps=1,
            learning_rate=0.1,
            optim="sgd",
            report_to="none",
            save_strategy="no",
            use_cpu=True,
            bf16=False,
            disable_tqdm=True,
        )
        trainer = (Parallel if parallel else trl.SFTTrainer)(
            model,
            args,
            train_dataset=datasets.Dataset.from_list(texts(vocabulary)),
            processing_class=transformers.PreTrainedTokenizerFast(
                tokenizer_object=tokenizer, pad_token="w0", eos_token="w1"
            ),
            **cp,
        )
        trainer.train()
    losses = [float(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]
    return losses, [parameter.detach() for parameter in model.parameters()]


def alone(group: dist.ProcessGroup, packing: bool) -> Any:
    return tuned(packing, parallel=False)


def shared(group: dist.ProcessGroup, packing: bool) -> Any:
    launched(group)
    return tuned(packing, parallel=True, cp_mesh=mesh_of(group))


@exhaustive
@pytest.mark.parametrize("packing", [True, False])
def test_fine_tuning_is_that_of_one_process(ranks: Ranks, packing: bool) -> None:
    ((losses, weights),) = results(ranks, 1, alone, packing)
    for found, parameters in results(ranks, 2, shared, packing):
        assert found == pytest.approx(losses, abs=2e-4)  # four digits are logged
        for parameter, weight in zip(parameters, weights, strict=True):
            torch.testing.assert_close(parameter, weight, rtol=1e-3, atol=1e-5)
