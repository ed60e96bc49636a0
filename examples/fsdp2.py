"""FSDP2 with one shard on each node: a sparse scheme reduces over the replicate axis, between the nodes.

Run: torchrun --nproc-per-node 2 examples/fsdp2.py
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import sparsync


def main() -> None:
    dist.init_process_group("gloo")  # "nccl" on GPUs
    nodes, ranks_per_node = dist.get_world_size(), 1
    mesh = init_device_mesh("cpu", (nodes, ranks_per_node), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)  # the same parameters on all ranks: FSDP2 broadcasts nothing
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 4))
    for module in (model[0], model[2], model):
        fully_shard(module, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = sparsync.attach(model, sparsync.schemes.ExactOkTopk(density=0.01), optimizer=optimizer)

    torch.manual_seed(dist.get_rank())  # every rank has its own data
    for _ in range(5):
        x = torch.randn(16, 32)
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), x[:, :4]).backward()  # the gradients are reduced in here
        optimizer.step()

    if dist.get_rank() == 0:
        for report in handle.reports()[-2:]:  # one bucket for each module with parameters
            print(f"{report.key}: {report.union} of {report.elements} elements, {report.cost.nbytes} bytes sent")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
