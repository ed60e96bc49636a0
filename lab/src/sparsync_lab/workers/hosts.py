"""The ranks that torchrun, or another launcher with its variables, has started on hosts of the user: this process is one of them.

No process is started here and no network is built; `group` does both on one machine. What a rank fails with reaches rank 0 through the
launcher's store, because the ranks share nothing else.
"""

import ipaddress
import json
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import torch
import torch.distributed as dist

from sparsync_lab.netlab import interface_counters
from sparsync_lab.netlab.routes import LOOPBACK, interface_towards, speed_bits_per_s
from sparsync_lab.workers.group import GRACE_S, RankFailedError
from sparsync_lab.workers.process import Message, Place, Task

Value = TypeVar("Value")
Backend = Literal["gloo", "nccl"]
VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
POLL_S = 0.2  # between two looks at whether another rank has failed
STUCK_S = (
    15.0  # rank 0 is ended from outside when it has not noticed by itself for so long that another rank has failed
)
_FAILURES, _COUNT, _TOLD = "sparsync/failures", "sparsync/failed", "sparsync/told"


def launched() -> bool:
    """Return whether a launcher has started this process as one of several ranks."""
    return all(name in os.environ for name in VARIABLES)


def world_size() -> int:
    """Return the number of ranks that the launcher has started."""
    return int(os.environ["WORLD_SIZE"])


@dataclass
class Hosts:
    """This rank among all, and the text that says over what they talk; "" where all ranks are on one host and on the CPU."""

    place: Place
    network: str
    count: int  # of hosts: network stacks
    _store: Any  # Any: a store of torch's, whose stubs lack append and clone
    _ended: threading.Event = field(default_factory=threading.Event)

    def agree(self, prepare: Callable[[], tuple[Value, Mapping[str, str]]]) -> Value:
        """Return the first of what `prepare` returns; the second are texts that must be the same on all ranks. Collective.

        Raises ValueError where `prepare` raises on any rank, or where the texts differ; on other ranks than 0, which says it all,
        SystemExit.
        """
        value: Value | None = None
        try:
            value, texts = prepare()
            mine: dict[str, str] | str = dict(texts)
        except Exception as error:  # it is raised again below, on all ranks
            mine = str(error) or type(error).__name__
        found: list[dict[str, str] | str] = [""] * self.place.ranks
        dist.all_gather_object(found, mine)
        problem = _disagreement(found)
        if problem is None:
            return cast(Value, value)
        if self.place.rank == 0:
            self._store.set(_TOLD, "yes")
            raise ValueError(problem)
        self._await_told()
        raise SystemExit(2)

    def run(
        self,
        task: Task,
        spec: Mapping[str, Any],  # Any: JSON
        take: Callable[[Message], None],
        stuck: Callable[[str], None],
    ) -> None:
        """Run `task` on all ranks; rank 0 gives each of its messages to `take`. Collective.

        Raises RankFailedError where a rank fails, on rank 0 with what all ranks have told. Where another rank fails and this one stays
        inside a wait, `stuck` is called with that text on another thread, and the process ends.
        """
        rank = self.place.rank
        watcher = threading.Thread(target=self._watch, args=(stuck,), daemon=True)
        if rank == 0:
            watcher.start()
        try:
            task(spec, self.place, take if rank == 0 else _ignore)
            dist.barrier()  # a rank that leaves closes connections that others may still use
        except (Exception, KeyboardInterrupt) as error:
            self._ended.set()
            if rank == 0:
                watcher.join()
                failures = self._failures(GRACE_S if isinstance(error, Exception) else 0.0)
                if isinstance(error, Exception):
                    failures.insert(len(failures) if _follows(error) else 0, _told(0, error))
                elif not failures:
                    raise
                raise RankFailedError("\n".join(failures)) from error
            if isinstance(error, KeyboardInterrupt):
                raise
            self._tell(_told(rank, error))
            raise RankFailedError(_told(rank, error)) from error
        finally:
            self._ended.set()

    def _tell(self, failure: str) -> None:
        """Tell rank 0 of a failure, and give it a moment to read it: the launcher ends all ranks when one has ended."""
        with suppress(RuntimeError):  # the store may be gone with rank 0
            self._store.append(_FAILURES, json.dumps(failure) + "\n")
            self._store.add(_COUNT, 1)
        self._await_told()

    def _await_told(self) -> None:
        with suppress(RuntimeError):
            self._store.wait([_TOLD], timedelta(seconds=GRACE_S))

    def _failures(self, within_s: float) -> list[str]:
        """Return what other ranks have told so far, in that order; wait for the first for up to `within_s` seconds."""
        deadline = time.monotonic() + within_s
        with suppress(RuntimeError):
            while not (failed := self._store.add(_COUNT, 0)) and time.monotonic() < deadline:
                time.sleep(POLL_S)
            if failed:
                lines = self._store.get(_FAILURES).decode().splitlines()
                self._store.set(_TOLD, "yes")
                return [json.loads(line) for line in lines]
            self._store.set(_TOLD, "yes")
        return []

    def _watch(self, stuck: Callable[[str], None]) -> None:
        """End this process where another rank has failed, and this one does not notice."""
        while not self._ended.wait(POLL_S):
            failures = self._failures(0.0) if self._count() else []
            if failures and not self._ended.wait(STUCK_S):
                text = "\n".join(self._failures(0.0) or failures)
                stuck(text)
                print(f"sparsync: error: {text}", file=sys.stderr, flush=True)
                os._exit(1)

    def _count(self) -> int:
        try:
            return self._store.add(_COUNT, 0)
        except RuntimeError:
            return 0


@contextmanager
def joined(timeout_s: float, backend: Backend | None = None) -> Iterator[Hosts]:
    """Join the process group of the launcher for the length of the block. Collective over all ranks.

    Messages about the run travel by gloo, over the interface of GLOO_SOCKET_IFNAME, or else over the one that leads to the first rank.
    Gradients do too, or with `backend` "nccl" by NCCL; None: by NCCL if every rank has its own GPU.
    Raises ValueError for "nccl" where one has none, RuntimeError where the ranks do not find each other within `timeout_s`.
    """
    rank, ranks = int(os.environ["RANK"]), world_size()
    interface = os.environ.get("GLOO_SOCKET_IFNAME") or _interface(ranks)
    if interface:
        os.environ["GLOO_SOCKET_IFNAME"] = interface
    try:
        dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_s))
    except RuntimeError as error:
        raise RuntimeError(
            f"rank {rank} of {ranks} does not reach all others within {timeout_s:g} s over interface {interface or 'of the host name'}: "
            f"{error}; set GLOO_SOCKET_IFNAME to the interface that connects the hosts, or raise --timeout"
        ) from error
    try:
        yield _hosts(rank, ranks, interface or "", timeout_s, backend)
    finally:
        with suppress(Exception):  # after a failure there may be nothing left to close
            dist.destroy_process_group()


def _interface(ranks: int) -> str | None:
    """Return the interface towards the rank at which all meet."""
    meeting = os.environ["MASTER_ADDR"]
    several = int(os.environ.get("LOCAL_WORLD_SIZE", ranks)) < ranks
    return interface_towards(meeting, elsewhere=several and not _loopback(meeting))


def _loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _hosts(rank: int, ranks: int, interface: str, timeout_s: float, backend: Backend | None) -> Hosts:
    """Find out together how many hosts there are, and what each rank has to itself."""
    local = int(os.environ.get("LOCAL_RANK", rank))
    has_gpu = torch.cuda.is_available() and local < torch.cuda.device_count()
    found: list[Any] = [None] * ranks  # Any: what is gathered
    dist.all_gather_object(found, (_stack(), interface, has_gpu, speed_bits_per_s(interface)))
    stacks, interfaces, gpus, speeds = zip(*found, strict=True)
    without = [each for each, gpu in enumerate(gpus) if not gpu]
    if backend == "nccl" and without:
        raise ValueError(f"nccl needs a GPU for each rank, ranks {without} have none; give --backend gloo")
    backend = backend or ("gloo" if without else "nccl")
    # Ranks of one host talk over loopback, whatever their interface; what NCCL uses is not known.
    own = backend == "gloo" and len(set(stacks)) == ranks and LOOPBACK not in interfaces and _counted(interface)
    owners = torch.tensor([own], dtype=torch.uint8)
    dist.all_reduce(owners, dist.ReduceOp.MIN)
    device, group = "cpu", None
    if backend == "nccl":
        torch.cuda.set_device(local)
        made = dist.new_group(backend="nccl", timeout=timedelta(seconds=timeout_s))
        assert isinstance(made, dist.ProcessGroup)
        device, group = f"cuda:{local}", made
    place = Place(rank, ranks, interface, bool(owners), timeout_s, device, group)
    text = _network(Counter(stacks), sorted(set(interfaces)), backend, speeds)
    store: Any = dist.distributed_c10d._get_default_store()
    return Hosts(
        place, text, len(set(stacks)), store.clone()
    )  # a separate connection: the other one may be inside a wait


def _stack() -> str:
    """Return what is the same for all processes with this network stack, and differs elsewhere."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/net').readlink()}"
    return os.uname().nodename


def _counted(interface: str) -> bool:
    """Return whether the kernel counts the traffic of `interface` where this process can read it."""
    try:
        interface_counters(interface)
    except (ValueError, OSError):
        return False
    return True


def _network(stacks: Counter[str], interfaces: list[str], backend: Backend, speeds: tuple[float | None, ...]) -> str:
    """Return over what the ranks talk, without names that tell whose hosts these are."""
    if len(stacks) == 1 and backend == "gloo":
        return ""
    per_host = sorted(set(stacks.values()))
    ranks = "1 rank" if per_host == [1] else f"{'-'.join(map(str, per_host))} ranks"
    hosts = f"{len(stacks)} {'host' if len(stacks) == 1 else 'hosts'} of {ranks}"
    if backend == "nccl":
        return f"{hosts}, NCCL"
    known = sorted({speed for speed in speeds if speed})
    rate = f" at {'-'.join(f'{speed / 1e9:g}' for speed in known)} Gbit/s" if known else ""
    return f"{hosts}, gloo over {', '.join(name or 'an unknown interface' for name in interfaces)}{rate}"


def _disagreement(found: list[dict[str, str] | str]) -> str | None:
    """Return the first error of a rank, or the first text in which two ranks differ; None where all agree."""
    for rank, own in enumerate(found):
        if isinstance(own, str):
            return f"rank {rank}: {own}" if rank else own
    first = found[0]
    assert isinstance(first, dict)
    for rank, own in enumerate(found):
        assert isinstance(own, dict)
        for key in {**first, **own}:
            here, there = first.get(key, "nothing"), own.get(key, "nothing")
            if here != there:
                return (
                    f"ranks differ in {key}: rank 0 has {here}, rank {rank} has {there}; start all ranks with the same command, and "
                    "install the same version of everything on all hosts"
                )
    return None


def _told(rank: int, error: BaseException) -> str:
    text = str(error).partition("\nAt:\n")[0]  # of the stack that torch adds
    return f"rank {rank} failed: {text or type(error).__name__}"


def _follows(error: Exception) -> bool:
    """Return whether `error` says no more than that a connection is lost: another rank failed first."""
    return isinstance(error, dist.DistBackendError) or any(word in str(error) for word in ("onnection", "arrier"))


def _ignore(message: Message) -> None:
    pass
