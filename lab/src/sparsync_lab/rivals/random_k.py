"""Random-k: the same random elements on all ranks, so that no positions travel and one all-reduce carries the values (arXiv 1809.07599).

Differs from the paper: elements are drawn one from each of k neighbouring spans of nearly equal length, which takes k draws and not n,
and no sorting; so an element is drawn with probability 1 / length of its span.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self

from sparsync import (
    Accumulator,
    Bucket,
    Comm,
    ErrorFeedbackScheme,
    MeteredComm,
    Report,
    Scheme,
    Sparse,
    Update,
    kernels,
)
from sparsync.comm.plan import Given, Plan, all_reduce_exchange, planned
from sparsync.core import check_density, count_for, generator
from sparsync.feedback import Residuals


@dataclass
class RandomK(ErrorFeedbackScheme):
    """Send the same random elements on all ranks, without positions (arXiv 1809.07599).

    The share `density` of all elements is drawn anew at each step. The others stay in the residual. With `unbiased` nothing is kept, and
    what is written is multiplied by the length of its span, so that it is right on average; with one rank the gradient then comes back as
    it was. NaN or Inf on any rank, in whatever element, shows in the gradient of every rank and changes nothing else.
    """

    density: float = 0.01  # share of elements that is sent
    unbiased: bool = (
        False  # scale up instead of error feedback; takes no memory, and the variance is 1 / density times larger
    )
    seed: int = 0  # the same on every rank
    residuals: Residuals = "float32"

    name = "random_k"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_density(self.density)

    @classmethod
    def published(cls, density: float = 0.01, seed: int = 0) -> Self:
        """Return the same: random elements with error feedback are the plain setting."""
        return cls(density=density, seed=seed)

    def planned(self, given: Given) -> Plan:
        exchange = all_reduce_exchange(count_for(self.density, given.n), given.value_nbytes, given.P)
        state_nbytes = 0 if self.unbiased else self.residual_nbytes(given)
        return planned(given, [exchange], state_nbytes, accumulate=not self.unbiased)

    def step(self, acc: Accumulator, bucket: Bucket, comm: Comm) -> Update:
        values = acc.values
        index, _ = self._drawn(bucket)
        mean = _sum(kernels.gather(values, index), acc.finite, comm) / comm.size
        return Update(Sparse(index, mean, values.numel()), cleared=index, selected=index.numel())

    def reduce(self, bucket: Bucket, comm: Comm) -> Report:
        grad, P = bucket.grad, comm.size
        if not self.unbiased:
            return super().reduce(bucket, comm)
        if P == 1 or not grad.numel():
            return self.report(bucket)
        index, length = self._drawn(bucket)
        own = kernels.gather(grad, index).to(torch.promote_types(grad.dtype, torch.float32))
        comm = MeteredComm(comm)
        total = _sum(own, kernels.all_finite(grad), comm)
        grad.zero_()
        kernels.put_(grad, index, (total * length / P).to(grad.dtype))
        return self.report(bucket, comm.sent, index.numel(), index.numel())

    @property
    def has_residual(self) -> bool:
        return not self.unbiased

    def rollback(self, bucket: Bucket) -> None:
        if not self.unbiased:
            super().rollback(bucket)

    def state_dict(self) -> dict[str, Any]:  # Any: as Scheme
        return {} if self.unbiased else super().state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self.unbiased:
            Scheme.load_state_dict(self, state)
        else:
            super().load_state_dict(state)

    def _drawn(self, bucket: Bucket) -> tuple[Tensor, Tensor]:
        """Return k positions, ascending, and the lengths of the spans they were drawn from, int64 [k]."""
        n = bucket.grad.numel()
        k = count_for(self.density, n)
        edges = torch.arange(k + 1) * n // k
        start, length = edges[:-1], edges.diff()
        u = torch.rand(k, generator=generator(self.seed, f"random_k/{bucket.key}", bucket.step), dtype=torch.float64)
        device = bucket.grad.device
        return (start + (u * length).long()).to(device), length.to(device)


def _sum(value: Tensor, finite: bool, comm: Comm) -> Tensor:
    """Return the sum of `value` [k] over ranks, NaN where any rank is not `finite`."""
    if not finite:
        value[0] = torch.nan
    return comm.all_reduce(value)
