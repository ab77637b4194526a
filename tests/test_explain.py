"""`symm-cp explain` reports a program's compiled graphs on all ranks, and changes nothing."""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from symm_cp import cli
from symm_cp.commands.explain import report
from tests.exhaustive import exhaustive
from tests.test_run import symm_cp_in

#: A block of torch's own tensor parallelism, and a collective that has no fused form.
PROGRAM = """
    import torch
    import torch._inductor.config
    import torch.distributed as dist
    import torch.distributed._functional_collectives as collectives
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel, RowwiseParallel, parallelize_module
    )

    torch._inductor.config.fallback_by_default = True  # no kernels to compile
    dist.init_process_group("gloo")
    block = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Linear(128, 64))
    plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
    parallelize_module(block, init_device_mesh("cpu", (2,)), plan)
    torch.compile(block)(torch.randn(8, 64, requires_grad=True)).sum().backward()

    @torch.compile
    def exchange(x):
        return collectives.all_to_all_single(x, None, None, dist.group.WORLD) * 2

    exchange(torch.ones(4))
    dist.destroy_process_group()
"""


@exhaustive
def test_a_program_of_two_ranks(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(PROGRAM))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", program]
    done = symm_cp_in(tmp_path, "explain", "--json", "out.json", "--", *map(str, command))
    assert done.returncode == 0, done.stderr
    assert "rank 0: 2 of 3 collectives fused\n" in done.stdout
    assert "(2 KiB on 2 ranks): fused into fused_matmul_all_reduce" in done.stdout
    left = "left alone: no fused op exists for all_to_all_single"
    assert f"at {program}:20): {left}" in done.stdout
    assert "symm_cp.sequence_to_heads and heads_to_sequence" in done.stdout
    assert "compiled other graphs" not in done.stdout
    graphs = json.loads((tmp_path / "out.json").read_text())["graphs"]
    assert [(graph["rank"], graph["graph"]) for graph in graphs] == [
        (rank, number) for rank in range(2) for number in (1, 2, 3)
    ]


#: The same block uncompiled, twice; a sum that is no longer a sum of products; and two calls with
#: more numbers of documents than a plan compares.
EAGER = """
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel, RowwiseParallel, parallelize_module
    )

    dist.init_process_group("gloo")
    block = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Linear(128, 64))
    plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
    parallelize_module(block, init_device_mesh("cpu", (2,)), plan)
    block = torch.compile(block)  # has no effect here
    for _ in range(2):
        block(torch.randn(8, 64)).sum().backward()
    x = torch.randn(9, 9)
    dist.all_reduce((x @ x).mul_(2))
    import symm_cp
    q, documents = torch.ones(1, 1, 256, 8), torch.zeros(1, 512, dtype=torch.int64)
    for _ in range(2):
        symm_cp.all_gather_attention(q, q, q, group=dist.group.WORLD, document_ids=documents)
    dist.destroy_process_group()
"""


@exhaustive
def test_an_eager_program_of_two_ranks(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(EAGER))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", program]
    done = symm_cp_in(tmp_path, "explain", "--eager", "--json", "o", "--", *map(str, command))
    assert done.returncode == 0, done.stderr
    line = f"- all_reduce (2 KiB on 2 ranks, 2 calls, at {program}:15): left alone: it is next to "
    assert line + "addmm: symm_cp.matmul_all_reduce could run here" in done.stdout
    assert "rank 0: 0 of 7 collectives fused\n" in done.stdout
    assert "other graphs" not in done.stdout
    refused = (
        "- fused_all_gather_attention: kernels may read the values of a long tensor of integers"
    )
    assert "made by Python at each call" in done.stdout
    assert refused in done.stdout
    graphs = json.loads((tmp_path / "o").read_text())["graphs"]
    assert [graph["rank"] for graph in graphs] == [0, 1]
    for graph in graphs:
        (block,) = [each for each in graph["collectives"] if each["could_be"]]
        assert (block["name"], block["bytes"], block["calls"]) == ("all_reduce", 2048, 2)
        assert block["could_be"] == "matmul_all_reduce"
        (own,) = [each for each in graph["collectives"] if each["bytes"] == 324]
        assert own["could_be"] is None


@exhaustive
def test_a_program_that_fails(tmp_path: Path) -> None:
    fails = "import sys; print('output'); sys.exit(3)"
    done = symm_cp_in(tmp_path, "explain", "--json", "--", sys.executable, "-c", fails)
    assert done.returncode == 3
    assert json.loads(done.stdout)["graphs"] == []  # the program's own output goes elsewhere
    assert "output\n" in done.stderr
    assert "the program ended with exit code 3" in done.stderr


def decision(**changes: Any) -> dict[str, Any]:
    each = {"name": "all_gather", "bytes": 2048, "ranks": 2, "calls": 1}
    each |= {"advice": "", "could_be": None, "where": ""}
    return {**each, "fused_into": "an_op", "runs_as": None, "reason": "because", **changes}


def test_the_report() -> None:
    left = {"fused_into": None}
    graphs = [
        {"rank": 0, "graph": 1, "collectives": [decision(), decision(**left, advice="change it")]},
        {"rank": 0, "graph": 2, "collectives": [decision(**left, runs_as="another_op")]},
        {"rank": 1, "graph": 1, "collectives": [decision()]},
    ]
    assert report(graphs).splitlines() == [
        "rank 0: 1 of 3 collectives fused",
        "graph 1",
        "- all_gather (2 KiB on 2 ranks): fused into an_op",
        "- all_gather (2 KiB on 2 ranks): left alone: because",
        "graph 2",
        "- all_gather (2 KiB on 2 ranks): runs as another_op: because",
        "what to change:",
        "- change it (1 x)",
        "ranks [1] compiled other graphs than rank 0: --json has them",
    ]
    assert "no graph with a collective was compiled" in report([])
    assert report([], eager=True) == "no collective was called"
    calls = [
        decision(**left, calls=3, could_be="op", advice="change it", where="train.py:7"),
        decision(**left),
    ]
    assert report([{"rank": 0, "graph": 1, "eager": True, "collectives": calls}]).splitlines() == [
        "rank 0: 0 of 4 collectives fused",
        "called by uncompiled code; symm_cp could fuse or hide 3",
        "- all_gather (2 KiB on 2 ranks, 3 calls, at train.py:7): left alone: because",
        "- all_gather (2 KiB on 2 ranks): left alone: because",
        "what to change:",
        "- change it (3 x)",
    ]


def test_no_program(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", "--"]) == 2
    assert "symm-cp explain: COMMAND is missing" in capsys.readouterr().err
    assert cli.main(["explain", "--", "no-such-command"]) == 127
    assert capsys.readouterr().err == "symm-cp explain: no-such-command: no such command\n"
