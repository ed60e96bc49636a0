"""Gradient streams and a runner that the tests of several sparse schemes share."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sparsync.base.scheme import Scheme
from sparsync.comm.local import LocalComm, LocalWorld
from sparsync.comm.metered import MeteredComm
from sparsync.core import Bucket, ParameterSpan, Report, Span


@dataclass(frozen=True)
class Seen:
    """What one rank held after one step."""

    grad: Tensor
    residual: Tensor
    report: Report


def whole_numbers(n: int, P: int, step: int) -> list[Tensor]:
    """A gradient for each rank, of small multiples of P: sums, means and residuals of them are exact."""
    draw = torch.Generator().manual_seed(step)
    return [torch.randint(-8, 9, (n,), generator=draw).float() * P for _ in range(P)]


def layered(n: int, P: int, step: int, scale: float = 1.0) -> list[Tensor]:
    """A heavy-tailed gradient for each rank, in 20 layers of scales e^N(0, 1)."""
    fixed = torch.Generator().manual_seed(7)
    scales = torch.randn(20, generator=fixed).exp().repeat_interleave(math.ceil(n / 20))[:n]
    draw = torch.Generator().manual_seed(1000 + step)
    return [
        torch.randn(n, generator=draw) * torch.randn(n, generator=draw).mul(0.7).exp() * scales * scale
        for _ in range(P)
    ]


def run(
    make: Callable[[], Scheme],
    P: int,
    steps: Sequence[list[Tensor]],
    first: int = 0,
    layout: tuple[ParameterSpan, ...] = (),
) -> list[list[Seen]]:
    """What each rank held after each step, [P][steps]; the counted traffic of every step is what its report says."""

    def body(comm: LocalComm) -> list[Seen]:
        metered, scheme, seen = MeteredComm(comm), make(), []
        for step, grads in enumerate(steps, start=first):
            bucket = Bucket("bucket", grads[comm.rank].clone(), step, layout)
            report = scheme.reduce(bucket, metered)
            assert metered.take()[0] == report.cost
            kept = scheme.state_dict()["residual"]
            residual = torch.cat([bucket.grad[:0], *(kept[slot.name] for slot in bucket.layout if slot.name in kept)])
            seen.append(Seen(bucket.grad, residual, report))
        return seen

    return LocalWorld(P).run(body)


def cut_in(lengths: dict[str, int]) -> tuple[ParameterSpan, ...]:
    """A layout of parameters of these lengths, in order."""
    slots, position = [], 0
    for name, length in lengths.items():
        slots.append(ParameterSpan(name, Span(position, position + length)))
        position += length
    return tuple(slots)
