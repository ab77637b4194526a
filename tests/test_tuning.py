"""The choice between algorithms: forced, measured or by size."""

from __future__ import annotations

import json
import os
import types
import unittest.mock
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import symm_cp
from symm_cp import tuning
from symm_cp.group import memory
from symm_cp.runtime import cpu

ROWS = 1_100_000  # with fewer, native kernels run without a choice


def chosen(group: dist.ProcessGroup) -> dict[str, tuning.Choice]:
    with tuning.listening() as heard:
        run(group)
    return heard


def run(group: dist.ProcessGroup) -> torch.Tensor:
    torch.manual_seed(0)
    return symm_cp.all_gather_matmul(torch.randn(ROWS, 8), torch.randn(8, 3), group=group)


KEY = f"all_gather_matmul float32 {ROWS}x8x3"


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.ranks
def test_what_was_measured_comes_before_the_size(
    group: dist.ProcessGroup, tmp_path: Path, world_size: int
) -> None:
    """All ranks use the first rank's files, whatever their own contain."""
    folder = str(tmp_path)
    state, rank, W = memory.resolve(group), group.rank(), group.size()
    cache = os.environ.get("XDG_CACHE_HOME"), os.environ.get("SYMM_CP_BUILD_DIR")
    os.environ["SYMM_CP_BUILD_DIR"] = os.path.join(folder, str(rank))
    tuned = tuning.tuned_path(W)
    tuned.parent.mkdir(parents=True)
    try:
        outcomes = []
        for algorithm in tuning.ALGORITHMS:
            others = tuning.ALGORITHMS[1 - tuning.ALGORITHMS.index(algorithm)]
            tuned.write_text(json.dumps({KEY: algorithm if rank == 0 else others}))
            dist.barrier(group)
            tuning.relearn(state)
            outcomes.append(run(group))
            choice = chosen(group)[KEY]
            assert (choice.algorithm, choice.source) == (algorithm, "measured")
            dist.barrier(group)
        torch.testing.assert_close(*outcomes)
        tuned.unlink()
        dist.barrier(group)
        tuning.relearn(state)
        # On CPU what is too large for a native call goes by shards.
        assert str(chosen(group)[KEY]) == "shards (by size)"
        dist.barrier(group)
    finally:
        os.environ.pop("SYMM_CP_BUILD_DIR")
        if cache[1] is not None:
            os.environ["SYMM_CP_BUILD_DIR"] = cache[1]
        tuning.relearn(state)


def test_a_table_that_another_user_could_change_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SYMM_CP_BUILD_DIR", str(tmp_path))
    path = tuning.tuned_path(2)
    assert tuning.read_tuned(2) == ("", "")
    path.write_text("text")
    path.chmod(0o644)
    assert tuning.read_tuned(2) == ("text", "")
    path.chmod(0o666)
    text, reason = tuning.read_tuned(2)
    assert text == ""
    assert "not used: " in reason
    assert f"{path}: others can write it" in reason
    path.chmod(0o644)
    path.write_bytes(b"\xff")
    assert tuning.read_tuned(2)[1] != ""
    monkeypatch.setenv("SYMM_CP_BUILD_DIR", "")
    monkeypatch.setenv("HOME", "")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert tuning.read_tuned(2) == ("", "")


def test_a_table_is_of_one_kind_of_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A home folder may be shared by two kinds of machines, and used with two releases of torch."""
    monkeypatch.setenv("SYMM_CP_BUILD_DIR", str(tmp_path))
    names = {tuning.tuned_path(3).name}
    for attribute, value in (
        ("processor_name", lambda: "Model (R) 1"),
        ("processor_name", lambda: "Model (R) 2"),
        ("torch.__version__", "2.99"),
        ("os.cpu_count", lambda: 7),
    ):
        monkeypatch.setattr(f"symm_cp.measured.{attribute}", value)
        names.add(tuning.tuned_path(2).name)
    assert len(names) == 5
    assert "tuned_2_model-r-2-7-cores-torch-2.99.json" in names


@pytest.mark.ranks(2)
def test_a_file_that_is_not_used_is_warned_about(group: dist.ProcessGroup, tmp_path: Path) -> None:
    """The rank that reads warns once about files that it does not use; the others do not wait."""
    folder = str(tmp_path)
    state = memory.resolve(group)
    path = Path(folder, "tuned.json")
    if group.rank() == 0:
        path.write_text(json.dumps({KEY: "whole"}))
        path.chmod(0o666)
    with (
        unittest.mock.patch.object(tuning, "tuned_path", return_value=path),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("error")
        tuning.relearn(state)
        if group.rank() == 0:
            with pytest.raises(UserWarning, match=r"not used: .*tuned\.json: others can write it"):
                tuning.tuned(state)
        assert tuning.tuned(state) == {}
    dist.barrier(group)
    tuning.relearn(state)


@pytest.mark.parametrize("text", ["{", "[]", "1"])
def test_a_damaged_file_of_choices(text: str) -> None:
    with pytest.raises(ValueError, match=r"some file: .* run symm-cp tune again"):
        tuning.parse_tuned(text, "some file")


@pytest.mark.ranks(2)
def test_a_way_can_be_forced(group: dist.ProcessGroup) -> None:
    patch = unittest.mock.patch.object
    for algorithm in tuning.ALGORITHMS:
        # Ignores symmetric memory that earlier tests may have left in the group.
        plain = patch(cpu, "has_symmetric", return_value=False)
        no_table = patch(tuning, "tuned", side_effect=AssertionError)
        with symm_cp.trace() as recording, tuning.forced(algorithm), plain, no_table:
            run(group)
        labels = {event.op for event in recording.timeline.events}
        assert all(label.startswith("fused_all_gather_matmul") for label in labels)
        os.environ["SYMM_CP_ALGORITHM"] = algorithm
        try:
            assert chosen(group) == {KEY: tuning.Choice(algorithm, "forced")}
            with tuning.forced(tuning.ALGORITHMS[0]):
                assert chosen(group) == {KEY: tuning.Choice(tuning.ALGORITHMS[0], "forced")}
        finally:
            del os.environ["SYMM_CP_ALGORITHM"]
    os.environ["SYMM_CP_ALGORITHM"] = "sideways"
    try:
        with pytest.raises(ValueError, match="SYMM_CP_ALGORITHM='sideways' must be"):
            run(group)
    finally:
        del os.environ["SYMM_CP_ALGORITHM"]
    with pytest.raises(ValueError, match="must be one of"), tuning.forced("sideways"):
        pass
    assert chosen(group)[KEY].source == "by size"


@pytest.mark.ranks(2)
def test_ranks_that_choose_differently_get_an_error(group: dist.ProcessGroup) -> None:
    """An all-gather-matmul exchanges the same either way; a matmul-all-reduce does not."""
    x, weight = torch.randn(2, 8), torch.randn(8, 3)
    with tuning.forced(tuning.ALGORITHMS[group.rank() % 2]):
        run(group)
        with pytest.raises(RuntimeError, match=r"ranks disagree|gave up"):
            symm_cp.matmul_all_reduce(x, weight, group=group)
    dist.barrier(group)
    symm_cp.matmul_all_reduce(x, weight, group=group)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.ranks
def test_attention_goes_by_what_was_measured(
    group: dist.ProcessGroup, tmp_path: Path, world_size: int
) -> None:
    """The algorithm that was faster is chosen, unless another is forced."""
    folder = str(tmp_path)
    state, rank = memory.resolve(group), group.rank()
    gpu, key = torch.device("cuda", 0), "all_gather_attention bfloat16 1x2x1x8x8x64 full 1 chunks"
    patch = unittest.mock.patch
    tuned_path = tuning.tuned_path

    def choice(
        measured: str | None, *, algorithms: tuple[str, ...] = tuning.ATTENTION_ALGORITHMS
    ) -> tuple[str, str]:
        tuned = {} if measured is None else {f"GPU X: {key}": measured, key: "nothing"}
        Path(folder, f"{rank}.json").write_text(json.dumps(tuned if rank == 0 else {}))
        dist.barrier(group)
        tuning.relearn(state)
        about = types.SimpleNamespace(uuid=f"number {rank}")
        with patch.object(torch.cuda, "get_device_properties", return_value=about):
            for _ in range(2):
                with tuning.listening() as heard:
                    default = tuning.by_size("pipeline")
                    algorithm = tuning.choose(state, gpu, key, algorithms, default)
        assert heard[f"GPU X: {key}"].algorithm == algorithm
        dist.barrier(group)
        return algorithm, heard[f"GPU X: {key}"].source

    with (
        patch.object(tuning, "tuned_path", lambda _: Path(folder, f"{rank}.json")),
        patch.object(torch.cuda, "get_device_name", return_value="GPU X"),
    ):
        by_size = "pipeline", "by size"
        assert choice(None) == by_size
        assert choice("together") == ("together", "measured")
        assert choice("pipeline") == ("pipeline", "measured")
        assert choice("sideways") == by_size
        with tuning.forced("together"), tuning.forced("whole"):
            assert choice("pipeline") == ("together", "forced")
            served = ("pipeline",)
            assert choice("pipeline", algorithms=served) == ("pipeline", "together cannot serve it")
            assert tuning.forced_algorithm(tuning.ATTENTION_ALGORITHMS) == "together"
            assert tuning.forced_algorithm(tuning.ALGORITHMS) == "whole"
            with tuning.forced(None):
                assert choice("pipeline") == ("pipeline", "measured")
        with patch.dict(os.environ, {"SYMM_CP_ATTENTION": "together"}):
            assert choice("pipeline") == ("together", "forced")
    assert tuning.tuned_path is tuned_path
    tuning.relearn(state)
