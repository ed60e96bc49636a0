"""SkipReduce: a ring all-reduce that leaves out some of its reduce-scatter steps (MICRO 2025, doi 10.1145/3725843.3756092).

Each of the P chunks of a bucket loses s of the P ranks; the all-gather stays whole, so replicas agree. The share s/P of all
gradients is never sent, the wire carries (2(P-1) - s)/(2(P-1)) of a dense ring's bytes, and no index is needed.

Differs from the paper and the authors' code:
- Layers are protected by parameter name, also inside a bucket; the code recognises buckets by their element count, and leaves every
  reduction below 100 000 elements dense because it also meets control messages. Here only gradients pass.
- The mean is over the contributors, which leaves it unbiased; the code divides by P (`divide_by="ranks"`), which shrinks every update by
  (P - s)/P.
- One shift a bucket and step (the code: one a transport chunk), and shifts never repeat at once (the code's counter may stand still).
- What is protected inside a bucket rides in the messages of the rest: a step that is skipped carries nothing else.
- `form="direct"`, `node_size` and `feedback` are ours.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor
from typing_extensions import Self

from sparsync.base.scheme import ReduceScatterScheme, Scheme, parameter_of
from sparsync.base.state import State
from sparsync.collectives.skipping import (
    Form,
    SkipPlan,
    all_reduce_,
    first_offsets,
    hierarchical_all_reduce_,
    random_offsets,
    random_shift,
    reduce_scatter,
    rotating_offsets,
    skip_count,
    skips,
)
from sparsync.comm.metered import MeteredComm
from sparsync.core import (
    Bucket,
    Comm,
    Detail,
    Divisor,
    ParameterSpan,
    Report,
    Rows,
    Span,
    SpanSet,
    check_one_of,
    exact_divisor,
    matches,
    reported,
    spans,
)
from sparsync.feedback import Accumulator
from sparsync.kernels import operations as kernels
from sparsync.kernels.rounding import lacking, rounded

Mode = Literal["random", "naive"]


@dataclass(frozen=True)
class SkipReduce(Scheme):
    """Write the mean over P - s of the P ranks, a different set for each chunk.

    NaN and Inf of a contribution that is left out do not show in the result, and never enter the residual.
    """

    # An int is s itself, in [0, P-1]; a float in [0, 1) the share of ranks, rounded down. Authors: 4 of 8.
    skip: int | float = 0.5
    # Who is left out: drawn each step from the shared seed, or always the same ("naive", biased).
    mode: Mode = "random"
    protect: Sequence[str] = ()  # names or patterns of parameters never skipped; AutoProtect finds them
    # None: by contributors, or with feedback by ranks, since what was left out still comes.
    divide_by: Divisor | None = None
    form: Form = "ring"  # "ring": P-1-s reduce-scatter steps; "direct": one, for few ranks or long latency
    feedback: bool = False  # hold what was left out, and add it to the next gradient (n elements of memory)
    seed: int = 0  # the same on every rank
    node_size: int = 1  # ranks a node; above 1, nodes reduce densely inside and whole nodes are left out between them

    name = "skip_reduce"

    def __post_init__(self) -> None:
        if isinstance(self.skip, bool) or self.skip < 0 or (isinstance(self.skip, float) and not self.skip < 1):
            raise ValueError(f"skip must be a count in [0, P-1] or a share in [0, 1), got {self.skip}")
        if isinstance(self.protect, str):
            raise ValueError(
                f"protect takes a list of parameter names or patterns, got {self.protect!r}; AutoProtect finds them"
            )
        check_one_of("mode", self.mode, Mode)
        check_one_of("form", self.form, Form)
        if self.divide_by is not None:
            check_one_of("divide_by", self.divide_by, Divisor)
        if self.feedback and self.divide_by == "contributors":
            raise ValueError(
                'divide_by="contributors" with feedback=True counts what was left out twice: once in the smaller divisor and again '
                'when the residual is sent; use divide_by="ranks"'
            )
        if self.node_size < 1:
            raise ValueError(f"node_size must be at least 1 rank, got {self.node_size}")

    @classmethod
    def ring_pruning(cls, skip: int | float = 0.5) -> Self:
        """Return Skip-Reduce of the forerunning thesis (KAIST 2023): the ring leaves out the same steps every time; divided by P.

        Only the thesis's abstract is public; that its shift is fixed and its divisor P is a reconstruction.
        """
        return cls(skip=skip, mode="naive", divide_by="ranks")

    def reduce(self, state: State, bucket: Bucket, comm: Comm) -> Report:
        return self.reduce_protecting(self.protect, state, bucket, comm)

    def send_all(self, state: State, bucket: Bucket, comm: Comm) -> Report:
        return self.reduce_protecting(["*"], state, bucket, comm)

    def reduce_protecting(self, protect: Sequence[str], state: State, bucket: Bucket, comm: Comm) -> Report:
        """Reduce as `reduce` does, with these parameters never skipped."""
        n, P, comm = bucket.grad.numel(), comm.size, MeteredComm(comm)
        plan = self._skip_plan(bucket, P)
        dense, skipping = _split(bucket.layout, protect)
        order = _by_chunk(dense, skipping, self.node_size, max(1, P // self.node_size))
        acc = state.accumulate(bucket) if self.feedback else None
        sent, shares = bucket.grad, 1
        if acc is not None and acc.values.dtype != sent.dtype:
            # In 16 bits, shares of the mean, whose sums overflow no sooner than the mean does.
            shares = P
            sent.copy_(rounded(acc.values / exact_divisor(acc.values, shares), sent.dtype))
        mine = order.take(sent)  # [n], in the order of the chunks
        unsent = _Unsent(acc, order, mine, shares) if acc is not None else None
        self._all_reduce_(mine, comm, plan, unsent.omitted if unsent else None, len(dense))
        order.put_(sent, mine)
        if P > 1:
            by_ranks, count = self.divide_by == "ranks" or self.feedback, P // shares
            _divide_(sent, dense.spans, count)
            _divide_(sent, skipping.spans, count if by_ranks else P - plan.skip * self.node_size)
        details: dict[str, Detail] = {"skip": plan.skip, "shift": plan.shift, "protected": len(dense)}
        if unsent is not None:
            # A host sync; the same on all ranks.
            details["overflow"] = not kernels.all_finite(sent)
            if not details["overflow"]:
                unsent.keep()
        left_out = self._left_out(plan, len(skipping), comm)
        return reported(self.name, bucket, comm.sent, selected=n - left_out, union=n, details=details)

    @property
    def has_residual(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]  # nobody sets it
        """Whether what was left out is held back."""
        return self.feedback

    def unsent(self, state: State, bucket: Bucket, comm: Comm) -> tuple[Tensor, Rows | None] | None:
        if not self.feedback:
            return None
        # A rank that is left out with its node holds the node's sum.
        return state.residual(bucket) / (self.node_size if comm.size > 1 else 1), None

    def reduce_scatter_form(self) -> ReduceScatterScheme:
        return SkipReduceScatter(self)

    def _skip_plan(self, bucket: Bucket, P: int) -> SkipPlan:
        """Return who is left out at this step; drawn from what all ranks know."""
        if P == 1:
            return SkipPlan()
        nodes, skip = P // self.node_size, self._skip(P)
        if self.mode == "naive":
            return SkipPlan(first_offsets(skip), 0)
        shift = random_shift(nodes, self.seed, bucket.key, bucket.step)
        if self.form == "ring":
            return SkipPlan(first_offsets(skip), shift)
        # One set for a whole round of shifts: so every rank is left out of every chunk equally often in a round, as in a ring.
        return SkipPlan(random_offsets(skip, nodes, self.seed, bucket.key, bucket.step // nodes), shift)

    def _skip(self, P: int) -> int:
        """Return how many ranks, or nodes, each chunk loses."""
        if P == 1:
            return 0
        nodes, rest = divmod(P, self.node_size)
        if rest:
            raise ValueError(f"node_size must divide the {P} ranks, got {self.node_size}")
        return skip_count(self.skip, nodes, "ranks" if self.node_size == 1 else "nodes")

    def _left_out(self, plan: SkipPlan, count: int, comm: Comm) -> int:
        """Return how many of `count` elements lose this rank, alone or with its whole node."""
        if comm.size == 1:
            return 0
        node, nodes = comm.rank // self.node_size, comm.size // self.node_size
        chunks = spans(count, self.node_size)
        return sum(len(span) for chunk in chunks for span in plan.skipped(node, len(chunk), nodes))

    def _all_reduce_(self, x: Tensor, comm: Comm, plan: SkipPlan, omitted: Tensor | None, always: int) -> None:
        """Replace `x`, in the order of `_by_chunk`, by the sum over the contributors, and add what was left out to `omitted`."""
        if comm.size == 1:
            return
        if self.node_size == 1:
            all_reduce_(x, comm, plan, omitted, always, self.form)
        else:
            hierarchical_all_reduce_(x, comm, self.node_size, plan, omitted, always, self.form)


class _Unsent:
    """What this rank holds back of one step, [n] in the order of the chunks: what sums left out, and what rounding dropped."""

    def __init__(self, acc: Accumulator, order: SpanSet, sent: Tensor, shares: int) -> None:
        """`sent` [n] is acc / `shares`, rounded where its type is narrower."""
        narrow = sent.dtype != acc.values.dtype
        own = order.take(acc.values) if narrow else sent
        self.omitted = torch.zeros_like(own)  # filled by the all-reduce
        self._dropped = lacking(own, sent, shares) if narrow else None
        self._finite = None if acc.finite else own.isfinite()
        self._residual, self._order, self._shares = acc.residual, order, shares

    def keep(self) -> None:
        """Make it the residual, unless a contribution that was left out, or a sum of some, is not finite."""
        held = self.omitted if self._dropped is None else lacking(self._dropped, -self.omitted, self._shares)
        if self._finite is not None or not kernels.all_finite(held):  # seldom, and it takes more memory
            usable = held.isfinite() if self._finite is None else held.isfinite() & self._finite
            held = torch.where(usable, held, self._order.take(self._residual))
        self._order.put_(self._residual, held)


@dataclass(frozen=True)
class SkipReduceScatter(ReduceScatterScheme):
    """SkipReduce where owners are fixed: each owner's sum lacks s of the P-1 others, other ones at every step.

    An owner always has its own gradient in its chunk, so its weight there is 1/(P-s) where the others' is (P-1-s)/((P-1)(P-s)) in the
    long run: without effect where all ranks draw from the same data. Always in the direct form, whatever `form` says.
    """

    config: SkipReduce
    name: str = "skip_reduce"

    def __post_init__(self) -> None:
        if self.config.node_size != 1:
            raise ValueError(
                f"node_size must be 1 on a shard axis, got {self.config.node_size}; shard inside the node and use "
                "attach(..., replicate=...) between nodes"
            )

    @property
    def needs_layout(self) -> bool:
        return self.config.feedback or bool(self.config.protect)

    @property
    def has_residual(self) -> bool:
        return self.config.feedback

    def reduce_scatter(self, state: State, bucket: Bucket, out: Tensor, comm: Comm, average: bool) -> Report:
        config, n, P = self.config, bucket.grad.numel(), comm.size
        plan = self._plan(bucket, P)
        always, others = self._always(bucket.layout, P) if self.needs_layout else ((), (Span(0, out.numel()),))
        acc = state.accumulate(bucket) if config.feedback else None
        sent = bucket.grad if acc is None else rounded(acc.values, out.dtype)
        # Sums in which a residual is are formed in its type.
        total = out if acc is None or acc.values.dtype == out.dtype else torch.empty_like(out, dtype=acc.values.dtype)
        comm = MeteredComm(comm)
        if acc is not None:
            flag = torch.tensor([not acc.finite], dtype=torch.int32, device=out.device)
            # A host sync: all ranks must decide the same.
            if bool(torch.cat(comm.all_gather(flag, [1] * P)).any()):
                return self.found_inf(bucket, out, comm.sent)
        reduce_scatter(sent, total, comm, plan, always)
        by_ranks = config.divide_by == "ranks" or config.feedback
        _divide_chunk_(total, always, P, P, average)
        _divide_chunk_(total, others, P if by_ranks else P - plan.skip, P, average)
        if total is not out:
            out.copy_(rounded(total, out.dtype))
        left_out = [_at(others, owner, len(out)) for owner in range(P) if skips(comm.rank, owner, P, plan)]
        if acc is not None:
            torch.sub(acc.values, sent, out=acc.residual)  # what rounding to the wire's type drops
            for span in (span for chunk in left_out for span in chunk):
                span.of(acc.residual).copy_(span.of(acc.values))
            if total is not out and kernels.all_finite(out):
                # What its type drops of the result is this rank's, as the chunk is.
                own = Span(comm.rank * len(out), (comm.rank + 1) * len(out))
                own.of(acc.residual).add_(total - out.to(total.dtype), alpha=P if average else 1)
        lost = sum(len(span) for chunk in left_out for span in chunk)
        details = {"skip": plan.skip, "offsets": str(list(plan.offsets)), "protected": P * sum(map(len, always))}
        return Report(self.name, bucket.key, bucket.step, n, n - lost, n, comm.sent, details=details)

    def _plan(self, bucket: Bucket, P: int) -> SkipPlan:
        """Return who is left out at this step; drawn from what all ranks know."""
        skip = skip_count(self.config.skip, P)
        if self.config.mode == "naive":
            return SkipPlan(first_offsets(skip))
        return SkipPlan(rotating_offsets(skip, P, self.config.seed, bucket.key, bucket.step))

    def _always(self, layout: Sequence[ParameterSpan], P: int) -> tuple[tuple[Span, ...], tuple[Span, ...]]:
        """Return the spans of a chunk that are never left out, and the others. Every chunk has the same layout."""
        first = [replace(entry, name=parameter_of(entry.name)) for entry in layout[: len(layout) // P]]
        dense, skipping = _split(first, self.config.protect)
        return dense.spans, skipping.spans


def _split(layout: Sequence[ParameterSpan], protect: Sequence[str]) -> tuple[SpanSet, SpanSet]:
    """Return the elements that are never left out, and the others."""
    protected = {entry.name for entry in layout if matches(entry.name, protect)}
    dense, skipping = ([entry for entry in layout if (entry.name in protected) == kept] for kept in (True, False))
    return SpanSet.of(dense), SpanSet.of(skipping)


@lru_cache(maxsize=256)
def _by_chunk(dense: SpanSet, skipping: SpanSet, node_size: int, nodes: int) -> SpanSet:
    """Return all elements in the order of the chunks: the share of each in `dense`, then that in `skipping`, so that a message is one span.

    Each of both is cut as a separate vector: first for the ranks of a node, then for the nodes.
    """
    found: list[Span] = []
    for place in range(node_size):
        for node in range(nodes):
            for each in (dense, skipping):
                outer = spans(len(each), node_size)[place]
                inner = spans(len(outer), nodes)[node]
                found += each.part(Span(outer.start + inner.start, outer.start + inner.stop))
    return SpanSet.joined(found)


def _divide_(x: Tensor, where: Sequence[Span], divisor: int) -> None:
    for span in where:
        span.of(x).div_(exact_divisor(x, divisor))


def _divide_chunk_(out: Tensor, where: Sequence[Span], contributors: int, P: int, average: bool) -> None:
    """Make the sum over contributors the mean, or the estimate of the sum over all P."""
    for span in where:
        if average:
            span.of(out).div_(exact_divisor(out, contributors))
        elif contributors != P:
            span.of(out).mul_(P / contributors)


def _at(chunk_spans: Sequence[Span], owner: int, m: int) -> list[Span]:
    """Return these spans of a chunk, in the chunk of `owner`."""
    return [Span(owner * m + span.start, owner * m + span.stop) for span in chunk_spans]
