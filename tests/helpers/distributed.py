"""Run a function on P processes joined by gloo, and return each rank's result, or explain the failure.

Processes stay alive and serve the next call as if they were new: each call makes a process group, and processes in which something was left
behind (`helpers.traces`) or a function failed are discarded. A test that ends, stops or forks its processes, or changes settings of a whole
process, requests `fresh` ones. All come from a fork server that has imported their modules (`helpers.preloaded`). They meet over a file
instead of a port, compute with one thread each, and die with the program that requested them.
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
from torch.distributed import init_process_group  # before a test patches it

from sparsync.core import add_note

TESTS = Path(__file__).parents[1]
HANG_S = 300.0  # longer than any working call, even on a busy machine
GRACE_S = 3.0  # after the first failure, for the other ranks to report theirs
LEAVE_S = 20.0  # for processes to leave their group before the next call
MOST_LIVE = 4  # ranks; larger worlds are rare
FRESH = "test_adapter_"  # whose trainers keep much for the lifetime of their process
TOLD = 5  # functions to list that ran before the failed one
# A finished rank keeps its sockets open: gloo may be connected here before the peer knows that it is, too.
LINGER_S = 2.0


def run(
    function: Callable[..., Any],
    P: int,
    *,
    within_s: float = HANG_S,
    doomed: Collection[int] = (),
    fresh: bool = False,
    **arguments: Any,
) -> list[Any]:
    """Return the results of `function(**arguments)` on ranks 0..P-1, each a process in a gloo group made for this call.

    `function` must be importable (no lambda, not nested); it gets its rank from torch.distributed. Ranks in `doomed` may end in any way;
    their results are None. Fails with every rank's traceback if any other rank raises or dies and, after `within_s`, with the stacks of
    unfinished ranks. `fresh` processes are started for this call and are dead when it returns; a call with doomed ranks, with more than
    MOST_LIVE, or of an adapter's test, always has fresh ones.
    """
    __tracebackhide__ = True
    payload = pickle.dumps(functools.partial(function, **arguments))
    first = arguments["parts"][0] if function is in_turn else function  # what messages name
    named = first.func if isinstance(first, functools.partial) else first
    if fresh or doomed or P > MOST_LIVE or named.__module__.startswith(FRESH):
        return _run_on_new(P, payload, within_s, set(doomed))
    return _run_on_live(P, payload, within_s, f"{named.__module__}.{named.__qualname__}")


def run_fresh(function: Callable[..., Any], P: int, **arguments: Any) -> list[Any]:
    """Call `run` with fresh processes."""
    __tracebackhide__ = True
    return run(function, P, fresh=True, **arguments)


def join_again(backend: str) -> None:
    """Move these ranks to a group with this backend, replacing their current one. For fresh processes."""
    rank, P, store = dist.get_rank(), dist.get_world_size(), dist.distributed_c10d._get_default_store()
    store.set(f"connected {rank}", "")
    store.wait([f"connected {each}" for each in range(P)])  # connecting fails if another rank leaves meanwhile
    dist.destroy_process_group()
    dist.init_process_group(backend, store=dist.PrefixStore(backend, store), rank=rank, world_size=P)  # pyright: ignore[reportPrivateImportUsage]


@contextmanager
def case(name: object) -> Iterator[None]:
    """Name the case in every error raised in the block, so that one start of processes can serve many cases."""
    try:
        yield
    except BaseException as error:
        add_note(error, f"in case: {name}")
        raise


def in_turn(parts: Sequence[Callable[[], None]]) -> None:
    """Call the parts, each named in its errors: `run(in_turn, P, parts=(...))` starts processes once for several checks."""
    for part in parts:
        with case(part.__name__):
            part()


@dataclass
class LiveRanks:
    """The processes that wait for the next call, in rank order, and the history of earlier ones."""

    processes: list[tuple[BaseProcess, Connection]] = field(default_factory=list)
    folder: tempfile.TemporaryDirectory[str] | None = None  # for their stacks
    served: list[str] = field(default_factory=list)  # functions that ran here, with their numbers of ranks
    started: int = 0
    thrown_away: list[str] = field(default_factory=list)  # the reasons

    def take(self, P: int) -> list["_Rank"]:
        """Return P of them, starting missing ones."""
        if not all(process.is_alive() for process, _ in self.processes):
            self.throw_away("one of them died while it waited")
        if self.folder is None:
            self.folder = tempfile.TemporaryDirectory()
        while len(self.processes) < P:
            self.processes.append(_start(_serve, len(self.processes), Path(self.folder.name)))
            self.started += 1
        return [_Rank(number, *each) for number, each in enumerate(self.processes[:P])]

    def throw_away(self, why: str) -> None:
        self.thrown_away.append(why)
        self.end()

    def end(self) -> None:
        _end(self.processes)
        self.processes, self.served = [], []
        if self.folder is not None:
            self.folder.cleanup()
            self.folder = None


LIVE = LiveRanks()


@dataclass
class _Rank:
    number: int
    process: BaseProcess
    connection: Connection
    ended: bool = False
    value: Any = None
    trouble: list[str] = field(default_factory=list)


def _run_on_new(P: int, payload: bytes, within_s: float, doomed: set[int]) -> list[Any]:
    __tracebackhide__ = True
    with tempfile.TemporaryDirectory() as folder:
        started = [_start(_serve_once, rank, Path(folder)) for rank in range(P)]
        ranks = [_Rank(number, *each) for number, each in enumerate(started)]
        try:
            for rank in ranks:
                rank.connection.send_bytes(pickle.dumps(_Call(P, folder, payload, within_s)))
            _await(ranks, doomed, within_s)
            _judge(ranks, doomed, within_s, Path(folder))
        finally:
            _end(started)
    return [rank.value for rank in ranks]


def _run_on_live(P: int, payload: bytes, within_s: float, name: str) -> list[Any]:
    """Run on live ranks; an error also lists earlier functions, which may have left something unnoticed."""
    __tracebackhide__ = True
    ranks = LIVE.take(P)
    assert LIVE.folder is not None
    stacks, called = Path(LIVE.folder.name), False
    LIVE.served.append(f"{name} on {P}")
    try:
        with tempfile.TemporaryDirectory() as folder:
            _tell(ranks, _Call(P, folder, payload, within_s))
            _await(ranks, set(), within_s)
            _judge(ranks, set(), within_s, stacks)
            values = [rank.value for rank in ranks]
            called = True
            ranks = [_Rank(rank.number, rank.process, rank.connection) for rank in ranks]
            _tell(ranks, None)
            _await(ranks, set(), LEAVE_S)
    except AssertionError as error:
        last = ", ".join(LIVE.served[-1 - TOLD : -1])
        add_note(error, f"The last that these processes had run before: {last or 'nothing'}")
        raise
    finally:
        if not called:
            LIVE.throw_away(f"{name} failed")
    traces = [trace for rank in ranks if rank.ended and not rank.trouble for trace in rank.value]
    traces += [f"rank {rank.number} did not leave its group" for rank in ranks if rank.trouble or not rank.ended]
    if traces:
        LIVE.throw_away(f"{name} on {P} left behind: {'; '.join(dict.fromkeys(traces))}")
    return values


def _tell(ranks: list[_Rank], call: "_Call | None") -> None:
    said = pickle.dumps(call)
    for rank in ranks:
        try:
            rank.connection.send_bytes(said)
        except OSError:
            rank.process.join(5)  # it has died, which the wait for its answer reports


@dataclass(frozen=True)
class _Call:
    """A function for a process to call, and the circumstances."""

    P: int
    folder: str  # for the store
    payload: bytes
    within_s: float
    working_folder: str = field(default_factory=os.getcwd)
    path: tuple[str, ...] = field(default_factory=lambda: tuple(sys.path))


def _start(serve: Callable[..., None], rank: int, folder: Path) -> tuple[BaseProcess, Connection]:
    ours, theirs = multiprocessing.Pipe()
    process = context().Process(target=serve, args=(rank, folder, theirs), daemon=True)
    process.start()
    theirs.close()
    return process, ours


def _end(started: Sequence[tuple[BaseProcess, Connection]]) -> None:
    for process, _ in started:
        process.kill()
    for process, connection in started:
        process.join()
        connection.close()


@functools.cache
def context() -> Any:  # Any: multiprocessing's stubs have no type for fork servers
    """Make the fork server from which processes start in milliseconds."""
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(["helpers.preloaded"])
    before = os.environ.get("PYTHONPATH")
    # Before Python 3.13 the server does not use this process's sys.path.
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
    """Wait until all ranks that matter have ended, until shortly after the first failure, or for `within_s`."""
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
    except (EOFError, ConnectionResetError):
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


def _serve_once(rank: int, folder: Path, connection: Connection) -> None:
    with _prepared(folder / f"stacks{rank}"):
        connection.send_bytes(_answer(rank, pickle.loads(connection.recv_bytes())))
        time.sleep(LINGER_S)  # `run` ends this process once all ranks are done


def _serve(rank: int, folder: Path, connection: Connection) -> None:
    """Answer calls in sequence, each in a group that all ranks leave afterwards, until this process is killed."""
    from helpers.traces import Traces  # imported here, because it is slow and programs without ranks do not need it

    with _prepared(folder / f"stacks{rank}") as stacks:
        traces = Traces()
        while True:
            call = pickle.loads(connection.recv_bytes())
            stacks.truncate(0)
            os.chdir(call.working_folder)
            sys.path[:] = call.path
            connection.send_bytes(_answer(rank, call, traces.begin))
            assert pickle.loads(connection.recv_bytes()) is None
            connection.send_bytes(_packed((True, traces.left())))


@contextmanager
def _prepared(path: Path) -> Iterator[Any]:  # Any: a file
    """Make this process a rank that writes its stacks into the file on a signal, or when it aborts in C++."""
    _end_with_parent()
    torch.set_num_threads(1)
    if sys.platform == "linux":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # the machine's name may resolve to an address it cannot reach
    with path.open("a") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        faulthandler.enable(stacks, all_threads=True)
        yield stacks
        faulthandler.unregister(signal.SIGUSR1)
        faulthandler.disable()


def _answer(rank: int, call: _Call, begin: Callable[[], object] = lambda: None) -> bytes:
    try:
        function = pickle.loads(call.payload)  # imports what it needs
        store = dist.FileStore(f"{call.folder}/store", call.P)  # pyright: ignore[reportPrivateImportUsage]  # public, but not in __all__
        timeout = timedelta(seconds=call.within_s)
        init_process_group("gloo", store=store, rank=rank, world_size=call.P, timeout=timeout)
        dist.barrier()  # a rank that ended its group at once would cut off others that still connect
        begin()
        return _packed((True, function()))
    except BaseException:
        return _packed((False, traceback.format_exc()))


class _Pickler(pickle.Pickler):
    """Pickles tensors as their bytes: torch's way takes 20 times as long for small ones, and does not support float8."""

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


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
