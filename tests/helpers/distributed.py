"""Runs a function on P processes joined by gloo, and brings back what it returned on each, or why it did not.

The processes come from a fork server that has imported what they need already (`helpers.preloaded`), so that P of them start in
milliseconds. They meet over a file, not a port; each computes with one thread; all of them are dead when `run` returns, and die with the
program that asked for them.
"""

import faulthandler
import functools
import io
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from sparsync.core import add_note

TESTS = Path(__file__).parents[1]
HANG_S = 300.0  # longer than anything takes that does not hang, also on a machine that does much else
GRACE_S = 3.0  # after the first failure, for the other ranks to tell theirs
LINGER_S = 2.0  # how long a rank that is done keeps its sockets open: gloo has connected here before the peer knows that it has, too


def run(
    function: Callable[..., Any], P: int, *, within_s: float = HANG_S, doomed: Collection[int] = (), **arguments: Any
) -> list[Any]:
    """What `function(**arguments)` returned on ranks 0..P-1, each a process in a gloo group of its own making.

    `function` must be importable (no lambda, nothing nested); it asks torch.distributed for its rank. The ranks in `doomed` may end as
    they like; what they return is None. Fails with every rank's traceback when any other rank raises or dies, and, after `within_s`,
    with the stacks of the ranks that had not returned.
    """
    __tracebackhide__ = True
    payload = pickle.dumps(functools.partial(function, **arguments))
    with tempfile.TemporaryDirectory() as folder:
        ranks = [_start(rank, P, Path(folder), payload, within_s) for rank in range(P)]
        try:
            _await(ranks, set(doomed), within_s)
            _judge(ranks, set(doomed), within_s, Path(folder))
        finally:
            for rank in ranks:
                rank.process.kill()
            for rank in ranks:
                rank.process.join()
                rank.connection.close()
    return [rank.value for rank in ranks]


@contextmanager
def case(name: object) -> Iterator[None]:
    """Names the case in every error raised inside, so that one start of processes can serve many cases."""
    try:
        yield
    except BaseException as error:
        add_note(error, f"in case: {name}")
        raise


@dataclass
class _Rank:
    number: int
    process: BaseProcess
    connection: Connection
    ended: bool = False
    value: Any = None
    trouble: list[str] = field(default_factory=list)


def _start(rank: int, P: int, folder: Path, payload: bytes, within_s: float) -> _Rank:
    ours, theirs = multiprocessing.Pipe(duplex=False)
    process = context().Process(target=_body, args=(rank, P, folder, payload, within_s, theirs), daemon=True)
    process.start()
    theirs.close()
    return _Rank(rank, process, ours)


@functools.cache
def context() -> Any:  # Any: multiprocessing's stubs give fork servers no type of their own
    """Return the fork server from which processes start in milliseconds."""
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(["helpers.preloaded"])
    before = os.environ.get("PYTHONPATH")
    # Until Python 3.13 the server does not import from this process's sys.path.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(TESTS), *([before] if before else [])])
    try:
        forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
    return server


def _await(ranks: list[_Rank], doomed: set[int], within_s: float) -> None:
    """Returns when all ranks that matter have ended, shortly after the first that failed, or after `within_s`."""
    deadline = time.monotonic() + within_s
    while any(not rank.ended and rank.number not in doomed for rank in ranks) and time.monotonic() < deadline:
        waiting = {rank.connection: rank for rank in ranks if not rank.ended}
        for connection in wait(list(waiting), max(0.0, deadline - time.monotonic())):
            rank = waiting[connection]  # pyright: ignore[reportArgumentType]  # wait returns what it was given
            _hear(rank)
            if rank.trouble and rank.number not in doomed:
                deadline = min(deadline, time.monotonic() + GRACE_S)


def _hear(rank: _Rank) -> None:
    rank.ended = True
    try:
        returned, said = pickle.loads(rank.connection.recv_bytes())
    except EOFError:
        rank.process.join(5)
        rank.trouble.append(f"rank {rank.number} died, exit code {rank.process.exitcode}")
        return
    if returned:
        rank.value = said
    else:
        rank.trouble.append(f"rank {rank.number} raised:\n{said}")


def _judge(ranks: list[_Rank], doomed: set[int], within_s: float, folder: Path) -> None:
    __tracebackhide__ = True
    trouble = [told for rank in ranks if rank.number not in doomed for told in rank.trouble]
    late = [rank for rank in ranks if not rank.ended and rank.number not in doomed]
    if late:
        for rank in late:
            os.kill(rank.process.pid or 0, signal.SIGUSR1)
        time.sleep(0.5)
        trouble += [
            f"rank {rank.number} had not returned, its stacks:\n{_stacks(folder, rank.number)}" for rank in late
        ]
        trouble.append(f"(the limit was {within_s:g} s, or {GRACE_S:g} s after the first failure)")
    trouble += [
        f"rank {rank.number} was ended by a signal, its stacks:\n{_stacks(folder, rank.number)}"
        for rank in ranks
        if rank.trouble and rank.number not in doomed and (rank.process.exitcode or 0) < 0
    ]
    if trouble:
        raise AssertionError("\n".join(trouble))


def _stacks(folder: Path, rank: int) -> str:
    path = folder / f"stacks{rank}"
    return path.read_text() if path.exists() else "(it had not started)"


def _body(rank: int, P: int, folder: Path, payload: bytes, within_s: float, connection: Connection) -> None:
    _end_with_parent()
    with (folder / f"stacks{rank}").open("w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        # What aborts in C++ leaves its stacks too.
        faulthandler.enable(stacks, all_threads=True)
        try:
            value = _joined(rank, P, folder, payload, within_s)
        except BaseException:
            connection.send_bytes(_packed((False, traceback.format_exc())))
        else:
            connection.send_bytes(_packed((True, value)))
            time.sleep(LINGER_S)  # `run` ends this process as soon as all ranks are done
        faulthandler.unregister(signal.SIGUSR1)
        faulthandler.disable()


class _Pickler(pickle.Pickler):
    """Carries tensors as their bytes: torch's own way takes 20 times as long for small ones, and knows no float8."""

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, torch.Tensor):
            return NotImplemented
        flat = obj.detach().contiguous().view(-1)
        return _tensor, (flat.view(torch.uint8).numpy().tobytes(), obj.dtype, obj.shape)


def _tensor(content: bytes, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=dtype).view(shape) if content else torch.empty(shape, dtype=dtype)


def _packed(said: tuple[bool, Any]) -> bytes:
    packed = io.BytesIO()
    _Pickler(packed).dump(said)
    return packed.getvalue()


def _joined(rank: int, P: int, folder: Path, payload: bytes, within_s: float) -> Any:
    torch.set_num_threads(1)
    if sys.platform == "linux":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # the machine's name may resolve to an address it cannot reach
    store = dist.FileStore(str(folder / "store"), P)  # pyright: ignore[reportPrivateImportUsage]  # public, but not in __all__
    dist.init_process_group("gloo", store=store, rank=rank, world_size=P, timeout=timedelta(seconds=within_s))
    return pickle.loads(payload)()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
