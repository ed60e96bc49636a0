"""The claims of SkipReduce: time to accuracy, shards and traffic; `plays` measures bias and regularisation.

Trainings of 8 ranks run in one process. Times are predicted from their counted traffic, never measured.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from sparsync import Bucket, Report, Scheme
from sparsync.collectives.skipping import SkipPlan, reduce_scatter
from sparsync.comm import LocalWorld
from sparsync.core import Comm, generator, laid_out
from sparsync.schemes import SkipReduce
from sparsync_lab.frontier.runs import Finished, Key
from sparsync_lab.frontier.study import FrontierStudy, complete
from sparsync_lab.scheme_choice import SchemeChoice, parse_schemes
from studies import parts
from studies.papers import Claim, Section, plays
from studies.papers.plays import SEEDS, P

STEPS, POINTS = 200, 25  # of dense, and evaluations of each training
BITS_PER_S, LATENCY_S = 1e8, 50e-6  # of the predicted link
SHARES = (0.5, 0.95)  # of a dense step's time, taken by its exchange; trainings have equal time under the last
NEAR = 1.05  # the target, in terms of dense's last quality
MIDDLE, PROTECTED = f"s = {P // 2}", (P // 4, P // 2, 3 * P // 4)

Found = Mapping[str, Sequence[Finished]]
"""The trainings of all seeds at the best rate, by the method as tables name it."""


@dataclass(frozen=True)
class Job:
    """A small job, and the methods compared on it as tables and as commands name them."""

    workload: str
    options: Mapping[str, Any]  # Any: of the workload
    rates: tuple[float, ...]
    chooser: int | None = SEEDS[0]  # the seed whose best rate all have; None: the best in the mean


JOBS = {
    "SGD": Job(
        "shakespeare-small",
        {"vocabulary": 500, "width": 48, "length": 12, "windows": 200, "batch_size": 16 * P},
        (2, 4, 8),
    ),
    "AdamW": Job("gpt-tiny", {"width": 48, "layers": 1, "heads": 2, "batch_size": 8 * P}, (0.7, 1, 1.4, 2), None),
}
METHODS = {
    "dense": "dense",
    **{f"random, s = {s}": f"skip_reduce:skip={s}" for s in range(1, P)},
    f"naive, {MIDDLE}": f"skip_reduce:skip={P // 2}:mode=naive",
    **{f"`auto_protect`, s = {s}": f"auto_protect:skip={s}" for s in PROTECTED},
    f"`ring_pruning`, {MIDDLE}": f"ring_pruning:skip={P // 2}",
}


def steps_in_time(method: str) -> int:
    """Count the steps that a method takes in the time of STEPS dense ones, where the exchange is the last of SHARES."""
    _, _, skipped = method.partition("skip=")
    return round(STEPS / (1 - SHARES[-1] * int(skipped.split(":")[0] or 0) / (2 * (P - 1))))


class InTime(FrontierStudy):
    """Train each method for its own number of steps only."""

    def missing(self, finished: Mapping[Key, Finished], lower: bool) -> list[tuple[Key, SchemeChoice]]:
        wanted = super().missing(finished, lower)
        return [(key, choice) for key, choice in wanted if key.steps == steps_in_time(choice.label)]


def trained(folder: Path, job: Job) -> dict[str, list[Finished]]:
    """Train all methods at their best rates; finished trainings are in `folder`."""
    steps = {shown: steps_in_time(method) for shown, method in METHODS.items()}
    lengths = tuple(sorted(set(steps.values())))
    schemes = parse_schemes(",".join(METHODS.values()), 0.01)
    study = InTime(schemes, job.workload, job.options, (P,), lengths, SEEDS, job.rates, job.chooser, points=POINTS)
    done = complete(study, folder, 1, print)
    best = {shown: study.tried(done, METHODS[shown], P, steps[shown], True)[1] or math.nan for shown in METHODS}
    return {
        shown: [done[study.key(METHODS[shown], P, steps[shown], seed, rate)] for seed in SEEDS]
        for shown, rate in best.items()
    }


def step_s(done: Finished, share: float, dense: Finished) -> float:
    """Predict the seconds of a step if a dense ring takes the `share` of a dense step, and nothing overlaps."""

    def exchange_s(each: Finished) -> float:
        # A dense report counts two rounds, to the owners of chunks and back. Here it is a ring.
        rounds = 2 * (P - 1) if each.key.method == dense.key.method else each.trained.rounds
        return rounds * LATENCY_S + 8 * each.trained.nbytes / BITS_PER_S

    return exchange_s(dense) * (1 / share - 1) + exchange_s(done)


def steps_to(quality: Sequence[tuple[int, float]], target: float) -> float | None:
    """Interpolate the step at which the quality first falls to `target`; None if it never does."""
    for (before, above), (after, reached) in pairwise(quality):
        if reached <= target < above:
            return before + (after - before) * (above - target) / (above - reached)
    return None


def mean_steps_to(several: Sequence[Finished], target: float) -> float | None:
    """Compute the mean of the steps to the target over the seeds; None if one never reaches it."""
    steps = [steps_to(each.trained.quality, target) for each in several]
    return None if None in steps else fmean(each for each in steps if each is not None)


def target(found: Found) -> float:
    """Compute the quality that is near the mean last one of dense."""
    return NEAR * fmean(each.end for each in found["dense"])


def gain(found: Found, shown: str, share: float) -> float | None:
    """Compute dense's time to the target divided by the method's; None if a seed never reaches it."""
    dense_steps, own_steps = (mean_steps_to(found[each], target(found)) for each in ("dense", shown))
    if dense_steps is None or own_steps is None:
        return None
    dense, own = found["dense"][0], found[shown][0]
    return dense_steps * step_s(dense, share, dense) / (own_steps * step_s(own, share, dense))


def gaps(found: Found, shown: str) -> list[float]:
    """Compute by seed how far a method's last quality is above dense's, in percent."""
    return [100 * (each.end / other.end - 1) for each, other in zip(found[shown], found["dense"], strict=True)]


def mean_gap(found: Found, kind: str) -> float:
    """Compute the mean of `gaps` for a kind of method that skips half of the ranks."""
    return fmean(gaps(found, f"{kind}, {MIDDLE}"))


def bytes_share(found: Found, shown: str) -> float:
    return found[shown][0].trained.nbytes / found["dense"][0].trained.nbytes


def expected(P: int, skip: int, count: int) -> tuple[int, int]:
    """Compute the rounds and bytes of a ring that skips: no positions, and a whole all-gather."""
    return 2 * (P - 1) - skip, 4 * count * (2 * (P - 1) - skip) // P


def counted(P: int, scheme: Scheme, count: int) -> list[tuple[int, int, bool]]:
    """Reduce once, and return each rank's rounds and bytes, and whether its result is the same as rank 0's."""

    def body(comm: Comm) -> tuple[Report, Tensor]:
        x = torch.randn(count, generator=generator(comm.rank, "counted", 0))
        return scheme.start().reduce(Bucket("bucket0", x, 0, laid_out([("weight", count)])), comm), x

    reduced = LocalWorld(P).run(body)
    return [(report.cost.steps, report.cost.nbytes, torch.equal(x, reduced[0][1])) for report, x in reduced]


def equal_to_form(ranks: Iterable[int], count: int) -> tuple[int, int]:
    """Count the cases of P and s in which all ranks send exactly as the form says, and all cases."""
    cases = [(P, s) for P in ranks for s in range(P)]
    equal = [set(counted(P, SkipReduce(s), count)) == {(*expected(P, s, count), True)} for P, s in cases]
    return sum(equal), len(cases)


@dataclass(frozen=True)
class Shards:
    """How sharded gradients differ from the mean over all ranks, in terms of the ranks' standard deviation."""

    unseen: float  # share of the pairs of an owner and another rank that never meet
    bias: float  # root mean square of the error of the mean over all steps


SHARD_STEPS, AUTHORS = 16 * (P - 1), "the authors' s-1, s or s+1"


def shards(kind: str, skip: int, length: int = 256) -> Shards:
    """Reduce shards with fixed owners, of gradients that differ by rank and never change: "naive", "random" or AUTHORS."""
    own = torch.stack([torch.randn(P * length, generator=generator(rank, "own", 0)) for rank in range(P)])
    mean, drawn = own.mean(0), torch.rand(SHARD_STEPS, generator=generator(0, "authors", 0)).tolist()
    counts = [skip + (each >= 0.75) - (each < 0.25) for each in drawn]
    layout = laid_out([("weight", P * length)])

    def body(comm: Comm) -> list[Tensor]:
        form, found = SkipReduce(skip, mode="naive" if kind == "naive" else "random").reduce_scatter_form().start(), []
        for step in range(SHARD_STEPS):
            out, x = torch.empty(length), own[comm.rank].clone()
            if kind == AUTHORS:
                # The ring runs backwards, so owner o omits o-1, ..., o-s.
                reduce_scatter(x, out, comm, SkipPlan(tuple(range(P - counts[step], P))))
                out /= P - counts[step]
            else:
                form.reduce_scatter(Bucket("layer", x, step, layout), out, comm, True)
            found.append(out)
        return found

    reduced = torch.stack([torch.stack(each) for each in LocalWorld(P).run(body)], 1).flatten(1)  # [steps, n]
    # The ranks' gradients are independent, so a least-squares fit shows the weight of each in an owner's mean.
    chunks = zip(own.split(length, 1), reduced.mean(0).split(length), strict=True)
    weight = torch.stack([torch.linalg.lstsq(each.T, total).solution for each, total in chunks])
    unseen = int((weight.abs() < 1e-4).sum()) / (P * (P - 1))
    bias = (reduced.mean(0) - mean).square().mean().sqrt() / (own - mean).std()
    return Shards(unseen, float(bias))


def section(folder: Path) -> Section:
    """Measure all, and format the claims with their tables."""
    torch.set_num_threads(1)
    found = {name: trained(folder / f"skip_reduce-{name}", job) for name, job in JOBS.items()}
    learnt, biased = plays.regularisation(folder), plays.bias(folder)
    sharded = {kind: shards(kind, P // 2) for kind in ("naive", AUTHORS, "random")}
    return Section(
        [*claims(found), *plays.claims(learnt, biased), shard_claim(sharded)],
        "\n\n".join(
            [
                *(accuracy(name, JOBS[name], each) for name, each in found.items()),
                plays.bias_table(biased),
                plays.regularisation_table(learnt),
            ]
        ),
    )


def accuracy(name: str, job: Job, found: Found) -> str:
    """Format the time to accuracy of each method beside dense."""
    shares = ", ".join(f"{100 * share:.0f} %" for share in SHARES)
    heads = (
        "method",
        "rate",
        "bytes",
        "steps",
        "perplexity over dense",
        f"steps to {target(found):.3g}: speed-up at {shares}",
    )
    rows: list[list[str]] = []
    for shown, several in found.items():
        steps, gained = mean_steps_to(several, target(found)), [gain(found, shown, share) for share in SHARES]
        told = "".join(f"{mark}{each:.2f}" for mark, each in zip((": ", ", "), gained, strict=True) if each is not None)
        rows.append(
            [
                shown,
                f"x{several[0].key.rate:g}",
                f"{100 * bytes_share(found, shown):.0f} %",
                f"{several[0].key.steps}",
                plays.ranged(gaps(found, shown), "+.1f"),
                "never" if steps is None else f"{steps:.0f}{told}",
            ]
        )
    options = ", ".join(f"{key} {value}" for key, value in job.options.items())
    ends = plays.ranged([each.end for each in found["dense"]], ".2f")
    return (
        f"**{name}**: `{job.workload}` with {options}, {found['dense'][0].elements:,} parameters; dense ends at {ends}:\n\n"
        f"{parts.table(heads, rows)}"
    )


def claims(found: Mapping[str, Found]) -> list[Claim]:
    """Format the claims about traffic and time to accuracy."""
    equal, cases = equal_to_form((4, 8, 16), 240)
    quickest = {
        share: max(
            (gain(each, shown, share) or 0.0, f"{name}, {shown}")
            for name, each in found.items()
            for shown in each
            if shown.startswith(("random", "`auto_protect`"))
        )
        for share in SHARES
    }
    most = max(quickest.values())[0]
    over = {s: {name: fmean(gaps(each, f"random, s = {s}")) for name, each in found.items()} for s in range(1, P)}
    small = [str(s) for s, by_job in over.items() if max(by_job.values()) <= 1]
    kinds = ("`auto_protect`", "random")
    settled = [
        f"{kind} ends lower with every seed ({name}, s = {s})"
        for kind, other in (kinds, kinds[::-1])
        for name, each in found.items()
        for s in PROTECTED
        if max(gaps(each, f"{kind}, s = {s}")) < min(gaps(each, f"{other}, s = {s}"))
    ]

    def of(each: Found, kind: str) -> str:
        return f"{mean_gap(each, kind):+.1f} % ({100 * bytes_share(each, f'{kind}, {MIDDLE}'):.0f} %)"

    selective = (f"{name} {', '.join(of(each, kind) for kind in kinds)}" for name, each in found.items())
    return [
        Claim(
            "skipping slices leaves out steps of the all-reduce",
            f"rounds and bytes are (2(P-1)-s)/(2(P-1)) of dense's in {equal} of {cases} cases (P = 4, 8, 16; all s)",
            "reproduced" if equal == cases else "not reproduced",
        ),
        Claim(
            "time to accuracy",
            "; ".join(
                f"best at {100 * share:.0f} % communication: {gained:.2f} ({best})"
                for share, (gained, best) in quickest.items()
            ),
            "reproduced" if most >= 1.58 else f"here it is {most:.2f} at most, because skipping takes more steps",
            "up to 1.58 times faster",
        ),
        Claim(
            "skipping at random has minimal impact on accuracy",
            f"perplexity over dense in equal time, s = 1, {P // 2}, {P - 1}: "
            + "; ".join(f"{name} {', '.join(f'{over[s][name]:+.1f} %' for s in (1, P // 2, P - 1))}" for name in found),
            "reproduced"
            if len(small) == P - 1
            else f"reproduced in equal time for s = {', '.join(small)}: at most 1 % behind in the mean over seeds"
            if small
            else "here it is not minimal",
        ),
        Claim(
            "skip only in some layers, here chosen by `auto_protect`",
            f"`auto_protect` and random in equal steps, {MIDDLE}, with their bytes: {'; '.join(selective)}",
            "; ".join([*settled, "elsewhere not settled: seeds overlap"]),
        ),
    ]


def shard_claim(sharded: Mapping[str, Shards]) -> Claim:
    return Claim(
        "other parallelisms and topologies",
        f"shards with fixed owners: after {SHARD_STEPS} steps the mean is off by "
        f"{', '.join(f'{each.bias:.2f} ({kind})' for kind, each in sharded.items())} standard deviations of the ranks; "
        f"{', '.join(f'{100 * each.unseen:.0f} %' for each in sharded.values())} of owners and ranks never meet",
        "reproduced for shards"
        if sharded[AUTHORS].bias < sharded["naive"].bias / 2
        else "here the authors' form hardly helps, random offsets do"
        if sharded["random"].bias < sharded["naive"].bias / 2
        else "not reproduced",
    )
