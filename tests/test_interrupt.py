"""Ctrl-C ends a rank that waits for another one: at once, not when the wait times out."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.distributed
PATIENCE_S = 60.0  # much less than the 300 s after which a wait gives up

RANK = """
import signal, sys, time
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
import sparsync

signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where this was started in the background
rank, way, folder = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
model = nn.Linear(4, 2)
if way == "ddp":
    model = DistributedDataParallel(model)
    handle = sparsync.attach(model, sparsync.TopK(0.5))
scheme = sparsync.TopK(0.5)
for step in range(3):  # DDP exchanges its layout of buckets, by itself, in the second
    if step == 2:
        if rank == 1:
            time.sleep(1000)
        print("waits", flush=True)
    model(torch.ones(1, 4)).sum().backward()
    if way == "manual":
        sparsync.reduce_gradients(model, scheme, step=step)
"""


@pytest.mark.parametrize("way", ["manual", pytest.param("ddp", marks=pytest.mark.slow)])
def test_ctrl_c_ends_a_rank_that_waits_for_another(way: str, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), way, str(tmp_path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(2)
    ]
    try:
        assert ranks[0].stdout is not None
        assert ranks[0].stdout.readline() == "waits\n"
        with pytest.raises(subprocess.TimeoutExpired):
            ranks[0].wait(1.0)  # so that it does wait
        ranks[0].send_signal(signal.SIGINT)
        _, said = ranks[0].communicate(timeout=PATIENCE_S)
        assert "KeyboardInterrupt" in said
        # A thread of C++ may still be there when the interpreter ends, which aborts the process after the traceback.
        assert ranks[0].returncode in (-signal.SIGINT, -signal.SIGABRT), said
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
