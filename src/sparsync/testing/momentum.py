"""Whether a scheme keeps a momentum, judged by what it writes after its gradient has become zero."""

from collections.abc import Callable

import torch
from torch import Tensor

from sparsync.base.scheme import Scheme
from sparsync.base.state import State
from sparsync.comm.local import LocalComm, LocalWorld
from sparsync.core import Bucket
from sparsync.testing.world import COUNT, flat_residual, layout

_STEPS = 16  # in which a mean that remembers 0.99 gives back a seventh of a gradient
_SHARE = 0.1  # of the gradient: that much more than was in the residual is a momentum, and less may be rounding


def keeps_momentum(make: Callable[[], Scheme]) -> bool:
    """Return whether a gradient comes out of the scheme in later steps that was in no residual.

    One rank reduces a gradient once, and zeros in the steps after it. With residuals r, what is written after the first step is then
    r_1 - r_T, and less where residuals decay. Whatever the scheme writes without any gradient is taken off.
    """
    gradient = (torch.arange(COUNT) % 8 + 1.0) * (1 - 2 * (torch.arange(COUNT) % 2))

    def much(found: Tensor) -> bool:
        return bool((found * gradient.sign()).clamp(min=0).norm() > _SHARE * gradient.norm())

    found = _from_nowhere(make().start(), gradient)
    return much(found) and much(found - _from_nowhere(make().start(), torch.zeros(COUNT)))


def undeclared(make: Callable[[], Scheme]) -> str | None:
    """Return what the author of a scheme has to add if it keeps a momentum that its class does not declare; None if all is well."""
    scheme = make()
    declared = any("has_momentum" in vars(kind) for kind in type(scheme).__mro__ if kind is not Scheme)
    if declared or not keeps_momentum(make):
        return None
    return (
        f"{type(scheme).__name__} keeps a gradient outside its residual and writes it in later steps, as a momentum does. Its class must "
        "say so: set has_momentum = True if the optimizer should be SGD without momentum, and False if this is no momentum"
    )


def _from_nowhere(state: State, gradient: Tensor) -> Tensor:
    """Return what the scheme writes after the first step and its residual does not lose, [n] in float64."""

    def reduce(comm: LocalComm) -> Tensor:
        written = [gradient.clone(), *(torch.zeros_like(gradient) for _ in range(1, _STEPS))]
        residuals = []
        for step, bucket in enumerate(written):
            state.reduce(Bucket("momentum", bucket, step, layout(COUNT)), comm)
            residuals.append(flat_residual(state, layout(COUNT), bucket).double())
        return torch.stack(written[1:]).double().sum(0) + residuals[-1] - residuals[0]

    return LocalWorld(1).run(reduce)[0]
