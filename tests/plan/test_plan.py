"""`symm-cp plan`: closed forms of its predictions, and the command."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from symm_cp.cli import main
from symm_cp.commands.plan import best
from symm_cp.commands.plan.models import MODELS, Model
from symm_cp.commands.plan.predict import ALL, ParallelLayout, layouts, memory_of, predict
from symm_cp.schedule.machine import MACHINES

LLAMA = MODELS["llama3-70b"]
#: No overheads: only operations and bytes take time.
IDEAL = replace(
    MACHINES["h100"],
    matmul_reached=1.0,
    attention_reached=1.0,
    link_reached=1.0,
    kernel_seconds=0.0,
    signal_seconds=0.0,
    memory_rate=1e30,
)


def test_sizes_of_models_are_those_that_their_names_say() -> None:
    assert MODELS["llama3-8b"].parameters == pytest.approx(8.03e9, rel=0.01)
    assert MODELS["llama3-70b"].parameters == pytest.approx(70.6e9, rel=0.01)
    assert MODELS["qwen3-32b"].parameters == pytest.approx(32.8e9, rel=0.01)


def operations(model: Model, batch: int, sequence: int) -> float:
    """6 a token and weight (the embedding has none), and causal attention."""
    weights = model.parameters - model.vocabulary * model.hidden
    attention = model.layers * 3.5 * 2 * sequence**2 * model.query
    return 6 * batch * sequence * weights + batch * attention


@pytest.mark.parametrize(("tp", "cp"), [(1, 1), (2, 1), (8, 1), (1, 2), (1, 8), (4, 4)])
@pytest.mark.parametrize("sequence", [4096, 65536])
def test_compute_is_the_operations_of_the_model(tp: int, cp: int, sequence: int) -> None:
    layout = ParallelLayout(tp, cp, 1, max(1, cp * tp // 8))
    prediction = predict(LLAMA, IDEAL, layout, 2, sequence)
    expected = operations(LLAMA, 2, sequence) / (tp * cp * IDEAL.flops)
    assert prediction.compute == pytest.approx(expected, rel=1e-6)
    assert prediction.step >= prediction.compute * (1 - 1e-9)


def test_without_communication_a_step_is_its_compute() -> None:
    alone = predict(LLAMA, IDEAL, ParallelLayout(1, 1, 1, 1), 1, 8192)
    assert alone.step == pytest.approx(alone.compute)
    assert (alone.communication, alone.hidden) == (0.0, 1.0)
    fast = replace(IDEAL, nvlink=1e30, network=1e30)
    spread = predict(LLAMA, fast, ParallelLayout(8, 4, 1, 4), 1, 8192)
    assert spread.step == pytest.approx(spread.compute)


def test_tensor_parallel_communication_by_hand() -> None:
    """Per layer 4 gathers or scatters forward, 8 backward, of (W - 1)/W of the activations each.

    The weight gradients of all-gather-matmuls gather again: 2 of the 8.
    """
    tokens, tp = 8192, 4
    prediction = predict(LLAMA, IDEAL, ParallelLayout(tp, 1, 1, 1), 1, tokens)
    transfers = 4 + 2 * 2 + 2
    expected = LLAMA.layers * transfers * tokens * LLAMA.hidden * 2 * (tp - 1) / tp / IDEAL.nvlink
    assert prediction.communication == pytest.approx(expected)


def test_a_slow_network_shows() -> None:
    layout = ParallelLayout(8, 4, 1, 4)
    fast = predict(LLAMA, replace(IDEAL, network=400e9), layout, 1, 32768)
    slow = predict(LLAMA, replace(IDEAL, network=1e9), layout, 1, 32768)
    assert slow.step > 2 * fast.step
    assert slow.hidden < 0.5 < fast.hidden


def test_memory_shrinks_with_every_degree() -> None:
    def memory(**degrees: int) -> float:
        layout = ParallelLayout(**{"tp": 2, "cp": 2, "dp": 2, "cp_hosts": 1, **degrees})
        return predict(LLAMA, IDEAL, layout, 1, 8192).memory

    assert memory(tp=4) < memory()
    assert memory(cp=4) < memory()
    assert memory(dp=4) < memory()
    # Weights and gradients (6 bytes a parameter) alone are more than one GPU has.
    assert memory(tp=1) > 6 * LLAMA.parameters


def test_layouts_use_all_gpus_and_keep_tensor_parallelism_within_a_host() -> None:
    possible = layouts(LLAMA, IDEAL, 4, 8, 8192)
    assert ParallelLayout(8, 4, 1, 4) in possible
    assert ParallelLayout(1, 32, 1, 4) in possible
    for layout in possible:
        assert layout.tp * layout.cp * layout.dp == 32
        assert layout.tp <= 8
        assert layout.cp % layout.cp_hosts == 0


def test_the_best_fit_and_are_fast() -> None:
    predictions = best(LLAMA, MACHINES["h200"], 16, 8, 1, 8192)
    fits = [prediction.fits for prediction in predictions]
    assert fits == sorted(fits, reverse=True)
    rates = [prediction.tokens for prediction in predictions if prediction.fits]
    assert rates == sorted(rates, reverse=True)
    assert rates


def test_fsdp_communication_by_hand() -> None:
    """Each layer is gathered twice in bfloat16 and its gradient scattered once in float32.

    The head likewise, and the embedding is gathered and scattered once; (F - 1)/F of it all.
    """
    prediction = predict(LLAMA, IDEAL, ParallelLayout(1, 1, 8, 1, 8, 1), 1, 8192)
    table = LLAMA.vocabulary * LLAMA.hidden
    nbytes = LLAMA.layers * LLAMA.layer_parameters * (2 * 2 + 4) + table * (3 * 2 + 2 * 4)
    assert prediction.communication == pytest.approx(nbytes * 7 / 8 / IDEAL.nvlink)
    # All of it is hidden but the first layer's gather and the last reduce-scatter.
    first_and_last = LLAMA.layer_parameters * (2 + 4) * 7 / 8 / IDEAL.nvlink
    assert prediction.step == pytest.approx(prediction.compute + first_and_last)


def test_fsdp_between_hosts_goes_through_the_adapters() -> None:
    """Sixteen ranks on two hosts have eight rings, each through an adapter of its own."""
    layout = ParallelLayout(1, 1, 16, 1, 16, 2)
    slow = replace(IDEAL, network=1e9)
    table = LLAMA.vocabulary * LLAMA.hidden
    nbytes = LLAMA.layers * LLAMA.layer_parameters * (2 * 2 + 4) + table * (3 * 2 + 2 * 4)
    prediction = predict(LLAMA, slow, layout, 1, 8192)
    assert prediction.communication == pytest.approx(nbytes * 15 / 16 / (8 * 1e9))
    assert prediction.step >= prediction.communication  # nothing to hide it behind
    fast = predict(LLAMA, replace(IDEAL, network=1e30), layout, 1, 8192)
    assert fast.communication == pytest.approx(nbytes * 15 / 16 / IDEAL.nvlink)


def test_fsdp_shares_the_link_with_the_ops() -> None:
    alone = predict(LLAMA, IDEAL, ParallelLayout(4, 1, 2, 1), 1, 8192)
    both = predict(LLAMA, IDEAL, ParallelLayout(4, 1, 2, 1, 2, 1), 1, 8192)
    assert both.communication > alone.communication
    assert both.compute == alone.compute
    narrow = replace(IDEAL, nvlink=1e9)
    assert (
        prediction := predict(LLAMA, narrow, ParallelLayout(4, 1, 2, 1, 2, 1), 1, 8192)
    ).step >= (prediction.communication)


def test_fsdp_shards_all_states() -> None:
    """2 bytes of weight, 4 of gradient and 12 of Adam's state a parameter."""
    activations = memory_of(LLAMA, ParallelLayout(8, 1, 4, 1), 1, 8192) - (6 + 12 / 4) * (
        LLAMA.parameters / 8
    )
    sharded = (
        memory_of(LLAMA, ParallelLayout(8, 1, 4, 1, 4, 4), 1, 8192) - 18 * LLAMA.parameters / 8 / 4
    )
    gathered = 3 * 2 * max(LLAMA.layer_parameters, LLAMA.vocabulary * LLAMA.hidden) / 8
    assert sharded - activations == pytest.approx(gathered)


@pytest.mark.parametrize("degree", [ALL, 1, 8, 3])
def test_layouts_shard_over_ranks_with_the_same_weights(degree: int) -> None:
    possible = layouts(LLAMA, IDEAL, 4, 8, 8192, degree)
    assert bool(possible) == (degree != 3)
    for layout in possible:
        assert layout.fsdp == (degree or layout.dp * layout.cp)
        assert layout.dp * layout.cp % layout.fsdp == 0
        assert layout.fsdp_hosts * (8 // layout.tp) >= layout.fsdp


def test_checkpointing_keeps_the_inputs_of_layers_and_computes_them_again() -> None:
    """With ideal links, the forward pass is a third of the matmuls' work, of attention 2 in 7."""
    layout, tokens = ParallelLayout(4, 2, 1, 1), 8192 // 2
    plain, again = (
        predict(LLAMA, IDEAL, layout, 1, 8192, checkpointing=checkpointing)
        for checkpointing in (False, True)
    )
    of_layer = tokens * LLAMA.hidden / layout.tp
    assert plain.memory - again.memory == pytest.approx(
        of_layer * (34 * LLAMA.layers - 2 * LLAMA.layers - 34)
    )
    matmuls = 2 * tokens * LLAMA.layer_parameters / layout.tp / IDEAL.flops
    attention = 2 * 8192**2 * LLAMA.query / layout.tp / layout.cp / IDEAL.flops
    assert again.compute - plain.compute == pytest.approx(
        LLAMA.layers * (matmuls + attention), rel=1e-3
    )
    assert again.communication > plain.communication
    assert (plain.checkpointing, again.checkpointing) == (False, True)


def test_layers_are_computed_again_where_they_do_not_fit_otherwise() -> None:
    small = replace(IDEAL, memory=MACHINES["h100"].memory)
    automatic = best(LLAMA, small, 4, 8, 1, 8192, ALL, "auto")
    for prediction in automatic:
        without = memory_of(LLAMA, prediction.layout, 1, 8192)
        assert prediction.checkpointing == (without > 0.9 * small.memory)
    fitting = {
        way: sum(p.fits for p in best(LLAMA, small, 4, 8, 1, 8192, ALL, way))
        for way in ("none", "auto", "all")
    }
    assert fitting["none"] < fitting["auto"] == fitting["all"]


def test_by_default_it_finds_the_hosts_that_fit(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan"]) == 0
    shown, error = capsys.readouterr()
    rows = [line.split() for line in shown.splitlines() if line.lstrip()[:1].isdigit()]
    assert rows
    assert {row[0] for row in rows} == {"8"}
    assert "does not fit" not in shown
    assert "choose 8 hosts" in shown.splitlines()[-1]
    assert error == ""


@pytest.mark.parametrize(
    ("arguments", "code", "last"),
    [
        (
            "--fsdp --checkpointing none",
            0,
            "choose 4 hosts, tp 8, cp 1, dp 4, fsdp 4: the most tokens/s/GPU that fit into memory",
        ),
        (
            "--fsdp",
            0,
            "choose 4 hosts, tp 1, cp 1, dp 32, fsdp 32, with activation checkpointing: the most",
        ),
        ("", 1, "nothing fits; this would: --fsdp on 4 hosts (tp 8"),
        ("--machine h200", 0, "choose 4 hosts, tp 8, cp 1, dp 4: the most tokens/s/GPU that fit"),
        (
            "--fsdp --batch 64 --hosts 1 --checkpointing none",
            1,
            "nothing fits; this would: --fsdp on 32 hosts",
        ),
        ("--fsdp 4096", 1, "no layout is possible"),
        ("--batch 1000000", 1, "nothing fits, not even with --fsdp on 2048 hosts: use a shorter"),
    ],
)
def test_a_plan_ends_with_what_to_choose(
    arguments: str, code: int, last: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A plan that does not work is reported on stderr, with an exit code."""
    options = ["plan", "--model", "llama3-70b", "--hosts", "1..4", *arguments.split()]
    assert main(options) == code
    shown, error = capsys.readouterr()
    assert last in (error if code else shown).splitlines()[-1]
    assert bool(error) == bool(code)


def test_where_more_memory_is_what_helps(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """No number of hosts with so little memory is enough: another machine is named."""
    small = tmp_path / "small.toml"
    small.write_text('name = "small"\nmemory = 1e6\n')
    main(["plan", "--machine", str(small), "--hosts", "8"])
    assert "this would: --fsdp --machine h100 --hosts 8" in capsys.readouterr().err


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, plot = tmp_path / "plan.json", tmp_path / "plan.png"
    arguments = ["plan", "--model", "llama3-8b", "--hosts", "1..4", "--gpus", "8"]
    assert main([*arguments, "--json", str(out), "--plot", str(plot)]) == 0
    text = capsys.readouterr().out
    assert "not measured" in text
    assert {row["hosts"] for row in json.loads(out.read_text())} == {1, 2, 4}
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_json_instead_of_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "llama3-8b", "--json"]) == 0
    shown, error = capsys.readouterr()
    assert {row["hosts"] for row in json.loads(shown)} == {1}
    assert error == ""


def test_an_axis_of_gpus_has_plain_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    labels = []

    def save_figure(figure: Any, path: Path) -> None:
        figure.canvas.draw()
        labels.append([text.get_text() for text in figure.axes[0].get_xticklabels(which="both")])
        assert path == tmp_path / "plan.png"

    monkeypatch.setattr("symm_cp.commands.plan.save_figure", save_figure)
    main(["plan", "--model", "llama3-8b", "--hosts", "2..8", "--plot", str(tmp_path)])
    assert labels == [["16", "32", "64"]]


def test_wrong_arguments_end_with_what_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--machine", "h300"]) == 2
    assert "symm-cp plan: --machine 'h300' must be one of" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["plan", "--hosts", "0"])
    # An odd sequence has layouts without any cutting only where a single GPU takes it.
    assert main(["plan", "--model", "llama3-8b", "--sequence", "8191"]) == 1
    assert "no layout is possible" in capsys.readouterr().err
