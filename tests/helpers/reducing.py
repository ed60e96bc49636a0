"""Reduce once on all ranks of a world in one process, with checks, and return the residuals."""

from collections.abc import Sequence

import torch
from torch import Tensor

from sparsync import Bucket, Report
from sparsync.comm import LocalWorld, MeteredComm
from sparsync.core import Comm
from sparsync.schemes import State


def reduced(states: Sequence[State], given: list[Tensor], step: int = 0) -> tuple[Tensor, list[Report], list[Tensor]]:
    """Reduce, and return the common mean, the reports and the residuals; checks that reports state the counted bytes."""

    def body(comm: Comm) -> tuple[Tensor, Report]:
        metered = MeteredComm(comm)
        bucket = Bucket("w", given[comm.rank].clone(), step)
        report = states[comm.rank].reduce(bucket, metered)
        assert metered.take()[0] == report.cost
        return bucket.grad, report

    found = LocalWorld(len(states)).run(body)
    assert all(torch.allclose(mean, found[0][0], rtol=0, atol=0, equal_nan=True) for mean, _ in found)
    residuals = [state.state_dict()["residual"]["w"] for state in states]
    return found[0][0], [report for _, report in found], residuals
