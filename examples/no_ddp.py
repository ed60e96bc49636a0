"""A bare model, without DDP: reduce the gradients after the backward pass, with a handle that is saved like an optimizer.

Run: torchrun --nproc-per-node 2 examples/no_ddp.py
"""

import tempfile

import torch
import torch.distributed as dist

import sparsync


def main() -> None:
    dist.init_process_group("gloo")  # "nccl" on GPUs
    torch.manual_seed(0)  # the same parameters on all ranks: nothing broadcasts them
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheme, exchange = sparsync.schemes.ExactMiCRO(density=0.01), sparsync.Gradients()
    handle = sparsync.attach(model, scheme, optimizer=optimizer, exchange=exchange)

    torch.manual_seed(dist.get_rank())  # every rank has its own data
    for _ in range(5):
        x = torch.randn(16, 32)
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), x[:, :4]).backward()
        handle.reduce()  # before clipping
        optimizer.step()

    report = handle.reports()[-1]
    if dist.get_rank() == 0:
        print(f"{report.key}: {report.union} of {report.elements} elements, {report.cost.nbytes} bytes sent")
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)  # one folder for all ranks
    sparsync.checkpoint.save(handle, folder[0])
    dist.barrier()
    sparsync.checkpoint.load(handle, folder[0])  # in the next run, also with another number of ranks
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
