"""Predict training steps from a probe, compare schemes, and say in words which to use. Closed forms: nothing is sent or trained."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from sparsync import Scheme
from sparsync_lab.predict import plans
from sparsync_lab.predict.exchanges import Plan
from sparsync_lab.predict.network import Network
from sparsync_lab.predict.probe_file import Backward, Probe, ReadyBucket, SchemeTimes
from sparsync_lab.predict.probed import ProbedNetwork
from sparsync_lab.predict.step_time import Ranks, StepTime, overlapped, periodic, serial

WORTH = 1.1  # how many times as fast something must be to be worth fewer bits
_NAMES = {"dense": "dense float32", "bf16": "dense bf16"}
BASELINES = tuple(_NAMES)
_LOCAL = {"every": 1, "fragments": 1, "delay": 0}  # settings of LocalSteps, and what they are where they are not given


class MissingKernelError(ValueError):
    """The probe lacks the speed of a kind of work that a plan has; the message says which, and what to do."""


@dataclass(frozen=True)
class PredictedStep:
    """The prediction of one training step of one method on one rank."""

    label: str
    step_s: float
    reduce_s: float  # of all buckets together, hidden or not
    hidden: float  # share of it that costs no time
    sent_nbytes: float
    rounds: float
    state_nbytes: float
    probed: bool = False  # the probe has buckets that this method reduced

    def bits(self, elements: int) -> float:
        """Return what a rank sends for each of `elements` parameters."""
        return 8 * self.sent_nbytes / elements


@dataclass(frozen=True)
class Recommendation:
    """What to use: the label of a method, "" where none can be recommended, and one sentence that says why."""

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


def probed_ranks(probe: Probe, network: Network, overhead_s: float | None = None) -> Ranks:
    """Return the ranks of a probe. Their work goes at the speed of its kernels, while all ranks of a host are at work.

    `overhead_s`: what a bucket costs however small it is, where that was measured for a scheme; else the fixed costs of the kernels count.
    """
    work_s = partial(compute_s, probe=probe, overhead_s=overhead_s)
    return Ranks(probe.group.ranks, network, work_s, probe.latency.announce_s)


def compute_s(made: Plan, probe: Probe, overhead_s: float | None = None) -> float:
    """Return the seconds that a rank computes for a plan. Raises MissingKernelError for a kind of work that the probe has not measured."""
    known = {each.kind: each for each in probe.kernel}
    missing = [kind for kind, elements in made.kernels.items() if elements and kind not in known]
    if missing:
        raise MissingKernelError(
            f"the probe has no [[kernel]] of kind {', '.join(missing)}, which the plan needs: an earlier version has made it, or it was "
            "edited; run `sparsync probe` again, or add it to the file"
        )
    work = sum((elements / known[kind].elements_per_s for kind, elements in made.kernels.items() if elements), 0.0)
    fixed = sum((calls * known[kind].fixed_s for kind, calls in made.calls.items() if calls and kind in known), 0.0)
    return work + (fixed if overhead_s is None else max(fixed, overhead_s))


@dataclass(frozen=True)
class ReductionTime:
    """What reducing buckets takes with one scheme on the ranks of a probe: by the closed form, calibrated on measured buckets.

    What measured buckets took beyond the closed form is added: linear in the elements between two of them, and that of the nearest one
    below the smallest and above the largest. A bucket that took longer than a larger one counts as long as that. No more than half of the
    closed form is taken off.
    """

    scheme: Scheme
    probe: Probe
    network: Network
    measured: SchemeTimes | None
    itemsize: int = 4

    @property
    def overhead_s(self) -> float | None:
        """Return the processor time of a bucket however small it is, where it was measured."""
        return None if self.measured is None else self.measured.fixed_s

    def plan(self, n: int) -> Plan:
        """Return what the scheme does with a bucket of `n` elements."""
        return plans.plan(self.scheme, n, self.probe.group.ranks, itemsize=self.itemsize)

    def expected_s(self, n: int) -> float:
        """Return the seconds of a bucket of `n` elements by the closed form."""
        return probed_ranks(self.probe, self.network, self.overhead_s).seconds(self.plan(n))

    def seconds(self, n: int) -> float:
        """Return the seconds of a bucket of `n` elements."""
        expected = self.expected_s(n)
        return max(expected / 2, expected + self.beyond_s(n))

    def beyond_s(self, n: int) -> float:
        """Return what a bucket of `n` elements takes beyond the closed form; 0 where none was measured."""
        least, beyond = math.inf, list[tuple[int, float]]()
        for each in reversed(self.measured.bucket if self.measured else ()):
            least = min(least, each.seconds)
            beyond.insert(0, (each.elements, least - self.expected_s(each.elements)))
        if not beyond:
            return 0.0
        low = max((each for each in beyond if each[0] <= n), default=beyond[0])
        high = min((each for each in beyond if each[0] >= n), default=beyond[-1])
        share = (n - low[0]) / (high[0] - low[0]) if high[0] > low[0] else 0.0
        return low[1] + share * (high[1] - low[1])


def measured_times(label: str, scheme: Scheme, probe: Probe) -> SchemeTimes | None:
    """Return what the probe has measured with exactly these settings of a scheme; by its label where the file has no settings."""
    settings = repr(scheme)
    found = (each for each in probe.scheme if (each.settings == settings if each.settings else each.scheme == label))
    return next((each for each in found if each.bucket), None)


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
) -> PredictedStep:
    """Return the prediction of a step of `backward` with `scheme` under DistributedDataParallel, on the ranks of `probe`.

    `join_mb` is that of `sparsync.attach`; only schemes with a residual join buckets. `crowded`: while a reduction computes, the backward
    pass stands still; None: where a host has less than two cores for a rank. Raises ValueError where the scheme has no closed form.
    """
    network = network or ProbedNetwork(probe)
    sizes = [each.elements for each in backward.bucket]
    groups = (
        joined(sizes, itemsize, join_mb)
        if scheme.has_residual and join_mb
        else [[place] for place in range(len(sizes))]
    )
    counts = [sum(sizes[place] for place in group) for group in groups]
    ready = [max(backward.bucket[place].ready_s for place in group) for group in groups]
    # Joining copies each gradient into the joined bucket and back.
    copies = [4.0 * itemsize * n if len(group) > 1 else 0.0 for n, group in zip(counts, groups, strict=True)]
    reduction = ReductionTime(scheme, probe, network, measured_times(label, scheme, probe), itemsize)
    # Most buckets are equally large, and a plan may look at each rank.
    plan_of = {n: reduction.plan(n) for n in set(counts)}
    seconds_of = {n: reduction.seconds(n) for n in plan_of}
    expected_of = {n: reduction.expected_s(n) for n in plan_of}
    reducing = [seconds_of[n] + copied / probe.memory.bytes_per_s for n, copied in zip(counts, copies, strict=True)]
    if crowded is None:
        ranks_per_host = -(-probe.group.ranks // max(1, probe.group.hosts))
        crowded = probe.group.device == "cpu" and probe.group.cores < 2 * ranks_per_host
    expected_s = sum(expected_of[n] for n in counts)
    computing_of = {n: compute_s(each, probe, reduction.overhead_s) for n, each in plan_of.items()}
    computing_s = sum(computing_of[n] for n in counts)
    steals = computing_s / expected_s if crowded and expected_s else 0.0
    buckets = tuple(ReadyBucket(n, ready_s) for n, ready_s in zip(counts, ready, strict=True))
    line = overlapped(replace(backward, bucket=buckets), reducing, min(1.0, steals))
    return _step(label, line, sum((plan_of[n] for n in counts), Plan()), reduction)


def step_around(
    steps: Literal["local_steps", "adamw_steps"],
    label: str,
    scheme: Scheme,
    probe: Probe,
    backward: Backward,
    settings: Mapping[str, Any],  # Any: numbers and texts, those of LocalSteps or AdamWSteps
    network: Network | None = None,
) -> PredictedStep:
    """Return the prediction of a step of LocalSteps or AdamWSteps with these settings around a scheme.

    A fragment of local steps counts as one bucket, and all are equally large; AdamWSteps exchange the model as one bucket.
    """
    P, network = probe.group.ranks, network or ProbedNetwork(probe)
    elements = sum(each.elements for each in backward.bucket)
    reduction = ReductionTime(scheme, probe, network, measured_times(label.partition("/")[2], scheme, probe))
    ranks = probed_ranks(probe, network)
    if steps == "adamw_steps":
        block, measure_every = int(settings.get("block", 64)), int(settings.get("measure_every", 8))
        ratio_s = ranks.seconds(plans.ratio([elements], P, block))
        line = serial(backward, [reduction.seconds(elements), ratio_s / measure_every])
        return _step(label, line, plans.adamw_steps(scheme, [elements], P, block, measure_every), reduction)
    every, fragments, delay = (int(settings.get(name, default)) for name, default in _LOCAL.items())
    sizes = [elements // fragments + (place < elements % fragments) for place in range(fragments)]
    agreeing_s = fragments * ranks.seconds(plans.agreement(P))
    line = periodic(backward, every, sum(map(reduction.seconds, sizes)) + agreeing_s, fragments, delay)
    return _step(label, line, plans.local_steps(scheme, sizes, P, every, fragments), reduction)


def _step(label: str, line: StepTime, mean: Plan, reduction: ReductionTime) -> PredictedStep:
    sent = sum(each.nbytes for each in (*mean.exchanges, *mean.beside))
    rounds = sum(each.rounds for each in mean.exchanges)
    probed = reduction.measured is not None
    return PredictedStep(label, line.step_s, line.communication_s, line.hidden, sent, rounds, mean.state_nbytes, probed)


def verdict(steps: Mapping[str, PredictedStep], quality: Mapping[str, str]) -> Recommendation:
    """Return the method that sends the most bits among those whose step takes at most a tenth longer than the fastest.

    As `bits="auto"` chooses while it trains. `quality`: what is known of each, for the sentence. Raises ValueError without "bf16".
    """
    if "bf16" not in steps:
        raise ValueError("a verdict compares with dense bf16; give it among the methods")
    fastest = min(steps, key=lambda label: steps[label].step_s)
    near = [label for label, each in steps.items() if each.step_s <= WORTH * steps[fastest].step_s]
    best = max(near, key=lambda label: steps[label].sent_nbytes)
    if best in BASELINES:
        return Recommendation(
            best, f"Use {_NAMES[best]}: no method of known quality makes a step more than a tenth shorter."
        )
    base = min((label for label in BASELINES if label in steps), key=lambda label: steps[label].step_s)
    ratio = steps[base].step_s / steps[best].step_s
    why = (
        f"Use {best}: its step is {ratio:.1f} times as fast as that of {_NAMES[base]}, and no method of known quality with fewer "
        f"bits makes it more than a tenth shorter. Its quality: {quality[best]}."
    )
    if not steps[best].probed:
        why += " The probe has no buckets of it, so its time may be too short: probe with it in --schemes."
    return Recommendation(best, why)
