"""Ctrl-C ends a rank that waits for another one: at once, not when the wait times out."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import sparsync
from helpers.distributed import run

pytestmark = pytest.mark.distributed
PATIENCE_S = 200.0  # much less than the 300 s after which a wait gives up


def interrupted(way: str) -> None:
    """Rank 0 waits for rank 1, which sends it what Ctrl-C sends."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where this was started in the background
    waiting = torch.tensor([os.getpid()])
    dist.broadcast(waiting, 0)
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    scheme, reducer = sparsync.TopK(0.5), None
    if way == "ddp":
        model = DistributedDataParallel(model)
        sparsync.attach(model, scheme)
    else:
        reducer = sparsync.GradientReducer(model, scheme)

    def step(number: int) -> None:
        model(torch.ones(1, 4)).sum().backward()
        if reducer is not None:
            reducer.reduce(number)

    for number in range(2):  # DDP exchanges its layout of buckets, by itself, in the second
        step(number)
    if dist.get_rank() == 1:
        dist.barrier()
        time.sleep(1.0)  # so that it does wait
        os.kill(int(waiting), signal.SIGINT)
        return
    with pytest.raises(KeyboardInterrupt):
        dist.barrier()
        step(2)


@pytest.mark.parametrize("way", ["manual", pytest.param("ddp", marks=pytest.mark.slow)])
def test_ctrl_c_ends_a_rank_that_waits_for_another(way: str) -> None:
    run(interrupted, 2, way=way, within_s=PATIENCE_S, fresh=True)
