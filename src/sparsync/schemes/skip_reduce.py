"""SkipReduce: a ring all-reduce that leaves out some of its reduce-scatter steps (MICRO 2025, doi 10.1145/3725843.3756092).

Each of the P chunks of a bucket loses s of the P ranks; the all-gather stays whole, so replicas agree. The share s/P of all
gradients is lost, (2(P-1) - s)/(2(P-1)) of a dense ring's bytes are sent, and no positions.

Differs from the paper and the authors' code:
- Layers are protected by parameter name, also inside a bucket. The code recognises buckets by their element count. It reduces whatever
  has fewer than 100 000 elements densely, because it meets control messages too; here only gradients pass.
- The mean is over the contributors, so it is unbiased; the code divides by P (`divide_by="ranks"`), which shrinks every update to
  (P - s)/P.
- One shift per bucket and step (the code: per transport chunk), never the same twice in a row (the code's step counter may stand still).
- Protected elements travel in the messages of the others; a skipped step of the ring carries them alone.
- `form="direct"`, `node_size` and `feedback` are ours.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor
from typing_extensions import Self

from sparsync.base.scheme import ReduceScatterScheme, Scheme
from sparsync.base.state import State
from sparsync.collectives.skipping import (
    Form,
    SkipPlan,
    all_reduce_,
    by_chunk,
    first_offsets,
    hierarchical_all_reduce_,
    random_offsets,
    random_shift,
    skip_count,
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
    spans,
)
from sparsync.kernels import operations as kernels
from sparsync.schemes.left_out import LeftOut

Mode = Literal["random", "naive"]


@dataclass(frozen=True)
class SkipReduce(Scheme):
    """Write the mean over P - s of the P ranks, a different set for every chunk.

    NaN and Inf in a contribution that is left out do not show in the result, and never enter the residual.
    """

    # An int is s itself, in [0, P-1]; a float in [0, 1) is the share s/P, rounded down to a whole s. Authors: 4 of 8.
    skip: int | float = 0.5
    # Which ranks are left out of a chunk: drawn in each step from the shared seed, or always the same ("naive", biased).
    mode: Mode = "random"
    protect: Sequence[str] = ()  # names or patterns of parameters never skipped; AutoProtect finds them
    # None: "contributors", or "ranks" with feedback, because what was left out is still sent later.
    divide_by: Divisor | None = None
    form: Form = "ring"  # "ring": P-1-s reduce-scatter steps; "direct": one, for few ranks or high latency
    feedback: bool = False  # add what was left out to the next gradient; takes n elements of memory, see LeftOut
    seed: int = 0  # the same on every rank
    node_size: int = 1  # ranks per node; above 1, nodes reduce densely inside, and whole nodes are left out

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
        """Create Skip-Reduce of the thesis before the paper (KAIST 2023): the ring always leaves out the same ranks, and divides by P.

        Only the abstract of the thesis is public: the fixed shift and the divisor are a reconstruction.
        """
        return cls(skip=skip, mode="naive", divide_by="ranks")

    def reduce(self, state: State, bucket: Bucket, comm: Comm) -> Report:
        return self.reduce_protecting(self.protect, state, bucket, comm)

    def send_all(self, state: State, bucket: Bucket, comm: Comm) -> Report:
        return self.reduce_protecting(["*"], state, bucket, comm)

    def reduce_protecting(self, protect: Sequence[str], state: State, bucket: Bucket, comm: Comm) -> Report:
        """Reduce as `reduce` does, but never skip these parameters."""
        grad, n, P, comm = bucket.grad, bucket.grad.numel(), comm.size, MeteredComm(comm)
        # 1: draw the ranks that every chunk omits
        plan = self._skip_plan(bucket, P)
        # 2: put elements in the order of chunks, in each first those never omitted; with feedback, LeftOut puts acc into `grad` before
        dense, skipping = split(bucket.layout, protect)
        order = by_chunk(dense, skipping, self.node_size, max(1, P // self.node_size))
        kept = LeftOut(state.accumulate(bucket), grad, order, P) if self.feedback else None
        mine = order.take(grad)  # [n]
        # 3: a reduce-scatter that skips steps, and a full all-gather
        if P > 1:
            self._all_reduce_(mine, comm, plan, kept.omitted if kept else None, len(dense))
        order.put_(grad, mine)
        # 4: divide by the contributors, or by P; what LeftOut has divided by P already, in 16 bits, is not divided by it again
        if P > 1:
            by_ranks, count = self.divide_by == "ranks" or self.feedback, P // (kept.shares if kept else 1)
            divide_(grad, dense.spans, count)
            divide_(grad, skipping.spans, count if by_ranks else P - plan.skip * self.node_size)
        details: dict[str, Detail] = {"skip": plan.skip, "shift": plan.shift, "protected": len(dense)}
        if kept is not None:
            # A host sync; the same on all ranks.
            details["overflow"] = not kernels.all_finite(grad)
            if not details["overflow"]:
                kept.keep()
        left_out = self._count_left_out(plan, len(skipping), comm)
        return self.report(bucket, comm.sent, selected=n - left_out, union=n, details=details)

    @property
    def has_residual(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]  # nobody sets it
        """Whether omitted contributions are held back."""
        return self.feedback

    def unsent(self, state: State, bucket: Bucket, comm: Comm) -> tuple[Tensor, Rows | None] | None:
        if not self.feedback:
            return None
        # A rank whose node is omitted holds the node's sum.
        return state.residual(bucket) / (self.node_size if comm.size > 1 else 1), None

    def reduce_scatter_form(self) -> ReduceScatterScheme:
        from sparsync.schemes.sharded import SkipReduceScatter

        return SkipReduceScatter(self)

    def _skip_plan(self, bucket: Bucket, P: int) -> SkipPlan:
        """Draw the ranks left out in this step, the same on all ranks."""
        if P == 1:
            return SkipPlan()
        nodes, rest = divmod(P, self.node_size)
        if rest:
            raise ValueError(f"node_size must divide the {P} ranks, got {self.node_size}")
        skip = skip_count(self.skip, nodes, "ranks" if self.node_size == 1 else "nodes")
        if self.mode == "naive":
            return SkipPlan(first_offsets(skip), 0)
        shift = random_shift(nodes, self.seed, bucket.key, bucket.step)
        if self.form == "ring":
            return SkipPlan(first_offsets(skip), shift)
        # One set per round of shifts, so that in a round every rank is left out of every chunk equally often, as in a ring.
        return SkipPlan(random_offsets(skip, nodes, self.seed, bucket.key, bucket.step // nodes), shift)

    def _count_left_out(self, plan: SkipPlan, count: int, comm: Comm) -> int:
        """Count the elements, of `count`, from which this rank is left out, alone or with its node."""
        if comm.size == 1:
            return 0
        node, nodes = comm.rank // self.node_size, comm.size // self.node_size
        chunks = spans(count, self.node_size)
        return sum(len(span) for chunk in chunks for span in plan.skipped(node, len(chunk), nodes))

    def _all_reduce_(self, x: Tensor, comm: Comm, plan: SkipPlan, omitted: Tensor | None, always: int) -> None:
        """Replace `x`, in the order of `by_chunk`, by the sum over the contributors, and add to `omitted` what the sums lack."""
        if self.node_size == 1:
            all_reduce_(x, comm, plan, omitted, always, self.form)
        else:
            hierarchical_all_reduce_(x, comm, self.node_size, plan, omitted, always, self.form)


def split(layout: Sequence[ParameterSpan], protect: Sequence[str]) -> tuple[SpanSet, SpanSet]:
    """Split a layout into the elements of the parameters `protect`, which are never left out, and the others."""
    protected = {entry.name for entry in layout if matches(entry.name, protect)}
    dense = [entry for entry in layout if entry.name in protected]
    skipping = [entry for entry in layout if entry.name not in protected]
    return SpanSet.of(dense), SpanSet.of(skipping)


def divide_(x: Tensor, where: Sequence[Span], divisor: int) -> None:
    """Divide `x` by `divisor` in these spans."""
    for span in where:
        span.of(x).div_(exact_divisor(x, divisor))
