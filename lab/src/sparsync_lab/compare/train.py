"""Train on one rank with each scheme in turn, timed and counted step by step."""

import copy
import hashlib
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from sparsync import GradientReducer, Options, Scheme, attach
from sparsync.exchanges.step_method import StepMethod
from sparsync.runtime.handle import Handle
from sparsync.schemes import Dense
from sparsync_lab import workloads
from sparsync_lab.compare.settings import CompareSettings, settings_from_json
from sparsync_lab.netlab import interface_counters
from sparsync_lab.rivals.laprop import LongAdamW
from sparsync_lab.rivals.torch_ddp import TorchDDP
from sparsync_lab.scheme_choice import SchemeChoice
from sparsync_lab.workers.process import Emit, Place
from sparsync_lab.workloads import one_process
from sparsync_lab.workloads.base import Workload, bare, loss_of
from sparsync_lab.workloads.job_errors import naming
from sparsync_lab.workloads.own_momentum import made_for, optimizer_for, own_clip_factor

COMPUTE_STEPS = 20  # without communication; their median is the lower limit of every scheme's step time
COMPUTE_WARMUP = 3


@dataclass(frozen=True)
class Measured:
    """One step on one rank; numbers only, so that ranks can be averaged."""

    loss: float
    step_s: float
    wait_s: float
    reduce_s: float
    sent_bytes: float
    interface_bytes: float
    messages: float
    union_density: float


@dataclass(frozen=True)
class Training:
    """A rank's model in training. Gradients are reduced in the backward pass or after it, or the ranks take local steps."""

    model: nn.Module
    optimizer: Optimizer
    schedule: LRScheduler
    handle: Handle
    local: StepMethod | None = None  # the handle, if it takes local steps
    reducer: GradientReducer | None = None  # the handle, if gradients are reduced after clipping
    unreported_bytes: float = 0.0  # sent by a rank per step but unknown to the handle

    @property
    def clip_factor(self) -> float:
        if self.reducer is not None:
            return own_clip_factor(dist.get_world_size(self.reducer.group))
        return 1.0 if self.local is None else one_process.own_clip_factor_of(self.local)

    def common_weights(self) -> AbstractContextManager[None]:
        """Put the weights that all ranks have in common into the model for the block."""
        return nullcontext() if self.local is None else self.local.averaged()


def train_all(spec: Mapping[str, Any], place: Place, emit: Emit) -> None:  # Any: JSON
    """Train with every seed and scheme of the settings in `spec`. Each worker of a comparison runs this task."""
    settings = settings_from_json(dict(spec))
    workload = workloads.get(settings.workload, **settings.options)
    for seed in settings.seeds:
        for choice in settings.schemes:
            train(workload, choice, seed, settings, place, emit)


def train(
    workload: Workload, choice: SchemeChoice, seed: int, settings: CompareSettings, place: Place, emit: Emit
) -> None:
    """Train the workload's model for all steps, evaluate it at intervals, and emit records and progress.

    Collective over the default process group. The clock stops during evaluation. Parameters must be bit-identical on all ranks; as under
    DistributedDataParallel, only rank 0's buffers count. Raises RuntimeError if models differ at the start or replicas at the end, and
    JobError if a method of the job fails.
    """
    with naming(workload.job_class(), "model"):
        model = workload.model(seed)
    _check_start(workload, model)
    model = model.to(place.device)
    about = {"scheme": choice.label, "seed": seed}
    compute_s, own_compute_s = _compute_times(workload, model, seed, settings.steps, place, emit)
    times = {"compute_s": compute_s, "own_compute_s": own_compute_s}
    emit({"kind": "scheme", **about, "config": _described(choice, workload), **times})
    training = _training_of(workload, model, choice, settings, place)
    seconds = 0.0
    for start in range(0, settings.steps, settings.eval_every):
        steps = range(start, min(start + settings.eval_every, settings.steps))
        _rendezvous(settings.timeout_s)
        measured: list[Measured] = []
        counted = _interface_sent(place)
        for step in steps:
            last = step + 1 == settings.steps
            done = _take_step(
                workload, training, seed, step, place, exchange=last and choice.leaves_rest(settings.steps)
            )
            emit({"kind": "progress", **about, "step": step + 1, "loss": done.loss})
            if step == steps[-1]:
                # A step may end before its last bytes have left the queues; a barrier makes sure that they have.
                _rendezvous(settings.timeout_s)
            before, counted = counted, _interface_sent(place)
            measured.append(replace(done, interface_bytes=counted - before))
        for step, mean in zip(steps, _mean_over_ranks(measured), strict=True):
            seconds += mean.step_s
            emit({"kind": "step", **about, "step": step + 1, "seconds": seconds, **_step_record(mean, place)})
        with training.common_weights(), _buffers_of_rank_0(bare(training.model)):
            value = _quality(workload, training.model, place)
        emit({"kind": "quality", **about, "step": steps[-1] + 1, "seconds": seconds, "value": value})
    with training.common_weights():
        different = _different_ranks(bare(training.model).parameters())
    status = f"failed: replicas of ranks {different} differ from rank 0's" if different else "finished"
    exchanged = {} if training.local is None else one_process.exchanged(training.local)
    if choice.never_due(settings.steps):
        exchanged["exchanges"] = 0  # the lab makes the exchange at the end
    emit({"kind": "end", **about, "replicas_identical": not different, "status": status, **exchanged})
    if different:
        raise RuntimeError(f"after {choice.label!r} the replicas of ranks {different} differ from rank 0's")


def _quality(workload: Workload, model: nn.Module, place: Place) -> float:
    if place.device != "cpu":  # jobs evaluate on the CPU, where their data are; the clock is stopped
        model = copy.deepcopy(bare(model)).cpu()
    with naming(workload.job_class(), "evaluate", rank=place.rank, ranks=place.ranks):
        total, count = workload.evaluate(model, place.rank, place.ranks)
    summed = torch.tensor([total, count], dtype=torch.float64)
    dist.all_reduce(summed)
    return workload.quality(float(summed[0]), int(summed[1]))


def _mean_over_ranks(measured: list[Measured]) -> list[Measured]:
    table = torch.tensor([list(asdict(each).values()) for each in measured], dtype=torch.float64)
    dist.all_reduce(table)
    table /= dist.get_world_size()
    return [Measured(*row) for row in table.tolist()]


def _step_record(mean: Measured, place: Place) -> dict[str, Any]:  # Any: numbers, and None
    return {**asdict(mean), "interface_bytes": mean.interface_bytes if place.own_interface else None}


def _check_start(workload: Workload, model: nn.Module) -> None:
    different = _different_ranks([*model.parameters(), *model.buffers()])
    if different:
        raise RuntimeError(
            f"{workload.job_class().__qualname__}.model gave ranks {different} other parameters or buffers than rank 0; draw them from "
            "torch's global generator, which has the same seed on all ranks, or take the seed: def model(self, seed)"
        )


@contextmanager
def _buffers_of_rank_0(model: nn.Module) -> Iterator[None]:
    """Put rank 0's buffers into every rank's model for the block, then restore the local ones. Collective."""
    buffers = list(model.buffers())
    own = [each.clone() for each in buffers]
    for each in buffers:
        dist.broadcast(each, src=0)
    try:
        yield
    finally:
        for each, value in zip(buffers, own, strict=True):
            each.copy_(value)


def _different_ranks(tensors: Iterable[Tensor]) -> list[int]:
    """List the ranks whose tensors are not bit-identical to rank 0's. Collective."""
    mine = torch.frombuffer(bytearray(_digest_of(tensors)), dtype=torch.uint8)
    all_digests = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(all_digests, mine)
    return [rank for rank, other in enumerate(all_digests) if not torch.equal(other, all_digests[0])]


def _rendezvous(timeout_s: float) -> None:
    """Wait for all ranks. Raises RuntimeError that names the late ones."""
    dist.monitored_barrier(timeout=timedelta(seconds=timeout_s), wait_all_ranks=True)


def _training_of(
    workload: Workload, model: nn.Module, choice: SchemeChoice, settings: CompareSettings, place: Place
) -> Training:
    """Set up the training of a fresh model. Collective over the group of `place`."""
    if choice.local is not None:
        optimizer, schedule = _optimizer(workload, model, settings.steps)
        where = {"timeout_s": settings.timeout_s, "bucket_mb": settings.bucket_mb, "group": place.group}
        local = choice.make_local(model, optimizer, **{key: where[key] for key in where if key not in choice.local})
        return Training(model, optimizer, schedule, local, local)
    scheme = choice.make()
    if scheme.has_momentum:
        optimizer, schedule = _optimizer(workload, model, settings.steps, scheme)
        followed = optimizer if getattr(scheme, "follows_rate", False) else None
        reducer = GradientReducer(
            model, scheme, group=place.group, optimizer=followed, options=Options(timeout_s=settings.timeout_s)
        )
        return Training(model, optimizer, schedule, reducer, reducer=reducer)
    # No initial broadcast: the seed makes the weights equal.
    ddp = DistributedDataParallel(
        model,
        process_group=place.group,
        bucket_cap_mb=settings.bucket_mb,
        init_sync=False,
        gradient_as_bucket_view=True,
        find_unused_parameters=workload.find_unused_parameters,
    )
    optimizer, schedule = _optimizer(workload, ddp, settings.steps, scheme)
    handle = attach(ddp, scheme, options=Options(timeout_s=settings.timeout_s))
    if isinstance(scheme, TorchDDP):
        handle.detach()
        own = [each for each in model.parameters() if each.requires_grad]
        nbytes = 2 * (place.ranks - 1) / place.ranks * sum(each.nbytes for each in own)
        return Training(ddp, optimizer, schedule, handle, unreported_bytes=nbytes)
    return Training(ddp, optimizer, schedule, handle)


def _optimizer(
    workload: Workload, model: nn.Module, steps: int, scheme: Scheme | None = None
) -> tuple[Optimizer, LRScheduler]:
    with naming(workload.job_class(), "optimizer"):
        return optimizer_for(scheme or Dense(), workload, model, steps)


def _take_step(workload: Workload, training: Training, seed: int, step: int, place: Place, exchange: bool) -> Measured:
    """Take one step; with `exchange`, local steps then exchange what is left."""
    began = time.perf_counter()
    loss = _forward_backward(workload, training.model, training.optimizer, seed, step, place)
    with naming(workload.job_class(), "clip", step, place.rank, place.ranks):
        workload.clip(training.model, training.clip_factor)
    if training.reducer is not None:
        training.reducer.reduce()
    if training.local is None or not training.local.replaces_optimizer:
        training.optimizer.step()
    if training.local is not None:
        training.local.step()
        if exchange:
            one_process.exchange_rest(training.local)
    training.schedule.step()
    _finish(place)
    step_s = time.perf_counter() - began
    reports = training.handle.take_reports()
    elements = sum(report.elements for report in reports)
    return Measured(
        loss=float(loss),
        step_s=step_s,
        wait_s=sum(report.wait_s or 0.0 for report in reports),
        reduce_s=sum(report.seconds or 0.0 for report in reports),
        sent_bytes=sum(report.sent.nbytes for report in reports if report.sent) + training.unreported_bytes,
        interface_bytes=0.0,  # set by the caller
        messages=sum(report.sent.messages for report in reports if report.sent),
        union_density=sum(report.union for report in reports) / max(1, elements),
    )


def _forward_backward(
    workload: Workload, model: nn.Module, optimizer: Optimizer, seed: int, step: int, place: Place
) -> Tensor:
    optimizer.zero_grad(set_to_none=True)
    loss = loss_of(workload, model, seed, step, place.rank, place.ranks)
    loss.backward()
    return loss.detach()


def _finish(place: Place) -> None:
    """Wait for the device, so that its work is timed."""
    if place.device != "cpu":
        torch.cuda.synchronize(place.device)


def _compute_times(
    workload: Workload, model: nn.Module, seed: int, steps: int, place: Place, emit: Emit
) -> tuple[float, float]:
    """Measure the step of a copy that never communicates. Returns the medians, in seconds, of the slowest rank and of the ranks' mean.

    All ranks begin each step together. Batches stay within the job's `steps`; the schedule is long enough for all measured steps.
    """
    alone = copy.deepcopy(model)
    optimizer, schedule = _optimizer(workload, alone, max(steps, COMPUTE_WARMUP + COMPUTE_STEPS))
    times: list[float] = []
    for step in range(COMPUTE_WARMUP + COMPUTE_STEPS):
        dist.barrier()
        began = time.perf_counter()
        _forward_backward(workload, alone, optimizer, seed, step % steps, place)
        workload.clip(alone)
        optimizer.step()
        schedule.step()
        _finish(place)
        times.append(time.perf_counter() - began)
        emit({"kind": "alive"})
    slowest = torch.tensor(times[COMPUTE_WARMUP:], dtype=torch.float64)
    mean = slowest / dist.get_world_size()
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    dist.all_reduce(mean)
    return statistics.median(slowest.tolist()), statistics.median(mean.tolist())


def _interface_sent(place: Place) -> int:
    """Read the bytes sent by this rank's interface; 0 if other ranks share it."""
    return interface_counters(place.interface).sent_bytes if place.own_interface else 0


def _digest_of(tensors: Iterable[Tensor]) -> bytes:
    """Compute the SHA-256 digest of the tensors' bits."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.digest()


def _described(choice: SchemeChoice, workload: Workload) -> dict[str, Any]:  # Any: JSON
    scheme = choice.make()
    local = {} if choice.local is None else {choice.steps: choice.local}
    replaces = choice.local is None and (scheme.has_momentum or isinstance(scheme, LongAdamW))
    trained_by = {"optimizer": made_for(scheme, workload)} if replaces else {}
    return {"name": choice.name, **choice.config, **local, **trained_by, "full": repr(scheme)}
