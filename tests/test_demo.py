"""`symm-cp demo` as a command, on sizes that take seconds; and its verdict on wrong results."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from symm_cp.cli import main
from symm_cp.commands.demo import arguments as demo_arguments
from symm_cp.commands.demo.comparison import Result, show
from symm_cp.commands.demo.data import batches
from symm_cp.commands.demo.decoding import options as decoding_options
from symm_cp.commands.demo.decoding.report import compare
from symm_cp.commands.demo.decoding.run import DecodeRun
from symm_cp.commands.harness.paired import (
    COMPUTE,
    DENSE,
    FUSED,
    dense_with,
    is_dense,
    ratio,
    unfused_over,
)
from symm_cp.ranks import threads_of
from symm_cp.testing import Ranks
from tests.exhaustive import exhaustive, some

TINY = ["--steps", "3", "--dim", "64", "--layers", "2", "--seq", "48", "--batch", "2"]
BRIEF = [*TINY, "--most-steps", "3"]


GLOO = unfused_over("gloo")


def started(world_size: int) -> dict[str, str]:
    """The variables that torchrun sets for its ranks."""
    others = {"RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "1234"}
    return {"WORLD_SIZE": str(world_size), **others}


def parsed(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    demo_arguments.add_arguments(parser)
    return parser.parse_args(arguments)


def names_the_threads(printed: str, ranks: int = 2) -> None:
    """Checks that the table has one process with one thread, and one with all ranks' threads."""
    rows = dict(re.findall(r"^(one process[^0-9\n]*(?:\d+ threads)?) +(1 +\d+) ", printed, re.M))
    found = {name.strip(): cells.split() for name, cells in rows.items()}
    threads = threads_of(ranks)
    assert found == {DENSE: ["1", "1"], dense_with(threads): ["1", str(threads)]}
    compared = f" times as fast as {dense_with(threads)}\n"
    assert (compared in printed) == (threads > 1)


@pytest.mark.parametrize(("ranks", "cp"), some((1, 1), of=[(1, 1), (2, 1), (4, 2)]))
def test_losses_agree(
    ranks: int, cp: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text"
    text.write_bytes(bytes(range(256)) * 20)
    out = tmp_path / "new" / "out.json"
    split = ["--ranks", str(ranks), "--cp", str(cp)]
    assert main(["demo", *BRIEF, *split, "--text", str(text), "--json", str(out)]) == 0
    printed = capfd.readouterr().out
    assert "losses agree" in printed
    assert (f"{ranks // cp} x {cp} ranks" in printed) == (cp > 1)
    names_the_threads(printed, ranks)
    report = json.loads(out.read_text())
    assert report["agree"]
    assert len(report["losses"]["fused"]) == 3
    assert report["losses"]["fused"] == pytest.approx(report["losses"]["one process"], abs=1e-4)
    assert report["losses"]["fused"][0] == pytest.approx(5.5, abs=0.3)  # log(256), untrained


@exhaustive
def test_compiled(capfd: pytest.CaptureFixture[str]) -> None:
    """With `strict`: a collective that stays unfused is an error."""
    split = ["--ranks", "2", "--cp", "2", "--layers", "1"]
    assert main(["demo", *BRIEF, "--compile", *split]) == 0
    assert "losses agree" in capfd.readouterr().out


DECODE = ["--decode", "--dim", "64", "--layers", "2", "--prompt", "5", "--tokens", "6"]
SPREAD = (unfused_over("symm_cp"), GLOO, FUSED)


def generated(group: dist.ProcessGroup, dtype: str) -> None:
    options = decoding_options.check(parsed(*DECODE, "--dtype", dtype), started(group.size()))
    result = DecodeRun(options, group, quiet=True).result()
    assert result.agree()
    assert set(result.agreements) == set(SPREAD)
    for found in result.agreements.values():
        assert found.equal == 6 or dtype == "bfloat16"
        assert found.equal + found.tied == 6
    assert {len(seconds) for seconds in result.seconds.values()} == {6}
    alone = {DENSE, dense_with(threads_of(group.size()))}
    assert set(result.seconds) == {*alone, *SPREAD, COMPUTE}


@pytest.mark.parametrize(
    ("world_size", "dtype"),
    some(
        (2, "float32"), of=[*((n, "float32") for n in (1, 2, 4)), (2, "bfloat16"), (4, "float64")]
    ),
)
def test_generated_tokens_are_those_of_one_process(
    ranks: Ranks, world_size: int, dtype: str
) -> None:
    ranks.run(world_size, generated, dtype)


def wrong_sum(group: dist.ProcessGroup) -> None:
    """Sums that are wrong by one percent, in one of the variants."""
    options = decoding_options.check(parsed(*DECODE, "--ranks", str(group.size())), {})
    run = DecodeRun(options, group, quiet=True)
    over_backend = run.spread[0].model
    for part in over_backend.modules():
        exchanges = getattr(part, "exchanges", None)
        if exchanges is not None:
            part.exchanges = replace(
                exchanges, all_reduce=lambda partial, of=exchanges: of.all_reduce(partial) * 1.01
            )
    result = run.result()
    assert not result.agree()
    assert result.agreements[run.spread[0].name].largest > result.tolerance
    assert result.agreements[GLOO].largest <= result.tolerance


@exhaustive
def test_a_sum_that_is_wrong_fails_the_generation(ranks: Ranks) -> None:
    ranks.run(2, wrong_sum)


@exhaustive
def test_generation_as_a_command(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    assert main(["demo", *DECODE, "--json", str(out)]) == 0
    printed = capfd.readouterr().out
    assert "tokens agree" in printed
    names_the_threads(printed)
    report = json.loads(out.read_text())
    assert report["agree"]
    assert set(report["agreements"]) == set(report["communication"]) == set(SPREAD)


@exhaustive
def test_generation_compiled(capfd: pytest.CaptureFixture[str]) -> None:
    # Compilers take a second for each layer of each of the six models.
    assert main(["demo", *DECODE, "--layers", "1", "--compile"]) == 0
    printed = capfd.readouterr().out
    assert "tokens agree" in printed
    assert "first step" in printed


@exhaustive
def test_generation_with_another_model(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "config.json"
    sizes = {
        "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    }  # fmt: skip
    config.write_text(json.dumps({"model_type": "qwen3", **sizes}))
    options = ["--decode", "--tokens", "4", "--config", str(config)]
    assert main(["demo", *options]) == 0
    assert "qwen3: 0." in capfd.readouterr().out
    assert main(["demo", *options, "--ranks", "3"]) == 2
    assert "num_attention_heads=4 is not divisible by --ranks 3" in capfd.readouterr().err


def test_without_transformers_the_demo_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "transformers" else find(name)
    )
    assert main(["demo", "--decode"]) == 2
    assert "pip install 'symm_cp[transformers]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("token", "logits", "expected"),
    [
        (1, [0.0, 1.0, 0.99], (1, 0, 0)),
        (2, [0.0, 0.995, 1.0], (0, 1, 0)),  # tied in the reference
        (0, [0.0, 1.0, 0.99], (0, 0, 1)),
    ],
)
def test_tokens_that_differ_are_noticed(
    token: int, logits: list[float], expected: tuple[int, int, int]
) -> None:
    wanted = [torch.tensor([0.0, 1.0, 0.99])]
    *counts, largest = compare([token], [torch.tensor(logits)], wanted, tolerance=0.01)
    assert tuple(counts) == expected
    assert largest == pytest.approx(
        max(abs(wanted[0][1] - logits[1]), abs(wanted[0][2] - logits[2]))
    )


def test_logits_that_are_not_numbers_are_noticed() -> None:
    wanted = [torch.zeros(3), torch.zeros(3)]
    logits = [torch.tensor([0.0, float("nan"), 0.0]), torch.ones(3)]
    *_, largest = compare([0, 0], logits, wanted, tolerance=2.0)
    assert not largest <= 2.0


@exhaustive
def test_under_torchrun() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*command, "--nproc-per-node", "2", "-m", "symm_cp", "demo", *BRIEF],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("losses agree") == 1


def result(fused: list[float]) -> Result:
    dense = [5.5, 5.0]
    return Result(
        options=demo_arguments.check(parsed(), {}),
        text="",
        parameters=1,
        losses={DENSE: dense, GLOO: dense, FUSED: fused, COMPUTE: [0.0, 0.0]},
        seconds={DENSE: [4.0] * 2, GLOO: [3.0] * 2, FUSED: [2.25] * 2, COMPUTE: [2.0] * 2},
    )


def test_one_process_with_all_threads_stands_beside_the_ranks(
    capsys: pytest.CaptureFixture[str],
) -> None:
    plain = result([5.5, 5.0])
    with_threads = dense_with(2)
    losses = {**plain.losses, with_threads: plain.losses[DENSE]}
    plain = replace(plain, options=replace(plain.options, steps=2))
    show(replace(plain, losses=losses, seconds={with_threads: [2.0] * 2, **plain.seconds}))
    printed = capsys.readouterr().out
    head, one, *_ = printed[printed.index("ranks") :].splitlines()
    assert head.split()[:3] == ["ranks", "threads", "step"]
    assert one.split() == ["one", "process,", "2", "threads", "1", "2", "2000", "ms"]
    assert re.search(r"^one process  +1 +1 +4000 ms$", printed, re.MULTILINE)
    assert re.search(r"^fused  +2 +2 +2250 ms ", printed, re.MULTILINE)
    assert "\nfused trains 0.89 times as fast as one process, 2 threads\n" in printed


@pytest.mark.parametrize("fused", [[5.5, 5.01], [5.5, float("nan")], [5.49, 5.0]])
def test_losses_that_differ_are_noticed(fused: list[float]) -> None:
    assert not result(fused).agree()
    assert result([5.5, 5.0]).agree()
    assert result([5.5, 5.0]).hidden(GLOO) == pytest.approx(0.75)


@pytest.mark.exhaustive
def test_a_fused_op_that_is_wrong_fails_the_demo(tmp_path: Path) -> None:
    """A kernel whose result is wrong by one percent suffices, even in a model this small."""
    (tmp_path / "sitecustomize.py").write_text(
        "import torch\n"
        "def wrong(a, b, *, out):  # only fused ops write products to memory that is there\n"
        "    return out.copy_((a @ b).mul_(1.01))\n"
        "library = torch.library.Library('aten', 'IMPL')\n"
        "library.impl('mm.out', wrong, 'CPU', allow_override=True)\n"
    )
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-m", "symm_cp", "demo", *BRIEF],
        capture_output=True, text=True, timeout=120, check=False, env=env,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    assert "losses DIFFER" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cp", "2", "--ranks", "3"], "--ranks 3 is not divisible by --cp 2"),
        (
            ["--cp", "2", "--seq", "50"],
            "--seq 50 cannot be split over 2 ranks: must be a multiple of 4",
        ),
        (["--seq", "49"], "--seq 49 cannot be split over 2 ranks"),
        (
            ["--ranks", "3", "--seq", "48"],
            "--dim 512 cannot be split into heads over 3 ranks: must be a multiple of 48",
        ),
        (
            ["--dim", "24"],
            "--dim 24 cannot be split into heads over 2 ranks: must be a multiple of 32",
        ),
        (["--text", "/nowhere/at/all"], "--text /nowhere/at/all: cannot be read"),
        (["--steps", "0"], "must be a whole number of at least 1"),
        (["--tokens", "4"], "--tokens requires --decode"),
        (["--decode", "--most-steps", "4"], "--most-steps cannot be combined with --decode"),
        (["--decode", "--cp", "2"], "--cp cannot be combined with --decode"),
        (["--decode", "--config", "x", "--dim", "8"], "--dim cannot be combined with --config"),
        (["--decode", "--config", "/nowhere"], "--config /nowhere: no such file"),
        (
            ["--decode", "--ranks", "3"],
            "--dim 1024 cannot be split into heads over 3 ranks: must be a multiple of 24",
        ),
    ],
)
def test_wrong_arguments(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main(["demo", *arguments])
    except SystemExit as ended:  # raised by argparse
        code = int(ended.code or 0)
    assert code == 2
    assert message in capsys.readouterr().err


def test_batches_are_windows_of_the_text() -> None:
    text = torch.arange(100, dtype=torch.uint8)
    made = batches(text, steps=3, seq=5, batch=4, seed=1)
    assert made.shape == (3, 6, 4)
    assert torch.equal(made[:, 1:], made[:, :-1] + 1)
    assert torch.equal(made, batches(text, steps=3, seq=5, batch=4, seed=1))


def test_a_ratio_is_that_of_paired_steps() -> None:
    """If the machine is slower in some steps, it is slower for both variants."""
    slow = [1.0, 2.0, 1.0, 2.0, 4.0, 1.0, 2.0, 1.0, 1.0, 2.0]
    found = ratio([1.5 * second for second in slow], slow)
    assert found.median == pytest.approx(1.5)
    assert found.width == pytest.approx(0.0)
    assert ratio([3.0] * 5, [2.0] * 5).interval is None


def test_an_interval_holds_the_median_of_what_it_was_drawn_from() -> None:
    draw = random.Random(0)
    for count in (6, 10, 60):
        inside = 0
        for _ in range(400):
            found = ratio([draw.lognormvariate(0.0, 0.1) for _ in range(count)], [1.0] * count)
            assert found.interval is not None
            inside += found.interval[0] <= 1.0 <= found.interval[1]
        assert 368 <= inside <= 398  # at least 380 on average, 388 where steps are few


@pytest.mark.exhaustive
def test_steps_go_on_until_times_are_certain(capfd: pytest.CaptureFixture[str]) -> None:
    """Five steps, of which two are warm-up, are never certain: the bound ends the run."""
    assert main(["demo", *TINY, "--most-steps", "5", "--json"]) == 0
    report = json.loads(capfd.readouterr().out)  # and nothing else is printed
    assert {len(losses) for losses in report["losses"].values()} == {3}
    assert {name: len(times) for name, times in report["seconds"].items()} == {
        name: 3 if is_dense(name) else 5 for name in report["seconds"]
    }
