"""The training of several ranks in one process: their gradients come one after the other from the same weights, and one mean is applied."""

import torch
from torch import Tensor, nn

from sparsync.core import ParameterSpan, laid_out
from sparsync.lab.workloads.base import Workload


def layout(model: nn.Module) -> tuple[ParameterSpan, ...]:
    """Where each parameter's gradient lies in the flat gradient of the model."""
    return laid_out((name, parameter.numel()) for name, parameter in model.named_parameters())


def gradient(workload: Workload, model: nn.Module, seed: int, step: int, rank: int, ranks: int) -> Tensor:
    """The gradient [n] of one rank's share of the batch; zero for a parameter that was not used."""
    model.zero_grad(set_to_none=True)
    workload.loss(model, workload.batch(seed, step, rank, ranks)).backward()
    zero = (torch.zeros_like(each) if each.grad is None else each.grad for each in model.parameters())
    return torch.cat([each.flatten() for each in zero])


def write(model: nn.Module, mean: Tensor) -> None:
    """Makes `mean` [n] the gradient of the model."""
    for slot, parameter in zip(layout(model), model.parameters(), strict=True):
        parameter.grad = slot.span.of(mean).view_as(parameter).clone()
