"""Local steps: every rank trains by itself, and every 4 steps the ranks exchange 5 % of what they have learnt.

Run: torchrun --nproc-per-node 2 examples/local_steps.py
"""

import tempfile

import torch
import torch.distributed as dist

import sparsync


def main() -> None:
    dist.init_process_group("gloo")  # "nccl" on GPUs
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 4))  # or wrapped by DDP
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    exchange = sparsync.LocalSteps(every=4)  # from rank 0's weights, on all ranks
    handle = sparsync.attach(model, sparsync.schemes.ExactMiCRO(density=0.05), optimizer=optimizer, exchange=exchange)

    torch.manual_seed(dist.get_rank())  # every rank has its own data
    batches = torch.randn(20, 16, 32)
    for x in batches:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), x[:, :4]).backward()
        handle.clip_grad_norm_(1.0)
        optimizer.step()

    with torch.no_grad():  # the common weights: the same on all ranks
        loss = torch.nn.functional.mse_loss(model(batches[0]), batches[0, :, :4]).item()
    report = handle.reports()[-1]
    if dist.get_rank() == 0:
        print(f"{report.key}: {report.union} of {report.elements} elements, {report.cost.nbytes} bytes sent")
        print(f"loss {loss:.3f} with {handle.stats()['bits']:.2f} bits per parameter per step")
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)  # one folder for all ranks
    sparsync.checkpoint.save(handle, folder[0])  # of each rank its weights, optimizer and residual
    dist.barrier()
    sparsync.checkpoint.load(handle, folder[0])  # in the next run, also with another number of ranks
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
