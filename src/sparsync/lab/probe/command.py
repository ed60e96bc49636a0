"""`sparsync probe`: the ranks are started here, each at its own link, or a launcher has started them. Rank 0 prints and writes."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Protocol

from sparsync.lab import environment
from sparsync.lab.extra import lab_extra
from sparsync.lab.netlab import network, parse_link
from sparsync.lab.probe.task import Request, probe
from sparsync.lab.workers.group import worker_group
from sparsync.lab.workers.hosts import Backend, joined
from sparsync.lab.workers.process import Message
from sparsync.lab.workloads.base import Workload
from sparsync.lab.writable import check_file
from sparsync.predict import probe_file


def probe_here(request: Request, ranks: int, link: str, out: Path) -> None:
    """Measure `ranks` ranks of this machine over emulated links, print a table and write the file.

    Raises ValueError for what cannot be measured, RuntimeError where the file cannot be written, the network cannot be built or a rank
    fails.
    """
    request.check(ranks)
    check_file(out)
    rate = parse_link(link)
    with (
        network(ranks, rate) as links,
        worker_group("sparsync.lab.probe.task:probe", asdict(request), links, request.timeout_s) as workers,
        _shown() as display,
    ):
        content = [content for message in workers.messages() if (content := _taken(message, display)) is not None]
    _finish(content[-1], out)


def probe_on_hosts(request: Request, backend: Backend | None, out: Path) -> None:
    """Measure the ranks that a launcher has started; each of them calls this. Raises on all where one of them fails."""

    def checked() -> tuple[Workload | None, Mapping[str, str]]:
        plain = {f"the setting {key}": repr(value) for key, value in asdict(request).items()}
        workload = request.check(hosts.place.ranks)
        if hosts.place.rank == 0:
            check_file(out)
        return workload, {**plain, "the code of sparsync": environment.code_digest()}

    content: list[str] = []
    with joined(request.timeout_s, backend) as hosts:
        hosts.agree(checked)
        spec = asdict(replace(request, link=hosts.network or "loopback", hosts=hosts.count))
        if hosts.place.rank:
            hosts.run(probe, spec, lambda message: None, lambda why: None)
            return
        with _shown() as display:

            def take(message: Message) -> None:
                content.extend(each for each in [_taken(message, display)] if each is not None)

            hosts.run(probe, spec, take, lambda why: None)
    _finish(content[-1], out)


def _taken(message: Message, display: "_Display") -> str | None:
    if message["kind"] == "progress":
        display.at(message["text"], message["done"])
    return message["content"] if message["kind"] == "probe" else None


def _finish(content: str, out: Path) -> None:
    found = probe_file.parse(content)
    _print(found)
    probe_file.write(found, out)
    print(f"Written to {out}")


class _Display(Protocol):
    def at(self, text: str, done: float) -> None: ...


@contextmanager
def _shown() -> Iterator[_Display]:
    """Yield a progress bar on standard error where that is a terminal, else a line for each thing that is measured."""
    if not sys.stderr.isatty():
        yield _Lines()
        return
    with lab_extra("rich"):
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
    columns = (BarColumn(bar_width=24), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True)) as bars:
        yield _Bar(bars)


class _Lines:
    def at(self, text: str, done: float) -> None:
        print(f"{done:4.0%}  {text}", file=sys.stderr, flush=True)


class _Bar:
    def __init__(self, bars: Any) -> None:  # Any: rich's Progress, imported late
        self._bars, self._task = bars, bars.add_task("", total=1.0)

    def at(self, text: str, done: float) -> None:
        self._bars.update(self._task, completed=done, description=text)


def _print(found: probe_file.Probe) -> None:
    with lab_extra("rich"):
        from rich.console import Console
        from rich.table import Table
    console = Console()
    group = found.group
    hosts = f"{group.hosts} host{'s' if group.hosts > 1 else ''}"
    console.print(
        f"{group.ranks} ranks on {hosts}, {group.backend}, {group.link}, {group.cores} cores", highlight=False
    )
    table = Table(title="Each rank sends", title_justify="left", box=None, header_style="")
    for head in ("operation", "bytes", "ms", "p20", "p80", "MB/s"):
        table.add_column(head, justify="left" if head == "operation" else "right")
    for each in found.operation:
        times = (f"{1e3 * value:.3g}" for value in (each.seconds, each.p20_s, each.p80_s))
        table.add_row(each.kind, str(each.nbytes), *times, f"{each.nbytes / each.seconds / 1e6:.3g}")
    console.print(table)
    latency = found.latency
    figures = {
        "round trip, us": f"{1e6 * latency.round_trip_s:.3g} (slowest pair {1e6 * latency.slowest_round_trip_s:.3g})",
        "one more message, us": f"{1e6 * latency.per_message_s:.3g}",
        "messages a rank sends in a second": f"{latency.messages_per_s:.3g}",
        "announcement of a bucket, us": f"{1e6 * latency.announce_s:.3g}",
        "memory, plain pass, GB/s": f"{1e-9 * found.memory.bytes_per_s:.3g}",
        **{
            f"{each.kind}, million elements/s, and us a call": f"{1e-6 * each.elements_per_s:.3g}, {1e6 * each.fixed_s:.3g}"
            for each in found.kernel
        },
    }
    backward = found.backward
    if backward is not None:
        times = (backward.forward_s, backward.backward_s, backward.optimizer_s)
        figures[f"{backward.job}: forward, backward, optimizer, ms"] = ", ".join(f"{1e3 * each:.3g}" for each in times)
        ready = ", ".join(f"{1e3 * each.ready_s:.3g} ({each.elements})" for each in backward.bucket)
        figures["buckets ready after ms (elements)"] = ready
    rows = Table(show_header=False, box=None)
    for name, value in figures.items():
        rows.add_row(name, value)
    console.print(rows)
    counts = sorted({bucket.elements for each in found.scheme for bucket in each.bucket})
    if not counts:
        return
    buckets = Table(
        title="Milliseconds of a bucket of so many elements", title_justify="left", box=None, header_style=""
    )
    buckets.add_column("scheme", overflow="fold")
    for count in counts:
        buckets.add_column(str(count), justify="right")
    for each in found.scheme:
        known = {bucket.elements: f"{1e3 * bucket.seconds:.3g}" for bucket in each.bucket}
        buckets.add_row(each.scheme, *(known.get(count, "") for count in counts))
    console.print(buckets)
