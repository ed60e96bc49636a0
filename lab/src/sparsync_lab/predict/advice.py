"""Predict training steps from a probe in closed form, and choose a method. Nothing is sent or trained."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from sparsync import Scheme, Steps
from sparsync_lab.predict import schemes
from sparsync_lab.predict.exchanges import Plan
from sparsync_lab.predict.probe_file import Backward, Probe, ProbedNetwork, ReadyBucket, SchemeTimes
from sparsync_lab.predict.step_time import Ranks, StepTime, overlapped, periodic, serial

WORTH = 1.1  # speed-up that justifies fewer bits
_NAMES = {"dense": "dense float32", "bf16": "dense bf16"}
BASELINES = tuple(_NAMES)


@dataclass(frozen=True)
class PredictedStep:
    """The prediction of one training step with one method."""

    label: str
    step_s: float
    reduce_s: float  # of all buckets together, hidden or not
    hidden: float  # share of `reduce_s` that does not lengthen the step
    sent_nbytes: float
    state_nbytes: float
    probed: bool = False  # the probe has buckets reduced by this method
    far: bool = False  # an exchange is far larger than the measured ones

    def bits(self, elements: int) -> float:
        """Compute the bits that a rank sends per parameter, for a model of `elements` parameters."""
        return 8 * self.sent_nbytes / elements


def joined(buckets: Sequence[int], itemsize: int, join_mb: float) -> list[list[int]]:
    """Group the buckets as `attach(join_mb=...)` joins them under DistributedDataParallel; returns their places."""
    groups: list[list[int]] = []
    waiting: list[int] = []
    for place in range(len(buckets)):
        waiting.append(place)
        held = sum(buckets[each] for each in waiting) * itemsize
        if held >= int(join_mb * 2**20) or place == len(buckets) - 1:
            groups.append(waiting)
            waiting = []
    return groups


def compute_s(made: Plan, probe: Probe, overhead_s: float = 0.0) -> float:
    """Compute a rank's processing time for a plan with the probe's kernels, while all ranks of a host are busy.

    `overhead_s`: the measured cost of a bucket of any size, used if it exceeds the kernels' fixed costs. Raises ValueError for a kind of
    work that the probe lacks.
    """
    known = {each.kind: each for each in probe.kernel}
    if missing := [kind for kind, elements in made.kernels.items() if elements and kind not in known]:
        raise ValueError(f"the probe has no [[kernel]] of kind {', '.join(missing)}; run `sparsync probe` again")
    work = sum((elements / known[kind].elements_per_s for kind, elements in made.kernels.items() if elements), 0.0)
    fixed = sum((calls * known[kind].fixed_s for kind, calls in made.calls.items() if kind in known), 0.0)
    return work + max(fixed, overhead_s)


@dataclass(frozen=True)
class ReductionTime:
    """The time of buckets with one scheme on the probed ranks: the closed form, calibrated on measured buckets.

    The calibration adds the difference between measurement and closed form: interpolated linearly in the elements between two measured
    buckets, constant below the smallest and above the largest. A bucket's time is capped at any larger bucket's. At most half of the closed
    form is subtracted.
    """

    scheme: Scheme
    probe: Probe
    measured: SchemeTimes | None = None

    def plan(self, n: int) -> Plan:
        """Plan the reduction of a bucket of `n` elements."""
        return schemes.plan(self.scheme, n, self.probe.group.ranks)

    def computing_s(self, n: int) -> float:
        """Compute a rank's processing time, in seconds, for a bucket of `n` elements."""
        return compute_s(self.plan(n), self.probe, self.measured.fixed_s if self.measured else 0.0)

    def expected_s(self, n: int) -> float:
        """Predict the seconds of a bucket of `n` elements by the closed form."""
        return probed_ranks(self.probe).seconds(self.plan(n)) + self.computing_s(n)

    def seconds(self, n: int) -> float:
        """Predict the seconds of a bucket of `n` elements, calibrated."""
        expected = self.expected_s(n)
        return max(expected / 2, expected + self.beyond_s(n))

    def beyond_s(self, n: int) -> float:
        """Compute the seconds that measured buckets took beyond the closed form, at `n` elements; 0 if none was measured."""
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


def probed_ranks(probe: Probe) -> Ranks:
    """Make the ranks of a probe, without their processing time."""
    return Ranks(probe.group.ranks, ProbedNetwork(probe), announce_s=probe.latency.announce_s)


def measured_times(label: str, scheme: Scheme, probe: Probe) -> SchemeTimes | None:
    """Find the probe's measurements of a scheme with exactly these settings, or with its label if the file has no settings."""
    settings = repr(scheme)
    found = (each for each in probe.scheme if (each.settings == settings if each.settings else each.scheme == label))
    return next((each for each in found if each.bucket), None)


def step(
    label: str, scheme: Scheme, probe: Probe, backward: Backward, *, join_mb: float = 4.0, crowded: bool | None = None
) -> PredictedStep:
    """Predict a step of `backward` with `scheme` under DistributedDataParallel on the ranks of `probe`.

    `join_mb` as in `sparsync.attach`; only schemes with a residual join buckets. `crowded`: the backward pass halts while a reduction
    computes; None: if a host has fewer than two cores per rank. Raises ValueError if the scheme has no closed form.
    """
    sizes, itemsize = [each.elements for each in backward.bucket], 4
    groups = [[place] for place in range(len(sizes))]
    if scheme.has_residual and join_mb:
        groups = joined(sizes, itemsize, join_mb)
    counts = [sum(sizes[place] for place in group) for group in groups]
    ready = [max(backward.bucket[place].ready_s for place in group) for group in groups]
    # Joining copies each gradient into the joined bucket and back.
    copies = [4.0 * itemsize * n if len(group) > 1 else 0.0 for n, group in zip(counts, groups, strict=True)]
    reduction = ReductionTime(scheme, probe, measured_times(label, scheme, probe))
    # Most buckets have equal sizes, and a plan may look at each rank.
    seconds_of = {n: reduction.seconds(n) for n in set(counts)}
    reducing = [seconds_of[n] + copied / probe.memory.bytes_per_s for n, copied in zip(counts, copies, strict=True)]
    if crowded is None:
        ranks_per_host = -(-probe.group.ranks // max(1, probe.group.hosts))
        crowded = probe.group.device == "cpu" and probe.group.cores < 2 * ranks_per_host
    expected_s = sum(map(reduction.expected_s, counts))
    steals = sum(map(reduction.computing_s, counts)) / expected_s if crowded and expected_s else 0.0
    buckets = tuple(ReadyBucket(n, ready_s) for n, ready_s in zip(counts, ready, strict=True))
    line = overlapped(replace(backward, bucket=buckets), reducing, min(1.0, steals))
    return _step(label, line, sum(map(reduction.plan, counts), Plan()), reduction)


def step_around(
    steps: Literal["local_steps", "adamw_steps"],
    label: str,
    scheme: Scheme,
    probe: Probe,
    backward: Backward,
    settings: Mapping[str, Any],  # Any: numbers and texts, those of LocalSteps or Steps
) -> PredictedStep:
    """Predict a step of LocalSteps or Steps with these settings around a scheme.

    A fragment of local steps counts as one bucket, and all are equally large; Steps exchange the model as one bucket.
    """
    P = probe.group.ranks
    elements = sum(each.elements for each in backward.bucket)
    reduction = ReductionTime(scheme, probe, measured_times(label.partition("/")[2], scheme, probe))
    ranks = probed_ranks(probe)
    if steps == "adamw_steps":
        options = Steps(**settings)
        measured_s = ranks.seconds(schemes.measurement(scheme, [elements], P, options))
        line = serial(backward, [reduction.seconds(elements), measured_s / options.measure_every])
        return _step(label, line, schemes.adamw_steps(scheme, [elements], P, options), reduction)
    defaults = {"every": 1, "fragments": 1, "delay": 0}
    every, fragments, delay = (int(settings.get(name, default)) for name, default in defaults.items())
    sizes = [elements // fragments + (place < elements % fragments) for place in range(fragments)]
    agreeing_s = fragments * ranks.seconds(schemes.agreement(P))
    line = periodic(backward, every, sum(map(reduction.seconds, sizes)) + agreeing_s, fragments, delay)
    return _step(label, line, schemes.local_steps(scheme, sizes, P, every, fragments), reduction)


def _step(label: str, line: StepTime, mean: Plan, reduction: ReductionTime) -> PredictedStep:
    sent = sum(each.nbytes for each in (*mean.exchanges, *mean.beside))
    network, P = ProbedNetwork(reduction.probe), reduction.probe.group.ranks
    known = reduction.measured is not None, any(network.is_far(each, P) for each in mean.exchanges)
    return PredictedStep(label, line.step_s, line.communication_s, line.hidden, sent, mean.state_nbytes, *known)


def verdict(steps: Mapping[str, PredictedStep], quality: Mapping[str, str]) -> tuple[str, str]:
    """Choose the method to use; returns its label and a sentence that says why.

    Among the methods whose step takes at most a tenth longer than the fastest, it is the one that sends the most bits, as with
    `bits="auto"`. The sentence quotes `quality`.
    """
    fastest = min(steps, key=lambda label: steps[label].step_s)
    near = [label for label, each in steps.items() if each.step_s <= WORTH * steps[fastest].step_s]
    best = max(near, key=lambda label: steps[label].sent_nbytes)
    if best in BASELINES:
        return best, f"Use {_NAMES[best]}: no method of known quality makes a step more than a tenth shorter."
    base = min((label for label in BASELINES if label in steps), key=lambda label: steps[label].step_s)
    ratio = steps[base].step_s / steps[best].step_s
    why = (
        f"Use {best}: its step is {ratio:.1f} times as fast as that of {_NAMES[base]}, and no method of known quality with fewer "
        f"bits makes it more than a tenth shorter. Its quality: {quality[best]}."
    )
    if not steps[best].probed:
        why += " The probe has no buckets of it, so its time may be too short: probe with it in --schemes."
    return best, why
