"""A training that goes on while ranks die, leave and join, without a restart and without a checkpoint.

A store, over which the ranks find each other:  python -m sparsync_elastic --port 29400
A rank, as many as you like and at any time:    python examples/elastic.py 127.0.0.1:29400
All of it over slow links, and with faults:
    sparsync launch --ranks 3 --link 2mbit --fault kill:1@20s --fault join@25s -- examples/elastic.py --steps 400
"""

import argparse
import os
import signal

import torch
from torch import nn

import sparsync
import sparsync_elastic as elastic


def batch(step: int, rank: int, size: int, teacher: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this rank's share of the 120 examples of a step: all of them are used, however many ranks there are."""
    x = torch.randn(120, 32, generator=torch.Generator().manual_seed(step))[rank::size]
    return x, teacher(x).detach()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("store", nargs="?", help="host:port (default: MASTER_ADDR and MASTER_PORT, which launch sets)")
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()

    torch.manual_seed(0)
    teacher = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4))  # what is to be learnt
    model = nn.Sequential(nn.Linear(32, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps)

    # The first step waits for this many ranks. Others join whenever they come, and get weights, optimizer and schedule from one of these.
    with elastic.Run(options.store, ranks=int(os.environ.get("WORLD_SIZE", "1"))) as run:
        run.leave_on(signal.SIGTERM)  # what a spot machine gets: hands over what it has not sent, and goes
        run.on_change = lambda run: print(f"goes on at step {run.step} as rank {run.rank} of {run.size}")
        handle = sparsync.attach(model, optimizer=optimizer)
        run.add(model, handle, optimizer, schedule)
        for step in run.steps(options.steps):  # a step in which a rank is lost comes again
            with run.attempt():
                x, y = batch(step, run.rank, run.size, teacher)
                optimizer.zero_grad()
                loss = nn.functional.mse_loss(model(x), y)
                loss.backward()
                optimizer.step()
                schedule.step()
                if step % 20 == 19 and run.rank == 0:
                    print(f"step {step + 1}: loss {loss.item():.5f} of {run.size} ranks")
        print(f"has left at step {run.step}" if run.left else f"done after {run.step} steps")


if __name__ == "__main__":
    main()
