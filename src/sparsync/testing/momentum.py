"""Detection of a scheme's momentum from its results after the gradient has become zero."""

from collections.abc import Callable

import torch
from torch import Tensor

from sparsync.base.scheme import Scheme
from sparsync.base.state import State
from sparsync.comm.local import LocalComm, LocalWorld
from sparsync.core import Bucket
from sparsync.testing.world import COUNT, flat_residual, layout

_STEPS = 16  # steps in which a mean with a decay of 0.99 writes a seventh of a gradient
_SHARE = 0.1  # more than this share of the gradient from outside the residual is a momentum; less may be rounding


def keeps_momentum(make: Callable[[], Scheme]) -> bool:
    """Return whether the scheme writes parts of a gradient in later steps that were not in its residual.

    One rank reduces a gradient once, and then zeros. With residuals r, the results after the first step should sum to
    r_1 - r_T, or less if residuals decay. Subtracts what the scheme writes without any gradient.
    """
    gradient = (torch.arange(COUNT) % 8 + 1.0) * (1 - 2 * (torch.arange(COUNT) % 2))

    def much(surplus: Tensor) -> bool:
        return bool((surplus * gradient.sign()).clamp(min=0).norm() > _SHARE * gradient.norm())

    surplus = _from_nowhere(make().start(), gradient)
    return much(surplus) and much(surplus - _from_nowhere(make().start(), torch.zeros(COUNT)))


def undeclared(make: Callable[[], Scheme]) -> str | None:
    """Return the advice for a scheme with a momentum that its class does not declare; None if there is nothing to declare."""
    scheme = make()
    declared = any("has_momentum" in vars(kind) for kind in type(scheme).__mro__ if kind is not Scheme)
    if declared or not keeps_momentum(make):
        return None
    return (
        f"{type(scheme).__name__} keeps a gradient outside its residual and writes it in later steps, as a momentum does. Its class must "
        "say so: set has_momentum = True if the optimizer should be SGD without momentum, and False if this is no momentum"
    )


def _from_nowhere(state: State, gradient: Tensor) -> Tensor:
    """Compute the sum of results after the first step minus the residual's loss, [n] in float64."""

    def reduce(comm: LocalComm) -> Tensor:
        written = [gradient.clone(), *(torch.zeros_like(gradient) for _ in range(1, _STEPS))]
        residuals = []
        for step, bucket in enumerate(written):
            state.reduce(Bucket("momentum", bucket, step, layout(COUNT)), comm)
            residuals.append(flat_residual(state, layout(COUNT), bucket).double())
        return torch.stack(written[1:]).double().sum(0) + residuals[-1] - residuals[0]

    return LocalWorld(1).run(reduce)[0]
