"""Models of language and pictures under `training_step`, as in one process or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import symm_cp
from tests.exhaustive import some
from tests.integrations.common import IGNORED, SIZES, Batch, Client, WideTensors, assert_near

PICTURE, BEGIN = 51, 49
_ROPE = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
_TEXT = {name: SIZES[name] for name in SIZES if name.startswith(("num_", "hidden", "head"))}
_TEXT |= {"vocab_size": 53, "intermediate_size": 32}
_MROPE = {**_TEXT, "rope_parameters": _ROPE}
_DELTA = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8}
_DELTA |= {"linear_value_head_dim": 6, "layer_types": ["linear_attention", "full_attention"]}
_TOWER = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2}
_TOWER |= {"out_hidden_size": 32, "num_position_embeddings": 64}
_CLIP = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
_CLIP |= {"num_attention_heads": 2, "image_size": 28, "patch_size": 14}


def client(name: str, text: dict[str, Any], vision: dict[str, Any], **options: Any) -> Client:
    options |= {"image_token_id": PICTURE, "text_config": text, "vision_config": vision}
    return Client(name, options, head="ForConditionalGeneration", without=tuple(SIZES))


_SPECIAL = {"vision_start_token_id": BEGIN, "vision_end_token_id": 48, "video_token_id": 50}
CLIENTS = {
    "qwen2.5": client("Qwen2_5_VL", _MROPE, {**_TOWER, "fullatt_block_indexes": [0]}, **_SPECIAL),
    "qwen2": client("Qwen2VL", _MROPE, {**_TOWER, "embed_dim": 16, "hidden_size": 32}, **_SPECIAL),
    "qwen3": client("Qwen3VL", _MROPE, {**_TOWER, "deepstack_visual_indexes": [0]}, **_SPECIAL),
    "qwen3.5": client("Qwen3_5", {**_MROPE, **_DELTA}, _TOWER, **_SPECIAL),
    "llava": client(
        "Llava",
        {**_TEXT, "model_type": "llama"},
        {**_CLIP, "model_type": "clip_vision_model", "projection_dim": 16},
    ),
    "mistral3": client(
        "Mistral3",
        {**_TEXT, "model_type": "mistral"},
        {**_CLIP, "model_type": "pixtral", "patch_size": 7, "head_dim": 8},
    ),
    "gemma3": client(
        "Gemma3", _TEXT, {**_CLIP, "image_size": 56, "model_type": "siglip_vision_model"},
        mm_tokens_per_image=4,
    ),
}  # fmt: skip
#: Refused with pictures, and what their language models get.
REFUSED = {"qwen3": "visual_pos_masks, deepstack_visual_embeds", "gemma3": "attention_mask"}
LENGTH = 15  # no world size divides it


def text_of(family: str, rows: int) -> Batch:
    """Text, with positions in `rows` rows that differ, or without."""
    ids = torch.randint(40, (2, LENGTH))
    n = torch.arange(LENGTH)
    batch = {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}
    if rows:
        several = torch.stack([n, n // 2, n % 5])[:, None].expand(3, 2, LENGTH)
        batch["position_ids"] = several.contiguous()
    return batch


def pictures_of(family: str, model: Any) -> Batch:
    """Two samples with a picture each, of four tokens, which ranks share."""
    ids = torch.randint(40, (2, LENGTH))
    for sample, begin in enumerate((2, 8)):
        ids[sample, begin] = BEGIN
        ids[sample, begin + 1 : begin + 5] = PICTURE
    labels = ids.masked_fill(ids == PICTURE, IGNORED)
    batch = {"input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids)}
    vision = model.config.vision_config
    if family in ("llava", "gemma3", "mistral3"):
        batch["pixel_values"] = torch.randn(2, 3, *[vision.image_size] * 2, dtype=torch.float64)
        if family == "mistral3":
            batch["image_sizes"] = torch.full((2, 2), vision.image_size)
        if family == "gemma3":
            batch["token_type_ids"] = (ids == PICTURE).long()
        return batch
    width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    batch["pixel_values"] = torch.randn(2 * 16, width, dtype=torch.float64)
    batch["image_grid_thw"] = torch.tensor([[1, 4, 4], [1, 4, 4]])
    batch["mm_token_type_ids"] = (ids == PICTURE).int()
    return batch


def as_in_one_process(group: dist.ProcessGroup, model: Any, one: Any, batch: Batch) -> None:
    with WideTensors():
        wanted = one(**batch).loss
        wanted.backward()
        with symm_cp.training_step(model, batch, group) as step:
            step.loss.backward()
    assert_near("loss", step.loss, wanted, 1e-9)
    others = dict(one.named_parameters())
    largest = max(float(p.grad.abs().max()) for p in others.values() if p.grad is not None)
    for name, parameter in model.named_parameters():
        expected = others[name].grad
        assert (parameter.grad is None) == (expected is None), name
        if expected is not None:
            assert_near(name, parameter.grad, expected, 1e-9, 1e-3 * largest)


@pytest.mark.parametrize(
    ("family", "world_size", "rows"),
    some(
        ("qwen2.5", 2, 3),
        ("qwen3", 3, 3),
        of=[
            *((family, size, 3) for family in ("qwen2", "qwen2.5", "qwen3") for size in (2, 3)),
            *((family, 2, 0) for family in CLIENTS),
        ],
    ),
)
@pytest.mark.ranks
def test_text_alone(group: dist.ProcessGroup, world_size: int, family: str, rows: int) -> None:
    """The tower does not run; positions in several rows are cut along the sequence."""
    model, one = (CLIENTS[family].make("eager") for _ in range(2))
    as_in_one_process(group, model, one, text_of(family, rows))


@pytest.mark.parametrize(
    ("family", "world_size"),
    some(
        ("qwen2.5", 2),
        ("llava", 3),
        ("qwen3", 2),
        of=[(family, size) for family in CLIENTS for size in (2, 3)],
    ),
)
@pytest.mark.ranks
def test_pictures(group: dist.ProcessGroup, world_size: int, family: str) -> None:
    """The tower runs whole on each rank; its result is cut with the text."""
    model, one = (CLIENTS[family].make("eager") for _ in range(2))
    batch = pictures_of(family, model)
    if family not in REFUSED:
        as_in_one_process(group, model, one, batch)
        return
    one(**batch)
    message = f"{family.split('.')[0].title()}.* language model gets {REFUSED[family]}, which"
    with (
        pytest.raises(NotImplementedError, match=message),
        symm_cp.training_step(model, batch, group),
    ):
        pass


@pytest.mark.ranks(2)
def test_other_pictures_on_a_rank_are_refused(group: dist.ProcessGroup) -> None:
    model = CLIENTS["llava"].make("eager")
    batch = pictures_of("llava", model)
    batch["pixel_values"] += group.rank()
    with (
        pytest.raises(RuntimeError, match="inputs_embeds"),
        symm_cp.training_step(model, batch, group),
    ):
        pass
