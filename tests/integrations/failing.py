"""Train with one rank that fails once, with any integration, and check what the others see."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sparsync import Bucket, Report
from sparsync.schemes import State

FAILURE = "all ranks raise at once, with bucket and step; the next steps work, and replicas are identical"
STEPS, FAILED = 4, 1


@dataclass
class Failure:
    """The error of a step."""

    message: str


def fail_once(state: State) -> None:
    """Make a state fail once, on rank 1, in the first bucket of a step."""
    failed = list[int]()

    def unlucky(reduce: Callable[..., Report], bucket: Bucket, *args: Any) -> Report:
        if (bucket.step, dist.get_rank()) == (FAILED, 1) and not failed:
            failed.append(bucket.step)
            raise ValueError("no luck today")
        return reduce(bucket, *args)

    for name in ("reduce", "reduce_scatter"):
        if (reduce := getattr(state, name, None)) is not None:
            setattr(state, name, partial(unlucky, reduce))


def failing(step: Callable[[int], None], gradients: Callable[[], Tensor]) -> list[Tensor | Failure]:
    """Collect the gradients or the failure of each step."""
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
