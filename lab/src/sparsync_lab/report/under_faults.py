"""What faults did to a training, in numbers: pauses, ranks over time, and the samples that are in the weights."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from sparsync_lab.report.results import GivenFault, Meeting, Run, Trace


@dataclass(frozen=True)
class UnderFaults:
    """One training with faults. Seconds are those since its first step, without evaluations."""

    faults: tuple[GivenFault, ...]  # also those that were not given
    meetings: tuple[Meeting, ...]
    end_s: float
    batches: float  # in the weights; a step of all ranks that began is one

    @property
    def given(self) -> tuple[GivenFault, ...]:
        return tuple(each for each in self.faults if each.given)

    @property
    def longest_pause_s(self) -> float:
        return max((each.pause_s or 0.0 for each in self.given), default=0.0)

    @property
    def paused_s(self) -> float:
        """The longest pause after each fault, all together."""
        return sum(each.pause_s or 0.0 for each in self.given)

    @property
    def batches_per_s(self) -> float | None:
        return self.batches / self.end_s if self.end_s else None

    @property
    def ranks_over_time(self) -> tuple[tuple[float, int], ...]:
        """From when on how many ranks have trained, up to the end."""
        return tuple((each.seconds, each.ranks) for each in self.meetings)

    @property
    def mean_ranks(self) -> float | None:
        """The ranks that were there, as a mean over the time; between two meetings those of the first count."""
        spans = pairwise([*self.ranks_over_time, (self.end_s, 0)])
        return sum(ranks * (after - at) for (at, ranks), (after, _) in spans) / self.end_s if self.end_s else None


def under_faults(run: Run, trace: Trace) -> UnderFaults:
    """Return the figures of a training in a run with faults."""
    meetings = sorted(trace.meetings, key=lambda each: each.seconds)
    batches = sum(_ranks_in(meetings, each.step, run.ranks) for each in trace.steps) / run.ranks
    end_s = trace.steps[-1].seconds if trace.steps else 0.0
    return UnderFaults(tuple(trace.faults), tuple(meetings), end_s, batches)


def _ranks_in(meetings: Sequence[Meeting], step: int, ranks: int) -> int:
    """Return how many ranks took a step: those of the last meeting before it."""
    return next((each.ranks for each in reversed(meetings) if each.step < step), ranks)
