"""Gradient streams and a runner, shared by the tests of several sparse schemes."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sparsync.base.scheme import Scheme
from sparsync.core import Report, laid_out
from sparsync.testing import world


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


def run(make: Callable[[], Scheme], P: int, steps: Sequence[list[Tensor]]) -> list[list[RankState]]:
    """Reduce on all ranks and return their states, [P][steps]; checks that every report states the counted traffic."""
    layout = laid_out([("bucket", len(steps[0][0]))])
    found = world.run(world.started(make(), P), steps, 0, layout, "bucket")
    assert all(each.counted == [report.cost for report in each.reports] for each in found)
    return [[RankState(each.written[r], each.residuals[r], each.reports[r]) for each in found] for r in range(P)]
