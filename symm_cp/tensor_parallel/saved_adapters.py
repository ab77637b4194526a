"""Saves the adapters of a `PeftModel` that `apply` has split, as PEFT does in one process."""

from __future__ import annotations

import inspect
import os
from typing import Any

from torch import nn

from symm_cp.tensor_parallel.adapters import adapted
from symm_cp.tensor_parallel.checkpoint import whole_state_dict


class SavesWholeAdapters(nn.Module):
    """A `PeftModel` whose `save_pretrained` gathers the adapters that `apply` split."""

    def save_pretrained(
        self, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any
    ) -> None:
        """Saves the adapters, as in one process. All ranks must call it; rank 0 writes."""
        save: Any = super().save_pretrained  # type: ignore[misc]
        call = inspect.signature(save).bind(save_directory, *args, **kwargs)
        call.apply_defaults()
        options = call.arguments
        further: dict[str, Any] = options.pop("kwargs", {})
        writes = options.get("is_main_process", True)
        if further.get("state_dict") is not None:
            save(**options, **further)
            return
        with whole_state_dict("save_pretrained", self, self._saved()) as (state_dict, is_first):
            if writes and is_first:
                save(**options, **{**further, "state_dict": state_dict})

    def _saved(self) -> set[str]:
        """Returns the names of all that PEFT may write: adapters, biases and embeddings."""
        model: Any = self
        layers = [f"{name}." for name, _ in adapted(model)]
        base = ".base_layer.", ".original_module."
        ends = {
            id(end)
            for end in (model.get_input_embeddings(), model.get_output_embeddings())
            if end is not None
        }
        names = {
            f"{name}.{parameter}"
            for name, module in model.named_modules()
            if id(module) in ends or id(getattr(module, "base_layer", None)) in ends
            for parameter, _ in module.named_parameters()
        }
        for name, _ in model.named_parameters(remove_duplicate=False):
            of_adapter = name.startswith(tuple(layers)) and not any(part in name for part in base)
            if of_adapter or name.endswith("bias"):
                names.add(name)
        return names
