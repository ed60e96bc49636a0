"""A training as many have it: DDP, AdamW, accumulated gradients, clipping and a cosine schedule. Two lines cut what it sends.

Run: torchrun --nproc-per-node 2 examples/two_lines_ddp.py
"""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import sparsync

STEPS, PARTS = 100, 2


def main() -> None:
    dist.init_process_group("gloo")  # "nccl" on GPUs
    torch.manual_seed(0)
    teacher = nn.Sequential(nn.Linear(32, 16), nn.Tanh(), nn.Linear(16, 8)).requires_grad_(
        False
    )  # what is to be learnt
    model = DistributedDataParallel(nn.Sequential(nn.Linear(32, 256), nn.GELU(), nn.Linear(256, 8)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    sparsync.attach(model, optimizer=optimizer)

    data = torch.Generator().manual_seed(dist.get_rank())  # every rank has its own data
    for _ in range(STEPS):
        for part in range(PARTS):
            x = torch.randn(32, 32, generator=data)
            with model.no_sync() if part < PARTS - 1 else nullcontext():
                (nn.functional.mse_loss(model(x), teacher(x)) / PARTS).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()

    model.eval()
    with torch.no_grad():
        x = torch.randn(512, 32, generator=torch.Generator().manual_seed(1000))
        print(f"rank {dist.get_rank()}: loss {nn.functional.mse_loss(model(x), teacher(x)).item():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
