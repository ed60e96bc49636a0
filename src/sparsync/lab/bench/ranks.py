"""What benchmarks of several ranks share: one process a rank, each at its own link, and a clock that all of them stop."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist

from sparsync.lab.netlab import interface_counters, network, reexecution_prefix

TIMEOUT_S = 120.0  # of one operation


def started_as_rank() -> bool:
    """Whether this process is one of those that `launch` has started."""
    return "RANK" in os.environ


def launch(module: str, arguments: Sequence[str], ranks: int, rate_bits_per_s: float | None) -> NoReturn:
    """Runs `module` once for each rank, over links of that rate or, for None, loopback; ends the process with their worst exit status."""
    again = [sys.executable, "-m", module, *arguments]
    if rate_bits_per_s is not None and (prefix := reexecution_prefix()):
        os.execv(prefix[0], [*prefix, *again])
    with tempfile.TemporaryDirectory() as folder, network(ranks, rate_bits_per_s) as links:
        shared = {
            **os.environ,
            "RENDEZVOUS": f"{folder}/rendezvous",
            "GLOO_SOCKET_IFNAME": links.interface,
            "OMP_NUM_THREADS": "1",
        }
        commands = [links.command(rank, again) for rank in range(ranks)]
        started = [
            subprocess.Popen(command, env={**shared, "RANK": str(rank)}) for rank, command in enumerate(commands)
        ]
        try:
            codes = [process.wait() for process in started]
        finally:
            for process in started:
                process.kill()
                process.wait()
    raise SystemExit(max(map(abs, codes)))


def join(ranks: int) -> None:
    """Makes this process one of the default group of `ranks`, on one thread."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{os.environ['RENDEZVOUS']}",
        rank=int(os.environ["RANK"]),
        world_size=ranks,
        timeout=timedelta(seconds=TIMEOUT_S),
    )


def leave(status: int) -> NoReturn:
    """Ends this rank's process once all have come here."""
    dist.barrier()
    dist.destroy_process_group()
    raise SystemExit(status)


def clocked(run: Callable[[], object]) -> tuple[float, int]:
    """The mean over ranks of the seconds `run` took, all having begun together, and the bytes this rank's interface has sent for it."""
    dist.barrier()
    before = interface_counters(os.environ["GLOO_SOCKET_IFNAME"]).sent_bytes
    began = time.perf_counter()
    run()
    seconds = torch.tensor([time.perf_counter() - began], dtype=torch.float64)
    dist.all_reduce(seconds)  # all that was sent has arrived: nobody answers earlier
    sent = interface_counters(os.environ["GLOO_SOCKET_IFNAME"]).sent_bytes - before
    return float(seconds) / dist.get_world_size(), sent
