"""Python imports this file when it starts programs of `symm-cp run` or `exec`, and their children.

The program runs as without it, with three exceptions. Once it has imported `torch.distributed`,
`symm_cp.commands.run.redirect` makes its process groups. With `--cuda-on-cpu`, once it has imported
torch, the CPU stands in for GPUs. With `--numa`, a rank runs on its own cores. Until then this file
imports nothing of torch or symm_cp, so that the program can set variables first.
"""

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType

_FOLDER = os.path.dirname(os.path.abspath(__file__))
_C10D = "torch.distributed.distributed_c10d"
_kept: list[object] = []


def _find_symm_cp() -> None:
    if importlib.util.find_spec("symm_cp") is None:  # a checkout that is not installed
        sys.path.append(os.path.abspath(os.path.join(_FOLDER, "..", "..", "..", "..")))


def _redirect(c10d: ModuleType) -> None:
    """Makes `symm_cp.commands.run.redirect` create all process groups."""
    make = c10d._new_process_group_helper

    def make_redirected(*args: object, **kwargs: object) -> object:
        _find_symm_cp()
        from symm_cp.commands.run.redirect import make_group

        return make_group(make, *args, **kwargs)

    c10d._new_process_group_helper = make_redirected  # type: ignore[attr-defined]


def _map_cuda(torch: ModuleType) -> None:
    """Gives the program the CPU for CUDA, as long as it runs."""
    _find_symm_cp()
    from symm_cp.testing.gpu_programs import cuda_on_cpu

    devices = int(os.environ["SYMM_CP_CUDA_ON_CPU"])
    mapping = cuda_on_cpu(devices, int(os.environ.get("LOCAL_RANK", 0)))
    mapping.__enter__()
    _kept.append(mapping)  # the mapping ends when its context manager is freed


def _explain(_: ModuleType) -> None:
    """Records the graphs that the program compiles (`symm-cp explain`)."""
    _find_symm_cp()
    from symm_cp.inductor.notes import begin

    begin(os.environ["SYMM_CP_EXPLAIN"])


def _explain_eager(c10d: ModuleType) -> None:
    """Records the collectives that the program calls, from its first group on."""
    make = c10d._new_process_group_helper

    def make_noting(*args: object, **kwargs: object) -> object:
        c10d._new_process_group_helper = make  # type: ignore[attr-defined]
        _find_symm_cp()
        from symm_cp.inductor.eager import begin

        begin(os.environ["SYMM_CP_EXPLAIN_EAGER"])
        return make(*args, **kwargs)

    c10d._new_process_group_helper = make_noting  # type: ignore[attr-defined]


def _compare(torch: ModuleType) -> None:
    """Records what this rank's optimizers see (`symm-cp compare`)."""
    _find_symm_cp()
    from pathlib import Path

    from symm_cp.testing.steps import Recorder

    steps, dtype, folder = os.environ["SYMM_CP_COMPARE"].split(" ", 2)
    if dtype != "keep":
        torch.set_default_dtype(getattr(torch, dtype))
    recording = Recorder(int(steps), Path(folder, f"{os.environ['RANK']}.pt")).recording()
    recording.__enter__()
    _kept.append(recording)  # it ends with the program


class _Finder:
    """Finds a module as Python does, and calls `act` after the module has been executed."""

    def __init__(self, name: str, act: Callable[[ModuleType], None]) -> None:
        self._name, self._act = name, act

    def find_spec(
        self, name: str, path: object = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != self._name:
            return None
        sys.meta_path.remove(self)  # type: ignore[arg-type]
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            self._act(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _bind() -> None:
    """Binds a rank to its cores; ends the program if there are too few."""
    path = os.path.join(_FOLDER, "..", "..", "..", "cores.py")
    spec = importlib.util.spec_from_file_location("_cores", path)
    assert spec is not None
    assert spec.loader is not None
    cores = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(cores)
    try:
        cores.bind()
    except (OSError, ValueError) as error:
        # Python would ignore an exception here, or print a traceback of its own start.
        sys.stderr.write(f"symm-cp: --numa: {error}\n")
        sys.stderr.flush()
        os._exit(2)


def _import_hidden() -> None:
    """Imports the sitecustomize.py that this one hides, if there is one."""
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != _FOLDER]
    this = sys.modules.pop("sitecustomize")
    try:
        importlib.import_module("sitecustomize")
    except ModuleNotFoundError as error:
        if error.name != "sitecustomize":
            raise
        sys.modules["sitecustomize"] = this


if __name__ == "sitecustomize":  # imported by Python at its start
    if os.environ.get("SYMM_CP_NUMA"):
        _bind()
    if os.environ.get("SYMM_CP_BACKEND_FOR"):
        sys.meta_path.insert(0, _Finder(_C10D, _redirect))  # type: ignore[arg-type]
    if os.environ.get("SYMM_CP_CUDA_ON_CPU"):
        sys.meta_path.insert(0, _Finder("torch", _map_cuda))  # type: ignore[arg-type]
    if os.environ.get("SYMM_CP_EXPLAIN"):
        compiler = _Finder("torch._inductor.compile_fx", _explain)
        sys.meta_path.insert(0, compiler)  # type: ignore[arg-type]
    if os.environ.get("SYMM_CP_EXPLAIN_EAGER"):
        sys.meta_path.insert(0, _Finder(_C10D, _explain_eager))  # type: ignore[arg-type]
    if os.environ.get("SYMM_CP_COMPARE") and "RANK" in os.environ:
        sys.meta_path.insert(0, _Finder("torch", _compare))  # type: ignore[arg-type]
    _import_hidden()
