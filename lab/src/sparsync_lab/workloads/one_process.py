"""The training of several ranks in one process, without links: what a scheme does to the quality, and what a rank would send.

A scheme that reduces gradients needs one model: the gradients of all ranks are computed one after the other on the same weights. With local
steps each rank has its own weights and optimizer, and is a thread of a LocalWorld, of which one runs at a time.
"""

import statistics
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sparsync import Bucket, Comm, Dense, LocalWorld, Report, Scheme
from sparsync.comm.local import LocalComm
from sparsync.core import ParameterSpan, laid_out
from sparsync.runtime.optimizers import ResidualUnits
from sparsync_lab.workloads.base import Workload, loss_of
from sparsync_lab.workloads.job_errors import naming
from sparsync_lab.workloads.own_momentum import optimizer_for, own_clip_factor

KEY = "bucket0"  # of the one bucket; schemes that draw do so by their bucket's key

Reduce = Callable[[int, list[Tensor], float], Tensor]
"""(step, the gradient [n] of each rank, learning rate) -> the mean [n] to apply."""


class LocalTraining(Protocol):
    """What is used of the handle of `sparsync.LocalSteps`: the training of one rank by itself, and the exchange of what it has learnt."""

    replaces_optimizer: bool  # its `step` takes the optimizer's step too

    @property
    def clip_factor(self) -> float: ...  # how much longer a rank's own gradient may be than the mean gradient

    def step(self) -> list[Report]: ...
    def flush(self) -> list[Report]: ...
    def averaged(self) -> AbstractContextManager[None]: ...
    def stats(self) -> dict[str, int | float]: ...


def own_clip_factor_of(local: LocalTraining) -> float:
    """Return how much longer than the mean gradient the gradients may be that a rank's backward pass leaves: steps have divided theirs."""
    return 1.0 if local.replaces_optimizer else local.clip_factor


def exchanged(local: LocalTraining) -> dict[str, int]:
    """Return how many `exchanges` changed the weights, and how many were `missed`: dropped, or left out with a skipped step."""
    counts = local.stats()
    missed = sum(int(counts.get(name, 0)) for name in ("dropped", "skipped"))
    return {"exchanges": int(counts["exchanges"]), "missed": missed}


@dataclass(frozen=True)
class Trained:
    """A finished training. What is sent: by one rank in a step, means over ranks and steps, by the closed forms of the schemes."""

    quality: tuple[tuple[int, float], ...]  # (after how many steps, quality), ascending
    nbytes: float
    rounds: float  # exchanges that wait for each other
    messages: float
    union: float  # share of the elements that are written in a step
    exchanges: int | None = (
        None  # that changed the weights, of local steps and AdamW steps; None: of gradients, or not known
    )


def layout(model: nn.Module) -> tuple[ParameterSpan, ...]:
    """Return the span of each trained parameter's gradient in the flat gradient of the model."""
    return laid_out((name, each.shape) for name, each in model.named_parameters() if each.requires_grad)


def train(
    workload: Workload,
    model: nn.Module,
    seed: int,
    steps: int,
    ranks: int,
    reduce: Reduce,
    after: Callable[[int], None] = lambda step: None,
    scheme: Scheme | None = None,
) -> None:
    """Train `model` in place for all steps; `reduce` is called in each with the gradients of all ranks, `after` with the steps taken.

    Buffers are as under DistributedDataParallel: every rank's forward pass begins with those that rank 0's left in the step before. With
    a `scheme` with its own momentum the optimizer is the one it was made for, and each rank clips its own gradient.
    """
    scheme = scheme or Dense()
    optimizer, schedule = optimizer_for(scheme, workload, model, steps)
    own_clip = own_clip_factor(ranks) if scheme.has_momentum else None
    spans = layout(model)
    for step in range(steps):
        gradients = _gradients(workload, model, seed, step, ranks, own_clip)
        mean = reduce(step, gradients, float(optimizer.param_groups[0]["lr"]))
        for each, parameter in zip(spans, trained_parameters(model), strict=True):
            parameter.grad = each.span.of(mean).view_as(parameter).clone()
        if own_clip is None:
            with naming(workload.job_class(), "clip", step):
                workload.clip(model)
        optimizer.step()
        schedule.step()
        after(step + 1)


def train_with_scheme(
    workload: Workload,
    make: Callable[[], Scheme],
    seed: int,
    steps: int,
    ranks: int,
    evaluate_at: Collection[int],
    follow_rate: bool = False,
    finished: Callable[[nn.Module], object] = lambda model: None,
) -> Trained:
    """Train with a scheme that reduces the gradients of `ranks` ranks, each of which has a scheme by `make`.

    The model is evaluated after each number of steps in `evaluate_at`, and `finished` is called with it at the end. With `follow_rate`,
    and for a scheme that wants it, residuals follow the learning rate, as with `attach(..., optimizer=optimizer)`.
    """
    model = workload.model(seed)
    schemes, spans = [make() for _ in range(ranks)], layout(model)
    reports: list[list[Report]] = []  # by step and rank
    quality: list[tuple[int, float]] = []
    units = ResidualUnits()

    def reduce(step: int, gradients: list[Tensor], rate: float) -> Tensor:
        if follow_rate or schemes[0].follows_rate:
            factors = {each.name: units.follow(each.name, rate) for each in spans}
            for scheme in schemes if set(factors.values()) != {1.0} else ():
                scheme.rescale_residual(factors)

        def body(comm: LocalComm) -> tuple[Tensor, Report]:
            bucket = Bucket(KEY, gradients[comm.rank], step, spans)
            report = schemes[comm.rank].reduce(bucket, comm)
            return bucket.grad, report

        reduced = LocalWorld(ranks).run(body)
        reports.append([report for _, report in reduced])
        return reduced[0][0]

    def after(step: int) -> None:
        if step in evaluate_at:
            quality.append((step, workload.quality(*workload.evaluate(model, 0, 1))))

    train(workload, model, seed, steps, ranks, reduce, after, schemes[0])
    finished(model)
    by_rank = list(zip(*reports, strict=True))
    return _trained(quality, by_rank, steps, spans[-1].span.stop)


def train_locally(
    workload: Workload,
    make: Callable[[nn.Module, Optimizer, Comm], LocalTraining],
    seed: int,
    steps: int,
    ranks: int,
    evaluate_at: Collection[int],
    exchange_last: bool = False,
    finished: Callable[[nn.Module], object] = lambda model: None,
) -> Trained:
    """Train with local steps on `ranks` ranks, which `make` makes of a rank's model, optimizer and communicator.

    The common weights are evaluated after each number of steps in `evaluate_at`: those of the last exchange. `exchange_last`: what
    was learnt since the last exchange is exchanged at the end, before the last evaluation. `finished` is called with the model of rank 0
    at the end, which has the common weights until it returns.
    """
    quality: list[tuple[int, float]] = []
    exchanges: list[int] = []

    def body(comm: LocalComm) -> list[Report]:
        model = workload.model(seed)
        optimizer, schedule = workload.optimizer(model, steps)
        local = make(model, optimizer, comm)
        reports: list[Report] = []
        for step in range(steps):
            model.zero_grad(set_to_none=True)
            loss_of(workload, model, seed, step, comm.rank, ranks).backward()
            with naming(workload.job_class(), "clip", step, comm.rank, ranks):
                workload.clip(model, own_clip_factor_of(local))
            if not local.replaces_optimizer:
                optimizer.step()
            # After the step: the rate of this one has been used.
            reports += local.step()
            schedule.step()
            if exchange_last and step + 1 == steps:
                reports += local.flush()
            if comm.rank == 0 and step + 1 in evaluate_at:
                with local.averaged():
                    quality.append((step + 1, workload.quality(*workload.evaluate(model, 0, 1))))
        if comm.rank == 0:
            with local.averaged():
                finished(model)
        exchanges.append(exchanged(local)["exchanges"])
        return reports

    by_rank = LocalWorld(ranks).run(body)
    trained = _trained(quality, by_rank, steps, layout(workload.model(seed))[-1].span.stop)
    return replace(trained, exchanges=min(exchanges))


def _trained(
    quality: Iterable[tuple[int, float]], by_rank: Sequence[Sequence[Report]], steps: int, elements: int
) -> Trained:
    def mean(value: Callable[[Report], float]) -> float:
        return statistics.fmean(sum(map(value, reports)) for reports in by_rank) / steps

    return Trained(
        tuple(quality),
        nbytes=mean(lambda report: report.cost.nbytes),
        rounds=mean(lambda report: report.cost.steps),
        messages=mean(lambda report: report.cost.messages),
        union=mean(lambda report: report.union) / elements,
    )


def _gradients(
    workload: Workload, model: nn.Module, seed: int, step: int, ranks: int, clip_factor: float | None
) -> list[Tensor]:
    """Return the gradient [n] of each rank's share of the batch; zero for a parameter that was not used. Buffers become rank 0's.

    `clip_factor`: of the job's clip of each gradient; None where none is clipped.
    """
    buffers = list(model.buffers())
    before, after = [each.clone() for each in buffers], buffers
    gradients: list[Tensor] = []
    for rank in range(ranks):
        for buffer, value in zip(buffers, before, strict=True):
            buffer.copy_(value)
        model.zero_grad(set_to_none=True)
        loss_of(workload, model, seed, step, rank, ranks).backward()
        if clip_factor is not None:
            with naming(workload.job_class(), "clip", step, rank, ranks):
                workload.clip(model, clip_factor)
        parts = [torch.zeros_like(each) if each.grad is None else each.grad for each in trained_parameters(model)]
        gradients.append(torch.cat([each.flatten() for each in parts]))
        if rank == 0:
            after = [each.clone() for each in buffers]
    for buffer, value in zip(buffers, after, strict=True):
        buffer.copy_(value)
    return gradients


def trained_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that are trained, in the order of `layout`."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]
