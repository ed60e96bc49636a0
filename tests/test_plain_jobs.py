"""Jobs that are plain classes: what they may leave out, what they are given, how their errors are told, and what becomes of buffers."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import ConstantLR, LRScheduler, StepLR

from helpers import plain_jobs
from helpers.plain_jobs import Least, Normalised
from sparsync.schemes import Dense
from sparsync_lab import workloads
from sparsync_lab.workloads import one_process
from sparsync_lab.workloads.base import Workload, loss_of
from sparsync_lab.workloads.job_errors import JobError
from sparsync_lab.workloads.plain import HELD_OUT, METHODS

FILE = Path(plain_jobs.__file__)


def job(kind: type, **options: Any) -> Workload:
    return workloads.get(f"{kind.__module__}:{kind.__qualname__}", **options)


# What may be left out, and what is given


def test_a_class_with_model_batch_and_loss_is_a_job() -> None:
    made = workloads.get(f"{FILE}:Least")
    assert (made.metric, made.better, made.unit) == ("held-out loss", "lower", "mean loss of held-out batches")
    model = made.model(0)
    optimizer, schedule = made.optimizer(model, 10)
    assert (type(optimizer), type(schedule)) == (AdamW, ConstantLR)
    assert optimizer.param_groups[0]["lr"] == 1e-3
    described = made.describe()
    assert (described["workload"], described["parameters"], len(described["source"])) == ("Least", 5, 64)


def test_torchs_random_numbers_of_model_and_batch_are_those_of_seed_step_and_rank() -> None:
    made = job(Least)
    torch.manual_seed(3)
    before = torch.get_rng_state()
    first = made.model(0).state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(made.model(0).state_dict()["weight"], first["weight"])
    assert not torch.equal(made.model(1).state_dict()["weight"], first["weight"])
    batches = [made.batch(*where, 2) for where in ((0, 5, 0), (0, 5, 0), (0, 5, 1), (0, 6, 0), (1, 5, 0))]
    assert torch.equal(batches[0], batches[1])
    assert not any(torch.equal(batches[0], other) for other in batches[2:])


@dataclass(frozen=True)
class Asking:
    """A job that asks for everything there is."""

    width: int = 3
    learning_rate: float = 0.5
    metric = "share"
    better = "higher"

    def model(self, seed: int) -> nn.Module:
        model = nn.Linear(self.width, 1)
        nn.init.constant_(model.weight, seed)
        return model.eval()

    def batch(self, seed: int, step: int, rank: int, ranks: int) -> tuple[int, ...]:
        return seed, step, rank, ranks

    def loss(self, model: nn.Module, batch: tuple[int, ...]) -> Tensor:
        return model(torch.ones(1, self.width)) * batch[0]

    def optimizer(self, model: nn.Module, steps: int) -> tuple[Optimizer, LRScheduler]:
        optimizer = SGD(model.parameters(), lr=self.learning_rate)
        return optimizer, StepLR(optimizer, steps)

    def clip(self, model: nn.Module, factor: float) -> None:
        nn.utils.clip_grad_value_(model.parameters(), factor)

    def evaluate(self, model: nn.Module) -> float:
        assert not model.training
        return 2.0


def test_a_job_is_given_what_it_asks_for() -> None:
    made = job(Asking, width="4")
    model = made.model(7)
    assert model.training
    assert next(model.parameters()).tolist() == [[7.0] * 4]
    assert made.batch(3, 4, 1, 2) == (3, 4, 1, 2)
    loss_of(made, model, 3, 4, 1, 2).backward()
    assert nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]) > 2.0
    made.clip(model, 1.0)
    assert all(p.grad is None or float(p.grad.abs().max()) == 1.0 for p in model.parameters())
    optimizer, schedule = made.optimizer(model, 9)
    assert isinstance(schedule, StepLR)
    assert (optimizer.param_groups[0]["lr"], schedule.step_size) == (0.5, 9)
    assert (made.evaluate(model, 0, 2), made.evaluate(model, 1, 2)) == ((2.0, 1), (0.0, 0))
    assert (made.quality(2.0, 1), made.metric, made.better) == (2.0, "share", "higher")
    assert made.describe()["options"] == {"width": 4, "learning_rate": 0.5}


def test_a_job_at_another_rate_has_it_from_its_field_or_its_optimizer() -> None:
    field = job(Asking).at_rate(2.0).at_rate(2.0)
    assert field.optimizer(field.model(0), 5)[0].param_groups[0]["lr"] == 2.0
    optimizer, schedule = job(Normalised).at_rate(0.5).optimizer(nn.Linear(1, 1), 5)
    assert optimizer.param_groups[0]["max_lr"] == 0.1  # a schedule's own numbers stay
    made = job(Least).at_rate(0.5).at_rate(0.5)
    optimizer, schedule = made.optimizer(made.model(0), 5)
    assert (optimizer.param_groups[0]["lr"], schedule.get_last_lr()) == (0.25e-3, [0.25e-3])


def test_the_held_out_loss_is_the_same_for_any_number_of_ranks_and_needs_the_steps_beyond_the_training() -> None:
    made = job(Least)
    model = made.model(0)
    total, count = made.evaluate(model, 0, 1)
    assert count == 16
    for ranks in (3, 20):
        parts = [made.evaluate(model, rank, ranks) for rank in range(ranks)]
        assert (sum(each for each, _ in parts), sum(number for _, number in parts)) == (total, count)
    with pytest.raises(ValueError, match="reaches the held-out batches, from step 1000000 on; write `evaluate`"):
        made.optimizer(model, HELD_OUT + 1)


def test_an_evaluation_that_knows_no_rank_is_made_by_rank_0() -> None:
    made = job(Normalised)
    model = made.model(0)
    found = [made.evaluate(model, rank, 3) for rank in range(3)]
    assert found == [(0.0, 1), (0.0, 0), (0.0, 0)]
    assert made.quality(4.0, 1) == 4.0


# What is refused


class NoMean(Least):
    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch)


class Scoring(Least):
    def quality(self, total: float, count: int) -> float:
        return 100 * total / count


def test_a_method_that_would_be_ignored_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"Scoring has a method 'quality', which only a subclass of .*Workload may have"
    ):
        job(Scoring)


class Strange(Least):
    def __init__(self) -> None:
        raise OSError("no folder")


def _train(made: Workload) -> None:
    one_process.train_with_scheme(made, Dense, 0, 1, 2, {1})


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            NoMean,
            r"NoMean.loss failed (step 0, rank 0 of 2): TypeError: it must return the mean loss as a tensor with one",
        ),
        (Strange, "Strange.__init__ failed: OSError: no folder"),
    ],
)
def test_a_method_that_returns_something_else_is_named_with_what_it_must_return(kind: type, message: str) -> None:
    with pytest.raises(JobError, match=re.escape(message)):
        _train(job(kind))


def test_an_error_of_a_method_is_told_with_class_method_step_rank_and_line() -> None:
    made = workloads.get(f"{FILE}:Unreadable")
    line = next(n for n, text in enumerate(FILE.read_text().splitlines(), 1) if "no sample 5" in text)
    with pytest.raises(JobError) as error:
        loss_of(made, made.model(0), 0, 5, 1, 2)
    assert str(error.value) == (
        f"Unreadable.batch failed (step 5, rank 1 of 2): OSError: no sample 5 ({FILE}, line {line})"
    )


# Training in one process


class Still(Normalised):
    def optimizer(self, model: nn.Module) -> Optimizer:
        return SGD(model.parameters(), lr=0.0)

    def schedule(self, optimizer: Optimizer, steps: int) -> LRScheduler:
        return ConstantLR(optimizer, factor=1.0)


def test_buffers_are_those_of_rank_0_for_any_number_of_ranks() -> None:
    """While the weights stand still, the running mean depends on the batches of rank 0 alone."""
    alone, both = (one_process.train_with_scheme(job(Still), Dense, 0, 2, ranks, {1, 2}).quality for ranks in (1, 2))
    assert alone == both
    assert alone[0] != alone[1]


class Frozen(Least):
    def model(self) -> nn.Module:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
        model[0].requires_grad_(False)
        return model

    def optimizer(self, model: nn.Module) -> Optimizer:
        return SGD(model.parameters(), lr=0.1, weight_decay=0.5)


def test_parameters_that_are_not_trained_stay_as_they_are() -> None:
    made = job(Frozen)
    model = made.model(0)
    before = [each.clone() for each in model.parameters()]
    one_process.train(made, model, 0, 2, 2, lambda step, gradients, rate: torch.stack(gradients).mean(0))
    assert [torch.equal(*pair) for pair in zip(model.parameters(), before, strict=True)] == [True, True, False, False]


# A job to begin with


@pytest.mark.slow
def test_a_new_job_is_written_once_and_is_large_enough_for_compressing(tmp_path: Path) -> None:
    path = tmp_path / "first job.py"
    command = workloads.write_new(path)
    assert command.startswith(
        f"sparsync compare --workload '{path}:MyJob' --ranks 4 --link 100mbit \\\n  --schemes dense,bf16"
    )
    made = workloads.get(f"{path}:MyJob")
    assert 1_000_000 < sum(each.numel() for each in made.model(0).parameters()) < 1_200_000
    trained = one_process.train_with_scheme(made, Dense, 0, 30, 2, {30})
    assert trained.quality[-1][1] > 70
    for method in METHODS:
        assert method in path.read_text() or method == "prepare"
    path.write_text("mine")
    with pytest.raises(ValueError, match="exists and is not overwritten"):
        workloads.write_new(path)
    assert path.read_text() == "mine"
    with pytest.raises(ValueError, match=r"ends in .py, got job"):
        workloads.write_new(Path("job"))
    with pytest.raises(RuntimeError, match="choose a folder that exists"):
        workloads.write_new(tmp_path / "nowhere" / "job.py")
