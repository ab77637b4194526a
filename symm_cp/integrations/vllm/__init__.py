"""vLLM on CPU over symm_cp: a general plug-in that vLLM loads by its entry point.

In every process of an engine on CPU, `register` sets two answers of vLLM's platform object: the
backend of its device groups is symm_cp instead of gloo, and its device communicator is
`communicator.SymmCommunicator`. No class of vLLM is changed. vLLM's `VLLM_PLUGINS` leaves it out
(`VLLM_PLUGINS=""` all plug-ins). On other platforms, and where another plug-in has chosen a backend
or a communicator, nothing is set.
"""

from __future__ import annotations

from symm_cp import backend

COMMUNICATOR = f"{__name__}.communicator.SymmCommunicator"
_VLLMS = "vllm.distributed.device_communicators.cpu_communicator.CpuCommunicator"


def register() -> None:
    """Has vLLM's CPU platform use this package; once more does no harm.

    vLLM calls it. Where the native part cannot be built, vLLM's own choices stay, with a warning.
    """
    from vllm.logger import init_logger
    from vllm.platforms import current_platform

    logger = init_logger("vllm.plugins.symm_cp")  # vLLM prints what is logged below "vllm"
    if not current_platform.is_cpu():
        return
    chosen = current_platform.dist_backend, current_platform.get_device_communicator_cls()
    if chosen == (backend.NAME, COMMUNICATOR):
        return
    if chosen != ("gloo", _VLLMS):
        logger.warning("symm_cp is not used: the CPU platform's choices are %s and %s", *chosen)
        return
    if not backend.register_or_warn(logger):
        return
    current_platform.dist_backend = backend.NAME
    current_platform.get_device_communicator_cls = lambda: COMMUNICATOR
    logger.info("CPU ranks communicate over symm_cp: dist_backend, get_device_communicator_cls")
