"""How far a scheme takes the weights from dense's way: the job's own optimizer on recorded gradients, with either mean.

The gradients do not answer to what the scheme does to the weights; they are those of the dense training. So this measures what an
optimizer is given, and not where it ends; `extra_steps` says how the two go together in trainings that were done to their end.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sparsync import Bucket, LocalWorld, State
from sparsync.comm.local import LocalComm
from sparsync_lab.scheme_choice import SchemeChoice
from sparsync_lab.traffic.stream import Recorded
from sparsync_lab.workloads import one_process
from sparsync_lab.workloads.base import Workload

LEAST = 20  # recorded steps


@dataclass(frozen=True)
class Deviation:
    """How the way of the weights under a scheme compares with dense's, over the last half of the recorded steps.

    The displacement of the weights is split into the part along dense's and the rest. By the second half, what was held back in the first
    has arrived, thresholds have settled and warm-ups are over. `progress`: the part along, over the length of dense's; `scatter`: the
    length of the rest over the same.
    """

    progress: float
    scatter: float

    @property
    def stands_still(self) -> bool:
        """The weights did not move at all: nothing was exchanged."""
        return self.progress == 0 and self.scatter == 0


def deviations(
    workload: Workload, seed: int, recorded: Recorded, choices: Sequence[SchemeChoice], total_steps: int
) -> list[Deviation]:
    """Replay the recorded gradients through the exact mean and each of `choices`, and return how each makes the weights deviate.

    `total_steps` is the length of the training, for the job's schedule; the recorded steps are its first ones. Raises ValueError for fewer
    than LEAST recorded steps.
    """
    if recorded.steps < LEAST:
        raise ValueError(
            f"--gradients has {recorded.steps} steps, and {LEAST} are the least that show what a scheme holds back; "
            "record more with `sparsync gradients --steps 50`"
        )
    dense = _late(ways(workload, seed, recorded, None, total_steps))
    return [_deviation(dense, _late(ways(workload, seed, recorded, choice, total_steps))) for choice in choices]


def _late(ways: Tensor) -> Tensor:
    """Return the displacement in the last half of what `ways` returns."""
    return ways[1] - ways[0]


def _deviation(dense: Tensor, other: Tensor) -> Deviation:
    square = float(dense.square().sum())
    if not square > 0:
        raise ValueError("the recorded gradients do not move the weights under dense; record some that do")
    along = float(torch.dot(dense, other)) / square
    return Deviation(along, float((other - along * dense).norm()) / square**0.5)


def _started(choice: SchemeChoice, ranks: int) -> list[State]:
    scheme = choice.make()
    return [scheme.start() for _ in range(ranks)]


def ways(workload: Workload, seed: int, recorded: Recorded, choice: SchemeChoice | None, total_steps: int) -> Tensor:
    """Return the displacement of all weights from the start [2, n], after half of the steps and after all; None is the exact mean."""
    if choice is not None and choice.local is not None:
        return _locally(workload, seed, recorded, choice, total_steps)
    ranks = recorded.ranks
    states = [] if choice is None else _started(choice, ranks)
    model = workload.model(seed)
    optimizer, schedule = workload.optimizer(model, total_steps)
    start, seen = _flat(model), []
    for step in range(recorded.steps):
        gradients = recorded.gradients(step)

        def body(comm: LocalComm, gradients: list[Tensor] = gradients, step: int = step) -> Tensor:
            bucket = Bucket(one_process.KEY, gradients[comm.rank].clone(), step, recorded.layout)
            states[comm.rank].reduce(bucket, comm)
            return bucket.grad

        mean = torch.stack(gradients).mean(0) if choice is None else LocalWorld(ranks).run(body)[0]
        _set(model, recorded, mean)
        workload.clip(model)
        optimizer.step()
        schedule.step()
        if step + 1 in (recorded.steps // 2, recorded.steps):
            seen.append(_flat(model) - start)
    return torch.stack(seen)


def _locally(workload: Workload, seed: int, recorded: Recorded, choice: SchemeChoice, total_steps: int) -> Tensor:
    seen: list[Tensor] = []

    def body(comm: LocalComm) -> None:
        model = workload.model(seed)
        optimizer, schedule = workload.optimizer(model, total_steps)
        local = choice.make_local(model, optimizer, comm=comm)
        start = _flat(model)
        for step in range(recorded.steps):
            _set(model, recorded, recorded.gradients(step)[comm.rank])
            workload.clip(model, local.clip_factor)
            if not local.replaces_optimizer:
                optimizer.step()
            local.step()
            schedule.step()
            if comm.rank == 0 and step + 1 in (recorded.steps // 2, recorded.steps):
                with local.averaged():
                    seen.append(_flat(model) - start)

    LocalWorld(recorded.ranks).run(body)
    return torch.stack(seen)


def _set(model: nn.Module, recorded: Recorded, gradient: Tensor) -> None:
    for each, parameter in zip(recorded.layout, one_process.trained_parameters(model), strict=True):
        parameter.grad = each.span.of(gradient).view_as(parameter).clone()


def _flat(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in one_process.trained_parameters(model)])
