"""sparsync.testing: a sound scheme of a third party passes, and each way to break it is found by the invariant that is about it."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import sparsync
from sparsync import Bucket, Report, Scheme
from sparsync.base.error_feedback import Update
from sparsync.comm import Cost
from sparsync.comm.metered import all_reduce_cost
from sparsync.core import Comm
from sparsync.feedback import Accumulator, Vectors
from sparsync.schemes import OkTopk, State, TwoShot
from sparsync.schemes.exact_micro import ExactMiCRO
from sparsync.schemes.oktopk import Control
from sparsync.testing import INVARIANTS, SchemeUnderTest, check, check_scheme


class Alternating(Scheme):
    """Every other element at each step; the rest stays in the residual. Written as a third party would, without our parts."""

    name = "alternating"

    has_residual = True
    state_kind: type[State] = State

    def __init__(self, every: int = 2) -> None:
        self.every = every

    def start(self, vectors: Vectors | None = None) -> State:
        return self.state_kind(self, vectors)

    def reduce(self, state: State, bucket: Bucket, comm: Comm) -> Report:
        n, P = bucket.grad.numel(), comm.size
        if n == 0:
            return Report(self.name, bucket.key, bucket.step, 0, 0, 0, Cost())
        acc = self.accumulate(state, bucket)
        chosen = torch.arange(bucket.step % self.every, n, self.every)
        flag = acc.new_tensor([0.0 if acc.isfinite().all() else torch.nan])
        total = self.sum_over_ranks(torch.cat([acc[chosen], flag]), comm)
        mean = self.divided(total[:-1], P).to(bucket.grad.dtype)
        bucket.grad.zero_()
        if self.is_finite(total) and bool(mean.isfinite().all()):
            bucket.grad[chosen] = mean
            self.keep(state, bucket, acc, chosen)
            if comm.rank == 0:
                self.held(state, bucket)[chosen] += self.dropped(P * (self.divided(total[:-1], P) - mean))
        else:
            bucket.grad[:] = torch.nan
        cost = all_reduce_cost(chosen.numel() + 1, acc.element_size(), P, comm.rank)
        return Report(self.name, bucket.key, bucket.step, n, chosen.numel(), chosen.numel(), self.reported(cost))

    def held(self, state: State, bucket: Bucket) -> Tensor:
        return state.residual(bucket)

    def accumulate(self, state: State, bucket: Bucket) -> Tensor:
        return self.held(state, bucket) + bucket.grad

    def sum_over_ranks(self, x: Tensor, comm: Comm) -> Tensor:
        return comm.all_reduce(x).clone()

    def divided(self, total: Tensor, P: int) -> Tensor:
        return total / P

    def dropped(self, by_the_type: Tensor) -> Tensor:
        return by_the_type

    def is_finite(self, total: Tensor) -> bool:
        return bool(total.isfinite().all())

    def keep(self, state: State, bucket: Bucket, acc: Tensor, chosen: Tensor) -> None:
        acc[chosen] = 0
        self.held(state, bucket).copy_(acc)

    def reported(self, cost: Cost) -> Cost:
        return cost


class AddsItsLastMean(Alternating):
    """A momentum that the optimizer does not know."""

    def reduce(self, state: State, bucket: Bucket, comm: Comm) -> Report:
        report, last = super().reduce(state, bucket, comm), state.common_vector("last", bucket)
        bucket.grad += 0.5 * last
        last.copy_(bucket.grad)
        return report


class LosesMass(Alternating):
    def keep(self, state: State, bucket: Bucket, acc: Tensor, chosen: Tensor) -> None:
        acc[bucket.grad.numel() // 2] = 0
        super().keep(state, bucket, acc, chosen)


class LosesWhatTheGradientsTypeDrops(Alternating):
    def dropped(self, by_the_type: Tensor) -> Tensor:
        return torch.zeros_like(by_the_type)


class RoundsItsResidual(Alternating):
    def keep(self, state: State, bucket: Bucket, acc: Tensor, chosen: Tensor) -> None:
        super().keep(state, bucket, acc * (1 + 1e-6), chosen)


class DiffersBetweenRanks(Alternating):
    def sum_over_ranks(self, x: Tensor, comm: Comm) -> Tensor:
        parts = comm.all_gather(x, [x.numel()] * comm.size)
        mine = [*parts[comm.rank :], *parts[: comm.rank]]  # each rank adds in another order
        return sum(mine[1:], start=mine[0])


class IsNoMean(Alternating):
    def divided(self, total: Tensor, P: int) -> Tensor:
        return total if P == 1 else total / (P - 1)


class SendsToItself(Alternating):
    def reported(self, cost: Cost) -> Cost:
        return cost + Cost(1, 1, 4)


class DrawsFromTheGlobalGenerator(Alternating):
    def sum_over_ranks(self, x: Tensor, comm: Comm) -> Tensor:
        torch.rand(1)
        return super().sum_over_ranks(x, comm)


class ReportsOtherBytes(Alternating):
    def reported(self, cost: Cost) -> Cost:
        return Cost(cost.steps, cost.messages, cost.nbytes // 2)


def with_state(kind: type[State]) -> type[Alternating]:
    """Make the scheme with this state, under the state's name."""
    return type(kind.__name__, (Alternating,), {"state_kind": kind})


class NotRestored(State):
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        return


class OfOneWorld(State):
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        residual = {name: part for name, part in state["residual"].items() if name != "head.bias"}
        super().load_state_dict({"residual": residual})


class NamesNoParameter(Alternating):
    def held(self, state: State, bucket: Bucket) -> Tensor:
        return state.residual(Bucket("any", bucket.grad, 0))


class NotRolledBack(State):
    def rollback(self, bucket: Bucket) -> None:
        return


class NotWeighed(State):
    def weigh(self, factors: Mapping[str, float]) -> None:
        return


class ResetWhole(State):
    def reset_shared_state(self) -> None:
        self.vectors.load_state_dict({})


class NeverSendsTheLast(Alternating):
    def reduce(self, state: State, bucket: Bucket, comm: Comm) -> Report:
        whole = Bucket(bucket.key, bucket.grad, 0, bucket.layout)  # always the same elements
        return super().reduce(state, whole, comm)


class SendsEmptyBuckets(Alternating):
    def reduce(self, state: State, bucket: Bucket, comm: Comm) -> Report:
        if bucket.grad.numel():
            return super().reduce(state, bucket, comm)
        comm.all_reduce(torch.zeros(1))
        return Report(self.name, bucket.key, bucket.step, 0, 0, 0, all_reduce_cost(1, 4, comm.size, comm.rank))


class OverflowsInTheResidual(Alternating):
    def keep(self, state: State, bucket: Bucket, acc: Tensor, chosen: Tensor) -> None:
        super().keep(state, bucket, acc * 2 / 2, chosen)


class WritesSinglePrecision(Alternating):
    def reduce(self, state: State, bucket: Bucket, comm: Comm) -> Report:
        report = super().reduce(state, bucket, comm)
        bucket.grad = bucket.grad.float()
        return report


class SwallowsNaN(Alternating):
    def accumulate(self, state: State, bucket: Bucket) -> Tensor:
        return super().accumulate(state, bucket).nan_to_num()


BROKEN = {
    AddsItsLastMean: "momentum",
    LosesMass: "conservation",
    LosesWhatTheGradientsTypeDrops: "rounding",
    DiffersBetweenRanks: "replicas",
    IsNoMean: "identity",
    SendsToItself: "one_rank",
    DrawsFromTheGlobalGenerator: "determinism",
    ReportsOtherBytes: "traffic",
    with_state(NotRestored): "resume",
    with_state(OfOneWorld): "another_world",
    NamesNoParameter: "layouts",
    with_state(NotRolledBack): "rollback",
    with_state(NotWeighed): "clipping",
    with_state(ResetWhole): "reset",
    NeverSendsTheLast: "examination",
    SendsEmptyBuckets: "sizes",
    OverflowsInTheResidual: "values",
    WritesSinglePrecision: "types",
    SwallowsNaN: "nonfinite",
}


class NeverRotates(ExactMiCRO):
    """A rank's own large elements outside the partition that it always has are never examined."""

    def step(self, state: State, acc: Accumulator, bucket: Bucket, comm: Comm) -> Update:
        return super().step(state, acc, replace(bucket, step=0), comm)


class TakesAllRanksSumsForItsOwn(TwoShot):
    def unsent(self, state: State, bucket: Bucket, comm: Comm) -> tuple[Tensor, None]:
        return state.residual(bucket), None


class DividesByTooMany(Scheme):
    """Nothing has to add up where there is no residual."""

    name = "divides_by_too_many"

    def reduce(self, state: State, bucket: Bucket, comm: Comm) -> Report:
        n = bucket.grad.numel()
        if n:
            bucket.grad.copy_(comm.all_reduce(bucket.grad) / (2 * comm.size - 1))
        cost = all_reduce_cost(n, bucket.grad.element_size(), comm.size, comm.rank) if n else Cost()
        return Report(self.name, bucket.key, bucket.step, n, n, n, cost)


@dataclass(frozen=True)
class NeverBalances(OkTopk):
    density: float = 0.01
    imbalance: float = math.inf

    def step(self, state: State, acc: Accumulator, bucket: Bucket, comm: Comm) -> Any:
        state.shared_state("control", Control, bucket, comm.size).boundaries = []
        return super().step(state, acc, bucket, comm)


# Each of them passed all invariants but the one here, which is there for its sake.
UNFAIR: dict[type[Scheme], str] = {
    NeverRotates: "examination",
    TakesAllRanksSumsForItsOwn: "shares",
    DividesByTooMany: "scale",
    NeverBalances: "balance",
}


def under_test(make: Callable[..., Alternating]) -> SchemeUnderTest:
    return SchemeUnderTest(make, lambda: make(every=1), density=0.5)


@pytest.mark.parametrize("invariant", INVARIANTS)
def test_a_sound_scheme_of_a_third_party_passes(invariant: str) -> None:
    check(invariant, under_test(Alternating))


@pytest.mark.parametrize(("broken", "invariant"), [pytest.param(*each, id=each[0].__name__) for each in BROKEN.items()])
def test_what_is_broken_is_found_by_its_invariant(broken: type[Alternating], invariant: str) -> None:
    with pytest.raises(AssertionError, match=rf"^{invariant}: .+"):
        check(invariant, under_test(broken))


def test_every_invariant_can_fail() -> None:
    assert {*BROKEN.values(), *UNFAIR.values()} == {*INVARIANTS}


@pytest.mark.parametrize(("broken", "invariant"), [pytest.param(*each, id=each[0].__name__) for each in UNFAIR.items()])
def test_what_is_unfair_to_a_rank_is_found_by_its_invariant(broken: type[Scheme], invariant: str) -> None:
    with pytest.raises(AssertionError, match=rf"^{invariant}: .+"):
        check(invariant, broken)


def test_what_is_not_checked_says_why_and_what_is_left_out_shows_its_reason() -> None:
    found = check_scheme(NeverRotates, worlds=(1, 2), without={"examination": "its partitions stay"})
    assert found.pop("examination") == "left out: its partitions stay"
    assert found.pop("identity") == "no setting leaves nothing out: complete=None"
    assert {*found.values()} == {"holds"}
    assert check("conservation", sparsync.schemes.Dense) == "there is no residual"


def test_a_tolerance_lets_rounding_pass_and_nothing_larger() -> None:
    check("conservation", RoundsItsResidual, tolerance=1e-5)
    for scheme in (RoundsItsResidual, LosesMass):
        with pytest.raises(AssertionError, match=r"^conservation: .* residuals after the step \+ P x written"):
            check("conservation", scheme, tolerance=1e-9)
