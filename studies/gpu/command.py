"""Measures what the library costs on a GPU, and prints the tables of docs/gpu.md.

    python -m studies gpu [--out FOLDER] [--device cuda|cpu] [--only step,whole] [--page]
    python -m studies gpu --counts

step: one rank exchanges gradients that are given. whole: training steps of one rank. The model is GPT-2 with 124 M parameters. It is meant
for five minutes of one GPU; what cannot be measured is listed at the end. Steps are settled: none measures a
ratio. --counts counts launches and waits on a CPU, and writes
tests/counts.json and a table of docs/gpu.md.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from sparsync_lab.report.format import significant
from sparsync_lab.writable import check_file
from studies import parts
from studies.gpu import counts
from studies.gpu.measured import Measured, copy_bytes_per_s, measured
from studies.gpu.methods import STEP, WHOLE, Shape, given_gradients, training

PAGE, PART = "docs/gpu.md", "gpu"


@dataclass
class Found:
    """What was measured, and on what; `problems` say what was not."""

    device: str
    torch: str = torch.__version__
    date: str = field(default_factory=lambda: date.today().isoformat())
    parameters: int = 0
    copy_bytes_per_s: float | None = None
    step: list[Measured] = field(default_factory=list)
    whole: list[Measured] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def main(argv: Sequence[str]) -> None:
    given = _options(argv)
    if given.counts:
        counts.write()
        return
    check_file(given.out / "gpu.json")
    found = _measure(given)
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "gpu.json").write_text(json.dumps(asdict(found), indent=1) + "\n")
    print(page(found))
    if given.page:
        parts.put(PAGE, PART, page(found))


def _options(argv: Sequence[str]) -> argparse.Namespace:
    parser = parts.options("gpu", __doc__, writes=False)
    add = parser.add_argument
    gpu = torch.cuda.is_available()
    add("--out", type=Path, default=Path("build/gpu"), help="folder of gpu.json (default: build/gpu)")
    add("--device", choices=("cuda", "cpu"), default="cuda" if gpu else "cpu", help="default: cuda if there is one")
    add("--only", default="step,whole", help="parts (default: step,whole)")
    add("--page", action="store_true", help=f"also write the tables into {PAGE}")
    add("--counts", action="store_true", help="count launches and waits on a CPU")
    add("--layers", type=int, default=12, help="default: 12")
    add("--width", type=int, default=768, help="default: 768")
    add("--batch", type=int, default=8 if gpu else 2, help="sequences (default: 8, on a CPU 2)")
    add("--rounds", type=int, default=24 if gpu else 8, help="default: 24, on a CPU 8")
    return parser.parse_args(argv)


def _measure(given: argparse.Namespace) -> Found:
    shape = Shape.on(given.device, given.layers, given.width)
    found = Found(torch.cuda.get_device_name() if given.device == "cuda" else "cpu", parameters=shape.parameters)
    if given.device == "cpu":
        torch.set_num_threads(1)
        found.problems.append("no GPU: neither its time nor its memory, launches and host syncs; see --counts")

    def tried(name: str, measure: Callable[[], Any]) -> Any:  # Any: what it measures, or None
        try:
            return measure()
        except Exception as error:  # the rest can still be measured
            found.problems.append(f"{name}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
            return None

    backend = "nccl" if given.device == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # pyright: ignore[reportPrivateImportUsage]
    try:
        found.copy_bytes_per_s = tried("copy", partial(copy_bytes_per_s, given.device))
        for part, methods, make in (("step", STEP, given_gradients), ("whole", WHOLE, training)):
            first = partial(make, methods[0], shape, given.batch)
            base: Any = tried(f"{part}, {methods[0]}", first) if part in given.only.split(",") else None
            for text in methods if base else ():
                made = partial(make, text, shape, given.batch)
                row = tried(f"{part}, {text}", partial(measured, base, text, shape, made, given.rounds))
                getattr(found, part).extend([row] if row else [])
            base = None
    finally:
        dist.destroy_process_group()
    return found


def page(found: Found) -> str:
    """Return the tables, and what could not be measured, as Markdown."""
    bandwidth = "" if found.copy_bytes_per_s is None else f", copies at {found.copy_bytes_per_s / 1e9:.0f} GB/s"
    said = [f"{found.device}, torch {found.torch}, {found.date}: {found.parameters / 1e6:.3g} M parameters{bandwidth}."]
    for rows, what in ((found.step, "exchange and step"), (found.whole, "training step")):
        if rows:
            over, copied = f"over {rows[0].text}", "GPU time in bytes per parameter"
            heads = [f"one rank's {what}", "wall, ms", over, "GPU, ms", "launches", "host syncs", copied, "memory"]
            said.append(parts.table(heads, [_cells(each, found) for each in rows]))
    if found.step:
        said.append(
            "Memory is that beyond AdamW, in bytes per parameter; GPU time in bytes is what a copy would move meanwhile."
        )
    if found.problems:
        said.append("Not measured:\n\n" + "\n".join(f"- {each}" for each in found.problems))
    return "\n\n".join(said)


def _cells(row: Measured, found: Found) -> list[str]:
    """Return a row of a table."""
    copied = None
    if row.gpu_ms is not None and found.copy_bytes_per_s is not None:
        copied = row.gpu_ms / 1e3 * found.copy_bytes_per_s / found.parameters
    values = (row.wall_ms, row.ratio, row.gpu_ms, row.launches, row.syncs, copied, row.memory)
    return [f"`{row.text}`", *("-" if each is None else significant(each, 3) for each in values)]
