"""Ok-Topk: a sparse all-reduce whose traffic does not grow with P, on top-k selections (Li and Hoefler, arXiv 2201.07598).

Every rank owns a region of the vector. It sends its largest elements to the owners of their regions, who add them up; the k largest
sums of all regions survive and are gathered. A rank clears what it contributed to a survivor and keeps everything else.

`OkTopk.published()` is the paper's algorithm, the line numbers are those of its text in `oktopk_published`. Differs from the paper there:
- The learning rate stays outside: the residual is in units of the gradient, and `rescale_residual` with old rate / new rate keeps
  rate * residual as it was, and the thresholds with it. Weights then move as in the paper, whose accumulator is rate * ours.
- What is level with a threshold is selected (the authors' code leaves it out, and so selects k-1); zeros never are.
- When thresholds are re-evaluated every sum has reached every rank already, so the survivors are not gathered a second time.
- A zero threshold, of fewer than k non-zeros, is re-evaluated at the next step. A step with NaN or Inf leaves no trace (see OkTopk).

The plain constructor differs more, so that traffic has a bound and nothing drifts:
- Selections are exact in every step. What threshold is kept says where to look first, so neither scale nor its changes matter.
- A rank's own region costs it nothing, so all of it counts, and the k (P-1)/P elements it may send are the largest outside of it.
- Which survive is told by a few magnitudes of each region (`selection.regions`): exactly k, about the k largest sums.
- Regions follow the survivors, whose positions all ranks know, at every step and without traffic.
- Survivors are balanced such that the most any rank sends is least, where the bound or `imbalance` asks for it.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, Self, get_args

import torch

from sparsync import kernels
from sparsync.base.error_feedback import Keeping
from sparsync.comm.metered import all_reduce_cost
from sparsync.core import Bucket, Comm, Cost, Report
from sparsync.feedback import Accumulated, ErrorFeedback, Residuals, check_residuals, state_from
from sparsync.phases import phase
from sparsync.schemes.oktopk_exact import exact_step
from sparsync.schemes.oktopk_published import Settings, published_step
from sparsync.schemes.oktopk_step import Control, Outcome, Poisoned
from sparsync.selection import regions
from sparsync.selection.topk import check_density, count_for
from sparsync.wire.elements import Elements
from sparsync.wire.values import Values, check_values

Rule = Literal["exact", "paper", "code"]


@dataclass
class _State:
    feedback: ErrorFeedback = field(default_factory=ErrorFeedback)
    control: dict[str, Control] = field(default_factory=dict)  # by bucket key


@dataclass
class OkTopk(Keeping):
    """The k = density * n largest sums over what each rank selected, divided by P; the rest stays in the residuals.

    The result has exactly min(k, non-zero sums) elements. In words of 4 bytes (a float32 value or a position), counts included, no rank
    sends more than 6k (P-1)/P in any step, whatever the gradients, as long as k (4P - 6) >= 9P (P-1): from k = 9 for 2 ranks, 20 for 8,
    578 for 256. Below that at most 9 (P-1) words more. `published()` has no such bound.
    Where any rank meets NaN or Inf, all ranks fill the gradient with NaN, so that a loss scaler finds it, and keep residual and
    thresholds as they were before this step.
    """

    name = "oktopk"

    density: float = 0.01  # k/n, of what a rank selects and of the result; the authors use 0.01 to 0.02
    rule: Rule = (
        "exact"  # "paper", "code": thresholds kept between re-evaluations, as they are or scaled as the authors do
    )
    imbalance: float = 1.2  # a region's survivors over the mean, at most, before some move to other ranks; paper: 4
    dense_steps: int = 0  # first steps that reduce everything; the authors' code: 512 (VGG), 128 (LSTM), none (BERT)
    threshold_steps: int = 32  # tau', "paper" and "code" only: steps between two re-evaluations of the thresholds
    region_steps: int = 64  # tau, "paper" and "code" only: steps between two divisions into regions
    values: Values = "float32"  # how values travel, "exact" only; what rounding takes away stays in the residuals
    residuals: Residuals = "float32"  # "bfloat16" halves the memory of residuals and loses what it rounds away
    _state: _State = field(default_factory=_State, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_density(self.density)
        check_values(self.values)
        check_residuals(self.residuals)
        self._state.feedback.precision = self.residuals
        if self.rule != "exact" and self.values != "float32":
            raise ValueError(f'the published rules send float32 values, got values={self.values!r}; use rule="exact"')
        if self.rule not in get_args(Rule):
            raise ValueError(f"rule must be one of {', '.join(get_args(Rule))}, got {self.rule!r}")
        if not self.imbalance >= 1:
            raise ValueError(f"imbalance must be at least 1, the largest share over the mean, got {self.imbalance}")
        for name, value, least in (
            ("dense_steps", self.dense_steps, 0),
            ("threshold_steps", self.threshold_steps, 1),
            ("region_steps", self.region_steps, 1),
        ):
            if value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}")

    @classmethod
    def published(
        cls,
        density: float = 0.02,
        threshold_steps: int = 32,
        region_steps: int = 64,
        dense_steps: int = 0,
        bug_compatible: bool = False,
    ) -> Self:
        """The paper's algorithm with the settings of its VGG-16 runs.

        `bug_compatible` scales the thresholds between re-evaluations and never balances, as the authors' code for VGG does.
        """
        rule, imbalance = ("code", float("inf")) if bug_compatible else ("paper", 4.0)
        return cls(density, rule, imbalance, dense_steps, threshold_steps, region_steps)

    def reduce(self, bucket: Bucket, comm: Comm) -> Report:
        n, P = bucket.grad.numel(), comm.size
        control = self._control(bucket, P)
        if n == 0 or control.t < self.dense_steps:
            return self._dense(bucket, control, comm)
        outcome, total = self._step(bucket, control, comm)
        if isinstance(outcome, Poisoned):
            bucket.grad.fill_(torch.nan)
            return Report(self.name, bucket.key, bucket.step, n, 0, n, outcome.cost, details={"overflow": True})
        mean = outcome.mean.value.to(bucket.grad.dtype)
        overflow = not kernels.all_finite(mean)  # a host sync; what all ranks received, so all decide alike
        with phase("apply"):
            if overflow:  # all ranks see it in the gradient, and nothing else changes
                bucket.grad.zero_()
            else:
                total.keep(bucket)
                kernels.clear_(total.residual, outcome.cleared)
                for error in outcome.errors:
                    kernels.scatter_add_(total.residual, error)
                self._state.control[bucket.key] = replace(outcome.control, t=control.t + 1)
            kernels.put_(bucket.grad, outcome.mean.index, mean)
        union = outcome.mean.index.numel()
        return Report(
            self.name,
            bucket.key,
            bucket.step,
            n,
            outcome.selected,
            union,
            outcome.cost,
            details=outcome.details | {"overflow": overflow},
        )

    def reset_shared_state(self) -> None:
        self._state.control.clear()

    @property
    def _kept(self) -> ErrorFeedback:
        return self._state.feedback

    def rescale_residual(self, factors: Mapping[str, float]) -> None:
        self._state.feedback.rescale(factors)
        for control in self._state.control.values():
            among = {factors.get(name, 1.0) for name in control.names}
            factor = among.pop() if len(among) == 1 else None  # several rates in one bucket: evaluate anew
            control.local_threshold = _times(control.local_threshold, factor)
            control.global_threshold = _times(control.global_threshold, factor)

    def state_dict(self) -> dict[str, Any]:  # Any: as the protocol
        control = {key: asdict(each) for key, each in self._state.control.items()}
        return {"residual": self._state.feedback.state_dict(), "control": control}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        residual, control = (state_from(state, key, "OkTopk") for key in ("residual", "control"))
        self._state.feedback.load_state_dict(residual)
        self._state.control.clear()
        self._state.control.update({key: Control(**each) for key, each in control.items()})

    def _step(self, bucket: Bucket, control: Control, comm: Comm) -> tuple[Outcome | Poisoned, Accumulated]:
        k, written = count_for(self.density, bucket.grad.numel()), bucket.grad.dtype
        if self.rule == "exact":
            terms = self._state.feedback.terms(bucket, comm.rank)
            outcome = exact_step(terms, k, self.imbalance, Elements(self.values), control, comm, written)
            return outcome, Accumulated(terms.acc, terms.residual, not isinstance(outcome, Poisoned))
        total = self._state.feedback.accumulate(bucket, comm.rank)
        settings = Settings(self.rule == "code", self.imbalance, self.threshold_steps, self.region_steps)
        return published_step(total.acc, k, settings, control, comm, written), total

    def _dense(self, bucket: Bucket, control: Control, comm: Comm) -> Report:
        """The mean of all elements; there is no residual yet."""
        n, P = bucket.grad.numel(), comm.size
        if n and P > 1:
            bucket.grad.copy_(comm.all_reduce(bucket.grad).div_(P))
        cost = all_reduce_cost(n, bucket.grad.element_size(), P, comm.rank) if n else Cost()
        self._state.control[bucket.key] = replace(control, t=control.t + 1)
        return Report(self.name, bucket.key, bucket.step, n, n, n, cost, details={"dense": True})

    def _control(self, bucket: Bucket, P: int) -> Control:
        """What is known about this bucket; only its step count where it has another size now, or the world has."""
        n, names = bucket.grad.numel(), [slot.name for slot in bucket.layout]
        known = self._state.control.get(bucket.key)
        if known is None or known.elements != n or known.ranks != P or known.names != names:
            return Control(n, P, regions.equal_boundaries(n, P), names, t=known.t if known else 0)
        return known


def _times(threshold: float | None, factor: float | None) -> float | None:
    return None if threshold is None or factor is None else threshold * factor
