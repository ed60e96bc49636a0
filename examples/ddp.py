"""DistributedDataParallel with a sparse scheme: one more line, `sparsync.attach`.

Run: torchrun --nproc-per-node 2 examples/ddp.py
"""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import sparsync


def main() -> None:
    dist.init_process_group("gloo")  # "nccl" on GPUs
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 4))
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    handle = sparsync.attach(ddp, sparsync.schemes.TopK(density=0.01), optimizer=optimizer)

    torch.manual_seed(dist.get_rank())  # every rank has its own data
    for _ in range(5):
        x = torch.randn(16, 32)
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(ddp(x), x[:, :4]).backward()  # the gradients are reduced in here
        optimizer.step()

    report = handle.reports()[-1]
    if dist.get_rank() == 0:
        print(f"{report.key}: {report.union} of {report.elements} elements, {report.cost.nbytes} bytes sent")
    # To save the residuals: sparsync.checkpoint.save(handle, folder) on every rank; load(handle, folder) continues from them.
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
