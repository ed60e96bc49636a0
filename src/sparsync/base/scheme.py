"""The base classes of schemes and of their sharded forms: the interface that integrations call, with defaults for all but `reduce`.

A reduce-scatter for sharded training leaves every rank its chunk of the mean, without an all-gather. The gradient is P chunks of m
elements; rank r owns chunk r. Every parameter has a shard in every chunk. There are no replicas, so nothing need be bit-identical.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sparsync.base.state import State
from sparsync.core import Bucket, Comm, Cost, Detail, ParameterSpan, Report, Rows, laid_out
from sparsync.feedback import Vectors

if TYPE_CHECKING:
    from sparsync.wire import Values
_NO_COST = Cost()


class Scheme(ABC):
    """One way to reduce gradients. Subclass it, give it a `name`, and implement `reduce`.

    Write a scheme as a frozen dataclass, so that ranks can compare its settings. What it remembers between steps is in the `State` that
    it is called with, one for every model and rank, so several models and ranks can share a scheme. The defaults
    describe a scheme that remembers nothing. A scheme with error feedback subclasses `sparsync.ErrorFeedbackScheme` instead and
    implements `step`.
    """

    name: str
    has_residual: bool = False  # whether a step may hold anything back for a later one
    # Whether the result already includes a momentum; the optimizer should then be SGD without momentum.
    has_momentum: bool = False
    # Whether a bucket may be reduced while another one waits for other ranks. False if a step of one depends on a step of another.
    # `reduce` is never interrupted between two exchanges.
    interleaves: bool = True
    # Whether a step's mean lacks elements that ranks hold back in residuals: an optimizer then sees a sparse gradient.
    leaves_out: bool = False
    share_sent: float = 1.0  # the share of the elements that a rank sends in a step
    # Whether `reduce` runs without a host sync if `bucket.skip`, the same on all ranks, is given. If `skip` is not zero, the state does
    # not change and the result is meaningless. The gradients are then known to be finite; means are not checked.
    heeds_skip: bool = False
    may_send_whole: bool = False  # whether an integration may send a small bucket by `send_all` in place of `reduce`
    may_forget: bool = False  # whether every step may drop a share of the residual; see `State.forget`
    # The formats, up and down, of a scheme that sends every element as `quantized_all_reduce_` does and adds all of the error to the next
    # gradient. An integration that computes and encodes steps in one pass uses them in place of `reduce`.
    whole_values: "tuple[Values, Values] | None" = None

    @abstractmethod
    def reduce(self, state: State, bucket: Bucket, comm: Comm) -> Report:
        """Replace `bucket.grad` [n] by an estimate of the mean gradient, the same bits on every rank.

        Called on every rank for the same buckets in the same order. NaN or Inf on any rank must show in the result on every rank
        and must not change `state`. An exception on any rank fails the step on all ranks. Communicate
        through a `MeteredComm` around `comm`, and return `self.report(bucket, metered.sent)`.
        """

    def send_all(self, state: State, bucket: Bucket, comm: Comm) -> Report:
        """Reduce as `reduce` does, but send the whole residual too, in the precision of the residual."""
        return self.reduce(state, bucket, comm)

    def report(
        self,
        bucket: Bucket,
        cost: Cost = _NO_COST,
        selected: int | None = None,
        union: int | None = None,
        details: Mapping[str, Detail] | None = None,
    ) -> Report:
        """Return the report of one reduction. `selected` (k) and `union` (K) default to all n elements."""
        n = bucket.grad.numel()
        k, K = n if selected is None else selected, n if union is None else union
        return Report(self.name, bucket.key, bucket.step, n, k, K, cost, details=details or {})

    def start(self, vectors: Vectors | None = None) -> State:
        """Create an empty state for one rank and one model. `vectors`: the vectors of the enclosing scheme, if any."""
        return State(self, vectors)

    @property
    def inner(self) -> "Mapping[str, Scheme]":
        """The schemes inside this one. `state.inner` has their states under the same keys."""
        return {}

    def parts(self, bucket: Bucket) -> dict[str, Bucket]:
        """Split a bucket into the parts that the schemes inside reduce, by the keys of `inner`."""
        return {}

    def unsent(self, state: State, bucket: Bucket, comm: Comm) -> tuple[Tensor, Rows | None] | None:
        """Return the residual of a bucket, [n], and the rows, if any, that hold sums over all ranks. See `State.unsent`."""
        return (state.residual(bucket), None) if self.has_residual else None

    def rescaled(self, state: State, factors: Mapping[str, float]) -> None:
        """Multiply state in units of the gradient, other than vectors, by the factor of each named parameter."""
        return

    def reduce_scatter_form(self) -> "ReduceScatterScheme":
        """Convert this scheme to a reduce-scatter with the same settings, for FSDP2's shard axis, without its state.

        Raises ValueError if the scheme has none.
        """
        raise ValueError(
            f"{self.name} has no reduce-scatter; for the shard axis there are TwoShot, ExactOkTopk, SkipReduce and Dense. On a "
            'replicate axis every scheme works: attach(model, scheme, options=sparsync.Options(replicate=mesh["replicate"]))'
        )

    def __repr__(self) -> str:
        return f"{type(self).__qualname__}()"  # a dataclass overrides this with its settings


class ReduceScatterScheme(ABC):
    """The form of a scheme for a shard axis: a frozen dataclass. Its residual covers the whole gradient, by shard."""

    name: str
    inner: Mapping[str, Scheme] = {}
    interleaves: bool = True

    @property
    def has_residual(self) -> bool:
        """Whether a step may hold anything back for a later one."""
        return True

    def start(self) -> "ShardState":
        """Create an empty state for one rank and one model."""
        return ShardState(self)

    @abstractmethod
    def reduce_scatter(self, state: State, bucket: Bucket, out: Tensor, comm: Comm, average: bool) -> Report:
        """Write this rank's chunk of the estimated mean, or sum, of the gradients to `out` [m]. Overwrites `bucket.grad`."""

    def found_inf(self, bucket: Bucket, out: Tensor, cost: Cost) -> Report:
        """Fill `out` with NaN, and report a step that changed no residual."""
        out.fill_(torch.nan)
        n = bucket.grad.numel()
        return Report(self.name, bucket.key, bucket.step, n, 0, 0, cost, details={"overflow": True})


class ShardState(State):
    """The state of a `ReduceScatterScheme`: the residual is by shard, everything else by parameter."""

    def rescale(self, factors: Mapping[str, float]) -> None:
        self.vectors.rescale(self._of_shards(factors))

    def weigh(self, factors: Mapping[str, float]) -> None:
        self.vectors.weigh(self._of_shards(factors))

    def reduce_scatter(self, bucket: Bucket, out: Tensor, comm: Comm, average: bool) -> Report:
        """Write this rank's chunk of the estimate to `out` [m]. See `ReduceScatterScheme.reduce_scatter`."""
        return self.scheme.reduce_scatter(self, bucket, out, comm, average)

    def return_shards(self, written: Bucket, share: int) -> None:
        """Add `share` times the written chunk to the residual, because the step will not be applied: P for a mean, 1 for a sum."""
        residual = self.vectors.by_kind("residual").by_name
        for entry in written.layout:  # this rank's chunk, which no other rank received
            if entry.name in residual:
                residual[entry.name].add_(entry.span.of(written.grad), alpha=share)

    def _of_shards(self, factors: Mapping[str, float]) -> dict[str, float]:
        return {name: factors.get(parameter_of(name), 1.0) for name in self.vectors.by_kind("residual").by_name}


def shard_layout(lengths: Sequence[tuple[str, int]], P: int) -> tuple[ParameterSpan, ...]:
    """Lay out all shards in the whole buffer, given the parameters' names and the lengths of their shards."""
    return laid_out((shard_name(name, owner), length) for owner in range(P) for name, length in lengths)


def own_shard_layout(lengths: Sequence[tuple[str, int]], owner: int) -> tuple[ParameterSpan, ...]:
    """Lay out the shards of `owner` in its chunk."""
    return laid_out((shard_name(name, owner), length) for name, length in lengths)


def shard_name(name: str, owner: int) -> str:
    """Name the shard of a parameter that `owner` owns."""
    return f"{name}[{owner}]"


def parameter_of(name: str) -> str:
    """Return the parameter's name, given a shard's."""
    return name[: name.rindex("[")]
