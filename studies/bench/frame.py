"""Shared by benchmarks: interleaved cases, measurements on several ranks, memory in new processes, and JSON lines."""

import argparse
import gc
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from sparsync_lab.netlab import RunNetwork
from sparsync_lab.progress import Progress
from sparsync_lab.workers.group import Here
from sparsync_lab.workers.process import Emit, Message
from studies import parts

Case = TypeVar("Case")
Measured = TypeVar("Measured")
Row = dict[str, Any]  # Any: JSON
Tell = Callable[[int, int], None]
"""Called after each measurement with the number done and the total."""
TIMEOUT_S = 120.0  # for one operation of a rank, and between two messages
REPEATED = 10  # steps before memory is read, and again before its peak is read


def options(subject: str, about: str | None) -> argparse.ArgumentParser:
    """Build the parser of a benchmark."""
    return parts.options(f"bench {subject}", about, writes=False)


def interleaved(
    cases: Sequence[Case],
    measure: Callable[[Case, int], Measured],
    rounds: int,
    warmup: int,
    tell: Tell = lambda done, total: None,
) -> list[list[Measured]]:
    """Measure each case in `rounds` rounds, after `warmup` more; returns lists of measurements in the order of `cases`.

    `measure(case, number)` is called in an order that changes from round to round but is the same on every rank: each round begins with
    another case, and every second one runs backwards, so that no case always follows the same one. `number` counts from 0, including
    warm-up.
    """
    found: list[list[Measured]] = [[] for _ in cases]
    done, total = 0, (warmup + rounds) * len(cases)
    for number in range(warmup + rounds):
        order = [(number + place) % len(cases) for place in range(len(cases))]
        for place in order if number % 2 else reversed(order):
            measured = measure(cases[place], number)
            done += 1
            tell(done, total)
            if number >= warmup:
                found[place].append(measured)
    return found


def of_ranks(task: str, spec: Mapping[str, Any], links: RunNetwork) -> list[Row]:
    """Run `task` with `spec` on every rank of `links`, and collect rank 0's rows. Raises RankFailedError."""
    rows: list[Row] = []
    shown = Progress("measurements", announced=True)

    def take(message: Message) -> None:
        if message["kind"] == "row":
            rows.append(message["row"])
        elif message["kind"] == "measured":
            shown.at(message["done"], total=message["total"])

    Here(links, TIMEOUT_S).run(task, spec, take)
    return rows


def telling(emit: Emit) -> Tell:
    """Make a function that sends the number of finished measurements."""
    return lambda done, total: emit({"kind": "measured", "done": done, "total": total})


def clocked(run: Callable[[], object]) -> float:
    """Time `run` in seconds, averaged over ranks that begin together."""
    dist.barrier()
    began = time.perf_counter()
    run()
    seconds = torch.tensor([time.perf_counter() - began], dtype=torch.float64)
    dist.all_reduce(seconds)
    return float(seconds) / dist.get_world_size()


def memory(ranks: int, prepare: Callable[..., tuple[int, Callable[[], Callable[[], object]]]], *given: object) -> Row:
    """Measure a method's bytes per element on rank 0 in fresh processes joined by gloo: settled, and at peak.

    `prepare(rank, *given)` returns the number of elements, and a function that makes the method and returns its step.
    """
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"  # read at process start: freed memory is returned at once
    with tempfile.TemporaryDirectory() as folder:
        spawn(_memory_of_rank, (ranks, folder, prepare, given), ranks)
        return json.loads(Path(folder, "bytes.json").read_text())


def _memory_of_rank(rank: int, ranks: int, folder: str, prepare: Callable[..., Any], given: Sequence[object]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    elements, make = prepare(rank, *given)
    gc.collect()
    without = _resident("VmRSS")
    step = make()
    for _ in range(REPEATED):
        step()
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    for _ in range(REPEATED):
        step()
    found = {"settled": _resident("VmRSS") - without, "peak": _resident("VmHWM") - without}
    if rank == 0:
        Path(folder, "bytes.json").write_text(json.dumps({name: each / elements for name, each in found.items()}))
    dist.barrier()
    dist.destroy_process_group()


def _resident(key: str) -> int:
    """Read this process's resident bytes, current or peak."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return 1024 * int(lines[key].split()[0])


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Compute p20, p50 and p80 of at least four values; with fewer they would lie outside the data."""
    p20, *_, p80 = statistics.quantiles(values, n=5)
    return {"p20": p20, "p50": statistics.median(values), "p80": p80}


def write(rows: Sequence[Mapping[str, Any]]) -> None:  # Any: JSON
    """Print one JSON line per row; numbers have 6 significant digits."""
    for row in rows:
        print(json.dumps(_rounded(row)))


def _rounded(value: Any) -> Any:  # Any: JSON
    if isinstance(value, float):
        return value if value.is_integer() else float(f"{value:.6g}")  # bytes stay exact
    if isinstance(value, Mapping):
        return {key: _rounded(each) for key, each in value.items()}
    return [_rounded(each) for each in value] if isinstance(value, list | tuple) else value
