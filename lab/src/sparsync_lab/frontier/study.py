"""A study: its methods, ranks, steps, seeds and learning rates, and which of its trainings are missing."""

import math
import statistics
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field, replace
from functools import cached_property
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sparsync_lab import workloads
from sparsync_lab.frontier import runs
from sparsync_lab.frontier.runs import Finished, Key
from sparsync_lab.progress import Progress
from sparsync_lab.scheme_choice import SchemeChoice, check_labels, check_optimizer, try_out
from sparsync_lab.workloads import one_process
from sparsync_lab.workloads.base import Workload, model_and_optimizer, parameter_count, share
from sparsync_lab.workloads.job_errors import JobError

FURTHER = 8  # maximum number of rates tried beyond the requested ones


@dataclass(frozen=True)
class FrontierStudy:
    """The settings of `sparsync frontier`. Each method trains at `rates` times the job's learning rate and counts at its best.

    While the best rate is the lowest or highest of several, the next one beyond it is tried, too, in the ratio of the last two.
    `rates_seed`: the seed that tries the rates, while the others train at the best; None: all seeds at all rates.
    """

    schemes: tuple[SchemeChoice, ...]
    workload: str
    options: Mapping[str, Any] = field(default_factory=dict)  # Any: options of the workload, checked by its constructor
    ranks: tuple[int, ...] = (4,)
    steps: tuple[int, ...] = (300,)
    seeds: tuple[int, ...] = (0,)
    rates: tuple[float, ...] = (0.5, 1.0, 2.0)
    rates_seed: int | None = None
    device: str = "cpu"
    points: int = 4  # evaluations per training, evenly spaced; the last is at its end

    def check(self) -> Workload:
        """Check the settings together, try every method once, and return the job with its data prepared."""
        if self.rates_seed is not None and self.rates_seed not in self.seeds:
            raise ValueError(
                f"--rates-seed must be one of the seeds {', '.join(map(str, self.seeds))}, got {self.rates_seed}"
            )
        check_labels(self.schemes)
        if "dense" not in [choice.label for choice in self.schemes]:
            raise ValueError("--schemes must have dense, which the others are compared with")
        workload = workloads.get(self.workload, **self.options)
        for ranks in self.ranks:
            share(getattr(workload, "batch_size", ranks), 0, ranks)
            for choice in self.schemes:
                try_out(choice, ranks)
        for rate in self.rates:
            _ = workload if rate == 1 else workload.at_rate(rate)
        workload.prepare()
        check_optimizer(self.schemes, lambda: model_and_optimizer(workload))
        return workload

    @cached_property
    def job(self) -> str:
        """The job's text in keys. Call `check` first: this reads the data."""
        return runs.described(workloads.get(self.workload, **self.options).describe())

    @cached_property
    def methods(self) -> dict[str, str]:
        """The text of each method in keys, by label."""
        return {choice.label: runs.described(choice.described()) for choice in self.schemes}

    def key(self, label: str, ranks: int, steps: int, seed: int, rate: float) -> Key:
        return Key(self.job, self.methods[label], ranks, steps, seed, rate, device=self.device)

    def tried(
        self, finished: Mapping[Key, Finished], label: str, ranks: int, steps: int, lower: bool
    ) -> tuple[tuple[float, ...], float | None]:
        """Return the rates to try, ascending, and the rate of the best mean final quality over the seeds that try them.

        The best is None until all are finished. NaN counts as worst; of equally good rates, the one nearest to the job's wins.
        """
        rates = tuple(sorted(self.rates))
        while True:
            best = self._best(finished, label, ranks, steps, rates, lower)
            if best is None or best not in (rates[0], rates[-1]) or not 1 < len(rates) < len(self.rates) + FURTHER:
                return rates, best
            lower_one, higher_one = _beyond(rates[1], rates[0]), _beyond(rates[-2], rates[-1])
            rates = (lower_one, *rates) if best == rates[0] else (*rates, higher_one)

    def missing(self, finished: Mapping[Key, Finished], lower: bool) -> list[tuple[Key, SchemeChoice]]:
        """List the trainings to do next: first all rates, then, if one seed tries the rates, the other seeds."""
        wanted: list[tuple[Key, SchemeChoice]] = []
        for ranks in self.ranks:
            for steps in self.steps:
                for choice in self.schemes:
                    rates, best = self.tried(finished, choice.label, ranks, steps, lower)
                    if best is not None:
                        rates = (best,)
                    seeds = self._trying if best is None else self.seeds
                    keys = [self.key(choice.label, ranks, steps, seed, rate) for seed in seeds for rate in rates]
                    wanted += [(key, choice) for key in keys if key not in finished]
        return wanted

    @property
    def _trying(self) -> tuple[int, ...]:
        return self.seeds if self.rates_seed is None else (self.rates_seed,)

    def _best(
        self, finished: Mapping[Key, Finished], label: str, ranks: int, steps: int, rates: Sequence[float], lower: bool
    ) -> float | None:
        worst = math.inf if lower else -math.inf
        means: dict[float, float] = {}
        for rate in sorted(rates, key=lambda rate: max(rate, 1 / rate)):
            found = [finished.get(self.key(label, ranks, steps, seed, rate)) for seed in self._trying]
            ends = [each.end for each in found if each is not None]
            if len(ends) < len(found):
                return None
            means[rate] = statistics.fmean(worst if math.isnan(end) else end for end in ends)
        return (min if lower else max)(means, key=lambda rate: means[rate])


def _beyond(inner: float, edge: float) -> float:
    """Extrapolate the next rate beyond `edge`, to three digits."""
    return float(f"{edge * edge / inner:.3g}")


def complete(study: FrontierStudy, folder: Path, jobs: int, tell: Callable[[str], None]) -> dict[Key, Finished]:
    """Do the trainings that `folder` lacks, `jobs` at a time, and return all of the study; `tell` gets a line about each.

    Each is written when it ends, so an interrupted study resumes with the unfinished ones. Raises ValueError as `FrontierStudy.check`, and
    if trainings need a GPU that is not there.
    """
    workload = study.check()
    lower, finished = workload.better == "lower", runs.read(folder)
    while missing := study.missing(finished, lower):
        if study.device == "cuda" and not torch.cuda.is_available():
            raise ValueError(
                f"--device cuda needs a GPU that torch can use for the {len(missing)} trainings that are not finished, and there is "
                "none here; leave it out"
            )
        shown = Progress("trainings", len(missing))
        for number, (choice, done) in enumerate(_trained(study, missing, jobs), start=1):
            finished[done.key] = done
            runs.append(folder, done, choice.label)
            key = done.key
            several = f"{key.ranks} ranks, " * (len(study.ranks) > 1) + f"{key.steps} steps, " * (len(study.steps) > 1)
            tell(
                f"[{number}/{len(missing)}] {choice.label}, {several}seed {key.seed}, "
                f"rate {key.rate:g}: {_told(done, workload.metric)}, {done.seconds:.0f} s"
            )
            shown.advance()
    return finished


def _told(done: Finished, metric: str) -> str:
    return f"failed: {done.failed}" if done.failed else f"{metric} {done.end:.4g}, {done.bits:.3g} bits"


def _trained(
    study: FrontierStudy, missing: Sequence[tuple[Key, SchemeChoice]], jobs: int
) -> Iterator[tuple[SchemeChoice, Finished]]:
    """Yield trainings as they end. With several jobs, each training has a process; the first error ends all."""
    if jobs == 1:
        for key, choice in missing:
            yield choice, train(study.workload, study.options, choice, key, study.points)
        return
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        running: dict[Future[Finished], SchemeChoice] = {
            pool.submit(train, study.workload, study.options, choice, key, study.points): choice
            for key, choice in missing
        }
        try:
            while running:
                for done in wait(running, return_when=FIRST_COMPLETED).done:
                    yield running.pop(done), done.result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def train(workload: str, options: Mapping[str, Any], choice: SchemeChoice, key: Key, count: int = 4) -> Finished:
    """Train once on one thread, and evaluate `count` times. A training that breaks off counts as failed; dense raises.

    Raises JobError where a method of the job fails.
    """
    torch.set_num_threads(1)
    began = time.perf_counter()
    job = workloads.get(workload, **options)
    job = job if key.rate == 1 else job.at_rate(key.rate)
    points = {round(key.steps * (point + 1) / count) for point in range(count)} - {0}
    failed = ""
    try:
        trained = train_method(job, choice, key.seed, key.steps, key.ranks, points, device=key.device)
    except JobError:
        raise
    except (RuntimeError, ValueError) as error:
        if choice.label == "dense":
            raise
        failed = f"{error}".splitlines()[0]
        trained = one_process.Trained(tuple((step, math.nan) for step in sorted(points)), 0.0, 0.0, 0.0, 0.0)
    elements = parameter_count(job.model(key.seed))
    return Finished(key, elements, round(time.perf_counter() - began, 1), trained, failed)


def train_method(
    job: Workload,
    choice: SchemeChoice,
    seed: int,
    steps: int,
    ranks: int,
    points: Collection[int],
    finished: Callable[[nn.Module], object] = lambda model: None,
    device: str = "cpu",
) -> one_process.Trained:
    """Train with a scheme, or with the steps around it; see `one_process.train_with_scheme` and `train_locally`."""
    about = (seed, steps, ranks, points)
    if choice.local is None:
        return one_process.train_with_scheme(job, choice.make, *about, finished, device)
    trained = one_process.train_locally(
        job,
        lambda model, optimizer, comm: choice.make_local(model, optimizer, comm=comm),
        *about,
        choice.leaves_rest(steps),
        finished,
        device,
    )
    # The lab makes the exchange at the end.
    return replace(trained, exchanges=0) if choice.never_due(steps) else trained
