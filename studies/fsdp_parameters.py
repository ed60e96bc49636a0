"""Writes the table of docs/attach.md of what compressing FSDP2's shard axis does to a small training, and of the bytes it sends.

    .venv/bin/python -m studies fsdp_parameters [--ranks 2 --steps 300 --seeds 3 --workload gpt-tiny] [--print]

Bytes that a rank sends per step (means over steps), and the validation quality of the owners' parameters, over seeds. Processes on this
machine, joined by gloo.
"""

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from torch import Tensor
from torch.distributed.fsdp import fully_shard

import sparsync
from sparsync import Dense, Scheme, TwoShot
from sparsync.attached.fsdp2 import Fsdp2Handle
from sparsync.attached.fsdp2_units import Unit, units_of
from sparsync.wire import Values
from sparsync_lab import workloads
from studies import parts

PAGE, PART = "docs/attach.md", "shard axis quality"
INT4 = "int4"
# What is written of parameters and of gradients, the scheme, the format of parameters, and whether FSDP2 gathers twice
ROWS: dict[tuple[str, str], tuple[type[Scheme], dict[str, object], Values | None, bool]] = {
    ("FSDP2's own", "FSDP2's own"): (Dense, {}, None, True),
    ("FSDP2's own, `reshard_after_forward=False`", "FSDP2's own"): (Dense, {}, None, False),
    ("`bfloat16`", "FSDP2's own"): (Dense, {}, "bfloat16", True),
    ("`int8`", "FSDP2's own"): (Dense, {}, "int8", True),
    ("`int4`", "FSDP2's own"): (Dense, {}, INT4, True),
    ("`sign`", "FSDP2's own"): (Dense, {}, "sign", True),
    ("`int4`", "all in int8"): (TwoShot, {"density": 1.0, "values": "int8"}, INT4, True),
    ("`int4`", "all in int4"): (TwoShot, {"density": 1.0}, INT4, True),
    ("`int4`", "5 % in int4"): (TwoShot, {"density": 0.05}, INT4, True),
}


def main(argv: Sequence[str]) -> None:
    parser = parts.options("fsdp_parameters", __doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--workload", default="gpt-tiny", help="with a list of blocks, each of which is sharded by itself"
    )
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        processes.spawn(_rank, (options, folder), nprocs=options.ranks)  # pyright: ignore[reportPrivateImportUsage]
        rows = json.loads((Path(folder) / "rows.json").read_text())
    heads = ("parameters", "gradients", "bytes of parameters", "bytes of gradients", "perplexity at the end")
    where = (
        f"`{options.workload}`, AdamW, {options.ranks} ranks, {options.steps} steps, mean of {options.seeds} seeds (lowest to highest); "
        "bytes are those a rank sends in a step (`python -m studies fsdp_parameters`):"
    )
    parts.put(PAGE, PART, f"{where}\n\n{parts.table(heads, rows)}", options.print)


def _rank(rank: int, options: argparse.Namespace, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=options.ranks)
    rows: list[list[str]] = []
    for of_parameters, of_gradients in ROWS:
        found = [_trained((of_parameters, of_gradients), seed, rank, options) for seed in range(options.seeds)]
        weights, gradients, quality = (list(column) for column in zip(*found, strict=True))
        sent = [f"{statistics.fmean(each):,.0f}" for each in (weights, gradients)]
        spread = f"{statistics.fmean(quality):.2f} ({min(quality):.2f} to {max(quality):.2f})"
        rows.append([of_parameters, of_gradients, *sent, spread])
        if rank == 0:
            print(parts.line(rows[-1]), file=sys.stderr, flush=True)
    if rank == 0:
        (Path(folder) / "rows.json").write_text(json.dumps(rows))
    dist.destroy_process_group()


def _trained(label: tuple[str, str], seed: int, rank: int, options: argparse.Namespace) -> list[float]:
    P, steps = options.ranks, options.steps
    scheme, settings, how, reshards = ROWS[label]
    workload = workloads.get(options.workload)
    model = workload.model(seed)
    for module in (*model.blocks, model):  # pyright: ignore[reportGeneralTypeIssues]
        fully_shard(module, reshard_after_forward=reshards if module is not model else False)
    optimizer, schedule = workload.optimizer(model, steps)
    handle = sparsync.attach(model, scheme(**settings), options=sparsync.Options(parameters=how), optimizer=optimizer)
    assert isinstance(handle, Fsdp2Handle)
    plain = [_Counted(unit) for unit in units_of(model)] if how is None else []
    for step in range(steps):
        optimizer.zero_grad()
        loss = workload.loss(model, workload.batch(seed, step, rank, P))
        loss.backward()
        workload.clip(model)
        optimizer.step()
        schedule.step()
    sent = [report.sent.nbytes for report in handle.parameter_reports() if report.sent is not None]
    weights = sum(sent) + sum(each.nbytes for each in plain)
    gradients = sum(report.sent.nbytes for report in handle.reports() if report.sent is not None)
    handle.detach()  # what is validated are the owners' parameters, which a checkpoint has
    total, count = workload.evaluate(model, rank, P)
    found = torch.tensor([total, count], dtype=torch.float64)
    dist.all_reduce(found)
    return [weights / steps, gradients / steps, workload.quality(found[0].item(), int(found[1]))]


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
