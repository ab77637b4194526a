"""The command `symm-cp`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from symm_cp import __version__


def _parser() -> argparse.ArgumentParser:
    from symm_cp import bench, doctor, first_run, plan, run
    from symm_cp.demo import arguments as demo_arguments

    parser = argparse.ArgumentParser(
        prog="symm-cp", description="Symmetric-memory fused compute-collective ops for PyTorch."
    )
    parser.add_argument("--version", action="version", version=f"symm_cp {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    demo = commands.add_parser(
        "demo",
        help="train a small transformer on real text: in one process, unfused, and fused",
        description="Train a small transformer on real text in one process, with collectives "
        "between the matmuls, and with collectives fused into them; compares losses and times.",
    )
    demo_arguments.add_arguments(demo)
    commands.add_parser("run", help=run.HELP, add_help=False)
    check = commands.add_parser(
        "doctor", help="show what works here, and how to make the rest work"
    )
    doctor.add_arguments(check)
    first = commands.add_parser("selftest", help=first_run.HELP)
    first_run.add_arguments(first)
    planner = commands.add_parser(
        "plan", help="predict the step time of a model on hosts with GPUs, for all parallel layouts"
    )
    plan.add_arguments(planner)
    bench.add_commands(commands)
    commands.add_parser("build", help="build the native part now instead of at first use")
    return parser


def _build() -> int:
    from symm_cp import native

    try:
        print(native.build(verbose=True))
        print(native.build_glue(verbose=True))
    except native.BuildError as error:
        print(f"symm-cp build: {error}", file=sys.stderr)
        return 1
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if arguments[:1] == ["run"]:  # torchrun's parser reads the others
        from symm_cp import run

        return run.main(arguments[1:])
    args = _parser().parse_args(arguments)
    args.arguments = arguments  # for commands that start themselves again, as ranks
    if args.command == "build":
        return _build()
    if args.command == "doctor":
        from symm_cp import doctor

        return doctor.main(args)
    if args.command == "selftest":
        from symm_cp import first_run

        return first_run.main(args)
    if args.command == "plan":
        from symm_cp import plan

        return plan.main(args)
    if args.command == "demo":
        from symm_cp.demo import start

        return start.main(args)
    from symm_cp import bench

    return bench.main(args)
