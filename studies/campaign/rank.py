"""The process of one rank of a trial: joins the group, trains, and tells the supervisor how it ended."""

import atexit
import ctypes
import faulthandler
import os
import signal
import threading
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from multiprocessing import forkserver, parent_process
from multiprocessing.connection import Connection, wait
from pathlib import Path

import torch
import torch.distributed as dist

import sparsync
from sparsync_lab.netlab import RunNetwork
from sparsync_lab.workers.descendants import die_with_parent
from studies.campaign.striking import LeaveEarly, Striker
from studies.campaign.training import training
from studies.campaign.trials import Trial

TCPStore = dist.TCPStore  # pyright: ignore[reportPrivateImportUsage]  # public, but missing from torch's __all__
JOIN_S = 60.0  # for the processes of a trial to start, on a machine that is busy
RANDOM_PAUSE_S = 0.004  # where the fault comes at a random time
_NETWORK_NAMESPACE = 0x40000000  # CLONE_NEWNET


@dataclass(frozen=True)
class RankOrder:
    """What the process of a rank is to do, and where."""

    trial: Trial
    rank: int
    folder: Path  # for the address of the store, and the stacks of a rank that hangs
    timeout_s: float
    links: RunNetwork
    undisturbed: bool = False


def run(order: RankOrder, connection: Connection) -> None:
    """Train, and end the process. Sends "joined", takes "go"; then "strike", and at last "done" or "error", each with the time."""
    end_with_parent()
    with (order.folder / f"stderr{order.rank}").open("w") as stderr:
        os.dup2(stderr.fileno(), 2)  # torch warns there of every connection that is lost
    with (order.folder / f"stacks{order.rank}").open("w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        faulthandler.enable(stacks, all_threads=True)
        code = 1
        try:
            digest = _train(order, connection)
            connection.send(("done", time.monotonic(), digest))
            connection.recv()  # a store that closes is an error for those that still train
            code = 0
        except LeaveEarly:
            dist.destroy_process_group()
            connection.send(("left", time.monotonic(), ""))
            code = 0
        except EOFError:
            os._exit(1)
        except BaseException as error:
            text, ours = _told(error), _is_ours(error)
            error.__traceback__ = error.__cause__ = error.__context__ = None
            connection.send(("error", time.monotonic(), (text, ours)))
        # What a program does at its end, which a process of the fork server would leave out.
        atexit._run_exitfuncs()
        os._exit(code)


def _train(order: RankOrder, connection: Connection) -> str:
    trial, rank = order.trial, order.rank
    torch.set_num_threads(1)
    if order.links.limited:
        enter(order.links.anchors[rank])
    os.environ["GLOO_SOCKET_IFNAME"] = order.links.interface
    store = _store(order)
    connection.send(("joined", time.monotonic(), ""))
    connection.recv()
    store.set_timeout(timedelta(seconds=order.timeout_s))
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=trial.ranks, timeout=timedelta(seconds=order.timeout_s)
    )
    striker = Striker(trial, rank, connection, order.timeout_s, order.undisturbed)
    striker.begins_setup()
    made = training(trial, rank, order.timeout_s)
    striker.watch(made)
    connection.send(("ready", time.monotonic(), ""))
    step = 0
    while step < trial.steps:
        try:
            striker.begins(step, made)
            made.step(step)
        except Exception as error:
            # Once on every rank, in this step or the next one.
            if striker.saved is None or trial.fault != "retry_after_error":
                raise
            step = striker.goes_back(made, error)
            continue
        step += 1
        if trial.when == "random":
            time.sleep(RANDOM_PAUSE_S)
    return made.digest()


def _store(order: RankOrder) -> TCPStore:
    """Return the store that rank 0 hosts, as under torchrun's static rendezvous; the others read its port from a file."""
    port, limit = order.folder / "port", timedelta(seconds=JOIN_S)
    opened = partial(
        TCPStore, order.links.address(0), world_size=order.trial.ranks, timeout=limit, wait_for_workers=False
    )
    if order.rank == 0:
        store = opened(port=0, is_master=True)
        (order.folder / "port.part").write_text(str(store.port))
        (order.folder / "port.part").rename(port)
        return store
    deadline = time.monotonic() + JOIN_S
    while not port.exists():
        if time.monotonic() > deadline:
            raise RuntimeError(f"rank 0 has opened no store within {JOIN_S:g} s")
        time.sleep(0.01)
    return opened(port=int(port.read_text()), is_master=False)


def enter(process: int) -> None:
    """Enter the network namespace of a process. Python has os.setns from 3.12 on only."""
    with Path(f"/proc/{process}/ns/net").open() as namespace:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(namespace.fileno(), _NETWORK_NAMESPACE):
            raise OSError(ctypes.get_errno(), "cannot enter the network of this rank")


def _told(error: BaseException) -> str:
    """Return what a user reads at the end of the traceback: types, messages and notes, causes last."""
    parts: list[str] = []
    at: BaseException | None = error
    while at is not None:
        parts.append("; ".join([f"{type(at).__name__}: {at}", *getattr(at, "__notes__", [])]))
        at = at.__cause__
    return "\n".join(parts)


def _is_ours(error: BaseException) -> bool:
    """Return whether the library raised it, or passed it on; False for a collective of torch's own, such as FSDP2's all-gather."""
    package, campaign = Path(sparsync.__file__).parent, Path(__file__).parent
    frames = [Path(frame.filename) for frame in traceback.extract_tb(error.__traceback__)]
    inside = any(package in file.parents and campaign not in file.parents for file in frames)
    return inside or "failed on bucket" in str(error) or "not reduced" in str(error)


def end_with_parent() -> None:
    """End when the supervisor does, and with the fork server, which does the same: a rank that is stopped cannot end itself."""
    die_with_parent()
    # HACK: what tells the fork server that the supervisor lives is open in every rank too; there is no public way to close it. Price: a
    # rank that is stopped outlives a supervisor that is killed, where Python changes it.
    with suppress(AttributeError, OSError, TypeError):
        os.close(forkserver._forkserver._forkserver_alive_fd)  # pyright: ignore[reportAttributeAccessIssue]
    parent = parent_process()
    assert parent is not None

    def watch() -> None:
        with suppress(OSError):
            wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
