"""A world of ranks in one process, each with a state of the scheme: gradients, results, residuals, reports and traffic of every step."""

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
COUNT = 97  # elements of a bucket where nothing else is asked for; no multiple of any world's size


@dataclass(frozen=True)
class Step:
    """One reduction on all ranks: each list is in rank order."""

    number: int
    grads: list[Tensor]  # as they came in
    written: list[Tensor]
    residuals: list[Tensor]  # after the step
    reports: list[Report]
    counted: list[Cost]

    @property
    def size(self) -> int:
        """P, the number of ranks."""
        return len(self.grads)

    def where(self, rank: int | None = None) -> str:
        """Return the place of a failure: the world, the number of elements, the step and perhaps the rank."""
        place = f"P = {self.size}, n = {self.grads[0].numel()}, {self.grads[0].dtype}, step {self.number}"
        return place if rank is None else f"{place}, rank {rank}"


class InvariantError(AssertionError):
    """What `fail` raises; `check` puts the name of the invariant before its message."""


def fail(where: str, what: str) -> NoReturn:
    """Raise InvariantError that says where an invariant does not hold, and the two values."""
    raise InvariantError(f"{where}: {what}")


def layout(n: int) -> tuple[ParameterSpan, ...]:
    """Return five parameters of uneven lengths that cover n elements; with few elements some are empty."""
    stops = [0, n // 5, n // 5 + n // 3, n // 5 + n // 3 + n // 16, n - n // 8, n]
    return tuple(ParameterSpan(name, Span(stops[i], stops[i + 1])) for i, name in enumerate(NAMES))


def flat_residual(state: State, parameters: Sequence[ParameterSpan], like: Tensor) -> Tensor:
    """Return the residual of these parameters, [n], in their order; zero where it has none."""
    by_name = state.state_dict().get("residual", {})
    dtype = torch.promote_types(like.dtype, torch.float32)
    return torch.cat([residual_of(by_name, each.name, len(each.span), dtype) for each in parameters])


def residual_of(by_name: Mapping[str, Tensor], name: str, count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the residual of one parameter, [count], or zeros."""
    residual = by_name.get(name, torch.zeros(count, dtype=dtype))
    if residual.shape != (count,):
        fail(f"the residual of parameter {name!r}", f"it has shape {tuple(residual.shape)}, it must be ({count},)")
    return residual


def started(scheme: Scheme, P: int) -> list[State]:
    """Return a new state of `scheme` for each of P ranks."""
    return [scheme.start() for _ in range(P)]


def run(
    states: Sequence[State],
    gradients: Sequence[Sequence[Tensor]],
    first_step: int = 0,
    parameters: tuple[ParameterSpan, ...] | None = None,
    key: str = "bucket0",
) -> list[Step]:
    """Reduce `gradients[step][rank]` one step after the other; state r is that of rank r. The gradients themselves are not changed.

    `parameters` are the layout of the bucket called `key`; without them it has the five of `layout`.
    """
    steps = [Step(first_step + number, list(grads), [], [], [], []) for number, grads in enumerate(gradients)]
    own = parameters if parameters is not None else layout(gradients[0][0].numel())

    def body(comm: MeteredComm) -> list[tuple[Tensor, Tensor, Report, Cost]]:
        seen = []
        for number, grads in enumerate(gradients):
            bucket = Bucket(key, grads[comm.rank].clone(), first_step + number, own)
            report = states[comm.rank].reduce(bucket, comm)
            residual = flat_residual(states[comm.rank], own, bucket.grad)
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
    """Return gradients[step][rank] of small multiples of `unit` (default: P), whose sums and their P-th parts are exact."""
    source = torch.Generator().manual_seed(0)
    factor = unit if unit is not None else P
    return [[(factor * torch.randint(-4, 5, (n,), generator=source)).to(dtype) for _ in range(P)] for _ in range(steps)]


def reals(P: int, n: int, steps: int) -> list[list[Tensor]]:
    """Return gradients[step][rank] whose sum depends on the order of the additions."""
    source = torch.Generator().manual_seed(0)
    return [[torch.randn(n, generator=source) for _ in range(P)] for _ in range(steps)]


def extremes(P: int, n: int, dtype: torch.dtype) -> list[list[Tensor]]:
    """Return gradients[step][rank] of magnitudes from 1/1000 to 1000, and in two of five steps of the largest finite numbers.

    One rank has these, and another the negative ones of some of them, so that sums over ranks are finite.
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
    """Return the sum over ranks in float64, which is exact for integers."""
    return torch.stack([part.double() for part in parts]).sum(dim=0)


def same_bits(x: Tensor, y: Tensor) -> bool:
    """Return true for tensors that are equal to the last bit, NaN and the sign of zero included."""
    return x.dtype == y.dtype and torch.equal(x.view(torch.uint8), y.view(torch.uint8))
