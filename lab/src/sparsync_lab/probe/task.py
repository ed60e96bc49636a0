"""The task of each rank in a probe; rank 0 sends the file's content."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from typing import Any

import torch
import torch.distributed as dist

from sparsync.comm import GroupComm
from sparsync_lab import environment, workloads
from sparsync_lab.predict import probe_file
from sparsync_lab.predict.backward import timeline
from sparsync_lab.predict.probing import measure
from sparsync_lab.scheme_choice import check_labels, parse_schemes
from sparsync_lab.workers.process import Emit, Place
from sparsync_lab.workloads.base import Workload, loss_of

STEPS = 6  # of the job; the first does not count


@dataclass(frozen=True)
class Request:
    """What to measure, for how long, and the file's description of the group."""

    seconds: float  # approximate, for everything but the job
    schemes: str  # to measure buckets of, as `--schemes` of compare
    link: str  # what connects the ranks, for the reader
    hosts: int = 1
    workload: str | None = None  # the job whose backward pass is recorded
    options: dict[str, Any] = field(default_factory=dict)  # Any: of the workload, as in Settings
    bucket_mb: float | None = None  # of all its buckets; None: the default of DistributedDataParallel
    timeout_s: float = 120.0  # for one operation of a rank

    def check(self, ranks: int) -> Workload | None:
        """Prepare the workload, if any. Raises ValueError if the request cannot be measured."""
        if ranks < 2:
            raise ValueError(f"a probe measures what travels between ranks, got {ranks}; give at least --ranks 2")
        choices = parse_schemes(self.schemes, 0.01)
        check_labels(choices)
        local = [choice.label for choice in choices if choice.local is not None]
        if local:
            inner = ", ".join(label.partition("/")[2] for label in local)
            raise ValueError(f"a probe measures schemes without steps, got {', '.join(local)}; give {inner}")
        if self.workload is None:
            return None
        workload = workloads.get(self.workload, **self.options)
        workload.batch(0, 0, 0, ranks)  # raises if there are no equal shares
        workload.prepare()
        return workload


def probe(spec: Mapping[str, Any], place: Place, emit: Emit) -> None:  # Any: JSON
    """Measure the group as requested in `spec`; the task of every rank."""
    request = Request(**spec)
    device = torch.device(place.device)
    comm = GroupComm.private(place.group, timeout_s=place.timeout_s)
    schemes = {choice.label: choice.make() for choice in parse_schemes(request.schemes, 0.01)}
    found = measure(
        comm,
        _group(request, place),
        device,
        request.seconds,
        schemes,
        lambda text, done: emit({"kind": "progress", "text": text, "done": done}),
    )
    if request.workload is not None:
        emit({"kind": "progress", "text": f"the backward pass of {request.workload}", "done": 0.99})
        found = replace(found, backward=_backward(request, place))
    comm.close()
    emit({"kind": "probe", "content": probe_file.text(found)})


def _backward(request: Request, place: Place) -> probe_file.Backward:
    """Record the job's timeline on the slowest rank, while all ranks compute without communication."""
    assert request.workload is not None
    workload = workloads.get(request.workload, **request.options)
    model = workload.model(0).to(place.device)
    optimizer, schedule = workload.optimizer(model, STEPS)
    with timeline(model, request.bucket_mb) as recorded:
        for step in range(STEPS):
            dist.barrier()
            optimizer.zero_grad(set_to_none=True)
            loss_of(workload, model, 0, step, place.rank, place.ranks).backward()
            workload.clip(model)
            optimizer.step()
            schedule.step()
    own = recorded.backward(request.workload)
    every: list[Any] = [None] * place.ranks  # Any: what is gathered
    dist.all_gather_object(every, own)
    return max(every, key=lambda each: each.forward_s + each.backward_s + each.optimizer_s)


def _group(request: Request, place: Place) -> probe_file.ProbedGroup:
    backend = dist.get_backend(place.group)
    return probe_file.ProbedGroup(
        ranks=place.ranks,
        backend=str(backend),
        hosts=request.hosts,
        link=request.link,
        device="cpu" if place.device == "cpu" else "cuda",
        cores=len(os.sched_getaffinity(0)),
        torch=torch.__version__,
        time=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        kernels=environment.kernels(place.device),
    )
