"""Compute the numbers of a report from the records of one run alone.

Quality counts as reached at the first evaluation at or beyond the target; the time is interpolated linearly between that evaluation
and the previous one. A scheme that did not reach the target bounds a speed-up from one side: it would have needed longer than it ran.
Seconds are medians over a seed's steps, bytes are means (so that steps times bytes is the total); seconds of local steps are means over a
round, from exchange to exchange, and medians over the rounds. Several seeds give the median and the range. Schemes are compared within one
run and seed only.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any, Literal

from sparsync_lab.report.results import Quality, Run, RunRecords, Trace
from sparsync_lab.slow_kernels import SLOW_KERNELS, SLOW_KERNELS_FIX

DISTURBED = 1.25  # ratio of computing steps, which all compute the same, from which a run counts as disturbed
MATTERS = 0.03  # of the shortest step: smaller differences disturb nothing
BASELINES = ("dense", "bf16")  # labels of the schemes that all others are compared with


@dataclass(frozen=True)
class Spread:
    """The median over seeds, and the lowest and highest."""

    median: float
    low: float
    high: float


@dataclass(frozen=True)
class Ratio:
    """A speed-up over seeds. `bound`: "" exact, ">" at least this (the baseline fell short), "<" at most this."""

    spread: Spread
    bound: str = ""


@dataclass(frozen=True)
class SeedFigures:
    """One scheme with one seed. Seconds and bytes are per rank; None if the records lack them."""

    seed: int
    status: str  # of the end record; "interrupted" without one
    replicas_identical: bool | None
    exchanges: int | None  # of local or AdamW steps that changed the weights; None if gradients are reduced
    missed: int  # exchanges that were dropped, or steps that were skipped
    steps: int
    nonfinite_loss: int | None  # the first step whose loss is NaN or infinite
    nonfinite_quality: int | None  # the first step followed by a quality that is NaN or infinite
    diverged: bool  # the last loss or quality is NaN or infinite
    ever_finite: bool  # some loss is finite and, if there are any, some quality
    quality: float | None  # at the last evaluation
    # Percent, see `behind`, at the last step at which both were evaluated; None without dense.
    behind_dense: float | None
    evaluated_s: float  # training time up to that evaluation
    target_s: float | None  # None: not reached
    sent_bytes: float | None  # payload per step
    bits: float | None  # payload per parameter per step
    interface_bytes: float | None  # everything sent by the interface, per step
    interface_bits: float | None  # the same, per parameter per step: with frames, acknowledgements and announcements
    step_s: float | None
    compute_s: float  # until the slowest rank ends
    own_compute_s: float  # mean over the ranks, each until its own end; `compute_s` if not measured
    scheme_s: float | None  # in the scheme but not in the communicator
    wait_s: float | None  # in the communicator
    union_density: float | None

    @property
    def finished(self) -> bool:
        return self.status == "finished"

    @property
    def exchanged_nothing(self) -> bool:
        """Whether the training ended without any exchange that changed its weights."""
        return self.finished and self.exchanges == 0

    @property
    def nonfinite_step(self) -> int | None:
        """The first step with a loss, or a quality after it, that is NaN or infinite."""
        return min((step for step in (self.nonfinite_loss, self.nonfinite_quality) if step is not None), default=None)

    @property
    def reduce_s(self) -> float | None:
        """Time of the reduction, in the scheme and in the communicator."""
        return None if self.scheme_s is None or self.wait_s is None else self.scheme_s + self.wait_s

    @property
    def hidden_s(self) -> float | None:
        """Time of the reduction that did not lengthen the step, because the model computed meanwhile; with `other_s`
        step_s == own_compute_s + reduce_s - hidden_s + other_s.

        The wait of a faster rank is in the reduction, so computing counts until each rank's own end.
        """
        return None if (rest := self._rest_s) is None else max(0.0, -rest)

    @property
    def other_s(self) -> float | None:
        """Time of the step that is neither computing nor reduction; 0 if their overlap exceeds it."""
        return None if (rest := self._rest_s) is None else max(0.0, rest)

    @property
    def hidden_share(self) -> float | None:
        """The hidden share of the reduction; None without a reduction."""
        return None if self.hidden_s is None or not self.reduce_s else self.hidden_s / self.reduce_s

    @property
    def _rest_s(self) -> float | None:
        if self.step_s is None or self.reduce_s is None:
            return None
        return self.step_s - self.own_compute_s - self.reduce_s


@dataclass(frozen=True)
class SchemeFigures:
    """One scheme over its seeds. A Spread omits seeds without a value, and is None if no seed has one."""

    label: str
    config: Mapping[str, Any]  # Any: shown unchanged
    seeds: tuple[SeedFigures, ...]
    curve: tuple[tuple[Quality, ...], ...]  # the evaluations, one row per seed
    speedup: Mapping[str, Ratio | None]  # by baseline; None: neither reached the target, or the baseline is missing
    link_s: float | None  # minimum time for a step's payload on the link; None without a limit

    @property
    def reached(self) -> int:
        return sum(figures.target_s is not None for figures in self.seeds)

    @property
    def behind_dense(self) -> Spread | None:
        """Percent behind dense's quality; None without dense."""
        return self.over_seeds("behind_dense")

    @property
    def exchanged_nothing(self) -> bool:
        """Whether, with some seed, no exchange changed the weights. Then its quality does not measure the scheme."""
        return any(seed.exchanged_nothing for seed in self.seeds)

    @property
    def ended(self) -> bool:
        """Whether it finished with every seed, with exchanges and identical replicas."""
        return all(
            seed.finished and seed.steps and seed.replicas_identical is not False and not seed.exchanged_nothing
            for seed in self.seeds
        )

    @property
    def target_s(self) -> Spread | None:
        """Seconds to the target; seeds that did not reach it count as infinitely late. None if most did not."""
        found = spread(math.inf if seed.target_s is None else seed.target_s for seed in self.seeds)
        return None if found is None or math.isinf(found.median) else found

    @property
    def step_over_compute(self) -> Spread | None:
        """The step time in units of the computing step."""
        return spread(seed.step_s / seed.compute_s for seed in self.seeds if seed.step_s is not None and seed.compute_s)

    def over_seeds(self, name: str) -> Spread | None:
        """Compute the spread of the field or property `name` of SeedFigures."""
        return spread(value for seed in self.seeds if (value := getattr(seed, name)) is not None)


@dataclass(frozen=True)
class Banner:
    """A warning shown above everything else in every output."""

    kind: Literal["unlimited", "reference", "failed", "nothing-exchanged", "disturbed"]
    text: str
    why: str = ""  # shown if there is room for another sentence


@dataclass(frozen=True)
class RunSummary:
    """One run in numbers. Every output must show the sentences `banners`, above all else, and `notes`."""

    run: Run
    schemes: tuple[SchemeFigures, ...]
    noise_s: float  # range of the trainings' computing steps, though all compute the same
    banners: tuple[Banner, ...]
    notes: tuple[str, ...]

    @property
    def disturbed(self) -> bool:
        """Whether other work kept the machine busy, so that the times are uncertain."""
        return any(banner.kind == "disturbed" for banner in self.banners)

    @property
    def times_count(self) -> bool:
        """Whether the times are meaningful for schemes over a network: links limited or real, and kernels compiled."""
        return self.run.times_count and self.run.kernels != SLOW_KERNELS

    def scheme(self, label: str) -> SchemeFigures | None:
        return next((scheme for scheme in self.schemes if scheme.label == label), None)


def summarise(records: RunRecords) -> RunSummary:
    """Compute the numbers of one run."""
    run = records.run
    by_label: dict[str, list[Trace]] = {}
    for (label, _), trace in records.traces.items():
        by_label.setdefault(label, []).append(trace)
    dense = {trace.start.seed: trace.quality for trace in by_label.get("dense", ())}
    seeds = {label: tuple(_seed_figures(run, trace, dense) for trace in traces) for label, traces in by_label.items()}
    schemes = tuple(
        SchemeFigures(
            label=label,
            config=traces[0].start.config,
            seeds=seeds[label],
            curve=tuple(tuple(trace.quality) for trace in traces),
            speedup={base: _speedup(seeds[label], seeds.get(base, ())) for base in BASELINES},
            link_s=_link_s(run, spread(seed.sent_bytes for seed in seeds[label] if seed.sent_bytes is not None)),
        )
        for label, traces in by_label.items()
    )
    compute = [seed.own_compute_s for scheme in schemes for seed in scheme.seeds]
    about = (max(compute) - min(compute) if compute else 0.0, tuple(_banners(run, schemes)), tuple(_notes(schemes)))
    return RunSummary(run, schemes, *about)


def spread(values: Iterable[float]) -> Spread | None:
    """Compute median and range; None without values, NaN if any value is NaN."""
    ordered = sorted(values)
    if any(math.isnan(value) for value in ordered):
        return Spread(math.nan, math.nan, math.nan)
    return Spread(median(ordered), ordered[0], ordered[-1]) if ordered else None


def behind(value: float, dense: float, lower_is_better: bool) -> float:
    """Compute how many percent of dense's quality `value` is worse; negative if better, infinite if not finite."""
    if not math.isfinite(value):
        return math.inf
    if not math.isfinite(dense) or not dense:
        return math.nan
    return 100 * (value - dense if lower_is_better else dense - value) / abs(dense)


def reaching(quality: Sequence[Quality], target: float | None, lower_is_better: bool) -> float | None:
    """Compute the seconds at which the target is first reached, interpolated between two evaluations; None if never.

    After a non-finite evaluation nothing is interpolated: the time is the later evaluation's.
    """
    if target is None:
        return None
    before: Quality | None = None
    for now in quality:
        if now.value <= target if lower_is_better else now.value >= target:
            if before is None or not math.isfinite(before.value) or not math.isfinite(now.value):
                return now.seconds
            share = (before.value - target) / (before.value - now.value)
            return before.seconds + share * (now.seconds - before.seconds)
        before = now
    return None


def _seed_figures(run: Run, trace: Trace, dense: Mapping[int, Sequence[Quality]]) -> SeedFigures:
    steps, quality, end = trace.steps, trace.quality, trace.end
    interface = [step.interface_bytes for step in steps if step.interface_bytes is not None]
    sent = fmean(step.sent_bytes for step in steps) if steps else None
    carried = fmean(interface) if steps and len(interface) == len(steps) else None
    parameters = run.workload["parameters"]
    every = trace.start.config.get("local_steps", {}).get("every", 1)
    losses = [math.isfinite(step.loss) for step in steps]
    qualities = [math.isfinite(point.value) for point in quality]
    return SeedFigures(
        seed=trace.start.seed,
        status="interrupted" if end is None else end.status,
        replicas_identical=None if end is None else end.replicas_identical,
        exchanges=None if end is None else end.exchanges,
        missed=0 if end is None else end.missed,
        steps=len(steps),
        nonfinite_loss=next((step.step for step in steps if not math.isfinite(step.loss)), None),
        nonfinite_quality=next((point.step for point in quality if not math.isfinite(point.value)), None),
        diverged=not all((*losses[-1:], *qualities[-1:])),
        ever_finite=any(losses) and (any(qualities) or not qualities),
        quality=quality[-1].value if quality else None,
        behind_dense=_behind_dense(quality, dense.get(trace.start.seed, ()), run.lower_is_better),
        evaluated_s=quality[-1].seconds if quality else 0.0,
        target_s=reaching(quality, run.target, run.lower_is_better),
        sent_bytes=sent,
        bits=None if sent is None else 8 * sent / parameters,
        interface_bytes=carried,
        interface_bits=None if carried is None else 8 * carried / parameters,
        step_s=_middle([step.step_s for step in steps], every),
        compute_s=trace.start.compute_s,
        own_compute_s=trace.start.compute_s if trace.start.own_compute_s is None else trace.start.own_compute_s,
        scheme_s=_middle([step.reduce_s - step.wait_s for step in steps], every),
        wait_s=_middle([step.wait_s for step in steps], every),
        union_density=fmean(step.union_density for step in steps) if steps else None,
    )


def _middle(values: Sequence[float], every: int) -> float | None:
    """Take the mean of each whole round of `every` steps and the median over rounds; the mean if there is no whole round."""
    rounds = [fmean(values[start : start + every]) for start in range(0, len(values) - every + 1, every)]
    return median(rounds) if rounds else fmean(values) if values else None


def _behind_dense(quality: Sequence[Quality], dense: Sequence[Quality], lower_is_better: bool) -> float | None:
    """Compute the percent behind dense's quality at the last step that both have."""
    other = {point.step: point.value for point in dense}
    shared = [point for point in quality if point.step in other]
    return behind(shared[-1].value, other[shared[-1].step], lower_is_better) if shared else None


def _speedup(seeds: Sequence[SeedFigures], base: Sequence[SeedFigures]) -> Ratio | None:
    """Compute the speed-up over the baseline, seed by seed; None if it is unknown for a seed, or bounded both ways."""
    by_seed = {figures.seed: figures for figures in base}
    pairs = [seed_speedup(figures, by_seed.get(figures.seed)) for figures in seeds]
    known = [pair for pair in pairs if pair is not None]
    bounds = {bound for _, bound in known if bound}
    found = spread(value for value, _ in known)
    if found is None or len(known) < len(pairs) or len(bounds) > 1:
        return None
    return Ratio(found, bounds.pop() if bounds else "")


def seed_speedup(scheme: SeedFigures, base: SeedFigures | None) -> tuple[float, str] | None:
    """Divide the times to the target; also returns the bound if only one of the two reached it."""
    if base is None:
        return None
    # No ratio exists for a target reached at once, and a scheme that failed early bounds nothing.
    if scheme.target_s and base.target_s is not None:
        return base.target_s / scheme.target_s, ""
    if scheme.target_s and base.finished and base.evaluated_s:
        return base.evaluated_s / scheme.target_s, ">"
    if scheme.target_s is None and base.target_s is not None and scheme.finished and scheme.evaluated_s:
        return base.target_s / scheme.evaluated_s, "<"
    return None


def _link_s(run: Run, nbytes: Spread | None) -> float | None:
    if not run.limited or run.rate_bits_per_s is None or nbytes is None:
        return None
    return nbytes.median * 8 / run.rate_bits_per_s


def _banners(run: Run, schemes: Sequence[SchemeFigures]) -> Iterator[Banner]:
    if not run.times_count:
        asked = "" if run.config["link"] == "none" else f" ({run.config['link']} was asked for)"
        yield Banner(
            "unlimited", f"THE LINKS HAD NO LIMIT{asked}: THE TIMES OF THIS RUN PROVE NOTHING ABOUT A NETWORK."
        )
    if run.kernels == SLOW_KERNELS:
        yield Banner(
            "reference",
            "THE SLOW REFERENCE KERNELS RAN: THE TIMES OF THIS RUN PROVE NOTHING ABOUT A SCHEME.",
            SLOW_KERNELS_FIX,
        )
    for scheme in schemes:
        broken = [
            f"With seed {seed.seed} it ended after {seed.steps} steps: {seed.status.removeprefix('failed: ')}"
            for seed in scheme.seeds
            if not seed.finished
        ]
        if broken:
            yield Banner("failed", f"{scheme.label} DID NOT FINISH: ITS ROW IS NO RESULT.", ". ".join(broken))
        seeds = [seed for seed in scheme.seeds if seed.exchanged_nothing]
        if seeds:
            missed, which = sum(seed.missed for seed in seeds), ", ".join(str(seed.seed) for seed in seeds)
            why = (
                f"{missed} of {missed} exchanges were left out, because weights or gradients were NaN or infinite"
                if missed
                else "it ended before its first exchange was due"
            )
            yield Banner(
                "nothing-exchanged",
                f"{scheme.label} EXCHANGED NOTHING: ITS ROW IS NO RESULT.",
                f"With seed {which} {why}. It takes no part in the choice.",
            )
    compute = [seed.compute_s for scheme in schemes for seed in scheme.seeds]
    steps = [seed.step_s for scheme in schemes for seed in scheme.seeds if seed.step_s]
    if not compute or max(compute) <= DISTURBED * min(compute):
        return
    if max(compute) - min(compute) > MATTERS * min(steps, default=0.0):
        yield Banner(
            "disturbed",
            "SOMETHING ELSE KEPT THE MACHINE BUSY: THE TIMES OF THIS RUN ARE UNCERTAIN.",
            f"A step that only computes took between {1e3 * min(compute):.3g} and {1e3 * max(compute):.3g} ms, though all schemes "
            "compute the same.",
        )


def _notes(schemes: Sequence[SchemeFigures]) -> list[str]:
    """Note trainings that diverged, missed exchanges, differed between ranks or sent everything unexpectedly."""
    notes = []
    for scheme in schemes:
        for seed in scheme.seeds:
            name = f"{scheme.label} (seed {seed.seed})"
            if seed.nonfinite_step is not None:
                notes.append(
                    f"{name}: its training loss or quality is NaN or infinite, first at step {seed.nonfinite_step}."
                )
            if seed.missed and seed.exchanges:
                due = seed.missed + seed.exchanges
                notes.append(
                    f"{name} missed {seed.missed} of {due} exchanges: weights or gradients were NaN or infinite."
                )
            if seed.replicas_identical is False:
                notes.append(f"{name}: the replicas were not identical at the end. Do not trust its quality.")
        density = re.search(r"\bdensity=([0-9.e-]+)", str(scheme.config.get("full", "")))
        sent = scheme.over_seeds("union_density")
        if density is not None and float(density[1]) < 1 and sent is not None and sent.low >= 1:
            notes.append(
                f"{scheme.label} summed every element, though its density is {density[1]}: this is no measurement of it. What has fewer "
                "elements than dense_below, 1024 where a job says nothing else, is sent whole; compare with a larger model."
            )
    if not schemes:
        notes.append("This run has no scheme records: it was interrupted before any training.")
    elif "dense" not in [scheme.label for scheme in schemes]:
        notes.append("This run has no dense scheme to compare with.")
    return notes
