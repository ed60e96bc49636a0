"""What the options of exchanged steps mean, and what cannot be trained by them."""

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from sparsync import AdamWSteps, Steps
from sparsync.base.scheme import Scheme
from sparsync.base.state import innermost
from sparsync.comm import LocalWorld
from sparsync.comm.local import LocalComm
from sparsync.schemes import Dense, PerParameter, Quantized, TopK, TwoShot
from test_adamw_steps import SCHEDULES, common, learn, model, start, train

pytestmark = pytest.mark.filterwarnings("ignore:step .* was skipped on all ranks")


@pytest.mark.parametrize("key", ["lr", "weight_decay", "eps"])
def test_a_setting_that_is_not_finite_is_an_error_before_anything_is_sent(key: str) -> None:
    def body(comm: LocalComm) -> None:
        steps = start(comm, Dense())
        learn(steps.model, comm.rank, 0)
        steps.optimizers[0].param_groups[1][key] = torch.nan
        with pytest.raises(ValueError, match=f"{key} of parameter group 1 is nan; it must be finite"):
            steps.step()

    LocalWorld(1).run(body)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_work_and_do_not_warn_whether_made_before_or_after(name: str, first: bool) -> None:
    def body(comm: LocalComm) -> None:
        made = model()
        optimizer = torch.optim.AdamW(made.parameters(), lr=0.125)
        schedule = SCHEDULES[name](optimizer) if first else None
        steps = AdamWSteps(made, optimizer, Dense(), comm=comm)
        schedule = schedule or SCHEDULES[name](optimizer)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for step in range(6):
                learn(made, comm.rank, step)
                steps.step()
                schedule.step(*([1.0] if name == "plateau" else []))
        assert name == "plateau" or optimizer.param_groups[0]["lr"] != 0.125

    LocalWorld(1).run(body)


def test_a_parameter_that_changes_its_group_has_the_settings_of_the_new_one_from_the_next_step_on() -> None:
    def body(comm: LocalComm) -> None:
        steps = start(comm, Dense(), rates=(0.25, 0.0))
        one, other = steps.optimizers[0].param_groups
        train(steps, range(2))
        one["params"], other["params"] = other["params"], one["params"]
        before = common(steps)
        train(steps, range(2, 3))
        assert (common(steps) - before).tolist() != [0.0] * len(before)
        assert steps._sender.groups.number[next(iter(steps.model.state_dict()))] == 1

    LocalWorld(2).run(body)


@pytest.mark.parametrize(
    ("scheme", "beta2", "decay", "found"),
    [
        (lambda: TwoShot(density=1.0, values="sign"), 0.95, None, (0.999, 1.0)),
        (lambda: TwoShot(density=0.25), 0.9995, None, (0.9995, 0.97)),
        (lambda: TwoShot(density=0.01, density_down=0.04), 0.95, None, (0.999, 0.99)),
        (lambda: PerParameter(TopK(0.25), {"0.*": TopK(0.01)}), 0.95, None, (0.999, 0.99, 0.97)),
        (lambda: PerParameter(TopK(0.01), {"0.*": Quantized("sign")}), 0.95, None, (0.999, 1.0, 0.99)),
        (lambda: TwoShot(density=0.25), 0.95, 0.5, (0.999, 0.5)),
        (lambda: TwoShot(density=0.25, decay=0.9), 0.95, None, (0.999, 0.9)),
    ],
)
def test_moments_remember_and_residuals_forget_by_rule_unless_they_are_told(
    scheme: Callable[[], Scheme], beta2: float, decay: float | None, found: tuple[float, ...]
) -> None:
    def body(comm: LocalComm) -> tuple[float, ...]:
        made = model()
        optimizer = torch.optim.AdamW(made.parameters(), betas=(0.9, beta2))
        steps = AdamWSteps(made, optimizer, scheme(), comm=comm, decay=decay)
        assert isinstance(steps.exchange, Steps)
        decays = (each.decay for each in innermost(steps.state))
        return steps._sender.groups.rules[0].remembers(steps.exchange.beta2), *decays

    assert LocalWorld(1).run(body) == [found]


def test_what_waits_is_forgotten_by_the_share_of_decay() -> None:
    def body(comm: LocalComm) -> Tensor:
        made = nn.Linear(4, 1, bias=False)
        scheme = TopK(0.25)
        steps = AdamWSteps(
            made, torch.optim.AdamW(made.parameters(), lr=1.0, weight_decay=0.0), scheme, comm=comm, decay=0.5
        )
        for gradient in ([8.0, 4.0, 2.0, 1.0], [0.0, 0.0, 0.0, 0.0]):
            made.weight.grad = torch.tensor([gradient])
            steps.step()
        return steps.state.state_dict()["residual"]["weight"]

    # The first steps are 1 for every element; one is sent in each of the two.
    (residual,) = LocalWorld(1).run(body)
    assert sorted(residual.tolist()) == pytest.approx([0.0, 0.0, 0.5, 0.5], rel=1e-6)


def test_a_decay_that_no_residual_takes_is_refused() -> None:
    def body(comm: LocalComm) -> None:
        for scheme in (Dense(), TwoShot(decay=0.9)):
            made = model()
            with pytest.raises(ValueError, match=r"decay=0\.5 needs a scheme with a residual and no decay setting"):
                AdamWSteps(made, torch.optim.AdamW(made.parameters()), scheme, comm=comm, decay=0.5)

    LocalWorld(1).run(body)


def test_an_optimizer_of_other_parameters_than_the_models_is_refused() -> None:
    def body(comm: LocalComm) -> None:
        made, other = nn.Linear(2, 2), nn.Linear(3, 3)
        for parameters, message in (
            ([made.weight], "the optimizer lacks bias"),
            ([*made.parameters(), other.bias], r"that the model lacks, of shapes \[\(3,\)\]"),
        ):
            with pytest.raises(ValueError, match=message):
                AdamWSteps(made, torch.optim.AdamW(parameters), Dense(), comm=comm)

    LocalWorld(1).run(body)
