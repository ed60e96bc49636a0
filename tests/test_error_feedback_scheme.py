"""The driver of schemes with error feedback, met by schemes of a third party: what it mends, and what it refuses."""

from dataclasses import dataclass

import pytest
import torch

from helpers.stepped import Stepped
from sparsync import Accumulator, Bucket, Comm, ErrorFeedbackScheme, LocalWorld, MiCRO, SkipReduce, Sparse, TopK, Update
from sparsync.comm.local import LocalComm
from sparsync.testing import check_scheme


@dataclass
class FirstElements(ErrorFeedbackScheme):
    """Send the first `count` elements of every rank."""

    count: int = 2

    name = "first_elements"

    def step(self, acc: Accumulator, bucket: Bucket, comm: Comm) -> Update:
        index = torch.arange(self.count, dtype=torch.int32)
        mean = comm.all_reduce(acc.values[: self.count]) / comm.size if comm.size > 1 else acc.values[: self.count]
        return Update(Sparse(index, mean, bucket.grad.numel()), cleared=index, selected=self.count)


@dataclass
class Steps:
    taken: int = 0


@dataclass
class Counted(FirstElements):
    """The same, counting the steps of each rank."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.steps = self.own_state("steps", Steps)

    def step(self, acc: Accumulator, bucket: Bucket, comm: Comm) -> Update:
        self.steps.of(bucket, comm.size).taken += 1
        return super().step(acc, bucket, comm)


def reduce(scheme: ErrorFeedbackScheme, grad: torch.Tensor) -> Bucket:
    bucket = Bucket("weights", grad, 0)
    LocalWorld(1).run(lambda comm: scheme.reduce(bucket, comm))
    return bucket


def test_a_mean_that_is_a_view_of_the_accumulator_is_written_whole() -> None:
    scheme = FirstElements()
    assert reduce(scheme, torch.tensor([1.0, 2.0, 3.0])).grad.tolist() == [1.0, 2.0, 0.0]
    assert scheme.state_dict()["residual"]["weights"].tolist() == [0.0, 0.0, 3.0]


def test_a_finite_mean_over_nan_is_an_error_and_the_residual_stays() -> None:
    def body(comm: LocalComm) -> None:
        scheme = FirstElements()
        with pytest.raises(
            RuntimeError, match=r"FirstElements.step returned a finite mean, although this rank's gradient"
        ):
            scheme.reduce(Bucket("weights", torch.tensor([1.0, 2.0, torch.nan]), 0), comm)
        assert scheme.state_dict()["residual"]["weights"].tolist() == [0.0, 0.0, 0.0]

    LocalWorld(2).run(body)


def test_settings_stay_as_they_are() -> None:
    scheme = MiCRO(0.01)
    with pytest.raises(AttributeError, match="density of MiCRO is a setting, which stays as it is; make a new scheme"):
        scheme.density = 0.5
    assert scheme.density == 0.01


def test_a_residual_that_would_never_be_sent_is_refused() -> None:
    state = {"residual": {"weights": torch.ones(2)}}
    with pytest.raises(ValueError, match="this state has a residual, which feedback=False would never send"):
        SkipReduce().load_state_dict(state)


def test_a_class_that_is_no_dataclass_is_told_so() -> None:
    class PlainFeedback(ErrorFeedbackScheme):
        name = "plain"

        def step(self, acc: Accumulator, bucket: Bucket, comm: Comm) -> Update:
            raise AssertionError

    scheme = PlainFeedback()
    with pytest.raises(TypeError, match="PlainFeedback has no error feedback yet; decorate it with @dataclass"):
        LocalWorld(1).run(lambda comm: scheme.reduce(Bucket("weights", torch.ones(2), 0), comm))


@dataclass
class Forgetful(TopK):
    """TopK that forgets half of its residual at each step."""

    density: float = 0.1
    decay: float = 0.5

    name = "forgetful"


def test_a_residual_that_decays_keeps_all_invariants() -> None:
    check_scheme(Forgetful, worlds=(1, 2, 4))


def test_a_step_with_nan_drops_nothing_of_a_residual_that_decays() -> None:
    scheme = Forgetful(density=0.5)
    reduce(scheme, torch.tensor([1.0, 2.0]))
    assert scheme.state_dict()["residual"]["weights"].tolist() == [1.0, 0.0]
    reduce(scheme, torch.tensor([torch.nan, 0.0]))
    assert scheme.state_dict()["residual"]["weights"].tolist() == [1.0, 0.0]
    reduce(scheme, torch.tensor([1.0, 4.0]))
    assert scheme.state_dict()["residual"]["weights"].tolist() == [1.5, 0.0]


@pytest.mark.parametrize("decay", [-0.1, 1.5])
def test_a_decay_that_is_no_share_is_refused(decay: float) -> None:
    with pytest.raises(ValueError, match=rf"decay must be in \[0, 1\].*got {decay}"):
        Forgetful(decay=decay)


def test_a_snapshot_brings_back_what_a_rank_has_alone() -> None:
    def body(comm: LocalComm) -> None:
        handle = Stepped(comm, Counted()).step(3)
        before = handle.state_dict()
        handle.restore(handle.snapshot())
        after = handle.state_dict()
        assert before["scheme"]["own"]["steps"]["all"]["state"] == {"taken": 3}
        assert before["scheme"]["own"] == after["scheme"]["own"]

    LocalWorld(2).run(body)
