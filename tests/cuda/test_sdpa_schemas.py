"""Attention passes torch's kernels positional arguments: their schemas must be as recorded."""

from __future__ import annotations

import json

import torch
from torch.nn.attention import SDPBackend

from symm_cp.ops.attention import kernels
from tests.cuda.sdpa_schemas import NAMES, RECORD


def test_the_installed_torch_has_the_schemas_of_the_record() -> None:
    known = [same["schemas"] for same in json.loads(RECORD.read_text())]
    registered = {name: getattr(torch.ops.aten, name).default._schema for name in NAMES}
    parsed = [
        {name: torch._C.parse_schema(f"aten::{text}") for name, text in schemas.items()}
        for schemas in known
    ]
    assert registered in parsed


def test_one_set_of_schemas_serves_all_supported_versions() -> None:
    """With a second set, kernels.py would have to tell versions apart."""
    (same,) = json.loads(RECORD.read_text())
    releases = {".".join(version.split(".")[:2]) for version in same["torch"]}
    assert releases == {"2.11", "2.12", "2.13", "2.14", "2.15"}
    assert sorted(same["schemas"]) == NAMES


def test_torch_numbers_its_kernels_as_kind_of_does() -> None:
    numbers = {backend.value: name for name, backend in SDPBackend.__members__.items()}
    assert {number: numbers[number] for number in kernels._KINDS} == {
        1: "FLASH_ATTENTION",
        2: "EFFICIENT_ATTENTION",
        3: "CUDNN_ATTENTION",
    }
