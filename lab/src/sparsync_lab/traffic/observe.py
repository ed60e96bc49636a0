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
        local, union = [report.selected for report in reports], reports[0].union
        return {
            "kind": "step",
            "scheme": self.choice.label,
            "step": step,
            "elements": reports[0].elements,
            "asked": self.asked,
            "union": union,
            "density": reports[0].density,
            "local": local,
            "imbalance": max(local) * len(local) / sum(local) if sum(local) else 1.0,
            "bytes": [cost.nbytes for cost in sent],
            "messages": [cost.messages for cost in sent],
            "rounds": [cost.steps for cost in sent],
            **_quality(mean, written, union),
            "xi": xi(mean, gradient, written, self.asked),
            "residual_norm": self._update_residual(written),
            "staleness_max": int(self._age.max()),
        }

    def _update_residual(self, written: Tensor) -> float:
        """Read every rank's residual, update the waiting times, and return the norm over ranks and elements."""
        waiting, square = torch.zeros_like(written, dtype=torch.bool), 0.0
        self._left.zero_()
        for state in self._states:
            found = state.state_dict().get("residual")
            if found:
                parts = [found.get(each.name, torch.zeros(len(each.span))) for each in self.layout]
                residual = torch.cat(parts)
                self._left += residual
                square += float(torch.linalg.vector_norm(residual, dtype=torch.float64)) ** 2
                waiting |= residual != 0
        waiting &= written == 0
        self._age.add_(1).mul_(waiting)
        return math.sqrt(square)


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


def _quality(mean: Tensor, written: Tensor, union: int) -> Record:
    """Measure how much of `mean` [n] was written, and the most that `union` elements hold; None if there is nothing to write."""
    energy = float(mean.square().sum())
    if not energy or not math.isfinite(energy):
        return {"error": None, "captured": None, "best": None}
    largest = mean.abs().topk(union, sorted=False).values if union < mean.numel() else mean
    return {
        "error": float(torch.linalg.vector_norm(mean - written)) / math.sqrt(energy),
        "captured": float(written.double().square().sum()) / energy,
        "best": float(largest.square().sum()) / energy,
    }
