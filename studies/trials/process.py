"""Run processes of trials, and let a supervisor read, signal and end them.

A process writes JSON lines to a file, and waits for files that its supervisor makes in the folder.
"""

import atexit
import ctypes
import faulthandler
import json
import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from multiprocessing import forkserver, parent_process
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch

import sparsync
from sparsync_lab.netlab import RunNetwork
from sparsync_lab.workers.descendants import die_with_parent

PRELOADED = [  # so that ranks start in milliseconds
    "torch._dynamo",
    "torch.nn.parallel",
    "torch.distributed.device_mesh",
    "torch.distributed.fsdp",
    "studies.campaign.rank",
    "studies.elastic.rank",
    "sparsync_lab.workloads",
]
LOOK_S = 0.02
STACKS = 6000  # characters: each thread's stack begins where it waits, and the main thread's is last
_NETWORK_NAMESPACE = 0x40000000  # CLONE_NEWNET

Entry = dict[str, Any]  # Any: JSON; a record of a process, with the time `t`
Tell = Callable[..., None]  # writes its keyword arguments as a record


@dataclass(frozen=True)
class Seat:
    """The number of a process in its trial, its place in the network, and the folder for its files."""

    number: int
    place: int
    folder: Path
    links: RunNetwork

    def path(self, name: str) -> Path:
        return self.folder / f"{name}{self.number}"


class Worker:
    """A process of a trial, from the supervisor's view."""

    def __init__(self, seat: Seat, target: Callable[..., None], *given: object) -> None:
        self.seat, self._told, self._read = seat, list[Entry](), 0
        self.process = _context().Process(target=target, args=(seat, *given))
        self.process.start()

    @property
    def alive(self) -> bool:
        return bool(self.process.is_alive())

    @property
    def entries(self) -> list[Entry]:
        """The records written so far."""
        path = self.seat.path("log")
        if path.exists():
            with path.open("rb") as log:
                log.seek(self._read)
                whole = log.read().rpartition(b"\n")[0]
            self._read += len(whole) + bool(whole)
            self._told += [json.loads(each) for each in whole.splitlines() if each]
        return self._told

    def said(self, *kinds: str) -> Entry | None:
        """Find the first entry of one of these kinds."""
        return next((each for each in self.entries if any(kind in each for kind in kinds)), None)

    def signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.process.pid, number)

    def stop(self) -> None:
        self.process.kill()
        self.process.join()


def await_all(condition: Callable[[], bool], deadline: float) -> bool:
    """Wait until the condition holds; returns False if it does not by the deadline."""
    while not (met := condition()) and time.monotonic() < deadline:
        time.sleep(LOOK_S)
    return met


def stacks(workers: Sequence[Worker]) -> dict[int, str]:
    """Collect the stacks of hanging processes, by their numbers."""
    for each in workers:
        each.signal(signal.SIGUSR1)
    time.sleep(0.5 if workers else 0.0)
    return {each.seat.number: each.seat.path("stacks").read_text()[-STACKS:] for each in workers}


@cache
def _context() -> Any:  # Any: multiprocessing's stubs have no type for fork servers
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def take_seat(seat: Seat) -> None:
    """Enter the network at the seat, and redirect output to files of the folder."""
    _end_with_parent()
    output = seat.path("output").open("w")
    os.dup2(output.fileno(), 1)
    os.dup2(output.fileno(), 2)
    faulthandler.enable(output)
    faulthandler.register(signal.SIGUSR1, file=seat.path("stacks").open("w"), all_threads=True)
    if seat.links.limited:
        _enter(seat.links.anchors[seat.place])
    os.environ["GLOO_SOCKET_IFNAME"] = seat.links.interface
    torch.set_num_threads(1)


def run(seat: Seat, work: Callable[[Tell], object], finalizes: bool) -> None:
    """Do the work of a rank, and end the process, with status 1 after an error, which is recorded.

    `finalizes`: end like the interpreter, and not only with the registered exit functions. A thread in C++ code then crashes it.
    """
    take_seat(seat)
    code = 0
    with seat.path("log").open("w", buffering=1) as log:

        def tell(**what: Any) -> None:  # Any: JSON
            print(json.dumps({"t": time.monotonic(), **what}), file=log)

        try:
            work(tell)
        except BaseException as error:
            traceback.print_exc()
            tell(error=_said(error), ours=_is_ours(error))
            error.__traceback__ = error.__cause__ = error.__context__ = None
            code = 1
    # A fork server's process would skip the exit functions.
    if finalizes:
        ctypes.pythonapi.Py_Exit(code)
    atexit._run_exitfuncs()
    os._exit(code)


def _said(error: BaseException) -> str:
    """Join types, messages and notes of an error and its causes, as at the end of a traceback."""
    parts: list[str] = []
    at: BaseException | None = error
    while at is not None:
        parts.append("; ".join([f"{type(at).__name__}: {at}", *getattr(at, "__notes__", [])]))
        at = at.__cause__
    return "\n".join(parts)


def _is_ours(error: BaseException) -> bool:
    """Tell whether the library raised or passed on an error; False for torch's collectives, such as FSDP2's all-gather."""
    package = Path(sparsync.__file__).parent
    files = [Path(frame.filename) for frame in traceback.extract_tb(error.__traceback__)]
    return (
        any(package in file.parents for file in files)
        or "failed on bucket" in str(error)
        or "not reduced" in str(error)
    )


def _enter(process: int) -> None:
    """Enter the network namespace of a process. Python has os.setns only since 3.12."""
    with Path(f"/proc/{process}/ns/net").open() as namespace:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(namespace.fileno(), _NETWORK_NAMESPACE):
            raise OSError(ctypes.get_errno(), "cannot enter the network of this rank")


def _end_with_parent() -> None:
    """End with the supervisor, and with the fork server, which ends with it, because a stopped rank cannot end itself."""
    die_with_parent()
    # HACK: every rank inherits the pipe by which the fork server watches the supervisor, with no public way to close it. Price: if Python
    # changes it, a stopped rank outlives a killed supervisor.
    with suppress(AttributeError, OSError, TypeError):
        os.close(forkserver._forkserver._forkserver_alive_fd)  # pyright: ignore[reportAttributeAccessIssue]
    parent = parent_process()
    assert parent is not None

    def watch() -> None:
        with suppress(OSError):
            wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def stop(workers: Iterable[Worker]) -> None:
    """End all processes."""
    for each in workers:
        each.stop()
