"""Every rank's gradient of a training, written to a file for later study; the ranks are shares of the batch on one model."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from sparsync_lab.traffic.stream import FORMAT
from sparsync_lab.workloads import one_process
from sparsync_lab.workloads.base import Workload, share

MOST_NUMBERS = 2**34  # in a file
Precision = Literal["bfloat16", "float32"]


def record(
    workload: Workload,
    seed: int,
    ranks: int,
    steps: int,
    every: int = 1,
    precision: Precision = "bfloat16",
    after: Callable[[int], None] = lambda step: None,
) -> dict[str, Any]:  # Any: a tensor and its description, as torch.load(weights_only=True) accepts them
    """Return the gradients [T, P, n] of every `every`-th of `steps` training steps, as the ranks have them before they are averaged.

    The training is that of `ranks` ranks with the dense mean: each step computes every rank's share of the batch on the same weights.
    `after` is called with the steps taken.
    """
    for name, value in (("ranks", ranks), ("steps", steps), ("every", every)):
        if value < 1:
            raise ValueError(f"--{name} must be at least 1, got {value}")
    if precision not in get_args(Precision):
        raise ValueError(f"--precision must be one of {', '.join(get_args(Precision))}, got {precision!r}")
    share(getattr(workload, "batch_size", ranks), 0, ranks)
    workload.prepare()
    model = workload.model(seed)
    layout = one_process.layout(model)
    shape = (-(-steps // every), ranks, layout[-1].span.stop)
    if math.prod(shape) > MOST_NUMBERS:
        raise ValueError(
            f"{' x '.join(map(str, shape))} steps, ranks and parameters are over {MOST_NUMBERS:,} numbers, which are held in memory; "
            "record fewer --steps, or fewer of them by --every"
        )
    recorded = torch.empty(shape, dtype=getattr(torch, precision))

    def reduce(step: int, gradients: list[Tensor], rate: float) -> Tensor:
        stacked = torch.stack(gradients)  # [P, n]
        if step % every == 0:
            recorded[step // every].copy_(stacked)
        return stacked.mean(0)

    one_process.train(workload, model, seed, steps, ranks, reduce, after)
    spans = [(each.name, each.span.start, each.span.stop) for each in layout]
    name = workload.describe()["workload"]
    about = {"workload": name, "seed": seed, "ranks": ranks, "steps": steps, "every": every}
    return {"format": FORMAT, "gradients": recorded, "layout": spans, "about": about}


def save(recorded: dict[str, Any], path: Path) -> None:  # Any: as `record`
    """Write the file, and make its folder where it is missing. Raises RuntimeError where that cannot be done."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(recorded, path)
    except (OSError, RuntimeError) as error:
        raise RuntimeError(f"cannot write {path}: {error}; choose a place with room by --out") from error
