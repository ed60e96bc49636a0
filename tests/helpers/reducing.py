"""Reduce once on all ranks of a world in one process, with checks, and return the residuals."""

from collections.abc import Sequence

import torch
from torch import Tensor

from sparsync import Report
from sparsync.core import laid_out
from sparsync.schemes import State
from sparsync.testing import world


def reduced(states: Sequence[State], given: list[Tensor], step: int = 0) -> tuple[Tensor, list[Report], list[Tensor]]:
    """Reduce, and return the common mean, the reports and the residuals; checks that reports state the counted bytes."""
    (done,) = world.run(states, [given], step, laid_out([("w", len(given[0]))]), "w")
    assert done.counted == [report.cost for report in done.reports]
    assert all(torch.allclose(mean, done.written[0], rtol=0, atol=0, equal_nan=True) for mean in done.written)
    return done.written[0], done.reports, done.residuals
