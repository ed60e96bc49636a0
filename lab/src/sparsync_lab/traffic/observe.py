"""One scheme on all ranks of a LocalWorld: its traffic, selections, result and residual at each step, seen from outside."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sparsync import Bucket, Report
from sparsync.comm import Cost, LocalWorld, MeteredComm
from sparsync.comm.local import LocalComm
from sparsync.core import ParameterSpan, count_for
from sparsync.schemes import State
from sparsync_lab.scheme_choice import SchemeChoice

WORD_NBYTES = 4
KEY = "traffic"  # of the one bucket

Record = dict[str, Any]  # Any: JSON


@dataclass
class _Residual:
    """The residuals of all ranks together after a step."""

    total: Tensor  # [n], the sum over ranks, float64
    age: Tensor  # [n], steps since an element was last written or had no residual; int32
    square: float = 0.0  # the sum of squares over ranks and elements


@dataclass
class Observed:
    """One scheme under observation: its state on each rank, and that of the observation."""

    choice: SchemeChoice
    ranks: int
    layout: tuple[ParameterSpan, ...]
    _states: list[State] = field(init=False, repr=False)
    _residual: _Residual = field(init=False, repr=False)

    def __post_init__(self) -> None:
        n = self.layout[-1].span.stop
        scheme = self.choice.make()
        self._states = [scheme.start() for _ in range(self.ranks)]
        self._residual = _Residual(torch.zeros(n, dtype=torch.float64), torch.zeros(n, dtype=torch.int32))

    @property
    def asked(self) -> int:
        """k, the number of elements that the density asks for; n where the scheme takes no density."""
        n, scheme = self.layout[-1].span.stop, self._states[0].scheme
        density = getattr(scheme, "density_down", None) or getattr(scheme, "density", None)
        return n if density is None else count_for(density, n)

    def reduce(self, step: int, gradients: Sequence[Tensor]) -> Record:
        """Reduce every rank's gradient at one step, and return the record of it. The gradients are not changed."""

        def body(comm: LocalComm) -> tuple[Report, Cost, Tensor]:
            metered = MeteredComm(comm)
            bucket = Bucket(KEY, gradients[comm.rank].clone(), step, self.layout)
            report = self._states[comm.rank].reduce(bucket, metered)
            return report, metered.take()[0], bucket.grad

        seen = LocalWorld(self.ranks).run(body)
        reports, sent, written = [report for report, _, _ in seen], [cost for _, cost, _ in seen], seen[0][2]
        before = self._residual.total.clone()
        for gradient in gradients:
            before += gradient
        self._update_residual(written)
        counts = self._counts(step, reports) | _traffic(sent)
        return counts | _quality(before.div_(self.ranks), written, reports[0].union) | self._waiting()

    def _counts(self, step: int, reports: Sequence[Report]) -> Record:
        first, local = reports[0], [report.selected for report in reports]
        thresholds = [_detail(report, "threshold", "local_threshold") for report in reports]
        even = max(local) * len(local) / sum(local) if sum(local) else 1.0
        return {
            "kind": "step",
            "scheme": self.choice.label,
            "step": step,
            "elements": first.elements,
            "asked": self.asked,
            "union": first.union,
            "density": first.density,
            "global": first.union,
            "local": local,
            "threshold": None if None in thresholds else _number(math.fsum(map(float, thresholds)) / len(thresholds)),
            "global_threshold": _number(_detail(first, "global_threshold")),
            "padding": _number(_detail(first, "padding")),
            "imbalance": _number(_detail(first, "imbalance", "padding") or even),
        }

    def _update_residual(self, written: Tensor) -> None:
        """Read every rank's residual, and count the steps that elements have been waiting."""
        all_ranks, waiting = self._residual, torch.zeros_like(written, dtype=torch.bool)
        all_ranks.total.zero_()
        all_ranks.square = 0.0
        for state in self._states:
            residual = _residual_of(state, self.layout)
            if residual is not None:
                all_ranks.total += residual
                all_ranks.square += float(torch.linalg.vector_norm(residual, dtype=torch.float64)) ** 2
                waiting |= residual != 0
        waiting &= written == 0
        all_ranks.age.add_(1).mul_(waiting)

    def _waiting(self) -> Record:
        residual = self._residual
        return {
            "residual_norm": _number(math.sqrt(residual.square)),
            "staleness_max": int(residual.age.max()),
            "staleness_mean": float(residual.age.double().mean()),
        }


def _traffic(sent: Sequence[Cost]) -> Record:
    return {
        "bytes": [cost.nbytes for cost in sent],
        "words": [cost.nbytes / WORD_NBYTES for cost in sent],
        "messages": [cost.messages for cost in sent],
        "rounds": [cost.steps for cost in sent],
    }


def _quality(mean: Tensor, written: Tensor, union: int) -> Record:
    """Return how much of `mean` [n], the mean over ranks of gradient and residual, was written; None where there is nothing to write."""
    energy = float(mean.square().sum())
    if not energy or not math.isfinite(energy):
        return {"error": None, "captured": None, "best": None}
    left = float(torch.linalg.vector_norm(mean - written))
    largest = mean.abs().topk(union, sorted=False).values if union < mean.numel() else mean
    return {
        "error": _number(left / math.sqrt(energy)),
        "captured": _number(float(written.double().square().sum()) / energy),
        "best": _number(float(largest.square().sum()) / energy),
    }


def _residual_of(state: State, layout: Sequence[ParameterSpan]) -> Tensor | None:
    """Return the residual of one rank, [n], zero for parameters without one; None where no parameter has one."""
    found = state.state_dict().get("residual")
    return torch.cat([found.get(each.name, torch.zeros(len(each.span))) for each in layout]) if found else None


def _detail(report: Report, *names: str) -> Any:  # Any: a detail of some scheme
    return next((report.details[name] for name in names if name in report.details), None)


def _number(value: int | float | None) -> int | float | None:
    """Return the value, or None where JSON cannot express it."""
    return value if value is not None and math.isfinite(value) else None
