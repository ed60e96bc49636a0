"""Reduce-scatters for sharded training: each rank ends with its own chunk of the mean, and no all-gather follows.

The gradient is P chunks of m elements, chunk r owned by rank r for good. Each parameter lies in all chunks, with a shard in each.
There are no replicas, so nothing need be bit-identical.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from sparsync.core import Bucket, Comm, Cost, ParameterSpan, Report, laid_out
from sparsync.feedback import ErrorFeedback, Residuals, state_from


class ReduceScatterScheme(ABC):
    """The form of a scheme for a shard axis. Holds the state of one rank: a residual of the whole gradient, by shard."""

    name: str

    def __init__(self, residuals: Residuals = "float32", decay: float = 1.0) -> None:
        self.feedback = ErrorFeedback(residuals, decay=decay)

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
        self.feedback.load_state_dict(state_from(state, "residual", "a sharded scheme"))

    def rescale_residual(self, factors: Mapping[str, float]) -> None:
        """Multiply the residual of each named parameter by its factor."""
        self.feedback.rescale({name: factors.get(parameter_of(name), 1.0) for name in self.feedback.by_name})

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
