"""Steps of AdamW: every rank divides by its own second moments, and the ranks exchange 1 bit of each element of their steps.

Run: torchrun --nproc-per-node 2 examples/adamw_steps.py
"""

import tempfile

import torch
import torch.distributed as dist

import sparsync


def main() -> None:
    dist.init_process_group("gloo")  # "nccl" on GPUs
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 4))  # not wrapped
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    scheme = sparsync.TwoShot(density=1.0, values="sign")
    steps = sparsync.AdamWSteps(model, optimizer, scheme, keep=0.5)  # rank 0's weights, on all ranks

    torch.manual_seed(dist.get_rank())  # every rank has its own data
    batches = torch.randn(20, 16, 32)
    for x in batches:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), x[:, :4]).backward()
        steps.clip_grad_norm_(1.0)
        steps.step()  # in place of optimizer.step()
        schedule.step()

    with steps.averaged():  # the common weights: the same on all ranks
        loss = torch.nn.functional.mse_loss(model(batches[0]), batches[0, :, :4]).item()
    report = steps.reports()[-1]
    if dist.get_rank() == 0:
        print(f"{report.key}: {report.union} of {report.elements} elements, {report.cost.nbytes} bytes sent")
        print(f"loss {loss:.3f} with {steps.stats()['bits']:.2f} bits per parameter per step")
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)  # one folder for all ranks
    sparsync.checkpoint.save(steps, folder[0])  # of each rank its weights, moments and residual
    dist.barrier()
    sparsync.checkpoint.load(steps, folder[0])  # in the next run, also with another number of ranks
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
