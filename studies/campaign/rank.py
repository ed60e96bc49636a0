"""The process of one rank of a trial: join the group, train, and report how it ends."""

import os
import time
from datetime import timedelta
from functools import partial

import torch.distributed as dist

from studies.campaign.striking import LeaveEarly, Striker
from studies.campaign.training import training
from studies.campaign.trials import Trial
from studies.trials import process
from studies.trials.process import Seat, Tell, await_all

TCPStore = dist.TCPStore  # pyright: ignore[reportPrivateImportUsage]  # public, but missing from torch's __all__
JOIN_S = 60.0  # for the processes of a trial to start on a busy machine
RANDOM_PAUSE_S = 0.004  # between steps if the fault comes at a random time
# The supervisor's files: all ranks may begin, a link is cut, all ranks have ended.
GO, CUT, END = "go", "cut", "end"


def run(seat: Seat, trial: Trial, timeout_s: float, undisturbed: bool) -> None:
    """Train, and end the process. Reports `joined`, `ready`, `strike`, and `done` or `left`."""

    def work(tell: Tell) -> None:
        try:
            digest = _train(seat, trial, timeout_s, undisturbed, tell)
        except LeaveEarly:
            dist.destroy_process_group()
            tell(left="")
            return
        tell(done=digest)
        await_told(seat, END)  # closing the store would be an error for ranks that are still training

    process.run(seat, work, finalizes=False)


def await_told(seat: Seat, what: str) -> None:
    """Wait until the supervisor has made a file; it ends processes that wait too long."""
    await_all((seat.folder / what).exists, float("inf"))


def _train(seat: Seat, trial: Trial, timeout_s: float, undisturbed: bool, tell: Tell) -> str:
    rank, limit = seat.number, timedelta(seconds=timeout_s)
    store = _store(seat, trial.ranks)
    tell(joined="")
    await_told(seat, GO)
    store.set_timeout(limit)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=trial.ranks, timeout=limit)
    striker = Striker(trial, rank, tell, partial(await_told, seat, CUT), timeout_s, undisturbed)
    striker.begins_setup()
    made = training(trial, rank, timeout_s)
    striker.watch(made)
    tell(ready="")
    step = 0
    while step < trial.steps:
        try:
            striker.begins(step, made)
            made.step(step)
        except Exception as error:
            # Raised once on every rank, in this step or the next.
            if striker.saved is None or trial.fault != "retry_after_error":
                raise
            step = striker.goes_back(made, error)
            continue
        step += 1
        if trial.when == "random":
            time.sleep(RANDOM_PAUSE_S)
    return made.digest()


def _store(seat: Seat, ranks: int) -> TCPStore:
    """Open the store that rank 0 hosts, as with torchrun's static rendezvous; other ranks read its port from a file."""
    port, limit = seat.folder / "port", timedelta(seconds=JOIN_S)
    opened = partial(TCPStore, seat.links.addresses[0], world_size=ranks, timeout=limit, wait_for_workers=False)
    if seat.number == 0:
        store = opened(port=0, is_master=True)
        part = seat.folder / f"port.{os.getpid()}"
        part.write_text(str(store.port))
        part.rename(port)
        return store
    if not await_all(port.exists, time.monotonic() + JOIN_S):
        raise RuntimeError(f"rank 0 has opened no store within {JOIN_S:g} s")
    return opened(port=int(port.read_text()), is_master=False)
