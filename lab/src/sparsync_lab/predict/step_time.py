"""Predict the time of one training step from plans, the ranks that exchange them, and a backward pass. Every prediction uses this file.

    Plan --Ranks.seconds--> reduction --overlapped | serial | periodic, with a Backward--> StepTime

Predictions differ in their parts: the network is links or the tables of a probe; a rank's work is nothing, passes over memory or the
kernels of a probe; the backward pass is recorded or even. Times are in seconds.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter

from sparsync_lab.predict.exchanges import Plan
from sparsync_lab.predict.network import Network
from sparsync_lab.predict.probe_file import Backward, ReadyBucket

Seconds = int | float


@dataclass(frozen=True)
class Ranks:
    """P ranks: the network between them, and the processing time of a plan on each."""

    P: int
    network: Network
    work_s: Callable[[Plan], float] = lambda plan: 0.0
    announce_s: float = 0.0  # added by an announcement to a bucket's first exchange

    def seconds(self, plan: Plan) -> float:
        """Predict the seconds of a reduction: its exchanges in sequence, and the processing between them."""
        announced_s = self.announce_s if plan.beside and self.P > 1 else 0.0
        return sum(self.network.seconds(each, self.P) for each in plan.exchanges) + announced_s + self.work_s(plan)


@dataclass(frozen=True)
class StepTime:
    """The times within one step."""

    step_s: float
    compute_s: float  # forward, backward and optimizer, without competition for the machine
    communication_s: float  # the sum over all reductions

    @property
    def exposed_s(self) -> float:
        """Time that the reductions add to the step."""
        return self.step_s - self.compute_s

    @property
    def hidden(self) -> float:
        """Share of the communication that does not lengthen the step; 1 if there is no communication."""
        return 1 - min(1.0, self.exposed_s / self.communication_s) if self.communication_s else 1.0


def overlapped(backward: Backward, reduce_s: Sequence[Seconds], steals: Seconds = 0.0) -> StepTime:
    """Predict a step in which one dispatcher reduces the buckets of `backward` in the order in which they become ready.

    Bucket i takes `reduce_s[i]` seconds. `steals` in [0, 1] is the share of the backward pass's speed that a running reduction takes: 0
    with separate processors or copy engines, 1 if nothing overlaps.
    """
    end_s = _backward_end_s(backward)
    # At `wall_s` the dispatcher is free, and the forward and backward pass have done `done_s` of their work.
    wall_s = done_s = 0.0
    ready_s = [backward.forward_s + each.ready_s for each in backward.bucket]
    for ready, reducing in sorted(zip(ready_s, reduce_s, strict=True), key=itemgetter(0)):
        wall_s += max(0.0, ready - done_s) + reducing
        done_s = min(end_s, max(done_s, ready) + (1 - steals) * reducing)
    step_s = wall_s + (end_s - done_s) + backward.optimizer_s
    return StepTime(step_s, end_s + backward.optimizer_s, float(sum(reduce_s)))


def serial(backward: Backward, reduce_s: Sequence[Seconds]) -> StepTime:
    """Predict a step in which all reductions follow the backward pass."""
    compute_s, communication_s = _backward_end_s(backward) + backward.optimizer_s, float(sum(reduce_s))
    return StepTime(compute_s + communication_s, compute_s, communication_s)


def periodic(backward: Backward, every: int, exchange_s: Seconds, fragments: int = 1, delay: int = 0) -> StepTime:
    """Predict the mean step of a training that exchanges its weights every `every` steps (DiLoCo, arXiv 2311.08105).

    With `fragments`, one of them is exchanged every every/fragments steps; all of them take `exchange_s` seconds. Training continues for
    `delay` steps meanwhile (Streaming DiLoCo, arXiv 2501.18512). Fragments are exchanged in sequence, so a delay longer than the time
    between two fragments hides no more.
    """
    between = every / fragments
    compute_s = _backward_end_s(backward) + backward.optimizer_s
    exposed_s = max(0.0, exchange_s / fragments - min(delay, between) * compute_s) / between
    return StepTime(compute_s + exposed_s, compute_s, exchange_s / every)


def even_backward(
    sizes: Sequence[int], forward_s: Seconds, backward_s: Seconds, optimizer_s: Seconds = 0.0
) -> Backward:
    """Make the backward pass of a model from its sizes and times alone: buckets become ready evenly with the work."""
    total, done, buckets = sum(sizes), 0, []
    for size in sizes:
        done += size
        buckets.append(ReadyBucket(size, backward_s * done / total))
    return Backward("even", forward_s, backward_s, optimizer_s, tuple(buckets))


def _backward_end_s(backward: Backward) -> float:
    """Find when the backward pass ends; a bucket may be ready later than the median of its end."""
    return backward.forward_s + max([backward.backward_s, *(each.ready_s for each in backward.bucket)])
