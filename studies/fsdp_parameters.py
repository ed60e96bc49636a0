"""A table of what a rounded all-gather of parameters does to a small training under FSDP2, and of the bytes it sends.

    .venv/bin/python studies/fsdp_parameters.py [--ranks 2 --steps 100 --seeds 3 --workload gpt-tiny]

Markdown on standard output: bytes that a rank sends per step (means over steps), the mean training loss of the last 10 steps and the
validation quality of the owners' parameters, means over seeds. Processes on this machine, joined by gloo.
"""

import argparse
import statistics
import tempfile
from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from torch import Tensor
from torch.distributed.fsdp import fully_shard

import sparsync
from sparsync import Dense, ParameterFormat, Scheme, TwoShot
from sparsync.attached.fsdp2 import Fsdp2Handle
from sparsync.attached.fsdp2_units import Unit, units_of
from sparsync_lab import workloads

INT4 = ParameterFormat("int4")
ROWS: dict[str, tuple[type[Scheme], dict[str, object], ParameterFormat | None, bool]] = {
    "FSDP2's own": (Dense, {}, None, True),
    "`bfloat16`": (Dense, {}, ParameterFormat("bfloat16"), True),
    "`int8`": (Dense, {}, ParameterFormat("int8"), True),
    "`int4`": (Dense, {}, INT4, True),
    "`int8`, no differences": (Dense, {}, ParameterFormat("int8", differences=False), True),
    "`int4`, no differences": (Dense, {}, ParameterFormat("int4", differences=False), True),
    "`int4`, gradients by `TwoShot(1.0)`": (TwoShot, {"density": 1.0}, INT4, True),
    "`sign`": (Dense, {}, ParameterFormat("sign"), True),
    "its own, `reshard_after_forward=False`": (Dense, {}, None, False),
}


def main() -> None:
    options = _options()
    with tempfile.TemporaryDirectory() as folder:
        processes.spawn(_rank, (options, folder), nprocs=options.ranks)  # pyright: ignore[reportPrivateImportUsage]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--workload", default="gpt-tiny", help="with a list of blocks, each of which is sharded by itself"
    )
    return parser.parse_args()


def _rank(rank: int, options: argparse.Namespace, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=options.ranks)
    heads = ("parameters", "their bytes", "gradient bytes", "training loss", "validation")
    lines = [_row(heads), _row(["---"] * len(heads))]
    for label in ROWS:
        found = [_trained(label, seed, rank, options) for seed in range(options.seeds)]
        weights, gradients, losses, quality = (list(column) for column in zip(*found, strict=True))
        sent = [f"{statistics.fmean(each):,.0f}" for each in (weights, gradients)]
        lines.append(_row([label, *sent, _spread(losses), _spread(quality)]))
        if rank == 0:
            print(*lines, sep="\n", flush=True)
        lines = []
    dist.destroy_process_group()


def _trained(label: str, seed: int, rank: int, options: argparse.Namespace) -> list[float]:
    P, steps = options.ranks, options.steps
    scheme, settings, how, reshards = ROWS[label]
    workload = workloads.get(options.workload)
    model = workload.model(seed)
    for module in (*model.blocks, model):  # pyright: ignore[reportGeneralTypeIssues]
        fully_shard(module, reshard_after_forward=reshards if module is not model else False)
    optimizer, schedule = workload.optimizer(model, steps)
    handle = sparsync.attach(model, scheme(**settings), parameters=how, optimizer=optimizer)
    assert isinstance(handle, Fsdp2Handle)
    plain = [_Counted(unit) for unit in units_of(model)] if how is None else []
    losses: list[float] = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = workload.loss(model, workload.batch(seed, step, rank, P))
        loss.backward()
        workload.clip(model)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    sent = [report.sent.nbytes for report in handle.parameter_reports() if report.sent is not None]
    weights = sum(sent) + sum(each.nbytes for each in plain)
    gradients = sum(report.sent.nbytes for report in handle.reports() if report.sent is not None)
    handle.detach()  # what is validated are the owners' parameters, which a checkpoint has
    total, count = workload.evaluate(model, rank, P)
    found = torch.tensor([statistics.fmean(losses[-10:]) / P, total, count], dtype=torch.float64)
    dist.all_reduce(found)
    quality = workload.quality(found[1].item(), int(found[2]))
    return [weights / steps, gradients / steps, found[0].item(), quality]


class _Counted:
    """Counts what FSDP2's own all-gather of a module sends: its shard, to each other rank."""

    def __init__(self, unit: Unit) -> None:
        self.nbytes, self._own = 0, unit.all_gather
        self.allocate = self._own.allocate
        unit.module.set_custom_all_gather(self)  # pyright: ignore[reportArgumentType]

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> object:
        self.nbytes += (group.size() - 1) * input_tensor.nbytes
        return self._own(output_tensor, input_tensor, group, async_op)


def _spread(values: list[float]) -> str:
    return f"{statistics.fmean(values):.3f} ± {statistics.stdev(values) if len(values) > 1 else 0.0:.3f}"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
