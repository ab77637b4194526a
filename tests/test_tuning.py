"""The choice between ways: forced, measured or simulated."""

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
from symm_cp.schedule.machine import MACHINES, TYPICAL_CPU, Curve, to_toml
from symm_cp.schedule.matmul_work import MatmulWork
from symm_cp.tensors.dtypes import dtype_name
from symm_cp.testing import Ranks

F32, BF16 = torch.float32, torch.bfloat16


def faster(work: MatmulWork, ranks: int = 2) -> str:
    seconds = work.seconds(TYPICAL_CPU, ranks)
    return min(seconds, key=seconds.__getitem__)


ROWS = 1_100_000  # with fewer, native kernels run without a choice


def gather(rows: int, inner: int, columns: int, dtype: torch.dtype = F32) -> MatmulWork:
    shard = rows * inner * dtype.itemsize
    return MatmulWork(
        "all_gather_matmul",
        dtype_name(dtype),
        dtype.itemsize,
        ((rows, inner, columns),),
        shard=shard,
    )


def scatter(rows: int, inner: int, columns: int) -> MatmulWork:
    partial = rows * columns * 4
    return MatmulWork(
        "matmul_reduce_scatter", "float32", 4, ((rows, inner, columns),), partial=partial
    )


def all_reduce(rows: int, columns: int) -> MatmulWork:
    nbytes = rows * columns * 4
    products = ((rows, columns, columns),)
    return MatmulWork("matmul_all_reduce", "float32", 4, products, partial=nbytes, everywhere=True)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_few_rows_are_summed_whole_and_many_part_by_part_on_gpus(ranks: int) -> None:
    def fastest(rows: int) -> str:
        seconds = all_reduce(rows, 4096).seconds(MACHINES["h100"], ranks, device="cuda")
        return min(seconds, key=seconds.__getitem__)

    assert fastest(1) == "whole"
    assert fastest(8192) == "shards"
    assert faster(all_reduce(1, 4096), ranks) == "whole"


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("make", [gather, scatter])
def test_few_rows_for_a_large_weight_go_whole(make, ranks: int) -> None:  # type: ignore[no-untyped-def]
    assert faster(make(1, 4096, 4096), ranks) == "whole"
    assert faster(make(128, 4096, 4096), ranks) == "whole"
    assert faster(make(4096, 4096, 256), ranks) == "shards"
    assert faster(make(0, 16, 16), ranks) in tuning.WAYS


# All-gather-matmuls in bfloat16 on 8 H100, as others have measured them: rows of a rank, columns,
# inner dimension, microseconds of NCCL and then one matmul, and of torch's op, which goes by shards
# (meta-pytorch/kraken#2, M, N and K; the last one is pytorch#143160's).
MEASURED = [
    (128, 6656, 4096, 142, 277),
    (128, 6656, 8192, 284, 635),
    (128, 6656, 16384, 514, 1167),
    (256, 6656, 4096, 273, 310),
    (256, 6656, 8192, 499, 548),
    (256, 6656, 16384, 953, 1333),
    (512, 6656, 4096, 515, 456),
    (512, 6656, 8192, 912, 838),
    (512, 6656, 16384, 1810, 1633),
    (256, 3584, 8192, 301, 354),
]


@pytest.mark.parametrize(("rows", "columns", "inner", "whole", "shards"), MEASURED)
def test_gpus_are_predicted_as_others_measured_them(
    rows: int, columns: int, inner: int, whole: float, shards: float
) -> None:
    found = gather(rows, inner, columns, BF16).seconds(MACHINES["h100"], 8, device="cuda")
    assert found["whole"] * 1e6 == pytest.approx(whole, rel=0.15)
    # Shards of few tiles vary: libraries divide some products along the inner dimension as well.
    assert found["shards"] * 1e6 == pytest.approx(shards, rel=0.35)
    assert (found["whole"] < found["shards"]) == (whole < shards)


def test_results_that_are_added_to_are_read_again() -> None:
    def weight_gradient(dtype: torch.dtype, rows: int, size: int) -> MatmulWork:
        item = dtype.itemsize
        products, shard = ((size, rows, size),), rows * size * item
        return MatmulWork(
            "weight_grad",
            dtype_name(dtype),
            dtype.itemsize,
            products,
            shard,
            accumulated=size * size * item,
        )

    assert faster(weight_gradient(BF16, 128, 4096)) == "whole"
    assert faster(weight_gradient(F32, 128, 4096)) == "whole"
    assert faster(weight_gradient(F32, 4096, 256)) == "shards"


def test_a_closed_form() -> None:
    """With infinitely fast memory, the ways differ by the weight, read W times or once."""
    machine = TYPICAL_CPU.__class__("m", 1e9, 0, 1e30, 1e30, matmul_reached=1.0, kernel_seconds=0.0)
    weighed = {
        "weight.float32": Curve((1.0, 1e9), (1e-9, 1.0)),
        "matmul.float32": Curve((1.0,), (1e-9,)),
    }
    machine = machine.__class__(**{**vars(machine), "signal_seconds": 0.0, "curves": weighed})
    seconds = gather(10, 1000, 250).seconds(machine, 4)
    assert seconds["shards"] == pytest.approx(4 * (5e6 * 1e-9 + 1e-3))
    assert seconds["whole"] == pytest.approx(4 * 5e6 * 1e-9 + 1e-3)


def chosen(group: dist.ProcessGroup) -> dict[str, tuning.Choice]:
    with tuning.listening() as heard:
        run(group)
    return heard


def run(group: dist.ProcessGroup) -> torch.Tensor:
    torch.manual_seed(0)
    return symm_cp.all_gather_matmul(torch.randn(ROWS, 8), torch.randn(8, 3), group=group)


KEY = f"all_gather_matmul float32 {ROWS}x8x3"


def files(group: dist.ProcessGroup, folder: str) -> None:
    """All ranks use the first rank's files, whatever their own contain."""
    state, rank, W = memory.resolve(group), group.rank(), group.size()
    cache = os.environ.get("XDG_CACHE_HOME"), os.environ.get("SYMM_CP_BUILD_DIR")
    os.environ["SYMM_CP_BUILD_DIR"] = os.path.join(folder, str(rank))
    tuned, machine = tuning.tuned_path(W), tuning.machine_path(W)
    tuned.parent.mkdir(parents=True)
    try:
        outcomes = []
        for way in tuning.WAYS:
            others = tuning.WAYS[1 - tuning.WAYS.index(way)]
            tuned.write_text(json.dumps({KEY: way if rank == 0 else others}))
            machine.write_text(to_toml(TYPICAL_CPU) if rank == 0 else "no TOML at all")
            dist.barrier(group)
            tuning.relearn(state)
            outcomes.append(run(group))
            choice = chosen(group)[KEY]
            assert (choice.way, choice.source) == (way, "measured")
            dist.barrier(group)
        torch.testing.assert_close(*outcomes)
        tuned.unlink()
        dist.barrier(group)
        tuning.relearn(state)
        (choice,) = chosen(group).values()
        assert choice.source == "simulated"
        assert choice.predicted == pytest.approx(gather(ROWS, 8, 3).seconds(TYPICAL_CPU, W))
        assert choice.predicted[choice.way] == min(choice.predicted.values())
        assert str(choice).startswith(f"{choice.way} (simulated; simulated: shards ")
        dist.barrier(group)
    finally:
        os.environ.pop("SYMM_CP_BUILD_DIR")
        if cache[1] is not None:
            os.environ["SYMM_CP_BUILD_DIR"] = cache[1]
        tuning.relearn(state)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_what_was_measured_comes_before_the_simulation(
    ranks: Ranks, world_size: int, tmp_path: Path
) -> None:
    ranks.run(world_size, files, str(tmp_path))


@pytest.mark.parametrize("name", ["machine_path", "tuned_path"])
def test_files_that_another_user_could_change_are_not_read(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SYMM_CP_BUILD_DIR", str(tmp_path))
    path = getattr(tuning, name)
    assert tuning.read_file(path, 2) == ("", "")
    path(2).write_text("text")
    path(2).chmod(0o644)
    assert tuning.read_file(path, 2) == ("text", "")
    path(2).chmod(0o666)
    text, reason = tuning.read_file(path, 2)
    assert text == ""
    assert "not used: " in reason
    assert f"{path(2)}: others can write it" in reason
    path(2).chmod(0o644)
    path(2).write_bytes(b"\xff")
    assert tuning.read_file(path, 2)[1] != ""
    monkeypatch.setenv("SYMM_CP_BUILD_DIR", "")
    monkeypatch.setenv("HOME", "")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert tuning.read_file(path, 2) == ("", "")


@pytest.mark.parametrize("name", ["machine_path", "tuned_path"])
def test_files_are_those_of_this_kind_of_machine(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A home folder may be shared by two kinds of machines, and used with two releases of torch."""
    monkeypatch.setenv("SYMM_CP_BUILD_DIR", str(tmp_path))
    path, names = getattr(tuning, name), set()
    for attribute, value in (
        ("processor_name", lambda: "Model (R) 1"),
        ("processor_name", lambda: "Model (R) 2"),
        ("torch.__version__", "2.99"),
        ("os.cpu_count", lambda: 7),
    ):
        monkeypatch.setattr(f"symm_cp.measured.{attribute}", value)
        names.add(path(2).name)
    assert len(names) == 4
    assert {n.partition("_2_")[2].rpartition(".")[0] for n in names} >= {
        "model-r-2-7-cores-torch-2.99"
    }
    older = tmp_path / f"{name.removesuffix('_path')}_2{path(2).suffix}"
    older.write_text("of an unknown machine")
    older.chmod(0o644)
    text, reason = tuning.read_file(path, 2)
    assert text == ""
    assert f"not used: {older} does not say for which machine" in reason
    assert len(reason.splitlines()) == 1
    assert tuning.read_file(path, 3) == ("", "")


def distrusts(group: dist.ProcessGroup, folder: str) -> None:
    """The rank that reads warns once about files that it does not use; the others do not wait."""
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
                tuning.facts_of(state)
        assert tuning.facts_of(state).tuned == {}
    dist.barrier(group)
    tuning.relearn(state)


def test_a_file_that_is_not_used_is_warned_about(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(2, distrusts, str(tmp_path))


@pytest.mark.parametrize("text", ["{", "[]", "1"])
def test_a_damaged_file_of_choices(text: str) -> None:
    with pytest.raises(ValueError, match=r"some file: .* run symm-cp tune again"):
        tuning.parse_tuned(text, "some file")


def forced(group: dist.ProcessGroup) -> None:
    state = memory.resolve(group)
    tuning.relearn(state)
    dist.barrier(group)
    for way in tuning.WAYS:
        # Ignores symmetric memory that earlier tests may have left in the group.
        plain = unittest.mock.patch.object(cpu, "has_symmetric", return_value=False)
        with symm_cp.trace() as recording, tuning.forced(way), plain:
            run(group)
        labels = {event.op for event in recording.timeline.events}
        assert all(label.startswith("fused_all_gather_matmul") for label in labels)
        os.environ["SYMM_CP_WAY"] = way
        try:
            assert chosen(group) == {KEY: tuning.Choice(way, "forced")}
            with tuning.forced(tuning.WAYS[0]):
                assert chosen(group) == {KEY: tuning.Choice(tuning.WAYS[0], "forced")}
        finally:
            del os.environ["SYMM_CP_WAY"]
    assert not tuning.facts_read(state)
    os.environ["SYMM_CP_WAY"] = "sideways"
    try:
        with pytest.raises(ValueError, match="SYMM_CP_WAY='sideways' must be"):
            run(group)
    finally:
        del os.environ["SYMM_CP_WAY"]
    with pytest.raises(ValueError, match="must be one of"), tuning.forced("sideways"):
        pass
    assert chosen(group)[KEY].source == "simulated"


def test_a_way_can_be_forced(ranks: Ranks) -> None:
    ranks.run(2, forced)


def disagree(group: dist.ProcessGroup) -> None:
    """An all-gather-matmul exchanges the same either way; a matmul-all-reduce does not."""
    x, weight = torch.randn(2, 8), torch.randn(8, 3)
    with tuning.forced(tuning.WAYS[group.rank() % 2]):
        run(group)
        with pytest.raises(RuntimeError, match=r"ranks disagree|gave up"):
            symm_cp.matmul_all_reduce(x, weight, group=group)
    dist.barrier(group)
    symm_cp.matmul_all_reduce(x, weight, group=group)


def test_ranks_that_choose_differently_get_an_error(ranks: Ranks) -> None:
    ranks.run(2, disagree)


def attention(group: dist.ProcessGroup, folder: str) -> None:
    """The way that was faster is chosen, unless another is forced."""
    state, rank, W = memory.resolve(group), group.rank(), group.size()
    gpu, key = torch.device("cuda", 0), "all_gather_attention bfloat16 1x2x1x8x8x64 full 1 chunks"
    patch = unittest.mock.patch
    tuned_path = tuning.tuned_path

    def choice(
        measured: str | None, *, ways: tuple[str, ...] = tuning.ATTENTION_WAYS
    ) -> tuple[str, str]:
        tuned = {} if measured is None else {f"GPU X: {key}": measured, key: "nothing"}
        Path(folder, f"{rank}.json").write_text(json.dumps(tuned if rank == 0 else {}))
        dist.barrier(group)
        tuning.relearn(state)
        about = types.SimpleNamespace(uuid=f"number {rank}")
        with patch.object(torch.cuda, "get_device_properties", return_value=about):
            for _ in range(2):
                with tuning.listening() as heard:
                    way = tuning.choose_attention(state, gpu, key, ways)
        assert heard[f"GPU X: {key}"].way == way
        dist.barrier(group)
        return way, heard[f"GPU X: {key}"].source

    with (
        patch.object(tuning, "tuned_path", lambda _: Path(folder, f"{rank}.json")),
        patch.object(torch.cuda, "get_device_name", return_value="GPU X"),
    ):
        assert choice(None) == ("pipeline", "not measured")
        assert choice("together") == ("together", "measured")
        assert choice("pipeline") == ("pipeline", "measured")
        assert choice("sideways") == ("pipeline", "not measured")
        if W > 1:
            with tuning.listening() as heard:
                tuning.choose(state, gpu, gather(ROWS, 8, 3))
            assert heard[f"GPU X: {KEY}"].source == "simulated as an H100"
        with tuning.forced("together"), tuning.forced("whole"):
            assert choice("pipeline") == ("together", "forced")
            served = ("pipeline",)
            assert choice("pipeline", ways=served) == ("pipeline", "together cannot serve it")
            assert tuning.forced_ways() == {tuning.ATTENTION_WAYS: "together", tuning.WAYS: "whole"}
            with tuning.forced(None):
                assert choice("pipeline") == ("pipeline", "measured")
        with patch.dict(os.environ, {"SYMM_CP_ATTENTION": "together"}):
            assert choice("pipeline") == ("together", "forced")
    assert tuning.tuned_path is tuned_path
    tuning.relearn(state)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_attention_goes_by_what_was_measured(ranks: Ranks, world_size: int, tmp_path: Path) -> None:
    ranks.run(world_size, attention, str(tmp_path))
