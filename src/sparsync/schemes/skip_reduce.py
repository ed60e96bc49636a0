"""SkipReduce: a ring all-reduce that leaves out some of its reduce-scatter steps (MICRO 2025, doi 10.1145/3725843.3756092).

Each of the P slices of a bucket loses s of the P ranks; the all-gather stays whole, so replicas agree. The share s/P of all
gradients is never sent, the wire carries (2(P-1) - s)/(2(P-1)) of a dense ring's bytes, and no index is needed.

Differs from the paper and the authors' code:
- Layers are protected by parameter name, also inside a bucket; the code recognises buckets by their element count, and leaves every
  reduction below 100 000 elements dense because it also meets control messages. Here only gradients pass.
- The plain setting divides by the contributors, which leaves the mean unbiased; the code divides by P (`published()`), which shrinks
  every update by (P - s)/P.
- One shift a bucket and step (the code: one a transport chunk), and shifts never repeat at once (the code's counter may stand still).
- `form="direct"`, `node_size` and `feedback` are ours.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self, get_args

import torch
from torch import Tensor

from sparsync import kernels
from sparsync.base.scheme import Scheme
from sparsync.collectives import direct, hierarchical, ring
from sparsync.collectives.skip_plan import SkipPlan, first_offsets, random_offsets, random_shift, skip_count
from sparsync.comm.metered import all_reduce_cost
from sparsync.core import Bucket, Comm, Cost, Detail, ParameterSpan, Report, spans
from sparsync.feedback import ErrorFeedback, state_from
from sparsync.selection.parameters import Disagreement, Part, matches, square_norms

Mode = Literal["random", "naive"]
Divisor = Literal["contributors", "ranks"]
Form = Literal["ring", "direct"]

_ALL_REDUCE = {"ring": (ring.ring_all_reduce_, ring.cost), "direct": (direct.direct_all_reduce_, direct.cost)}
_COST_BETWEEN_NODES = {"ring": ring.cost, "direct": direct.cost_in_messages}


@dataclass
class _State:
    """What one rank carries from step to step."""

    feedback: ErrorFeedback = field(default_factory=ErrorFeedback)
    disagreement: Disagreement = field(default_factory=Disagreement)
    protected: tuple[str, ...] | None = None  # chosen from measurements; None: not chosen yet


@dataclass
class SkipReduce(Scheme):
    """The mean over P - s of the P ranks, a different set for each slice.

    NaN and Inf of a contribution that is left out do not show in the result, and never enter the residual.
    """

    name = "skip_reduce"

    skip: int | float = (
        0.5  # an int is s itself, in [0, P-1]; a float in [0, 1) the share of ranks, rounded down. Authors: 4 of 8
    )
    mode: Mode = "random"  # who is left out: drawn each step from the shared seed, or always the same ("naive", biased)
    protect: (
        Sequence[str] | Literal["auto"]
    ) = ()  # names or patterns of parameters never skipped; "auto": see protect_share
    divide_by: Divisor | None = (
        None  # None: by contributors, or with feedback by ranks, since what was left out still comes
    )
    form: Form = "ring"  # "ring": P-1-s reduce-scatter steps; "direct": one, for few ranks or long latency
    feedback: bool = False  # keep what was left out, and add it to the next gradient (n elements of memory)
    seed: int = 0  # the same on every rank
    node_size: int = 1  # ranks a node; above 1, nodes reduce densely inside and whole nodes are left out between them
    protect_share: float = 0.05  # "auto": at most this share of all elements (the authors protect 4.1 % of VGG-19)
    observe_steps: int = 8  # "auto": dense steps over which the ranks' disagreement is measured first
    _state: _State = field(default_factory=_State, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if isinstance(self.skip, bool) or self.skip < 0 or (isinstance(self.skip, float) and not self.skip < 1):
            raise ValueError(f"skip must be a count in [0, P-1] or a share in [0, 1), got {self.skip}")
        if isinstance(self.protect, str) and self.protect != "auto":
            raise ValueError(f'protect takes a list of parameter names or patterns, or "auto", got {self.protect!r}')
        choices = (("mode", self.mode, Mode), ("form", self.form, Form))
        for name, value, kind in choices:
            if value not in get_args(kind):
                raise ValueError(f"{name} must be one of {', '.join(get_args(kind))}, got {value!r}")
        if self.divide_by not in (None, *get_args(Divisor)):
            raise ValueError(f"divide_by must be one of {', '.join(get_args(Divisor))}, got {self.divide_by!r}")
        if self.feedback and self.divide_by == "contributors":
            raise ValueError(
                'divide_by="contributors" with feedback=True counts what was left out twice: once in the smaller divisor and again '
                'when the residual is sent; use divide_by="ranks"'
            )
        if self.node_size < 1:
            raise ValueError(f"node_size must be at least 1 rank, got {self.node_size}")
        if not 0 <= self.protect_share <= 1:
            raise ValueError(f"protect_share must be in [0, 1], got {self.protect_share}")
        if self.observe_steps < 1:
            raise ValueError(f"observe_steps must be at least 1, got {self.observe_steps}")

    @classmethod
    def published(cls, skip: int | float = 0.5, protect: Sequence[str] = (), seed: int = 0) -> Self:
        """The authors' random (with `protect`, selective) SkipReduce: a ring, divided by P."""
        return cls(skip=skip, mode="random", protect=protect, divide_by="ranks", form="ring", seed=seed)

    @classmethod
    def ring_pruning(cls, skip: int | float = 0.5) -> Self:
        """Skip-Reduce of the forerunning thesis (KAIST 2023): the ring leaves out the same steps every time; divided by P.

        Only the thesis's abstract is public; that its shift is fixed and its divisor P is a reconstruction.
        """
        return cls(skip=skip, mode="naive", divide_by="ranks")

    @property
    def protected(self) -> tuple[str, ...]:
        """The name patterns that are never skipped; with protect="auto" empty until they are chosen."""
        return (self._state.protected or ()) if self.protect == "auto" else tuple(self.protect)

    def reduce(self, bucket: Bucket, comm: Comm) -> Report:
        n, P = bucket.grad.numel(), comm.size
        if self.feedback or self.protect == "auto":
            self._state.feedback.serve(comm.rank)
        if P == 1:
            self._deliver(bucket, comm)
            return Report(self.name, bucket.key, bucket.step, n, n, n, Cost(), details={"skip": 0, "shift": 0})
        plan = self._plan(bucket, comm)
        observing = self._observing(bucket)
        dense, skipping = self._parts(bucket.layout, everything_dense=observing)
        squares = square_norms(bucket.layout, bucket.grad) if observing else None
        residual = self._state.feedback.residual(bucket, comm.rank) if self.feedback else None
        acc = bucket.grad if residual is None else residual + bucket.grad
        sent = acc.to(bucket.grad.dtype)
        kept = (
            None if residual is None else (acc - sent)
        )  # what rounding to the wire's type drops, then what is left out
        cost = self._reduce_part(sent, kept, dense, comm, SkipPlan(shift=plan.shift))
        cost += self._reduce_part(sent, kept, skipping, comm, plan)
        bucket.grad.copy_(sent)
        details: dict[str, Detail] = {"skip": plan.skip, "shift": plan.shift, "protected": len(dense)}
        if residual is not None and kept is not None:
            details["overflow"] = not kernels.all_finite(bucket.grad)  # a host sync; alike on all ranks
        if residual is not None and kept is not None and not details["overflow"]:
            residual.copy_(torch.where(kept.isfinite(), kept, residual))
        if squares is not None:
            total = comm.all_reduce(squares)
            cost += all_reduce_cost(squares.numel(), squares.element_size(), P, comm.rank)
            self._state.disagreement.observe(bucket.layout, total / P, bucket.grad)
        lost = self._left_out(plan, len(skipping), comm)
        return Report(self.name, bucket.key, bucket.step, n, n - lost, n, cost, details=details)

    def reset_shared_state(self) -> None:
        self._state.disagreement = Disagreement()
        self._state.protected = None

    @property
    def has_residual(self) -> bool:
        return self.feedback

    def rollback(self, bucket: Bucket) -> None:
        if self.feedback:
            self._state.feedback.put_back(bucket)

    def rescale_residual(self, factors: Mapping[str, float]) -> None:
        self._state.feedback.rescale(factors)

    def state_dict(self) -> dict[str, Any]:  # Any: as the protocol
        state = self._state
        chosen = None if state.protected is None else list(state.protected)
        return {
            "residual": state.feedback.state_dict(),
            "disagreement": state.disagreement.state_dict(),
            "protected": chosen,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        residual, disagreement, protected = (
            state_from(state, key, "SkipReduce") for key in ("residual", "disagreement", "protected")
        )
        self._state.feedback.load_state_dict(residual)
        self._state.disagreement.load_state_dict(disagreement)
        self._state.protected = None if protected is None else tuple(protected)

    def _plan(self, bucket: Bucket, comm: Comm) -> SkipPlan:
        """Who is left out at this step; drawn from what all ranks know."""
        nodes, rest = divmod(comm.size, self.node_size)
        if rest:
            raise ValueError(f"node_size must divide the {comm.size} ranks, got {self.node_size}")
        skip = skip_count(self.skip, nodes, "ranks" if self.node_size == 1 else "nodes")
        if self.mode == "naive":
            return SkipPlan(first_offsets(skip), 0)
        shift = random_shift(nodes, self.seed, bucket.key, bucket.step)
        if self.form == "ring":
            return SkipPlan(first_offsets(skip), shift)
        # One set for a whole round of shifts: so every rank is left out of every slice equally often in a round, as in a ring.
        return SkipPlan(random_offsets(skip, nodes, self.seed, bucket.key, bucket.step // nodes), shift)

    def _deliver(self, bucket: Bucket, comm: Comm) -> None:
        """With one rank nothing is left out, and what a larger world kept back before joins the gradient."""
        if self.feedback:
            residual = self._state.feedback.residual(bucket, comm.rank)
            acc = residual + bucket.grad
            bucket.grad.copy_(acc)
            if kernels.all_finite(bucket.grad):
                residual.copy_(acc - bucket.grad)

    def _observing(self, bucket: Bucket) -> bool:
        """Whether the ranks' disagreement about this bucket is still being measured; chooses what to protect once it is known."""
        state = self._state
        if self.protect != "auto" or state.protected is not None:
            return False
        if any(state.disagreement.steps.get(slot.name, 0) < self.observe_steps for slot in bucket.layout):
            return True
        state.protected = state.disagreement.most(self.protect_share)
        return False

    def _parts(self, layout: Sequence[ParameterSpan], everything_dense: bool) -> tuple[Part, Part]:
        dense = [slot for slot in layout if everything_dense or matches(slot.name, self.protected)]
        names = {slot.name for slot in dense}
        return Part.of_slots(dense), Part.of_slots(slot for slot in layout if slot.name not in names)

    def _left_out(self, plan: SkipPlan, count: int, comm: Comm) -> int:
        """How many of `count` elements lose this rank, by itself or with its whole node."""
        node, nodes = comm.rank // self.node_size, comm.size // self.node_size
        shards = spans(count, self.node_size)
        return sum(len(span) for shard in shards for span in plan.skipped(node, len(shard), nodes))

    def _reduce_part(self, x: Tensor, kept: Tensor | None, part: Part, comm: Comm, plan: SkipPlan) -> Cost:
        """Replaces this part of `x` by the mean over its contributors, and writes what was left out to `kept`."""
        if not len(part):
            return Cost()
        all_reduce_, cost = _ALL_REDUCE[self.form]
        mine, left_out = part.take(x), part.take(kept) if kept is not None else None
        if self.node_size == 1:
            all_reduce_(mine, comm, plan, left_out)
            spent = cost(mine.numel(), mine.element_size(), comm.size, comm.rank, plan)
        else:
            between = _COST_BETWEEN_NODES[self.form]
            hierarchical.hierarchical_all_reduce_(mine, comm, self.node_size, plan, all_reduce_, left_out)
            spent = hierarchical.cost(
                mine.numel(), mine.element_size(), comm.size, comm.rank, self.node_size, plan, between
            )
        by_ranks = self.divide_by == "ranks" or self.feedback
        mine /= comm.size if by_ranks else comm.size - plan.skip * self.node_size
        part.put_(x, mine)
        if kept is not None and left_out is not None:
            part.put_(kept, left_out)
        return spent
