"""Training in which one rank fails once, behind any integration, and what the others must see."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparsync import Bucket, Report
from sparsync.core import Comm

FAILURE = "all ranks raise at once, with bucket and step; the next steps work, and replicas are identical"
STEPS, FAILED = 4, 1


@dataclass
class Failure:
    """What a step raised."""

    message: str


class Unlucky:
    """A scheme that fails once, on rank 1, in the first bucket of a step; the rest is that of `inner`."""

    def __init__(self, inner: Any) -> None:  # Any: a Scheme or a ShardedScheme
        self.inner = inner
        self.failed = False

    def __getattr__(self, name: str) -> Any:  # Any: whatever `inner` has
        return getattr(self.inner, name)

    def reduce(self, bucket: Bucket, comm: Comm) -> Report:
        self._fail(bucket, comm)
        return self.inner.reduce(bucket, comm)

    def reduce_scatter(self, bucket: Bucket, out: Tensor, comm: Comm, average: bool) -> Report:
        self._fail(bucket, comm)
        return self.inner.reduce_scatter(bucket, out, comm, average)

    def _fail(self, bucket: Bucket, comm: Comm) -> None:
        if (bucket.step, comm.rank) == (FAILED, 1) and not self.failed:
            self.failed = True
            raise ValueError("no luck today")


def failing(step: Callable[[int], None], gradients: Callable[[], Tensor]) -> list[Tensor | Failure]:
    """Return the gradients or the failure of each step."""
    found: list[Tensor | Failure] = []
    for number in range(STEPS):
        try:
            step(number)
        except Exception as error:
            found.append(Failure("; ".join([str(error), *getattr(error, "__notes__", [])])))
        else:
            found.append(gradients().clone())
    return found


def failed_on_all_ranks(id: str, ranks: list[list[Tensor | Failure]]) -> None:
    for rank, steps in enumerate(ranks):
        for number, came in enumerate(steps):
            if number != FAILED:
                assert isinstance(came, Tensor), f"rank {rank} at step {number}: {came}"
                assert torch.equal(came, ranks[0][number]), f"rank {rank} at step {number}"  # pyright: ignore[reportArgumentType]
                continue
            assert isinstance(came, Failure), f"rank {rank} did not fail"
            assert "failed on bucket" in came.message and f"at step {FAILED}" in came.message, came.message
    assert isinstance(failure := ranks[1][FAILED], Failure)
    assert "no luck today" in failure.message
