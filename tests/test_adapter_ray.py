"""A training by a TorchTrainer of Ray Train with two workers: reduced by a scheme, and taken up again by new workers when these fail."""
# pyright: reportMissingImports=false

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from helpers.adapter_training import MICRO, AdapterResult, check, examples, network
from sparsync import Options, TwoShot
from sparsync.attached import checkpoint
from sparsync.exchanges.adamw_steps import AdamWSteps

pytest.importorskip("ray.train", exc_type=ImportError)  # which is there without what it needs, too
import ray
import ray.train.torch
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

from sparsync.adapters.ray import prepare_model

pytestmark = pytest.mark.distributed
STEPS, HALF = 6, 3


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """Two CPUs on this machine, whose workers find these tests."""
    found = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])}
    found["SPARSYNC_SCHEME"] = MICRO
    os.environ["RAY_AUTH_MODE"] = "disabled"  # no token in the home directory
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": found})
    yield
    ray.shutdown()


def loop(settings: dict[str, Any]) -> None:
    """One worker's training; where `settings` say that it fails, its first half, and in a second attempt the other one."""
    torch.set_num_threads(1)
    model, steps = network(), settings["steps"]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01) if steps else torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped, handle = prepare_model(
        model,
        TwoShot(density=0.1, values="sign") if steps else None,
        optimizer=optimizer if steps else None,
        options=Options(timeout_s=120),
        parallel_strategy_kwargs={"find_unused_parameters": True},  # buckets stay the same
    )
    assert handle is not None
    assert isinstance(handle, AdamWSteps) == steps
    given = ray.train.get_checkpoint()
    if given is not None:
        with given.as_directory() as folder:
            model.load_state_dict(torch.load(Path(folder) / "model.pt"))
    loader = ray.train.torch.prepare_data_loader(examples(STEPS))
    for step, (x, y) in enumerate(loader):
        if given is not None and step < HALF:
            continue
        optimizer.zero_grad()
        nn.functional.mse_loss(wrapped(x), y).backward()
        optimizer.step()
        if settings["fails"] and given is None and step == HALF:
            raise RuntimeError("no luck today")
        if step == HALF - 1:
            with tempfile.TemporaryDirectory() as folder:
                checkpoint.save(handle, folder)
                if dist.get_rank() == 0:
                    torch.save(model.state_dict(), Path(folder) / "model.pt")
                ray.train.report({"step": step}, checkpoint=Checkpoint.from_directory(folder))
    if isinstance(handle, AdamWSteps):
        assert handle.stats()["drift"] > 0
        handle.show_common()
    trained = AdapterResult.of(model, handle.reports())
    torch.save(trained, Path(settings["results"]) / f"{dist.get_rank()}.pt")


def fit(folder: Path, fails: bool, steps: bool = False) -> list[AdapterResult]:
    results = folder / "results"
    results.mkdir(parents=True)
    TorchTrainer(
        loop,
        train_loop_config={"results": str(results), "fails": fails, "steps": steps},
        scaling_config=ScalingConfig(num_workers=2, use_gpu=False),
        torch_config=TorchConfig(backend="gloo"),
        run_config=RunConfig(storage_path=str(folder), failure_config=FailureConfig(max_failures=1)),
    ).fit()
    return [torch.load(results / f"{rank}.pt", weights_only=False) for rank in (0, 1)]


@pytest.mark.timeout(300)
def test_a_training_by_ray_sends_little_and_goes_on_to_the_same_bits_after_a_failure(
    cluster: None, tmp_path: Path
) -> None:
    whole, resumed = fit(tmp_path / "whole", fails=False), fit(tmp_path / "again", fails=True)
    check(whole, STEPS)
    for before, after in zip(whole, resumed, strict=True):
        assert after.same_weights(before)
        assert {report.step for report in after.reports} == set(range(HALF, STEPS))


@pytest.mark.timeout(300)
def test_steps_of_adamw_that_ray_trains_go_on_to_the_same_bits_after_a_failure(cluster: None, tmp_path: Path) -> None:
    whole = fit(tmp_path / "whole", fails=False, steps=True)
    resumed = fit(tmp_path / "again", fails=True, steps=True)
    for before, after in zip(whole, resumed, strict=True):
        assert before.same_weights(whole[0])
        assert after.same_weights(before)
        assert {report.step for report in after.reports} == set(range(HALF, STEPS))
