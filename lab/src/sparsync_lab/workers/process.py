"""The process of one rank: join the process group, run one task, and write messages as JSON lines to standard output.

The first line of standard input names the task. The process ends with its standard input, so no rank outlives the program that started it.
RANK and WORLD_SIZE are read from torchrun's variables; ranks find each other through a file.
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

PREFIX = "sparsync-lab-"  # of the folder that the program makes for its ranks
Message = dict[str, Any]  # Any: JSON; its "kind" is a string; "error" and "done" are reserved
Emit = Callable[[Message], None]
"""Sends a message to the program that started the workers; other ranks than 0 can send only errors and that they are done."""


@dataclass(frozen=True)
class Order:
    """The first line of standard input: the task and its circumstances."""

    task: str  # "package.module:function", called as function(spec, place, emit)
    spec: dict[str, Any]  # Any: JSON, for the task
    interface: str
    own_interface: bool
    rendezvous: str  # a file accessible to all ranks
    timeout_s: float  # for one operation of a rank

    def encoded(self) -> str:
        return json.dumps(asdict(self))


@dataclass(frozen=True)
class Place:
    """The rank of this process and its interface."""

    rank: int
    ranks: int
    interface: str
    own_interface: bool  # False over loopback, where the interface counts all ranks' traffic
    timeout_s: float  # for one operation of a rank
    device: str = "cpu"  # of the model
    group: dist.ProcessGroup | None = None  # for gradients; None: the default group


Task = Callable[[Mapping[str, Any], Place, Emit], None]


def task_named(name: str) -> Task:
    """Import the function "package.module:function"."""
    module, _, function = name.partition(":")
    return getattr(import_module(module), function)


def main() -> None:
    """Run this rank's task. The last message says that it is done, or why it failed.

    The exit status is 0 or 1. Status 0 alone does not prove that the task is done: user code may end the process.
    """
    output = _claim_output()
    order = Order(**json.loads(sys.stdin.readline()))
    threading.Thread(target=_exit_at_end_of_input, args=(Path(order.rendezvous).parent,), daemon=True).start()
    place = Place(
        int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), order.interface, order.own_interface, order.timeout_s
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
        os._exit(1)  # not sys.exit: an endless collective may hold a gloo thread
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
    dist.barrier()  # a leaving rank closes connections that others may still use


def _claim_output() -> TextIO:
    """Reserve standard output for messages; other output goes to standard error from now on."""
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return output


def _exit_at_end_of_input(folder: Path) -> None:
    """End this process when the program that started it ends unexpectedly, and remove that program's folder."""
    sys.stdin.read()
    if folder.name.startswith(PREFIX):
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


if __name__ == "__main__":
    main()
