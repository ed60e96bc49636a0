"""Ok-Topk: volume, xi, thresholds and regions, and time to a loss beside other sparse all-reduces (Li and Hoefler, arXiv 2201.07598).

Trainings run all ranks in one process. Times are predicted: every exchange takes its latency and the bytes of its busiest rank over the
rate of a stated link, and every step a stated time to compute. Nothing depends on the time that the measuring machine takes.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparsync import Bucket, Report
from sparsync.comm import LocalWorld, MeteredComm
from sparsync.comm.local import LocalComm
from sparsync.core import ParameterSpan, count_for
from sparsync.runtime.rescaling import ResidualUnits
from sparsync.schemes import State
from sparsync_lab import workloads
from sparsync_lab.predict.network import Link
from sparsync_lab.scheme_choice import parse_schemes
from sparsync_lab.traffic.observe import xi
from sparsync_lab.traffic.stream import Synthetic
from sparsync_lab.workloads import one_process
from studies import parts, published
from studies.papers import Claim, Section, kept

DENSITY = 0.01
METHODS = {
    "dense": "dense",
    "TopkA": "topk",
    "TopkDSA": "topk_dsa:dense_from=0.3333",
    "gTopk": "gtopk",
    "Ok-Topk": "oktopk",
    "exact_oktopk": "exact_oktopk",
}
SPARSE = [name for name in METHODS if name != "dense"]
JOB: dict[str, Any] = {"vocabulary": 2000, "width": 64, "windows": 160}  # of shakespeare-small: 0.29 M parameters
RANKS, STEPS, SHORT = 8, 240, 160
SEEDS = (0, 1, 2)
RATES = (0.5, 1.0, 2.0)  # times the job's; one more beyond an edge that is the best
EVALUATE_EVERY = 20
COMPUTE_S = 0.02  # of a step, assumed
NETWORKS = {"100 Mbit/s, 100 us": Link(1e8, 100e-6), "1 Gbit/s, 50 us": Link(1e9, 50e-6)}
SETTLED = 64  # first steps that figures of thresholds leave out
RULES = {  # settings of the re-used thresholds, with their names
    "re-used (default)": "oktopk",
    "VGG": "oktopk:bug_compatible=true",
    "LSTM": "oktopk:bug_compatible=true:program=lstm",
    "BERT": "oktopk:bug_compatible=true:program=bert:threshold_steps=128",
}
UNEQUAL = "oktopk:dense_steps=1"  # so regions have equal widths until they are divided at step 64
SHORTS = (*RULES.values(), UNEQUAL)
VOLUME_RANKS = (2, 4, 8, 16, 32, 64, 128, 256)
VOLUME_ELEMENTS, VOLUME_STEPS = 2**18, 4


@dataclass
class RecordingComm(MeteredComm):
    """Also keep the rounds and the bytes of each call: those that this rank sends or receives, whichever are more."""

    calls: list[tuple[int, int]] = field(default_factory=list)

    def send_recv(self, out: Tensor, to: int, into: Tensor, source: int) -> None:
        super().send_recv(out, to, into, source)
        self._keep(into.nbytes)

    def all_gather(self, x: Tensor, counts: Sequence[int] | None = None) -> list[Tensor]:
        gathered = super().all_gather(x, counts)
        self._keep(sum(each.nbytes for each in gathered) - x.nbytes)
        return gathered

    def all_to_all(self, parts: Sequence[Tensor], counts: Sequence[int] | None = None) -> list[Tensor]:
        received = super().all_to_all(parts, counts)
        self._keep(sum(each.nbytes for rank, each in enumerate(received) if rank != self.rank))
        return received

    def all_reduce(self, x: Tensor) -> Tensor:
        total = super().all_reduce(x)
        self._keep(0)  # a rank receives what it sends
        return total

    def _keep(self, received: int) -> None:
        cost, _ = self.take()
        self.calls.append((cost.steps, max(cost.nbytes, received)))


def train(text: str, ranks: int, rate: float, seed: int, steps: int) -> dict[str, Any]:  # Any: JSON
    """Train with a scheme; record quality and traffic so far at each evaluation, and for Ok-Topk figures of each step."""
    torch.set_num_threads(1)
    job = workloads.get("shakespeare-small", **JOB).at_rate(rate)
    job.prepare()
    model, scheme = job.model(seed), parse_schemes(text, DENSITY)[0].make()
    layout, units = one_process.layout(model), ResidualUnits()
    k = count_for(getattr(scheme, "density", 1.0), layout[-1].span.stop)
    states = [scheme.start() for _ in range(ranks)]
    evaluations: list[tuple[int, float, int, int]] = []  # steps, perplexity, and rounds and bytes so far
    figures: list[dict[str, float | None]] = []
    rounds = nbytes = 0

    def reduce(step: int, gradients: list[Tensor], rate: float) -> Tensor:
        nonlocal rounds, nbytes
        if scheme.follows_rate:
            factors = {each.name: units.follow(each.name, rate) for each in layout}
            for state in states:
                state.rescale(factors)
        gradient = torch.stack(gradients).mean(0)
        mean = gradient + mean_residual(states, layout)

        def body(comm: LocalComm) -> tuple[Report, list[tuple[int, int]], Tensor]:
            recording = RecordingComm(comm)
            bucket = Bucket(one_process.KEY, gradients[comm.rank], step, layout)
            return states[comm.rank].reduce(bucket, recording), recording.calls, bucket.grad

        reports, calls, written = zip(*LocalWorld(ranks).run(body), strict=True)
        for call in zip(*calls, strict=True):
            rounds += max(each[0] for each in call)
            nbytes += max(each[1] for each in call)
        if "local_count" in reports[0].details:
            received = [int(report.details["received_count"]) for report in reports]
            figures.append(
                {
                    "step": step,
                    "xi": xi(mean, gradient, written[0], k),
                    "local": statistics.fmean(report.selected / k for report in reports),
                    "survivors": reports[0].union / k,
                    "held": float(reports[0].details["imbalance"]),
                    "received": max(received) * ranks / max(1, sum(received)),
                }
            )
        return written[0]

    def after(step: int) -> None:
        if step % EVALUATE_EVERY == 0:
            evaluations.append((step, job.quality_and_error(model)[0], rounds, nbytes))

    one_process.train(job, model, seed, steps, ranks, reduce, after, scheme)
    return {"evaluations": evaluations, "figures": figures}


def mean_residual(states: Sequence[State], layout: Sequence[ParameterSpan]) -> Tensor:
    """Compute the mean over ranks of the residuals, [n]."""
    total = torch.zeros(layout[-1].span.stop)
    for state in states:
        if found := state.state_dict().get("residual"):
            total += torch.cat([found.get(each.name, torch.zeros(len(each.span))) for each in layout])
    return total / len(states)


def trainings(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Train with every method, seed 0 at all rates and the others at its best; returns the seeds' trainings at the best rate."""
    return {name: at_best_rate(folder, name)[1] for name in METHODS}


def at_best_rate(folder: Path, name: str) -> tuple[float, list[dict[str, Any]]]:
    """Return a method's best rate, and the seeds' trainings there."""

    def trained(rate: float, seed: int) -> dict[str, Any]:
        return kept(folder, f"oktopk-{name}-{rate:g}-{seed}", lambda: train(METHODS[name], RANKS, rate, seed, STEPS))

    rates = RATES
    while True:
        best = min(rates, key=lambda rate: end(trained(rate, SEEDS[0])))
        if best not in (rates[0], rates[-1]) or len(rates) == 5:
            return best, [trained(best, seed) for seed in SEEDS]
        rates = (rates[0] / 2, *rates) if best == rates[0] else (*rates, rates[-1] * 2)


def end(training: Mapping[str, Any]) -> float:
    """Return the last perplexity; infinity for NaN."""
    last = training["evaluations"][-1][1]
    return math.inf if math.isnan(last) else last


def short(folder: Path, text: str, ranks: int = RANKS) -> list[dict[str, Any]]:
    """Return the figures of each step of a short training at the best rate of Ok-Topk."""
    rate, _ = at_best_rate(folder, "Ok-Topk")
    name = f"oktopk-short-{text.replace(':', '-')}-{ranks}"
    return kept(folder, name, lambda: train(text, ranks, rate, 0, SHORT))["figures"]


def volume(ranks: int) -> dict[str, list[list[int]]]:
    """Count the bytes that each rank sends with every method, at each of a few steps.

    Drawn at every step is what has accumulated, gradient and residual together, so that counts are as in a settled state.
    """
    torch.set_num_threads(1)
    stream = Synthetic(ranks, VOLUME_ELEMENTS)
    states = {name: [parse_schemes(METHODS[name], DENSITY)[0].make().start() for _ in range(ranks)] for name in SPARSE}
    found: dict[str, list[list[int]]] = {name: [] for name in SPARSE}

    def sent(own: Sequence[State], step: int, drawn: Sequence[Tensor]) -> list[int]:
        def body(comm: LocalComm) -> int:
            gradient = drawn[comm.rank] - mean_residual([own[comm.rank]], stream.layout)
            metered = MeteredComm(comm)
            own[comm.rank].reduce(Bucket("volume", gradient, step, stream.layout), metered)
            return metered.take()[0].nbytes

        return LocalWorld(ranks).run(body)

    for step in range(VOLUME_STEPS):
        drawn = stream.gradients(step)
        for name in SPARSE:
            found[name].append(sent(states[name], step, drawn))
    return found


def volume_table(folder: Path) -> str:
    """Make the table of words per worker and step, in multiples of k."""
    rows = []
    for P in VOLUME_RANKS:
        share, log = (P - 1) / P, math.log2(P)
        counted = volume_of(folder, P)
        rows.append(
            (
                str(P),
                f"{2 * (P - 1)} / {counted['TopkA']:.1f}",
                f"{4 * share:.2f} to {2 * share + share / DENSITY:.0f} / {counted['TopkDSA']:.1f}",
                f"{4 * log:.0f} / {counted['gTopk']:.1f}",
                f"{6 * share:.2f} / {counted['Ok-Topk']:.2f}",
                f"{counted['busiest']:.2f}",
                f"{counted['evaluation']:.1f}",
                f"{counted['period']:.2f}",
                f"{counted['exact_oktopk']:.2f}",
                f"{2 * share:.2f}",
            )
        )
    heads = (
        "P",
        "TopkA",
        "TopkDSA",
        "gTopk",
        "Ok-Topk",
        "busiest",
        "evaluating",
        "mean of 32",
        "exact_oktopk",
        "bound",
    )
    return parts.table(heads, rows)


def volume_of(folder: Path, ranks: int) -> dict[str, float]:
    """Compute the words per step over k: the mean over ranks, of gTopk the busiest rank's; and Ok-Topk's in its kinds of steps."""
    counted = kept(folder, f"oktopk-volume-{ranks}", lambda: volume(ranks))
    k = count_for(DENSITY, VOLUME_ELEMENTS)

    def words(name: str, over: Callable[[Sequence[int]], float], steps: slice) -> float:
        return statistics.fmean(over(step) for step in counted[name][steps]) / 4 / k

    mean, between = statistics.fmean, slice(1, None)
    found = {name: words(name, max if name == "gTopk" else mean, between) for name in SPARSE}
    evaluation = words("Ok-Topk", mean, slice(0, 1))
    return found | {
        "busiest": words("Ok-Topk", max, between),
        "evaluation": evaluation,
        "period": (evaluation + 31 * found["Ok-Topk"]) / 32,
    }


@dataclass(frozen=True)
class Reached:
    """The steps and the predicted hours of a method until it first evaluates at the target; means over seeds."""

    steps: float
    seconds: Mapping[str, float]  # by network


def target(found: Mapping[str, Sequence[Mapping[str, Any]]]) -> float:
    """Find the lowest perplexity that every training reaches, at any of its evaluations."""
    return max(min(each[1] for each in one["evaluations"]) for runs in found.values() for one in runs)


def reached(runs: Sequence[Mapping[str, Any]], perplexity: float) -> Reached:
    """Predict when trainings of one method reach a perplexity."""
    first = [next(each for each in one["evaluations"] if each[1] <= perplexity) for one in runs]

    def seconds(link: Link) -> float:
        times = (
            steps * COMPUTE_S + rounds * link.latency_s + 8 * nbytes / link.bits_per_s
            for steps, _, rounds, nbytes in first
        )
        return statistics.fmean(times)

    return Reached(
        statistics.fmean(steps for steps, *_ in first), {name: seconds(link) for name, link in NETWORKS.items()}
    )


def time_table(folder: Path) -> str:
    """Make the table of the trainings: rate, quality, traffic, and time to the target."""
    best = {name: at_best_rate(folder, name) for name in METHODS}
    goal = target({name: runs for name, (_, runs) in best.items()})
    rows = []
    for name, (rate, runs) in best.items():
        ends, found = [end(one) for one in runs], reached(runs, goal)
        nbytes = statistics.fmean(one["evaluations"][-1][3] for one in runs) / STEPS
        rows.append(
            (
                name,
                f"{rate:g}",
                f"{statistics.fmean(ends):.1f} ({min(ends):.1f} to {max(ends):.1f})",
                f"{nbytes / 1e3:.1f}",
                f"{statistics.fmean(one['evaluations'][-1][2] for one in runs) / STEPS:.1f}",
                f"{found.steps:.0f}",
                *(f"{each:.1f}" for each in found.seconds.values()),
            )
        )
    heads = ("method", "rate", "perplexity at the end", "kB per step", "rounds", f"steps to {goal:.1f}", *NETWORKS)
    return parts.table(heads, rows)


def threshold_table(folder: Path) -> str:
    """Make the table of counts between two evaluations of the thresholds, by the rule that scales them."""
    rows = []
    for rule, text in RULES.items():
        period = 128 if "=128" in text else 32
        between = [each for each in short(folder, text) if each["step"] >= SETTLED and each["step"] % period]
        cells = []
        for kind in ("local", "survivors"):
            counts = [each[kind] for each in between]
            off = statistics.fmean(abs(count - 1) for count in counts)
            cells += [f"{100 * off:.0f} %", f"{min(counts):.2f} to {max(counts):.2f}"]
        rows.append((rule, *cells))
    return parts.table(("thresholds", "selected: mean error", "over k", "survivors: mean error", "over k"), rows)


def region_shares(figures: Sequence[Mapping[str, float]], division: int) -> list[float]:
    """Return what the busiest region receives over the mean, averaged over 8 steps before and 8 steps after a division."""
    spans = range(division - 8, division), range(division, division + 8)
    return [statistics.fmean(each["received"] for each in figures if each["step"] in span) for span in spans]


def xi_table(folder: Path) -> str:
    """Make the table of xi, during training, by the number of ranks."""
    rows = []
    for P in (4, 8, 16):
        found = [each["xi"] for each in short(folder, "oktopk", P)]
        parts_of = (found[:32], found[32:96], found[96:])
        rows.append((str(P), *(f"{statistics.fmean(part):.2f}" for part in parts_of), f"{max(found):.2f}"))
    return parts.table(("P", "steps 0 to 31", "32 to 95", f"96 to {SHORT - 1}", "largest"), rows)


def section(folder: Path) -> Section:
    """Measure all, and return the claims with the tables below."""
    counted = {P: volume_of(folder, P) for P in VOLUME_RANKS}
    best = trainings(folder)
    goal = target(best)
    times = {name: reached(runs, goal).seconds for name, runs in best.items()}
    first, last = VOLUME_RANKS[0], VOLUME_RANKS[-1]
    volumes, busiest = ([each[name] for each in counted.values()] for name in ("Ok-Topk", "busiest"))
    ends = {name: statistics.fmean(map(end, runs)) for name, runs in best.items()}
    behind = {name: 100 * (ends[name] / ends["dense"] - 1) for name in SPARSE}
    predicted = {row.name: row.predicted for row in published.rows()[0]}
    low, high = predicted["oktopk-bert-low"], predicted["oktopk-bert-high"]
    before, after = region_shares(short(folder, UNEQUAL), 64)
    claims = [
        Claim(
            "less than 6k words per worker and step",
            "< 6k (P-1)/P",
            f"{min(volumes):.2f} to {max(volumes):.2f} k for P = {first} to {last}; busiest rank up to {max(busiest):.2f} k; "
            f"steps that evaluate the thresholds up to {max(each['evaluation'] for each in counted.values()):.1f} k",
            "",
        ),
        Claim(
            "asymptotically optimal",
            "bound 2k (P-1)/P",
            f"{volumes[-1] * last / (last - 1) / 2:.2f} times the bound at P = {last}; "
            f"`exact_oktopk` {counted[last]['exact_oktopk'] * last / (last - 1) / 2:.2f} times",
            "",
        ),
        Claim(
            "more scalable than other sparse all-reduces",
            "-",
            f"volume from P = 8 to {last}: "
            + ", ".join(f"{name} {counted[last][name] / counted[8][name]:.1f} times" for name in SPARSE),
            "",
        ),
        Claim(
            "a threshold that is evaluated every 32 steps selects about k",
            "-",
            "",
            "",
        ),
        Claim(
            "regions are balanced",
            "-",
            f"busiest region over mean, received elements: {before:.2f} with regions of equal width, {after:.2f} after division",
            "",
        ),
        Claim("convergence is proved, for a small xi", "-", "", ""),
        Claim(
            "accuracy similar to dense",
            "-",
            "perplexity behind dense: " + ", ".join(f"{name} {behind[name]:+.1f} %" for name in SPARSE),
            "",
        ),
        Claim(
            "quicker than dense and other sparse all-reduces",
            "-",
            "; ".join(
                f"{network}: "
                + ", ".join(
                    f"{times[name][network] / times['Ok-Topk'][network]:.2f} x over {name}"
                    for name in times
                    if name != "Ok-Topk"
                )
                for network in NETWORKS
            ),
            "",
        ),
        Claim("BERT on 256 GPUs: 3.29 x to 12.95 x", "3.29 to 12.95", f"{low:.2f} to {high:.2f}, predicted", ""),
    ]
    below = "\n\n".join((volume_table(folder), threshold_table(folder), xi_table(folder), time_table(folder)))
    return Section(claims, below)
