"""The measurements of Ok-Topk's study: trainings and single reductions with all ranks in one process, kept in a folder."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparsync import Bucket, Report
from sparsync.comm import Cost, LocalWorld, MeteredComm
from sparsync.comm.local import LocalComm
from sparsync.core import ParameterSpan, count_for
from sparsync.schemes import State
from sparsync.testing.world import flat_residual
from sparsync_lab import workloads
from sparsync_lab.scheme_choice import parse_schemes
from sparsync_lab.traffic.observe import xi
from sparsync_lab.traffic.stream import Synthetic
from sparsync_lab.workloads import one_process
from sparsync_lab.workloads.base import parameter_count
from studies.papers import best_rate, kept

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
TRAINED = [name for name in METHODS if name != "exact_oktopk"]
JOB: dict[str, Any] = {"vocabulary": 2000, "width": 64, "windows": 160}  # of shakespeare-small: 0.29 M parameters
RANKS, STEPS, SHORT = 8, 240, 160
SEEDS = (0, 1, 2)
RATES = (1.0, 2.0, 4.0)  # times the job's; one more beyond an edge that is the best
EVALUATE_EVERY = 20
SETTLED = 64  # first steps that figures of thresholds leave out
RULES = {  # settings of the re-used thresholds, with their names
    "re-used (default)": "oktopk",
    "VGG": "oktopk:bug_compatible=true",
    "LSTM": "oktopk:bug_compatible=true:program=lstm",
    "BERT": "oktopk:bug_compatible=true:program=bert:threshold_steps=128",
}
XI_RANKS = (4, 8, 16)
UNEQUAL = "oktopk:dense_steps=1"  # so regions have equal widths until they are divided at step 64
VOLUME_RANKS = (2, 4, 8, 16, 32, 64, 128)
VOLUME_ELEMENTS, VOLUME_STEPS = 2**18, 4


@dataclass(frozen=True)
class Call:
    """One call of a communicator on one rank, or the sum of a chain of calls."""

    kind: str
    sent: Cost
    received: int  # bytes; -1: as many as sent


@dataclass
class RecordingComm(MeteredComm):
    """Also keep each call."""

    calls: list[Call] = field(default_factory=list)

    def send_recv(self, out: Tensor, to: int, into: Tensor, source: int) -> None:
        super().send_recv(out, to, into, source)
        self._keep("send_recv", into.nbytes)

    def all_gather(self, x: Tensor, counts: Sequence[int] | None = None) -> list[Tensor]:
        gathered = super().all_gather(x, counts)
        self._keep("all_gather", sum(each.nbytes for each in gathered) - x.nbytes)
        return gathered

    def all_to_all(self, parts: Sequence[Tensor], counts: Sequence[int] | None = None) -> list[Tensor]:
        received = super().all_to_all(parts, counts)
        self._keep("all_to_all", sum(each.nbytes for rank, each in enumerate(received) if rank != self.rank))
        return received

    def all_reduce(self, x: Tensor) -> Tensor:
        total = super().all_reduce(x)
        self._keep("all_reduce", -1)
        return total

    def _keep(self, kind: str, received: int) -> None:
        self.calls.append(Call(kind, self.take()[0], received))


def train(text: str, ranks: int, rate: float, seed: int, steps: int) -> dict[str, Any]:  # Any: JSON
    """Train with a scheme; record quality and traffic so far at each evaluation, and for Ok-Topk figures of each step."""
    torch.set_num_threads(1)
    job = workloads.get("shakespeare-small", **JOB).at_rate(rate)
    job.prepare()
    model, scheme = job.model(seed), parse_schemes(text, DENSITY)[0].make()
    layout = one_process.layout(model)
    k = count_for(getattr(scheme, "density", 1.0), layout[-1].span.stop)
    states = [scheme.start() for _ in range(ranks)]
    evaluations: list[tuple[int, float, int, int]] = []  # steps, perplexity, and rounds and bytes so far
    figures: list[dict[str, float | None]] = []
    rounds = nbytes = 0

    def reduce(step: int, gradients: list[Tensor], rate: float) -> Tensor:
        nonlocal rounds, nbytes
        gradient = torch.stack(gradients).mean(0)
        mean = gradient + mean_residual(states, layout)

        def body(comm: LocalComm) -> tuple[Report, list[Call], Tensor]:
            recording = RecordingComm(comm)
            bucket = Bucket(one_process.KEY, gradients[comm.rank], step, layout)
            return states[comm.rank].reduce(bucket, recording), recording.calls, bucket.grad

        reports, calls, written = zip(*LocalWorld(ranks).run(body), strict=True)
        for call in zip(*calls, strict=True):
            rounds += max(each.sent.steps for each in call)
            nbytes += max(max(each.sent.nbytes, each.received) for each in call)
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
            evaluations.append((step, job.quality(*job.evaluate(model, 0, 1)), rounds, nbytes))

    one_process.train(job, model, seed, steps, ranks, reduce, after, scheme)
    return {"evaluations": evaluations, "figures": figures}


def selected() -> int:
    """Compute k of the trainings."""
    return count_for(DENSITY, parameter_count(workloads.get("shakespeare-small", **JOB).model(0)))


def mean_residual(states: Sequence[State], layout: Sequence[ParameterSpan]) -> Tensor:
    """Compute the mean over ranks of the residuals, [n]."""
    total = torch.zeros(layout[-1].span.stop)
    for state in states:
        total += flat_residual(state, layout, total)
    return total / len(states)


def trainings(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Train with the paper's methods, seed 0 at all rates and the others at its best; returns the seeds' trainings at the best rate."""
    return {name: at_best_rate(folder, name)[1] for name in TRAINED}


def at_best_rate(folder: Path, name: str) -> tuple[float, list[dict[str, Any]]]:
    """Return a method's best rate, and the seeds' trainings there."""

    def trained(rate: float, seed: int) -> dict[str, Any]:
        return kept(folder, f"oktopk-{name}-{rate:g}-{seed}", lambda: train(METHODS[name], RANKS, rate, seed, STEPS))

    best = best_rate(RATES, lambda rate: end(trained(rate, SEEDS[0])))
    return best, [trained(best, seed) for seed in SEEDS]


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
