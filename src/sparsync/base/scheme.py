"""The base class of all schemes: what an integration calls, with a default for everything but `reduce`."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from sparsync import kernels
from sparsync.comm.plan import Given, Plan
from sparsync.core import Bucket, Comm, Cost, Detail, Report

if TYPE_CHECKING:
    from sparsync.base.sharded import ReduceScatterScheme

_NO_COST = Cost()


class Scheme(ABC):
    """One way to reduce gradients: subclass it, give it a `name`, and write `reduce`.

    An instance holds the state of one rank; each rank makes its own, with the same settings. The defaults describe a scheme without
    state: nothing is saved, nothing is rolled back. A scheme with error feedback subclasses `sparsync.ErrorFeedbackScheme` instead and
    writes `step`. Write a scheme as a dataclass, so that all of its settings are compared between the ranks.
    """

    name: str

    @abstractmethod
    def reduce(self, bucket: Bucket, comm: Comm) -> Report:
        """Replace `bucket.grad` [n] by an estimate of the mean gradient, the same bits on every rank.

        Called on every rank for the same buckets in the same order. NaN or Inf on any rank must show in the result on every rank,
        and leave the scheme's state as it was. An exception on any rank fails the step on all ranks. Communicate through
        `sparsync.collectives` inside `recorded_cost()`, and return `self.report(bucket, cost.total)`.
        """

    def __setattr__(self, name: str, value: object) -> None:
        # Settings were checked together, and compared between ranks.
        if is_dataclass(self) and name in vars(self) and name in {field.name for field in fields(self)}:
            raise AttributeError(
                f"{name} of {type(self).__name__} is a setting, which stays as it is; make a new scheme"
            )
        super().__setattr__(name, value)

    def report(
        self,
        bucket: Bucket,
        cost: Cost = _NO_COST,
        selected: int | None = None,
        union: int | None = None,
        details: Mapping[str, Detail] | None = None,
    ) -> Report:
        """Return the report of one reduction. `selected` (k) and `union` (K) are all n elements where not given."""
        n = bucket.grad.numel()
        k, K = n if selected is None else selected, n if union is None else union
        return Report(self.name, bucket.key, bucket.step, n, k, K, cost, details=details or {})

    def plan(self, given: Given) -> Plan:
        """Return what a settled step does with a bucket: its exchanges in closed form, without tensors. See `sparsync.predict`.

        Raises ValueError where the scheme has none.
        """
        raise ValueError(f"{self.name} has no closed form of its cost; write {type(self).__name__}.plan(given)")

    def state_dict(
        self,
    ) -> dict[str, Any]:  # Any: nested dicts of tensors, numbers and strings, as weights_only loads them
        """Return this rank's state, copied. Residuals stand under "residual", flat, by parameter name."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned. Raises ValueError for the state of another scheme."""
        if state:
            raise ValueError(
                f"{type(self).__name__} has no state, this one has {sorted(state)}; load it into the scheme it is of"
            )

    @property
    def inner_schemes(self) -> "list[Scheme]":
        """The schemes that this one holds and passes gradients on to: all that its attributes are, or have as items of a list or dict."""
        found: dict[int, Scheme] = {}
        for value in vars(self).values():
            items = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
            found |= {id(each): each for each in (value, *items) if isinstance(each, Scheme)}
        return list(found.values())

    @property
    def has_residual(self) -> bool:
        """Whether anything is held back from one step to a later one."""
        return False

    @property
    def leaves_out(self) -> bool:
        """Whether a step's mean lacks elements that ranks hold back in residuals: an optimizer then sees a sparse gradient."""
        return False

    @property
    def has_momentum(self) -> bool:
        """Whether what is written has a momentum in it already, so that the optimizer should be SGD without any."""
        return False

    def rescale_residual(self, factors: Mapping[str, float]) -> None:
        """Multiply the residual of each named parameter by its factor."""
        return

    def unsent(self, bucket: Bucket, comm: Comm) -> Tensor | None:
        """Return this rank's share of what is held back of `bucket`, [n], for reading only; None where nothing is.

        In units of the gradient. Of sums over ranks that a rank holds for all of them its share is a P-th. `bucket` gives key, type and
        layout; `bucket.grad` is not read.
        """
        return None

    def rollback(self, bucket: Bucket) -> None:
        """Add what `reduce` wrote to `bucket.grad` to the residual again, on all ranks, because the step will not be applied."""
        return

    def shared_text(self, bucket: Bucket) -> str:
        """Return what must agree across ranks before `bucket` is reduced, besides settings, as text: ranks that differ get an error.

        The elements of `bucket.grad` may be missing (device "meta"); they differ between ranks anyway.
        """
        return ""

    def reset_shared_state(self) -> None:
        """Forget thresholds, partitions and whatever else must agree across ranks, but no residual: after a failure it may differ."""
        return

    def reduce_scatter_form(self) -> "ReduceScatterScheme":
        """Return this scheme as a reduce-scatter with the same settings, for FSDP2's shard axis, without its state.

        Raises ValueError where there is none.
        """
        raise ValueError(
            f"{self.name} has no reduce-scatter; for the shard axis there are SkipReduce, OkTopk and Dense. On a replicate axis every "
            'scheme works: attach(model, scheme, replicate=mesh["replicate"])'
        )

    def config_fingerprint(self) -> str:
        """Return what must be the same on every rank: all settings of a dataclass, else the class's name."""
        return repr(self) if is_dataclass(self) else type(self).__qualname__


def overflowed(report: Report, grad: Tensor) -> bool:
    """Return whether `grad`, as it was written on all ranks, holds NaN or Inf; the report's "overflow" counts where it has one."""
    known = report.details.get("overflow")
    # A host sync where the report does not say.
    return not kernels.all_finite(grad) if known is None else bool(known)
