"""Measures training steps of several ranks that share one GPU, each behind its own link: `sparsync launch` starts this file as a rank."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from sparsync.recipes import rows
from studies import parts
from studies.gpu.methods import DDP, Shape, Steps, common_weights, training

LINKS = ("none", "25gbit", "10gbit", "1gbit")
METHODS = (DDP, "bf16 hook", "powersgd 8", "default", "bits=0.8")
WARMUP, TIMED = 2, 3  # steps
SMALL = {"layers": 2, "width": 64, "vocabulary": 1000, "context": 64}  # the model whose bits are compared
WITHIN_S = 150.0
Row = dict[str, Any]  # Any: JSON


def of_ranks(P: int, link: str, shape: Shape, batch: int, trained: int) -> list[Row]:
    """Return the step time of each method on `P` ranks, and whether a small model has the same bits after `trained` steps, 0 for no such.

    Raises RuntimeError where the ranks could not run.
    """
    with tempfile.TemporaryDirectory() as folder:
        told = Path(folder) / "told.json"
        task = json.dumps({"shape": asdict(shape), "batch": batch, "told": str(told), "trained": trained})
        command = [sys.executable, "-m", "sparsync_lab.cli", "launch", "--ranks", str(P), "--link", link, "--"]
        command += [sys.executable, "-m", "studies.gpu.launched", task]
        ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=WITHIN_S, cwd=parts.ROOT)
        if ended.returncode:
            said = (ended.stdout + ended.stderr).splitlines()
            raise RuntimeError(
                next((line for line in said if "Error: " in line), said[-1] if said else "it said nothing")
            )
        measured: dict[str, list[Any]] = json.loads(told.read_text())
    return [
        {"P": P, "link": link, "method": text, "ms": ms, "same bits": same} for text, (ms, same) in measured.items()
    ]


def main(task: Row) -> None:
    """Measure as one rank; rank 0 writes the file."""
    rank = int(os.environ["RANK"])
    shape = Shape(**task["shape"])
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")
    # NCCL has several ranks on one GPU if each takes itself for another machine.
    os.environ |= {
        "NCCL_HOSTID": f"node{rank}",
        "NCCL_P2P_DISABLE": "1",
        "NCCL_SHM_DISABLE": "1",
        "NCCL_IB_DISABLE": "1",
    }
    dist.init_process_group("nccl" if shape.device == "cuda" else "gloo")
    P, small = dist.get_world_size(), replace(shape, **SMALL)
    found = {text: [_tried(_step_ms, text, shape, task["batch"]), ""] for text in METHODS}
    for text in dict.fromkeys([*METHODS, *(each.name for each in rows("steps", P)[1:])]) if task["trained"] else ():
        found.setdefault(text, ["", ""])[1] = _tried(_has_same_bits, text, small, task["batch"], task["trained"])
    if rank == 0:
        Path(task["told"]).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def _tried(measure: Callable[..., object], *arguments: object) -> object:
    """Return what was measured, or why it was not: all ranks fail, or the run is given up."""
    try:
        return measure(*arguments)
    except Exception as error:
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def _step_ms(text: str, shape: Shape, batch: int) -> float:
    steps, seconds = training(text, shape, batch, dist.get_rank()), list[float]()
    for _ in range(WARMUP + TIMED):
        dist.barrier()
        start = time.perf_counter()
        steps.take()
        if shape.device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    _end(steps)
    return round(1e3 * median(seconds[WARMUP:]), 1)


def _has_same_bits(text: str, shape: Shape, batch: int, trained: int) -> bool:
    steps = training(text, shape, batch, dist.get_rank())
    for _ in range(trained):
        steps.take()
    own = common_weights(steps).view(torch.int32)
    first = own.clone()
    dist.broadcast(first, 0)
    differing = (own != first).sum()
    dist.all_reduce(differing)
    _end(steps)
    return int(differing) == 0


def _end(steps: Steps) -> None:
    if steps.handle is not None:
        steps.handle.close()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
