"""Join the ranks that torchrun, or another launcher with its variables, has started on the user's hosts.

This module starts no process and builds no network; `group` does both on one machine. A failing rank reports its error, and the launcher
ends the others.
"""

import ipaddress
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from sparsync_lab.netlab.routes import LOOPBACK, interface_towards
from sparsync_lab.workers.process import Emit, Place, task_named

Backend = Literal["gloo", "nccl"]
VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def launched() -> bool:
    """Tell whether a launcher has started this process as one of several ranks."""
    return all(name in os.environ for name in VARIABLES)


def world_size() -> int:
    """Return the number of ranks that the launcher started."""
    return int(os.environ["WORLD_SIZE"])


@dataclass(frozen=True)
class Hosts:
    """This rank among all, and a description of the network; "" if all ranks are on one host and use the CPU."""

    place: Place
    network: str
    count: int  # of hosts: network stacks

    def agree(self, texts: Mapping[str, str]) -> None:
        """Raise ValueError on all ranks if they differ in one of these texts. Collective."""
        found: list[Any] = [None] * self.place.ranks  # Any: what is gathered
        dist.all_gather_object(found, dict(texts))
        if (problem := _disagreement(found)) is not None:
            raise ValueError(problem)

    @property
    def leads(self) -> bool:
        """Whether this process, rank 0, shows and writes the results."""
        return self.place.rank == 0

    @property
    def device(self) -> str:
        return self.place.device

    def run(self, task: str, spec: Mapping[str, Any], take: Emit) -> None:  # Any: JSON
        """Run `task`, "package.module:function", on all ranks; rank 0 passes its messages to `take`. Collective."""
        task_named(task)(spec, self.place, take if self.leads else lambda message: None)
        dist.barrier()  # a leaving rank closes connections that others may still use


@contextmanager
def joined(timeout_s: float) -> Iterator[Hosts]:
    """Join the launcher's process group for the block. Collective over all ranks.

    Messages use gloo, over the interface GLOO_SOCKET_IFNAME, or else over the one that leads to the first rank. So do gradients, unless
    every rank has its own GPU: then they use NCCL. Raises RuntimeError if the ranks do not find each other within `timeout_s`.
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
        yield _hosts(rank, ranks, interface or "", timeout_s)
    finally:
        with suppress(Exception):  # a failure may have closed it already
            dist.destroy_process_group()


def _interface(ranks: int) -> str | None:
    """Find the interface towards the rank at which all meet."""
    meeting = os.environ["MASTER_ADDR"]
    several = int(os.environ.get("LOCAL_WORLD_SIZE", ranks)) < ranks
    return interface_towards(meeting, elsewhere=several and not _loopback(meeting))


def _loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _hosts(rank: int, ranks: int, interface: str, timeout_s: float) -> Hosts:
    """Determine together how many hosts there are, and which resources each rank has to itself."""
    local = int(os.environ.get("LOCAL_RANK", rank))
    has_gpu = torch.cuda.is_available() and local < torch.cuda.device_count()
    found: list[Any] = [None] * ranks  # Any: what is gathered
    dist.all_gather_object(found, (_stack(), interface, has_gpu))
    stacks, interfaces, gpus = zip(*found, strict=True)
    backend: Backend = "nccl" if all(gpus) else "gloo"
    # Ranks of one host use loopback, whatever their interface; NCCL's choice is unknown.
    counted = bool(interface) and Path("/sys/class/net", interface).exists()  # no list of interfaces
    own = backend == "gloo" and len(set(stacks)) == ranks and LOOPBACK not in interfaces and counted
    owners = torch.tensor([own], dtype=torch.uint8)
    dist.all_reduce(owners, dist.ReduceOp.MIN)
    device, group = "cpu", None
    if backend == "nccl":
        torch.cuda.set_device(local)
        made = dist.new_group(backend="nccl", timeout=timedelta(seconds=timeout_s))
        assert isinstance(made, dist.ProcessGroup)
        device, group = f"cuda:{local}", made
    place = Place(rank, ranks, interface, bool(owners), timeout_s, device, group)
    text = _network(Counter(stacks), sorted(set(interfaces)), backend)
    return Hosts(place, text, len(set(stacks)))


def _stack() -> str:
    """Return a text that identifies this network stack."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/net').readlink()}"
    return os.uname().nodename


def _network(stacks: Counter[str], interfaces: list[str], backend: Backend) -> str:
    """Describe the network between the ranks, without names that identify the hosts."""
    if len(stacks) == 1 and backend == "gloo":
        return ""
    hosts = f"{len(stacks)} {'host' if len(stacks) == 1 else 'hosts'}"
    return f"{hosts}, NCCL" if backend == "nccl" else f"{hosts}, gloo over {', '.join(filter(None, interfaces))}"


def _disagreement(found: list[dict[str, str]]) -> str | None:
    """Describe the first text in which two ranks differ; None if all agree."""
    first = found[0]
    for rank, own in enumerate(found):
        for key in {**first, **own}:
            here, there = first.get(key, "nothing"), own.get(key, "nothing")
            if here != there:
                return (
                    f"ranks differ in {key}: rank 0 has {here}, rank {rank} has {there}; start all ranks with the same command, and "
                    "install the same version of everything on all hosts"
                )
    return None
