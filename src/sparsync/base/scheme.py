"""The base classes of all schemes: what an integration calls, with a default for everything but `reduce`; and their sharded forms.

A reduce-scatter for sharded training ends with each rank's own chunk of the mean, and no all-gather follows. The gradient is P chunks of m
elements, chunk r always owned by rank r. Each parameter lies in all chunks, with a shard in each. There are no replicas, so nothing need
be bit-identical.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sparsync.comm.plan import Given, Plan
from sparsync.core import Arriving, Bucket, Comm, Cost, Detail, ParameterSpan, Report, Rows, laid_out
from sparsync.feedback import ErrorFeedback, Residuals
from sparsync.kernels import operations as kernels

if TYPE_CHECKING:
    from sparsync.wire import Values

_NO_COST = Cost()


class Scheme(ABC):
    """One way to reduce gradients: subclass it, give it a `name`, and write `reduce`.

    An instance holds the state of one rank; each rank makes its own, with the same settings. The defaults describe a scheme without
    state: nothing is saved, nothing is rolled back. A scheme with error feedback subclasses `sparsync.ErrorFeedbackScheme` instead and
    writes `step`. Write a scheme as a dataclass, so that all of its settings are compared between the ranks.
    """

    name: str
    # Any: the runtime's record of the learning rates and the loss scale that the residual is in. It stays with the residual, in copies too.
    residual_units: Any = None
    # Whether `reduce` asks a device for nothing where `bucket.skip` is given, the same on all ranks: if it is not zero, the state stays as
    # it was, and what is written is of no use. Gradients are finite then, and whether means are is not looked at.
    heeds_skip = False

    @abstractmethod
    def reduce(self, bucket: Bucket, comm: Comm) -> Report:
        """Replace `bucket.grad` [n] by an estimate of the mean gradient, the same bits on every rank.

        Called on every rank for the same buckets in the same order. NaN or Inf on any rank must show in the result on every rank,
        and leave the scheme's state as it was. An exception on any rank fails the step on all ranks. Communicate
        through a `MeteredComm` around `comm`, and return `self.report(bucket, metered.sent)`.
        """

    def __setattr__(self, name: str, value: object) -> None:
        # Settings were checked together, and compared between ranks.
        if is_dataclass(self) and name in vars(self) and name in {field.name for field in fields(self)}:
            raise AttributeError(
                f"{name} of {type(self).__name__} is a setting, which stays as it is; make a new scheme"
            )
        super().__setattr__(name, value)

    def send_all(self, bucket: Bucket, comm: Comm) -> Report:
        """Reduce as `reduce` does, but leave nothing behind: all that was held back is in the mean, in the precision of the residual."""
        return self.reduce(bucket, comm)

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
        """Return what a settled step does with a bucket: its exchanges in closed form, without tensors. See `sparsync_lab.predict`.

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
                f"{type(self).__name__} has no state, but the given one has {sorted(state)}; load it into the scheme that saved it"
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
        """Whether anything is held back from one step to a later one. Here, as in the next ones: whether it is so of an inner scheme."""
        return any(each.has_residual for each in self.inner_schemes)

    @property
    def interleaves(self) -> bool:
        """Whether a bucket may be reduced while another one waits for other ranks. No where a step of one depends on another one's.

        What `reduce` does between two exchanges is never interrupted.
        """
        return all(each.interleaves for each in self.inner_schemes)

    @property
    def leaves_out(self) -> bool:
        """Whether a step's mean lacks elements that ranks hold back in residuals: an optimizer then sees a sparse gradient."""
        return any(each.leaves_out for each in self.inner_schemes)

    def whole_form(self, bucket: Bucket, rank: int) -> "tuple[tuple[Values, Values], Tensor] | None":
        """Return the formats, up and down, and the residual of a bucket, [n], for writing: of a scheme that sends every element.

        It does so as `quantized_all_reduce_` does, and adds what is not sent to the next gradient, all of it. Here: None, because others
        do not. An integration that makes and encodes steps in one pass calls this in place of `reduce`.
        """
        return None

    @property
    def share_sent(self) -> float:
        """Which share of the elements a rank sends in a step. Of a scheme without inner schemes; here: all."""
        return 1.0

    @property
    def has_momentum(self) -> bool:
        """Whether what is written has a momentum in it already, so that the optimizer should be SGD without any."""
        return any(each.has_momentum for each in self.inner_schemes)

    @property
    def writes_steps(self) -> bool:
        """Whether elements of what is written are about 1, as those of Adam's steps are, so that SGD takes a learning rate of Adam."""
        return any(each.writes_steps for each in self.inner_schemes)

    @property
    def follows_rate(self) -> bool:
        """Whether its authors' residual holds gradients times the learning rate: give `attach` the optimizer, then it is the same."""
        return False

    def rescale_residual(self, factors: Mapping[str, float]) -> None:
        """Multiply the residual of each named parameter by its factor."""
        for each in self.inner_schemes:
            each.rescale_residual(factors)

    def forget(self, decay: float) -> bool:
        """Let only the share `decay` of the residual join the next gradient; return whether it does, here: no, for there is none.

        A scheme whose own setting is another one than 1 keeps that. Inner schemes are asked one by one.
        """
        return False

    def hold_residual(self) -> None:
        """Copy the residual before a step, for `weigh_step`."""
        for each in self.inner_schemes:
            each.hold_residual()

    def weigh_step(self, factors: Mapping[str, float]) -> None:
        """Keep of the step since `hold_residual`, for each named parameter, its factor in [0, 1]; called where only that share was applied.

        With c the factor, the residual becomes c times what it is now + (1 - c) times what it was before the step.
        """
        for each in self.inner_schemes:
            each.weigh_step(factors)

    def unsent(self, bucket: Bucket, comm: Comm) -> Tensor | None:
        """Return this rank's share of what is held back of `bucket`, [n], for reading only; None where nothing is.

        In units of the gradient, for each element. Of what this rank has not sent of its own gradients, its share is all; of a sum over m
        ranks that waits here for them, an m-th. So with m = 1 for its own, the residuals of all ranks add up to what m * share does. No
        rank's gradient waits in two places: over the ranks, m - 1 adds up to at most P - 1. `bucket` gives key, type and layout;
        `bucket.grad` is not read.
        """
        return None

    def unsent_in_rows(self, bucket: Bucket, comm: Comm) -> tuple[Tensor, Rows | None] | None:
        """Return a vector, [n], and rows of it: `unsent` is the vector, divided by the number of ranks in these rows.

        A scheme that would copy a residual to divide a part of it returns both, and spares the copy.
        """
        unsent = self.unsent(bucket, comm)
        return None if unsent is None else (unsent, None)

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
        for each in self.inner_schemes:
            each.reset_shared_state()

    def reduce_scatter_form(self) -> "ReduceScatterScheme":
        """Return this scheme as a reduce-scatter with the same settings, for FSDP2's shard axis, without its state.

        Raises ValueError where there is none.
        """
        raise ValueError(
            f"{self.name} has no reduce-scatter; for the shard axis there are TwoShot, OkTopk, SkipReduce and Dense. On a replicate axis "
            'every scheme works: attach(model, scheme, replicate=mesh["replicate"])'
        )

    def config_fingerprint(self) -> str:
        """Return what must be the same on every rank: all settings of a dataclass, else the class's name."""
        return repr(self) if is_dataclass(self) else type(self).__qualname__


def overflowed(report: Report, grad: Tensor) -> bool:
    """Return whether `grad`, as it was written on all ranks, holds NaN or Inf; the report's "overflow" counts where it has one."""
    known = report.details.get("overflow")
    # A host sync where the report does not say.
    return not kernels.all_finite(grad) if known is None else bool(known)


class Rollback:
    """Tracks the buckets that a step has written, and rolls them back when one is non-finite, because a loss scaler then skips the step.

    A bucket with NaN or Inf has them on every rank, and its scheme has left its residual alone. The other buckets of the step have sent
    from their residuals what nobody will apply: each rank adds the mean that was written to its residual again, P times in all. All
    ranks see the same buckets and do the same, so no message is needed. With `waits`, what a device has found is read and rolled back in
    `settle`, one step later, when the gradient is not there any more.
    """

    def __init__(self, waits: bool = False) -> None:
        self._waits = waits
        self._step: int | None = None
        # With whether the bucket itself is non-finite, where that is not known yet.
        self._written: list[tuple[Any, Bucket, Arriving | None]] = []
        self._skipped = False

    def reduced(self, scheme: Any, bucket: Bucket, report: Report) -> bool:
        """Note a bucket that `scheme` has reduced; roll back what this step has written if it is to be skipped, and return whether it is.

        Call it in the same order on all ranks, before any gradient of the step is changed.
        """
        if bucket.step != self._step:
            self.settle()
            self._step, self._written, self._skipped = bucket.step, [], False
        flag, all_wait = report.details.get("overflow"), all(each is not None for *_, each in self._written)
        if self._waits and isinstance(flag, Arriving) and all_wait and not self._skipped:
            self._written.append((scheme, Bucket(bucket.key, bucket.grad.new_empty(0), bucket.step), flag))
            return False
        if overflowed(report, bucket.grad):
            self._skipped = True
        elif scheme.has_residual:
            self._written.append((scheme, bucket, None))
        return self._roll_back()

    def settle(self) -> bool:
        """Roll back what the last step has written if a device has found any of it non-finite since; return whether it has."""
        return any(each is not None for *_, each in self._written) and self._roll_back()

    def end_step(self) -> None:
        """End the step: the next bucket belongs to another one, even of the same number."""
        self._step = None
        self._written = [each for each in self._written if each[2] is not None]

    def _roll_back(self) -> bool:
        """Roll back what is written if the step is non-finite; return whether it is. Waits for flags."""
        self._skipped |= any(bool(flag) for *_, flag in self._written)
        written = [(scheme, bucket) for scheme, bucket, flag in self._written if not flag]
        self._written = [] if self._skipped else [(*each, None) for each in written]
        for scheme, bucket in written if self._skipped else ():
            scheme.rollback(bucket)
        return self._skipped


class ReduceScatterScheme(ABC):
    """The form of a scheme for a shard axis. Holds the state of one rank: a residual of the whole gradient, by shard."""

    name: str
    residual_units: Any = None  # as of Scheme

    def __init__(self, residuals: Residuals = "float32", decay: float = 1.0) -> None:
        self.feedback = ErrorFeedback(residuals, decay=decay)

    def config_fingerprint(self) -> str:
        """Return what ranks compare before each bucket. The settings were compared before, as those of the scheme it is the form of."""
        return self.name

    @property
    def needs_layout(self) -> bool:
        """Whether it must know where each parameter lies."""
        return True

    @property
    def has_residual(self) -> bool:
        """Whether anything is held back from one step to a later one."""
        return True

    @abstractmethod
    def reduce_scatter(self, bucket: Bucket, out: Tensor, comm: Comm, average: bool) -> Report:
        """Write to `out` [m] this rank's chunk of the estimate of the mean gradient, or of the sum. `bucket.grad` is used up."""

    def state_dict(self) -> dict[str, Any]:  # Any: as Scheme
        """Return this rank's state, copied."""
        return {"residual": self.feedback.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned."""
        self.feedback.load_state_dict(state["residual"])

    def rescale_residual(self, factors: Mapping[str, float]) -> None:
        """Multiply the residual of each named parameter by its factor."""
        self.feedback.rescale(self._of_shards(factors))

    def hold_residual(self) -> None:
        """Copy the residual before a step, for `weigh_step`."""
        self.feedback.hold()

    def weigh_step(self, factors: Mapping[str, float]) -> None:
        """Keep of the step since `hold_residual`, for each named parameter, its factor in [0, 1]. See `Scheme.weigh_step`."""
        self.feedback.weigh(self._of_shards(factors))

    def _of_shards(self, factors: Mapping[str, float]) -> dict[str, float]:
        return {name: factors.get(parameter_of(name), 1.0) for name in self.feedback.by_name}

    def rollback(self, written: Bucket, share: int) -> None:
        """Add `share` times what was written to the residual again: P times a mean, once a sum. The step will not be applied."""
        for entry in written.layout:  # those of this rank's chunk: no other rank received it, so no other rank holds it
            if entry.name in self.feedback.by_name:
                self.feedback.by_name[entry.name].add_(entry.span.of(written.grad), alpha=share)

    def reset_shared_state(self) -> None:
        """Forget what must agree across ranks."""
        return

    def found_inf(self, bucket: Bucket, out: Tensor, cost: Cost) -> Report:
        """Fill `out` with NaN, and return the report of a step that changed no residual."""
        out.fill_(torch.nan)
        n = bucket.grad.numel()
        return Report(self.name, bucket.key, bucket.step, n, 0, 0, cost, details={"overflow": True})


def shard_layout(lengths: Sequence[tuple[str, int]], P: int) -> tuple[ParameterSpan, ...]:
    """Return where all shards lie in the whole buffer, given each parameter's name and the length of its shards."""
    return laid_out((shard_name(name, owner), length) for owner in range(P) for name, length in lengths)


def own_shard_layout(lengths: Sequence[tuple[str, int]], owner: int) -> tuple[ParameterSpan, ...]:
    """Return where the shards of `owner` lie in its chunk."""
    return laid_out((shard_name(name, owner), length) for name, length in lengths)


def shard_name(name: str, owner: int) -> str:
    """Return the name of the shard of a parameter that `owner` owns."""
    return f"{name}[{owner}]"


def parameter_of(name: str) -> str:
    """Return the parameter that a shard of this name belongs to."""
    return name[: name.rindex("[")]
