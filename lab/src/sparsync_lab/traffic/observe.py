"""Observe one scheme on all ranks of a LocalWorld: its traffic, selections, result and residual at each step."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sparsync import Bucket, Report
from sparsync.comm import Cost, LocalWorld, MeteredComm
from sparsync.comm.local import LocalComm
from sparsync.core import ParameterSpan, count_for
from sparsync.testing.world import flat_residual
from sparsync_lab.scheme_choice import SchemeChoice

Record = dict[str, Any]  # Any: JSON


class Observed:
    """One scheme under observation: its state on each rank, and how long each element has waited."""

    def __init__(self, choice: SchemeChoice, ranks: int, layout: Sequence[ParameterSpan]) -> None:
        self.choice, self.layout = choice, tuple(layout)
        n, scheme = self.layout[-1].span.stop, choice.make()
        self._states = [scheme.start() for _ in range(ranks)]
        self._left = torch.zeros(n, dtype=torch.float64)  # the sum of all ranks' residuals
        self._age = torch.zeros(n, dtype=torch.int32)  # steps since an element was last written or had no residual
        density = getattr(scheme, "density_down", None) or getattr(scheme, "density", None)
        self.asked = n if density is None else count_for(density, n)  # k

    def reduce(self, step: int, gradients: Sequence[Tensor]) -> Record:
        """Reduce every rank's gradient at one step, and record it. The gradients are not changed."""

        def body(comm: LocalComm) -> tuple[Report, Cost, Tensor]:
            metered = MeteredComm(comm)
            bucket = Bucket("traffic", gradients[comm.rank].clone(), step, self.layout)
            report = self._states[comm.rank].reduce(bucket, metered)
            return report, metered.take()[0], bucket.grad

        seen = LocalWorld(len(gradients)).run(body)
        reports, sent, written = [report for report, _, _ in seen], [cost for _, cost, _ in seen], seen[0][2]
        gradient = torch.zeros_like(self._left)  # mean over ranks
        for each in gradients:
            gradient += each
        gradient /= len(gradients)
        mean = self._left / len(gradients) + gradient
        local = [report.selected for report in reports]
        self._update_residual(written)
        return {
            "scheme": self.choice.label,
            "elements": reports[0].elements,
            "asked": self.asked,
            "union": reports[0].union,
            "local": local,
            "imbalance": max(local) * len(local) / sum(local) if sum(local) else 1.0,
            "bytes": [cost.nbytes for cost in sent],
            "rounds": [cost.steps for cost in sent],
            "captured": _captured(mean, written),
            "xi": xi(mean, gradient, written, self.asked),
            "staleness_max": int(self._age.max()),
        }

    def _update_residual(self, written: Tensor) -> None:
        """Read every rank's residual, and update the waiting times."""
        waiting = torch.zeros_like(written, dtype=torch.bool)
        self._left.zero_()
        for state in self._states:
            residual = flat_residual(state, self.layout, written)
            self._left += residual
            waiting |= residual != 0
        waiting &= written == 0
        self._age.add_(1).mul_(waiting)


def xi(mean: Tensor, gradient: Tensor, written: Tensor, k: int) -> float | None:
    """Compute the constant of Ok-Topk's convergence assumption (arXiv 2201.07598); None without a gradient.

    It is |the k largest of `mean` - `written`| / |`gradient`|, where `mean` [n] is the mean of gradient and residual over the ranks,
    `gradient` [n] that of the gradients alone, and `written` [n] what the scheme made of them.
    """
    norm = float(torch.linalg.vector_norm(gradient))
    if not norm or not math.isfinite(norm):
        return None
    largest = torch.zeros_like(mean)
    top = mean.abs().topk(k, sorted=False).indices
    largest[top] = mean[top]
    return float(torch.linalg.vector_norm(largest - written)) / norm


def _captured(mean: Tensor, written: Tensor) -> float | None:
    """Compute the share of the energy of `mean` [n] that was written; None if there is nothing to write."""
    energy = float(mean.square().sum())
    return float(written.double().square().sum()) / energy if energy and math.isfinite(energy) else None
