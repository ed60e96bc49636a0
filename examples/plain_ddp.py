"""A training script as many have it, without sparsync: DDP, AdamW, accumulated gradients, clipping, and a checkpoint to resume from.

Run: torchrun --nproc-per-node 2 examples/plain_ddp.py
Over links of 100 Mbit/s: sparsync launch --ranks 4 --link 100mbit -- python examples/plain_ddp.py
"""

import argparse
import time
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--checkpoint", type=Path, help="a file, written every 20 steps and read where it is there")
    options = parser.parse_args(arguments)

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    teacher = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8))  # what is to be learnt
    layers = [nn.Linear(64, options.width), nn.GELU(), nn.Linear(options.width, options.width), nn.GELU()]
    model = DistributedDataParallel(nn.Sequential(*layers, nn.Linear(options.width, 8)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    first = 0
    if options.checkpoint is not None and options.checkpoint.exists():
        state = torch.load(options.checkpoint)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]

    data = torch.Generator().manual_seed(1000 * first + rank)  # every rank has its own data
    began = time.perf_counter()
    for step in range(first, options.steps):
        optimizer.zero_grad()
        for micro_batch in range(2):
            x = torch.randn(32, 64, generator=data)
            with model.no_sync() if micro_batch == 0 else nullcontext():
                loss = nn.functional.mse_loss(model(x), teacher(x).detach()) / 2
                loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % 20 == 0:
            mean = 2 * loss.detach()
            dist.all_reduce(mean)
            mean /= dist.get_world_size()
            if rank == 0:
                seconds = (time.perf_counter() - began) / (step + 1 - first)
                print(f"step {step + 1}: loss {mean.item():.4f}, {1e3 * seconds:.0f} ms per step")
                if options.checkpoint is not None:
                    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
                    torch.save(state, options.checkpoint)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
