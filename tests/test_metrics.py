"""What a training reports arrives in TensorBoard and wandb; and the profiler names phases with their buckets."""
# pyright: reportMissingImports=false

from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from torch._C._profiler import _ExperimentalConfig  # pyright: ignore[reportPrivateUsage]
from torch.profiler import ProfilerActivity, profile

import sparsync
from helpers.ddp_training import AttachedTraining
from helpers.distributed import run
from sparsync import Report
from sparsync.adapters.metrics import TensorBoard, Wandb, numbers
from sparsync.comm import Cost
from sparsync.schemes import ExactMiCRO, TopK

STEPS = [[100, 20], [60, 20]]  # bytes of two buckets in two steps
FOUND = {
    "density": 0.25,
    "union": 50.0,
    "elements": 200.0,
    "wait_seconds": 0.5,
    "select_seconds": 0.25,
    "messages": 2.0,
}


def reports() -> list[Report]:
    """Two steps of two buckets; the second step overflows in one of them."""
    return [
        Report(
            scheme="exact_micro",
            key=f"bucket{number}",
            step=step,
            elements=100,
            selected=10,
            union=25,
            cost=Cost(1, 1, nbytes),
            sent=Cost(1, 1, nbytes),
            seconds=0.5,
            wait_s=0.25,
            phases={"select": 0.125},
            details={"overflow": (step, number) == (1, 1)},
        )
        for step, buckets in enumerate(STEPS)
        for number, nbytes in enumerate(buckets)
    ]


def test_numbers_are_sums_over_buckets_and_density_is_that_of_all() -> None:
    found = numbers(reports()[2:])
    assert found == FOUND | {"bytes_sent": 80.0, "selected": 20.0, "seconds": 1.0, "overflows": 1.0}
    assert numbers([])["density"] == 1.0


def test_tensorboard_reads_back_what_was_recorded(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard.writer import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:
        TensorBoard(writer).record(reports(), residual_norm=3.0)
    events = EventAccumulator(str(tmp_path))
    events.Reload()

    def values(name: str) -> list[tuple[int, float]]:
        return [(event.step, event.value) for event in events.Scalars(f"sparsync/{name}")]

    assert values("bytes_sent") == [(0, 120.0), (1, 80.0)]
    assert values("overflows") == [(0, 0.0), (1, 1.0)]
    assert values("residual_norm") == [(1, 3.0)]
    for name, value in FOUND.items():
        assert values(name) == [(0, value), (1, value)]


def test_wandb_gets_the_same_names_over_an_axis_of_their_steps() -> None:
    run_of_wandb = Mock()
    Wandb(run_of_wandb).record(reports(), residual_norm=3.0)
    run_of_wandb.define_metric.assert_any_call("sparsync/*", step_metric="sparsync/step")
    first, second = (each.args[0] for each in run_of_wandb.log.call_args_list)
    assert [first["sparsync/step"], second["sparsync/step"]] == [0, 1]
    assert [first["sparsync/bytes_sent"], second["sparsync/bytes_sent"]] == [120, 80]
    assert second["sparsync/residual_norm"] == 3
    assert all(first[f"sparsync/{name}"] == value for name, value in FOUND.items())


def named(of_hook: bool) -> set[str]:
    """The ranges a profiler sees in one step: of the hook's thread if asked to look at all threads, else of this one."""
    every = _ExperimentalConfig(profile_all_threads=True)
    training = AttachedTraining(ExactMiCRO(density=0.1), buckets=2)
    training.step()
    model, scheme = nn.Linear(9, 9), TopK(0.5)
    with profile(activities=[ProfilerActivity.CPU], experimental_config=every if of_hook else None) as seen:
        if of_hook:
            training.step()
        else:
            model(torch.ones(9)).sum().backward()
            sparsync.GradientReducer(model, scheme).reduce()
    assert set(training.handle.reports()[-1].phases) >= {"select", "apply"}
    return {event.key for event in seen.key_averages() if event.key.startswith("sparsync::")}


@pytest.mark.slow
@pytest.mark.distributed
def test_a_profiler_sees_each_phase_of_each_bucket() -> None:
    for found in run(named, 2, of_hook=True):
        phases = ("select", "encode", "decode", "apply")  # the pass that selects accumulates
        assert found == {f"sparsync::{phase} [bucket{number}]" for phase in phases for number in (0, 1)}
    for found in run(named, 2, of_hook=False):
        assert found == {f"sparsync::{phase} [float32]" for phase in ("select", "encode", "decode", "apply")}
