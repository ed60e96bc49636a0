"""One reduction on all ranks of a world in one process, checked, and what it leaves behind."""

from collections.abc import Sequence

import torch
from torch import Tensor

from sparsync import Bucket, Report
from sparsync.comm import LocalWorld, MeteredComm
from sparsync.core import Comm
from sparsync.schemes import State


def reduced(states: Sequence[State], given: list[Tensor], step: int = 0) -> tuple[Tensor, list[Report], list[Tensor]]:
    """Return the mean, which all ranks have, the reports and the residuals; the bytes counted are those of the reports."""

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
