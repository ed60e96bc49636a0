"""The time of a training step, from when each bucket of the backward pass is ready and how long its reduction takes.

Three orders: ours (one dispatcher that takes buckets as they become ready), DDP's (as ours, but in the order of the buckets, one never
before the one with the number before it; Li et al., PVLDB 13, 2020, section 3.2.3), and FSDP2's (all-gathers of parameters before the
forward and the backward pass of each unit, a reduce-scatter after its backward pass). And steps that exchange only now and then.

Times are in seconds since the step began. A reduction that runs beside the backward pass may slow it down: `steals` is the share of the
backward pass's rate that a running reduction takes, 0 where it has processors (or copy engines) of its own, and 1 where nothing overlaps.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Order = Literal["ready", "index"]
Seconds = int | float


@dataclass(frozen=True)
class Timeline:
    """What one step takes. Intervals are of the reductions, in the order of the buckets; for FSDP2, of all transfers as they ran."""

    step_s: float
    compute_s: float  # forward, backward and optimizer, had they the machine to themselves
    communication_s: float  # the sum over all reductions
    intervals: tuple[tuple[float, float], ...]

    @property
    def exposed_s(self) -> float:
        """By how much the reductions lengthen the step."""
        return self.step_s - self.compute_s

    @property
    def hidden(self) -> float:
        """The share of the communication that costs no time; 1 where there is none."""
        return 1 - min(1.0, self.exposed_s / self.communication_s) if self.communication_s else 1.0


def overlapped(
    ready_s: Sequence[Seconds],
    reduce_s: Sequence[Seconds],
    backward_end_s: Seconds,
    after_s: Seconds = 0.0,
    order: Order = "ready",
    steals: Seconds = 0.0,
) -> Timeline:
    """Return the step in which one dispatcher reduces bucket i, ready at `ready_s[i]`, in `reduce_s[i]` seconds, one after the other.

    `backward_end_s` is when the backward pass ends, `after_s` what follows the last of both, the optimizer. Order "ready" is ours, "index"
    is DDP's. Raises ValueError for lists of different lengths, negative times, or a bucket that is ready after the backward pass.
    """
    _check(ready_s, reduce_s, backward_end_s)
    if not 0 <= steals <= 1:
        raise ValueError(f"steals is a share of the backward pass's rate and must be in [0, 1], got {steals}")
    places = sorted(range(len(ready_s)), key=lambda i: (ready_s[i], i)) if order == "ready" else range(len(ready_s))
    intervals: dict[int, tuple[float, float]] = {}
    wall_s = done_s = 0.0  # at `wall_s` the dispatcher is free, and the backward pass has done `done_s` of its work
    for i in places:
        start_s = wall_s + max(0.0, ready_s[i] - done_s)
        wall_s = start_s + reduce_s[i]
        done_s = min(backward_end_s, max(done_s, ready_s[i]) + (1 - steals) * reduce_s[i])
        intervals[i] = (start_s, wall_s)
    step_s = wall_s + (backward_end_s - done_s) + after_s
    ordered = tuple(intervals[i] for i in range(len(ready_s)))
    return Timeline(step_s, backward_end_s + after_s, float(sum(reduce_s)), ordered)


def serial(reduce_s: Sequence[Seconds], backward_end_s: Seconds, after_s: Seconds = 0.0) -> Timeline:
    """Return the step in which all reductions come after the backward pass, as `reduce_gradients` does them."""
    return overlapped([backward_end_s] * len(reduce_s), reduce_s, backward_end_s, after_s)


def even_buckets(forward_s: Seconds, backward_s: Seconds, count: int) -> list[float]:
    """Return when each of `count` buckets of equal work is ready, in a backward pass that begins after the forward pass."""
    if count < 1:
        raise ValueError(f"a backward pass has at least 1 bucket, got {count}")
    return [forward_s + backward_s * (i + 1) / count for i in range(count)]


@dataclass(frozen=True)
class Unit:
    """One FSDP2 unit, such as a transformer block: what it computes, and how long its parameters and gradients are on the way."""

    forward_s: float
    backward_s: float
    all_gather_s: float
    reduce_scatter_s: float


def fsdp2(units: Sequence[Unit], after_s: Seconds = 0.0, reshard_after_forward: bool = True) -> Timeline:
    """Return the step of a model whose units are sharded by `fully_shard`, given in the order of the forward pass.

    Assumptions: one link, which serves transfers one after the other in the order in which they are issued. The all-gather of a unit is
    issued when the unit before it begins to compute (FSDP2's prefetch), that of the first at the start. Units compute one after the other,
    each once its parameters are there. A reduce-scatter is issued when the unit's backward pass is over, behind the all-gather that was
    prefetched then. The last unit's parameters stay from the forward to the backward pass; with `reshard_after_forward=False` all do, and
    the backward pass gathers none. The optimizer waits for all.
    """
    if not units:
        raise ValueError("a sharded model has at least 1 unit, got none")
    link_s = clock_s = 0.0
    intervals: list[tuple[float, float]] = []

    def transfer(issued_s: Seconds, seconds: Seconds) -> Seconds:
        nonlocal link_s
        begin_s = max(issued_s, link_s)
        link_s = begin_s + seconds
        intervals.append((begin_s, link_s))
        return link_s

    there_s = transfer(0.0, units[0].all_gather_s)
    for i, unit in enumerate(units):
        clock_s = max(clock_s, there_s)
        if i + 1 < len(units):
            there_s = transfer(clock_s, units[i + 1].all_gather_s)
        clock_s += unit.forward_s
    there_s = clock_s
    for i, unit in reversed(list(enumerate(units))):
        clock_s = max(clock_s, there_s)
        if i and reshard_after_forward:
            there_s = transfer(clock_s, units[i - 1].all_gather_s)
        clock_s += unit.backward_s
        transfer(clock_s, unit.reduce_scatter_s)
    compute_s = sum(unit.forward_s + unit.backward_s for unit in units) + after_s
    communication_s = sum(end - begin for begin, end in intervals)
    return Timeline(max(clock_s, link_s) + after_s, compute_s, communication_s, tuple(intervals))


def periodic(compute_s: Seconds, every: int, exchange_s: Seconds, fragments: int = 1, delay: int = 0) -> float:
    """Return the mean step of a training that exchanges its weights every `every` steps (DiLoCo, arXiv 2311.08105), in seconds.

    With `fragments`, one of them after each every/fragments steps, `exchange_s` seconds in all; `delay` steps go on meanwhile (Streaming
    DiLoCo, arXiv 2501.18512). Fragments are exchanged one after the other, so a delay longer than the time between two hides no more than
    one as long. Raises ValueError for a delay longer than `every`.
    """
    if every < 1 or fragments < 1:
        raise ValueError(f"every and fragments must be at least 1, got {every} and {fragments}")
    between = every / fragments
    if not 0 <= delay <= every:
        raise ValueError(f"delay must be in [0, {every}], the steps between two exchanges, got {delay}")
    return compute_s + max(0.0, exchange_s / fragments - min(delay, between) * compute_s) / between


def _check(ready_s: Sequence[Seconds], reduce_s: Sequence[Seconds], backward_end_s: Seconds) -> None:
    if len(ready_s) != len(reduce_s):
        raise ValueError(
            f"each bucket has one time to be ready and one to reduce, got {len(ready_s)} and {len(reduce_s)}"
        )
    if any(each < 0 for each in (*ready_s, *reduce_s)):
        raise ValueError(f"times must be at least 0, got ready {list(ready_s)} and reduce {list(reduce_s)}")
    if any(each > backward_end_s for each in ready_s):
        raise ValueError(
            f"buckets must be ready by the end of the backward pass, {backward_end_s:g} s, got {list(ready_s)}"
        )
