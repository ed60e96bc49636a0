"""FSDP2 on a mesh of nodes and their ranks (HSDP): shards inside a node, replicas between nodes. Two lines cut what it sends.

Run: torchrun --nproc-per-node 4 examples/two_lines_hsdp.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import sparsync

STEPS, RANKS_PER_NODE = 100, 2


def main() -> None:
    dist.init_process_group("gloo")  # "nccl" on GPUs
    nodes = dist.get_world_size() // RANKS_PER_NODE
    mesh = init_device_mesh("cpu", (nodes, RANKS_PER_NODE), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)  # the same parameters on all ranks: FSDP2 broadcasts nothing
    teacher = nn.Sequential(nn.Linear(32, 16), nn.Tanh(), nn.Linear(16, 8)).requires_grad_(
        False
    )  # what is to be learnt
    model = nn.Sequential(nn.Linear(32, 256), nn.GELU(), nn.Linear(256, 8))
    for module in (model[0], model[2], model):
        fully_shard(module, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    sparsync.attach(model, optimizer=optimizer)

    data = torch.Generator().manual_seed(dist.get_rank())  # every rank has its own data
    for _ in range(STEPS):
        x = torch.randn(32, 32, generator=data)
        nn.functional.mse_loss(model(x), teacher(x)).backward()
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
