"""Reduce-scatters for sharded training: each rank ends with its own chunk of the mean, and no all-gather follows.

The gradient is P chunks of m elements, chunk r owned by rank r for good; each parameter lies in all chunks, a piece in each. Settings
come from the scheme that reduces whole buckets: `sharded(scheme)`. Replicas do not exist, so nothing need be bit-identical.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from sparsync import kernels
from sparsync.base.scheme import Scheme
from sparsync.collectives import reduce_scatter, sparse_allreduce
from sparsync.collectives.skip_plan import SkipPlan, first_offsets, skip_count, turning_offsets
from sparsync.comm.metered import all_gather_cost
from sparsync.core import Bucket, Comm, Cost, ParameterSpan, Report, Span, Sparse, laid_out
from sparsync.feedback import ErrorFeedback, state_from
from sparsync.phases import phase
from sparsync.schemes.dense import Dense
from sparsync.schemes.oktopk import OkTopk
from sparsync.schemes.skip_reduce import SkipReduce
from sparsync.selection.parameters import Part, matches
from sparsync.selection.topk import count_for
from sparsync.wire.elements import Elements

FLAG_NBYTES = 4  # an int32 to each rank: whether this one met NaN or Inf


@runtime_checkable
class ShardedScheme(Protocol):
    """One way to reduce-scatter gradients. Holds the state of one rank."""

    @property
    def name(self) -> str: ...

    @property
    def by_name(self) -> bool:
        """Whether it must know where each parameter lies."""
        ...

    def reduce_scatter(self, bucket: Bucket, out: Tensor, comm: Comm, average: bool) -> Report:
        """Writes to `out` [m] this rank's chunk of the estimate of the mean gradient, or of the sum. `bucket.grad` is used up."""
        ...

    def state_dict(self) -> dict[str, Any]: ...  # Any: as Scheme

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...

    def rescale_residual(self, factors: Mapping[str, float]) -> None: ...

    @property
    def has_residual(self) -> bool:
        """Whether anything is kept back from step to step."""
        ...

    def rollback(self, written: Bucket, share: int) -> None:
        """Keeps back `share` times what `reduce_scatter` wrote, because the step will not be applied: P times a mean, once a sum."""
        ...


def sharded(scheme: Scheme) -> ShardedScheme:
    """The reduce-scatter with the settings of `scheme`, without its state. Raises ValueError where there is none."""
    if isinstance(scheme, Dense) and scheme.wire == "gradient":
        return SkipReduceScatter(SkipReduce(skip=0), "dense")
    if isinstance(scheme, SkipReduce):
        return SkipReduceScatter(scheme)
    if isinstance(scheme, OkTopk):
        return OkTopkReduceScatter(scheme)
    if isinstance(scheme, Dense):
        raise ValueError(
            f"a reduce-scatter of wire={scheme.wire!r} is FSDP2's own matter; "
            f"use fully_shard(..., mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.{scheme.wire})) and Dense()"
        )
    raise ValueError(
        f"{scheme.name} has no reduce-scatter; for the shard axis there are SkipReduce, OkTopk and Dense. On a replicate axis every "
        'scheme works: attach(model, scheme, replicate=mesh["replicate"])'
    )


def pieces(lengths: Sequence[tuple[str, int]], P: int) -> tuple[ParameterSpan, ...]:
    """Where each parameter's pieces lie, given its name and the length of a piece."""
    return laid_out((piece(name, owner), length) for owner in range(P) for name, length in lengths)


def piece(name: str, owner: int) -> str:
    """What the piece of a parameter that `owner` owns is called."""
    return f"{name}[{owner}]"


def own_pieces(lengths: Sequence[tuple[str, int]], owner: int) -> tuple[ParameterSpan, ...]:
    """Where each parameter's piece lies in the chunk of `owner`."""
    return laid_out((piece(name, owner), length) for name, length in lengths)


def parameter_of(piece_name: str) -> str:
    """The parameter that a piece is of."""
    return piece_name[: piece_name.rindex("[")]


@dataclass
class _KeptByPiece:
    """A residual of the whole gradient on every rank, by piece."""

    feedback: ErrorFeedback = field(default_factory=ErrorFeedback)

    def state_dict(self) -> dict[str, Any]:  # Any: as the protocol
        return {"residual": self.feedback.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.feedback.load_state_dict(state_from(state, "residual", "a sharded scheme"))

    def rescale_residual(self, factors: Mapping[str, float]) -> None:
        self.feedback.rescale({name: factors.get(parameter_of(name), 1.0) for name in self.feedback.by_name})

    def rollback(self, written: Bucket, share: int) -> None:
        for slot in written.layout:  # those of this rank's chunk: nobody else was given it, so nobody else keeps it
            if slot.name in self.feedback.by_name:
                self.feedback.by_name[slot.name].add_(slot.span.of(written.grad), alpha=share)


class SkipReduceScatter(_KeptByPiece):
    """SkipReduce where owners are fixed: each owner's sum lacks s of the P-1 others, other ones at every step.

    An owner always has its own gradient in its chunk, so its weight there is 1/(P-s) where the others' is (P-1-s)/((P-1)(P-s)) in the
    long run: without effect where all ranks draw their data alike. Always in the direct form, whatever `form` says.
    """

    def __init__(self, config: SkipReduce, name: str = "skip_reduce") -> None:
        super().__init__()
        if config.node_size != 1:
            raise ValueError(
                f"node_size must be 1 on a shard axis, got {config.node_size}; shard inside the node and use "
                "attach(..., replicate=...) between nodes"
            )
        if config.protect == "auto":
            raise ValueError('protect="auto" needs whole gradients, which a shard axis has not; give names or patterns')
        self.config = config
        self.name = name

    @property
    def by_name(self) -> bool:
        return self.config.feedback or bool(self.config.protect)

    @property
    def has_residual(self) -> bool:
        return self.config.feedback

    def reduce_scatter(self, bucket: Bucket, out: Tensor, comm: Comm, average: bool) -> Report:
        config, n, P = self.config, bucket.grad.numel(), comm.size
        plan = self._plan(bucket, P)
        always, others = self._split(bucket.layout, P) if self.by_name else ((), (Span(0, out.numel()),))
        cost = Cost()
        sent, kept, residual = bucket.grad, None, None
        if config.feedback:
            total = self.feedback.accumulate(bucket, comm.rank)
            residual, kept = total.residual, total.acc
            sent = total.acc.to(out.dtype)
            cost += all_gather_cost(FLAG_NBYTES, P)
            fits = sent is total.acc or kernels.all_finite(sent)  # float16 makes Inf of what is too large for it
            if _any_poisoned(not (total.finite and fits), comm, out.device):
                return _poisoned(self.name, bucket, out, cost)
        reduce_scatter.reduce_scatter(sent, out, comm, plan, always)
        cost += reduce_scatter.cost(out.numel(), out.element_size(), P, comm.rank, plan, always)
        by_ranks = config.divide_by == "ranks" or config.feedback
        _divide_(out, always, P, P, average)
        _divide_(out, others, P if by_ranks else P - plan.skip, P, average)
        left_out = [
            _at(others, owner, len(out)) for owner in range(P) if reduce_scatter.skips(comm.rank, owner, P, plan)
        ]
        if residual is not None and kept is not None:
            torch.sub(kept, sent, out=residual)  # what rounding to the wire's type drops
            for span in (span for chunk in left_out for span in chunk):
                span.of(residual).copy_(span.of(kept))
        lost = sum(len(span) for chunk in left_out for span in chunk)
        details = {"skip": plan.skip, "offsets": str(list(plan.offsets)), "protected": P * sum(map(len, always))}
        return Report(self.name, bucket.key, bucket.step, n, n - lost, n, cost, details=details)

    def _plan(self, bucket: Bucket, P: int) -> SkipPlan:
        """Who is left out at this step; drawn from what all ranks know."""
        skip = skip_count(self.config.skip, P)
        if self.config.mode == "naive":
            return SkipPlan(first_offsets(skip))
        return SkipPlan(turning_offsets(skip, P, self.config.seed, bucket.key, bucket.step))

    def _split(self, layout: Sequence[ParameterSpan], P: int) -> tuple[tuple[Span, ...], tuple[Span, ...]]:
        """The spans of a chunk that are never left out, and the others."""
        first = layout[: len(layout) // P]  # every chunk is laid out alike
        dense = [slot for slot in first if matches(parameter_of(slot.name), self.config.protected)]
        names = {slot.name for slot in dense}
        return Part.of_slots(dense).spans, Part.of_slots(slot for slot in first if slot.name not in names).spans


class OkTopkReduceScatter(_KeptByPiece):
    """Ok-Topk's split-and-reduce by itself, with the chunks for regions: each rank sends its k (P-1)/P largest elements outside its own.

    Of its own chunk everything counts, at no cost. What is not sent is kept: a residual of the whole gradient on each rank. Conserved is
    the sum of residuals over ranks + P x the mean. Where any rank meets NaN or Inf, all ranks get NaN and keep their residuals.
    """

    by_name = True
    has_residual = True

    def __init__(self, config: OkTopk) -> None:
        super().__init__()
        if config.rule != "exact":
            raise ValueError(f'rule must be "exact" on a shard axis, got {config.rule!r}; use OkTopk(density=...)')
        self.config = config
        self.name = config.name
        self.feedback.precision = config.residuals

    def reduce_scatter(self, bucket: Bucket, out: Tensor, comm: Comm, average: bool) -> Report:
        n, P, m = bucket.grad.numel(), comm.size, out.numel()
        total = self.feedback.accumulate(bucket, comm.rank)
        chunks = [Span(owner * m, (owner + 1) * m) for owner in range(P)]
        own = chunks[comm.rank]
        with phase("select"):
            mine = self._selected(total.acc, own, bucket.step, P) if total.finite else None
        if mine is None or not self._fits(mine.value):
            mine = _alarm(total.acc, own)
        region, codec = own.of(total.acc).clone(), Elements(self.config.values)
        reduced = sparse_allreduce.split_and_reduce_(region, mine, chunks, comm, codec)
        cost = sparse_allreduce.split_and_reduce_cost(reduced.outgoing, chunks, region.dtype, comm.rank, codec)
        share = P if average else 1
        out.copy_(region / share)
        if not kernels.all_finite(out) or not kernels.all_finite(mine.value):
            return _poisoned(self.name, bucket, out, cost)
        with phase("apply"):
            total.keep(bucket)
            own.of(total.residual).zero_()
            kernels.clear_(total.residual, mine.index)
            if reduced.error is not None:
                kernels.scatter_add_(total.residual, Sparse(mine.index, reduced.error, n))
            if out.dtype != region.dtype:
                own.of(total.residual).copy_(region - out.to(region.dtype) * share)  # what rounding to its type drops
        sent = mine.index.numel()
        received = sum(reduced.incoming) - reduced.incoming[comm.rank]
        details = {"sent_count": sent, "received_count": received, "overflow": False}
        return Report(self.name, bucket.key, bucket.step, n, sent + m, n, cost, details=details)

    def _selected(self, acc: Tensor, own: Span, step: int, P: int) -> Sparse:
        density = 1.0 if step < self.config.dense_steps else self.config.density
        k = count_for(density, acc.numel())
        return kernels.top_k_nonzero(acc, max(1, k - k // P), skip=own)

    def _fits(self, value: Tensor) -> bool:
        """Whether values arrive finite: float16 makes Inf of what is too large for it, which only one owner would see."""
        return self.config.values != "float16" or kernels.all_finite(value.to(torch.float16))


def _alarm(acc: Tensor, own: Span) -> Sparse:
    """A NaN for each other rank, in place of what was selected: so all of them hear of it without another message."""
    n, m = acc.numel(), len(own)
    first = torch.arange(0, n, max(1, m), dtype=torch.int32, device=acc.device)
    index = first[first != own.start]
    return Sparse(index, acc.new_full(index.shape, torch.nan), n)


def _any_poisoned(here: bool, comm: Comm, device: torch.device) -> bool:
    """Whether any rank met NaN or Inf."""
    flag = torch.tensor([here], dtype=torch.int32, device=device)
    return bool(torch.cat(comm.all_gather(flag, [1] * comm.size)).any())  # a host sync: all ranks must decide alike


def _poisoned(name: str, bucket: Bucket, out: Tensor, cost: Cost) -> Report:
    out.fill_(torch.nan)
    n = bucket.grad.numel()
    return Report(name, bucket.key, bucket.step, n, 0, n, cost, details={"overflow": True})


def _divide_(out: Tensor, where: Sequence[Span], contributors: int, P: int, average: bool) -> None:
    """Makes the sum over contributors the mean, or the estimate of the sum over all P."""
    for span in where:
        if average:
            span.of(out).div_(contributors)
        elif contributors != P:
            span.of(out).mul_(P / contributors)


def _at(spans: Sequence[Span], owner: int, m: int) -> list[Span]:
    """These spans of a chunk, in the chunk of `owner`."""
    return [Span(owner * m + span.start, owner * m + span.stop) for span in spans]
