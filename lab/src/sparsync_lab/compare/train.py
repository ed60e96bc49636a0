"""The training of one rank with one scheme after the other, timed and counted step by step."""

import copy
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sparsync_lab import workloads
from sparsync_lab.compare.one_rank import (
    Measured,
    compute_times,
    described,
    digest_of,
    interface_sent,
    take_step,
    training_of,
)
from sparsync_lab.compare.settings import CompareSettings, settings_from_json
from sparsync_lab.scheme_choice import SchemeChoice
from sparsync_lab.workers.process import Emit, Place
from sparsync_lab.workloads import one_process
from sparsync_lab.workloads.base import Workload, bare
from sparsync_lab.workloads.job_errors import naming


def train_all(spec: Mapping[str, Any], place: Place, emit: Emit) -> None:  # Any: JSON
    """Train with every seed and scheme of the settings in `spec`; the task of every worker of a comparison."""
    settings = settings_from_json(dict(spec))
    workload = workloads.get(settings.workload, **settings.options)
    for seed in settings.seeds:
        for choice in settings.schemes:
            train(workload, choice, seed, settings, place, emit)


def train(
    workload: Workload, choice: SchemeChoice, seed: int, settings: CompareSettings, place: Place, emit: Emit
) -> None:
    """Train the workload's model for all steps, evaluate it at intervals, and emit the records and the progress.

    Collective over the default process group. The clock stands still during evaluation. Replicas are the parameters: they must be the same
    bits on all ranks. Buffers are as under DistributedDataParallel, where those of rank 0 count. Raises RuntimeError when replicas
    differ at the end, or models at the start, and JobError where a method of the job fails.
    """
    with naming(workload.job_class(), "model"):
        model = workload.model(seed)
    _check_start(workload, model)
    model = model.to(place.device)
    about = {"scheme": choice.label, "seed": seed}
    compute_s, own_compute_s = compute_times(workload, model, seed, settings.steps, place, emit)
    times = {"compute_s": compute_s, "own_compute_s": own_compute_s}
    emit({"kind": "scheme", **about, "config": described(choice, workload), **times})
    training = training_of(workload, model, choice, settings, place)
    seconds = sent = 0.0
    for start in range(0, settings.steps, settings.eval_every):
        steps = range(start, min(start + settings.eval_every, settings.steps))
        _rendezvous(settings.timeout_s)
        measured: list[Measured] = []
        counted = interface_sent(place)
        for step in steps:
            last = step + 1 == settings.steps
            done = take_step(
                workload, training, seed, step, place, exchange=last and choice.leaves_rest(settings.steps)
            )
            emit({"kind": "progress", **about, "step": step + 1, "loss": done.loss})
            if step == steps[-1]:
                # A step may end before its last bytes have left the queues; after this they have.
                _rendezvous(settings.timeout_s)
            before, counted = counted, interface_sent(place)
            measured.append(replace(done, interface_bytes=counted - before))
        for step, mean in zip(steps, _mean_over_ranks(measured), strict=True):
            seconds += mean.step_s
            sent += mean.interface_bytes
            emit({"kind": "step", **about, "step": step + 1, "seconds": seconds, **_step_record(mean, place)})
        with training.common_weights(), _buffers_of_rank_0(bare(training.model)):
            value = _quality(workload, training.model, place)
        traffic = sent if place.own_interface else None
        emit({"kind": "quality", **about, "step": steps[-1] + 1, "seconds": seconds, "bytes": traffic, "value": value})
    with training.common_weights():
        different = _different_ranks(bare(training.model).parameters())
    status = f"failed: replicas of ranks {different} differ from rank 0's" if different else "finished"
    exchanged = {} if training.local is None else one_process.exchanged(training.local)
    if choice.never_due(settings.steps):
        exchanged["exchanges"] = 0  # the one at the end is the lab's
    emit({"kind": "end", **about, "replicas_identical": not different, "status": status, **exchanged})
    if different:
        raise RuntimeError(f"after {choice.label!r} the replicas of ranks {different} differ from rank 0's")


def _quality(workload: Workload, model: nn.Module, place: Place) -> float:
    if place.device != "cpu":  # jobs evaluate where their data are; outside the clock
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
    """Have rank 0's buffers in the model of every rank until the block ends, and own ones afterwards. Collective."""
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
    """Return the ranks whose tensors are not, bit for bit, those of rank 0. Collective."""
    mine = torch.frombuffer(bytearray(digest_of(tensors)), dtype=torch.uint8)
    all_digests = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(all_digests, mine)
    return [rank for rank, other in enumerate(all_digests) if not torch.equal(other, all_digests[0])]


def _rendezvous(timeout_s: float) -> None:
    """Wait for all ranks. Raises RuntimeError that names those that do not come in time."""
    dist.monitored_barrier(timeout=timedelta(seconds=timeout_s), wait_all_ranks=True)
