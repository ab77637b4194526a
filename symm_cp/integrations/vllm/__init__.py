"""vLLM on CPU over symm_cp: a general plug-in that vLLM loads by its entry point.

In every process of an engine on CPU, `register` sets two attributes of vLLM's platform object: the
backend of its device groups is symm_cp instead of gloo, and its device communicator is
`communicator.SymmCommunicator`. It changes no class of vLLM. vLLM's `VLLM_PLUGINS` can leave it out
(`VLLM_PLUGINS=""` leaves out all plug-ins). It sets nothing on other platforms, or if another
plug-in has chosen a backend or a communicator.
"""

from __future__ import annotations

from symm_cp import backend

COMMUNICATOR = f"{__name__}.communicator.SymmCommunicator"
_VLLMS = "vllm.distributed.device_communicators.cpu_communicator.CpuCommunicator"


def register() -> None:
    """Makes vLLM's CPU platform use this package; further calls do nothing.

    vLLM calls it. If the native part cannot be built, it keeps vLLM's own choices and warns.
    """
    from vllm.logger import init_logger
    from vllm.platforms import current_platform

    logger = init_logger("vllm.plugins.symm_cp")  # vLLM prints the messages of loggers below "vllm"
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
