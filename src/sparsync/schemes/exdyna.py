"""ExDyna: MiCRO with partitions that change size until all of them hold equally much (arXiv 2402.13781).

`published()` is the paper's algorithm: the vector consists of 1024 blocks, and neighbouring partitions out of balance hand each other
one block a step; selection is by MiCRO's scaled threshold. The plain setting sends equally many elements from every partition, which
needs no counts and no padding, and moves all boundaries at every step to where the partitions' smallest selected magnitudes, which ride
on the positions, become equal; in balance that is the selection of one threshold for all.

Differs from the paper and the authors' code: as MiCRO; and blocks are defined for every n, not only from 32768 elements on.
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
from sparsync.core import Bucket, Comm, Detail, Report, Span, spans
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
from sparsync.selection.budget import budget
from sparsync.selection.partition import Profile, block_edges, block_spans, by_rank, rebalanced, turn
from sparsync.selection.quotas import POISONED, apportion, level_of, relative_magnitudes
from sparsync.selection.threshold import select_above
from sparsync.selection.topk import count_for
from sparsync.wire import indices
from sparsync.wire.values import Values

_LEVEL_NBYTES = 2
_MEMORY_STEPS = 8  # boundaries follow what was selected over at least so many steps ...
_MEMORY_COUNT = 32  # ... and over so many elements of each partition


@dataclass
class _Balance(ThresholdScaling):
    """What the published boundaries of one bucket follow."""

    blocks: list[int] = field(default_factory=list)  # of each partition; empty: not laid out yet
    counts: list[int] = field(default_factory=list)  # what each rank selected at the last step


@dataclass
class _State:
    """What one rank carries from step to step."""

    feedback: ErrorFeedback = field(default_factory=ErrorFeedback)
    balance: ByBucket[_Balance] = field(default_factory=lambda: ByBucket(_Balance))
    profile: ByBucket[Profile] = field(default_factory=lambda: ByBucket(Profile))


@dataclass
class ExDyna(Keeping):
    """All ranks' values at the positions that some rank found large in its partition, divided by P; the rest stays in the residual.

    Where any rank holds NaN or Inf, every gradient becomes NaN and nothing else changes; the word rides on the first message.
    """

    name = "exdyna"

    density: float = 0.01  # share of the elements in the union of all ranks; 0.001 in the authors' scripts
    refresh: float = 0.05  # share of the budget for a window that goes round: no element waits longer than 1/(refresh * density) steps
    dense: Sequence[str] = (
        NORMS_AND_BIASES  # names or patterns of parameters sent whole while they fit a tenth of the budget
    )
    rule: Rule = "quotas"  # "quotas": equal ones, and free boundaries; "threshold": the paper's
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
        reduce = self._reduce_by_quotas if self.rule == "quotas" else self._reduce_by_threshold
        return reduce(bucket, total, comm)

    def reset_shared_state(self) -> None:
        self._state.balance.load_state_dict({})
        self._state.profile.load_state_dict({})

    @property
    def _kept(self) -> ErrorFeedback:
        return self._state.feedback

    def state_dict(self) -> dict[str, Any]:  # Any: as the protocol
        state = self._state
        return {
            "residual": state.feedback.state_dict(),
            "balance": state.balance.state_dict(),
            "profile": state.profile.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        residual, balance, profile = (state_from(state, key, "ExDyna") for key in ("residual", "balance", "profile"))
        self._state.feedback.load_state_dict(residual)
        self._state.balance.load_state_dict(balance)
        self._state.profile.load_state_dict(profile)

    def _reduce_by_threshold(self, bucket: Bucket, total: Accumulated, comm: Comm) -> Report:
        acc, n, P = total.acc, total.acc.numel(), comm.size
        state = self._state.balance.of(bucket, P)
        edges = block_edges(n)
        blocks = self._published_blocks(state, edges, P)
        partition = block_spans(edges, blocks)[turn(comm.rank, state.step, P)]
        k = max(1, int(self.density * n)) if self.bug_compatible else count_for(self.density, n)
        threshold = state.next(k, self.bug_compatible)
        with phase("select"):
            index = select_above(acc, threshold, partition, state.step)  # [k_r]
        counts = exchange_counts(index.numel(), not total.finite, comm, acc.device)
        if counts is None:
            return pass_on_poison(self.name, bucket, Poisoned(counts_cost(P)))
        sent = index if self.bug_compatible else index.to(torch.int32)
        union = all_gather_padded(sent, counts, comm).long()  # [K]
        cost = counts_cost(P) + padded_cost(counts, sent.element_size())
        details = _lengths(block_spans(edges, blocks))
        choice = Choice(cost, union[:0], union, counts, threshold, details)
        report = reduce_choice(self.name, bucket, total, choice, comm, self.values)
        if not report.details["overflow"]:
            state.blocks, state.counts = blocks, counts
            state.accept(threshold, report.union)
        return report

    def _published_blocks(self, state: _Balance, edges: Sequence[int], P: int) -> list[int]:
        if state.step == 0:
            return [len(span) for span in spans(len(edges) - 1, P)]
        loads = [0] * P
        for rank, count in enumerate(state.counts):
            loads[turn(rank, state.step - 1, P)] = count
        return rebalanced(state.blocks, loads, state.union, edges)

    def _reduce_by_quotas(self, bucket: Bucket, total: Accumulated, comm: Comm) -> Report:
        acc, n, P = total.acc, total.acc.numel(), comm.size
        profile = self._state.profile.of(bucket, P)
        with phase("select"):
            step = budget(self.density, bucket.layout, self.dense, self.refresh, bucket.step)
            partitions = by_rank(profile.cut(n, P, least=2 * -(-step.count // P)), bucket.step)
            counts = apportion([1] * P, [step.free(partition) for partition in partitions], step.open_count)
            magnitude = step.magnitude(acc, partitions[comm.rank])  # [partition]
            own = kernels.argtopk(magnitude if total.finite else magnitude.nan_to_num(), counts[comm.rank])  # [k_r]
            threshold = float(magnitude[own].min()) if own.numel() else 0.0
        with phase("encode"):
            lengths = [len(partition) for partition in partitions]
            packet = _with_level(indices.encode_fixed_length(own, lengths[comm.rank]), magnitude[own], not total.finite)
        sizes = map(indices.fixed_length_nbytes, counts, lengths)
        packets = comm.all_gather(packet, [_LEVEL_NBYTES + size for size in sizes])
        cost = all_gather_cost(packet.numel(), P)
        levels = [int(each[:_LEVEL_NBYTES].clone().view(torch.int16)) for each in packets]  # a host sync, all need them
        if min(levels) < 0:
            return pass_on_poison(self.name, bucket, Poisoned(cost))
        with phase("decode"):
            places = [
                indices.decode_fixed_length(each[_LEVEL_NBYTES:], count, len(partition)).long() + partition.start
                for each, count, partition in zip(packets, counts, partitions, strict=True)
            ]
            chosen = torch.cat(places)
        known = step.known_index(acc.device)
        choice = Choice(cost, known, chosen, counts, threshold, _lengths(partitions))
        report = reduce_choice(self.name, bucket, total, choice, comm, self.values)
        if not report.details["overflow"]:
            memory = max(_MEMORY_STEPS, -(-_MEMORY_COUNT * P // step.count))
            profile.observe(chosen, counts, relative_magnitudes(levels), n, memory)
        return report


def _with_level(positions: Tensor, chosen: Tensor, poisoned: bool) -> Tensor:
    """The packet, uint8: the level of the smallest chosen magnitude in 2 bytes, then the positions."""
    smallest = chosen.min() if chosen.numel() else chosen.new_zeros(())
    level = level_of(smallest).to(torch.int16) if not poisoned else torch.tensor(POISONED, dtype=torch.int16)
    return torch.cat([level.to(positions.device).view(1).view(torch.uint8), positions])


def _lengths(partitions: Sequence[Span]) -> dict[str, Detail]:
    lengths = [len(partition) for partition in partitions]
    return {"shortest_partition": min(lengths), "longest_partition": max(lengths)}
