"""The base classes of all schemes: what an integration calls, with a default for everything but `reduce`; and their sharded forms.

A reduce-scatter for sharded training ends with each rank's own chunk of the mean, and no all-gather follows. The gradient is P chunks of m
elements, chunk r always owned by rank r. Each parameter lies in all chunks, with a shard in each. There are no replicas, so nothing need
be bit-identical.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sparsync.base.state import State
from sparsync.core import Bucket, Comm, Cost, Detail, ParameterSpan, Report, Rows, laid_out, reported
from sparsync.feedback import Vectors

if TYPE_CHECKING:
    from sparsync.wire import Values
_NO_COST = Cost()


class Scheme(ABC):
    """One way to reduce gradients: subclass it, give it a `name`, and write `reduce`.

    Write a scheme as a frozen dataclass, so that its settings are compared between the ranks. What it remembers from step to step is in
    the `State` that it is called with, of one model on one rank, so several models and ranks can have the same scheme. The defaults
    describe a scheme that remembers nothing. A scheme with error feedback subclasses `sparsync.ErrorFeedbackScheme` instead and writes
    `step`.
    """

    name: str
    has_residual: bool = False  # whether anything is held back from one step to a later one
    # Whether what is written has a momentum in it already, so that the optimizer should be SGD without any.
    has_momentum: bool = False
    # Whether a bucket may be reduced while another one waits for other ranks: not where a step of one depends on another one's. What
    # `reduce` does between two exchanges is never interrupted.
    interleaves: bool = True
    # Whether a step's mean lacks elements that ranks hold back in residuals: an optimizer then sees a sparse gradient.
    leaves_out: bool = False
    share_sent: float = 1.0  # which share of the elements a rank sends in a step
    # Whether `reduce` asks a device for nothing where `bucket.skip` is given, the same on all ranks: if it is not zero, the state stays as
    # it was, and what is written is of no use. Gradients are finite then, and whether means are is not looked at.
    heeds_skip: bool = False
    may_send_whole: bool = False  # whether an integration may send a small bucket by `send_all` in place of `reduce`
    may_forget: bool = False  # whether a share of the residual may be dropped in each step; see `State.forget`
    # The formats, up and down, of a scheme that sends every element as `quantized_all_reduce_` does, and adds what is not sent to the next
    # gradient, all of it. An integration that makes and encodes steps in one pass does it in place of `reduce`.
    whole_values: "tuple[Values, Values] | None" = None

    @abstractmethod
    def reduce(self, state: State, bucket: Bucket, comm: Comm) -> Report:
        """Replace `bucket.grad` [n] by an estimate of the mean gradient, the same bits on every rank.

        Called on every rank for the same buckets in the same order. NaN or Inf on any rank must show in the result on every rank,
        and leave `state` as it was. An exception on any rank fails the step on all ranks. Communicate
        through a `MeteredComm` around `comm`, and return `self.report(bucket, metered.sent)`.
        """

    def send_all(self, state: State, bucket: Bucket, comm: Comm) -> Report:
        """Reduce as `reduce` does, but leave nothing behind: all that was held back is in the mean, in the precision of the residual."""
        return self.reduce(state, bucket, comm)

    def report(
        self,
        bucket: Bucket,
        cost: Cost = _NO_COST,
        selected: int | None = None,
        union: int | None = None,
        details: Mapping[str, Detail] | None = None,
    ) -> Report:
        """Return the report of one reduction. `selected` (k) and `union` (K) are all n elements where not given."""
        return reported(self.name, bucket, cost, selected, union, details)

    def start(self, vectors: Vectors | None = None) -> State:
        """Return an empty state, for one rank and one model. `vectors`: those of the scheme that this one is inside."""
        return State(self, vectors)

    @property
    def inner(self) -> "Mapping[str, Scheme]":
        """The schemes inside this one, which `state.inner` has the states of, by the same keys."""
        return {}

    def parts(self, bucket: Bucket) -> dict[str, Bucket]:
        """Return the part of a bucket that each scheme inside reduces, by the keys of `inner`."""
        return {}

    def unsent(self, state: State, bucket: Bucket, comm: Comm) -> tuple[Tensor, Rows | None] | None:
        """Return the residual of a bucket, [n], and the rows of it, if any, in which it holds sums over all ranks. See `State.unsent`."""
        return (state.residual(bucket), None) if self.has_residual else None

    def rescaled(self, state: State, factors: Mapping[str, float]) -> None:
        """Rescale what else is in units of the gradient, besides vectors: by the factor of each named parameter."""
        return

    @property
    def writes_steps(self) -> bool:
        """Whether elements of what is written are about 1, as those of Adam's steps are, so that SGD takes a learning rate of Adam."""
        return any(each.writes_steps for each in self.inner.values())

    @property
    def follows_rate(self) -> bool:
        """Whether its authors' residual holds gradients times the learning rate: give `attach` the optimizer, then it is the same."""
        return False

    def reduce_scatter_form(self) -> "ReduceScatterScheme":
        """Return this scheme as a reduce-scatter with the same settings, for FSDP2's shard axis, without its state.

        Raises ValueError where there is none.
        """
        raise ValueError(
            f"{self.name} has no reduce-scatter; for the shard axis there are TwoShot, ExactOkTopk, SkipReduce and Dense. On a "
            'replicate axis every scheme works: attach(model, scheme, replicate=mesh["replicate"])'
        )

    def __repr__(self) -> str:
        return f"{type(self).__qualname__}()"  # a dataclass says its settings


class ReduceScatterScheme(ABC):
    """The form of a scheme for a shard axis: a frozen dataclass. Its residual is of the whole gradient, by shard."""

    name: str
    inner: Mapping[str, Scheme] = {}
    interleaves: bool = True

    @property
    def needs_layout(self) -> bool:
        """Whether it must know where each parameter lies."""
        return True

    @property
    def has_residual(self) -> bool:
        """Whether anything is held back from one step to a later one."""
        return True

    def start(self) -> "ShardState":
        """Return an empty state, for one rank and one model."""
        return ShardState(self)

    @abstractmethod
    def reduce_scatter(self, state: State, bucket: Bucket, out: Tensor, comm: Comm, average: bool) -> Report:
        """Write to `out` [m] this rank's chunk of the estimate of the mean gradient, or of the sum. `bucket.grad` is used up."""

    def found_inf(self, bucket: Bucket, out: Tensor, cost: Cost) -> Report:
        """Fill `out` with NaN, and return the report of a step that changed no residual."""
        out.fill_(torch.nan)
        n = bucket.grad.numel()
        return Report(self.name, bucket.key, bucket.step, n, 0, 0, cost, details={"overflow": True})


class ShardState(State):
    """The state of a `ReduceScatterScheme`, whose residual is of shards, and all else of whole parameters."""

    def rescale(self, factors: Mapping[str, float]) -> None:
        self.vectors.rescale(self._of_shards(factors))

    def weigh(self, factors: Mapping[str, float]) -> None:
        self.vectors.weigh(self._of_shards(factors))

    def reduce_scatter(self, bucket: Bucket, out: Tensor, comm: Comm, average: bool) -> Report:
        """Write to `out` [m] this rank's chunk of the estimate. See `ReduceScatterScheme.reduce_scatter`."""
        return self.scheme.reduce_scatter(self, bucket, out, comm, average)

    def return_shards(self, written: Bucket, share: int) -> None:
        """Add `share` times what was written to the residual again: P times a mean, once a sum. The step will not be applied."""
        residual = self.vectors.by_kind("residual").by_name
        for entry in written.layout:  # those of this rank's chunk: no other rank received it, so no other rank holds it
            if entry.name in residual:
                residual[entry.name].add_(entry.span.of(written.grad), alpha=share)

    def _of_shards(self, factors: Mapping[str, float]) -> dict[str, float]:
        return {name: factors.get(parameter_of(name), 1.0) for name in self.vectors.by_kind("residual").by_name}


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
