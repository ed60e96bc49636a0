"""Final quality by scheme, without processes or links: one model, the gradients of all ranks one after the other, a LocalWorld.

Gives the figures of `sparsync compare` in less time, with one bucket. "oracle" is the limit of every selection: the largest elements of
the mean of all ranks' accumulated gradients, which no rank can know without sending everything.

    python runs/quality.py --workload shakespeare-small --schemes dense,oracle,micro,oktopk --steps 300 --seeds 0,1,2
"""

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sparsync import Bucket, LocalWorld, Report, Scheme, kernels
from sparsync.core import Comm
from sparsync.lab import workloads
from sparsync.lab.scheme_choice import SchemeChoice, parse_schemes
from sparsync.lab.workloads import one_process
from sparsync.selection.density import count_for


@dataclass
class Oracle(Scheme):
    """The largest elements of the mean accumulated gradient."""

    density: float
    residual: dict[str, Tensor] = field(default_factory=dict)
    name: str = "oracle"

    def reduce(self, bucket: Bucket, comm: Comm) -> Report:
        mean = comm.all_reduce(bucket.grad.clone()) / comm.size
        acc = self.residual.get(bucket.key, torch.zeros_like(mean)) + mean
        largest = kernels.top_k(acc, count_for(self.density, acc.numel()))
        bucket.grad.zero_().index_copy_(0, largest.index.long(), largest.value)
        self.residual[bucket.key] = acc.index_fill_(0, largest.index.long(), 0.0)
        k = largest.index.numel()
        return self.report(bucket, selected=k, union=k)

    def rescale_residual(self, factors: Mapping[str, float]) -> None:
        for residual in self.residual.values():
            residual.mul_(next(iter(factors.values())))


@dataclass(frozen=True)
class Job:
    """One training."""

    workload: str
    label: str
    seed: int
    steps: int
    ranks: int
    options: Mapping[str, str]
    follow_rate: bool

    def run(self, schemes: list[Scheme]) -> dict[str, Any]:  # Any: JSON
        work = workloads.get(self.workload, **self.options)
        work.prepare()
        model = work.model(self.seed)
        layout = one_process.layout(model)
        reports: list[Report] = []
        last_rate = 0.0

        def reduce(step: int, gradients: list[Tensor], rate: float) -> Tensor:
            nonlocal last_rate
            if self.follow_rate and last_rate not in (0.0, rate):
                for scheme in schemes:
                    scheme.rescale_residual({each.name: last_rate / rate for each in layout})
            last_rate = rate

            def body(comm: Comm) -> tuple[Tensor, Report]:
                bucket = Bucket("bucket0", gradients[comm.rank], step, layout)
                return bucket.grad, schemes[comm.rank].reduce(bucket, comm)

            mean, report = LocalWorld(self.ranks).run(body)[0]
            reports.append(report)
            return mean

        one_process.train(work, model, self.seed, self.steps, self.ranks, reduce)
        quality = work.quality(*work.evaluate(model, 0, 1))
        return {
            "workload": self.workload,
            "steps": self.steps,
            "ranks": self.ranks,
            "scheme": self.label,
            "seed": self.seed,
            work.metric: round(quality, 3),
            "union": round(sum(report.density for report in reports) / self.steps, 5),
            "kilobytes": round(sum(report.cost.nbytes for report in reports) / self.steps / 1000, 1),
        }


def _schemes(text: str, density: float) -> dict[str, SchemeChoice | None]:
    """Return the choices by label; None for the oracle."""
    names = [name.strip() for name in text.split(",")]
    return {name: None if name == "oracle" else parse_schemes(name, density)[0] for name in names}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--workload", default="shakespeare-small")
    parser.add_argument("--option", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--schemes", default="dense,oracle,micro,exdyna,oktopk")
    parser.add_argument("--density", type=float, default=0.01)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--follow-rate", action="store_true", help="residuals follow the learning rate")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    options = dict(item.split("=", 1) for item in chosen.option)
    for label, choice in _schemes(chosen.schemes, chosen.density).items():
        for seed in map(int, chosen.seeds.split(",")):
            made = [Oracle(chosen.density) if choice is None else choice.make() for _ in range(chosen.ranks)]
            job = Job(chosen.workload, label, seed, chosen.steps, chosen.ranks, options, chosen.follow_rate)
            print(json.dumps(job.run(made)), flush=True)


if __name__ == "__main__":
    main()
