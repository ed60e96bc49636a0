"""Benchmarks of several ranks: one worker process per rank at its own link, and a clock that measures all ranks together."""

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from sparsync_lab.netlab import interface_counters, network, parse_link
from sparsync_lab.progress import progress
from sparsync_lab.workers.group import worker_group
from sparsync_lab.workers.process import Emit, Place
from studies.bench.interleave import Tell

TIMEOUT_S = 120.0  # for one operation of a rank, and for the time between two messages


def rows_of_ranks(task: str, options: argparse.Namespace) -> list[dict[str, Any]]:  # Any: JSON
    """Run `task` with `options` on `options.ranks` ranks over `options.link`; return the rows that rank 0 emits.

    A row is the "row" of a message of kind "row"; messages of `telling` show how far the ranks are. Raises RankFailedError.
    """
    rows: list[dict[str, Any]] = []
    with (
        progress("measurements") as shown,
        network(options.ranks, parse_link(options.link)) as links,
        worker_group(task, vars(options), links, TIMEOUT_S) as workers,
    ):
        for message in workers.messages():
            if message["kind"] == "row":
                rows.append(message["row"])
            elif message["kind"] == "measured":
                shown.at(message["done"], message["what"], message["total"])
    return rows


def telling(emit: Emit, what: str) -> Tell:
    """Return a function that sends how many measurements of `what` are done."""
    return lambda done, total: emit({"kind": "measured", "what": what, "done": done, "total": total})


def clocked(run: Callable[[], object], place: Place) -> tuple[float, int]:
    """Return the seconds that `run` takes, a mean over ranks that begin together, and the bytes that this interface sends for it."""
    dist.barrier()
    before = interface_counters(place.interface).sent_bytes
    began = time.perf_counter()
    run()
    seconds = torch.tensor([time.perf_counter() - began], dtype=torch.float64)
    dist.all_reduce(seconds)  # all bytes have arrived after this: no rank answers earlier
    sent = interface_counters(place.interface).sent_bytes - before
    return float(seconds) / dist.get_world_size(), sent
