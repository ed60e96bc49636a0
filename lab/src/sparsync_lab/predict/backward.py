"""Record when the gradients of a model become ready, in a few steps of any training loop, without changing anything."""

import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
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
DEFAULT_LIMITS = (1 * MB, 25 * MB)  # DistributedDataParallel's first bucket, and the others
Moment = Any  # Any: seconds, or a CUDA event


@dataclass
class _Step:
    begin: Moment  # of the first forward pass
    forward_end: Moment = None  # of the last forward pass
    ready: dict[int, Moment] = field(default_factory=dict)  # by parameter number, in the order of becoming ready
    optimizers: list[list[Moment]] = field(default_factory=list)  # begin and end


class Timeline:
    """The recording; call `backward()` after the block."""

    def __init__(self, parameters: Sequence[Tensor], limits: Sequence[int]) -> None:
        self._parameters, self._limits = parameters, limits  # bytes of the first bucket and of all others
        self._on_gpu = parameters[0].device.type == "cuda"
        self._steps: list[_Step] = []

    def backward(self, job: str = "") -> Backward:
        """Compute medians over the recorded steps; the first of three or more is ignored. Raises RuntimeError if no step was complete."""
        steps = [each for each in self._steps if each.optimizers]
        steps = steps[1:] if len(steps) > 2 else steps
        if not steps:
            raise RuntimeError(
                "no complete step was recorded; do a forward, a backward and an optimizer step in the block"
            )
        if self._on_gpu:
            torch.cuda.synchronize()
        order = list(steps[-1].ready)  # as DistributedDataParallel orders its buckets after the first step
        parameters = [self._parameters[number] for number in order]
        # HACK: a private function, so that buckets follow DistributedDataParallel's rule. Price: torch may change it.
        buckets, _ = dist._compute_bucket_assignment_by_size(parameters, list(self._limits))  # pyright: ignore[reportPrivateImportUsage]

        def ready_s(numbers: Iterable[int]) -> float:
            """Find when the last of these parameters is ready; those without a gradient do not count."""
            return rounded(
                statistics.median(
                    max(
                        (self._between(step.forward_end, step.ready[n]) for n in numbers if n in step.ready),
                        default=0.0,
                    )
                    for step in steps
                )
            )

        return Backward(
            job=job,
            forward_s=rounded(statistics.median(self._between(step.begin, step.forward_end) for step in steps)),
            backward_s=ready_s(order),
            optimizer_s=rounded(
                statistics.median(sum(self._between(*times) for times in step.optimizers) for step in steps)
            ),
            bucket=tuple(
                ReadyBucket(
                    sum(parameters[place].numel() for place in places), ready_s([order[each] for each in places])
                )
                for places in buckets
            ),
        )

    def _between(self, begin: Moment, end: Moment) -> float:
        return begin.elapsed_time(end) * 1e-3 if self._on_gpu else end - begin

    def _now(self) -> Moment:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _forward_begins(self, *_: object) -> None:
        # Further forward passes before the optimizer's step accumulate gradients.
        if torch.is_grad_enabled() and (not self._steps or self._steps[-1].optimizers):
            self._steps.append(_Step(self._now()))

    def _forward_ends(self, *_: object) -> None:
        if torch.is_grad_enabled() and self._steps:
            self._steps[-1].forward_end, self._steps[-1].ready = self._now(), {}

    def _gradient_is_ready(self, number: int) -> None:
        if self._steps and self._steps[-1].forward_end is not None:
            self._steps[-1].ready[number] = self._now()

    def _optimizer_begins(self, *_: object) -> None:
        if self._steps and self._steps[-1].ready:
            self._steps[-1].optimizers.append([self._now()])

    def _optimizer_ends(self, *_: object) -> None:
        if self._steps and self._steps[-1].optimizers:
            self._steps[-1].optimizers[-1].append(self._now())


@contextmanager
def timeline(model: nn.Module, bucket_mb: float | None = None) -> Iterator[Timeline]:
    """Record forward pass, gradients and optimizer of the steps in the block; three are enough.

        with timeline(model) as recorded:
            for batch in batches:  # the unchanged loop
                ...
        recorded.backward("my model")

    `model` is the module that the loop calls, wrapped or not. Gradients are grouped into the buckets that DistributedDataParallel uses from
    its second step on, of `bucket_mb` megabytes; None: the model's setting, or 1 and 25. If gradients are accumulated over several forward
    passes, all but the last backward pass count as forward pass. Communication may slow the backward pass down: to measure the model alone,
    record on one rank or in `no_sync()`. On a GPU the times are those of its current stream.
    """
    parameters: list[Tensor] = [each for each in model.parameters() if each.requires_grad]
    if not parameters:
        raise ValueError("the model has no parameter that takes a gradient; nothing would be recorded")
    limits = DEFAULT_LIMITS
    if bucket_mb is not None:
        limits = (int(bucket_mb * MB),)
    elif isinstance(model, DistributedDataParallel) and not model.bucket_bytes_cap_default:
        limits = (model.bucket_bytes_cap,)
    recorded = Timeline(parameters, limits)
    hooks = [
        model.register_forward_pre_hook(recorded._forward_begins),
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
