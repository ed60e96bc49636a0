"""The driver of schemes with error feedback, met by schemes of a third party: what it mends, and what it refuses."""

from dataclasses import dataclass

import pytest
import torch

from helpers.stepped import Stepped
from sparsync import Bucket, Comm, ErrorFeedbackScheme
from sparsync.comm import LocalWorld
from sparsync.comm.local import LocalComm
from sparsync.schemes import Accumulator, SkipReduce, Sparse, State, TwoShot, Update


@dataclass(frozen=True)
class FirstElements(ErrorFeedbackScheme):
    """Send the first `count` elements of every rank."""

    count: int = 2

    name = "first_elements"

    def step(self, state: State, acc: Accumulator, bucket: Bucket, comm: Comm) -> Update:
        index = torch.arange(self.count, dtype=torch.int32)
        mean = comm.all_reduce(acc.values[: self.count]) / comm.size if comm.size > 1 else acc.values[: self.count]
        return Update(Sparse(index, mean, bucket.grad.numel()), cleared=index, selected=self.count)


@dataclass
class Steps:
    taken: int = 0


@dataclass(frozen=True)
class Counted(FirstElements):
    """The same, counting the steps of each rank."""

    def step(self, state: State, acc: Accumulator, bucket: Bucket, comm: Comm) -> Update:
        state.own_state("steps", Steps, bucket, comm.size).taken += 1
        return super().step(state, acc, bucket, comm)


def reduce(state: State, grad: torch.Tensor) -> Bucket:
    bucket = Bucket("weights", grad, 0)
    LocalWorld(1).run(lambda comm: state.reduce(bucket, comm))
    return bucket


def test_a_mean_that_is_a_view_of_the_accumulator_is_written_whole() -> None:
    state = FirstElements().start()
    assert reduce(state, torch.tensor([1.0, 2.0, 3.0])).grad.tolist() == [1.0, 2.0, 0.0]
    assert state.state_dict()["residual"]["weights"].tolist() == [0.0, 0.0, 3.0]


def test_a_finite_mean_over_nan_is_an_error_and_the_residual_stays() -> None:
    def body(comm: LocalComm) -> None:
        state = FirstElements().start()
        with pytest.raises(
            RuntimeError, match=r"FirstElements.step returned a finite mean, although this rank's gradient"
        ):
            state.reduce(Bucket("weights", torch.tensor([1.0, 2.0, torch.nan]), 0), comm)
        assert state.state_dict()["residual"]["weights"].tolist() == [0.0, 0.0, 0.0]

    LocalWorld(2).run(body)


def test_a_residual_that_would_never_be_sent_is_refused() -> None:
    state = {"residual": {"weights": torch.ones(2)}}
    with pytest.raises(
        ValueError, match=r"this state has a residual, which SkipReduce.*feedback=False.* would never send"
    ):
        SkipReduce().start().load_state_dict(state)


def test_a_step_with_nan_drops_nothing_of_a_residual_that_decays() -> None:
    state = TwoShot(density=0.5, values="float32", decay=0.5).start()
    reduce(state, torch.tensor([1.0, 2.0]))
    assert state.state_dict()["residual"]["weights"].tolist() == [1.0, 0.0]
    reduce(state, torch.tensor([torch.nan, 0.0]))
    assert state.state_dict()["residual"]["weights"].tolist() == [1.0, 0.0]
    reduce(state, torch.tensor([1.0, 4.0]))
    assert state.state_dict()["residual"]["weights"].tolist() == [1.5, 0.0]


def test_a_snapshot_brings_back_what_a_rank_has_alone() -> None:
    def body(comm: LocalComm) -> None:
        handle = Stepped(comm, Counted()).step(3)
        before = handle.state_dict()
        handle.restore(handle.snapshot())
        after = handle.state_dict()
        assert before["scheme"]["own"]["steps"]["all"]["state"] == {"taken": 3}
        assert before["scheme"]["own"] == after["scheme"]["own"]

    LocalWorld(2).run(body)
