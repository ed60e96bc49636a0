"""Predict training steps from a probe, compare schemes, and say in words which to use. Closed forms: nothing is sent or trained."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from sparsync.base.scheme import Scheme
from sparsync.comm.plan import Plan
from sparsync.predict import plans
from sparsync.predict.network import Network
from sparsync.predict.probe_file import Backward, Probe, ReducedBucket
from sparsync.predict.probed import ProbedNetwork
from sparsync.predict.timeline import overlapped

WORTH = 1.1  # how many times as fast as dense bf16 something must be to be worth its trouble
BASELINES = ("dense", "bf16")

Plans = Callable[[int], Plan]
"""The plan of a bucket of so many elements."""


@dataclass(frozen=True)
class Step:
    """The prediction of one training step of one method on one rank."""

    label: str
    step_s: float
    reduce_s: float  # of all buckets together, hidden or not
    hidden: float  # share of it that costs no time
    sent_nbytes: float
    rounds: float
    state_nbytes: float

    def bits(self, elements: int) -> float:
        """Return what a rank sends for each of `elements` parameters."""
        return 8 * self.sent_nbytes / elements


@dataclass(frozen=True)
class Extra:
    """How many times as many steps a method needs for the quality that dense reaches: the estimate, and the interval it is good for."""

    factor: float = 1.0
    low: float = 1.0
    high: float = 1.0


@dataclass(frozen=True)
class Verdict:
    """What to use: the label of a method, and one sentence that says why."""

    label: str
    why: str


def joined(buckets: Sequence[int], itemsize: int, join_mb: float) -> list[list[int]]:
    """Return the places of the buckets that DistributedDataParallel's integration reduces as one, as `attach(join_mb=...)` joins them."""
    groups: list[list[int]] = []
    waiting: list[int] = []
    for place in range(len(buckets)):
        waiting.append(place)
        held = sum(buckets[each] for each in waiting) * itemsize
        if held >= int(join_mb * 2**20) or place == len(buckets) - 1:
            groups.append(waiting)
            waiting = []
    return groups


def bucket_s(made: Plan, P: int, network: Network, probe: Probe, overhead_s: float | None = None) -> float:
    """Return the seconds of a bucket's reduction: its exchanges, one after the other, and what the rank computes between them.

    `overhead_s`: what the bucket costs however small it is, where that was measured for this scheme; else the fixed costs of the kernels
    count. Accumulating, selecting and so on are taken at the speed of the probe's kernels, while all ranks of a host are at work.
    """
    exchanges = sum(network.seconds(each, P) for each in made.exchanges)
    announced = probe.latency.announce_s if made.beside and P > 1 else 0.0
    return exchanges + announced + compute_s(made, probe, overhead_s)


def _correction(measured: Sequence[ReducedBucket], predicted: Callable[[int], float]) -> Callable[[int], float]:
    """Return `predicted`, the seconds of a bucket of n elements, put right by buckets that were measured.

    What these took beyond the prediction is added: linear in n between two of them, and that of the nearest one outside.
    """
    beyond = [(each.elements, each.seconds - predicted(each.elements)) for each in measured]

    def seconds(n: int) -> float:
        if not beyond:
            return predicted(n)
        low = max((each for each in beyond if each[0] <= n), default=beyond[0])
        high = min((each for each in beyond if each[0] >= n), default=beyond[-1])
        share = (n - low[0]) / (high[0] - low[0]) if high[0] > low[0] else 0.0
        return max(0.0, predicted(n) + low[1] + share * (high[1] - low[1]))

    return seconds


def compute_s(made: Plan, probe: Probe, overhead_s: float | None = None) -> float:
    """Return the seconds that a rank computes for a plan."""
    known = {each.kind: each for each in probe.kernel}
    missing = [kind for kind, elements in made.kernels.items() if elements and kind not in known]
    if missing:
        raise ValueError(
            f"the probe has no [[kernel]] of kind {', '.join(missing)}, which the plan needs; probe again, or add it to the file"
        )
    work = sum(elements / known[kind].elements_per_s for kind, elements in made.kernels.items() if elements)
    fixed = sum(calls * known[kind].fixed_s for kind, calls in made.calls.items() if calls and kind in known)
    return work + (fixed if overhead_s is None else max(fixed, overhead_s))


def step(
    label: str,
    scheme: Scheme,
    probe: Probe,
    backward: Backward,
    *,
    network: Network | None = None,
    itemsize: int = 4,
    join_mb: float = 4.0,
    crowded: bool | None = None,
) -> Step:
    """Return the prediction of a step of `backward` with `scheme` under DistributedDataParallel, on the ranks of `probe`.

    `join_mb` is that of `sparsync.attach`; only schemes with a residual join buckets. `crowded`: while a reduction computes, the backward
    pass stands still; None: where a host has less than two cores for a rank. Raises ValueError where the scheme has no closed form.
    """
    P, network = probe.group.ranks, network or ProbedNetwork(probe)
    sizes = [each.elements for each in backward.bucket]
    groups = (
        joined(sizes, itemsize, join_mb)
        if scheme.has_residual and join_mb
        else [[place] for place in range(len(sizes))]
    )
    made = [plans.plan(scheme, sum(sizes[place] for place in group), P, itemsize=itemsize) for group in groups]
    ready = [backward.forward_s + max(backward.bucket[place].ready_s for place in group) for group in groups]
    # Joining copies each gradient into the joined bucket and back.
    copies = [4.0 * itemsize * sum(sizes[place] for place in group) if len(group) > 1 else 0.0 for group in groups]
    measured = next((each for each in probe.scheme if each.scheme == label), None)
    overhead_s = None if measured is None else measured.fixed_s
    computing = [compute_s(each, probe, overhead_s) for each in made]

    def predicted(n: int) -> float:
        return bucket_s(plans.plan(scheme, n, P, itemsize=itemsize), P, network, probe, overhead_s)

    corrected = _correction(measured.bucket if measured else (), predicted)
    reducing = [
        corrected(sum(sizes[place] for place in group)) + copied / probe.memory.bytes_per_s
        for group, copied in zip(groups, copies, strict=True)
    ]
    total = sum(reducing)
    if crowded is None:
        ranks_per_host = -(-P // max(1, probe.group.hosts))
        crowded = probe.group.device == "cpu" and probe.group.cores < 2 * ranks_per_host
    steals = sum(computing) / total if crowded and total else 0.0
    end = backward.forward_s + max(backward.backward_s, *(each.ready_s for each in backward.bucket))
    line = overlapped(ready, reducing, end, backward.optimizer_s, steals=min(1.0, steals))
    whole = sum(made, Plan())
    sent = sum(each.nbytes for each in (*whole.exchanges, *whole.beside))
    rounds = sum(each.rounds for each in whole.exchanges)
    return Step(label, line.step_s, total, line.hidden, sent, rounds, whole.state_nbytes)


def verdict(steps: Mapping[str, Step], extra: Mapping[str, Extra], worth: float = WORTH) -> Verdict:
    """Return what to use of `steps`, of which one is "bf16": the method that reaches dense's quality soonest.

    Of a method that needs `factor` times as many steps each counts so many times. It must be `worth` times as fast as dense bf16 even at
    the upper end of the interval of its factor; else bf16 is the answer, because it changes nothing but the precision of the sum.
    """
    if "bf16" not in steps:
        raise ValueError("a verdict compares with dense bf16; give it among the methods")
    base = steps["bf16"].step_s

    def to_quality(label: str, at: Callable[[Extra], float]) -> float:
        return steps[label].step_s * at(extra.get(label, Extra()))

    best = min(steps, key=lambda label: to_quality(label, lambda each: each.factor))
    gain, least = (base / to_quality(best, at) for at in (lambda each: each.factor, lambda each: each.high))
    exposed = 1 - steps["bf16"].hidden
    if best in BASELINES or least < worth:
        nearest = (
            "" if best in BASELINES else f" ({best} comes nearest, {gain:.2f} times as fast, {least:.2f} at the least)"
        )
        return Verdict(
            "bf16", f"Use dense bf16: nothing here is known to reach dense's quality {worth:g} times as fast{nearest}."
        )
    return Verdict(
        best,
        f"Use {best}: it reaches dense's quality {gain:.1f} times as fast as dense bf16 ({least:.1f} at the least), of whose "
        f"communication {100 * exposed:.0f} % is exposed.",
    )
