"""Transformers of diffusers under `enable_parallelism` against the same models in one process.

A `Client` makes a small model with random weights from its configuration, and inputs of whole
sequences. `check_client` runs it in one process and over ranks, and compares the output and the
gradients of every parameter and input.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import diffusers
import pytest
import torch
import torch.distributed as dist
from diffusers.models import attention_dispatch as attention_dispatch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import symm_cp.integrations.diffusers
from tests.integrations.common import assert_near, spread_weights

diffusers.utils.logging.set_verbosity_error()

SAMPLES = 2
Inputs = dict[str, Any]


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def times() -> torch.Tensor:
    return torch.tensor([0.3, 0.8], dtype=torch.float64)


def flux_inputs(text: int, image: int) -> Inputs:
    return {
        "hidden_states": noise(SAMPLES, image, 4),
        "encoder_hidden_states": noise(SAMPLES, text, 24),
        "pooled_projections": noise(SAMPLES, 20),
        "timestep": times(),
        "img_ids": torch.arange(3.0 * image, dtype=torch.float64).view(image, 3) % 7,
        "txt_ids": torch.arange(3.0 * text, dtype=torch.float64).view(text, 3) % 5,
        "guidance": times(),
    }


def wan_inputs(text: int, image: int) -> Inputs:
    # Patches of 1 x 2 x 2: `image` of them, in one row.
    return {
        "hidden_states": noise(SAMPLES, 4, 1, 2, 2 * image),
        "encoder_hidden_states": noise(SAMPLES, text, 24),
        "timestep": torch.tensor([3, 800]),
    }


def wan_inputs_by_position(text: int, image: int) -> Inputs:
    """Returns inputs like Wan 2.2's, where each image position has its own timestep."""
    steps = torch.arange(SAMPLES * image).view(SAMPLES, image) % 3 * 100
    return wan_inputs(text, image) | {"timestep": steps}


def wan_inputs_from_image(text: int, image: int) -> Inputs:
    """Returns inputs like Wan 2.1's, with image positions before 512 text positions."""
    more = {"encoder_hidden_states_image": noise(SAMPLES, 5, 28)}
    return wan_inputs(512, image) | more


def qwen_inputs(text: int, image: int) -> Inputs:
    return {
        "hidden_states": noise(SAMPLES, image, 16),
        "encoder_hidden_states": noise(SAMPLES, text, 24),
        "timestep": times(),
        "img_shapes": [[(1, 1, image)]] * SAMPLES,
    }


def qwen_inputs_with_padding(text: int, image: int) -> Inputs:
    """The second sample's text is one token, fewer than the first rank holds."""
    mask = torch.ones(SAMPLES, text, dtype=torch.bool)
    mask[1, 1:] = False
    return qwen_inputs(text, image) | {"encoder_hidden_states_mask": mask}


def flux2_inputs(text: int, image: int) -> Inputs:
    inputs = flux_inputs(text, image)
    del inputs["pooled_projections"]
    ids = {
        "img_ids": torch.arange(4.0 * image).view(1, image, 4) % 7,
        "txt_ids": torch.arange(4.0 * text).view(1, text, 4) % 5,
    }
    return {**inputs, **{name: of.expand(SAMPLES, -1, -1) for name, of in ids.items()}}


def minimax_inputs(text: int, image: int) -> Inputs:
    """Returns text, video and sound interleaved in one sequence."""
    sound, length = 4, text + image
    kinds = torch.arange(length) * 7 % length  # a permutation: kinds and timesteps are mixed
    tags = torch.where(kinds < text, 1, torch.where(kinds < text + sound, 2, 0))
    indices = [torch.nonzero(tags == tag).flatten() for tag in range(3)]
    return {
        "hidden_states": noise(SAMPLES, image - sound, 16),
        "audio_hidden_states": noise(SAMPLES, sound, 6),
        "encoder_hidden_states": noise(SAMPLES, text, 24),
        "timestep": times(),
        "timestep_indices": torch.arange(length) % 2,
        "token_tags": tags,
        "position_ids": torch.arange(3 * length).view(length, 3) % 11,
        "video_indices": indices[0],
        "text_indices": indices[1],
        "audio_indices": indices[2],
    }


def ltx_inputs(text: int, image: int) -> Inputs:
    mask = torch.ones(SAMPLES, text, dtype=torch.int64)
    mask[1, -2:] = 0
    return {
        "hidden_states": noise(SAMPLES, image, 8),
        "encoder_hidden_states": noise(SAMPLES, text, 24),
        "encoder_attention_mask": mask,
        "timestep": torch.tensor([3, 800]),
        "num_frames": 1,
        "height": 1,
        "width": image,
    }


@dataclass(frozen=True)
class Client:
    """A model of diffusers, its configuration, and its inputs by lengths of text and image."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    inputs: Callable[[int, int], Inputs] = flux_inputs
    # Relative to the largest value. Rotary embeddings and norms are computed in float32.
    tolerance: float = 2e-5

    def make(self) -> nn.Module:
        model = getattr(diffusers, self.name)(**self.options).double()
        spread_weights(model)
        return model.eval()


_FLUX = {
    "patch_size": 1,
    "in_channels": 4,
    "num_layers": 1,
    "num_single_layers": 1,
    "attention_head_dim": 8,
    "num_attention_heads": 4,
    "joint_attention_dim": 24,
    "pooled_projection_dim": 20,
    "guidance_embeds": True,
    "axes_dims_rope": (2, 2, 4),
}
_COMMON = ("in_channels", "num_layers", "num_single_layers", "attention_head_dim")
_COMMON += ("num_attention_heads", "joint_attention_dim")
_FLUX2 = {name: value for name, value in _FLUX.items() if name in _COMMON}
_FLUX2 |= {"timestep_guidance_channels": 16, "axes_dims_rope": (2, 2, 2, 2)}
_MINIMAX = {
    "num_attention_heads": 4,
    "attention_head_dim": 12,
    "hidden_size": 24,
    "num_layers": 2,
    "num_refiner_layers": 1,
    "ffn_dim": 32,
    "in_channels": 4,
    "audio_in_channels": 6,
    "text_dim": 24,
    "freq_dim": 16,
    "time_embed_hidden_dim": 16,
    "time_embed_dim": 8,
    "rope_freq_dim": 2,
}
_WAN = {
    "num_attention_heads": 4,
    "attention_head_dim": 12,
    "in_channels": 4,
    "out_channels": 4,
    "text_dim": 24,
    "freq_dim": 16,
    "ffn_dim": 32,
    "num_layers": 2,
    "rope_max_seq_len": 64,
}
_QWEN = {
    "in_channels": 16,
    "out_channels": 4,
    "num_layers": 2,
    "attention_head_dim": 8,
    "num_attention_heads": 4,
    "joint_attention_dim": 24,
    "axes_dims_rope": (2, 2, 4),
}
_LTX = {
    "in_channels": 8,
    "out_channels": 8,
    "num_attention_heads": 4,
    "attention_head_dim": 8,
    "cross_attention_dim": 32,
    "num_layers": 2,
    "caption_channels": 24,
}

_HELIOS = {name: value for name, value in _WAN.items() if name != "rope_max_seq_len"}
_HELIOS |= {"ffn_dim": 16, "rope_dim": (4, 4, 4)}
_HELIOS |= {"num_layers": 40}  # as many as its plan names
_HELIOS |= dict.fromkeys(
    ("guidance_cross_attn", "zero_history_timestep", "has_multi_term_memory_patch"), False
)

CLIENTS = {
    "helios": Client("HeliosTransformer3DModel", _HELIOS, wan_inputs),
    "flux": Client("FluxTransformer2DModel", _FLUX),
    "flux of 3 heads": Client("FluxTransformer2DModel", {**_FLUX, "num_attention_heads": 3}),
    "wan": Client("WanTransformer3DModel", _WAN, wan_inputs),
    "wan by position": Client("WanTransformer3DModel", _WAN, wan_inputs_by_position),
    "wan from image": Client(
        "WanTransformer3DModel",
        {**_WAN, "num_layers": 1, "image_dim": 28, "added_kv_proj_dim": 48},
        wan_inputs_from_image,
    ),
    "qwen": Client("QwenImageTransformer2DModel", _QWEN, qwen_inputs),
    "qwen with padding": Client("QwenImageTransformer2DModel", _QWEN, qwen_inputs_with_padding),
    "flux2": Client("Flux2Transformer2DModel", _FLUX2, flux2_inputs),
    "chronoedit": Client("ChronoEditTransformer3DModel", _WAN, wan_inputs),
    "minimax": Client("MiniMaxH3Transformer3DModel", _MINIMAX, minimax_inputs),
    "ltx": Client("LTXVideoTransformer3DModel", _LTX, ltx_inputs),
}


@dataclass(frozen=True)
class Result:
    """Results of a model for a whole sequence: the output, and gradients by name."""

    out: torch.Tensor
    grads: dict[str, torch.Tensor | None]


def output_of(model: nn.Module, inputs: Inputs) -> torch.Tensor:
    """Returns all outputs of a model as one tensor."""
    outs = model(**inputs, return_dict=False)
    return torch.cat([out.flatten(1) for out in outs], 1)


def run_model(model: nn.Module, inputs: Inputs) -> Result:
    """Runs forward and backward from one loss of the whole output."""
    # Leaves, so that their gradients are compared, too.
    leaves = {
        name: value.clone().requires_grad_()
        for name, value in inputs.items()
        if isinstance(value, torch.Tensor) and value.is_floating_point() and "id" not in name
    }
    out = output_of(model, {**inputs, **leaves})
    weights = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape).sin()
    (out * weights + out.square()).sum().backward()
    named = {**dict(model.named_parameters()), **leaves}
    return Result(out.detach(), {name: tensor.grad for name, tensor in named.items()})


def ring_of(group: dist.ProcessGroup) -> diffusers.ContextParallelConfig:
    return diffusers.ContextParallelConfig(ring_degree=group.size())


def mesh_of_pairs(degrees: Mapping[str, Any]) -> DeviceMesh:
    """Returns a mesh of four ranks: two pairs, each of which runs a model."""
    shape = (2, degrees.get("ring_degree", 1), degrees.get("ulysses_degree", 1))
    return init_device_mesh("cpu", shape, mesh_dim_names=("pairs", "ring", "ulysses"))


def parallel(client: Client, config: diffusers.ContextParallelConfig) -> nn.Module:
    model = client.make()
    model.enable_parallelism(config=config)
    return model


def over_ranks(result: Result, group: dist.ProcessGroup) -> Result:
    """Sums gradients over ranks."""
    summed: dict[str, torch.Tensor | None] = {}
    for name, grad in result.grads.items():
        has = torch.tensor(float(grad is not None))
        dist.all_reduce(has, group=group)
        summed[name] = grad
        if grad is not None:
            assert has == group.size(), f"{name} has a gradient on some ranks only"
            summed[name] = grad.clone()
            dist.all_reduce(summed[name], group=group)
    return Result(result.out, summed)


def assert_same(actual: Result, expected: Result, tolerance: float) -> None:
    assert_near("output", actual.out, expected.out, tolerance)
    assert actual.grads.keys() == expected.grads.keys()
    # A nearly zero gradient (of a key's bias, say) is the rounding error of larger ones.
    floor = 1e-3 * max(float(g.abs().max()) for g in expected.grads.values() if g is not None)
    for name, want in expected.grads.items():
        got = actual.grads[name]
        if want is None:  # compiled blocks give zeros if nothing depends on it
            assert got is None or not got.any(), f"{name} has a gradient"
            continue
        assert got is not None, f"{name} has no gradient"
        assert_near(f"gradient of {name}", got, want, tolerance, floor)


@contextmanager
def enabled() -> Iterator[None]:
    symm_cp.integrations.diffusers.enable()
    try:
        yield
    finally:
        symm_cp.integrations.diffusers.disable()


def check_inference(
    client: Client, degrees: Mapping[str, Any], *, lengths: tuple[int, int]
) -> None:
    """Compares only the output of a client, and expects that its gradients are refused."""
    torch.manual_seed(5)
    inputs = client.inputs(*lengths)
    with enabled():
        with torch.no_grad():
            expected = output_of(client.make(), inputs)
            model = parallel(client, diffusers.ContextParallelConfig(**degrees))
            assert_near("output", output_of(model, inputs), expected, client.tolerance)
        with pytest.raises(NotImplementedError, match="gradients would be wrong"):
            output_of(model, inputs)


def check_client(
    client: Client,
    degrees: Mapping[str, Any],
    *,
    lengths: tuple[int, int] = (8, 16),
    mesh: DeviceMesh | None = None,
    prepare: Callable[[nn.Module], None] = lambda model: None,
) -> None:
    """Raises `AssertionError` unless a client computes over ranks what it does in one process."""
    torch.manual_seed(5)
    inputs = client.inputs(*lengths)
    expected = run_model(client.make(), inputs)
    with enabled():
        config = diffusers.ContextParallelConfig(mesh=mesh, **degrees)
        model = parallel(client, config)
        prepare(model)
        actual = over_ranks(run_model(model, inputs), config._flattened_mesh.get_group())
    assert_same(actual, expected, client.tolerance)
