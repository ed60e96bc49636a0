"""The process of one rank: reads what to do from standard input, trains, and writes messages as JSON lines to standard output.

It ends when its standard input does, so that no rank outlives the program that started it. Where and who it is comes from the
variables torchrun would set (RANK, WORLD_SIZE); ranks find each other through a file.
"""

import json
import os
import sys
import threading
import traceback
from dataclasses import replace
from datetime import timedelta
from typing import Any, TextIO

import torch
import torch.distributed as dist

from sparsync.lab import workloads
from sparsync.lab.settings import SchemeChoice, Settings
from sparsync.lab.train import Place, train


def encode_spec(settings: Settings, interface: str, own_interface: bool, rendezvous: str) -> str:
    """The line a worker reads first."""
    choices = [{"label": each.label, "name": each.name, "config": each.config} for each in settings.schemes]
    plain = {**vars(settings), "schemes": choices}
    return json.dumps(
        {"settings": plain, "interface": interface, "own_interface": own_interface, "rendezvous": rendezvous}
    )


def main() -> None:
    """Runs this rank to the end. Exit status 0 when all was trained, 1 after an error, which is also its last message."""
    messages = _claim_output()
    spec = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_input, daemon=True).start()
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    lock = threading.Lock()

    def emit(message: dict[str, Any]) -> None:  # Any: JSON
        if rank == 0 or message["kind"] == "error":
            with lock:
                messages.write(json.dumps(message) + "\n")
                messages.flush()

    try:
        _run(spec, rank, ranks, emit)
    except Exception as error:
        traceback.print_exc()
        emit({"kind": "error", "rank": rank, "message": str(error) or type(error).__name__})
        sys.stderr.flush()
        os._exit(1)  # not sys.exit: a collective that will never end may hold a thread of gloo's
    dist.destroy_process_group()


def _run(spec: dict[str, Any], rank: int, ranks: int, emit: Any) -> None:  # Any: JSON; a callable
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = spec["interface"]
    settings = _settings(spec["settings"])
    dist.init_process_group(
        "gloo",
        init_method=f"file://{spec['rendezvous']}",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=settings.timeout_s),
    )
    workload = workloads.get(settings.workload, **settings.options)
    place = Place(rank, ranks, spec["interface"] if spec["own_interface"] else None)
    for seed in settings.seeds:
        for choice in settings.schemes:
            train(workload, choice, seed, settings, place, emit)


def _settings(plain: dict[str, Any]) -> Settings:  # Any: JSON
    choices = tuple(SchemeChoice(**each) for each in plain["schemes"])
    return replace(Settings(choices), **{**plain, "schemes": choices, "seeds": tuple(plain["seeds"])})


def _claim_output() -> TextIO:
    """Standard output for messages alone; whatever a library prints goes to standard error."""
    messages = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return messages


def _end_with_input() -> None:
    sys.stdin.read()
    os._exit(1)


if __name__ == "__main__":
    main()
