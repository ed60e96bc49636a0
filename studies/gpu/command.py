"""Measures what the library costs on a GPU, and prints the tables of docs/gpu.md.

    python -m studies gpu [--out FOLDER] [--device cuda|cpu] [--only step,whole,ranks] [--page]
    python -m studies gpu --quality [--data FOLDER]
    python -m studies gpu --counts

step: one rank exchanges gradients that are given. whole: training steps of one rank. ranks: training steps of 2 and 4 ranks, which share
the GPU and talk by NCCL over sockets, each behind its own link where the machine can limit links; and whether their weights have the same
bits after 200 steps, 20 on a CPU. The model is GPT-2 with 124 M parameters. It is meant for five minutes of one GPU; what cannot be
measured is listed at the end.

--quality trains a byte-level model of 126 M parameters on the C source of Linux, all ranks in one process, by `sparsync frontier`. What was
interrupted goes on with the same command. --counts counts launches and waits on a CPU, and writes tests/counts.json and
a table of docs/gpu.md.
"""

import json
import shlex
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from sparsync_lab import cli
from sparsync_lab.report.format import significant
from sparsync_lab.writable import check_file
from studies import parts
from studies.gpu import counts, goals
from studies.gpu.launched import LINKS, of_ranks
from studies.gpu.measured import STEP, WHOLE, Measured, copy_bytes_per_s, measured
from studies.gpu.methods import ADAMW, Shape, given_gradients, heads, training

PAGE, PART = "docs/gpu.md", "gpu"
TRAINED = {"cuda": 200, "cpu": 20}  # steps after which the ranks must have the same bits
QUALITY = "frontier --workload code-86m --ranks 4 --schemes dense,default,bits=0.8 --rates 1"


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
    ranks: list[dict[str, Any]] = field(default_factory=list)  # Any: JSON
    problems: list[str] = field(default_factory=list)

    def bytes_of(self, gpu_ms: float | None) -> float | None:
        """Return the bytes per parameter that a copy would move in this time, read and written ones."""
        if gpu_ms is None or self.copy_bytes_per_s is None:
            return None
        return gpu_ms / 1e3 * self.copy_bytes_per_s / self.parameters


def main(argv: Sequence[str]) -> None:
    given = _options(argv)
    if given.counts:
        counts.write()
    elif given.quality:
        cli.main(_of_quality(given))
    else:
        check_file(given.out / "gpu.json")
        found = _measure(given)
        given.out.mkdir(parents=True, exist_ok=True)
        (given.out / "gpu.json").write_text(json.dumps(asdict(found), indent=1) + "\n")
        print(page(found))
        if given.page:
            parts.put(PAGE, PART, page(found))


def _options(argv: Sequence[str]) -> Any:  # Any: argparse's
    parser = parts.options("gpu", __doc__, writes=False)
    add = parser.add_argument
    gpu = torch.cuda.is_available()
    add("--out", type=Path, default=Path("build/gpu"), help="folder of gpu.json (default: build/gpu)")
    add("--device", choices=("cuda", "cpu"), default="cuda" if gpu else "cpu", help="default: cuda if there is one")
    add("--only", default="step,whole,ranks", help="parts (default: step,whole,ranks)")
    add("--page", action="store_true", help=f"also write the tables into {PAGE}")
    add("--quality", action="store_true", help="train, and compare qualities")
    add("--data", default="", help="of --quality: a folder of C source; default: that of Linux")
    add("--counts", action="store_true", help="count launches and waits on a CPU")
    add("--layers", type=int, default=None, help="default: 12; of --quality 10")
    add("--width", type=int, default=None, help="default: 768; of --quality 1024")
    add("--batch", type=int, default=None, help="sequences of a rank (default: 8, with several ranks 2)")
    add("--rounds", type=int, default=None, help="default: 24, on a CPU 8")
    add("--links", default=None, help=f"of several ranks (default: {','.join(LINKS)}; on a CPU {LINKS[0]})")
    return parser.parse_args(argv)


def _of_quality(given: Any) -> list[str]:  # Any: argparse's
    """Return the words of `sparsync frontier` that train."""
    width = given.width or 1024
    options = {
        "layers": given.layers or 10,
        "width": width,
        "heads": heads(width),
        "batch_size": 16,
        "data": given.data,
    }
    steps = 1000
    if given.device == "cpu":
        options |= {"batch_size": 4, "context": 64, "windows": 8}
        steps = 20
    said = [word for key, value in options.items() for word in ("--option", f"{key}={value}")]
    said += ["--steps", str(steps), "--device", given.device]
    return [*shlex.split(QUALITY), *said, "--out", str(given.out / "quality")]


def _measure(given: Any) -> Found:  # Any: argparse's
    shape = Shape.on(given.device, given.layers or 12, given.width or 768)
    rounds = given.rounds or (24 if given.device == "cuda" else 8)
    found = Found(torch.cuda.get_device_name() if given.device == "cuda" else "cpu", parameters=shape.parameters)
    wanted = given.only.split(",")
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
            batch = given.batch or (8 if given.device == "cuda" else 2)
            first = partial(make, methods[0], shape, batch)
            base: Any = tried(f"{part}, {methods[0]}", first) if part in wanted else None
            for text in methods if base else ():
                made = partial(make, text, shape, batch)
                row = tried(f"{part}, {text}", partial(measured, base, text, shape, made, rounds))
                getattr(found, part).extend([row] if row else [])
            base = None
    finally:
        dist.destroy_process_group()
    if "ranks" in wanted:
        links = (given.links or ",".join(LINKS if given.device == "cuda" else LINKS[:1])).split(",")
        for P, link in [(2, LINKS[0]), *((4, link) for link in links)]:
            trained = TRAINED[given.device] if link == LINKS[0] else 0
            measure = partial(of_ranks, P, link, shape, given.batch or 2, trained)
            found.ranks += tried(f"{P} ranks, link {link}", measure) or []
    return found


def page(found: Found) -> str:
    """Return the tables, and what could not be measured, as Markdown."""
    bandwidth = "" if found.copy_bytes_per_s is None else f", copies at {found.copy_bytes_per_s / 1e9:.0f} GB/s"
    said = [f"{found.device}, torch {found.torch}, {found.date}: {found.parameters / 1e6:.3g} M parameters{bandwidth}."]
    for rows, what, own in ((found.step, "exchange and step", True), (found.whole, "training step", False)):
        over = f"over {rows[0].text}" if rows else ""
        heads = [f"one rank's {what}", "wall, ms", over, "GPU, ms", "launches", "host syncs"]
        heads += ["bytes per parameter", "memory beyond AdamW, bytes per parameter"] if own else []
        cells = [_cells(each, found, own) for each in rows]
        said += [f"Settled / measuring steps:\n\n{parts.table(heads, cells)}"] if rows else []
    if found.ranks:
        heads = ["ranks", "link of a rank", "method", "step, ms", "same bits after training"]
        said.append(parts.table(heads, [[str(each) for each in row.values()] for row in found.ranks]))
    beside = parts.table(["goal: measured", *goals.KINDS], goals.table(_of_goals(found)))
    said.append(f"Goals at 124 M parameters on an H100, any step:\n\n{beside}")
    if found.problems:
        said.append("Not measured:\n\n" + "\n".join(f"- {each}" for each in found.problems))
    return "\n\n".join(said)


def _cells(row: Measured, found: Found, own: bool) -> list[str]:
    """Return a row of a table; with `own` times and memory that are the method's alone."""
    cells = [f"`{row.text}`", *map(_both, (row.wall_ms, row.ratio, row.gpu_ms, row.launches, row.syncs))]
    return [*cells, _both([found.bytes_of(each) for each in row.gpu_ms]), _shown(row.memory)] if own else cells


def _both(settled_and_measuring: Sequence[float | None]) -> str:
    return " / ".join(map(_shown, settled_and_measuring))


def _shown(value: float | None) -> str:
    return "-" if value is None else significant(value, 3)


def _of_goals(found: Found) -> goals.Measured:
    """Return the most that a step of the methods of each kind takes."""
    most: dict[tuple[str, str], float] = {}
    by_text = {each.text: each.gpu_ms[0] for each in found.whole}
    rival = [by_text.get(text) for text in ("powersgd 8", WHOLE[0])]
    beyond = rival[0] - rival[1] if rival[0] is not None and rival[1] is not None else None
    for row in found.step:
        kind = goals.kind_of(row.text)
        values: dict[str, Sequence[float | None]] = {
            "bytes": [found.bytes_of(each) for each in row.gpu_ms],
            "launches": row.launches,
            "syncs": row.syncs,
            "wall": row.ratio,
            "memory": [row.memory],
            "powersgd": [each / beyond if each is not None and beyond else None for each in row.gpu_ms],
        }
        for name, each in values.items() if row.text != ADAMW else ():
            known = [value for value in each if value is not None]
            if known:
                most[name, kind] = max([*known, most.get((name, kind), known[0])])
    # What a CPU measures says nothing about a GPU.
    return most if found.device != "cpu" else {}
