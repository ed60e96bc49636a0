"""The training of several ranks in one process: their gradients one after the other from the same weights, and one mean for all."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from sparsync.core import ParameterSpan, laid_out
from sparsync.lab.workloads.base import Workload

Reduce = Callable[[int, list[Tensor], float], Tensor]
"""(step, the gradient [n] of each rank, learning rate) -> the mean [n] to apply."""


def layout(model: nn.Module) -> tuple[ParameterSpan, ...]:
    """Return the span of each parameter's gradient in the flat gradient of the model."""
    return laid_out((name, parameter.shape) for name, parameter in model.named_parameters())


def train(workload: Workload, model: nn.Module, seed: int, steps: int, ranks: int, reduce: Reduce) -> None:
    """Train `model` in place for all steps; `reduce` is called once per step with the gradients of all ranks."""
    optimizer, schedule = workload.optimizer(model, steps)
    for step in range(steps):
        gradients = [_gradient(workload, model, seed, step, rank, ranks) for rank in range(ranks)]
        mean = reduce(step, gradients, float(optimizer.param_groups[0]["lr"]))
        for each, parameter in zip(layout(model), model.parameters(), strict=True):
            parameter.grad = each.span.of(mean).view_as(parameter).clone()
        workload.clip(model)
        optimizer.step()
        schedule.step()


def _gradient(workload: Workload, model: nn.Module, seed: int, step: int, rank: int, ranks: int) -> Tensor:
    """Return the gradient [n] of one rank's share of the batch; zero for a parameter that was not used."""
    model.zero_grad(set_to_none=True)
    workload.loss(model, workload.batch(seed, step, rank, ranks)).backward()
    zero_if_unused = (torch.zeros_like(each) if each.grad is None else each.grad for each in model.parameters())
    return torch.cat([each.flatten() for each in zero_if_unused])
