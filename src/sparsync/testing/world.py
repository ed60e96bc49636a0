"""A world of ranks in one process that records gradients, results, residuals, reports and traffic of every step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor

from sparsync.base.scheme import Scheme
from sparsync.base.state import State
from sparsync.comm.local import LocalWorld
from sparsync.comm.metered import MeteredComm
from sparsync.core import Bucket, Cost, ParameterSpan, Report, Span

NAMES = ("embed.weight", "block.weight", "block.bias", "head.weight", "head.bias")
COUNT = 97  # the default number of elements of a bucket, not a multiple of any world's size


@dataclass(frozen=True)
class Step:
    """One reduction on all ranks; lists are in rank order."""

    number: int
    grads: list[Tensor]  # before the step
    written: list[Tensor]
    residuals: list[Tensor]  # after the step
    reports: list[Report]
    counted: list[Cost]

    @property
    def size(self) -> int:
        """P, the number of ranks."""
        return len(self.grads)

    def where(self, rank: int | None = None) -> str:
        """Describe the place of a failure: the world, the number of elements, the step and perhaps the rank."""
        place = f"P = {self.size}, n = {self.grads[0].numel()}, {self.grads[0].dtype}, step {self.number}"
        return place if rank is None else f"{place}, rank {rank}"


class InvariantError(AssertionError):
    """The error of `fail`; `check` prefixes its message with the name of the invariant."""


def fail(where: str, what: str) -> NoReturn:
    """Raise InvariantError with the place of the failure and the two values."""
    raise InvariantError(f"{where}: {what}")


def layout(n: int) -> tuple[ParameterSpan, ...]:
    """Lay out five parameters of uneven lengths over n elements; with few elements some are empty."""
    stops = [0, n // 5, n // 5 + n // 3, n // 5 + n // 3 + n // 16, n - n // 8, n]
    return tuple(ParameterSpan(name, Span(stops[i], stops[i + 1])) for i, name in enumerate(NAMES))


def flat_residual(state: State, parameters: Sequence[ParameterSpan], like: Tensor) -> Tensor:
    """Return the residual of these parameters, [n], in order; zero where there is none."""
    by_name = state.state_dict().get("residual", {})
    dtype = torch.promote_types(like.dtype, torch.float32)
    return torch.cat([residual_of(by_name, entry.name, len(entry.span), dtype) for entry in parameters])


def residual_of(by_name: Mapping[str, Tensor], name: str, count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the residual of one parameter, [count], or zeros."""
    residual = by_name.get(name, torch.zeros(count, dtype=dtype))
    if residual.shape != (count,):
        fail(f"the residual of parameter {name!r}", f"it has shape {tuple(residual.shape)}, it must be ({count},)")
    return residual


def started(scheme: Scheme, P: int) -> list[State]:
    """Create states of `scheme` for P ranks."""
    return [scheme.start() for _ in range(P)]


def run(
    states: Sequence[State],
    gradients: Sequence[Sequence[Tensor]],
    first_step: int = 0,
    parameters: tuple[ParameterSpan, ...] | None = None,
    key: str = "bucket0",
) -> list[Step]:
    """Reduce copies of `gradients[step][rank]` step by step; `states` are in rank order.

    `parameters` is the layout of the bucket called `key`; None: `layout`.
    """
    steps = [Step(first_step + number, list(grads), [], [], [], []) for number, grads in enumerate(gradients)]
    entries = parameters if parameters is not None else layout(gradients[0][0].numel())

    def body(comm: MeteredComm) -> list[tuple[Tensor, Tensor, Report, Cost]]:
        seen = []
        for number, grads in enumerate(gradients):
            bucket = Bucket(key, grads[comm.rank].clone(), first_step + number, entries)
            report = states[comm.rank].reduce(bucket, comm)
            residual = flat_residual(states[comm.rank], entries, bucket.grad)
            seen.append((bucket.grad, residual, report, comm.take()[0]))
        return seen

    for rank_seen in LocalWorld(len(states)).run(lambda comm: body(MeteredComm(comm))):
        for step, (written, residual, report, counted) in zip(steps, rank_seen, strict=True):
            step.written.append(written)
            step.residuals.append(residual)
            step.reports.append(report)
            step.counted.append(counted)
    return steps


def integers(
    P: int, n: int, steps: int, unit: int | None = None, dtype: torch.dtype = torch.float32
) -> list[list[Tensor]]:
    """Draw gradients[step][rank] of small multiples of `unit` (default: P), whose sums are exact, also divided by P."""
    source = torch.Generator().manual_seed(0)
    factor = unit if unit is not None else P
    return [[(factor * torch.randint(-4, 5, (n,), generator=source)).to(dtype) for _ in range(P)] for _ in range(steps)]


def reals(P: int, n: int, steps: int) -> list[list[Tensor]]:
    """Draw gradients[step][rank] whose sums depend on the order of the additions."""
    source = torch.Generator().manual_seed(0)
    return [[torch.randn(n, generator=source) for _ in range(P)] for _ in range(steps)]


def extremes(P: int, n: int, dtype: torch.dtype) -> list[list[Tensor]]:
    """Draw gradients[step][rank] of magnitudes from 1/1000 to 1000, in two of five steps with the largest finite numbers.

    One rank has these, and another the negatives of some of them, so that sums over ranks are finite.
    """
    source, scale = torch.Generator().manual_seed(0), torch.logspace(-3, 3, n, dtype=torch.float64)
    grads = [
        [(scale * torch.randn(n, generator=source, dtype=torch.float64)).to(dtype) for _ in range(P)] for _ in range(5)
    ]
    for step in (2, 3):
        grads[step][P - 1][::10] = torch.finfo(dtype).max
        if P > 1:
            grads[step][0][::20] = -torch.finfo(dtype).max
    return grads


def integer_sum(parts: Sequence[Tensor]) -> Tensor:
    """Sum over ranks in float64, exact for integers."""
    return torch.stack([part.double() for part in parts]).sum(dim=0)


def same_bits(x: Tensor, y: Tensor) -> bool:
    """Return whether two tensors have the same type and bits, including NaN and the sign of zero."""
    return x.dtype == y.dtype and torch.equal(x.view(torch.uint8), y.view(torch.uint8))
