"""Strike a rank with a fault from inside: in a phase, at a message, after a bucket or between steps."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from sparsync import core
from sparsync.comm import GroupComm
from sparsync.runtime import connection
from studies.campaign.training import ModelTraining, RankTraining
from studies.campaign.trials import ALL, CHANGED, GONE, MADE_OTHERWISE, RAISED, WITHIN, Trial
from studies.trials.process import Tell

CAUSE = "no luck today"  # the message of exceptions raised on purpose
DELAY = 0.4  # of the timeout
LOOK_FOR = 3  # steps to wait for the moment; afterwards the fault strikes between two steps
# The state is saved before this step, and loaded later on rank 0 or all ranks; DDP rebuilds its buckets after its first step.
SAVED_STEP = 2
AHEAD = 3  # steps by which one rank miscounts
_CALLS = ("announce", "settle", "send_recv", "all_gather", "all_to_all", "all_reduce")


class LeaveEarly(BaseException):
    """Ends this rank normally, but too early."""


class FaultError(Exception):
    """Raised on purpose."""


class Striker:
    """Strikes once, on the victim of `trial`, and does nothing on other ranks.

    The supervisor is told of the strike beforehand; `await_cut` returns once it has cut the link of a partition.
    """

    def __init__(
        self, trial: Trial, rank: int, tell: Tell, await_cut: Callable[[], None], timeout_s: float, undisturbed: bool
    ) -> None:
        self.trial, self._told, self._await_cut, self.timeout_s = trial, tell, await_cut, timeout_s
        self.armed = rank == trial.victim and trial.when != "random" and not undisturbed
        self.takes_part = self.armed or (trial.detail == ALL and not undisturbed)
        self.step = -1
        self.saved: Any = None  # Any: as ModelTraining.state
        self._back = False  # the saved state has been loaded
        self._messages = 0
        self._reduced, self._reduced_before = 0, 0  # buckets of this step, and of the last step that had any
        if self.armed:
            self._watch_messages()
            self._watch_phases()

    def begins_setup(self) -> None:
        """Report a model or scheme that differs from the other ranks'."""
        if self.armed and self.trial.fault in MADE_OTHERWISE:
            self._tell("where the model or the scheme is made")

    def watch(self, training: RankTraining) -> None:
        """Count the buckets that this training's scheme reduces."""
        if not self.armed or training.handle is None:
            return
        state = training.handle.state
        for name in ("reduce", "reduce_scatter"):
            if (inner := getattr(state, name, None)) is not None:
                setattr(state, name, self._then(inner))

    def begins(self, step: int, training: RankTraining) -> None:
        """Strike before this step if it is due."""
        if isinstance(training, ModelTraining):
            self._disturb(step, training)
        if not self.armed:
            return
        if self._reduced:
            self._reduced_before = self._reduced
        self.step, self._reduced = step, 0
        trial = self.trial
        if trial.fault in ("other_step", "other_state"):
            self._count_otherwise(step, training)
        elif (trial.when in ("start", "before") and step == trial.step) or (
            trial.when in WITHIN and step == trial.step + LOOK_FOR
        ):
            self.strike(f"before step {step}")
        elif trial.fault == "nan" and step == trial.step:
            self._tell(f"in the batch of step {step}")

    def goes_back(self, training: RankTraining, error: Exception) -> int:
        """Load the saved state after an error on all ranks, and return the next step."""
        if not isinstance(training, ModelTraining) or CAUSE not in "; ".join(
            [str(error), *getattr(error, "__notes__", [])]
        ):
            raise error
        training.load(self.saved)
        self.saved, self._back = None, True  # so that a second error ends the trial
        return SAVED_STEP

    def strike(self, where: str) -> None:
        """Perform the fault now."""
        fault = self.trial.fault
        if fault not in (*GONE, *RAISED, "delay", "retry_after_error"):
            return
        self._tell(where)
        if fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault == "freeze":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif fault == "partition":
            self._await_cut()
        elif fault == "leave":
            raise LeaveEarly
        elif fault == "delay":
            time.sleep(DELAY * self.timeout_s)
        elif fault == "raise_late":
            raise MemoryError(CAUSE)
        else:
            raise FaultError(CAUSE)

    def _disturb(self, step: int, training: ModelTraining) -> None:
        """Save, fork or change before a step."""
        trial = self.trial
        if trial.fault == "retry_after_error" and step == SAVED_STEP and not self._back:
            self.saved = training.state()
        if trial.fault not in (*CHANGED, "forked_gc") or step != trial.step or not self.takes_part:
            return
        if self.armed:
            self._tell(f"before step {step}")
        training.fork() if trial.fault == "forked_gc" else training.change()

    def _tell(self, where: str) -> None:
        self.armed = False
        self._told(strike=where)

    def _within(self, when: str) -> bool:
        return self.armed and self.trial.when == when and self.step >= self.trial.step

    def _count_otherwise(self, step: int, training: RankTraining) -> None:
        handle = training.handle
        assert handle is not None
        if step == SAVED_STEP:
            self.saved = handle.state_dict()
        if step != self.trial.step:
            return
        state = self.saved
        if self.trial.fault == "other_step":
            state = handle.state_dict()
            state["step"] += AHEAD
        self._tell(f"before step {step}")
        handle.load_state_dict(state)

    def _watch_messages(self) -> None:
        # Patch the class: integrations make their own communicators, and this process has only this trial.
        for name in _CALLS:
            setattr(GroupComm, name, self._before(getattr(GroupComm, name), name))

    def _before(self, inner: Callable[..., Any], name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            if self._within("message"):
                self._messages += 1
                if self._messages > self.trial.message:
                    self.strike(f"message {self._messages - 1}, {name}, step {self.step}")
            return inner(*arguments, **named)

        return call

    def _then(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            done = inner(*arguments, **named)
            self._reduced += 1
            if self._within("late") and self._reduced >= self._reduced_before:
                self.strike(f"after bucket {self._reduced - 1} of step {self.step}")
            return done

        return call

    def _watch_phases(self) -> None:
        recorded = connection.recorded_phases

        @contextmanager
        def striking(bucket: str) -> Iterator[dict[str, float]]:
            with recorded(bucket) as spent:
                core._THREAD.ledger = _Ledger(self, spent)
                yield spent

        connection.recorded_phases = striking


class _Ledger(dict[str, float]):
    """Seconds by phase; strikes when the phase of the trial ends."""

    def __init__(self, striker: Striker, spent: dict[str, float]) -> None:
        super().__init__()
        self._striker, self._spent = striker, spent

    def __setitem__(self, name: str, seconds: float) -> None:
        super().__setitem__(name, seconds)
        self._spent[name] = seconds
        if self._striker._within(name):
            self._striker.strike(f"{name}, step {self._striker.step}")
