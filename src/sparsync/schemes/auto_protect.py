"""Selective SkipReduce that finds the sensitive parameters by itself: those about which the ranks disagree most.

The authors judge layers offline (MICRO 2025, doi 10.1145/3725843.3756092); measuring the disagreement in the first steps is ours.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor
from typing_extensions import Self

from sparsync.base.scheme import Scheme
from sparsync.collectives.exchange import all_reduce
from sparsync.comm.cost import recorded_cost
from sparsync.comm.plan import Given, Plan
from sparsync.core import Bucket, Comm, Report
from sparsync.feedback import state_from
from sparsync.schemes.skip_reduce import Divisor, Form, Mode, SkipReduce
from sparsync.selection.parameters import Disagreement, square_norms


@dataclass
class AutoProtect(Scheme):
    """Reduce densely for `observe_steps` steps, then by `scheme`, which never skips the parameters of largest disagreement.

    With g_r the gradient of rank r and g their mean, disagreement is the mean over ranks of |g_r - g|^2 per element: what protecting a
    parameter gains for what it costs.
    """

    scheme: SkipReduce = field(default_factory=SkipReduce)
    share: float = 0.05  # at most this share of all elements is protected (the authors protect 4.1 % of VGG-19)
    observe_steps: int = 8  # dense steps of each parameter over which the disagreement is measured

    name = "auto_protect"

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise ValueError(f"share must be in [0, 1], the share of elements to protect, got {self.share}")
        if self.observe_steps < 1:
            raise ValueError(f"observe_steps must be at least 1, got {self.observe_steps}")
        if self.scheme.protect:
            raise ValueError(
                f"AutoProtect chooses what its scheme protects, got protect={tuple(self.scheme.protect)}; leave it out"
            )
        self.disagreement = Disagreement()
        self.protected: tuple[str, ...] | None = None  # None: not chosen yet

    @classmethod
    def skip_reduce(
        cls,
        skip: int | float = 0.5,
        mode: Mode = "random",
        divide_by: Divisor | None = None,
        form: Form = "ring",
        feedback: bool = False,
        seed: int = 0,
        node_size: int = 1,
        share: float = 0.05,
        observe_steps: int = 8,
    ) -> Self:
        """Return AutoProtect around a SkipReduce with these settings."""
        inner = SkipReduce(
            skip, mode, divide_by=divide_by, form=form, feedback=feedback, seed=seed, node_size=node_size
        )
        return cls(inner, share, observe_steps)

    def reduce(self, bucket: Bucket, comm: Comm) -> Report:
        self.scheme.residual.serve(comm.rank)
        observing = comm.size > 1 and self._observing(bucket)
        protect = [entry.name for entry in bucket.layout] if observing else list(self.protected or ())
        squares = square_norms(bucket.layout, bucket.grad) if observing else None
        report = self.scheme.reduce_protecting(protect, bucket, comm)
        cost = report.cost
        if squares is not None:
            with recorded_cost() as observed:
                mean_square = all_reduce(squares, comm) / comm.size
            cost += observed.total
            self.disagreement.observe(bucket.layout, mean_square, bucket.grad)
        return self.report(bucket, cost, report.selected, report.union, report.details)

    def plan(self, given: Given) -> Plan:
        """Return the plan of a step after those that observe: as many elements are protected as may be, unless `given.protected` says."""
        protected = int(self.share * given.n) if given.protected is None else given.protected
        return self.scheme.plan(replace(given, protected=protected))

    @property
    def has_residual(self) -> bool:
        return self.scheme.has_residual

    def unsent(self, bucket: Bucket, comm: Comm) -> Tensor | None:
        return self.scheme.unsent(bucket, comm)

    def rollback(self, bucket: Bucket) -> None:
        self.scheme.rollback(bucket)

    def rescale_residual(self, factors: Mapping[str, float]) -> None:
        self.scheme.rescale_residual(factors)

    def shared_text(self, bucket: Bucket) -> str:
        return f"protected: {self.protected}"

    def reset_shared_state(self) -> None:
        self.disagreement = Disagreement()
        self.protected = None

    def state_dict(self) -> dict[str, Any]:  # Any: as Scheme
        chosen = None if self.protected is None else list(self.protected)
        return {**self.scheme.state_dict(), "disagreement": self.disagreement.state_dict(), "protected": chosen}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        disagreement, protected = (state_from(state, key, "AutoProtect") for key in ("disagreement", "protected"))
        self.scheme.load_state_dict(state)
        self.disagreement.load_state_dict(disagreement)
        self.protected = None if protected is None else tuple(protected)

    def _observing(self, bucket: Bucket) -> bool:
        """Return whether this bucket's disagreement is still being measured; choose what to protect once it is known."""
        if self.protected is not None:
            return False
        if any(self.disagreement.steps.get(entry.name, 0) < self.observe_steps for entry in bucket.layout):
            return True
        self.protected = self.disagreement.most(self.share)
        return False
