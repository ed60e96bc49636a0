"""Train with a loss scaler that skips a step, with any integration, and check that nothing else is lost."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.tensor import DTensor

SCALED = "all ranks skip the step; only the bucket with the infinity is lost"
STEPS, OVERFLOWING = 6, 3  # the step with an infinity, on rank 1


@dataclass
class ScalerRecord:
    """The record of one rank."""

    applied: dict[str, Tensor]  # by the optimizer, in all steps
    residual: dict[str, Tensor]  # of the unscaled loss
    scales: list[float]
    came: dict[str, Tensor]  # gradients on this rank, except in the overflowing step
    came_overflowing: dict[str, Tensor]  # in that step, as if finite
    non_finite: set[str] = field(default_factory=set)  # parameters in the bucket with the infinity
    overflowing_step: int = OVERFLOWING


def scaled(
    training: Any,  # with table.WithHandle's methods
    scaler: GradScaler,
    names: Sequence[str],
    gradient: Callable[[int, int, str], Tensor],
    overflowing: str,
) -> ScalerRecord:
    """Train some steps, one with an infinity in the gradient of the parameter called `overflowing`."""
    optimizer = torch.optim.SGD(training.model.parameters(), lr=1.0)  # so that weights show the applied gradients
    scaler.scale(torch.zeros(()))  # initialises its scale; the loss is scaled through the inputs
    scales, came = [], {name: torch.zeros(()) for name in names}
    for step in range(STEPS):
        inputs = {name: gradient(training.rank, step, name) for name in names}
        if step != OVERFLOWING:
            came = {name: came[name] + inputs[name] for name in names}
        scales.append(scaler.get_scale())
        given = {name: x * scales[-1] for name, x in inputs.items()}
        if step == OVERFLOWING and training.rank == 1:
            given[overflowing] = torch.full_like(given[overflowing], torch.inf)
        training.step(given)
        scaler.step(optimizer)
        scaler.update()
    unit = training.state().get("loss_scale") or 1.0
    kept = {name: part / unit for name, part in training.residual().items()}
    missed = {name: gradient(training.rank, OVERFLOWING, name) for name in names}
    return ScalerRecord(applied(training.model), kept, scales, came, missed)


def applied(model: nn.Module) -> dict[str, Tensor]:
    """Compute what was subtracted from each parameter, which was one everywhere."""
    found = {}
    for name, parameter in model.named_parameters():
        whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        found[name] = 1 - whole.detach()
    return found


def scaled_without_loss(id: str, ranks: list[ScalerRecord]) -> None:
    """Check conservation with whole numbers and scales of powers of two, so that everything is exact."""
    first = ranks[0]
    for rank in ranks:
        assert rank.scales == first.scales
        assert all(part.isfinite().all() for part in rank.applied.values())
        assert all(torch.equal(rank.applied[name], part) for name, part in first.applied.items())
    if not first.residual:
        return
    assert first.scales[OVERFLOWING + 1] == first.scales[OVERFLOWING] / 2
    assert 0 < len(first.non_finite) < len(first.applied)
    for name, part in first.applied.items():
        came = sum(rank.came[name] for rank in ranks)
        if name not in first.non_finite:
            came = came + sum(rank.came_overflowing[name] for rank in ranks)
        held = len(ranks) * part.flatten() + sum(rank.residual[name] for rank in ranks)
        assert torch.equal(held.float(), came.flatten().float()), name  # pyright: ignore[reportAttributeAccessIssue]
