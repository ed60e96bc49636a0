"""AdamW under DistributedDataParallel with the default recipe: one more line, and the loop as it was.

Run: torchrun --nproc-per-node 2 examples/adamw_steps.py
"""

import tempfile

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import sparsync


def main() -> None:
    dist.init_process_group("gloo")  # "nccl" on GPUs
    model = DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 4))
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    handle = sparsync.attach(model, optimizer=optimizer)  # or bits=0.8, over a slow link

    torch.manual_seed(dist.get_rank())  # every rank has its own data
    batches = torch.randn(20, 16, 32)
    for x in batches:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), x[:, :4]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()

    model.eval()
    with torch.no_grad():
        loss = torch.nn.functional.mse_loss(model(batches[0]), batches[0, :, :4]).item()
    report = handle.reports()[-1]
    if dist.get_rank() == 0:
        print(f"{report.key}: {report.union} of {report.elements} elements, {report.cost.nbytes} bytes sent")
        print(f"loss {loss:.3f} with {handle.stats()['bits']:.2f} bits per parameter per step")
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)  # one folder for all ranks
    sparsync.checkpoint.save(handle, folder[0])  # as exact as it can be; optimizer.state_dict() has the moments too
    dist.barrier()
    sparsync.checkpoint.load(handle, folder[0])  # in the next run, also with another number of ranks
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
