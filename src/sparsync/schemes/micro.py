"""MiCRO: exclusive partitions that go round the ranks, so that the union of all selections is as large as asked (arXiv 2310.00967).

Rank r looks for large elements in partition (t + r) mod P of its own accumulated gradient only. The positions found by all ranks never
meet, and every rank sends its value at each of them.

`published()` is the paper's algorithm: one threshold for all, scaled by a fixed factor a step until the union has density * n elements.
The plain setting spreads every partition over the whole vector, so that layers of different scale load all ranks alike. It replaces
the threshold: the ranks exchange 6 bytes about the upper tail of their partitions, compute from them how many elements each partition
may send, and send exactly density * n elements, at every scale of the gradient and from the first step. Nothing but residuals is kept that
changes a result.

Differs from the paper: residual and threshold are in units of the gradient, not of learning rate times gradient, as in the authors'
code. Differs from the authors' code: small buckets (n < P, density * n < 1) and P = 1 work; NaN and Inf are noticed; positions take 4
bytes, not 8; the threshold falls again where the union is up to 9 % too small. `bug_compatible=True` takes the last two differences back.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor

from sparsync import kernels
from sparsync.base.error_feedback import Keeping
from sparsync.collectives.union_all_reduce import all_gather_padded, counts_cost, exchange_counts, padded_cost
from sparsync.comm.metered import all_gather_cost
from sparsync.control import ByBucket, ThresholdScaling
from sparsync.core import Bucket, Comm, Report, Sparse, spans
from sparsync.feedback import Accumulated, ErrorFeedback, Residuals, check_residuals, state_from
from sparsync.phases import phase
from sparsync.schemes.exclusive import (
    NORMS_AND_BIASES,
    Choice,
    Poisoned,
    Rule,
    check_settings,
    empty_report,
    pass_on_poison,
    reduce_choice,
)
from sparsync.selection.budget import TAKEN, budget
from sparsync.selection.partition import BlockCyclic, by_rank, turn
from sparsync.selection.quotas import LADDER_NBYTES, POISONED, RUNGS, ladder, quotas, rung_counts
from sparsync.selection.threshold import select_above
from sparsync.selection.topk import WARM, count_for
from sparsync.wire import indices
from sparsync.wire.values import Values


@dataclass
class _State:
    """What one rank carries from step to step."""

    feedback: ErrorFeedback = field(default_factory=ErrorFeedback)
    scaling: ByBucket[ThresholdScaling] = field(default_factory=lambda: ByBucket(ThresholdScaling))
    bounds: dict[str, float] = field(default_factory=dict)  # where each bucket's selection looks first; may be wrong


@dataclass
class MiCRO(Keeping):
    """All ranks' values at the positions that some rank found large in its partition, divided by P; the rest stays in the residual.

    Where any rank holds NaN or Inf, every gradient becomes NaN and nothing else changes; the word rides on the first message.
    """

    name = "micro"

    density: float = 0.01  # share of the elements in the union of all ranks; 0.001 in the authors' scripts
    refresh: float = 0.05  # share of the budget for a window that goes round: no element waits longer than 1/(refresh * density) steps
    dense: Sequence[str] = (
        NORMS_AND_BIASES  # names or patterns of parameters sent whole while they fit a tenth of the budget
    )
    rule: Rule = "quotas"  # "quotas": exact; "threshold": the paper's
    bug_compatible: bool = False  # with "threshold": also the authors' unreached branch, and 8 bytes a position
    values: Values = "float32"  # how values travel; what rounding takes away stays in the residual
    residuals: Residuals = "float32"  # "bfloat16" halves the memory of residuals and loses what it rounds away
    _state: _State = field(default_factory=_State, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_settings(self.density, self.refresh, self.dense, self.rule, self.bug_compatible, self.values)
        check_residuals(self.residuals)
        self._state.feedback.precision = self.residuals

    @classmethod
    def published(cls, density: float = 0.01, bug_compatible: bool = False) -> Self:
        """The paper's algorithm; with `bug_compatible`, step by step what the authors' program does."""
        return cls(density=density, refresh=0.0, dense=(), rule="threshold", bug_compatible=bug_compatible)

    def reduce(self, bucket: Bucket, comm: Comm) -> Report:
        if not bucket.grad.numel():
            return empty_report(self.name, bucket)
        total = self._state.feedback.accumulate(bucket, comm.rank)
        scaling = self._state.scaling.of(bucket, comm.size) if self.rule == "threshold" else None
        choice = self._by_quotas(total, bucket, comm) if scaling is None else self._by_threshold(total, scaling, comm)
        if isinstance(choice, Poisoned):
            return pass_on_poison(self.name, bucket, choice)
        report = reduce_choice(self.name, bucket, total, choice, comm, self.values)
        if scaling is not None and not report.details["overflow"]:
            scaling.accept(choice.threshold, report.union)
        return report

    def reset_shared_state(self) -> None:
        self._state.scaling.load_state_dict({})

    @property
    def _kept(self) -> ErrorFeedback:
        return self._state.feedback

    def state_dict(self) -> dict[str, Any]:  # Any: as the protocol
        return {"residual": self._state.feedback.state_dict(), "scaling": self._state.scaling.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        residual, scaling = (state_from(state, key, "MiCRO") for key in ("residual", "scaling"))
        self._state.feedback.load_state_dict(residual)
        self._state.scaling.load_state_dict(scaling)

    def _by_threshold(self, total: Accumulated, scaling: ThresholdScaling, comm: Comm) -> Choice | Poisoned:
        acc, n, P = total.acc, total.acc.numel(), comm.size
        partition = spans(n, P)[turn(comm.rank, scaling.step, P)]
        k = max(1, int(self.density * n)) if self.bug_compatible else count_for(self.density, n)
        threshold = scaling.next(k, self.bug_compatible)
        with phase("select"):
            index = select_above(acc, threshold, partition, scaling.step)  # [k_r]
        counts = exchange_counts(index.numel(), not total.finite, comm, acc.device)
        if counts is None:
            return Poisoned(counts_cost(P))
        sent = index if self.bug_compatible else index.to(torch.int32)
        union = all_gather_padded(sent, counts, comm).long()  # [K]
        cost = counts_cost(P) + padded_cost(counts, sent.element_size())
        return Choice(cost, union[:0], union, counts, threshold)

    def _by_quotas(self, total: Accumulated, bucket: Bucket, comm: Comm) -> Choice | Poisoned:
        acc, n, P = total.acc, total.acc.numel(), comm.size
        partitions, mine = BlockCyclic(n, P), turn(comm.rank, bucket.step, P)
        with phase("select"):
            step = budget(self.density, bucket.layout, self.dense, self.refresh, bucket.step)
            known = step.known_index(acc.device)
            part, place = partitions.places(known)
            taken = torch.bincount(part, minlength=P).tolist()  # a host sync; how much is sent depends on it
            free = [length - count for length, count in zip(partitions.lengths(), taken, strict=True)]
            free, lengths = by_rank(free, bucket.step), by_rank(partitions.lengths(), bucket.step)
            open_part, taken_here = partitions.of(acc, mine), place[part == mine]
            open_part[taken_here] = 0.0  # is sent anyway, so that nobody chooses it again
            rungs = rung_counts(step.open_count, P, free[comm.rank])
            found = self._largest(open_part, max(rungs), bucket.key)
            told = ladder(found.value, rungs)
            if not total.finite:
                told.fill_(POISONED)
        ladders = torch.stack(comm.all_gather(told, [len(RUNGS)] * P))  # [P, rungs]
        cost = all_gather_cost(LADDER_NBYTES, P)
        if bool((ladders < 0).any()):
            return Poisoned(cost)
        with phase("select"):
            counts = quotas(ladders, free, step.open_count)
            own = _first(found, counts[comm.rank], open_part, taken_here)
        with phase("encode"):
            packet = indices.encode_fixed_length(own.index, lengths[comm.rank])
        packets = comm.all_gather(packet, list(map(indices.fixed_length_nbytes, counts, lengths)))
        cost += all_gather_cost(packet.numel(), P)
        with phase("decode"):
            places = map(indices.decode_fixed_length, packets, counts, lengths)
            chosen = torch.cat(list(map(partitions.positions, by_rank(range(P), bucket.step), places))).long()
        threshold = float(own.value.abs().min()) if own.index.numel() else 0.0
        return Choice(cost, known, chosen, counts, threshold)

    def _largest(self, part: Tensor, k: int, key: str) -> Sparse:
        """The `k` largest elements of `part` that are not zero, or all; the last step's smallest says where to look first."""
        found = kernels.top_k_nonzero(part, min(k, part.numel()), bound=self._state.bounds.get(key))
        self._state.bounds[key] = WARM * float(found.value.abs().min()) if found.index.numel() else 0.0
        return found


def _first(found: Sparse, count: int, part: Tensor, taken: Tensor) -> Sparse:
    """The `count` largest of `part` outside the places `taken`, of which `found` holds the largest that are not zero."""
    if count == found.index.numel():
        return found
    if count < found.index.numel():
        top = kernels.top_k(found.value, count)
        return Sparse(found.index[top.index], top.value, found.length)
    magnitude = part.abs()  # zeros, too, or more than a ladder tells of
    magnitude[taken] = TAKEN
    index = kernels.argtopk(magnitude, count).to(torch.int32)
    return Sparse(index, part[index], found.length)
