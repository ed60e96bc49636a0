"""When the gradients of a model become ready: a recorder around some steps of any training loop. It measures, and changes nothing."""

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from sparsync_lab.predict.probe_file import Backward, ReadyBucket, rounded

MB = 2**20  # as DistributedDataParallel counts
DEFAULT_LIMITS = (1 * MB, 25 * MB)  # of its first bucket, and of the others
Moment = Any  # Any: seconds, or a CUDA event


@dataclass
class _Step:
    begin: Moment  # of the first forward pass
    forward_end: Moment = None  # of the last one
    ready: dict[int, Moment] = field(
        default_factory=dict
    )  # by number of the parameter, in the order in which they become ready
    optimizer_begin: Moment = None
    optimizer_s: list[tuple[Moment, Moment]] = field(default_factory=list)


@dataclass
class Timeline:
    """What was recorded so far; `backward()` returns it once the block has ended."""

    parameters: list[Tensor]
    limits: tuple[int, ...]  # bytes of the first buckets; the last one is that of all others
    on_gpu: bool
    _steps: list[_Step] = field(default_factory=list)
    _open: _Step | None = None

    def backward(self, job: str = "") -> Backward:
        """Return medians over the recorded steps, without the first of three or more. Raises RuntimeError where no step was whole."""
        steps = self._steps[1:] if len(self._steps) > 2 else self._steps
        if not steps:
            raise RuntimeError(
                "no whole step was recorded: between the begin and the end of the block there must be a forward pass of the model, a "
                "backward pass and a step of an optimizer"
            )
        if self.on_gpu:
            torch.cuda.synchronize()
        order = list(steps[-1].ready)  # as DistributedDataParallel orders its buckets after the first step
        buckets = _buckets([self.parameters[number] for number in order], self.limits)
        median = statistics.median
        return Backward(
            job=job,
            forward_s=rounded(median(self._between(step.begin, step.forward_end) for step in steps)),
            backward_s=rounded(median(max(self._ready_s(step, step.ready)) for step in steps)),
            optimizer_s=rounded(
                median(sum(self._between(begin, end) for begin, end in step.optimizer_s) for step in steps)
            ),
            bucket=tuple(
                ReadyBucket(
                    sum(self.parameters[order[place]].numel() for place in places),
                    rounded(median(max(self._ready_s(step, [order[place] for place in places])) for step in steps)),
                )
                for places in buckets
            ),
        )

    def _ready_s(self, step: _Step, numbers: Any) -> list[float]:  # Any: an iterable of int
        """Return the seconds after the forward pass at which these parameters were ready; those without gradient are left out."""
        return [self._between(step.forward_end, step.ready[number]) for number in numbers if number in step.ready] or [
            0.0
        ]

    def _between(self, begin: Moment, end: Moment) -> float:
        return begin.elapsed_time(end) * 1e-3 if self.on_gpu else end - begin

    def _now(self) -> Moment:
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _forward_begins(self, *_: object) -> None:
        if torch.is_grad_enabled() and self._open is None:
            self._open = _Step(self._now())

    def _forward_ends(self, *_: object) -> None:
        if self._open is not None and torch.is_grad_enabled():
            self._open.forward_end, self._open.ready = self._now(), {}

    def _gradient_is_ready(self, number: int) -> None:
        if self._open is not None and self._open.forward_end is not None:
            self._open.ready.pop(number, None)  # a parameter that is used twice is ready after the second time
            self._open.ready[number] = self._now()

    def _optimizer_begins(self, *_: object) -> None:
        if self._open is not None and self._open.ready:
            self._open.optimizer_begin = self._now()

    def _optimizer_ends(self, *_: object) -> None:
        step = self._open
        if step is None or step.optimizer_begin is None:
            return
        step.optimizer_s.append((step.optimizer_begin, self._now()))
        step.optimizer_begin = None
        if len(self._steps) == 0 or self._steps[-1] is not step:
            self._steps.append(step)

    def _next_step(self) -> None:
        """Begin anew with the forward pass that comes after a step of an optimizer."""
        if self._open is not None and self._open.optimizer_s:
            self._open = None


@contextmanager
def timeline(model: nn.Module, bucket_mb: float | None = None) -> Iterator[Timeline]:
    """Record forward pass, gradients and optimizer of the steps that are taken in the block; three are enough.

        with timeline(model) as recorded:
            for batch in batches:  # the unchanged loop
                ...
        recorded.backward("my model")

    `model` is what the loop calls, wrapped or not. Gradients are put into the buckets that DistributedDataParallel makes of them from its
    second step on, of `bucket_mb` megabytes; None: those of `model`, or of 1 and 25.
    Where gradients are accumulated over several forward passes,
    all but the last backward pass belong to the forward pass. What communicates during the backward pass may slow it down: record without
    it, on one rank or in `no_sync()`, to see the model alone. On a GPU the times are those of its current stream.
    """
    parameters: list[Tensor] = [each for each in model.parameters() if each.requires_grad]
    if not parameters:
        raise ValueError("the model has no parameter that takes a gradient; nothing would be recorded")
    limits = DEFAULT_LIMITS
    if bucket_mb is not None:
        limits = (int(bucket_mb * MB),)
    elif isinstance(model, DistributedDataParallel) and not model.bucket_bytes_cap_default:
        limits = (model.bucket_bytes_cap,)
    recorded = Timeline(parameters, limits, parameters[0].device.type == "cuda")

    def forward_begins(*_: object) -> None:
        recorded._next_step()
        recorded._forward_begins()

    hooks = [
        model.register_forward_pre_hook(forward_begins),
        model.register_forward_hook(recorded._forward_ends),
        *(
            parameter.register_post_accumulate_grad_hook(lambda _, number=number: recorded._gradient_is_ready(number))
            for number, parameter in enumerate(parameters)
        ),
        register_optimizer_step_pre_hook(recorded._optimizer_begins),
        register_optimizer_step_post_hook(recorded._optimizer_ends),
    ]
    try:
        yield recorded
    finally:
        for hook in hooks:
            hook.remove()


def _buckets(ordered: Sequence[Tensor], limits: Sequence[int]) -> list[list[int]]:
    """Return the buckets that DistributedDataParallel makes of parameters in the order in which they become ready, by place in it."""
    # HACK: its own private function, so that buckets are the same whatever its rule is. Price: torch may change it.
    buckets, _ = dist._compute_bucket_assignment_by_size(list(ordered), list(limits))  # pyright: ignore[reportPrivateImportUsage]
    return buckets
