"""Predict training steps from a probe, compare schemes, and say in words which to use. Closed forms: nothing is sent or trained."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from sparsync.base.scheme import Scheme
from sparsync.comm.plan import Plan
from sparsync.predict import plans
from sparsync.predict.network import Network
from sparsync.predict.probe_file import Backward, Probe, SchemeTimes
from sparsync.predict.probed import ProbedNetwork
from sparsync.predict.timeline import overlapped

WORTH = 1.1  # how many times as fast as dense bf16 something must be to be worth its trouble
_NAMES = {"dense": "dense float32", "bf16": "dense bf16"}
BASELINES = tuple(_NAMES)

Plans = Callable[[int], Plan]
"""The plan of a bucket of so many elements."""


class MissingKernelError(ValueError):
    """The probe lacks the speed of a kind of work that a plan has; the message says which, and what to do."""


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
    probed: bool = False  # the probe has buckets that this method reduced

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
class Reduction:
    """What reducing buckets takes with one scheme on the ranks of a probe: by the closed form, and put right by buckets it has measured.

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
        return bucket_s(self.plan(n), self.probe.group.ranks, self.network, self.probe, self.overhead_s)

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
    settings = scheme.config_fingerprint()
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
    counts = [sum(sizes[place] for place in group) for group in groups]
    ready = [backward.forward_s + max(backward.bucket[place].ready_s for place in group) for group in groups]
    # Joining copies each gradient into the joined bucket and back.
    copies = [4.0 * itemsize * n if len(group) > 1 else 0.0 for n, group in zip(counts, groups, strict=True)]
    reduction = Reduction(scheme, probe, network, measured_times(label, scheme, probe), itemsize)
    made = [reduction.plan(n) for n in counts]
    reducing = [
        reduction.seconds(n) + copied / probe.memory.bytes_per_s for n, copied in zip(counts, copies, strict=True)
    ]
    if crowded is None:
        ranks_per_host = -(-P // max(1, probe.group.hosts))
        crowded = probe.group.device == "cpu" and probe.group.cores < 2 * ranks_per_host
    expected_s = sum(map(reduction.expected_s, counts))
    computing_s = sum(compute_s(each, probe, reduction.overhead_s) for each in made)
    steals = computing_s / expected_s if crowded and expected_s else 0.0
    end = backward.forward_s + max(backward.backward_s, *(each.ready_s for each in backward.bucket))
    line = overlapped(ready, reducing, end, backward.optimizer_s, steals=min(1.0, steals))
    whole = sum(made, Plan())
    sent = sum(each.nbytes for each in (*whole.exchanges, *whole.beside))
    rounds = sum(each.rounds for each in whole.exchanges)
    return Step(
        label, line.step_s, sum(reducing), line.hidden, sent, rounds, whole.state_nbytes, reduction.measured is not None
    )


def verdict(steps: Mapping[str, Step], extra: Mapping[str, Extra], worth: float = WORTH) -> Verdict:
    """Return what to use of `steps`, of which one is "bf16": the method that reaches dense's quality soonest, of those that surely gain.

    Of a method that needs `factor` times as many steps each counts so many times. It surely gains where it is `worth` times as fast as the
    plain all-reduce, bf16 or dense, whichever is faster, even at the upper end of the interval of its factor. Where none does, that
    all-reduce is the answer, because it changes nothing but the precision of the sum.
    """
    if "bf16" not in steps:
        raise ValueError("a verdict compares with dense bf16; give it among the methods")
    plain = min((label for label in BASELINES if label in steps), key=lambda label: steps[label].step_s)
    base, name = steps[plain].step_s, _NAMES[plain]
    others = {label: extra.get(label, Extra()) for label in steps if label not in BASELINES}
    gain = {label: base / (steps[label].step_s * each.factor) for label, each in others.items()}
    least = {label: base / (steps[label].step_s * each.high) for label, each in others.items()}
    nearest = max(gain, key=lambda label: gain[label], default=plain)
    sure = [label for label in others if least[label] >= worth]

    def said(label: str) -> str:
        return f"{gain[label]:.2f} times as fast, {least[label]:.2f} at the low end of its interval"

    if not sure:
        found = f" ({nearest} comes nearest, {said(nearest)})" if gain.get(nearest, 0.0) > 1 else ""
        return Verdict(
            plain, f"Use {name}: nothing here is known to reach dense's quality {worth:g} times as fast{found}."
        )
    best = max(sure, key=lambda label: gain[label])
    why = (
        f"Use {best}: it reaches dense's quality {gain[best]:.1f} times as fast as {name}, {least[best]:.1f} times at the low end of "
        "its interval."
    )
    if not steps[best].probed:
        why += " The probe has no buckets of it, so its time may be too short: probe with it in --schemes."
    if nearest != best:
        why += f" {nearest} may be faster, but that is less sure: {said(nearest)}."
    return Verdict(best, why)
