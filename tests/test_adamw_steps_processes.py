"""Steps of AdamW between processes: what ranks do when one fails."""

from copy import deepcopy

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from helpers.distributed import run
from sparsync import Report
from sparsync.core import Bucket, Comm
from sparsync.exchanges.measured import MeanOfSketches
from test_adamw_steps_state import fit, normed

pytestmark = pytest.mark.distributed


def failing() -> tuple[list[str], list[Tensor]]:
    """Train while rank 0 fails in the sketch of step 3, before its first message of it."""
    reduce = MeanOfSketches.reduce

    def fail_once(self: MeanOfSketches, bucket: Bucket, comm: Comm) -> Report:
        if bucket.step == 3 and comm.rank == 0:
            raise MemoryError("no memory")
        return reduce(self, bucket, comm)

    steps, seen = normed(), []
    MeanOfSketches.reduce = fail_once
    for step in range(9):
        try:
            fit(steps, range(step, step + 1), too_long=(5,))
        except (MemoryError, RuntimeError) as error:
            seen.append(f"{step} {type(error).__name__}")
            assert "no memory" in str(error)
    MeanOfSketches.reduce = reduce  # for the next test in this process
    measured = [report.step for report in steps.reports() if report.key == "ratio"]
    assert steps.stats()["skipped"] == 1
    assert measured == [0, 1, 2, 4, 5, 6, 7]  # in the failed step too, of which there are no reports
    return seen, fit(steps, range(0))


def test_when_a_measurement_fails_the_step_does_on_all_ranks_and_the_next_ones_agree_again() -> None:
    first, second = run(failing, 2)
    assert (first[0], second[0]) == (["3 MemoryError"], ["3 ConnectionLostError"])
    assert torch.equal(first[1][-1], second[1][-1])


def apart() -> None:
    """Have an error on rank 0 while it applies the mean of the third of five steps."""

    def fail(*_: object) -> None:
        raise MemoryError("no memory")

    rank = dist.get_rank()
    whole, steps, seen = normed(), normed(), []
    wanted = fit(whole, range(5))
    fit(steps, range(2))
    saved = deepcopy(steps.state_dict())
    for step in (2, 3) if rank == 0 else (2, 3, 4):
        if rank == 0 and step == 2:
            vars(steps._sender)["move"] = fail
        try:
            fit(steps, range(step, step + 1))
        except (MemoryError, RuntimeError) as error:
            seen.append(f"{step} {type(error).__name__}: {error}")
        vars(steps._sender).pop("move", None)
    kinds = ["2 MemoryError", "3 RuntimeError"] if rank == 0 else ["3 ConnectionLostError", "4 RuntimeError"]
    assert [each.split(":")[0] for each in seen] == kinds
    assert "rank 0 has applied only a part of one" in seen[-1]
    if rank == 0:
        with pytest.raises(RuntimeError, match="half applied on this rank"):
            steps.state_dict()
    steps.load_state_dict(saved)
    assert all(map(torch.equal, fit(steps, range(2, 5)), wanted))


def test_after_an_error_while_one_rank_applies_the_mean_all_raise_until_a_checkpoint_is_loaded() -> None:
    run(apart, 2)
