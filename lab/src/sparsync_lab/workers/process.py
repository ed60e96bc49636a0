"""The process of one rank: joins the process group, runs one task, and writes messages as JSON lines to standard output.

The first line of standard input says what to run. The process ends when its standard input does, so no rank outlives the program that
started it. The rank comes from the variables torchrun would set (RANK, WORLD_SIZE); ranks find each other through a file.
"""

import json
import os
import shutil
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist

PREFIX = "sparsync-lab-"  # of the name of a folder that the program makes for its ranks
Message = dict[str, Any]  # Any: JSON; its "kind" is a string; "error" and "done" are taken
Emit = Callable[[Message], None]
"""Sends one message to the program that started the workers; those of rank 0 arrive, and of every rank its error or that it is done."""


@dataclass(frozen=True)
class Order:
    """The first line of standard input: which task to run, and where."""

    task: str  # "package.module:function", called as function(spec, place, emit)
    spec: dict[str, Any]  # Any: JSON, for the task
    interface: str
    own_interface: bool
    rendezvous: str  # a file that all ranks can reach
    timeout_s: float  # for one operation of a rank

    def encoded(self) -> str:
        return json.dumps(asdict(self))


@dataclass(frozen=True)
class Place:
    """The rank of this process, and the interface through which it sends."""

    rank: int
    ranks: int
    interface: str
    own_interface: bool  # False over loopback, where the interface counts the traffic of all ranks together
    timeout_s: float  # for one operation of a rank
    device: str = "cpu"  # of the model
    group: dist.ProcessGroup | None = None  # over which gradients travel; None: the default group


Task = Callable[[Mapping[str, Any], Place, Emit], None]


def task_named(name: str) -> Task:
    """Return the function "package.module:function"."""
    module, _, function = name.partition(":")
    return getattr(import_module(module), function)


def main() -> None:
    """Run this rank to the end. The last message says that the task is done, or what it failed with.

    The exit status is 0 or 1. Status 0 alone does not say that the task is done: code of a user may end the process.
    """
    output = _claim_output()
    order = Order(**json.loads(sys.stdin.readline()))
    threading.Thread(target=_exit_at_end_of_input, args=(Path(order.rendezvous).parent,), daemon=True).start()
    place = Place(
        int(os.environ["RANK"]),
        int(os.environ["WORLD_SIZE"]),
        order.interface,
        order.own_interface,
        order.timeout_s,
    )
    lock = threading.Lock()

    def emit(message: Message) -> None:
        if place.rank == 0 or message["kind"] in ("error", "done"):
            with lock:
                output.write(json.dumps(message) + "\n")
                output.flush()

    try:
        _run(order, place, emit)
    except Exception as error:
        traceback.print_exc()
        emit({"kind": "error", "rank": place.rank, "message": str(error) or type(error).__name__})
        sys.stderr.flush()
        os._exit(1)  # not sys.exit: a collective that never ends may hold a thread of gloo's
    emit({"kind": "done"})
    if dist.is_initialized():
        dist.destroy_process_group()


def _run(order: Order, place: Place, emit: Emit) -> None:
    task = task_named(order.task)
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = order.interface
    dist.init_process_group(
        "gloo",
        init_method=f"file://{order.rendezvous}",
        rank=place.rank,
        world_size=place.ranks,
        timeout=timedelta(seconds=order.timeout_s),
    )
    task(order.spec, place, emit)
    dist.barrier()  # a rank that leaves closes connections that others may still use


def _claim_output() -> TextIO:
    """Return standard output for messages alone; whatever a library prints goes to standard error from now on."""
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return output


def _exit_at_end_of_input(folder: Path) -> None:
    """End this process, and remove the folder of the program that started it, when that program has ended without doing so."""
    sys.stdin.read()
    if folder.name.startswith(PREFIX):
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


if __name__ == "__main__":
    main()
