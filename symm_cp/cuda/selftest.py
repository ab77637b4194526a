"""The self-test of a group on a device, at its first use: what works between its ranks.

All ranks take each step together and then share the outcome through the store; so a rank on which
a step fails leaves no other one waiting, and all come to the same verdict. The steps are copies,
signals, waits and graphs, issued by the native code that real calls use, on streams of the
self-test. The host waits for each of them with a limit.
"""

from __future__ import annotations

import json
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TypeAlias

import torch

from symm_cp import env
from symm_cp.cuda.base import Device, Verdict
from symm_cp.cuda.trial import ROUNDS, Trial
from symm_cp.cuda.workspaces import admit, retire
from symm_cp.group.liveness import PeerLostError, share
from symm_cp.group.memory import Group, StateKey

#: Seconds until work that should take less than a millisecond counts as failed. A smaller limit
#: fails on a busy machine; a larger one delays the fallback of a machine on which a step hangs.
LIMIT = 5.0
#: The same for a whole step, whose first calls of the driver may take long.
STEP_LIMIT = 60.0

# Seconds by which each rank is late in one of the calls: broken waits then read too early. A
# shorter delay may hide in the jitter of the host.
_DELAY = 0.003

_VERDICTS: StateKey[dict[torch.device, Verdict]] = StateKey("verdicts on devices")

# Trials of self-tests in which a step failed: peers or streams may still use them.
_abandoned: list[Trial] = []

#: A step of the self-test; returns why it failed, or an empty text.
Step: TypeAlias = "Callable[[], str]"


def verdict(group: Group, device: Device) -> Verdict:
    """Returns the features that a group may use on a device. Collective at the first call.

    Raises `RuntimeError` when the first call is in a graph capture, when a rank is lost, or when a
    signal leaves streams stuck, so that the process cannot go on.
    """
    verdicts = group.state(_VERDICTS, dict)
    known = verdicts.get(device.torch_device)
    if known is None:
        if device.capturing():
            raise RuntimeError(
                "symm_cp: the first use of a group cannot be captured into a graph: call "
                f"symm_cp.reserve(group, nbytes, device={str(device.torch_device)!r}) before"
            )
        admit(group)
        with group.lock, device.guard():
            known = verdicts[device.torch_device] = SelfTest(group, device).run()
    return known


class SelfTest:
    """One self-test of a group on a device. Collective."""

    def __init__(self, group: Group, device: Device) -> None:
        self.group, self.device = group, device
        self.trials: list[Trial] = []
        #: The features that do not work, and why.
        self.reasons: list[str] = []
        #: A call of the driver did not return in time: it may still issue something later.
        self.held_up = False

    def run(self) -> Verdict:
        """Returns the verdict, and warns on rank 0 when something does not work."""
        began = time.monotonic()
        self.device.attach()
        try:
            verdict = self._decide()
        except BaseException:
            for trial in self.trials:
                self._bounded(partial(_released, trial), 2 * LIMIT)
            _abandoned.extend(self.trials)
            raise
        if self.reasons:
            _abandoned.extend(self.trials)
        else:
            for trial in self.trials:
                trial.close()
            retire(*(trial.space for trial in self.trials))
        if self.reasons and self.group.rank == 0:
            warnings.warn(
                f"symm_cp: on {self.device} in group {self.group.name!r}: {verdict.reason}",
                stacklevel=2,
            )
        return replace(verdict, seconds=time.monotonic() - began)

    def _decide(self) -> Verdict:
        if self.group.world_size == 1:
            return Verdict(graphs=self.device.captures)
        wanted, without = self._agree()
        if without:
            needs = "streams wait for peers from CUDA 12.5 on"
            self.reasons.append(f"the drivers of ranks {without} are too old ({needs})")
            return self._failed()
        if not wanted:
            reason = "not tested, by SYMM_CP_SELFTEST=0"
            return Verdict(graphs=self.device.captures, reason=reason)
        self.device.check_ranks(self.group)
        trial = self._trial()
        if trial is None or not (
            self._works("a write to a flag", trial, lambda: _write_flag(trial))
            and self._works("a copy within the device", trial, lambda: _fill(trial))
            and self._works("a copy from a peer", trial, lambda: _pull(trial, single=True))
        ):
            return self._failed()
        batches = self._works("a batch of copies", trial, lambda: _pull(trial, single=False))
        if not batches:
            self.reasons[-1] += ", so copies are issued one after the other"
        trial.space.set_single_copies(single=not batches)
        if not self._works("signals by streams", trial, lambda: _calls(trial)):
            return self._failed()
        graphs = self.device.captures and self._graphs_work(batches)
        return Verdict(True, batches, graphs, "; ".join(self.reasons))

    def _failed(self) -> Verdict:
        self.reasons[-1] += ", so ranks exchange data through the process group"
        return Verdict(False, False, False, "; ".join(self.reasons))

    # How ranks stay in step.

    def _share(self, text: str, seconds: float | None = None) -> list[str]:
        return share(self.group, f"selftest/{self.device.torch_type}", text, seconds=seconds)

    def _agree(self) -> tuple[bool, list[int]]:
        """Whether any rank wants the test, and the ranks whose streams cannot wait for peers.

        This step waits for ranks that come late, as any op's first call does.
        """
        texts = self._share(json.dumps([env.selftest(), self.device.streams_can_wait()]))
        answers = [json.loads(text) for text in texts]
        without = [rank for rank, (_, can_wait) in enumerate(answers) if not can_wait]
        return any(wanted for wanted, _ in answers), without

    def _works(self, what: str, trial: Trial | None, step: Step) -> bool:
        """Takes a step on all ranks; returns whether it worked on all, and notes why it did not.

        Raises `RuntimeError` when it leaves a stream stuck.
        """
        outcomes = self._share(self._bounded(step, STEP_LIMIT), STEP_LIMIT + 2 * LIMIT)
        failed = [(rank, outcome) for rank, outcome in enumerate(outcomes) if outcome]
        if not failed:
            return True
        # A step often ends late because of a failure that another rank reports.
        rank, outcome = min(failed, key=lambda other: _follows(other[1]))
        self.reasons.append(f"{what} failed on rank {rank}: {outcome}")
        # Released only after every rank has ended its step: it also ends the waits of peers.
        stuck = "held up" if self.held_up else ""
        if trial is not None and not stuck:
            stuck = self._bounded(partial(_released, trial), 2 * LIMIT)
        stuck_ranks = [rank for rank, text in enumerate(self._share(stuck, 4 * LIMIT)) if text]
        if stuck_ranks:
            raise RuntimeError(
                f"symm_cp: {self.reasons[-1]}. Streams of ranks {stuck_ranks} stay stuck in it, so "
                "these processes cannot use the device: start the program again with a different "
                "SYMM_CP_HOST on each rank, which then exchange data through the process group"
            )
        if trial is not None:
            # Releasing streams raised flags for which a later step waits.
            self._bounded(lambda: "" if trial.clear(LIMIT) else "stuck", 2 * LIMIT)
        return False

    def _bounded(self, step: Step, seconds: float) -> str:
        """Takes a step in a thread of its own: a call of the driver may never return."""
        outcomes: list[str] = []
        step = self.device.in_this_context(step)

        def take() -> None:
            try:
                with self.device.guard():
                    outcomes.append(step())
            except Exception as error:  # from the driver, torch, a compiler: reported to all ranks
                outcomes.append(f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}")

        thread = threading.Thread(target=take, name="symm_cp self-test", daemon=True)
        thread.start()
        thread.join(seconds)
        if outcomes:
            return outcomes[0]
        self.held_up = True
        for trial in self.trials:
            trial.given_up = True  # the thread issues nothing more when the driver returns
        return f"the driver did not return within {seconds:g} s"

    def _trial(self, *, graph: bool = False) -> Trial | None:
        """Makes a workspace on trial; None if a rank cannot share its memory, or map a peer's."""

        def make() -> str:
            self.trials.append(Trial(self.group, self.device, graph=graph))
            return ""

        return self.trials[-1] if self._works("memory for peers", None, make) else None

    def _graphs_work(self, batches: bool) -> bool:
        """Captures a call, and replays it with other inputs."""
        trial, name = self._trial(graph=True), "a call in a graph"
        if trial is None:
            return False
        trial.space.set_single_copies(single=not batches)
        replays: list[Callable[[], object]] = []

        def capture() -> str:
            replays.append(self.device.capture(trial.lanes[0], lambda: trial.call(1, 0)))
            return ""

        def replay(turn: int) -> str:
            trial.put([turn])
            replays[0]()
            return _outcome(trial, {0: turn})

        return self._works(name, trial, capture) and all(
            self._works(name, trial, partial(replay, turn)) for turn in range(ROUNDS)
        )


# The steps: each returns why it failed, or an empty text.


def _released(trial: Trial) -> str:
    return "" if trial.release(LIMIT) else "stuck"


def _follows(outcome: str) -> bool:
    """Whether a step may have failed because a peer's failed."""
    return outcome.endswith(_late()) or outcome.startswith(PeerLostError.__name__)


def _late() -> str:
    return f"within {LIMIT:g} s"


def _ended(trial: Trial) -> str:
    return "" if trial.ended(LIMIT) else f"it did not end {_late()}"


def _write_flag(trial: Trial) -> str:
    trial.write_own_flag(ROUNDS)
    if late := _ended(trial):
        return late
    seen = trial.own_flag(LIMIT)
    return "" if seen == ROUNDS else f"the flag is {seen}, not {ROUNDS}"


def _fill(trial: Trial) -> str:
    trial.put([0])
    trial.space.set_single_copies(single=True)
    trial.issue([*trial.fork(), *trial.fill(0), *trial.join()], 0)
    return _ended(trial)


def _pull(trial: Trial, *, single: bool) -> str:
    # Batches go to another place: bytes from single copies must not be mistaken for theirs.
    place = 0 if single else 1
    trial.space.set_single_copies(single=single)
    trial.issue([*trial.pull(place), *trial.join()], 0)
    return _ended(trial) or trial.wrong({place: 0}, LIMIT)


def _calls(trial: Trial) -> str:
    trial.put(range(1, ROUNDS + 1))
    for epoch in range(1, ROUNDS + 1):
        if trial.rank % ROUNDS == epoch - 1:
            time.sleep(_DELAY)
        trial.call(epoch, epoch - 1)
    return _outcome(trial, {epoch - 1: epoch for epoch in range(1, ROUNDS + 1)})


def _outcome(trial: Trial, turns: Mapping[int, int]) -> str:
    if not trial.ended(LIMIT):
        return f"{trial.missing(LIMIT / 5)} {_late()}"
    return trial.wrong(turns, LIMIT)
