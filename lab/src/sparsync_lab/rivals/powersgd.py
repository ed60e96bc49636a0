"""PowerSGD: each matrix of the gradient as the product of two thin ones, from one step of power iteration (arXiv 1905.13727).

Both steps are linear up to the orthogonalisation, so factors are summed by all-reduce, and traffic does not grow with the number of ranks.

Differs from the paper: the residual is acc - p q_r with the rank's own q_r, which leaves the same sum over ranks as acc - p q but does not
accumulate the differences between ranks; Householder's QR replaces Gram-Schmidt, so that matrices of lower rank need no added noise; q is
kept with columns of length 1; and factors may be sent in 8 or 4 bits, whose rounding joins the residual. A parameter of unknown shape
counts as a matrix as square as possible. Replicas are bit-identical if ranks have the same kind of processor.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import isqrt
from typing import Literal

import torch
from torch import Tensor

from sparsync import Bucket, Comm, ErrorFeedbackScheme
from sparsync.base.error_feedback import DenseUpdate
from sparsync.collectives.values import quantized_all_reduce_
from sparsync.core import ParameterSpan, SpanSet, check_one_of, generator, phase
from sparsync.feedback import Residuals
from sparsync.schemes import Accumulator, Span, State
from sparsync.wire import ValueCodec

Factors = Literal["float32", "int8", "int4"]

# Smaller matrices of one shape are copied together and multiplied by one call; larger ones are multiplied in place.
_SMALL = 1 << 16


@dataclass(frozen=True)
class PowerSGD(ErrorFeedbackScheme):
    """Write, for each matrix of the bucket, its approximation of rank `rank`, and all else as its mean (arXiv 1905.13727).

    A tensor of more than two dimensions counts as a matrix of the first dimension and the rest. NaN or Inf on any rank shows in the
    gradient of every rank and changes nothing else.
    """

    rank: int = 4  # columns of the factors; 1 to 4 in the paper
    factors: Factors = "float32"  # format of both factors, and of parameters sent whole
    # A matrix a x b is factored if a b is at least this many times rank (a + b), and otherwise sent whole.
    least_saving: float = 2.0
    seed: int = 0  # of the first q; the same on every rank
    residuals: Residuals = "float32"

    name = "powersgd"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rank < 1:
            raise ValueError(f"rank must be at least 1, the columns of the factors, got {self.rank}")
        check_one_of("factors", self.factors, Factors)
        if self.least_saving <= 0:
            raise ValueError(
                f"least_saving must be above 0, how many times shorter factors are than their matrix, got {self.least_saving}"
            )

    def step(self, state: State, acc: Accumulator, bucket: Bucket, comm: Comm) -> DenseUpdate:
        plan, values = factored(bucket.layout, self.rank, self.least_saving), acc.values
        right = state.common("right")  # q of each matrix by parameter name, [b, r]
        with phase("encode"):
            whole = plan.whole.take(values)
            stacks = [group.stacked(values) for group in plan.groups]  # m, [count, a, b]
            rights = [self._right(right, group, values) for group in plan.groups]  # q, [count, b, r]
            lefts = [torch.bmm(m, q) for m, q in zip(stacks, rights, strict=True)]  # p = m q, [count, a, r]
        mean, error = self._mean(torch.cat([whole, *map(_flat, lefts)]), comm)
        with phase("decode"):
            written = torch.empty_like(values)
            plan.whole.put_(written, mean[: whole.numel()])
            bases = [torch.linalg.qr(p).Q for p in _like(lefts, mean[whole.numel() :])]
        means: list[Tensor] = []
        if plan.groups:
            with phase("encode"):
                rights = [torch.bmm(m.mT, p) for m, p in zip(stacks, bases, strict=True)]  # q_r = m^T p, [count, b, r]
            sums, dropped = self._mean(torch.cat(list(map(_flat, rights))), comm)
            with phase("decode"):
                means = _like(rights, sums)
                sent = zip(plan.groups, stacks, bases, means, rights, _like(rights, dropped), strict=True)
                for group, m, p, q, own, rounded in sent:
                    group.put_(written, torch.bmm(p, q.mT))
                    # In place: m is a view of acc, or a copy that is written back there.
                    group.put_(values, m.baddbmm_(p, (own - rounded).mT, alpha=-1))
        plan.whole.put_(values, error[: whole.numel()])

        def commit() -> None:
            for group, q in zip(plan.groups, means, strict=True):
                self._keep(right, group, q)

        details = {"matrices": sum(len(group.names) for group in plan.groups), "sent_whole": len(plan.whole)}
        return DenseUpdate(written, values, details=details, commit=commit)

    def _mean(self, value: Tensor, comm: Comm) -> tuple[Tensor, Tensor]:
        """Compute the mean of `value` [k] over ranks, and this rank's rounding error, [k]."""
        if self.factors == "float32":
            return comm.all_reduce(value) / comm.size, torch.zeros_like(value)
        error = value.clone()
        return quantized_all_reduce_(error, comm, ValueCodec(self.factors)).decoded(), error

    def _right(self, right: dict[str, Tensor], group: "_Group", like: Tensor) -> Tensor:
        """Stack q of each matrix of a group, [count, b, r]: from the last step, or at first random but the same on every rank."""
        shape = (group.columns, group.rank)
        for name in group.names:
            if name not in right or right[name].shape != shape:
                right[name] = torch.randn(shape, generator=generator(self.seed, name, 0))
        return torch.stack([right[name].to(like) for name in group.names])

    def _keep(self, right: dict[str, Tensor], group: "_Group", q: Tensor) -> None:
        """Keep the normalised columns of q [count, b, r] for the next step; for a zero column, the previous one."""
        length = q.norm(dim=1, keepdim=True)
        kept = torch.where(length > 0, q / length, self._right(right, group, q))
        right.update(zip(group.names, kept.unbind(), strict=True))


@dataclass(frozen=True)
class _Group:
    """Matrices of one shape that are multiplied together."""

    names: tuple[str, ...]
    spans: tuple[Span, ...]
    rows: int
    columns: int
    rank: int

    def stacked(self, x: Tensor) -> Tensor:
        """Stack the matrices in `x` [n], [count, a, b]: a view of one matrix, a copy of several."""
        views = [span.of(x).view(self.rows, self.columns) for span in self.spans]
        return views[0][None] if len(views) == 1 else torch.stack(views)

    def put_(self, x: Tensor, stack: Tensor) -> None:
        """Write the matrices [count, a, b] to their places in `x` [n]."""
        for span, matrix in zip(self.spans, stack, strict=True):
            place = span.of(x).view(self.rows, self.columns)
            if place.data_ptr() != matrix.data_ptr():
                place.copy_(matrix)


@dataclass(frozen=True)
class _Plan:
    """The parts of a bucket that are factored, and those sent whole."""

    groups: tuple[_Group, ...]
    whole: SpanSet


@lru_cache(maxsize=256)
def factored(layout: tuple[ParameterSpan, ...], rank: int, least_saving: float) -> _Plan:
    members: dict[tuple[int, int, str], list[tuple[str, Span]]] = {}
    whole: list[ParameterSpan] = []
    for entry in layout:
        a, b = _as_matrix(entry)
        if min(a, b) < 1 or a * b < least_saving * min(rank, a, b) * (a + b):
            whole.append(entry)
            continue
        matrix, rest = Span(entry.span.start, entry.span.start + a * b), Span(entry.span.start + a * b, entry.span.stop)
        alone = entry.name if a * b >= _SMALL else ""
        members.setdefault((a, b, alone), []).append((entry.name, matrix))
        if len(rest):
            whole.append(ParameterSpan(entry.name, rest))
    groups = [
        _Group(tuple(name for name, _ in found), tuple(span for _, span in found), a, b, min(rank, a, b))
        for (a, b, _), found in members.items()
    ]
    return _Plan(tuple(groups), SpanSet.of(whole))


def _as_matrix(entry: ParameterSpan) -> tuple[int, int]:
    """Choose rows and columns of a parameter; (1, n) for a vector, and a product of nearly n if its shape is unknown."""
    n = len(entry.span)
    if not entry.shape:
        rows = max(1, isqrt(n))
        return rows, n // rows
    return (entry.shape[0], n // entry.shape[0]) if len(entry.shape) > 1 and n else (1, n)


def _flat(stack: Tensor) -> Tensor:
    """Concatenate the columns of thin matrices [count, a, r], so that each has its own scale."""
    return stack.mT.reshape(-1)


def _like(stacks: Sequence[Tensor], flat: Tensor) -> list[Tensor]:
    """Undo `_flat` for matrices of the shapes of `stacks`."""
    parts = flat.split([stack.numel() for stack in stacks])
    return [part.view(stack.mT.shape).mT for part, stack in zip(parts, stacks, strict=True)]
