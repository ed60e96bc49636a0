"""A study: which methods, ranks, steps, seeds and learning rates; which trainings it still needs, and those that are finished."""

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from functools import cached_property
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from sparsync.lab import workloads
from sparsync.lab.frontier import runs
from sparsync.lab.frontier.runs import Finished, Key
from sparsync.lab.progress import progress
from sparsync.lab.scheme_choice import SchemeChoice, check_labels, try_out
from sparsync.lab.workloads import one_process
from sparsync.lab.workloads.base import Workload, check_momentum, parameter_count, share

POINTS = 4  # evaluations of a training, evenly spaced; the last one at its end

ORACLE = {"oracle": "sparsync.lab.frontier.oracle:Oracle"}


@dataclass(frozen=True)
class Study:
    """The settings of `sparsync frontier`. Each method trains at each of `rates` times the job's own, and counts at its best.

    `rates_seed`: rates are tried with this seed only, and the others train at the best; None: all seeds at all rates.
    """

    schemes: tuple[SchemeChoice, ...]
    workload: str
    options: Mapping[str, Any] = field(default_factory=dict)  # Any: options of the workload, checked by its constructor
    ranks: tuple[int, ...] = (4,)
    steps: tuple[int, ...] = (300,)
    seeds: tuple[int, ...] = (0,)
    rates: tuple[float, ...] = (0.5, 1.0, 2.0)
    rates_seed: int | None = None
    follow_rate: bool = False

    def check(self) -> Workload:
        """Check every setting, try every method once, and return the job with its data prepared. Raises ValueError."""
        for name, values in (("ranks", self.ranks), ("steps", self.steps), ("rates", self.rates)):
            if not values or not min(values) > 0:
                raise ValueError(f"--{name} takes numbers above 0, got {', '.join(map(str, values)) or 'none'}")
        for name in ("ranks", "steps", "seeds", "rates"):
            values = getattr(self, name)
            if not values or len(set(values)) < len(values):
                raise ValueError(f"--{name} takes each number once, got {', '.join(map(str, values)) or 'none'}")
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
        for choice in self.schemes:
            if choice.local is None:
                check_momentum(workload, choice.label, choice.make())
        return workload

    @cached_property
    def job(self) -> str:
        """The job as it stands in keys. Call `check` first: it reads the data."""
        return runs.described(workloads.get(self.workload, **self.options).describe())

    @cached_property
    def methods(self) -> dict[str, str]:
        """Each method as it stands in keys, by its label."""
        return {choice.label: runs.described(choice.described()) for choice in self.schemes}

    def key(self, label: str, ranks: int, steps: int, seed: int, rate: float) -> Key:
        follows = self.follow_rate and label != "dense"
        return Key(self.job, self.methods[label], ranks, steps, seed, rate, follows)

    def best_rate(
        self, finished: Mapping[Key, Finished], label: str, ranks: int, steps: int, lower: bool
    ) -> float | None:
        """Return the rate of the best mean quality at the end, over the seeds that try rates; None until all are finished.

        Not a number counts as worst, and of equally good rates the one nearest to the job's own is taken.
        """
        seeds = self.seeds if self.rates_seed is None else (self.rates_seed,)
        ends: dict[float, list[float]] = {}
        for rate in sorted(self.rates, key=lambda rate: max(rate, 1 / rate)):
            found = [finished.get(self.key(label, ranks, steps, seed, rate)) for seed in seeds]
            ends[rate] = [each.end for each in found if each is not None]
            if len(ends[rate]) < len(seeds):
                return None
        worst = math.inf if lower else -math.inf
        means = {
            rate: statistics.fmean(worst if math.isnan(end) else end for end in found) for rate, found in ends.items()
        }
        return (min if lower else max)(means, key=lambda rate: means[rate])

    def missing(self, finished: Mapping[Key, Finished], lower: bool) -> list[tuple[Key, SchemeChoice]]:
        """Return the trainings to do next: those at all rates first, and where rates are tried with one seed, then the others."""
        wanted: list[tuple[Key, SchemeChoice]] = []
        for ranks in self.ranks:
            for steps in self.steps:
                for choice in self.schemes:
                    best = self.best_rate(finished, choice.label, ranks, steps, lower)
                    tried = self.seeds if self.rates_seed is None else (self.rates_seed,)
                    rates = self.rates if best is None else (best,)
                    seeds = tried if best is None else self.seeds
                    keys = [self.key(choice.label, ranks, steps, seed, rate) for seed in seeds for rate in rates]
                    wanted += [(key, choice) for key in keys if key not in finished]
        return wanted


def complete(study: Study, folder: Path, jobs: int, tell: Callable[[str], None]) -> dict[Key, Finished]:
    """Do the trainings that `folder` lacks, `jobs` at a time, and return those of the study; `tell` gets a line about each.

    Each is written when it ends, so an interrupted study goes on where it was.
    """
    workload = study.check()
    lower, finished = workload.better == "lower", runs.read(folder)
    while missing := study.missing(finished, lower):
        with progress("trainings", len(missing)) as shown:
            for number, (choice, done) in enumerate(_trained(study, missing, jobs), start=1):
                finished[done.key] = done
                runs.append(folder, done, choice.label)
                key = done.key
                tell(
                    f"[{number}/{len(missing)}] {choice.label}, {key.ranks} ranks, {key.steps} steps, seed {key.seed}, "
                    f"rate {key.rate:g}: {workload.metric} {done.end:.4g}, {done.bits:.3g} bits, {done.seconds:.0f} s"
                )
                shown.advance()
    return finished


def _trained(
    study: Study, missing: Sequence[tuple[Key, SchemeChoice]], jobs: int
) -> Iterator[tuple[SchemeChoice, Finished]]:
    """Yield each training when it ends. With several jobs each has a process; the first error ends all."""
    if jobs == 1:
        for key, choice in missing:
            yield choice, train(study.workload, study.options, choice, key)
        return
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        running: dict[Future[Finished], SchemeChoice] = {
            pool.submit(train, study.workload, study.options, choice, key): choice for key, choice in missing
        }
        try:
            while running:
                for done in wait(running, return_when=FIRST_COMPLETED).done:
                    yield running.pop(done), done.result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def train(workload: str, options: Mapping[str, Any], choice: SchemeChoice, key: Key) -> Finished:
    """Do one training on one thread."""
    torch.set_num_threads(1)
    began = time.perf_counter()
    job = workloads.get(workload, **options)
    job = job if key.rate == 1 else job.at_rate(key.rate)
    points = {round(key.steps * (point + 1) / POINTS) for point in range(POINTS)} - {0}
    about = (key.seed, key.steps, key.ranks, points)
    if choice.local is None:
        trained = one_process.train_with_scheme(job, choice.make, *about, key.follow_rate)
    else:
        trained = one_process.train_locally(
            job,
            lambda model, optimizer, comm: choice.make_local(model, optimizer, comm=comm),
            *about,
            choice.leaves_rest(key.steps),
        )
    elements = parameter_count(job.model(key.seed))
    return Finished(key, elements, round(time.perf_counter() - began, 1), trained)
