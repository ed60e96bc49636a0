"""Residuals survive a checkpoint: on every rank its own, or redistributed to more or fewer ranks, with the same mean."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict_saver as dcp
from torch import Tensor, nn

import sparsync
from helpers.ddp_training import AttachedTraining
from helpers.distributed import case, run
from sparsync import Gradients, LocalSteps, Steps
from sparsync.attached import checkpoint
from sparsync.schemes import ExactExDyna, MiCRO, OkTopk, TwoShot

pytestmark = pytest.mark.distributed
WAYS: dict[str, Any] = {"files": MiCRO, "one list": OkTopk, "torch.distributed.checkpoint": ExactExDyna}


def interrupted(folder: Path) -> dict[str, tuple[Tensor, Tensor]]:
    """Four steps at once, and two, a checkpoint, and two by another object."""
    found = {}
    for way, scheme in WAYS.items():
        id = scheme.__name__
        # With find_unused_parameters the buckets stay the same.
        whole, before, after = (AttachedTraining(scheme(0.1), find_unused_parameters=True) for _ in range(3))
        for step in range(4):
            whole.step(whole.model.inputs(whole.rank, step))
        for step in range(2):
            before.step(before.model.inputs(before.rank, step))
        if way == "files":
            checkpoint.save(before.handle, folder / id)
        elif way == "one list":
            states = checkpoint.gathered(before.handle)
            assert (states is None) == (before.rank > 0)
            if states:
                torch.save(states, folder / id)
        else:
            dcp.save({"step": 2, **checkpoint.entries(before.handle)}, checkpoint_id=folder / id)
        dist.barrier()
        if way == "one list":
            checkpoint.restore(after.handle, torch.load(folder / id, weights_only=True))
        else:
            assert checkpoint.holds_states(folder / id)
            # torch warns that torch.distributed is disabled, where a rank reads its entry alone
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                checkpoint.load(after.handle, folder / id)
        for step in range(2, 4):
            after.step(after.model.inputs(after.rank, step))
        found[id] = whole.done().grads[2:], after.done().grads
    return found


def test_training_resumes_to_the_same_bits_from_every_kind_of_checkpoint(tmp_path: Path) -> None:
    for rank in run(interrupted, 2, folder=tmp_path):
        for id, (whole, resumed) in rank.items():
            assert torch.equal(whole, resumed), id


def saved_by_one(folder: Path) -> None:
    """All ranks save, and train on; then rank 0 saves alone."""
    model = nn.Linear(8, 8)
    called: nn.Module = model
    for exchange in (Steps(), LocalSteps(every=2), Gradients()):
        optimizer = torch.optim.AdamW(model.parameters())
        if isinstance(exchange, Gradients):
            called = nn.parallel.DistributedDataParallel(model)
        scheme = TwoShot(density=1.0, values="int4")
        handle: Any = sparsync.attach(called, scheme, exchange=exchange, optimizer=optimizer)

        def train(called: nn.Module = called, optimizer: torch.optim.Optimizer = optimizer) -> None:
            for _ in range(2):
                called(torch.ones(2, 8)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()

        with case(exchange):
            for _ in range(2):
                checkpoint.save(handle, folder / type(exchange).__name__)
                train()
            if dist.get_rank() == 0:
                checkpoint.save(handle, folder / type(exchange).__name__)
            with pytest.raises(
                RuntimeError,
                match=r"rank 0 has a checkpoint saved before step \d+, rank 1 .*call sparsync.checkpoint.save on every rank",
            ):
                train()
            handle.close()


def test_a_checkpoint_that_one_rank_alone_saves_raises_in_the_next_step(tmp_path: Path) -> None:
    run(saved_by_one, 2, folder=tmp_path)
