"""The command `symm-cp`."""

from __future__ import annotations

import argparse
import os
import select
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any

from symm_cp import __version__
from symm_cp.commands import bench, compare, explain, run, trace, tune
from symm_cp.parsing import add_json
from symm_cp.ranks import add_rendezvous, is_rank, positive, started_elsewhere

# Exit codes that a shell reports for processes ended by these signals.
_INTERRUPTED, _NO_READER = 128 + signal.SIGINT, 128 + signal.SIGPIPE


def _parser() -> argparse.ArgumentParser:
    """Returns the parser of all commands but `run`. Needs no torch."""
    parser = argparse.ArgumentParser(
        prog="symm-cp", description="Symmetric-memory fused compute-collective ops for PyTorch."
    )
    parser.add_argument("--version", action="version", version=f"symm_cp {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    text = "train a small transformer in one process and on several ranks, and compare the losses"
    demo(commands.add_parser("demo", help=text, description=text))
    commands.add_parser("run", help=run.HELP, add_help=False)
    run.add_exec(commands.add_parser("exec", help=run.EXEC_HELP, description=run.EXEC_HELP))

    def add(**modules: Any) -> None:
        for name, command in modules.items():
            help_ = command.HELP
            command.add_arguments(commands.add_parser(name, help=help_, description=help_))

    add(explain=explain, compare=compare)
    doctor = commands.add_parser(
        "doctor", help="show what works here, and how to make the rest work"
    )
    add_json(doctor, "the findings")
    selftest(commands.add_parser("selftest", help="test what works here; ends within two minutes"))
    add(bench=bench, trace=trace, tune=tune)
    commands.add_parser("build", help="build the native part now instead of at first use")
    return parser


def demo(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `symm-cp demo`."""
    add = parser.add_argument
    add("--ranks", type=positive, help="processes that share the model (2, or as many as --cp)")
    add("--cp", type=positive, default=1, help="ranks that share each sequence (%(default)s)")
    add("--compile", action="store_true", help="let torch.compile fuse torch's collectives")
    add("--steps", type=positive, default=12, help="training steps (%(default)s)")
    add_json(parser, "all losses and times")
    add_rendezvous(parser)


def selftest(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `symm-cp selftest`."""
    add = parser.add_argument
    add(
        "--device",
        choices=["cpu", "cuda"],
        help="what to test (the CPU, and GPUs where there are any)",
    )
    add("--ranks", type=positive, help="(CPU: 2; the number of GPUs, at least 2 and at most 8)")
    add_json(parser, "the report")
    add("--part", help=argparse.SUPPRESS)
    add("--results", type=Path, help=argparse.SUPPRESS)
    add_rendezvous(parser)


def answer() -> None:
    """Ends the process for --help, --version and wrong arguments, before torch is imported.

    From now on an interrupt prints one line, also while torch is imported and `csrc/` built.
    """

    def parse() -> int:
        _parse(sys.argv[1:])
        return 0

    sys.excepthook = _show
    if code := _quietly(parse):
        sys.exit(code)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    if arguments[:1] == ["run"]:  # torchrun's parser reads the others
        run.parser().parse_args(arguments[1:])
        return argparse.Namespace(command="run", arguments=arguments[1:])
    args = _parser().parse_args(arguments)
    args.arguments = arguments  # for commands that start themselves again, as ranks
    return args


def _show(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        _say_interrupted()
        os._exit(_INTERRUPTED)
    sys.__excepthook__(kind, error, traceback)


def _say_interrupted() -> None:
    if not is_rank():  # the command that started the ranks prints it once
        with suppress(OSError, ValueError):
            print("\nsymm-cp: interrupted", file=sys.stderr, flush=True)


def _quietly(command: Callable[[], int]) -> int:
    """Runs a command; ends without a traceback when the user or the reader of its output stops."""
    try:
        try:
            return command()
        finally:
            if sys.stdout is not None:  # as after `>&-`
                sys.stdout.flush()
    except KeyboardInterrupt:
        _say_interrupted()
        return _INTERRUPTED
    except BrokenPipeError:
        if not _has_no_reader():
            raise
        # Buffered output would fail again at the end of the process.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _NO_READER


def _has_no_reader() -> bool:
    """Tells whether stdout is a pipe that its reader has closed, as `head` does."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


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
    return _quietly(lambda: _main(arguments))


def _main(arguments: Sequence[str]) -> int:
    args = _parse(arguments)
    if args.command == "run":
        return run.main(args.arguments)
    if args.command == "exec":
        return run.main_exec(args)
    if args.command == "explain":
        return explain.main(args)
    if args.command == "build":
        return _build()
    if hasattr(args, "rendezvous") and (
        note := started_elsewhere(args.rendezvous, dict(os.environ))
    ):
        print(f"symm-cp {args.command}: {note}", file=sys.stderr)
    # The folders of these commands need torch.
    modules = {"selftest": "first_run", "bench": "bench.command"}
    modules |= {"trace": "trace.run", "tune": "tune.run"}
    module = import_module(f"symm_cp.commands.{modules.get(args.command, args.command)}")
    code: int = module.main(args)
    return code
