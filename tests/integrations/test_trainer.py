"""transformers' `Trainer` under context parallelism: losses and weights of one process."""

from __future__ import annotations

import functools
import os
import tempfile
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import transformers
from torch.distributed.tensor import DTensor
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

import symm_cp
from symm_cp.integrations.transformers.trainer import (
    ContextParallelMixin,
    ContextParallelTrainer,
    _gather_once,
)
from symm_cp.testing import Ranks
from tests.context_parallel.common import mesh_of
from tests.exhaustive import exhaustive
from tests.integrations.test_peft import needs_peft

pytest.importorskip("accelerate")

STEPS, LENGTH, IGNORED = 3, 24, -100
SIZES = {
    "vocab_size": 31,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "max_position_embeddings": 64,
    "attn_implementation": "sdpa",
}
T5 = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2, "dropout_rate": 0.0}
BERT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


class Texts(Dataset[dict[str, torch.Tensor]]):
    """Samples with padding on the right and different numbers of labels."""

    def __init__(self, kind: str, count: int = 16) -> None:
        generator = torch.Generator().manual_seed(5)
        self.samples = []
        for sample in range(count):
            ids = torch.randint(1, 31, (LENGTH,), generator=generator)
            ids[LENGTH - sample % 7 :] = 0
            labels = ids.masked_fill(ids == 0, IGNORED)
            labels[: 2 * (sample % 5)] = IGNORED
            mask = (ids != 0).long()
            entry = {"input_ids": ids, "attention_mask": mask, "labels": labels}
            if kind.startswith("T5"):
                entry["labels"] = labels[:16].clone()
            self.samples.append(entry)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self.samples[index]


def model_of(name: str) -> torch.nn.Module:
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    name, _, adapter = name.partition(" with ")
    kind = getattr(transformers, name)
    options = T5 if name.startswith("T5") else BERT
    made = kind.config_class(**{**SIZES, **options, "decoder_start_token_id": 0})
    if not adapter:
        return kind(made).double()
    import peft

    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return peft.get_peft_model(kind(made), config).double()


def trained(
    kind: type[Trainer], name: str, folder: str, batch: int, options: dict[str, Any], **cp: Any
) -> tuple[list[float], float, dict[str, torch.Tensor]]:
    """Returns the loss of each step, the evaluation's loss, and the weights."""
    model = model_of(name)
    args = TrainingArguments(
        output_dir=folder,
        max_steps=STEPS,
        per_device_train_batch_size=batch,
        per_device_eval_batch_size=batch,
        learning_rate=0.1,
        optim="sgd",
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        seed=3,
        logging_nan_inf_filter=False,
        **options,
    )
    texts = Texts(name)
    trainer = kind(model, args, train_dataset=texts, eval_dataset=texts, **cp)
    trainer.train()
    losses = [float(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]
    evaluated = float(trainer.evaluate()["eval_loss"])
    whole = {
        key: value.full_tensor() if isinstance(value, DTensor) else value
        for key, value in model.state_dict().items()
    }
    plain = {key.removeprefix("module."): value for key, value in whole.items()}
    return losses, evaluated, plain


def launched(group: dist.ProcessGroup) -> None:
    """Sets the variables that torchrun sets."""
    variables = {"RANK": group.rank(), "LOCAL_RANK": group.rank(), "WORLD_SIZE": group.size()}
    os.environ.update({name: str(value) for name, value in variables.items()})
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"})


def trains(
    group: dist.ProcessGroup, name: str, replicas: int, sequential: bool, options: dict[str, Any]
) -> Any:
    launched(group)
    mesh = mesh_of(group)
    if replicas > 1:
        sizes = (replicas, group.size() // replicas)
        mesh = dist.init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "cp"))["cp"]
    cp = {"cp_load_balancer": symm_cp.Sequential} if sequential else {}
    compute_loss = Trainer.compute_loss

    def asked_for_the_loss(self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Fails if training asks for outputs: TRL's trainers would compute their logits again."""
        assert not (model.training and (args[1:2] == (True,) or kwargs.get("return_outputs")))
        return compute_loss(self, model, *args, **kwargs)

    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(Trainer, "compute_loss", asked_for_the_loss),
    ):
        return trained(
            ContextParallelTrainer, name, folder, 4 // replicas, options, cp_mesh=mesh, **cp
        )


def alone(group: dist.ProcessGroup, name: str, options: dict[str, Any]) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        return trained(Trainer, name, folder, 4, options)


def results(ranks: Ranks, world_size: int, function: Any, *args: Any) -> list[Any]:
    """Runs in new processes: accelerate keeps its first state for a process's lifetime."""
    with ranks.own(world_size, function, *args) as running:
        outcomes = running.outcomes(timeout=240)
    for outcome in outcomes:
        assert not outcome.failure, outcome.failure
    return [outcome.result for outcome in outcomes]


def same_training(found: list[Any], wanted: Any) -> None:
    """Compares each rank's losses of steps and of an evaluation, and weights."""
    losses, evaluated, weights = wanted
    for got_losses, got_evaluated, got in found:
        torch.testing.assert_close(got_losses, losses, rtol=1e-4, atol=1e-4)
        assert abs(got_evaluated - evaluated) < 1e-4
        assert got.keys() == weights.keys()
        for key, want in weights.items():
            torch.testing.assert_close(got[key], want, rtol=1e-4, atol=1e-5, msg=key)


CHECKPOINTED = {"gradient_checkpointing": True}
CASES: list[Any] = [
    ("LlamaForCausalLM", 2, 1, False, {}),
    ("LlamaForCausalLM", 2, 1, True, CHECKPOINTED),
    ("LlamaForCausalLM", 4, 2, False, {"average_tokens_across_devices": False}),
    ("LlamaForCausalLM", 4, 2, False, {"gradient_accumulation_steps": 2, **CHECKPOINTED}),
    pytest.param("LlamaForCausalLM with LoRA", 2, 1, False, {}, marks=needs_peft),
    ("BertForMaskedLM", 2, 1, False, {}),
    ("T5ForConditionalGeneration", 2, 1, False, CHECKPOINTED),
]


def trains_with_dropout(group: dist.ProcessGroup, options: dict[str, Any], rate: float) -> Any:
    # With weights of the default size, attention makes no difference to the loss.
    BERT.update(attention_probs_dropout_prob=rate, initializer_range=0.3)
    return trains(group, "BertForMaskedLM", 1, False, options)


@exhaustive
@pytest.mark.parametrize("options", [{}, CHECKPOINTED])
def test_dropout(ranks: Ranks, options: dict[str, Any]) -> None:
    """All ranks use the seed of `args`, and drop the same weights of attention as one process."""
    (wanted,) = results(ranks, 1, trains_with_dropout, options, 0.3)
    ((without, _, _),) = results(ranks, 1, trains_with_dropout, options, 0.0)
    assert abs(wanted[0][0] - without[0]) > 1e-3, "nothing was dropped"
    same_training(results(ranks, 2, trains_with_dropout, options, 0.3), wanted)


@exhaustive
@pytest.mark.parametrize(("name", "world_size", "replicas", "sequential", "options"), CASES)
def test_losses_and_weights_are_those_of_one_process(
    ranks: Ranks,
    name: str,
    world_size: int,
    replicas: int,
    sequential: bool,
    options: dict[str, Any],
) -> None:
    (wanted,) = results(ranks, 1, alone, name, options)
    assert len(wanted[0]) == STEPS
    if options.get("average_tokens_across_devices") is False:
        # The mean of the replicas' means, as without context parallelism.
        wanted = results(ranks, 2, replicated, name, options)[0]
    found = results(ranks, world_size, trains, name, replicas, sequential, options)
    same_training(found, wanted)


def replicated(group: dist.ProcessGroup, name: str, options: dict[str, Any]) -> Any:
    launched(group)
    with tempfile.TemporaryDirectory() as folder:
        return trained(Trainer, name, folder, 2, options)


COUNT = 11  # samples, in batches of 4


def evaluated(kind: type[Trainer], name: str, **cp: Any) -> Any:
    """Returns the metrics of an evaluation after another, and the predictions of all samples."""

    def metrics(prediction: transformers.EvalPrediction) -> dict[str, float]:
        logits, labels = prediction.predictions, prediction.label_ids
        logits = logits[0] if isinstance(logits, tuple) else logits
        assert len(logits) == len(labels) == COUNT
        hits = (logits.argmax(-1) == labels) & (labels != IGNORED)
        return {"hits": int(hits.sum()), "first": float(logits[-1, 0, 0])}

    with tempfile.TemporaryDirectory() as folder:
        options = {"parallelism_config": cp.pop("parallelism_config", None)}
        args = TrainingArguments(
            output_dir=folder,
            per_device_eval_batch_size=4,
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
            **options,
        )
        texts = Texts(name, COUNT)
        model = model_of(name)
        trainer = kind(model, args, eval_dataset=texts, compute_metrics=metrics, **cp)
        found = [trainer.evaluate(), trainer.evaluate(), trainer.predict(texts)]
        trainer.compute_metrics = None
        trainer.args.prediction_loss_only = True
        found.append(trainer.evaluate())
    timed = ("runtime", "per_second", "preparation_time")
    numbers = [
        {key: value for key, value in each.items() if not key.endswith(timed)}
        for each in (*found[:2], found[2].metrics, found[3])
    ]
    return numbers, found[2].predictions, found[2].label_ids


def evaluates(group: dist.ProcessGroup, name: str, kind: str) -> Any:
    if kind == "one process":
        return evaluated(Trainer, name)
    launched(group)
    if kind == "replicas":
        return evaluated(Trainer, name)
    if kind == "accelerate":
        from accelerate.parallelism_config import ParallelismConfig

        from symm_cp.integrations.accelerate import enable

        enable()
        config = ParallelismConfig(cp_size=group.size())
        return evaluated(Trainer, name, parallelism_config=config)
    sizes = (group.size() // 2, 2)
    mesh = dist.init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "cp"))
    return evaluated(ContextParallelTrainer, name, cp_mesh=mesh["cp"])


def same_evaluation(ranks: Ranks, wanted: Any, size: int, *args: Any) -> None:
    for got in results(ranks, size, evaluates, *args):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


def test_evaluation_with_a_smaller_last_batch(ranks: Ranks) -> None:
    (wanted,) = results(ranks, 1, evaluates, "LlamaForCausalLM", "one process")
    same_evaluation(ranks, wanted, 2, "LlamaForCausalLM", "context parallel")


@exhaustive
@pytest.mark.parametrize("name", ["LlamaForCausalLM", "BertForMaskedLM"])
def test_all_evaluations(ranks: Ranks, name: str) -> None:
    (wanted,) = results(ranks, 1, evaluates, name, "one process")
    same_evaluation(ranks, wanted, 2, name, "context parallel")
    same_evaluation(ranks, wanted, 2, name, "accelerate")
    if name == "BertForMaskedLM":
        return  # two replicas of a Trainer report twice its loss, as the model takes no num_items
    wanted, _ = results(ranks, 2, evaluates, name, "replicas")
    same_evaluation(ranks, wanted, 4, name, "context parallel")


@exhaustive
def test_evaluation_of_two_sequences(ranks: Ranks) -> None:
    name = "T5ForConditionalGeneration"
    (wanted,) = results(ranks, 1, evaluates, name, "one process")
    same_evaluation(ranks, wanted, 2, name, "context parallel")


def gathers_objects(group: dist.ProcessGroup) -> None:
    from accelerate import Accelerator

    launched(group)
    accelerator = Accelerator(cpu=True)
    gather = functools.partial(accelerator.gather_for_metrics, use_gather_object=True)
    found = _gather_once(accelerator, 2, gather, [{"of": group.rank()}, "more"])
    assert found == [{"of": 0}, "more", {"of": 2}, "more"]


@exhaustive
def test_objects_are_gathered_once(ranks: Ranks) -> None:
    results(ranks, 4, gathers_objects)


def refuses(group: dist.ProcessGroup) -> None:
    mesh = mesh_of(group)

    class Ours(ContextParallelMixin, Trainer):
        pass

    def make(**options: Any) -> Trainer:
        with tempfile.TemporaryDirectory() as folder:
            given = {key: options.pop(key) for key in ("label_smoothing_factor",) if key in options}
            args = TrainingArguments(output_dir=folder, use_cpu=True, report_to="none", **given)
            return Ours(model_of("LlamaForCausalLM"), args, cp_mesh=mesh, **options)

    if os.environ.get("WORLD_SIZE") is None:
        with pytest.raises(RuntimeError, match="accelerate sees 1 processes of 2: start them with"):
            make()
        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state(reset_partial_state=True)
    launched(group)
    with pytest.raises(NotImplementedError, match="label_smoothing_factor and compute_loss_func"):
        make(label_smoothing_factor=0.1)
    with pytest.raises(NotImplementedError, match="label_smoothing_factor and compute_loss_func"):
        make(compute_loss_func=lambda *args, **kwargs: None)
    with pytest.raises(RuntimeError, match="a batch that was not cut"):
        make().compute_loss(torch.nn.Identity(), {})


@exhaustive
def test_what_a_rank_cannot_compute_is_refused(ranks: Ranks) -> None:
    results(ranks, 2, refuses)
