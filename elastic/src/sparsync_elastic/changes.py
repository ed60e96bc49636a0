"""The records that a run keeps of its meetings, and a rank's notes on failed epochs for the others."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sparsync_elastic.epochs import Epoch
from sparsync_elastic.world import brief, waited_for


@dataclass(frozen=True)
class Lost:
    """An update that the weights lack for good. All other unsent updates wait in residuals."""

    member: str
    step: int  # number of steps done by then
    what: str


@dataclass(frozen=True)
class Change:
    """A meeting, as this rank has seen it."""

    epoch: int
    ranks: int
    step: int  # number of steps done
    seconds: float  # until training went on; for a joining rank since it asked for the state
    received_nbytes: int = 0  # of weights and optimizer states, if this rank lacked them
    received_s: float = 0.0
    ahead_nbytes: int = 0  # received before the meeting, while the others trained
    ahead_s: float = 0.0
    factor: float = 1.0  # multiplied into the residual of the first model, because the mean is over other ranks


def losses(epoch: Epoch, before: Epoch) -> list[Lost]:
    """List the updates that the weights lack for good after the meeting of an epoch."""
    gone = [Lost(each, epoch.step, "what this rank had not sent, unless it comes back") for each in epoch.gone]
    what = "it got the weights of others; its residual has what it had not sent in the step that it lacked"
    return gone + [Lost(each, epoch.step, what) for each in epoch.behind if each in before.members]


class Failures:
    """The failures of one rank: the number of successive meetings with the same members without a step, and the last error."""

    def __init__(self) -> None:
        self._error, self._waited_for = "", ""
        self._row, self._members, self._began, self._lasted_s = 0, frozenset[str](), time.monotonic(), 0.0
        self._began_at: list[int] | None = None  # the position of this rank when it connected to the others

    def note(self, error: BaseException, epoch: Epoch) -> None:
        """Note the error of a failed epoch, for the next meeting."""
        awaited = waited_for(error)
        self._error, self._lasted_s = brief(error), time.monotonic() - self._began
        self._waited_for = epoch.members[awaited] if awaited is not None and awaited < len(epoch.members) else ""

    def begin(self, position: list[int]) -> None:
        """Note that this rank has connected to the others, at this position."""
        self._began_at, self._began = position, time.monotonic()

    def told(self, members: Sequence[str], position: list[int]) -> dict[str, Any]:  # Any: fields of Note
        """Return the fields of the note for the next meeting after an epoch of these members."""
        if self._began_at not in (None, position):
            self._row = 0
        if self._error:
            self._row = self._row + 1 if self._members == frozenset(members) else 1
            self._members = frozenset(members)
        failures, error = self._row if self._error else 0, self._error
        self._error, self._began_at = "", None
        return {"failures": failures, "error": error, "waited_for": self._waited_for, "lasted_s": self._lasted_s}
