"""A worker is killed and torchrun starts all of them again: training continues as if nothing had happened."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sparsync.runtime import state_file

pytestmark = [pytest.mark.distributed, pytest.mark.slow]
SCRIPT = Path(__file__).with_name("helpers") / "elastic_training.py"
STEPS, KILLED = 6, 3


def train(folder: Path, data: Path, killed: int) -> str:
    """What torchrun told."""
    folder.mkdir()
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    arguments = [str(SCRIPT), str(folder), str(data), str(STEPS), str(killed)]
    done = subprocess.run(
        [*run, *arguments], capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_a_killed_worker_costs_no_gradient(tmp_path: Path, play: Path) -> None:
    """Weights, optimizer and residuals of both ranks are those of a training that nobody interrupted, to the bit."""
    train(tmp_path / "whole", play, killed=-1)
    assert "exitcode: -9" in train(tmp_path / "killed", play, killed=KILLED)
    whole, killed = (torch.load(tmp_path / each / f"{STEPS}.pt", weights_only=True) for each in ("whole", "killed"))
    for name, tensor in whole["model"].items():
        assert torch.equal(tensor, killed["model"][name]), name
    for file in (tmp_path / "whole" / str(STEPS)).iterdir():
        one, other = (state_file.read(tmp_path / each / str(STEPS) / file.name) for each in ("whole", "killed"))
        kept, again = one["scheme"]["residual"], other["scheme"]["residual"]
        assert kept.keys() == again.keys()
        assert all(torch.equal(kept[name], again[name]) for name in kept)
