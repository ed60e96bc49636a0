"""Train several ranks in one process, without links, to measure a scheme's effect on quality and the traffic of a rank.

A scheme that reduces gradients needs one model: the gradients of all ranks are computed in turn on the same weights. With local steps each
rank has its own weights and optimizer, and is a thread of a LocalWorld, in which one thread runs at a time.
"""

import statistics
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sparsync import Bucket, Comm, Report, Scheme
from sparsync.comm import LocalWorld
from sparsync.comm.local import LocalComm
from sparsync.core import ParameterSpan, laid_out
from sparsync.exchanges.local_steps import LocalTraining
from sparsync.exchanges.step_method import StepMethod
from sparsync.runtime.rescaling import ResidualUnits
from sparsync.schemes import Dense
from sparsync_lab.workloads.base import Workload, device_of, loss_of, mixed_precision
from sparsync_lab.workloads.job_errors import naming
from sparsync_lab.workloads.own_momentum import optimizer_for, own_clip_factor

KEY = "bucket0"  # of the only bucket; some schemes draw by their bucket's key

Reduce = Callable[[int, list[Tensor], float], Tensor]
"""(step, the gradient [n] of each rank, learning rate) -> the mean [n] to apply."""


def own_clip_factor_of(local: StepMethod) -> float:
    """Compute how much longer than the mean gradient a backward pass's gradients may be: steps have divided theirs already."""
    return 1.0 if local.replaces_optimizer else local.clip_factor


def exchange_rest(local: StepMethod) -> list[Report]:
    """Exchange the remaining changes of local steps. Other steps leave nothing."""
    assert isinstance(local, LocalTraining)
    return local.flush()


def exchanged(local: StepMethod) -> dict[str, int]:
    """Count the `exchanges` that changed the weights, and the `missed` ones, dropped or part of a skipped step."""
    counts = local.stats()
    missed = sum(int(counts.get(name, 0)) for name in ("dropped", "skipped"))
    return {"exchanges": int(counts["exchanges"]), "missed": missed}


@dataclass(frozen=True)
class Trained:
    """A finished training. Traffic is per rank and step, averaged over both, by the closed forms of the schemes."""

    quality: tuple[tuple[int, float], ...]  # (steps so far, quality), ascending
    nbytes: float
    rounds: float  # sequential exchanges
    messages: float
    union: float  # share of the elements that a step writes
    # Exchanges of local or AdamW steps that changed the weights; None: gradients are reduced, or unknown.
    exchanges: int | None = None


@dataclass
class Sent:
    """The traffic of a rank so far, summed over its reports."""

    nbytes: float = 0
    rounds: float = 0
    messages: float = 0
    union: float = 0

    def add(self, reports: Iterable[Report]) -> None:
        for report in reports:
            self.nbytes += report.cost.nbytes
            self.rounds += report.cost.steps
            self.messages += report.cost.messages
            self.union += report.union


class Evaluations:
    """The quality after each number of steps in `at`."""

    def __init__(self, workload: Workload, at: Collection[int]) -> None:
        self.workload, self.at = workload, at
        self.quality: list[tuple[int, float]] = []

    def evaluate(self, model: nn.Module, step: int) -> None:
        self.quality.append((step, self.workload.quality(*self.workload.evaluate(model, 0, 1))))


def layout(model: nn.Module) -> tuple[ParameterSpan, ...]:
    """Lay out each trained parameter's gradient in the flat gradient of the model."""
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
    device: str = "cpu",
) -> None:
    """Train `model` in place for all steps; `reduce` is called in each with the gradients of all ranks, `after` with the steps so far.

    As under DistributedDataParallel, every rank's forward pass begins with the buffers that rank 0 had after the previous step. With a
    `scheme` with its own momentum, the optimizer is replaced accordingly, and each rank clips its gradient.
    """
    scheme = scheme or Dense()
    optimizer, schedule = optimizer_for(scheme, workload, model, steps)
    own_clip = own_clip_factor(ranks) if scheme.has_momentum else None
    spans = layout(model)
    for step in range(steps):
        found = gradients(workload, model, seed, step, ranks, own_clip, device)
        set_gradient(model, spans, reduce(step, found, float(optimizer.param_groups[0]["lr"])))
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
    finished: Callable[[nn.Module], object] = lambda model: None,
    device: str = "cpu",
) -> Trained:
    """Train with a scheme that reduces the gradients of `ranks` ranks, each with its own state of the scheme from `make`.

    The model is evaluated after each number of steps in `evaluate_at`, and finally passed to `finished`. Residuals follow the learning
    rate if the scheme requests it. The model and the scheme's state are on `device` (see `mixed_precision`).
    """
    model = workload.model(seed).to(device.removesuffix("-bfloat16"))
    _record_passes(workload, model, seed, ranks)
    scheme, spans = make(), layout(model)
    states = [scheme.start() for _ in range(ranks)]
    sent, evaluations, units = [Sent() for _ in range(ranks)], Evaluations(workload, evaluate_at), ResidualUnits()

    def reduce(step: int, gradients: list[Tensor], rate: float) -> Tensor:
        if getattr(scheme, "follows_rate", False):
            factors = {each.name: units.follow(each.name, rate) for each in spans}
            for each in states if set(factors.values()) != {1.0} else ():
                each.rescale(factors)

        def body(comm: LocalComm) -> tuple[Tensor, Report]:
            bucket = Bucket(KEY, gradients[comm.rank], step, spans)
            report = states[comm.rank].reduce(bucket, comm)
            return bucket.grad, report

        reduced = LocalWorld(ranks).run(body)
        for each, (_, report) in zip(sent, reduced, strict=True):
            each.add([report])
        return reduced[0][0]

    def after(step: int) -> None:
        if step in evaluate_at:
            evaluations.evaluate(model, step)

    train(workload, model, seed, steps, ranks, reduce, after, scheme, device)
    finished(model)
    return _trained(evaluations, sent, steps, spans[-1].span.stop)


def train_locally(
    workload: Workload,
    make: Callable[[nn.Module, Optimizer, Comm], StepMethod],
    seed: int,
    steps: int,
    ranks: int,
    evaluate_at: Collection[int],
    exchange_last: bool = False,
    finished: Callable[[nn.Module], object] = lambda model: None,
    device: str = "cpu",
) -> Trained:
    """Train with local steps on `ranks` ranks, which `make` builds from a rank's model, optimizer and communicator.

    The common weights, as of the last exchange, are evaluated after each number of steps in `evaluate_at`. `exchange_last`: remaining
    changes are exchanged at the end, before the last evaluation. Finally, `finished` is called with the model of rank 0, which has the
    common weights until it returns. The models are on `device` (see `mixed_precision`).
    """
    evaluations, exchanges = Evaluations(workload, evaluate_at), list[int]()

    def body(comm: LocalComm) -> Sent:
        model = workload.model(seed).to(device.removesuffix("-bfloat16"))
        _record_passes(workload, model, seed, ranks)
        optimizer, schedule = workload.optimizer(model, steps)
        local, sent = make(model, optimizer, comm), Sent()
        for step in range(steps):
            model.zero_grad(set_to_none=True)
            with mixed_precision(device):
                loss = loss_of(workload, model, seed, step, comm.rank, ranks)
            loss.backward()
            with naming(workload.job_class(), "clip", step, comm.rank, ranks):
                workload.clip(model, own_clip_factor_of(local))
            if not local.replaces_optimizer:
                optimizer.step()
            # The schedule comes last: this step used the current rate.
            sent.add(local.step())
            schedule.step()
            if exchange_last and step + 1 == steps:
                sent.add(exchange_rest(local))
            if comm.rank == 0 and step + 1 in evaluate_at:
                with local.averaged():
                    evaluations.evaluate(model, step + 1)
        if comm.rank == 0:
            with local.averaged():
                finished(model)
        exchanges.append(exchanged(local)["exchanges"])
        return sent

    by_rank = LocalWorld(ranks).run(body)
    trained = _trained(evaluations, by_rank, steps, layout(workload.model(seed))[-1].span.stop)
    return replace(trained, exchanges=min(exchanges))


def _trained(evaluations: Evaluations, by_rank: Sequence[Sent], steps: int, elements: int) -> Trained:
    def mean(value: Callable[[Sent], float]) -> float:
        return statistics.fmean(map(value, by_rank)) / steps

    return Trained(
        tuple(evaluations.quality),
        nbytes=mean(lambda sent: sent.nbytes),
        rounds=mean(lambda sent: sent.rounds),
        messages=mean(lambda sent: sent.messages),
        union=mean(lambda sent: sent.union) / elements,
    )


def _record_passes(workload: Workload, model: nn.Module, seed: int, ranks: int) -> None:
    """Record the passes of a model on a GPU as CUDA graphs: a small model's kernels take longer to launch than to run.

    Each backward pass then writes gradients to the same memory.
    """
    device = device_of(model)
    if workload.repeats_passes and device.type == "cuda":
        batch = workload.batch(seed, 0, 0, ranks)
        with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
            torch.cuda.make_graphed_callables(model, (batch.input.to(device),))


def gradients(
    workload: Workload,
    model: nn.Module,
    seed: int,
    step: int,
    ranks: int,
    clip_factor: float | None = None,
    device: str = "cpu",
) -> list[Tensor]:
    """Compute the gradient [n] of each rank's share of the batch; zero for unused parameters. Buffers become rank 0's.

    `clip_factor`: for the job's clip of each gradient; None: no clipping. `device`: see `mixed_precision`.
    """
    buffers = list(model.buffers())
    before, after = [each.clone() for each in buffers], buffers
    found: list[Tensor] = []
    for rank in range(ranks):
        for buffer, value in zip(buffers, before, strict=True):
            buffer.copy_(value)
        model.zero_grad(set_to_none=True)
        with mixed_precision(device):
            loss = loss_of(workload, model, seed, step, rank, ranks)
        loss.backward()
        if clip_factor is not None:
            with naming(workload.job_class(), "clip", step, rank, ranks):
                workload.clip(model, clip_factor)
        parts = [torch.zeros_like(each) if each.grad is None else each.grad for each in trained_parameters(model)]
        found.append(torch.cat([each.flatten() for each in parts]))
        if rank == 0:
            after = [each.clone() for each in buffers]
    for buffer, value in zip(buffers, after, strict=True):
        buffer.copy_(value)
    return found


def set_gradient(model: nn.Module, layout: Sequence[ParameterSpan], gradient: Tensor) -> None:
    """Set the gradient of each trained parameter to its part of the flat `gradient` [n]."""
    for each, parameter in zip(layout, trained_parameters(model), strict=True):
        parameter.grad = each.span.of(gradient).view_as(parameter).clone()


def trained_parameters(model: nn.Module) -> list[nn.Parameter]:
    """List the trained parameters in the order of `layout`."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]
