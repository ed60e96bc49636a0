"""A training for torchrun: saves every step, may kill one rank once, and goes on from what was saved.

Usage: elastic_training.py FOLDER DATA STEPS KILLED, where KILLED is the step before which rank 1 kills itself the first time, or -1.
"""

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel

import sparsync
from sparsync.attached import checkpoint
from sparsync_lab import workloads

SMALL = {"vocabulary": 16, "width": 4, "batch_size": 4, "windows": 4}
SEED = 0


def main(folder: Path, data: str, steps: int, killed: int) -> None:
    torch.set_num_threads(1)
    store, rank, ranks = next(rendezvous("env://"))
    # Every attempt gets a store of its own: torchrun's keeps the addresses of workers that are gone, and new ones would call them.
    store = PrefixStore(f"attempt{os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    workload = workloads.get("shakespeare-small", data=data, **SMALL)
    workload.prepare()
    model = workload.model(SEED)
    ddp = DistributedDataParallel(model, find_unused_parameters=True)  # buckets stay as they are from the first step on
    optimizer, schedule = workload.optimizer(model, steps)
    handle = sparsync.attach(
        ddp, sparsync.schemes.ExactMiCRO(0.05), optimizer=optimizer, options=sparsync.Options(timeout_s=120.0)
    )
    first = int(last.read_text()) if (last := folder / "last").exists() else 0
    if first:
        saved = torch.load(folder / f"{first}.pt", weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        schedule.load_state_dict(saved["schedule"])
        checkpoint.load(handle, folder / str(first))
    for step in range(first, steps):
        if step == killed and rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        torch.manual_seed(step * ranks + rank)
        optimizer.zero_grad()
        workload.loss(ddp, workload.batch(SEED, step, rank, ranks)).backward()
        optimizer.step()
        schedule.step()
        checkpoint.save(handle, folder / str(step + 1))
        if rank == 0:
            parts = {"model": model, "optimizer": optimizer, "schedule": schedule}
            torch.save({name: part.state_dict() for name, part in parts.items()}, folder / f"{step + 1}.pt")
        dist.barrier()
        if rank == 0:
            last.write_text(str(step + 1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
