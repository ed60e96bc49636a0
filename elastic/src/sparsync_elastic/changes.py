"""What a run tells of its meetings."""

from dataclasses import dataclass

from sparsync_elastic.epochs import Epoch


@dataclass(frozen=True)
class Lost:
    """What is missing in the weights for good. Everything else that ranks have not sent waits in their residuals."""

    member: str
    step: int  # steps that were done by then
    what: str


@dataclass(frozen=True)
class Change:
    """A meeting, as this rank has seen it."""

    epoch: int
    ranks: int
    step: int  # steps that were done
    seconds: float  # from its beginning until training goes on; of a rank that joins, with what came before
    received_nbytes: int = 0  # of weights and states of optimizers, where this rank lacked them
    received_s: float = 0.0
    ahead_nbytes: int = 0  # received before, while the others trained
    ahead_s: float = 0.0
    factor: float = 1.0  # by which what this rank holds back of the first model was multiplied; the mean is over others


def losses(epoch: Epoch, before: Epoch) -> list[Lost]:
    """Return what is missing for good after the meeting of an epoch."""
    gone = [Lost(each, epoch.step, "what this rank had not sent, unless it comes back") for each in epoch.gone]
    what = "got the weights of others; of a step that it lacked, what had not come back to it waits still"
    return gone + [Lost(each, epoch.step, what) for each in epoch.behind if each in before.members]
