"""Benchmarks of several ranks: one worker process per rank at its own link, and a clock that measures all ranks together."""

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from sparsync.lab.netlab import interface_counters, network, parse_link
from sparsync.lab.workers.group import worker_group
from sparsync.lab.workers.process import Place

TIMEOUT_S = 120.0  # for one operation of a rank, and for the time between two messages


def rows_of_ranks(task: str, options: argparse.Namespace) -> list[dict[str, Any]]:  # Any: JSON
    """Run `task` with `options` on `options.ranks` ranks over `options.link`; return the rows that rank 0 emits.

    A row is the "row" of a message of kind "row"; messages of other kinds show that the ranks are alive. Raises RankFailedError.
    """
    rows: list[dict[str, Any]] = []
    with (
        network(options.ranks, parse_link(options.link)) as links,
        worker_group(task, vars(options), links, TIMEOUT_S) as workers,
    ):
        rows += [message["row"] for message in workers.messages() if message["kind"] == "row"]
    return rows


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
