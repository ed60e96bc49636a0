"""Selective SkipReduce that measures which parameters are sensitive: those on which the ranks disagree most.

The authors judge layers offline (MICRO 2025, doi 10.1145/3725843.3756092). Here the first steps measure the disagreement.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields

import torch
from torch import Tensor
from typing_extensions import Self

from sparsync.base.scheme import Scheme
from sparsync.base.state import State
from sparsync.comm.metered import MeteredComm
from sparsync.core import Bucket, Comm, Divisor, ParameterSpan, Report, exact_divisor
from sparsync.schemes.skip_reduce import Form, Mode, SkipReduce


@dataclass(frozen=True)
class AutoProtect(Scheme):
    """Reduce densely for `observe_steps` steps, then by `scheme`, which never skips the parameters of largest disagreement.

    With g_r the gradient of rank r and g the mean gradient, disagreement is the mean over ranks of |g_r - g|^2 = mean |g_r|^2 - |g|^2 per
    element: the gain of protecting a parameter relative to its cost.
    """

    scheme: SkipReduce = field(default_factory=SkipReduce)
    share: float = 0.05  # at most this share of all elements is protected (the authors protect 4.1 % of VGG-19)
    observe_steps: int = 8  # dense steps of a parameter that measure the disagreement

    name = "auto_protect"
    interleaves = False  # the choice of protected layers depends on all buckets

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise ValueError(f"share must be in [0, 1], the share of elements to protect, got {self.share}")
        if self.observe_steps < 1:
            raise ValueError(f"observe_steps must be at least 1, got {self.observe_steps}")
        if self.scheme.protect:
            raise ValueError(
                f"AutoProtect chooses what its scheme protects, got protect={tuple(self.scheme.protect)}; leave it out"
            )

    @classmethod
    def skip_reduce(
        cls,
        skip: int | float = 0.5,
        mode: Mode = "random",
        divide_by: Divisor | None = None,
        form: Form = "ring",
        feedback: bool = False,
        seed: int = 0,
        node_size: int = 1,
        share: float = 0.05,
        observe_steps: int = 8,
    ) -> Self:
        """Create a SkipReduce with these settings that measures which parameters it must not skip."""
        inner = SkipReduce(
            skip, mode, divide_by=divide_by, form=form, feedback=feedback, seed=seed, node_size=node_size
        )
        return cls(inner, share, observe_steps)

    @property
    def inner(self) -> dict[str, Scheme]:
        """The scheme inside."""
        return {"scheme": self.scheme}

    def parts(self, bucket: Bucket) -> dict[str, Bucket]:
        return {"scheme": bucket}

    def reduce(self, state: State, bucket: Bucket, comm: Comm) -> Report:
        observing = comm.size > 1 and self._observing(state, bucket)
        protected = [name for name, kept in state.common("protected").items() if kept]
        protect = [entry.name for entry in bucket.layout] if observing else protected
        comm = MeteredComm(comm)
        squares = square_norms(bucket.layout, bucket.grad) if observing else None
        report = self.scheme.reduce_protecting(protect, state.inner["scheme"], bucket, comm)
        if squares is not None:
            mean_square = comm.all_reduce(squares) / exact_divisor(squares, comm.size)
            Disagreement.of(state).observe(bucket.layout, mean_square, bucket.grad)
        return self.report(bucket, comm.sent, report.selected, report.union, report.details)

    def send_all(self, state: State, bucket: Bucket, comm: Comm) -> Report:
        report = state.inner["scheme"].send_all(bucket, comm)
        return self.report(bucket, report.cost, report.selected, report.union, report.details)

    @property
    def has_residual(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]  # nobody sets it
        return self.scheme.has_residual

    def _observing(self, state: State, bucket: Bucket) -> bool:
        """Return whether this bucket still needs measuring; once all is measured, choose the protected parameters."""
        if state.common("protected"):
            return False
        disagreement = Disagreement.of(state)
        if any(disagreement.steps.get(entry.name, 0) < self.observe_steps for entry in bucket.layout):
            return True
        chosen = disagreement.most(self.share)
        state.common("protected").update({name: name in chosen for name in disagreement.steps})
        return False


@dataclass(frozen=True)
class Disagreement:
    """The disagreement of the ranks by parameter, measured over some steps; the same numbers on every rank."""

    variance: dict[str, float] = field(default_factory=dict)  # per element, summed over the observed steps
    elements: dict[str, int] = field(default_factory=dict)
    steps: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, state: State) -> Self:
        """Return the measurements in `state`, for reading and writing."""
        return cls(*(state.common(entry.name) for entry in fields(cls)))

    def observe(self, layout: Sequence[ParameterSpan], mean_square: Tensor, mean: Tensor) -> None:
        """Add one step: `mean_square[i]` is the mean over ranks of |g_r|^2 for parameter i, `mean` [n] the mean gradient."""
        # A host sync: the choice of protected parameters depends on it.
        totals: list[float] = (mean_square - square_norms(layout, mean)).tolist()
        for entry, total in zip(layout, totals, strict=True):
            gained = max(0.0, total) / max(1, len(entry.span))  # NaN is not above 0
            self.variance[entry.name] = self.variance.get(entry.name, 0.0) + gained
            self.elements[entry.name] = len(entry.span)
            self.steps[entry.name] = self.steps.get(entry.name, 0) + 1

    def most(self, share: float) -> tuple[str, ...]:
        """Choose the parameters of largest variance per element that together have at most `share` of all elements seen."""
        budget = share * sum(self.elements.values())
        chosen: list[str] = []
        for name in sorted(self.variance, key=lambda name: (-self.variance[name] / self.steps[name], name)):
            if self.elements[name] <= budget:
                chosen.append(name)
                budget -= self.elements[name]
        return tuple(sorted(chosen))


def square_norms(layout: Sequence[ParameterSpan], grad: Tensor) -> Tensor:
    """Compute |g|^2 by parameter, float64 [parameters]."""
    squares = grad.to(torch.float64, copy=True).square_()
    # A sum of magnitudes: torch has no sum of many tensors in one launch.
    parts = [entry.span.of(squares) for entry in layout]
    return torch.stack(torch._foreach_norm(parts, 1))  # pyright: ignore[reportPrivateImportUsage]
