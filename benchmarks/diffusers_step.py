"""Forward steps of a Flux transformer of diffusers: the sequence over ranks, and in one process.

    python benchmarks/diffusers_step.py --json benchmarks/results/diffusers_step.json

256 positions of text and 3840 of image, weights in bfloat16, no gradients, as when an image is
generated. "one process" is rank 0 alone, with one thread, while the other ranks wait. "their
ulysses" is diffusers' own attention; its `ring_degree` does not run on CPU. Before they are timed,
all outputs are compared with the output of the same weights in float32 in one process: they must be
as near to it as the bfloat16 output of one process.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.harness import Case, main

TEXT, IMAGE = 256, 3840
DEGREES = {"ring": "ring_degree", "ulysses": "ulysses_degree"}

Step = Callable[[], torch.Tensor]
Inputs = dict[str, torch.Tensor]


def _model() -> nn.Module:
    """Returns the model with the same random weights on every rank."""
    import diffusers

    diffusers.utils.logging.set_verbosity_error()
    torch.manual_seed(0)
    return diffusers.FluxTransformer2DModel(
        in_channels=64,
        num_layers=2,
        num_single_layers=4,
        attention_head_dim=64,
        num_attention_heads=8,
        joint_attention_dim=512,
        pooled_projection_dim=256,
        axes_dims_rope=(16, 24, 24),
    ).eval()


def _inputs() -> Inputs:
    generator = torch.Generator().manual_seed(0)
    rows = torch.arange(IMAGE)
    return {
        "hidden_states": torch.randn(1, IMAGE, 64, generator=generator),
        "encoder_hidden_states": torch.randn(1, TEXT, 512, generator=generator),
        "pooled_projections": torch.randn(1, 256, generator=generator),
        "timestep": torch.tensor([0.5]),
        "img_ids": torch.stack([torch.zeros(IMAGE), rows // 64, rows % 64], 1).float(),
        "txt_ids": torch.zeros(TEXT, 3),
    }


def _step(model: nn.Module, inputs: Inputs) -> Step:
    def step() -> torch.Tensor:
        with torch.no_grad():
            return model(**inputs, return_dict=False)[0]

    return step


def _spread(model: nn.Module, inputs: Inputs, method: str, backend: str) -> Step:
    """Returns the step over all ranks, with process groups of a backend."""
    import diffusers

    degrees = {DEGREES[method]: dist.get_world_size()}
    config = diffusers.ContextParallelConfig(**degrees)
    names = config.mesh_dim_names
    config.mesh = init_device_mesh(
        "cpu",
        config.mesh_shape,
        mesh_dim_names=names,
        backend_override=dict.fromkeys(names, backend),
    )
    model.enable_parallelism(config=config)
    return _step(model, inputs)


def _by_diffusers(step: Step) -> Step:
    from symm_cp.integrations import diffusers as integration

    def theirs() -> torch.Tensor:
        integration.disable()
        try:
            return step()
        finally:
            integration.enable()

    return theirs


def cases(group: dist.ProcessGroup) -> Iterator[Case]:
    """Yields the one case."""
    from symm_cp.integrations import diffusers as integration

    integration.enable()
    exact, inputs = _model(), _inputs()
    alone = copy.deepcopy(exact).to(torch.bfloat16)
    # Positions stay in float32, as in diffusers' pipelines for large images.
    single = {
        name: tensor if "ids" in name else tensor.to(torch.bfloat16)
        for name, tensor in inputs.items()
    }
    steps = {"one process": _step(alone, single)}
    for method in DEGREES:
        steps[method] = _spread(copy.deepcopy(alone), single, method, "symm_cp")
    for backend in ("symm_cp", "gloo"):
        step = _spread(copy.deepcopy(alone), single, "ulysses", backend)
        steps[f"their ulysses ({backend})"] = _by_diffusers(step)
    if group.rank() > 0:
        steps["one process"] = lambda: torch.zeros(())

    def check() -> None:
        outs = {name: step() for name, step in steps.items()}
        if group.rank() > 0:
            return
        want = _step(exact, inputs)()
        errors = {name: float((out.float() - want).norm()) for name, out in outs.items()}
        for name, error in errors.items():
            assert error <= 1.5 * errors["one process"], (name, errors)

    yield Case("Flux, forward step, bfloat16", steps, check)


if __name__ == "__main__":
    main(cases, __doc__)
