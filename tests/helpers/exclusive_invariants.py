"""Gradient streams and a runner, shared by the tests of several sparse schemes."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sparsync.base.scheme import Scheme
from sparsync.comm.local import LocalComm, LocalWorld
from sparsync.comm.metered import MeteredComm
from sparsync.core import Bucket, ParameterSpan, Report, laid_out


@dataclass(frozen=True)
class RankState:
    """The state of one rank after one step."""

    grad: Tensor
    residual: Tensor
    report: Report


def whole_numbers(n: int, P: int, step: int) -> list[Tensor]:
    """Draw a gradient per rank, of small multiples of P, whose sums, means and residuals are exact."""
    draw = torch.Generator().manual_seed(step)
    return [torch.randint(-8, 9, (n,), generator=draw).float() * P for _ in range(P)]


def layered(n: int, P: int, step: int, scale: float = 1.0) -> list[Tensor]:
    """Draw a heavy-tailed gradient per rank, in 20 layers of scales e^N(0, 1)."""
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
) -> list[list[RankState]]:
    """Reduce on all ranks and return their states, [P][steps]; checks that every report states the counted traffic."""

    def body(comm: LocalComm) -> list[RankState]:
        metered, state, seen = MeteredComm(comm), make().start(), []
        for step, grads in enumerate(steps, start=first):
            bucket = Bucket("bucket", grads[comm.rank].clone(), step, layout)
            report = state.reduce(bucket, metered)
            assert metered.take()[0] == report.cost
            by_name = state.state_dict()["residual"]
            parts = [by_name[each.name] for each in bucket.layout if each.name in by_name]
            residual = torch.cat([bucket.grad[:0], *parts])
            seen.append(RankState(bucket.grad, residual, report))
        return seen

    return LocalWorld(P).run(body)


def cut_in(lengths: dict[str, int]) -> tuple[ParameterSpan, ...]:
    """Lay out parameters of these lengths in order."""
    return laid_out(lengths.items())
