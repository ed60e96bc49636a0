"""The claims of SkipReduce: time to accuracy, shards and traffic; `plays` measures bias and regularisation.

Trainings of 8 ranks run in one process. Times are predicted from their counted traffic, never measured.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
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
from sparsync_lab.frontier.runs import Finished
from sparsync_lab.frontier.study import FrontierStudy, complete
from sparsync_lab.scheme_choice import parse_schemes
from studies import parts
from studies.papers import Claim, Section, plays
from studies.papers.plays import SEEDS, P

STEPS, EVERY = 200, 8
BITS_PER_S, LATENCY_S = 1e8, 50e-6  # of the predicted link
SHARES = (0.5, 0.95)  # of a dense step's time, taken by its exchange
NEAR = 1.05  # the nearer target, in terms of dense's last quality
MIDDLE = f"s = {P // 2}"

Found = Mapping[str, Sequence[Finished]]
"""The trainings of all seeds at the best rate, by the method as tables name it."""


@dataclass(frozen=True)
class Job:
    """A small job, and the methods compared on it as tables and as commands name them."""

    workload: str
    options: Mapping[str, Any]  # Any: of the workload
    rates: tuple[float, ...]


JOBS = {
    "SGD": Job("shakespeare-small", {"vocabulary": 500, "width": 48, "length": 12, "windows": 200}, (2, 4, 8)),
    "AdamW": Job("gpt-tiny", {"width": 48, "layers": 1, "heads": 2}, (1, 2, 4)),
}
LARGE = replace(JOBS["SGD"], options={**JOBS["SGD"].options, "batch_size": 16 * P})
METHODS = {
    "dense": "dense",
    **{f"random, s = {s}": f"skip_reduce:skip={s}" for s in (2, 4, 6)},
    **{f"naive, s = {s}": f"skip_reduce:skip={s}:mode=naive" for s in (P // 2,)},
    f"`auto_protect`, {MIDDLE}": f"auto_protect:skip={P // 2}",
    f"`ring_pruning`, {MIDDLE}": f"ring_pruning:skip={P // 2}",
}


def trained(folder: Path, job: Job, shown: Sequence[str] = tuple(METHODS)) -> dict[str, list[Finished]]:
    """Train methods at their best rates, with one seed at each rate and the others at the best; finished trainings are in `folder`."""
    schemes, settings = (
        parse_schemes(",".join(METHODS[each] for each in shown), 0.01),
        (job.workload, job.options, (P,)),
    )
    study = FrontierStudy(schemes, *settings, (STEPS,), SEEDS, job.rates, SEEDS[0], points=STEPS // EVERY)
    done, lower = complete(study, folder, 1, print), study.check().better == "lower"
    best = {each: study.tried(done, METHODS[each], P, STEPS, lower)[1] or math.nan for each in shown}
    return {
        each: [done[study.key(METHODS[each], P, STEPS, seed, rate)] for seed in SEEDS] for each, rate in best.items()
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


def targets(found: Found) -> dict[str, float]:
    """Compute the mean quality of dense after half its steps, and one near its last."""
    half = [dict(each.trained.quality)[STEPS // 2 // EVERY * EVERY] for each in found["dense"]]
    return {"half-way": fmean(half), "near": NEAR * fmean(each.end for each in found["dense"])}


def gain(found: Found, shown: str, target: float, share: float) -> float | None:
    """Compute dense's time to the target divided by the method's; None if a seed never reaches it."""
    dense_steps, own_steps = mean_steps_to(found["dense"], target), mean_steps_to(found[shown], target)
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
    large = trained(folder / "skip_reduce-large", LARGE, ("dense", f"random, {MIDDLE}"))
    learnt, biased = plays.regularisation(folder), plays.bias(folder)
    sharded = {kind: shards(kind, P // 2) for kind in ("naive", AUTHORS, "random")}
    return Section(
        [*claims(found, large), *plays.claims(learnt, biased), shard_claim(sharded)],
        "\n\n".join(
            [
                *(accuracy(name, JOBS[name], each) for name, each in found.items()),
                accuracy("SGD, 16 samples per rank", LARGE, large),
                plays.bias_table(biased),
                plays.regularisation_table(learnt),
            ]
        ),
    )


def accuracy(name: str, job: Job, found: Found) -> str:
    """Format the time to accuracy of each method beside dense."""
    heads, rows = ["method", "rate", "perplexity over dense", "bytes"], list[list[str]]()
    for at, target in targets(found).items():
        heads.append(
            f"steps to {at} ({target:.3g}): speed-up at {', '.join(f'{100 * share:.0f} %' for share in SHARES)}"
        )
    for shown, several in found.items():
        row = [
            shown,
            f"x{several[0].key.rate:g}",
            plays.ranged(gaps(found, shown), "+.1f"),
            f"{100 * bytes_share(found, shown):.0f} %",
        ]
        for target in targets(found).values():
            steps, gained = mean_steps_to(several, target), [gain(found, shown, target, share) for share in SHARES]
            told = ", ".join(f"{each:.2f}" for each in gained if each is not None)
            row.append("never" if steps is None else f"{steps:.0f}: {told}")
        rows.append(row)
    options = ", ".join(f"{key} {value}" for key, value in job.options.items())
    ends = plays.ranged([each.end for each in found["dense"]], ".2f")
    return (
        f"**{name}**: `{job.workload}` with {options}, {found['dense'][0].elements:,} parameters; dense ends at {ends}:\n\n"
        f"{parts.table(heads, rows)}"
    )


def claims(found: Mapping[str, Found], large: Found) -> list[Claim]:
    """Format the claims about traffic and time to accuracy."""
    equal, cases = equal_to_form((4, 8, 16), 240)
    most, best = max(
        (tuple(gain(each, shown, target, share) or 0.0 for share in SHARES[::-1]), f"{name}, {at}, {shown}")
        for name, each in {**found, "SGD, 16 samples per rank": large}.items()
        for at, target in targets(each).items()
        for shown in each
        if "s = " in shown
    )

    def over(kind: str, name: str) -> str:
        return f"{mean_gap(found[name], kind):+.1f} %"

    def bytes_of(kind: str, name: str) -> str:
        return f"{100 * bytes_share(found[name], f'{kind}, {MIDDLE}'):.0f} %"

    selective = (
        f"{name} {', '.join(f'{over(kind, name)} ({bytes_of(kind, name)})' for kind in ('`auto_protect`', 'random'))}"
        for name in found
    )
    random = {name: over("random", name) for name in found}
    return [
        Claim(
            "skipping slices leaves out steps of the all-reduce",
            f"rounds and bytes are (2(P-1)-s)/(2(P-1)) of dense's in {equal} of {cases} cases (P = 4, 8, 16; all s)",
            "reproduced" if equal == cases else "not reproduced",
        ),
        Claim(
            "time to accuracy",
            f"best: {most[1]:.2f} at {100 * SHARES[0]:.0f} % communication, {most[0]:.2f} at {100 * SHARES[1]:.0f} % ({best})",
            "reproduced" if most[0] >= 1.58 else f"here it is {most[0]:.2f} at most, because skipping takes more steps",
            "up to 1.58 times faster",
        ),
        Claim(
            "skipping at random has minimal impact on accuracy",
            f"perplexity over dense at {MIDDLE}: {', '.join(f'{name} {random[name]}' for name in random)}, SGD with 16 "
            f"samples per rank {mean_gap(large, 'random'):+.1f} %",
            "reproduced"
            if max(mean_gap(each, "random") for each in (*found.values(), large)) <= 1
            else "here it is not minimal"
            + ", but falls with the samples per rank" * (mean_gap(large, "random") < mean_gap(found["SGD"], "random")),
        ),
        Claim(
            "skip only in some layers, here chosen by `auto_protect`",
            f"`auto_protect` and random, with their bytes: {'; '.join(selective)}",
            "reproduced: nearer to dense on average, for a few more bytes"
            if all(mean_gap(each, "`auto_protect`") < mean_gap(each, "random") for each in found.values())
            else "not reproduced",
        ),
    ]


def shard_claim(sharded: Mapping[str, Shards]) -> Claim:
    return Claim(
        "other parallelisms and topologies",
        f"shards with fixed owners: after {SHARD_STEPS} steps the mean is off by "
        f"{', '.join(f'{each.bias:.2f} ({kind})' for kind, each in sharded.items())} standard deviations of the ranks; "
        f"{', '.join(f'{100 * each.unseen:.0f} %' for each in sharded.values())} of owners and ranks never meet",
        f"{'reproduced' if sharded['random'].bias < sharded['naive'].bias / 2 else 'not reproduced'} for shards",
    )
