"""Train a job of the laboratory with plain DDP and `attach`, and append steps, bytes and losses to a file: a run for docs/compare.md.

Run: torchrun --nproc-per-node 4 examples/record.py --job gpt --steps 1000 --rate 2 --scheme bits=0.8 --seed 0 --out runs.jsonl
One process per rank, by NCCL with a GPU each, otherwise by gloo. Without --scheme the gradients are reduced by DDP itself.
"""

import argparse
import os
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

import sparsync
from sparsync.exchanges.rules import MuonRule, rules_of
from sparsync_lab import environment, json_lines, workloads
from sparsync_lab.scheme_choice import SchemeChoice, parse_schemes
from sparsync_lab.workloads.base import Workload, family_of_job, loss_of, mixed_precision, parameter_count
from sparsync_lab.workloads.own_momentum import made_for, optimizer_for, own_clip_factor


def main(arguments: list[str] | None = None) -> None:
    options = _options(arguments)
    device = _join()
    workload = workloads.get(options.job).at_rate(options.rate)
    if dist.get_rank() == 0:
        workload.prepare()  # fetches the data where they are missing
    dist.barrier()
    workload.prepare()
    choice = _choice(options.scheme, workload)
    row = _trained(workload, choice, options, device)
    if dist.get_rank() == 0:
        json_lines.append(options.out, row)
        print(
            f"{row['steps']} steps: loss {row['loss']:.4f}, {row['bits']:.4g} bits per parameter per step; {options.out}"
        )
    dist.destroy_process_group()


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add(
        "--job",
        required=True,
        help="a language model of the laboratory, such as gpt-tiny: see `sparsync compare --help`",
    )
    add("--track", help="of docs/compare.md, where the job is one of its own such as gpt-muon-tiny (default: the job)")
    add("--steps", type=int, required=True, help="how many optimizer steps; the schedule ends with them")
    add(
        "--scheme",
        help="default, bits=0.8, SCHEME:KEY=VALUE, or with steps around it: local_steps(every=16)/SCHEME (default: DDP itself)",
    )
    add("--gradients", action="store_true", help="exchange gradients where attach would exchange the optimizer's steps")
    add("--rate", type=float, default=1.0, help="times the job's own learning rate (default: 1)")
    add("--seed", type=int, default=0, help="of weights and batches (default: 0)")
    add("--evaluations", type=int, default=10, help="points of the loss curve, the last one at the end (default: 10)")
    add("--who", default="", help="your name, for the table")
    add("--out", type=Path, required=True, metavar="FILE.jsonl", help="the file that the row is appended to")
    options = parser.parse_args(arguments)
    if not 1 <= options.evaluations <= options.steps:
        parser.error(f"--evaluations must be from 1 to --steps, {options.steps}, got {options.evaluations}")
    return options


def _choice(text: str | None, workload: Workload) -> SchemeChoice | None:
    if text is None:
        return None
    found = parse_schemes(text, 0.01, family_of_job(workload), (dist.get_world_size(),))
    if len(found) != 1 or found[0].auto:
        raise ValueError(f"--scheme takes one scheme, without bits=auto, got {text!r}; start a run for each")
    return found[0]


def _join() -> torch.device:
    """Join the process group that torchrun has described; return this rank's device."""
    local, ranks_here = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if torch.cuda.device_count() < ranks_here:
        dist.init_process_group("gloo")
        return torch.device("cpu")
    torch.cuda.set_device(local)
    device = torch.device("cuda", local)
    dist.init_process_group("nccl", device_id=device)
    return device


@dataclass(frozen=True)
class _Training:
    """The model of one rank as it trains. `handle`: None where DDP reduces by itself, with `ddp_bytes` that a rank sends in a step."""

    model: nn.Module  # without a wrapper
    wrapped: nn.Module
    optimizer: Optimizer
    schedule: LRScheduler
    handle: Any  # Any: one of the handles of attach
    ddp_bytes: float

    @property
    def clip_factor(self) -> float:
        """How much longer than the mean gradient the one may be that is clipped."""
        if isinstance(self.handle, sparsync.GradientReducer):
            return own_clip_factor(dist.get_world_size())
        if self.handle is None or not isinstance(self.handle.exchange, sparsync.LocalSteps):
            return 1.0  # exchanged steps have divided their gradients
        return self.handle.clip_factor

    def common_weights(self) -> AbstractContextManager[None]:
        """Have in the model what all ranks have in common."""
        return self.handle.averaged() if hasattr(self.handle, "averaged") else nullcontext()

    def sent(self) -> float:
        """Return the bytes that this rank has sent since the last call, or in a step of DDP's."""
        if self.handle is None:
            return self.ddp_bytes
        return sum((report.sent or report.cost).nbytes for report in self.handle.take_reports())


def _training(
    workload: Workload, choice: SchemeChoice | None, options: argparse.Namespace, device: torch.device
) -> _Training:
    model, P = workload.model(options.seed).to(device), dist.get_world_size()
    scheme = sparsync.schemes.Dense() if choice is None else choice.make()
    wrapped: nn.Module = model
    if (
        not scheme.has_momentum
    ):  # each rank clips its own gradient before such a scheme reduces it: not in DDP's backward pass
        wrapped = DistributedDataParallel(model, find_unused_parameters=workload.find_unused_parameters)
    optimizer, schedule = optimizer_for(scheme, workload, wrapped, options.steps)
    ring = 2 * (P - 1) / P * sum(each.nbytes for each in model.parameters() if each.requires_grad)
    handle = None
    if choice is not None:
        exchange = sparsync.Gradients() if options.gradients else choice.exchange()
        handle = sparsync.attach(wrapped, scheme, exchange=exchange, optimizer=optimizer)
    return _Training(model, wrapped, optimizer, schedule, handle, ring)


def _trained(
    workload: Workload, choice: SchemeChoice | None, options: argparse.Namespace, device: torch.device
) -> dict[str, Any]:  # Any: JSON
    """Train for all steps, and return the row. Collective."""
    training, steps = _training(workload, choice, options, device), options.steps
    at = {round(steps * (i + 1) / options.evaluations) for i in range(options.evaluations)}
    began, sent, curve = time.perf_counter(), 0.0, []
    for step in range(steps):
        _step(workload, training, options.seed, step, device)
        if step + 1 == steps and choice is not None and choice.leaves_rest(steps):
            training.handle.flush()
        sent += training.sent()
        if step + 1 in at:
            curve.append([step + 1, *_evaluated(workload, training, sent, device)])
            if dist.get_rank() == 0:
                print(
                    f"step {step + 1}: loss {curve[-1][1]:.4f}, {curve[-1][2] / 1e6:.4g} MB sent by a rank", flush=True
                )
    job, first = workloads.get(options.job), workload.batch(options.seed, 0, 0, 1)
    return {
        "track": options.track or options.job,
        "job": job.describe(),
        "scheme": options.scheme or "dense",
        "settings": "" if choice is None else repr(choice.make()),
        "exchange": _exchange(training.handle),
        "ranks": dist.get_world_size(),
        "optimizer": made_for(sparsync.schemes.Dense() if choice is None else choice.make(), job),
        "rate": options.rate,
        "schedule": "the job's",
        "seed": options.seed,
        "steps": steps,
        "tokens": steps * first.target.numel(),
        "loss": curve[-1][1],
        "bytes": curve[-1][2],
        "bits": 8 * curve[-1][2] / steps / parameter_count(training.model),
        "curve": curve,
        "who": options.who,
        "date": datetime.now(timezone.utc).date().isoformat(),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else environment.machine()["cpu"],
        "precision": "bfloat16 autocast" if device.type == "cuda" else "float32",
        "seconds": round(time.perf_counter() - began, 1),
        "versions": environment.versions(),
    }


def _step(workload: Workload, training: _Training, seed: int, step: int, device: torch.device) -> None:
    training.optimizer.zero_grad(set_to_none=True)
    with mixed_precision(device.type):
        loss = loss_of(workload, training.wrapped, seed, step, dist.get_rank(), dist.get_world_size())
    loss.backward()
    workload.clip(training.wrapped, training.clip_factor)
    if isinstance(training.handle, sparsync.GradientReducer):
        training.handle.reduce()
    training.optimizer.step()
    training.schedule.step()


def _evaluated(workload: Workload, training: _Training, sent: float, device: torch.device) -> tuple[float, float]:
    """Return the mean loss of the validation, in nats, and the mean over ranks of the bytes sent. Collective.

    It is evaluated in float32 on any device.
    """
    with training.common_weights():
        total, count = workload.evaluate(training.model, dist.get_rank(), dist.get_world_size())
    summed = torch.tensor([total, count, sent], dtype=torch.float64, device=device)
    dist.all_reduce(summed)
    total, count, sent = summed.tolist()
    return total / count, sent / dist.get_world_size()


def _exchange(handle: Any) -> str:  # Any: one of the handles of attach
    """Return what is exchanged, with the values of all settings: also of those that follow from the scheme and the optimizer."""
    if handle is None or isinstance(handle.exchange, sparsync.Gradients):
        return repr(sparsync.Gradients() if handle is None else handle.exchange)
    exchange = handle.exchange
    settings = {**exchange.described(), "keep": exchange.keep_for(handle.scheme)}
    settings["bucket_mb"] = exchange.megabytes_for(handle.scheme)
    if isinstance(exchange, sparsync.Steps):
        rules = rules_of(handle.optimizers)
        betas = sorted({rule.remembers(exchange.beta2) for rule in rules})
        settings["keep"] = exchange.keep_for(handle.scheme, any(isinstance(rule, MuonRule) for rule in rules))
        settings |= {"beta2": betas[0] if len(betas) == 1 else betas, "decay": exchange.decay_for(handle.scheme)}
    return f"{type(exchange).__name__}({', '.join(f'{name}={value!r}' for name, value in settings.items())})"


if __name__ == "__main__":
    main()
