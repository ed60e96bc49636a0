"""LaProp in the lab: the optimizer that `laprop` trains with in place of AdamW, and AdamW steps that compress nothing."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Muon, Optimizer
from torch.optim.lr_scheduler import ExponentialLR, LRScheduler

from helpers.third_party import LineFit
from sparsync.exchanges.adamw_steps import AdamWSteps
from sparsync.schemes import Dense
from sparsync_lab.frontier.figures import kind
from sparsync_lab.rivals.laprop import LaProp, LongAdamW
from sparsync_lab.scheme_choice import check_optimizer, parse_schemes
from sparsync_lab.workloads.muon import Several
from sparsync_lab.workloads.one_process import train_locally, train_with_scheme
from sparsync_lab.workloads.own_momentum import made_for


def job(make: Callable[[nn.Module], Optimizer]) -> LineFit:
    """A job with this optimizer, whose rate falls and whose gradients are clipped."""

    class OptimizedFit(LineFit):
        def optimizer(self, model: nn.Module, steps: int) -> tuple[Optimizer, LRScheduler]:
            made = make(model)
            return made, ExponentialLR(made, 0.75)

        def clip(self, model: nn.Module, factor: float = 1.0) -> None:
            nn.utils.clip_grad_norm_(model.parameters(), factor)

    return OptimizedFit()


def by_adamw(model: nn.Module) -> Optimizer:
    return AdamW(model.parameters(), lr=0.0625, betas=(0.75, 0.875), weight_decay=0.25)


def test_a_step_is_the_gradient_over_the_root_of_its_second_moments_then_momentum() -> None:
    weight, still = nn.Parameter(torch.tensor([1.0, 1.0])), nn.Parameter(torch.ones(1))
    inner = AdamW([weight, still], lr=0.5, betas=(0.5, 0.875), eps=1e-30, weight_decay=0.25)
    optimizer = LaProp(beta2=0.75).replace(inner)
    weight.grad = torch.tensor([4.0, -2.0])
    optimizer.step()  # v = g^2 / 4; m = rate sign(g) / 2, and corrected the rate
    assert weight.tolist() == [0.875 - 0.5, 0.875 + 0.5]
    optimizer.param_groups[0]["lr"] = 0.25
    weight.grad = torch.tensor([4.0, 0.0])
    before = weight[0].item()
    optimizer.step()  # m = 0.5 * 0.25 + 0.5 * 0.25, and corrected by 1 - 0.25: the rate of each step stays with its gradient
    assert weight[0].item() == pytest.approx(before * (1 - 0.25 * 0.25) - 0.25 / 0.75, rel=1e-6)
    assert still.item() == 1.0  # without a gradient


def test_one_rank_that_exchanges_all_of_its_adamw_steps_trains_as_laprop() -> None:
    workload = job(by_adamw)
    whole = train_with_scheme(workload, LaProp, 0, 12, 1, {4, 8, 12})
    steps = train_locally(
        workload, lambda model, optimizer, comm: AdamWSteps(model, optimizer, Dense(), comm=comm), 0, 12, 1, {4, 8, 12}
    )
    assert [value for _, value in whole.quality] == pytest.approx([value for _, value in steps.quality], rel=1e-5)
    four = train_with_scheme(workload, LaProp, 0, 12, 4, {12})  # the mean gradient of all ranks is clipped and divided
    assert four.quality[-1][1] == pytest.approx(whole.quality[-1][1], rel=1e-5)
    by_dense = train_with_scheme(workload, Dense, 0, 12, 1, {12}).quality[-1][1]
    assert not math.isclose(by_dense, whole.quality[-1][1], rel_tol=1e-2)


def end(make: Callable[[], Dense], beta2: float) -> float:
    workload = job(lambda model: AdamW(model.parameters(), lr=0.0625, betas=(0.75, beta2)))
    return train_with_scheme(workload, make, 0, 8, 2, {8}).quality[-1][1]


def test_beta2_is_that_of_steps_the_jobs_and_at_least_999_per_mille_unless_it_is_given() -> None:
    assert end(LaProp, 0.875) == end(lambda: LaProp(beta2=0.999), 0.875) != end(lambda: LaProp(beta2=0.875), 0.875)
    assert end(LaProp, 0.9995) == end(lambda: LaProp(beta2=0.9995), 0.875) != end(lambda: LaProp(beta2=0.999), 0.9995)
    with pytest.raises(ValueError, match=r"beta2 must be in \[0, 1\), got 1.0"):
        LaProp(beta2=1.0)


def test_beside_muon_only_adamws_part_is_replaced() -> None:
    def several(model: nn.Module) -> Optimizer:
        return Several(Muon([model.weight], lr=0.1), AdamW([model.bias], lr=0.1))  # pyright: ignore[reportArgumentType]

    workload = job(several)
    assert made_for(LaProp(), workload) == "Muon + LaProp"
    assert made_for(Dense(), workload) == "Muon + AdamW"
    ends = [train_with_scheme(workload, make, 0, 8, 2, {8}).quality[-1][1] for make in (LaProp, Dense)]
    assert all(map(math.isfinite, ends))
    assert ends[0] != ends[1]


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (lambda model: SGD(model.parameters(), lr=0.1), "takes the place of an AdamW, and the job has SGD"),
        (lambda model: Several(SGD(model.parameters(), lr=0.1)), "takes the place of an AdamW, and the job has SGD"),
        (lambda model: AdamW(model.parameters(), amsgrad=True), "neither amsgrad nor maximize"),
        (lambda model: Adam(model.parameters(), weight_decay=0.1), "this Adam decays gradients"),
    ],
)
def test_a_job_that_adamw_does_not_train_is_refused_before_it_trains(
    optimizer: Callable[[nn.Module], Optimizer], message: str
) -> None:
    model = nn.Linear(2, 1)
    with pytest.raises(ValueError, match=f"'laprop' cannot train this job: .*{message}"):
        check_optimizer(parse_schemes("laprop", 0.01), lambda: (model, optimizer(model)))
    check_optimizer(parse_schemes("laprop,adamw", 0.01), lambda: (model, Adam(model.parameters())))
    with pytest.raises(
        ValueError, match="'adamw' cannot train this job: adamw takes the place of an AdamW, and the job has SGD"
    ):
        check_optimizer(parse_schemes("adamw", 0.01), lambda: (model, SGD(model.parameters(), lr=0.1)))


def test_adamw_is_dense_with_another_beta2() -> None:
    assert end(LongAdamW, 0.875) == end(Dense, 0.999) != end(Dense, 0.875)
    assert end(lambda: LongAdamW(beta2=0.875), 0.5) == end(Dense, 0.875)


def test_it_is_a_baseline_by_its_name_with_its_setting() -> None:
    [plain, other, adamw] = parse_schemes("laprop,laprop:beta2=0.99,adamw", 0.01)
    assert [each.make() for each in (plain, other, adamw)] == [LaProp(), LaProp(beta2=0.99), LongAdamW()]
    assert [kind(each) for each in (plain, other, adamw)] == ["baseline"] * 3
    assert plain.described() == {"scheme": "LaProp(wire='gradient', form='native', beta2='at least 0.999')"}
    assert other.described() == {"scheme": "LaProp(wire='gradient', form='native', beta2=0.99)"}
