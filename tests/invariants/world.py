"""A world of ranks, each with a scheme of its own, and everything that can be seen of it from outside."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from invariants.table import ROWS, Row
from sparsync import Bucket, Cost, LocalWorld, MeteredComm, ParameterSpan, Report, Span
from sparsync.base.scheme import Scheme

NAMES = ("embed.weight", "block.weight", "block.bias", "head.weight", "head.bias")
COUNT = 97


@dataclass(frozen=True)
class Step:
    """One reduction on all ranks: each list is in rank order."""

    grads: list[Tensor]  # as they came in
    written: list[Tensor]
    residuals: list[Tensor]  # after the step
    reports: list[Report]
    counted: list[Cost]


def layout(n: int) -> tuple[ParameterSpan, ...]:
    """Five parameters of uneven size; with few elements some are empty."""
    stops = [0, n // 5, n // 5 + n // 3, n // 5 + n // 3 + n // 16, n - n // 8, n]
    return tuple(ParameterSpan(name, Span(stops[i], stops[i + 1])) for i, name in enumerate(NAMES))


def flat_residual(scheme: Scheme, slots: Sequence[ParameterSpan], like: Tensor) -> Tensor:
    """What the scheme keeps back for these parameters, in their order; zero where it keeps nothing."""
    kept = scheme.state_dict().get("residual", {})
    dtype = torch.promote_types(like.dtype, torch.float32)
    return torch.cat([kept.get(slot.name, torch.zeros(len(slot.span), dtype=dtype)) for slot in slots])


def run(
    schemes: Sequence[Scheme],
    gradients: Sequence[Sequence[Tensor]],
    first_step: int = 0,
    slots: tuple[ParameterSpan, ...] | None = None,
    key: str = "bucket0",
) -> list[Step]:
    """Reduces `gradients[step][rank]` one step after the other; scheme r works for rank r."""
    steps = [Step(list(grads), [], [], [], []) for grads in gradients]
    lay = slots if slots is not None else layout(gradients[0][0].numel())

    def body(comm: MeteredComm) -> list[tuple[Tensor, Tensor, Report, Cost]]:
        seen = []
        for number, grads in enumerate(gradients):
            bucket = Bucket(key, grads[comm.rank].clone(), first_step + number, lay)
            report = schemes[comm.rank].reduce(bucket, comm)
            residual = flat_residual(schemes[comm.rank], lay, bucket.grad)
            seen.append((bucket.grad, residual, report, comm.take()[0]))
        return seen

    for rank_seen in LocalWorld(len(schemes)).run(lambda comm: body(MeteredComm(comm))):
        for step, (written, residual, report, counted) in zip(steps, rank_seen, strict=True):
            step.written.append(written)
            step.residuals.append(residual)
            step.reports.append(report)
            step.counted.append(counted)
    return steps


def silence(schemes: Sequence[Scheme], n: int, first_step: int, at_most: int) -> list[Step]:
    """Steps of zero gradients until nothing is kept back any more; fails after `at_most`."""
    steps: list[Step] = []
    while not steps or any(residual.any() for residual in steps[-1].residuals):
        assert len(steps) < at_most, f"after {at_most} steps without gradient something is still kept back"
        zeros = [torch.zeros(n) for _ in schemes]
        steps += run(schemes, [zeros] * min(4, at_most - len(steps)), first_step=first_step + len(steps))
    return steps


def integers(
    P: int, n: int, steps: int, unit: int | None = None, dtype: torch.dtype = torch.float32
) -> list[list[Tensor]]:
    """Small multiples of `unit` (P unless told), different on each rank: sums and their P-th parts are exact."""
    source = torch.Generator().manual_seed(0)
    factor = unit if unit is not None else P
    return [[(factor * torch.randint(-4, 5, (n,), generator=source)).to(dtype) for _ in range(P)] for _ in range(steps)]


def reals(P: int, n: int, steps: int) -> list[list[Tensor]]:
    """Numbers whose sum depends on the order of the additions."""
    source = torch.Generator().manual_seed(0)
    return [[torch.randn(n, generator=source) for _ in range(P)] for _ in range(steps)]


def marks(P: int, n: int, steps: int, bits: int) -> list[list[Tensor]]:
    """2^r from rank r in every element, so that the bits of a sum tell who is in it; with few bits, some ranks at each step."""
    groups = -(-P // bits)
    return [
        [torch.full((n,), float(2 ** (rank % bits)) if rank // bits == step % groups else 0.0) for rank in range(P)]
        for step in range(steps)
    ]


def integer_sum(parts: Sequence[Tensor]) -> Tensor:
    """The exact sum of integers, in float64."""
    return torch.stack([part.double() for part in parts]).sum(dim=0)


def same_bits(x: Tensor, y: Tensor) -> bool:
    """Equal to the last bit, NaN and the sign of zero included."""
    return x.dtype == y.dtype and torch.equal(x.view(torch.uint8), y.view(torch.uint8))


def assert_mass(steps: Sequence[Step], before: Tensor) -> None:
    """Each step: residuals after it + P * what was written == residuals before it + what came in; exact for integers."""
    for step in steps:
        came_in = before + integer_sum(step.grads)
        before = integer_sum(step.residuals)
        assert torch.equal(before + len(step.grads) * step.written[0].double(), came_in)


def assert_replicas(steps: Sequence[Step]) -> None:
    """Every rank wrote the same bits, in the type its gradient came in."""
    for step in steps:
        assert all(same_bits(written, step.written[0]) for written in step.written)
        assert step.written[0].dtype == step.grads[0].dtype


def assert_traffic(steps: Sequence[Step]) -> None:
    """What each rank's communicator counted is what its report says in closed form."""
    for step in steps:
        assert step.counted == [report.cost for report in step.reports]


@cache
def trace(id: str, P: int) -> tuple[Step, ...]:
    """Some exact steps of a row in a world of P ranks, then one with reals, run once for all invariants.

    Rows with a residual see integers, the others marks.
    """
    row = next(row for row in ROWS if row.id == id)
    count = row.observes + 2
    exact = integers(P, COUNT, count, dtype=row.exact_in) if row.has_residual else marks(P, COUNT, count, row.wire_bits)
    return tuple(run([row.make() for _ in range(P)], [*exact, *reals(P, COUNT, 1)]))


def exact_steps(row: Row, P: int) -> tuple[Step, ...]:
    return trace(row.id, P)[: row.observes + 2]
